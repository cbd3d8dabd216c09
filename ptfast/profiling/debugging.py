"""Debugging aids (`debug=...`), which slow training down."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError, gradcheck

from ptfast.core.errors import ConfigError, NumericsError, one_line
from ptfast.core.run_directory import write_text
from ptfast.core.tensors.torch_internals import quick_gradcheck
from ptfast.core.tensors.trees import tree_leaves, tree_map
from ptfast.profiling.step_phases import Phases, watched
from ptfast.run import Run

Mode = Literal["none", "anomaly", "profiler", "nvtx", "gradcheck"]
TRACE, PROFILE, SNAPSHOT = "trace.json", "profile.txt", "memory.pickle"
"""Files in the run directory: all events, torch.profiler's table, a snapshot for pytorch.org/memory_viz."""
NUM_SAMPLES = 4
STEPS = (1e-6, 1e-4, 1e-2)
"""Step sizes of finite differences. Small ones are accurate, but parts of a model that compute in float32
despite float64 inputs need larger ones."""
WRONG_GRADIENT = "Look for a custom backward, .data or .detach() in the model or the loss"


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
    """Check or record training inside this context, depending on `mode`.

    `anomaly` stops at the first backward function that returns NaN and names it; the traceback of its forward
    call goes to standard error. Cost: steps take several times as long.

    `profiler` records operators and memory in some steps: a trace for chrome://tracing or ui.perfetto.dev, a
    table, and on a GPU a snapshot of its memory for pytorch.org/memory_viz. Cost: those steps take up to
    twice as long, others are unaffected.

    `nvtx` marks the phases of every step for NVIDIA's Nsight Systems; `operators` also marks every operator
    of forward and backward. Cost: some microseconds for each mark.

    `gradcheck` compares the gradient of the loss with finite differences before training starts, in float64
    on a few samples. Cost: at least two forward passes of those samples for each parameter.
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
            check_gradients(run)
        run.display.note("gradcheck: gradients match the loss")
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
        sort_by = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        profile.export_chrome_trace(str(run.folder / TRACE))
        write_text(run.folder / PROFILE, profile.key_averages().table(sort_by=sort_by, row_limit=100))
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
    run.display.note(f"profiler: {active} steps in {PROFILE} and {TRACE}")


def check_gradients(run: Run) -> None:
    """Compare gradients of the loss with finite differences by torch's gradcheck; raise N002 on a mismatch.

    This uses a copy of the model and the next batch, with fixed dropout.
    """
    (loss, names, parameters), where = _float64_loss(run), ""
    for eps in STEPS:
        try:
            # The loss reads the parameters where gradcheck changes them. Fast mode multiplies `atol` by the
            # root of a parameter's size. Backward passes need not be bit-equal, nor take undefined gradients.
            with quick_gradcheck():
                gradcheck(
                    lambda *_: loss(),
                    parameters,
                    eps=eps,
                    atol=1e-6,
                    rtol=1e-2,
                    nondet_tol=1e-3,
                    check_undefined_grad=False,
                    fast_mode=True,
                )
            return
        except GradcheckError as error:
            found = re.search(r"respect to input (\d+)", str(error))
            where = f": {names[int(found[1])]}" if found else f": {one_line(str(error))[:200]}"
    what = f"the gradient does not match the loss{where}"
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
