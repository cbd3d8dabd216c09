"""A run that is taken for some steps to be looked at: what is found out about it once, for all checks."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

from ptfast.config.checks.rules import check_batch
from ptfast.config.schema import Config
from ptfast.core.distributed import Ranks
from ptfast.core.errors import PtfastError, one_line
from ptfast.core.machine import ROOT, is_memory_error
from ptfast.core.protocols import StepBatch
from ptfast.core.tensors.trees import tensors_in
from ptfast.data.build_data import Source
from ptfast.data.map_source import MapSource
from ptfast.data.sources.image_files import ImageFiles
from ptfast.measure.audit.finding import Trial, code_place
from ptfast.measure.audit.traces import CallTrace, OperatorTrace, cuda_syncs
from ptfast.measure.experiment.segments import ProcessorTimes
from ptfast.profiling.step_phases import Phases, watched
from ptfast.report.terminal.display import Display
from ptfast.run import Run
from ptfast.techniques.backend.torch_settings import resolve_device
from ptfast.training.build import build
from ptfast.training.stages.data_stage import build_choice, load_data
from ptfast.training.step import Trainer
from ptfast.training.user_code import naming_user_code

LEAST_STEPS, MOST_STEPS, STEPS_S = 3, 30, 2.0
"""Steps that are timed: as many as `STEPS_S` takes, within these bounds."""
CALL_STEPS = 2
"""Steps whose calls are traced."""
ENDLESS = 2**31


@dataclass
class TimedSteps:
    """What some steps of training show."""

    step_s: float
    waiting: float
    """Share of the time in which the model waited for a batch."""
    shapes: set[Any]
    others_cores: float
    """Cores that other processes took meanwhile; 0 where the system does not say."""
    throttled: bool
    """The processors were slowed down by heat meanwhile."""


@dataclass
class AuditContext:
    """A run, and what some of its steps have shown: the first warms up, some are timed, and some traced."""

    config: Config
    run: Run
    source: Source
    """Its training data."""
    batch: Any
    """A micro-batch as the task takes it."""
    device_type: str
    samples: SampleTrace | None
    """None for a stream, of which no sample is taken for nothing."""
    steps: TimedSteps
    calls: CallTrace
    """Of `CALL_STEPS` steps."""
    operators: OperatorTrace
    syncs: dict[str, int]
    """Waits for a CUDA device by place, of as many steps."""
    unused: list[str]
    """Parameters that train and got no gradient in any step."""
    evaluation: CallTrace
    """Of a batch that is evaluated."""
    aids: dict[str, list[str]]
    """Debugging aids of torch that were on, and where they were turned on."""
    graph_breaks: Mapping[str, int]
    """By reason; none where nothing is compiled."""
    untraced: str | None
    """Why operators could not be traced; None where they were."""
    take_step: Callable[[], object]
    """Trains one step more, and waits for it."""

    def trial(self, mended: Callable[[], AbstractContextManager[Any]]) -> Trial:
        """The trial of a step as it is, and of one inside `mended()`."""

        def take_mended_step() -> None:
            with mended():
                self.take_step()

        return lambda: (self.take_step, take_mended_step)


@contextmanager
def audit_context(config: Config, folder: Path, display: Display) -> Iterator[AuditContext]:
    """Build the run of `config` in `folder` and train it for some steps to see what they do."""
    ranks = Ranks()
    device = resolve_device(config.device, ranks)
    micro_batches = check_batch(config.batch_size, config.micro_batches, 1, config.gradients.accumulate)
    data = load_data(config, ranks, build_choice(config, micro_batches, device))
    run = build(config, ranks=ranks, folder=folder, display=display, data=data)
    try:
        with naming_user_code(run), display.status("training for some steps"):
            yield _examine(config, run, data.train)
    finally:
        run.close()


def _examine(config: Config, run: Run, source: Source) -> AuditContext:
    run.total_steps = ENDLESS
    breaks_before = _graph_breaks() if run.compilation is not None else Counter[str]()
    run.call_back("on_start")
    trainer = Trainer(run)
    aids = trainer.first_look.switches.found
    seen: dict[str, Any] = {}
    batches = _keeping(run.clock.waiting(run.train_loader.steps(0, ENDLESS)), seen)
    with _noting_gradchecks(aids):
        batches = trainer.warm_up(batches)
        if run.compilation is not None:
            run.compilation.start(0.0)
        _take_step(run, trainer, batches)
        trainer.first_look.switches.look()
    steps = _time_steps(run, trainer, batches, seen)
    breaks = _graph_breaks() - breaks_before if run.compilation is not None else {}
    trained: set[str] = set()
    calls, syncs = CallTrace(run.device.type), dict[str, int]()
    with _noting_gradients(run.model, trained), run.uncompiled():
        # Operators are traced in another step, so that a GPU's queue is as full as ever.
        with cuda_syncs() if run.device.type == "cuda" else nullcontext(syncs) as syncs, calls:
            trainer.train(batches, run.progress.step + CALL_STEPS)
        operators, untraced = _trace_operators(run, trainer, batches)
    with run.uncompiled():
        evaluation = _trace_evaluation(run, seen["batch"])

    return AuditContext(
        config=config,
        run=run,
        source=source,
        batch=seen["batch"],
        device_type=run.device.type,
        samples=trace_samples(source)
        if isinstance(source, MapSource) and source.storage != "memory"
        else None,
        steps=steps,
        calls=calls,
        operators=operators,
        syncs=syncs,
        unused=[name for name, p in run.model.named_parameters() if p.requires_grad and name not in trained],
        evaluation=evaluation,
        aids=aids,
        graph_breaks=breaks,
        untraced=untraced,
        take_step=partial(_take_step, run, trainer, batches),
    )


def _take_step(run: Run, trainer: Trainer, batches: Iterator[StepBatch]) -> None:
    """Train one step, and wait for the device."""
    trainer.train(batches, run.progress.step + 1)
    trainer.window.read()


def _keeping(batches: Iterator[StepBatch], seen: dict[str, Any]) -> Iterator[StepBatch]:
    """The same batches; keeps the newest's first micro-batch as `batch`, and the `shapes` of all inputs."""
    shapes = seen.setdefault("shapes", set())
    for batch in batches:
        seen["batch"] = batch.micro_batches[0].data
        shapes.add(tuple(tuple(tensor.shape) for tensor in tensors_in(seen["batch"])))
        yield batch


def _time_steps(run: Run, trainer: Trainer, batches: Iterator[StepBatch], seen: dict[str, Any]) -> TimedSteps:
    seen["shapes"].clear()
    before, throttled = ProcessorTimes.read(), _throttle_counts()
    waited_s, start = -run.clock.ledger()["data"], time.perf_counter()
    first = run.progress.step
    while (num := run.progress.step - first) < LEAST_STEPS or (
        num < MOST_STEPS and time.perf_counter() - start < STEPS_S
    ):
        _take_step(run, trainer, batches)
    took_s, waited_s = time.perf_counter() - start, waited_s + run.clock.ledger()["data"]
    after = ProcessorTimes.read()
    outside = before.until(after, after.own_s - before.own_s)
    return TimedSteps(
        step_s=took_s / num,
        waiting=waited_s / took_s,
        shapes=set(seen["shapes"]),
        others_cores=outside["others_cores"] or 0.0,
        throttled=_throttle_counts() > throttled or _gpu_is_slowed(run.device),
    )


def _trace_operators(
    run: Run, trainer: Trainer, batches: Iterator[StepBatch]
) -> tuple[OperatorTrace, str | None]:
    """The operators of one forward pass, and why they cannot be traced where a model forbids it."""
    calls = CallTrace(run.device.type)
    operators = OperatorTrace(run.model, calls)

    def record(phase: str, *, on: bool) -> None:
        if phase == "forward":
            operators.recording = on

    phases = Phases(partial(record, on=True), partial(record, on=False))
    try:
        with watched(run, phases), operators.naming_modules(), calls, operators:
            trainer.train(batches, run.progress.step + 1)
    except Exception as error:
        if isinstance(error, PtfastError) or is_memory_error(error):
            raise
        return operators, f"{type(error).__name__}: {one_line(str(error))}"
    finally:
        operators.recording = False
    return operators, None


def _trace_evaluation(run: Run, batch: Any) -> CallTrace:
    calls = CallTrace(run.device.type)
    metrics = run.task.metrics().to(run.device)
    run.forward.eval()
    try:
        with torch.no_grad(), run.precision.autocast, calls:
            run.task.evaluate(run.model, batch, metrics)
    finally:
        run.forward.train()
    return calls


@contextmanager
def _noting_gradients(model: nn.Module, names: set[str]) -> Iterator[None]:
    """Add to `names` the parameters that get a gradient inside."""
    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: names.add(name))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _noting_gradchecks(aids: dict[str, list[str]]) -> Iterator[None]:
    """Add `gradcheck` to `aids`, with its place, where torch's is called inside."""
    module: Any = sys.modules["torch.autograd.gradcheck"]
    check = module._gradcheck_helper

    def noting(*args: Any, **kwargs: Any) -> Any:
        aids.setdefault("gradcheck", list(filter(None, [code_place()])))
        return check(*args, **kwargs)

    with mock.patch.object(module, "_gradcheck_helper", noting):
        yield


def _graph_breaks() -> Counter[str]:
    """How often compiling was broken off in this process, by torch's reason in a line."""
    dynamo: Any = sys.modules["torch._dynamo.utils"]
    breaks = dynamo.counters["graph_break"].items()
    return Counter({str(reason).splitlines()[0]: count for reason, count in breaks})


def _throttle_counts() -> int:
    """How often the system has slowed its processors down for heat; 0 where it does not say."""
    files = (ROOT / "sys/devices/system/cpu").glob("cpu*/thermal_throttle/*_throttle_count")
    return sum(int(text) for file in files if (text := file.read_text().strip()).isdigit())


def _gpu_is_slowed(device: torch.device) -> bool:
    """True if a GPU's clocks are held down for heat or power, by its driver's own account."""
    if device.type != "cuda" or (tool := shutil.which("nvidia-smi")) is None:
        return False
    reasons = "clocks_event_reasons.hw_slowdown", "clocks_event_reasons.sw_thermal_slowdown"
    command = [tool, f"--query-gpu={','.join(reasons)}", "--format=csv,noheader", f"--id={device.index or 0}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    return " Active" in f" {done.stdout}"


NUM_SAMPLES = 32


@dataclass(frozen=True)
class SampleTrace:
    """What fetching some samples one after another shows."""

    num_samples: int
    seconds: float
    decoding_s: float
    """Of that, in decoders of images."""
    calls: CallTrace


def trace_samples(source: MapSource) -> SampleTrace:
    """Fetch some samples from all over the data as a loader does, and watch what it takes."""
    indices = np.linspace(0, len(source) - 1, min(len(source), NUM_SAMPLES)).astype(np.int64)
    source.fetch(indices[:1])
    calls = CallTrace("cpu")
    with _timing_decoders() as decoding, calls:
        start = time.perf_counter()
        source.fetch(indices)
        seconds = time.perf_counter() - start
    # To fetch images of ours is to decode them.
    decoding_s = seconds if isinstance(source, ImageFiles) else decoding[0]
    return SampleTrace(len(indices), seconds, decoding_s, calls)


@contextmanager
def _timing_decoders() -> Iterator[list[float]]:
    """Add up the seconds inside PIL's and torchvision's decoders, where they are in use."""
    spent = [0.0]
    image_file, io = sys.modules.get("PIL.ImageFile"), sys.modules.get("torchvision.io")
    places: list[tuple[Any, str]] = [(image_file.ImageFile, "load")] if image_file else []
    places += [(io, name) for name in ("decode_image", "decode_jpeg", "decode_png", "read_image") if io]

    def timing(decode: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return decode(*args, **kwargs)
            finally:
                spent[0] += time.perf_counter() - start

        return timed

    with ExitStack() as stack:
        for owner, name in places:
            stack.enter_context(mock.patch.object(owner, name, timing(getattr(owner, name))))
        yield spent
