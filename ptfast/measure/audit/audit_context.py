"""The findings of an audit, and the short training run that all checks inspect."""

from __future__ import annotations

import cProfile
import pstats
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ptfast.config.schema import Config
from ptfast.core.distributed import Ranks
from ptfast.core.errors import PtfastError, one_line
from ptfast.core.machine import is_memory_error
from ptfast.core.sections.section import Kind
from ptfast.data.build_data import Source
from ptfast.data.map_source import MapSource
from ptfast.data.sources.image_files import ImageFiles
from ptfast.measure.audit.traces import CallTrace, OperatorTrace, cuda_syncs
from ptfast.measure.experiment.trial import Segments
from ptfast.measure.experiment.verdicts import Verdict
from ptfast.report.terminal.display import Display
from ptfast.run import Run
from ptfast.techniques.backend.torch_settings import resolve_device
from ptfast.training.stages.data_stage import build_choice, load_data
from ptfast.training.user_code import naming_user_code

LEAST_STEPS, MOST_STEPS, STEPS_S = 3, 30, 2.0
"""Number of timed steps: as many as fit in `STEPS_S`, within these bounds."""
CALL_STEPS, NUM_SAMPLES = 2, 32
"""Number of steps and samples whose calls are traced."""
DECODERS = ("PIL/ImageFile.py", "torchvision/io/image.py")
"""Modules that decode images."""


@dataclass(frozen=True)
class Price:
    """Seconds per step that a finding costs; a paired trial adds the interval and the verdict."""

    seconds: float
    low_s: float | None = None
    high_s: float | None = None
    verdict: Verdict | None = None

    def __str__(self) -> str:
        if self.verdict in ("no difference", "cannot tell"):
            return self.verdict
        if self.verdict == "slower":
            return f"nothing: the fix adds {-self.seconds * 1e3:.3g} ms a step"
        text = f"{self.seconds * 1e3:.3g} ms a step"
        if self.low_s is None or self.high_s is None:
            return text
        return f"{text} [{self.low_s * 1e3:.3g} to {self.high_s * 1e3:.3g}]"


@dataclass
class Finding:
    """Something that costs speed."""

    check: str
    what: str
    where: str
    """`file.py:12`, the path of a module in the model, or a config key."""
    mend: str
    """The code change, as an imperative; empty if `overrides` is the whole fix."""
    overrides: tuple[str, ...] = ()
    """Command-line overrides that fix it."""
    kind: Kind = "exact"
    """How the fix changes the result."""
    price: Price | None = None
    handled: bool = False
    """Whether the run already fixes it."""


@dataclass(frozen=True)
class SampleTrace:
    """The cost of fetching samples one by one, including `decoding_s` in image decoders."""

    num_samples: int
    seconds: float
    decoding_s: float
    calls: CallTrace


class AuditContext:
    """A run and measurements of a few steps: after a warm-up, some are timed and some are traced."""

    def __init__(self, config: Config, segments: Segments, source: Source) -> None:
        self.config, self.run, self.source = config, segments.run, source
        self._segments, run = segments, segments.run
        self.device_type = run.device.type
        breaks_before = _graph_breaks(run)
        run.call_back("on_start")
        segments.warm_up(STEPS_S)
        switches = segments.trainer.first_checks.switches
        switches.check()
        self.aids = switches.found
        """Names of torch's active debugging aids, by their value of `debug`."""
        steps = min(max(LEAST_STEPS, int(STEPS_S / segments.step_s)), MOST_STEPS)
        self.waiting = segments.train(steps, 0)["waiting"]
        """Share of the time spent waiting for a batch."""
        self.graph_breaks = _graph_breaks(run) - breaks_before
        """Counts by reason; empty if nothing is compiled."""
        self.calls = CallTrace(run.device.type)
        """Calls in `CALL_STEPS` steps; waits for a CUDA device are counted over the same steps, by place."""
        waits = cuda_syncs() if run.device.type == "cuda" else nullcontext(dict[str, int]())
        trainable = {name: p for name, p in run.model.named_parameters() if p.requires_grad}
        trained: set[str] = set()
        with run.uncompiled(), ExitStack() as hooks:
            for name, parameter in trainable.items():
                hook = parameter.register_post_accumulate_grad_hook(lambda _, name=name: trained.add(name))
                hooks.callback(hook.remove)
            # Operators are traced in a separate step, so that the GPU's queue stays full here.
            with waits as self.syncs, self.calls:
                segments.take(CALL_STEPS)
            self._trace_operators()
        self.unused = [name for name in trainable if name not in trained]
        """Trainable parameters that got no gradient in any step."""
        self.evaluation, metrics = CallTrace(run.device.type), run.task.metrics().to(run.device)
        run.forward.eval()
        with run.uncompiled(), torch.no_grad(), run.precision.autocast, self.evaluation:
            run.task.evaluate(run.model, self.batch, metrics)
        run.forward.train()
        self.samples: SampleTrace | None = None
        """None for data in memory, and for streams, because reading would consume them."""
        if isinstance(source, MapSource) and source.storage != "memory":
            self.samples = trace_samples(source)

    @property
    def batch(self) -> Any:
        """A micro-batch as the task receives it."""
        assert self._segments.batch is not None
        return self._segments.batch.micro_batches[0].data

    def _trace_operators(self) -> None:
        calls = CallTrace(self.run.device.type)
        self.operators = OperatorTrace(self.run, calls)
        self.untraced: str | None = None
        """The error if operators could not be traced."""
        try:
            with calls, self.operators:
                self._segments.take(1)
        except Exception as error:
            if isinstance(error, PtfastError) or is_memory_error(error):
                raise
            self.untraced = f"{type(error).__name__}: {one_line(str(error))}"


@contextmanager
def audit_context(config: Config, folder: Path, display: Display) -> Iterator[AuditContext]:
    """Build the run of `config` in `folder`, and train a few steps while recording them."""
    ranks = Ranks()
    device = resolve_device(config.device, ranks)
    choice = build_choice(config, config.micro_batches or config.gradients.accumulate, device)
    data = load_data(config, ranks, choice)
    segments = Segments(config, folder, ranks, data, display)
    try:
        with naming_user_code(segments.run), display.status("training for some steps"):
            yield AuditContext(config, segments, data.train)
    finally:
        segments.run.close()


def _graph_breaks(run: Run) -> Counter[str]:
    """Return counts of graph breaks by torch's one-line reason; empty if nothing is compiled."""
    if run.compilation is None:
        return Counter()
    dynamo: Any = sys.modules["torch._dynamo.utils"]
    breaks = dynamo.counters["graph_break"].items()
    return Counter({str(reason).splitlines()[0]: count for reason, count in breaks})


def trace_samples(source: MapSource) -> SampleTrace:
    """Fetch samples spread over the data, as a loader does, and trace the calls."""
    indices = np.linspace(0, len(source) - 1, min(len(source), NUM_SAMPLES)).astype(np.int64)
    source.fetch(indices[:1])
    calls, profile = CallTrace("cpu"), cProfile.Profile()
    start = time.perf_counter()
    with calls:
        source.fetch(indices)
    seconds = time.perf_counter() - start
    with profile:
        source.fetch(indices)
    profiled: Any = pstats.Stats(profile)
    decoding_s = sum(
        total_s
        for (file, _, name), (*_, total_s, _) in profiled.stats.items()
        if file.endswith(DECODERS) and (name == "load" or name.startswith("decode_"))
    )
    # `ImageFiles` does nothing but decode.
    decoding_s = seconds if isinstance(source, ImageFiles) else decoding_s
    return SampleTrace(len(indices), seconds, decoding_s, calls)
