"""Debugging aids (`debug=...`), which slow training down."""

from __future__ import annotations

import contextlib
import copy
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from ptfast.core.errors import ConfigError, NumericsError
from ptfast.core.run_directory import write_text
from ptfast.core.tensors.trees import tree_leaves, tree_map
from ptfast.profiling.step_phases import PHASES, Phases, watched
from ptfast.run import Run

Mode = Literal["none", "anomaly", "profiler", "nvtx", "gradcheck"]
TRACE, PROFILE, SNAPSHOT = "trace.json", "profile.txt", "memory.pickle"
"""Files in the run directory: all events, the table of torch.profiler, and one for pytorch.org/memory_viz."""
TOP = 10
"""Number of operators shown in the terminal."""
NUM_SAMPLES, NUM_DIRECTIONS = 4, 3
STEPS = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
"""Step sizes of a finite difference, relative to the weights. Small ones are accurate until rounding shows;
the best one depends on the parts that a model computes in float32 although it gets float64."""
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
    operators: bool = False,
) -> Iterator[None]:
    """Check or record training inside this context, as `mode` says.

    `anomaly` stops at the first backward function that returns NaN and names it; the traceback of its forward
    call goes to standard error. Cost: steps take several times as long.

    `profiler` records operators and memory in some steps: a trace for chrome://tracing or ui.perfetto.dev, a
    table, and on a GPU a snapshot of its memory for pytorch.org/memory_viz. Cost: those steps take up to
    twice as long, others are unaffected.

    `nvtx` marks the phases of every step for NVIDIA's Nsight Systems; `operators` also marks every operator
    of forward and backward. Cost: some microseconds for each mark.

    `gradcheck` compares the gradient of the loss with finite differences before training starts, in float64
    on a few samples. Cost: some thirty forward passes of those samples.
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
    if mode == "profiler" and steps_left < needed:
        what = f"only {steps_left} steps are left to train, but debug=profiler needs {needed}"
        hint = "Lower debug.wait, debug.warmup or debug.active, or train longer"
        raise ConfigError("C011", what, key="debug", value=mode, suggestion=hint)
    if mode == "gradcheck":
        with run.display.status("checking gradients"):
            error = check_gradients(run)
        run.display.note(f"gradcheck: gradients match the loss to a relative error of {error:.1e}")
        yield
    elif mode == "nvtx":
        phases = Phases(torch.cuda.nvtx.range_push, lambda _: torch.cuda.nvtx.range_pop())
        with watched(run, phases), torch.autograd.profiler.emit_nvtx(enabled=operators):
            yield
    elif not run.ranks.is_first:
        yield
    else:
        with _profiled(run, wait=wait, warmup=warmup, active=active):
            yield


@contextmanager
def _profiled(run: Run, *, wait: int, warmup: int, active: int) -> Iterator[None]:
    """Record operators and memory in steps `wait + warmup` to `wait + warmup + active` of this training."""
    # The profiler's library writes to standard error when it starts, stops, and finds no GPU.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from torch import profiler

    activities, on_gpu = [profiler.ProfilerActivity.CPU], run.device.type == "cuda"
    if on_gpu:
        activities.append(profiler.ProfilerActivity.CUDA)
    begin = run.progress.step + wait + warmup

    def write(profile: Any) -> None:
        averages = profile.key_averages()
        sort_by = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        profile.export_chrome_trace(str(run.folder / TRACE))
        write_text(run.folder / PROFILE, averages.table(sort_by=sort_by, row_limit=100))
        lines.extend(_top_operators(averages, sort_by, active))
        if on_gpu:
            torch.cuda.memory._dump_snapshot(str(run.folder / SNAPSHOT))
            torch.cuda.memory._record_memory_history(enabled=None)

    def record_memory(step: int) -> None:
        if on_gpu and step == begin:
            torch.cuda.memory._record_memory_history(max_entries=200_000)

    class ProfiledSteps(Phases):
        def on_step(self, run: Any, step: int) -> None:
            record_memory(step)
            profile.step()

    lines: list[str] = []
    record_memory(run.progress.step)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Profiler won't be using warmup")
        schedule = profiler.schedule(wait=wait, warmup=warmup, active=active, repeat=1)
    opened = contextlib.ExitStack()
    phases = ProfiledSteps(
        lambda name: opened.enter_context(profiler.record_function(name)), lambda _: opened.close()
    )
    recording = profiler.profile(
        activities=activities, schedule=schedule, on_trace_ready=write, profile_memory=True
    )
    with recording as profile, watched(run, phases):
        yield
    for line in lines:
        run.display.note(line)


def _top_operators(averages: Any, sort_by: str, active: int) -> list[str]:
    """Return lines for the terminal: the phases, then the operators that take the most time."""
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


def check_gradients(run: Run) -> float:
    """Return the largest relative error of the loss's derivative along random directions.

    It uses finite differences on a copy of the model and the next batch, with fixed dropout.

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


def _float64_loss(run: Run) -> tuple[Callable[[], Tensor], tuple[str, ...], tuple[Tensor, ...]]:
    """Return the loss of a float64 copy of the model on a few samples, and the parameters it depends on."""
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
            # Copy each time: an earlier forward pass may have kept the last one for its backward pass.
            setattr(module, name, before.clone())
        run.seed_step(step, 0)
        return run.task.loss(model, data)[0]

    return loss, names, parameters


def _direction(parameters: Sequence[Tensor], draws: torch.Generator) -> list[Tensor]:
    """Return random normal numbers, scaled to the size of each parameter."""
    sizes = (p.detach().square().mean().sqrt().clamp(min=1e-3) for p in parameters)
    drawn = (torch.randn(p.shape, generator=draws, dtype=torch.float64).to(p.device) for p in parameters)
    return [d * size for d, size in zip(drawn, sizes, strict=True)]


def _error(
    loss: Callable[[], Tensor],
    parameters: Sequence[Tensor],
    slopes: Sequence[Tensor],
    direction: Sequence[Tensor],
) -> float:
    """Return the relative error of the derivative along `direction`, by the best finite difference."""
    products = [slope * d for slope, d in zip(slopes, direction, strict=True)]
    derivative = float(sum(product.sum() for product in products))
    # The sum may be small by chance; the size of its terms defines small.
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
