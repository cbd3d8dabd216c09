"""The panel at the start of a run, and its results at the end."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ptfast import data, models
from ptfast.core import machine
from ptfast.core.protocols import TASKS
from ptfast.core.sections.section import call_with
from ptfast.data import loaders, sampling, transforms
from ptfast.report.terminal.json_lines import emit
from ptfast.run import Run
from ptfast.techniques import backend, checkpointing, gradients, parallel, rewrites, schedule

BLANK = ("", "")
"""Row between two groups of the panel."""
SKIPPED_NAMES = 5
"""Number of unreadable files to list by name; the rest are only counted."""


def show_panel(sections: Mapping[str, Any], run: Run) -> None:
    """Show the settings of the training; with `--json`, also emit each automatic choice as an event."""
    run.display.panel(*build_panel(sections, run))
    for choice in run.choices.made.values() if run.ranks.is_first else ():
        if choice.reason:
            emit("choice", **asdict(choice))


def build_panel(sections: Mapping[str, Any], run: Run) -> tuple[str, list[tuple[str, str]], list[str]]:
    """Return title, rows and warnings of the panel: the training, techniques, and automatic choices.

    Args:
        sections: the config by section; each family's panel receives the sections it names.
    """
    facts = {**sections, "choices": run.choices}

    def rows(*families: Any) -> dict[str, object]:
        panels = (family.FAMILY.panel for family in families)
        return {name: row for panel in panels for name, row in call_with(panel, facts).items()}

    task: dict[str, Any] = sections["task"].options
    kind, given = run.train_loader.kind, sections["dataloader"].kind != "auto"
    note = f"; {run.resumed_note}" if run.resumed_note else ""
    training = {**_training(sections, run), **rows(schedule)}
    techniques = {
        "loader": f"{kind} ({run.train_loader.reason})" if given else None,
        **rows(parallel, checkpointing, rewrites, gradients, backend, loaders),
        "evaluation": _evaluation(run),
        **call_with(data.panel, facts),
        **rows(transforms),
        **{name.replace("_", " "): value or None for name, value in task.items() if name != "loss"},
        **rows(models),
        **run.choices.rows,
    }
    automatic = [str(choice) for choice in run.choices.made.values() if choice.reason]
    place = {"resumed": f"at step {run.progress.step:,}{note}" if run.progress.step else None}
    groups = [
        [(name, str(row)) for name, row in group.items() if row is not None]
        for group in (training, techniques, place | {"run": run.folder})
    ]
    # Names of choices do not fit into the first column.
    groups.insert(2, [*zip(["automatic", *[""] * len(automatic)], automatic, strict=False)])
    table = [row for group in groups if group for row in [*group, BLANK]][:-1]
    debug = sections["debug"].mode
    loud = [f"debug={debug} is on and slows training down"] if debug != "none" else []
    if run.precision.warning is not None:
        loud.append(run.precision.warning)
    if (workers := run.train_loader.workers) > (cores := machine.spare_cores(most=sys.maxsize)):
        loud.append(f"dataloader.workers={workers} take turns on {cores} of this machine's cores")
    return sections["recipe"] or "train", table, loud


def _training(sections: Mapping[str, Any], run: Run) -> dict[str, str]:
    """Return the rows on the data, the model, the device, the batches and the optimizer."""
    from ptfast.optim.parameter_groups import reference_lr

    choices, world_size = run.choices, run.ranks.world_size
    count = choices.get("backend.threads")
    num_parameters = sum(p.numel() for p in run.model.parameters())
    layout = ", channels last" if choices.get("rewrites.channels_last") else ""
    processes = f"{world_size} ranks" if world_size > 1 else "1 process"
    threads = f"{count} thread" + "s" * (count > 1) + " each" * (world_size > 1)
    # FSDP replaces the model's class with one of its own.
    model = type(run.model).__name__.removeprefix("FSDP" if run.sharded else "")
    length = f"epochs={sections['epochs']}"
    if (steps := sections["steps"]) is not None:
        passes = run.train_loader.plan.epoch_at(run.total_steps)
        length = f"steps={steps}" + (f", {passes:.3g} epochs" if passes else "")
    return {
        "data": run.data_note,
        "task": _task(run),
        "model": f"{model}, {num_parameters:,} parameters{layout}",
        "device": f"{device_name(run)}, {processes}, {threads}",
        "precision": run.precision.note,
        "batch": _batch(run, sections["batching"]),
        "steps": f"{run.total_steps:,} ({length})",
        "optimizer": f"{type(run.optimizer).__name__}, {choices.get('optimizer')}",
        "learning rate": f"{reference_lr(run.optimizer, 'initial_lr'):g}",
    }


def _task(run: Run) -> str:
    """Return the task, with the number of classes, tokens or values it predicts."""
    info, name = run.info, run.choices.get("task")
    count = info.vocab_size if name == "language_modelling" else info.num_classes
    units = {"language_modelling": "token", "multilabel": "label", "regression": "value"}
    unit = units.get(name, "class")
    several = f"{unit}{'es' if unit == 'class' else 's'}"
    return f"{name} of {count:,} {several if count > 1 else unit}" if count and name in TASKS else name


def _batch(run: Run, batching: sampling.Batching) -> str:
    """Return the batch size, and how it is split over ranks and micro-batches."""
    if (budget := batching.batch_tokens) is not None:
        sizes = run.train_loader.plan.all_sizes()
        return f"up to {budget:,} tokens: {min(sizes):,} to {max(sizes):,} samples"
    batch_size, micro_batches = run.batch_size, run.micro_batches
    world_size = run.ranks.world_size
    if micro_batches == 1:
        return str(batch_size)
    per_rank = micro_batches // world_size
    parts = [f"{world_size} ranks"] * (world_size > 1) + [f"{per_rank} micro-batches"] * (per_rank > 1)
    return f"{batch_size} = " + " x ".join([*parts, f"{batch_size // micro_batches} samples"])


def results(run: Run) -> dict[str, Any]:
    """Return the entries of `summary.json` on the run itself, finished or not."""
    progress, sets = run.progress, run.metrics.keys() - {"train", "val", "test"}
    summary: dict[str, Any] = {
        "task": run.choices.get("task"),
        "steps": progress.step,
        "samples": progress.samples,
        "train_samples_per_s": progress.samples_per_s,
        "peak_memory_bytes": machine.peak_memory_bytes(run.device.type),
        **run.evaluated_weights,
        **{split: found for split, found in run.metrics.items() if split not in sets},
    }
    if sets:
        summary["evals"] = {name: found for name, found in run.metrics.items() if name in sets}
    if run.stop_reason is not None:
        summary["reason"] = run.stop_reason
    if progress.skipped_steps:
        summary["skipped_steps"] = progress.skipped_steps
    if progress.largest_spike is not None:
        summary["loss_spikes"] = {"count": progress.loss_spikes, "largest": progress.largest_spike}
    if run.slow_ranks:
        summary["slow_ranks"] = run.slow_ranks
    if (share := run.choices.get("padding_share")) is not None:
        summary["padding_share"] = share
    summary |= {"best_metric": ".".join(run.plan.followed), "best_mode": run.plan.best_mode}
    if run.compilation is not None:
        summary["compile"] = run.compilation.report()
    if run.unreadable is not None and (files := run.unreadable()):
        summary["skipped_files"] = {"count": len(files), "first": files[:SKIPPED_NAMES]}
    if run.checkpointer.writer.states:
        summary["saving"] = run.checkpointer.writer.report()
    if progress.best_step is not None:
        summary["best"] = {"step": progress.best_step, **run.best_metrics}
    if len(progress.best_states) > 1:
        metric = run.plan.best_metric
        ranked = ({"step": step, metric: value} for value, step in progress.best_states)
        summary["best_states"] = [*ranked]
    return summary


def _evaluation(run: Run) -> str | None:
    views = ["their mirror images"] * run.evaluation.flip
    views += [f"shifts by {shift} px" for shift in [run.evaluation.shift] if shift]
    return f"over images and {' and '.join(views)}" if views else None


def device_name(run: Run) -> str:
    if run.device.type != "cuda":
        return run.device.type
    import torch

    return torch.cuda.get_device_name(run.device)
