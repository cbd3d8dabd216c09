"""The panel: what a run is made of and what is switched on, as the terminal shows it before training."""

from __future__ import annotations

import sys

from ptfast.config.schema import Config
from ptfast.core.protocols import TASKS
from ptfast.core.run import Resolved, Run
from ptfast.techniques.checkpointing import Checkpointing


def build_panel(
    config: Config, run: Run, rows: list[tuple[str, str]]
) -> tuple[str, list[tuple[str, str]], list[str]]:
    """Title, rows and warnings of the panel: what is switched on, and what it resolved to."""
    from ptfast.core.machine import spare_cores

    resolved, num_ranks = run.resolved, run.ranks.num_ranks
    num_dropped = len(resolved.dropped_biases or ())
    num_parameters = sum(p.numel() for p in run.model.parameters())
    layout = ", channels last" if resolved.channels_last else ""
    processes = f"{num_ranks} ranks" if run.ranks.distributed else "1 process"
    threads = f"{resolved.threads} thread" + "s" * (resolved.threads > 1) + " each" * (num_ranks > 1)
    length = f"epochs={config.epochs}"
    if config.steps is not None:
        epochs = run.train_loader.plan.epoch_at(run.total_steps)
        length = f"steps={config.steps}" + (f", {epochs:.3g} epochs" if epochs else "")
    # Weights that are shared out come with a class of torch's own making.
    model = type(run.model).__name__.removeprefix("FSDP" if run.sharded else "")
    lr, reason = _rate(run), getattr(run.train_loader, "reason", None)
    table = [
        ("data", run.data_note),
        ("task", _task(run)),
        ("model", f"{model}, {num_parameters:,} parameters{layout}"),
        ("device", f"{device_name(run)}, {processes}, {threads}"),
        ("precision", run.precision.describe()),
        ("batch", _batch(config, run)),
        ("steps", f"{run.total_steps:,} ({length})"),
        ("optimizer", f"{type(run.optimizer).__name__}, lr {lr}, {resolved.optimizer}"),
        ("schedule", _schedule(config, resolved.momentum)),
        ("loader", f"{run.train_loader.kind} ({reason})" if reason else run.train_loader.kind),
    ]
    switches = {
        "parallel": _parallel(config, run),
        "checkpointing": checkpointing_row(config.checkpointing, resolved.checkpointed),
        "compile": run.compilation.describe() if run.compilation is not None else None,
        "rewrites": f"{num_dropped} biases before a BatchNorm dropped" if num_dropped else None,
        "clip norm": config.gradients.clip_norm,
        "clip value": config.gradients.clip_value,
        "clip adaptive": f"{share:g} of a unit's weights"
        if (share := config.gradients.clip_adaptive)
        else None,
        "gradients": "their norm is logged" if config.gradients.log_norm else None,
        "parameters": run.groups_note,
        "kernels": _kernels(config, resolved),
        "transfers": "on a side stream, one batch ahead" if resolved.side_stream else None,
        "reading": "by a thread, one batch ahead" if resolved.read_ahead else None,
        "average": run.ema.describe() if run.ema is not None else None,
        "evaluation": _evaluation(run),
        "padding": resolved.padding,
        "curriculum": "; ".join(resolved.curriculum) or None,
        "shuffling": _shuffling(config),
        **_regularisation(config),
        "decoding": "JPEG by the GPU, other files by the CPU"
        if config.data.target.kwargs.get("decoder") == "nvjpeg"
        else None,
        "corrupt files": "skipped" if run.unreadable is not None else None,
        "resumed": _resumed(run) if run.progress.step else None,
    }
    table += [(name, str(value)) for name, value in switches.items() if value is not None]
    loud = [f"debug={config.debug.mode} is on and slows training down"] if config.debug.mode != "none" else []
    if run.precision.warning is not None:
        loud.append(run.precision.warning)
    if resolved.workers > (cores := spare_cores(most=sys.maxsize)):
        loud.append(f"dataloader.workers={resolved.workers} take turns on {cores} of this machine's cores")
    return config.recipe or "train", table + rows, loud


def _task(run: Run) -> str:
    """What is trained for, and what of the labels says so where nobody has named it."""
    info, name, reason = run.info, run.resolved.task, run.resolved.task_reason
    count = info.vocab_size if name == "language_modelling" else info.num_classes
    units = {"language_modelling": "token", "multilabel": "label", "regression": "figure"}
    unit = units.get(name, "class")
    several = f"{unit}{'es' if unit == 'class' else 's'}"
    words = f"{name} of {count:,} {several if count > 1 else unit}" if count and name in TASKS else name
    return words + (f" (by the labels: {reason})" if reason else "")


def _batch(config: Config, run: Run) -> str:
    """The batch, and the parts that it is cut into."""
    if (budget := config.batching.batch_tokens) is not None:
        sizes = run.train_loader.plan.all_sizes()
        return f"up to {budget:,} tokens: {min(sizes):,} to {max(sizes):,} samples"
    batch_size, micro_batches, num_ranks = (
        run.settings.batch_size,
        run.settings.micro_batches,
        run.ranks.num_ranks,
    )
    if micro_batches == 1:
        return str(batch_size)
    per_rank = micro_batches // num_ranks
    parts = [f"{num_ranks} ranks"] * (num_ranks > 1) + [f"{per_rank} micro-batches"] * (per_rank > 1)
    return f"{batch_size} = " + " x ".join([*parts, f"{batch_size // micro_batches} samples"])


def _schedule(config: Config, momentum: str | None) -> str:
    """The shape of the learning rate, what tells it from others of its name, and the warm-up."""
    schedule = config.schedule
    words = [schedule.target.path.rsplit(".", 1)[-1]]
    if (rise := schedule.target.kwargs.get("rise")) is not None:
        words.append(f"up over {rise}")
    if schedule.warmup.value:
        words.append(f"warm-up {schedule.warmup}")
    return ", ".join(words + ([f"momentum {momentum}"] if momentum else []))


def left_out(run: Run) -> dict[str, int]:
    """Samples that evaluations leave out, by split; empty where each counts."""
    return {name: count for name, loader in run.eval_loaders.items() if (count := loader.left_out)}


def _evaluation(run: Run) -> str | None:
    """What is particular about evaluations."""
    words = ["over images and their mirror images"] * run.settings.flip
    if run.settings.full_size is not None:
        words.append(f"every batch filled up to {run.settings.full_size:,} samples")
    if missing := left_out(run):
        parts = " and ".join(f"{count:,} of {name}" for name, count in missing.items())
        words.append(f"without the samples of a last, smaller batch ({parts})")
    return "; ".join(words) or None


def _resumed(run: Run) -> str:
    """Where the run goes on, and what it took to come there."""
    note = run.status.resumed_note
    return f"at step {run.progress.step:,}" + (f"; {note}" if note else "")


def _shuffling(config: Config) -> str | None:
    """What samples are drawn out of, where that is not the whole."""
    size = config.data.shuffle_buffer
    return None if size is None else f"each sample is drawn out of {size:,} that lie together"


def _kernels(config: Config, resolved: Resolved) -> str | None:
    """How kernels are chosen, where there is a choice."""
    if resolved.deterministic:
        return "deterministic"
    if not resolved.cudnn_benchmark:
        return None
    until = ", while inputs have few shapes" if config.backend.cudnn_benchmark == "auto" else ""
    return f"cuDNN takes the quickest by trying{until}"


def _rate(run: Run) -> str:
    """The learning rate, and how it came from that of a reference batch."""
    from ptfast.optim.build_optimizer import reference_lr

    scaling = run.resolved.lr_scaling
    return f"{reference_lr(run.optimizer, 'initial_lr'):g}" + (f" ({scaling})" if scaling else "")


def _parallel(config: Config, run: Run) -> str | None:
    """How the ranks train together, and what of it is switched on; None where one process was asked for."""
    parallel = config.parallel
    if not run.ranks.distributed:
        asked = parallel.strategy
        return None if asked == "single" else f"one process: {asked} has nothing to share out here"
    if run.sharded:
        words = [f"fsdp, weights in {len(run.resolved.shards) + 1} parts"]
    else:
        words = [f"ddp, buckets of {parallel.bucket_mb:g} MB"]
        words += ["copied gradients"] * (not parallel.gradient_as_bucket_view)
        words += ["static graph"] * parallel.static_graph + ["unused parameters"] * parallel.unused_parameters
        words += [f"{parallel.compression} gradients"] * (parallel.compression != "none")
    return ", ".join(words + ["synced BatchNorm"] * parallel.sync_batchnorm)


def _regularisation(config: Config) -> dict[str, str | float | None]:
    """What makes training harder on purpose, where it is on."""
    augment, keywords = config.augment, config.model.target.kwargs
    jitter = ("brightness", "contrast", "saturation", "translation", "scaling")
    images = {
        f"crop after {augment.crop_padding} pixels of padding": augment.crop_padding,
        _resized_crop(augment.resized_crop): augment.resized_crop,
        "alternating flip" if augment.flip == "alternating" else "flip": augment.flip,
        f"turn by up to {augment.rotation_degrees:g} degrees": augment.rotation_degrees,
        **{f"{name} {getattr(augment, name):g}": getattr(augment, name) for name in jitter},
        f"cutout of {augment.cutout} pixels": augment.cutout,
        f"mixup {augment.mixup:g}": augment.mixup,
        f"cutmix {augment.cutmix:g}": augment.cutmix,
    }
    rates = [keywords.get(name) for name in ("drop_path", "drop_path_rate", "stochastic_depth_prob")]
    return {
        "augment": ", ".join(name for name, on in images.items() if on) or None,
        "label smoothing": config.task.options.get("label_smoothing") or None,
        "drop path": next(filter(None, rates), None),
    }


def _resized_crop(parts: tuple[float, float] | None) -> str:
    return "resized crop of {:.0%} to {:.0%}".format(*parts) if parts is not None else "resized crop"


def checkpointing_row(checkpointing: Checkpointing, blocks: list[str]) -> str | None:
    """What is computed again in the backward pass; None where nothing is."""
    if checkpointing.mode == "none":
        return None
    if checkpointing.mode == "budget":
        return f"the compiler keeps {checkpointing.memory_budget:.0%} of the activations"
    what = "cheap operations" if checkpointing.mode == "selective" else "all"
    which = f"{blocks[0]} to {blocks[-1]}" if len(blocks) > 1 else blocks[0]
    every = f", 1 in {checkpointing.every}" if checkpointing.mode == "every_n" else ""
    return f"{what} in {len(blocks)} block{'s' * (len(blocks) > 1)} computed again ({which}{every})"


def device_name(run: Run) -> str:
    """What the run computes on, as its maker calls it."""
    if run.device.type != "cuda":
        return run.device.type
    import torch

    return torch.cuda.get_device_name(run.device)
