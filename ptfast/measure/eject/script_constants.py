"""Values of the capitals in ejected scripts, as a config and what `auto` became decide them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ptfast.config.schema import Config
from ptfast.core.errors import ConfigError
from ptfast.core.run import Run
from ptfast.data.sources.class_folders import list_tree
from ptfast.data.sources.text_dataset import TextTsv
from ptfast.measure.eject.parts import script_texts
from ptfast.techniques.schedule import lr_schedules
from ptfast.techniques.schedule.lr_schedules import Shape, Span
from ptfast.training.prepare_data import evaluated_at_once

PARTS = "ptfast.measure.eject.parts"
COMMENTS = {
    "SEED": "of weights, order, augmentation and dropout",
    "THREADS": "the order of sums depends on it",
    "VAL_SIZE": "held out of the training samples",
    "MEAN": "of each channel, of 0 to 255",
    "CROP_PADDING": "pixels on each side",
    "MIN_COUNT": "occurrences below which a token is unknown",
    "MAX_LENGTH": "tokens of a text",
    "CONTEXT_LENGTH": "tokens of a sample",
    "MICRO_BATCHES": "parts of a batch, of which the gradients add up",
    "CLIP_NORM": "of all gradients as one vector",
    "DELAY_STEPS": "before the schedule's own clock starts",
    "SPAN_STEPS": "of the schedule",
    "MILESTONES": "steps at which the learning rate falls",
    "END_FACTOR": "of the learning rate in the end",
    "PHASE_ENDS": "in steps",
    "PHASE_FACTORS": "on the learning rate, at the ends of phases",
}
"""What is said of settings at the head of a script."""
_DATA = {
    "ptfast.data.sources.digits.Digits": "script_images",
    "ptfast.data.sources.cifar.Cifar": "script_images",
    "ptfast.data.sources.imagefolder.ImageFolder": "script_images",
    "ptfast.data.sources.text_dataset.TextTsv": "script_texts",
    "ptfast.data.sources.text_dataset.TextFile": "script_windows",
}


def data_part(config: Config) -> str:
    """The module that reads such data.

    Raises:
        ConfigError: C011 for data that none reads.
    """
    path = config.data.target.path
    if path not in _DATA:
        hint = "Scripts read digits, cifar10, cifar100, imagefolder, text_tsv and text_file"
        raise refused("data", path, hint)
    return _DATA[path]


def constants_of(config: Config, run: Run) -> dict[str, Any]:
    """Every capital of the parts, by name.

    Raises:
        ConfigError: C011 for a value that no script follows.
    """
    task, precision = run.resolved.task, run.precision
    if task not in ("classification", "language_modelling") or config.task.options.keys() - {
        "label_smoothing"
    }:
        raise refused("task", task, "Scripts train classification and language_modelling")
    if precision.scaler is not None or config.precision.mode == "bf16_true":
        raise refused("precision", config.precision.mode, "Use precision=fp32 or precision=bf16")
    if config.dataloader.last == "pad":
        raise refused("dataloader.last", "pad", "Use dataloader.last=keep or drop")
    if config.parallel.strategy != "single":
        raise refused("parallel", config.parallel.strategy, "Use parallel=single")
    cadence, micro_batches = run.settings.cadence, run.settings.micro_batches
    return {
        "SEED": config.seed,
        "DEVICE": run.device.type,
        "THREADS": run.resolved.threads,
        **_of_data(config, run),
        "BATCH_SIZE": config.batch_size,
        "MICRO_BATCHES": micro_batches,
        "DROP_LAST": config.dataloader.last == "drop",
        "TOTAL_STEPS": run.total_steps,
        "LOG_STEPS": _interval(cadence.log_steps, run.total_steps),
        "EVAL_STEPS": _interval(cadence.eval_steps, run.total_steps),
        "EVAL_BATCH_SIZE": evaluated_at_once(config.eval, run.info, config.batch_size // micro_batches),
        "AUTOCAST": getattr(precision, "half_type", None),
        "TASK": task,
        "LABEL_SMOOTHING": config.task.options.get("label_smoothing", 0.0),
        "CLIP_NORM": config.gradients.clip_norm,
        "CLIP_VALUE": config.gradients.clip_value,
        **_of_schedule(config, run),
    }


def _interval(steps: Sequence[int], total_steps: int) -> int:
    return steps[0] if steps else total_steps + 1


def _of_data(config: Config, run: Run) -> dict[str, Any]:
    """Constants of reading the data: those of all kinds, whichever is read."""
    kwargs, info, augment = config.data.target.kwargs, run.info, config.augment
    path = str(kwargs.get("root") or kwargs.get("path") or "digits.npz")
    val = run.eval_loaders.get("val")
    num_val = int(val.num_samples or 0) if val is not None else 0
    found: dict[str, Any] = {
        "DATA": kwargs.get("name", config.data.target.path.rpartition(".")[2].lower()),
        "VAL_SIZE": num_val,
        "AUGMENTED": augment.crop_padding > 0 or bool(augment.flip),
        "CROP_PADDING": augment.crop_padding,
        "MIRRORED": augment.flip,
        "CHANNELS_LAST": bool(run.resolved.channels_last),
        "MEAN": (),
        "STD": (),
        "TOKENIZER": kwargs.get("tokenizer"),
        "MIN_COUNT": kwargs.get("min_count", 1),
        "MAX_LENGTH": kwargs.get("max_length", 0),
        "PADDED": config.batching.padding == "fixed",
        "CONTEXT_LENGTH": info.context_length,
        "CLASSES": info.class_names,
        "FILES": {},
        "DATA_PATH": path,
    }
    part = data_part(config)
    if part == "script_images":
        known = info.extra.get("normalize") if config.data.normalize else None
        channels = info.in_channels or 3
        scale = float(info.extra.get("max_value", 255))
        found["MEAN"] = tuple(known["mean"]) if known else (0.0,) * channels
        found["STD"] = tuple(known["std"]) if known else (scale,) * channels
        return found | _of_image_files(config)
    if kwargs.get("tokenizer") not in ("words", "characters"):
        raise refused("data.tokenizer", kwargs.get("tokenizer"), "Use words or characters")
    if kwargs.get("documents", "none") != "none":
        raise refused("data.documents", kwargs["documents"], "Use data.documents=none")
    return found | (_of_tables(config) if part == "script_texts" else {})


def _of_image_files(config: Config) -> dict[str, Any]:
    kwargs, source = config.data.target.kwargs, config.data.target.build()
    if source.name != "imagefolder":
        # CIFAR's own folder, wherever it was found or unpacked.
        folder = getattr(source, "root", None)
        patterns = ("batches.meta", "cifar-10*/batches.meta", "meta", "cifar-100*/meta")
        marks = [mark for pattern in patterns for mark in folder.glob(pattern)] if folder else []
        return {"DATA_PATH": str(marks[0].parent)} if marks else {}
    if kwargs.get("image_size") is not None:
        raise refused("data.image_size", kwargs["image_size"], "Set data.image_size=null")
    if not (source.root / "train").is_dir():
        raise refused("data.root", source.root, "Put the class folders into train/ and test/")
    return {"VAL_SIZE": 0} if "val" in list_tree(source.root)[1] else {}


def _of_tables(config: Config) -> dict[str, Any]:
    """The files of labelled texts, if a script reads them as ptfast does."""
    source = config.data.target.build()
    assert isinstance(source, TextTsv)
    files = {split: str(path) for split, path in source._files().items()}
    for split, (texts, labels) in source._rows()[0].items():
        if script_texts.read_table(Path(files[split])) != list(zip(texts, labels, strict=True)):
            hint = "Scripts read lines of text<TAB>label, without a line that names columns"
            raise refused("data", files[split], hint)
    return {"FILES": files} | ({"VAL_SIZE": 0} if "val" in files else {})


def _of_schedule(config: Config, run: Run) -> dict[str, Any]:
    """Constants of the schedule, its durations in steps."""
    target, plan = config.schedule.target, run.train_loader.plan
    if target.resolve() not in _FIGURES:
        hint = "Scripts follow constant, step, multistep, linear, cosine, polynomial and onecycle"
        raise refused("schedule._target_", target.path, hint)
    shape: Shape = target.build()
    warmup_steps = Span(run.total_steps, plan).steps(config.schedule.warmup)
    delay_steps = warmup_steps if shape.spans_run else 0
    span = Span(max(run.total_steps - delay_steps, 1), plan)
    found: dict[str, Any] = {
        "SCHEDULE": type(shape).__name__.lower(),
        "WARMUP_STEPS": warmup_steps,
        "DELAY_STEPS": delay_steps,
        "SPAN_STEPS": span.total_steps,
        "MILESTONES": (),
        "GAMMA": getattr(shape, "gamma", 1.0),
        "END_FACTOR": getattr(shape, "end", 0.0),
        "POWER": getattr(shape, "power", 1.0),
        "ANNEAL": getattr(shape, "anneal", "linear"),
        "PHASE_ENDS": (),
        "PHASE_FACTORS": (),
        "PHASE_MOMENTA": (),
    }
    found |= _FIGURES[type(shape)](shape, span)
    if run.resolved.momentum != "cycled":
        found["PHASE_MOMENTA"] = ()
    return found


def _onecycle(shape: lr_schedules.OneCycle, span: Span) -> dict[str, Any]:
    """Where the phases end, and the figures there, as `OneCycle` has them."""
    rise_steps, last = span.position(shape.rise), span.total_steps - 1.0
    high, low = shape.momentum_max, shape.momentum_min
    if not shape.fall:
        ends, factors, momenta = (rise_steps - 1, last), (shape.start, 1.0, shape.end), (high, low, high)
    else:
        ends = (rise_steps - 1, rise_steps + span.position(shape.fall) - 2, last)
        factors, momenta = (shape.start, 1.0, shape.start, shape.end), (high, low, high, high)
    return {
        "PHASE_ENDS": ends,
        "PHASE_FACTORS": factors,
        "PHASE_MOMENTA": momenta if high is not None else (),
    }


_FIGURES: dict[type[Shape], Callable[[Any, Span], dict[str, Any]]] = {
    **dict.fromkeys(
        (lr_schedules.Constant, lr_schedules.Linear, lr_schedules.Cosine, lr_schedules.Polynomial),
        lambda shape, span: {},
    ),
    lr_schedules.Step: lambda shape, span: {"MILESTONES": tuple(span.every(shape.every))},
    lr_schedules.MultiStep: lambda shape, span: {"MILESTONES": tuple(map(span.steps, shape.milestones))},
    lr_schedules.OneCycle: _onecycle,
}
"""Schedules that scripts follow, and what each has beside the common figures."""


def refused(key: str, value: Any, hint: str) -> ConfigError:
    """The error of what no script is made of."""
    return ConfigError("C011", "ptfast eject writes no script with it", key=key, value=value, suggestion=hint)
