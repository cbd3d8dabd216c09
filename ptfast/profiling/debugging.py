"""Debugging aids (`debug=...`), which slow training down."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ptfast.core.errors import ConfigError, NumericsError
from ptfast.core.machine import held_memory_bytes, peak_memory_bytes
from ptfast.core.run_directory import write_text
from ptfast.core.tensors.trees import tree_leaves, tree_map
from ptfast.profiling.step_phases import PHASES, Phases, SavedKinds, saved_for_backward, watched
from ptfast.run import Run

Mode = Literal["none", "anomaly", "profiler", "nvtx", "gradcheck", "memory"]
TorchCheck = Literal["none", "gradcheck", "gradgradcheck"]
TRACE, PROFILE = "trace.json", "profile.txt"
"""Files in the run directory: all events, and the table of torch.profiler."""
MEMORY, SNAPSHOT = "memory.txt", "memory.pickle"
"""Files in the run directory: a table and, on a GPU, a snapshot for pytorch.org/memory_viz."""
TOP = 10
"""Operators, or kinds of tensors, that the terminal shows."""
SAMPLE_S = 0.001
"""Sampling interval of memory."""
NUM_SAMPLES, NUM_DIRECTIONS = 4, 3
STEPS = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
"""Lengths of a finite difference, relative to the weights. Short ones are exact until rounding shows. Which
is best depends on what the model computes in float32 although it is given float64."""
WRONG_GRADIENT = "Look for a custom backward, .data or .detach() in the model or the loss"
TOLERANCE = 1e-3
"""Largest relative error of a correct gradient; wrong ones differ in the first digits."""


@contextmanager
def debugging(
    mode: Mode,
    run: Run | None = None,
    *,
    wait: int = 0,
    warmup: int = 0,
    active: int = 1,
    torch_check: TorchCheck = "none",
    operators: bool = False,
) -> Iterator[None]:
    """A context in which training is checked or recorded as `mode` says.

    `anomaly` stops at the first backward function that returns NaN and names it; the traceback of its forward
    call goes to standard error. Cost: steps take several times as long.

    `profiler` records operators in some steps: a trace for chrome://tracing or ui.perfetto.dev, and a table.
    Cost: those steps take up to twice as long, others are unaffected.

    `nvtx` marks the phases of every step for NVIDIA's Nsight Systems; `operators` also marks every operator
    of forward and backward. Cost: some microseconds for each mark.

    `gradcheck` compares the gradient of the loss with finite differences before training starts, in float64
    on a few samples. Cost: some thirty forward passes of those samples. `torch_check` adds torch's checks.

    `memory` reports how much memory the phases of some steps take, and what the forward pass keeps for the
    backward pass; on a GPU it also writes a snapshot for pytorch.org/memory_viz. Cost: a thread that samples
    every millisecond, and a Python call for every tensor that is kept.
    """
    if mode == "anomaly":
        try:
            with torch.autograd.set_detect_anomaly(True, check_nan=True):
                yield
        except RuntimeError as error:
            if "returned nan values" not in str(error):
                raise
            raise NumericsError("N001", f"backward pass: {error}") from error
        return
    if mode == "none" or run is None:
        yield
        return
    steps_left, needed = run.total_steps - run.progress.step, wait + warmup + active
    if mode in ("profiler", "memory") and steps_left < needed:
        what = f"only {steps_left} steps are left to train, and debug={mode} takes {needed}"
        hint = "Lower debug.wait, debug.warmup or debug.active, or train longer"
        raise ConfigError("C011", what, key="debug", value=mode, suggestion=hint)
    if mode == "gradcheck":
        with run.display.status("checking gradients"):
            error = check_gradients(run)
            if torch_check != "none":
                check_by_torch(run, twice=torch_check == "gradgradcheck")
        passed = f"; torch's {torch_check} passes" if torch_check != "none" else ""
        run.display.note(f"gradcheck: gradients match the loss to a relative error of {error:.1e}{passed}")
        yield
    elif mode == "nvtx":
        phases = Phases(torch.cuda.nvtx.range_push, lambda _: torch.cuda.nvtx.range_pop())
        with watched(run, phases), torch.autograd.profiler.emit_nvtx(enabled=operators):
            yield
    elif not run.ranks.is_first:
        yield
    elif mode == "profiler":
        with _profiled(run, wait=wait, warmup=warmup, active=active):
            yield
    else:
        memory = _Memory(run, wait + warmup, active)
        with watched(run, memory), contextlib.closing(memory):
            yield


@contextmanager
def _profiled(run: Run, *, wait: int, warmup: int, active: int) -> Iterator[None]:
    """Record operators in steps `wait + warmup` to `wait + warmup + active` of what is trained inside."""
    # The profiler's library writes to standard error when it starts, stops, and finds no GPU.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from torch import profiler

    activities = [profiler.ProfilerActivity.CPU]
    if run.device.type == "cuda":
        activities.append(profiler.ProfilerActivity.CUDA)

    def write(profile: Any) -> None:
        averages = profile.key_averages()
        sort_by = "self_device_time_total" if run.device.type == "cuda" else "self_cpu_time_total"
        profile.export_chrome_trace(str(run.folder / TRACE))
        write_text(run.folder / PROFILE, averages.table(sort_by=sort_by, row_limit=100))
        lines.extend(_top_operators(averages, sort_by, active))

    class ProfiledSteps(Phases):
        def on_step(self, run: Any, step: int) -> None:
            profile.step()

    lines: list[str] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Profiler won't be using warmup")
        schedule = profiler.schedule(wait=wait, warmup=warmup, active=active, repeat=1)
    opened = contextlib.ExitStack()
    phases = ProfiledSteps(
        lambda name: opened.enter_context(profiler.record_function(name)), lambda _: opened.close()
    )
    recording = profiler.profile(activities=activities, schedule=schedule, on_trace_ready=write)
    with recording as profile, watched(run, phases):
        yield
    for line in lines:
        run.display.note(line)


def _top_operators(averages: Any, sort_by: str, active: int) -> list[str]:
    """Lines for the terminal: the phases, then the operators that take the most time."""
    phases = {event.key: event.cpu_time_total for event in averages if event.key in PHASES}
    whole = sum(phases.values()) or 1
    operators = [event for event in averages if event.key not in PHASES and "ProfilerStep" not in event.key]
    operators.sort(key=lambda event: getattr(event, sort_by), reverse=True)
    total = sum(getattr(event, sort_by) for event in operators) or 1
    shares = ", ".join(f"{name} {phases.get(name, 0) / whole:.0%}" for name in PHASES)
    lines = [f"profiler: {active} steps in {PROFILE} and {TRACE}; time of the host: {shares}"]
    for event in operators[:TOP]:
        time, calls = getattr(event, sort_by), f"{event.count / active:6g} calls"
        lines.append(f"  {time / total:4.0%}  {time / active / 1000:9.3f} ms a step  {calls}  {event.key}")
    return lines


class _Memory(Phases):
    """Samples the peak memory of each phase, and what forward keeps for backward, in some steps."""

    def __init__(self, run: Run, wait: int, active: int) -> None:
        super().__init__(self._enter, self._leave)
        self.run, self.first, self.last = run, run.progress.step + wait, run.progress.step + wait + active
        self.peaks: Counter[str] = Counter()
        self.saved: SavedKinds = {}
        self.saving = saved_for_backward(run.model, self.saved)
        self.kinds: Counter[tuple[torch.dtype, tuple[int, ...]]] = Counter()
        self.sampling = False
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._sample, daemon=True)
        self.on_step(run, run.progress.step)

    def on_step(self, run: Any, step: int) -> None:
        if self.sampling and step >= self.last:
            self.close()
        if step == self.first and not self.ended.is_set():
            self.sampling = True
            if self.run.device.type == "cuda":
                torch.cuda.memory._record_memory_history(max_entries=200_000)
            self.thread.start()

    def _enter(self, name: str) -> None:
        if self.sampling and name == "forward":
            self.saved.clear()
            self.saving.__enter__()

    def _leave(self, name: str) -> None:
        if not self.sampling:
            return
        self._note(name)
        if name == "forward":
            self.saving.__exit__(None, None, None)
            kinds: Counter[tuple[torch.dtype, tuple[int, ...]]] = Counter()
            for dtype, shape, size in self.saved.values():
                kinds[dtype, shape] += size
            self.kinds = max(self.kinds, kinds, key=Counter.total)

    def _sample(self) -> None:
        while not self.ended.wait(SAMPLE_S):
            if (name := self.name) is not None:
                self._note(name)

    def _note(self, name: str) -> None:
        if self.run.device.type == "cuda":
            used_bytes = torch.cuda.memory_allocated(self.run.device)
        else:
            # Not every system reports what a process holds now.
            used_bytes = held_memory_bytes("cpu") or peak_memory_bytes("cpu")
        self.peaks[name] = max(self.peaks[name], used_bytes)

    def close(self) -> None:
        """Stop sampling, and write and show the results. Safe to call twice."""
        if not self.sampling:
            return
        self.sampling = False
        self.ended.set()
        self.thread.join()
        lines = [f"memory: peaks of {self.last - self.first} steps, by phase"]
        lines += [f"  {self.peaks[name] / 2**20:9,.1f} MiB  {name}" for name in PHASES]
        kept_bytes = self.kinds.total()
        lines.append(f"  {kept_bytes / 2**20:9,.1f} MiB  kept for backward by one micro-batch, most by")
        rows = []
        for (dtype, shape), size in self.kinds.most_common():
            kind = f"{str(dtype).removeprefix('torch.')} {'x'.join(map(str, shape)) or 'scalar'}"
            rows.append(f"  {size / 2**20:9,.1f} MiB  {kind}")
        folder: Path = self.run.folder
        write_text(folder / MEMORY, "\n".join(lines + rows) + "\n")
        if self.run.device.type == "cuda":
            torch.cuda.memory._dump_snapshot(str(folder / SNAPSHOT))
            torch.cuda.memory._record_memory_history(enabled=None)
            rows.append(f"  {SNAPSHOT} is for pytorch.org/memory_viz")
        for line in lines + rows[:TOP]:
            self.run.display.note(line)


def check_gradients(run: Run) -> float:
    """The largest relative error of the loss's derivative along random directions, by finite differences.

    It uses a copy of the model and the next training batch, with fixed dropout; the run does not change.

    Cost: 30 forward passes of 4 samples; if the gradient is wrong, 10 more for every parameter.
    Source: the directional form of torch.autograd.gradcheck (its fast mode).
    """
    loss, names, parameters = _float64_loss(run)
    grads = torch.autograd.grad(loss(), parameters, allow_unused=True)
    slopes = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)]
    draws = torch.Generator().manual_seed(run.seed)
    errors = [_error(loss, parameters, slopes, _direction(parameters, draws)) for _ in range(NUM_DIRECTIONS)]
    if max(errors) <= TOLERANCE:
        return max(errors)
    worst, name = 0.0, ""
    for index, parameter in enumerate(parameters):
        only = [torch.zeros_like(p) for p in parameters]
        only[index] = _direction([parameter], draws)[0]
        error = _error(loss, parameters, slopes, only)
        if error > worst:
            worst, name = error, names[index]
    largest = f"relative error {max(errors):.1e}, worst in {name} ({worst:.1e})"
    what = f"the gradient does not match the loss: {largest}"
    raise NumericsError("N002", what, key="debug", value="gradcheck", suggestion=WRONG_GRADIENT)


def check_by_torch(run: Run, *, twice: bool) -> None:
    """Check the derivative of the loss by each parameter with torch's own functions, in float64.

    A direction through all parameters at once may hide a small error in one. `twice` also checks second
    derivatives, which gradient penalties need. Models that always compute in float32 are too coarse for this.

    Cost: about three forward and backward passes of 4 samples for every parameter, second derivatives twice.
    Source: torch.autograd.gradcheck and gradgradcheck, in their fast mode.
    """
    loss, _, parameters = _float64_loss(run)
    checks = {"gradcheck": torch.autograd.gradcheck, "gradgradcheck": torch.autograd.gradgradcheck}
    for name, check in list(checks.items())[: 2 if twice else 1]:
        try:
            # Parameters are perturbed in place, so the loss need not be given them.
            check(lambda *_: loss(), parameters, fast_mode=True, check_undefined_grad=False)
        except RuntimeError as error:
            said = " ".join(str(error).split())
            what = f"torch's {name} fails: {said[:300]}"
            raise NumericsError("N002", what, key="debug.torch_check", suggestion=WRONG_GRADIENT) from error


def _float64_loss(run: Run) -> tuple[Callable[[], Tensor], tuple[str, ...], tuple[Tensor, ...]]:
    """The loss of a float64 copy of the model on a few samples, and the parameters that it depends on."""
    step = min(run.progress.step, run.total_steps - 1)
    batches = run.train_loader.steps(step, step + 1)
    data, _ = next(micro_batch for micro_batch in next(batches).micro_batches if micro_batch.num_samples)
    device = torch.device("cpu") if run.device.type == "mps" else run.device
    size = next(len(value) for value in tree_leaves(data) if isinstance(value, Tensor) and value.dim())

    def few(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.dim() and len(value) == size:
            value = value[:NUM_SAMPLES]
        return value.to(device, torch.float64 if value.is_floating_point() else None)

    data = tree_map(few, data)
    model = copy.deepcopy(run.model).to(device, torch.float64).train()
    names, parameters = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
    kept = [(m, name, b.clone()) for m in model.modules() for name, b in m.named_buffers(recurse=False)]

    def loss() -> Tensor:
        for module, name, before in kept:
            # A copy each time: an earlier forward pass may have kept the last one for its backward pass.
            setattr(module, name, before.clone())
        run.seed_step(run.seed, step, 0)
        return run.task.loss(model, data)[0]

    return loss, names, parameters


def _direction(parameters: Sequence[Tensor], draws: torch.Generator) -> list[Tensor]:
    """Random normal numbers, scaled to each parameter's own size."""
    sizes = (p.detach().square().mean().sqrt().clamp(min=1e-3) for p in parameters)
    drawn = (torch.randn(p.shape, generator=draws, dtype=torch.float64).to(p.device) for p in parameters)
    return [d * size for d, size in zip(drawn, sizes, strict=True)]


def _error(
    loss: Callable[[], Tensor],
    parameters: Sequence[Tensor],
    slopes: Sequence[Tensor],
    direction: Sequence[Tensor],
) -> float:
    """Relative error of the derivative along `direction`, by the finite difference that fits best."""
    products = [slope * d for slope, d in zip(slopes, direction, strict=True)]
    derivative = float(sum(product.sum() for product in products))
    # The sum may be small by chance; the size of its terms says what counts as small.
    scale = max(abs(derivative), float(sum(product.square().sum() for product in products)) ** 0.5)
    start = [parameter.detach().clone() for parameter in parameters]
    errors = []
    with torch.no_grad():
        for length in STEPS:
            values = []
            for sign in (1, -1):
                for parameter, begin, d in zip(parameters, start, direction, strict=True):
                    parameter.copy_(begin + sign * length * d)
                values.append(float(loss()))
            difference = (values[0] - values[1]) / (2 * length)
            errors.append(abs(difference - derivative) / max(scale, abs(difference), 1e-300))
        for parameter, begin in zip(parameters, start, strict=True):
            parameter.copy_(begin)
    return min(errors)
