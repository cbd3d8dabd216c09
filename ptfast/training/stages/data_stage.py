"""Load the data of a run: its splits, its task, and their loaders."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from ptfast.config.schema import Config
from ptfast.core.auto_choices import AutoChoices
from ptfast.core.distributed import Ranks, on_first_rank
from ptfast.core.errors import ConfigError, DataError, PtfastError, name_some, summary_of
from ptfast.core.protocols import IGNORE_INDEX, DataInfo
from ptfast.core.sections.origins import is_ours
from ptfast.core.sections.targets import Target, built, keywords, signature, takes
from ptfast.data import SPLIT_KEYS
from ptfast.data.build_data import Data, build_data
from ptfast.data.dataset import check_same_data, read_info
from ptfast.data.label_checks import missing_classes
from ptfast.data.loaders.build_loaders import build_eval_loader, build_train_loader
from ptfast.data.loaders.dataset_source import Collate, DatasetSource
from ptfast.data.loaders.loader_choice import DECODED_ONCE, Choice, choose
from ptfast.data.loaders.pipeline import LoaderOptions, SideStream, open_side_stream
from ptfast.data.loaders.sample_form import InputOptions
from ptfast.data.loaders.shared_memory import SharedArrays
from ptfast.data.loaders.worker_processes import RAISED
from ptfast.data.map_source import MapSource
from ptfast.data.sampling.sample_orders import build_order, describe_sampling
from ptfast.data.sampling.sampler import Sharding
from ptfast.data.sampling.splits import SplitRules
from ptfast.data.streams.iterable import IterableSource
from ptfast.data.transforms.augment_plan import Augment, build_augment
from ptfast.data.transforms.mixup_cutmix import build_mix
from ptfast.tasks import build_task, collate_of
from ptfast.tasks.added_metrics import add_metrics
from ptfast.tasks.cross_entropy import CrossEntropyTask, balanced_weights
from ptfast.tasks.supervised import SupervisedTask, names_of_classes
from ptfast.techniques.backend.garbage_collection import Collector
from ptfast.training.evaluate import check_tta
from ptfast.training.stages.partial_run import PartialRun
from ptfast.training.stages.training_plan import describe_padding, pack_or_pad
from ptfast.training.user_code import constructing

SMALL_SAMPLE_BYTES = 64 * 2**10
"""A sample is small up to this size as float32, for example an image of 72 x 72."""


def load_data(
    config: Config, ranks: Ranks | None = None, choose: Callable[..., Choice] | None = None, **saved: Any
) -> Data:
    """Load the config's splits and facts about them; the first of `ranks` computes the statistics.

    `choose` is from `build_choice`; `saved` are facts of a trained run, as keywords of `build_data`.
    """
    section, ignored = config.data, config.task.options.get("ignore_index")
    ranks = ranks or Ranks()
    target, image_size = section.target, None
    path = target.path
    if "image_size" in target.kwargs and not takes(target.resolve(), "image_size"):
        kwargs = {**target.kwargs}
        image_size, target = kwargs.pop("image_size"), replace(target, kwargs=kwargs)
    try:
        source = target.build()
    except RAISED as error:
        if isinstance(error, PtfastError) or is_ours(path):
            raise
        what = f"its constructor raises {summary_of(error)}"
        raise DataError("D008", what, key="data._target_", value=path) from error
    collate = None
    if (named := section.collate) is not None:
        with constructing("data.collate", named.path):
            collate = Collate(named.build(), key="data.collate", value=named.path)
    elif (of_task := collate_of(config.task.name)) is not None:
        collate = Collate(of_task, key="task", value=config.task.name)
    rules = SplitRules(**{key: getattr(section, key) for key in SPLIT_KEYS})
    if rules.test is not None and not rules.test.value:
        rules = replace(rules, test=None)
    if rules.overfit is not None:
        rules = replace(rules, overfit=rules.overfit * config.batch_size)
    data = build_data(
        source,
        val=section.val,
        seed=config.seed,
        task=config.task.name,
        normalize=section.normalize,
        choose=choose,
        crops=config.augment.resized_crop is not None,
        shuffle_buffer=section.shuffle_buffer,
        once=lambda compute: on_first_rank(compute, ranks),
        arrays=SharedArrays(ranks),
        ignore_index=ignored if isinstance(ignored, int) else IGNORE_INDEX,
        collate=collate,
        options=InputOptions(*_forward_names(config.model.target), image_size),
        rules=rules,
        **saved,
    )
    return pack_or_pad(data, config.batching, config.seed)


def _forward_names(target: Target) -> tuple[list[str] | None, int]:
    """Return the argument names of a model class's `forward`, and how many are passed by position.

    The names are None if they are unknown, or if it accepts any keywords.
    """
    found: Any = target.resolve()
    taken = signature(found.forward) if inspect.isclass(found) and issubclass(found, nn.Module) else None
    parameters = [] if taken is None else [*taken.parameters.values()][1:]
    kinds = [each.kind for each in parameters]
    if taken is None or inspect.Parameter.VAR_KEYWORD in kinds:
        return None, 1
    return [each.name for each in parameters], int(inspect.Parameter.KEYWORD_ONLY not in kinds[:1])


def load_splits(run: PartialRun) -> None:
    """Load the splits, and note how the held-out ones differ from those of the checkpoint."""
    info = read_info(run.state.facts["info"]) if run.state is not None else None
    if run.data is None:
        with run.display.status("loading the data"):
            choice = build_choice(
                run.config, run.micro_batches, run.device, run.choices, run.ranks.world_size
            )
            run.data = load_data(run.config, run.ranks, choice, trained=info)
    run.data = add_evals(run.config, run.data, run.ranks, run.display.note)
    run.info, run.data_note, run.unreadable = run.data.info, run.data.note, run.data.unreadable
    run.choices.rows["corrupt files"] = "skipped" if run.unreadable is not None else None
    _warn_of_missing_classes(run, run.data)
    if run.data.warning:
        run.display.warn(f"data: {run.data.warning}")
    if info is not None and (changed := check_same_data(info, run.info)):
        run.resumed_note = f"other held-out data than before: {changed}"


def add_evals(config: Config, data: Data, ranks: Ranks, note: Callable[[str], object]) -> Data:
    """Return `data` with the config's evaluation sets, read like the training data; `note` describes each.

    If a set has held-out splits, `val` or else `test` is used; otherwise all samples.
    """
    sets: dict[str, Data] = {}
    for name, section in config.evals.items():
        try:
            found = load_data(config.model_copy(update={"data": section}), ranks, known=data.info, whole=True)
        except PtfastError as error:
            raise error.moved("data", f"evals.{name}") from error
        note(f"evals.{name}: {found.note}")
        source = found.val or found.test or found.train.in_order()
        in_memory = data.choice is not None and data.choice.kind in DECODED_ONCE
        if in_memory and isinstance(source, MapSource) and source.storage != "memory":
            source = source.to_memory(SharedArrays(ranks))
        sets[name] = replace(found, val=source)
    return replace(data, evals=sets)


def _warn_of_missing_classes(run: PartialRun, data: Data) -> None:
    """Warn of classes that a held-out split lacks, and of classes that the training split lacks."""
    known = {
        split: labels
        for split, source in {**data.sources, **{name: each.val for name, each in data.evals.items()}}.items()
        if data.info.task == "classification" and isinstance(source, MapSource)
        if (labels := source.known_labels()) is not None and labels.dim() == 1
    }
    for split in (name for name in known if name != "train" and "train" in known):
        for one, other in ((split, "train"), ("train", split)):
            if missing := missing_classes(known[other], known[one], data.info.class_names):
                classes = f"class{'es' * (len(missing) > 1)} {name_some(missing)}"
                run.display.warn(f"data: {one} has no sample of {classes}, which {other} has")


def choose_task(run: PartialRun) -> None:
    """Build the task of the config, or else the data's own, and check that evaluations fit it."""
    config, info = run.config, run.info
    named = config.task.name != "auto"
    reason = f"of the labels: {info.task_reason}" if info.task_reason and not named else ""
    run.choices.choose("task", config.task.name if named else info.task, reason)
    name, options = config.task.name, on_device(built(config.task.options), run.device)
    if not named and not options and (by_position := _computes_loss(config.model.target, info)) is not None:
        name, options = "hf", {"by_position": by_position}
        reason = f"the model's forward takes labels, and it has a loss; task={info.task} takes ptfast's"
        run.choices.choose("task", info.task, reason)
    task = build_task(name, info, **options)
    if isinstance(task, CrossEntropyTask) and task.class_weights == "balanced":
        weights = run.choices.choose("task.class_weights", _balanced_weights(run, task))
        task.class_weights = torch.tensor(weights)
    for name, value in vars(task).items() if isinstance(task, SupervisedTask) else ():
        vars(task)[name] = value.to(run.device) if isinstance(value, torch.Tensor) else value
    run.task = add_metrics(task, config.metrics, info)
    run.evaluation = config.eval
    check_tta(config.eval.flip, config.eval.shift, info, run.task, targets=config.augment.targets)


def _balanced_weights(run: PartialRun, task: CrossEntropyTask) -> list[float]:
    """Return the weights that balance the classes; a resumed run keeps the weights it began with."""
    if (before := run.choices.began_with("task.class_weights", list[float])) is not None:
        return before
    if run.data is None or not isinstance(source := run.data.train, MapSource):
        what, hint = "the classes of the training data cannot be counted", "Set a weight for each class"
        raise ConfigError("C011", what, key="task.class_weights", value="balanced", suggestion=hint)
    weights = on_first_rank(partial(balanced_weights, source, task.num_classes, task.ignore_index), run.ranks)
    named = [f"{name} {weight:.3g}" for name, weight in zip(names_of_classes(run.info), weights, strict=True)]
    run.display.note(f"task.class_weights=balanced: {name_some(named, 10)}")
    return weights


def _computes_loss(model: Target, info: DataInfo) -> bool | None:
    """Return None unless a user's model takes `labels`; else whether it takes inputs by position."""
    factory = model.resolve()
    forward = getattr(factory, "forward", None) if isinstance(factory, type) else None
    takes_labels = forward is not None and "labels" in keywords(forward)
    if not takes_labels or info.task not in ("classification", "regression"):
        return None
    # Transformers models take their inputs by keyword.
    return not hasattr(factory, "main_input_name")


def on_device(value: Any, device: torch.device) -> Any:
    """Return the keywords of a task with modules and tensors, such as class weights, on `device`."""
    if isinstance(value, (nn.Module, torch.Tensor)):
        return value.to(device)
    if isinstance(value, partial):
        return partial(value.func, *value.args, **on_device(value.keywords, device))
    if isinstance(value, dict):
        return {name: on_device(item, device) for name, item in value.items()}
    return value


def build_choice(
    config: Config,
    micro_batches: int,
    device: torch.device,
    choices: AutoChoices | None = None,
    world_size: int = 1,
) -> Callable[..., Choice]:
    """Return the function that chooses the loader, for `load_data`; a resumed run keeps its own choice."""
    choices = choices or AutoChoices()
    kind, workers = choices.began_with("dataloader.kind", str), choices.began_with("dataloader.workers", int)
    loader, augment = config.dataloader, Augment(**config.augment.model_dump(exclude={"mixup", "cutmix"}))
    keeps = loader.kind == "auto" and kind is not None
    return partial(
        choose,
        kind=(keeps and kind) or loader.kind,
        # Loaders without workers save 0, which falls back to the config's value.
        workers=(loader.workers == "auto" and workers) or loader.workers,
        micro_batch_size=config.batch_size // micro_batches,
        num_samples=None if config.steps is None else config.steps * config.batch_size,
        prefetch=loader.prefetch,
        before=choices.previous["dataloader.kind"].reason or None if keeps else None,
        augments=bool(augment),
        crops=augment.resized_crop is not None,
        device=device,
        world_size=world_size,
    )


def build_eval_loaders(run: PartialRun, data: Data, side: SideStream | None) -> None:
    """Build a loader for each split of `data` except `train`; `side` is the stream that prepares batches."""
    batch_size = eval_batch_size(run)
    splits = {"val": (data.val, data.info), "test": (data.test, data.info)}
    splits |= {name: (found.val, found.info) for name, found in data.evals.items()}
    for split, (source, info) in splits.items():
        if source is not None:
            run.eval_loaders[split] = build_eval_loader(
                source,
                info,
                run.loader_options,
                batch_size=batch_size,
                rank=run.ranks.rank,
                world_size=run.ranks.world_size,
                whole_batches=run.config.determinism == "elastic",
                side=side,
            )


def few_samples(run: PartialRun, model: nn.Module, num_samples: int = 2) -> Any:
    """Return a batch of evenly spaced training samples, in the task's form, on the device of `model`."""
    data = run.splits
    if isinstance(data.train, IterableSource):
        raise TypeError("iterable data has no length")
    places = np.linspace(0, len(data.train) - 1, min(num_samples, len(data.train)))
    few = data.train.take(places.astype(np.int64))
    device = next((p.device for p in model.parameters()), run.device)
    options = replace(loader_options(run), device=device)
    return next(iter(build_eval_loader(few, data.info, options, batch_size=num_samples))).data


def eval_batch_size(run: PartialRun) -> int:
    """Return the samples per forward pass in evaluation on one rank: more than in training."""
    info, micro_batch_size = run.info, run.config.batch_size // run.micro_batches
    if run.config.eval.batch_size is not None:
        return run.config.eval.batch_size
    if info.kind in ("image", "features") and info.input_shape is not None:
        small = 4 * math.prod(info.input_shape) <= SMALL_SAMPLE_BYTES
        return max(micro_batch_size, 256) if small else micro_batch_size
    return 2 * micro_batch_size if info.kind in ("text", "tokens") else micro_batch_size


def build_loaders(run: PartialRun) -> None:
    """Build the loaders of the training data and of the splits that are evaluated."""
    config, choices, loader, plan = run.config, run.choices, run.config.dataloader, run.training_plan
    choice: Choice = run.splits.choice
    run.loader_options = loader_options(
        run,
        kind=choice.kind,
        reason=choice.reason,
        workers=choice.workers,
        prefetch=loader.prefetch,
        worker_threads=config.backend.worker_threads,
        pin=loader.pin,
        fused=loader.fused,
    )
    side = open_side_stream(run.device) if loader.side_stream else None
    data = replace(run.splits, order=build_order(config.sampling, run.splits, config.seed))
    sampling = describe_sampling(config.sampling, data)
    choices.note("sampling", sampling, sampling)
    augment = build_augment(
        config.augment.model_dump(exclude={"mixup", "cutmix"}),
        data.info,
        images=data.train.images,
        task_name=config.task.name,
        normalize=config.data.normalize,
    )
    mix = build_mix(config.augment.mixup, config.augment.cutmix, config.seed, info=data.info, task=run.task)
    run.train_loader = build_train_loader(
        data,
        Sharding(plan.batches, run.micro_batches, run.ranks.rank, run.ranks.world_size),
        replace(run.loader_options, input_type=run.input_type),
        seed=config.seed,
        augment=augment,
        transforms=[*plan.transforms, *([mix] if mix is not None else [])],
        side=side,
        report=run.clock.to,
    )
    build_eval_loaders(run, data if config.eval.test else replace(data, test=None), side)
    choices.choose("dataloader.kind", choice.kind, choice.reason if loader.kind == "auto" else "")
    choices.choose("dataloader.workers", run.train_loader.workers)
    # User code may create many Python objects per sample; ptfast's creates few.
    sources = data.train.parts if isinstance(data.train, MapSource) else [data.train]
    of_users = any(isinstance(each, (DatasetSource, IterableSource)) for each in sources)
    theirs = of_users and not run.train_loader.workers
    reason = "the dataset's own code makes Python objects" if theirs else ""
    run.collector = Collector(
        choices.resolve("backend.gc", config.backend.gc, bool, lambda: (theirs, reason))
    )
    choices.choose("dataloader.side_stream", side is not None)
    batches = run.train_loader.batches
    choices.choose("dataloader.fused", getattr(batches, "fused", False), getattr(batches, "unfused", ""))
    words, share = describe_padding(config, data, plan.batches, run.micro_batches)
    choices.note("padding_share", share, words)
    size, batch_size = plan.batches.size, plan.batches.batch_size
    if size is not None and batch_size > size:
        run.display.warn(
            f"batch_size={batch_size:,} is more than the {size:,} training samples: each epoch is one step"
        )


def loader_options(run: PartialRun, **how: Any) -> LoaderOptions:
    """Return the options for preparing samples; `how` sets who reads them, by default this process."""
    return LoaderOptions(
        run.device, run.config.data.normalize, bool(run.choices.get("rewrites.channels_last")), **how
    )
