"""`ptfast train --dry-run`: what a run costs, by a few steps of it here."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from ptfast.config.schema import Config
from ptfast.core.distributed import Ranks
from ptfast.core.errors import EXIT_OK
from ptfast.core.units import duration, num_bytes
from ptfast.report.terminal.display import build_display, table

TIMED_STEPS = 5


def dry_run(config: Config) -> int:
    """Build the run of `config` in a temporary folder, take a few steps, and print what the whole would take.

    Figures are of one process: its memory, the floating-point operations of one step (forward and backward,
    counted by operator), and the median of a few timed steps, warm-up left out.

    Raises:
        PtfastError: whatever would stop the real run in its first steps.
    """
    from ptfast.core.machine import peak_memory_bytes
    from ptfast.profiling.limits.operators import Operators, total_flops
    from ptfast.profiling.limits.roofline import flop
    from ptfast.training.build import build
    from ptfast.training.fit import try_out
    from ptfast.training.step import Trainer
    from ptfast.training.user_code import naming_user_code

    display = build_display()
    with tempfile.TemporaryDirectory(prefix="ptfast-") as name:
        folder = Path(name)
        run = build(config, ranks=Ranks(), folder=folder, display=display)
        # What grows is measured at full size, which it has in the last steps.
        first = max(run.total_steps - TIMED_STEPS - 1, 0) if run.resolved.curriculum else 0
        run.progress.step = first
        batches = run.train_loader.steps(first, run.total_steps)
        trainer = Trainer(run)
        operators = Operators()
        with operators, naming_user_code(run):
            trainer.train(batches, first + 1)
        trainer.window.read()
        trainer.first_look.check_evaluation()
        seconds = []
        for step in range(first + 2, min(first + TIMED_STEPS + 1, run.total_steps) + 1):
            start = time.perf_counter()
            trainer.train(batches, step)
            trainer.window.read()
            seconds.append(time.perf_counter() - start)
        try_out(run)
        run.close()
        state_bytes = sum(
            path.stat().st_size
            for path in (folder / "saved").rglob("*")
            if path.is_file() and not path.is_symlink()
        )
        flops = total_flops(operators)
        step_s = statistics.median(seconds) if seconds else float("nan")
        per_epoch = run.train_loader.plan.steps_per_epoch
        states = config.saving.keep + (2 if config.saving.best else 1)
        rows = [
            ("parameters", f"{sum(p.numel() for p in run.model.parameters()):,}"),
            ("peak memory", num_bytes(peak_memory_bytes(run.device.type))),
            ("operations per step", flop(flops) if flops else "not counted"),
            ("time per step", f"{step_s * 1e3:,.1f} ms"),
            ("throughput", f"{run.train_loader.plan.batch_size / step_s:,.0f} samples/s"),
            ("time per epoch", duration(step_s * per_epoch) if per_epoch else "unknown: iterable data"),
            (
                "time of the run",
                f"{duration(step_s * run.total_steps)} for {run.total_steps:,} steps, evaluation not counted",
            ),
            ("disk", f"{num_bytes(state_bytes)} a state, up to {states} at a time"),
            (
                "loss of the first steps",
                f"{run.progress.window_loss / max(run.progress.window_items, 1):.4g}",
            ),
        ]
        table(["dry run", run.data_note], rows)
    return EXIT_OK
