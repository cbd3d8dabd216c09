"""Rules across keys of a config: lengths, batches, names, and keys that contradict each other."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from ptfast.config.checks.machine_rules import machine_problems
from ptfast.config.checks.parallel_rules import parallel_problems
from ptfast.config.schema import Config
from ptfast.core.durations import Duration
from ptfast.core.errors import COMMAND_LINE
from ptfast.core.sections.problem import Problem
from ptfast.core.sections.targets import Target, keywords
from ptfast.techniques.compile import OVERWRITES, OVERWRITES_HINT

Place = Callable[[str], str]

MAX_NAME_CHARS = 100
PACK_FILES = ("manifest.json", "pack.unfinished")
"""Of which a pack has one, whole or not."""
PACKAGE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_NAME = re.compile(r"\w[\w.+=@,\- ]*")


def across_keys(config: Config, place: Place) -> tuple[Config, list[Problem]]:
    """The config with one length, and what contradicts itself or cannot run here."""
    config, problem = _one_length(config, place)
    problems = [problem, *_name_problems(config), _clipping_problem(config), _warmup_problem(config)]
    problems += [_curriculum_problem(config), _batching_problem(config)]
    problems += [_milestones_problem(config), _nesterov_problem(config), _config_batch_problem(config)]
    problems += [_momentum_problem(config, place), _lr_scaling_problem(config)]
    problems += [_checkpointing_problem(config), _compile_problem(config), _stepping_problem(config)]
    problems += [_benchmark_problem(config), *parallel_problems(config), _average_problem(config)]
    problems += [_resized_crop_problem(config), _packed_problem(config), _nvjpeg_problem(config)]
    found = [problem for problem in problems if problem is not None]
    return config, found or machine_problems(config)


def check_batch(
    batch_size: int,
    micro_batches: int | None,
    ranks: int,
    accumulate: int = 1,
    first: int | Literal["auto"] | None = None,
    place: str | None = None,
) -> int:
    """The number of micro-batches that a batch is cut into, if it can be cut evenly.

    Args:
        batch_size: samples of an optimizer step, over all ranks.
        micro_batches: as configured; None for `ranks * accumulate`.
        ranks: processes that train.
        accumulate: micro-batches of each rank where `micro_batches` does not say it.
        first: samples of the first steps, where batches grow.
        place: where the batch size was given.

    Raises:
        ConfigError: C010, naming the nearest number that divides.
    """
    problem = _batch_problem(batch_size, micro_batches, ranks, accumulate, first)
    if problem is not None:
        raise problem.error(place)
    return micro_batches or ranks * accumulate


def _one_length(config: Config, place: Place) -> tuple[Config, Problem | None]:
    """Keep one of epochs and steps: the command line over a file, and steps over the default epochs."""
    if config.epochs is None and config.steps is None:
        return config, Problem(
            "C016", "required, but not set", key="epochs", suggestion="Set epochs or steps"
        )
    if config.epochs is None or config.steps is None:
        return config, None
    loser = losing_length(place)
    if loser is None:
        what = f"contradicts epochs={config.epochs}"
        hint = "Give one of the two"
        return config, Problem("C011", what, key="steps", value=config.steps, suggestion=hint)
    return config.model_copy(update={loser: None}), None


def losing_length(place: Place) -> str | None:
    """Which of epochs and steps gives way where both are set, or None where the two contradict each other."""
    epochs_file, steps_file = (place(key).rpartition(":")[0] or place(key) for key in ("epochs", "steps"))
    if epochs_file == steps_file:
        return None
    return "steps" if epochs_file == COMMAND_LINE else "epochs"


def _name_problems(config: Config) -> list[Problem | None]:
    names = {"run.name": config.run.name, "recipe": config.recipe}
    problems = [_name_problem(name, key) for key, name in names.items() if name is not None]
    for key, path in {"run.dir": config.run.dir, "run.root": config.run.root}.items():
        if path is not None and (not path or not path.isprintable()):
            problems.append(Problem("C013", "not a safe path", key=key, value=path))
    for package in config.trust:
        if not PACKAGE.fullmatch(package):
            problems.append(Problem("C013", "not the name of a package", key="trust", value=package))
    return problems


def _name_problem(name: str, key: str) -> Problem | None:
    if len(name) > MAX_NAME_CHARS:
        what = f"longer than {MAX_NAME_CHARS} characters"
    elif _NAME.fullmatch(name) and ".." not in name and name == name.strip():
        return None
    else:
        what = "not a safe name"
    hint = "Use letters, digits and the characters . _ - + = @, and begin with a letter or digit"
    return Problem("C013", what, key=key, value=name, suggestion=hint)


def _clipping_problem(config: Config) -> Problem | None:
    """Two ways of clipping at once, of which the later would act on what the other has left."""
    clip = config.gradients
    of_groups = [i for i, group in enumerate(config.optimizer.groups) if group.clip_norm is not None]
    on: dict[str, float | None] = {
        "gradients.clip_norm": clip.clip_norm,
        "gradients.clip_value": clip.clip_value,
        "gradients.clip_adaptive": clip.clip_adaptive,
    }
    found = [(key, value) for key, value in on.items() if value is not None]
    if of_groups and (clip.clip_norm is None or len(found) > 1):
        index = of_groups[0]
        found.insert(
            0, (f"optimizer.groups.{index}.clip_norm", config.optimizer.groups[index].clip_norm or 0)
        )
    if len(found) < 2:
        return None
    (first, limit), (key, value) = found[:2]
    hint = "Set one of the two to null"
    return Problem("C011", f"contradicts {first}={limit:g}", key=key, value=value, suggestion=hint)


def _lr_scaling_problem(config: Config) -> Problem | None:
    optimizer = config.optimizer
    if optimizer.lr_scaling == "none" or optimizer.reference_batch is not None:
        return None
    what, hint = "there is no batch size to scale from", "Set optimizer.reference_batch=256, say"
    return Problem("C011", what, key="optimizer.lr_scaling", value=optimizer.lr_scaling, suggestion=hint)


def _warmup_problem(config: Config) -> Problem | None:
    return _longer_than_run(config, "schedule.warmup", config.schedule.warmup)


def _curriculum_problem(config: Config) -> Problem | None:
    wanted = config.curriculum
    grows = (wanted.image_size_from, wanted.length_from, wanted.batch_size_from) != (None, None, None)
    return _longer_than_run(config, "curriculum.over", wanted.over) if grows else None


def _batching_problem(config: Config) -> Problem | None:
    """Batches by tokens of any length, and batches that both grow and go by length or tokens."""
    wanted, first = config.batching, config.curriculum.batch_size_from
    if wanted.buckets and wanted.pack:
        what, hint = "packed windows are all of one length", "Set one of the two to false"
        return Problem("C011", what, key="batching.pack", value="true", suggestion=hint)
    if not wanted.buckets and wanted.batch_tokens is not None:
        what, hint = "counts on texts of like length", "Use batching=tokens, or set batching.buckets=true"
        return Problem("C011", what, key="batching.batch_tokens", value=wanted.batch_tokens, suggestion=hint)
    if wanted.buckets and first is not None:
        what, hint = "batches by length are of one size", "Use curriculum=none or batching=longest"
        return Problem("C011", what, key="curriculum.batch_size_from", value=first, suggestion=hint)
    scaling = config.optimizer.lr_scaling
    if wanted.batch_tokens is not None and scaling != "none":
        what = "batches of so many tokens have no size to scale by"
        hint = "Use optimizer.lr_scaling=none"
        return Problem("C011", what, key="optimizer.lr_scaling", value=scaling, suggestion=hint)
    return None


def _longer_than_run(config: Config, key: str, length: Duration) -> Problem | None:
    total = {"steps": config.steps, "epochs": config.epochs}.get(length.unit)
    if total is None or length.value <= total:
        return None
    return Problem("C011", f"longer than the run of {total} {length.unit}", key=key, value=length)


def _benchmark_problem(config: Config) -> Problem | None:
    backend = config.backend
    if not (backend.deterministic and backend.cudnn_benchmark is True):
        return None
    what = "kernels chosen by timing differ from run to run, which backend.deterministic forbids"
    hint = "Use backend.cudnn_benchmark=auto"
    return Problem("C011", what, key="backend.cudnn_benchmark", value=True, suggestion=hint)


def _resized_crop_problem(config: Config) -> Problem | None:
    """Two ways of cropping at once; ranges the wrong way round."""
    augment = config.augment
    for name in ("resized_crop", "resized_ratio"):
        low, high = getattr(augment, name) or (0, 0)
        if low > high:
            what, hint = "the largest comes first", f"Use augment.{name}=[{high:g},{low:g}]"
            return Problem("C011", what, key=f"augment.{name}", value=[low, high], suggestion=hint)
    if augment.resized_crop is None:
        return None
    if augment.crop_padding:
        what, hint = f"contradicts augment.crop_padding={augment.crop_padding}", "Set augment.crop_padding=0"
        return Problem(
            "C011", what, key="augment.resized_crop", value=list(augment.resized_crop), suggestion=hint
        )
    return None


def _packed_problem(config: Config) -> Problem | None:
    """Data that is to be read from a pack, and is none."""
    if config.dataloader.kind != "packed":
        return None
    target = config.data.target
    key = {
        "ptfast.data.sources.imagefolder.ImageFolder": "root",
        "ptfast.data.sources.text_dataset.TextFile": "path",
    }.get(target.path)
    if key is None:
        what, hint = "only image folders and text files are packed", "Use dataloader=auto"
        return Problem("C011", what, key="dataloader.kind", value="packed", suggestion=hint)
    path = Path(str(target.kwargs[key])).expanduser()
    # What is missing or unfinished is said when it is opened.
    if not path.exists() or any((path / name).is_file() for name in PACK_FILES):
        return None
    what, pack = f"data.{key}={path} is no pack", f"{path}-packed"
    hint = f"Make one with ptfast pack {path} {pack} and use data.{key}={pack}, or use dataloader=auto"
    return Problem("C011", what, key="dataloader.kind", value="packed", suggestion=hint)


def _nvjpeg_problem(config: Config) -> Problem | None:
    """A GPU that is to decode for something else than crops, or in processes that have no part in it."""
    if config.data.target.kwargs.get("decoder") != "nvjpeg":
        return None
    if config.augment.resized_crop is None:
        what = "nvJPEG decodes for augment.resized_crop"
        hint = "Use augment=resized_crop, or data.decoder=cpu"
        return Problem("C011", what, key="data.decoder", value="nvjpeg", suggestion=hint)
    if (kind := config.dataloader.kind) not in ("auto", "plain"):
        what, hint = "data.decoder=nvjpeg decodes in the process that trains", "Use dataloader=plain"
        return Problem("C011", what, key="dataloader.kind", value=kind, suggestion=hint)
    return None


def _milestones_problem(config: Config) -> Problem | None:
    for name, values in config.schedule.target.kwargs.items():
        if name != "milestones" or not isinstance(values, (list, tuple)):
            continue
        if len({value.unit for value in values if isinstance(value, Duration)}) > 1:
            continue
        numbers = [value.value if isinstance(value, Duration) else value for value in values]
        if numbers != sorted(numbers):
            what = "milestones must be in rising order"
            return Problem("C011", what, key=f"schedule.{name}", value=values)
    return None


def _nesterov_problem(config: Config) -> Problem | None:
    kwargs = config.optimizer.target.kwargs
    if kwargs.get("nesterov") is not True or kwargs.get("momentum") != 0:
        return None
    hint = "Set optimizer.momentum=0.9, or optimizer.nesterov=false"
    return Problem("C011", "Nesterov needs a momentum", key="optimizer.nesterov", value=True, suggestion=hint)


def _momentum_problem(config: Config, place: Place) -> Problem | None:
    """Momenta typed for the schedule to cycle, where the optimizer has none; those of an option stay off."""
    momenta = {name: config.schedule.target.kwargs.get(name) for name in ("momentum_max", "momentum_min")}
    typed = [name for name in momenta if momenta[name] and place(f"schedule.{name}") == COMMAND_LINE]
    if not typed or _has_momentum(config.optimizer.target):
        return None
    what = f"there is no momentum to cycle in {config.optimizer.target.path} as it is configured"
    hint = "Leave it out, or choose an optimizer with a momentum or betas, such as optimizer=sgd"
    key = f"schedule.{typed[0]}"
    return Problem("C011", what, key=key, value=momenta[typed[0]], suggestion=hint)


def _stepping_problem(config: Config) -> Problem | None:
    kwargs = config.optimizer.target.kwargs
    if kwargs.get("fused") is not True or kwargs.get("foreach") is not True:
        return None
    what, hint = "contradicts optimizer.fused=true", "Leave one of the two out"
    return Problem("C011", what, key="optimizer.foreach", value=True, suggestion=hint)


def _average_problem(config: Config) -> Problem | None:
    average = config.ema
    if average.decay is None or average.swa_start is None:
        return None
    what, hint = f"contradicts ema.decay={average.decay:g}", "Set one of the two to null"
    return Problem("C011", what, key="ema.swa_start", value=average.swa_start, suggestion=hint)


def _has_momentum(optimizer: Target) -> bool:
    given = {name: p.default for name, p in keywords(optimizer.resolve()).items() if p.default is not p.empty}
    given |= optimizer.kwargs
    return bool(given.get("momentum") or given.get("betas", (0,))[0])


def _checkpointing_problem(config: Config) -> Problem | None:
    """A budget without a compiler, and what the mode lacks."""
    checkpointing = config.checkpointing
    mode = checkpointing.mode
    if mode == "budget" and config.compile.mode in ("none", "pointwise"):
        what, hint = "a memory budget is kept by the compiler", "Set compile=model, or use checkpointing=full"
        return Problem("C011", what, key="checkpointing", value=mode, suggestion=hint)
    for name, owner, usual in (("every", "every_n", 2), ("memory_budget", "budget", 0.5)):
        if mode == owner and getattr(checkpointing, name) is None:
            what, key = f"needed by checkpointing={mode}", f"checkpointing.{name}"
            return Problem("C016", what, key=key, suggestion=f"Set {key}={usual}")
    return None


def _compile_problem(config: Config) -> Problem | None:
    """CUDA graphs under accumulation."""
    mode = config.compile.mode
    many = config.parallel.strategy == "single" and (config.micro_batches or 1) > 1
    if mode == "reduce_overhead" and (many or config.gradients.accumulate > 1):
        return Problem("C011", OVERWRITES, key="compile", value=mode, suggestion=OVERWRITES_HINT)
    return None


def _config_batch_problem(config: Config) -> Problem | None:
    parallel = config.parallel
    ranks = 1
    if parallel.strategy != "single":
        if parallel.nproc == "auto":
            return None
        ranks = parallel.nproc * parallel.nnodes
    first = config.curriculum.batch_size_from
    return _batch_problem(config.batch_size, config.micro_batches, ranks, config.gradients.accumulate, first)


def _batch_problem(
    batch_size: int,
    micro_batches: int | None,
    ranks: int,
    accumulate: int,
    first: int | Literal["auto"] | None,
) -> Problem | None:
    parts = micro_batches or ranks * accumulate
    if parts % ranks:
        what = f"cannot be shared evenly by {ranks} ranks"
        return Problem(
            "C010", what, key="micro_batches", value=parts, suggestion=_nearest_multiples(parts, ranks)
        )
    if micro_batches and accumulate > 1 and micro_batches != ranks * accumulate:
        what = f"contradicts gradients.accumulate={accumulate} on {ranks} rank{'s' * (ranks > 1)}"
        return Problem(
            "C011", what, key="micro_batches", value=micro_batches, suggestion="Give one of the two"
        )
    of_what = f"{parts} micro-batches" + (f" ({ranks} ranks)" if ranks > 1 else "")
    for key, size in {"batch_size": batch_size, "curriculum.batch_size_from": first}.items():
        if isinstance(size, int) and size % parts:
            what, hint = f"cannot be cut into {of_what} evenly", _nearest_multiples(size, parts)
            return Problem("C010", what, key=key, value=size, suggestion=hint)
    return None


def _nearest_multiples(value: int, of: int) -> str:
    below, above = value // of * of, (value // of + 1) * of
    return (
        f"The nearest that divide are {below} and {above}"
        if below
        else f"The nearest that divides is {above}"
    )
