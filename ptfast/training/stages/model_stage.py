"""The model of a run: built, tried on samples, placed, rewritten, checkpointed, compiled, wrapped."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from ptfast.core.distributed import broadcast_buffers, on_first_rank
from ptfast.core.errors import (
    ConfigError,
    MachineError,
    PtfastError,
    SavedStateError,
    name_some,
    shorten,
    summary_of,
)
from ptfast.core.machine import is_memory_error, memory_limit, network_error
from ptfast.core.protocols import DataInfo, takes_own_steps
from ptfast.core.sections.origins import CASTING, comes_from, is_ours
from ptfast.core.sections.targets import EMPTY, Target, keywords
from ptfast.core.tensors.dtensors import is_expanded
from ptfast.core.tensors.trees import tensors_in
from ptfast.core.units import num_bytes
from ptfast.data.data_fingerprint import describe_part
from ptfast.data.streams.iterable import IterableSource
from ptfast.models import Model
from ptfast.models.build_model import build_model, lazy_tensors, size_lazy_layers
from ptfast.models.lora import add_adapters
from ptfast.models.warm_start import load_weights
from ptfast.optim.parameter_groups import Grouping
from ptfast.tasks.supervised import call
from ptfast.techniques.backend.torch_settings import allow_cudnn_attention, expand_segments
from ptfast.techniques.checkpointing.activation_checkpointing import apply_checkpointing
from ptfast.techniques.compile.compilation import Compilation
from ptfast.techniques.parallel.ddp import GradientAveraging
from ptfast.techniques.parallel.ordered_sums import OrderedSums
from ptfast.techniques.parallel.sync_batchnorm import apply_sync_batchnorm
from ptfast.techniques.precision.mixed_precision import apply_float8, apply_half_weights, casts_inputs
from ptfast.techniques.repeated_blocks import find_blocks
from ptfast.techniques.rewrites.model_rewrites import apply_rewrites, find_cancelled_biases
from ptfast.training.stages.data_stage import few_samples
from ptfast.training.stages.partial_run import PartialRun
from ptfast.training.stages.training_plan import has_many_lengths
from ptfast.training.user_code import constructing

LARGE = 10_000
"""A ptfast model with a config value of at least this size is measured before it is built."""
NUM_INIT_SAMPLES = 5000
"""Number of training samples from which a model may compute its initial weights."""
_ASK_FOR_WEIGHTS = ("weights", "pretrained", "weights_backbone", "pretrained_backbone")
"""Keys of `model` that make a constructor download weights."""


def build_plain_model(run: PartialRun) -> None:
    """Build the model on the CPU, with the initial weights of a new run."""
    section, fresh, info = run.config.model, run.state is None, run.info
    # Exports have merged weights.
    adapts = section.lora.rank is not None and not (run.state and "export" in run.state.facts)
    loads = fresh or (adapts and run.choices.began_with("base_digest", str) is not None)
    target = section.target
    status = run.display.status("building the model")
    with status, constructing("model", target.path), _fetching(section), _finding_room(target, "cpu"):
        _check_size(target, info)
        run.model = build_model(target, info, pretrained=loads and section.weights == "pretrained")
    if lazy := lazy_tensors(run.model):
        _size_lazy_layers(run, lazy)
    frozen = [parameter for parameter in run.model.parameters() if not parameter.requires_grad]
    for tensor in (*run.model.buffers(), *frozen):
        if is_expanded(tensor):
            # Checkpoints and averages are copied into it, which expanded memory does not allow.
            tensor.data = tensor.data.contiguous()
    if loads and section.weights and section.weights != "pretrained":
        notes = load_weights(run.model, section.weights, replace_head=section.replace_head)
        for note in notes if fresh else ():
            run.display.note(note)
    if adapts:
        _adapt(run)


def _adapt(run: PartialRun) -> None:
    """Add adapters; checkpoints omit the frozen weights, if `model.weights` can provide them again."""
    section, model = run.config.model, run.model
    # A language model's last layer is part of the base.
    layers = add_adapters(model, section.lora, trains_head=run.info.task != "language_modelling")
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    words, digest = f"rank {section.lora.rank} in {len(layers)} layers; {trained:,} parameters train", None
    if section.weights:
        frozen = {n: p for n, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
        content = (parameter.detach().reshape(-1).view(torch.uint8).numpy() for parameter in frozen.values())
        run.checkpointer.left_out, digest = [*frozen], describe_part(len(frozen), "", *content)[2]
        size = num_bytes(sum(parameter.nbytes for parameter in {*frozen.values()}))
        words += f", and checkpoints leave out the other {size}"
    run.choices.note("LoRA", len(layers), words)
    run.choices.note("base_digest", digest)
    if run.choices.began_with("base_digest", str) not in (None, digest):
        what, hint = "not the weights that the adapters were trained with", "Set those"
        raise SavedStateError("S002", what, key="model.weights", value=section.weights, suggestion=hint)


def _size_lazy_layers(run: PartialRun, lazy: Mapping[str, Any]) -> None:
    """Give lazy layers the sizes of the saved weights, or the sizes that the first samples need."""
    if rank := run.config.model.lora.rank:
        what = f"LoRA needs layers of known sizes, and {next(iter(lazy))} is lazy"
        raise ConfigError("C011", what, key="model.lora.rank", value=rank)
    if run.state is not None:
        for name in lazy.keys() & run.state.model.keys():
            lazy[name].materialize(run.state.model[name].shape)
        return
    path = run.config.model.target.path
    try:
        inputs = few_samples(run, run.model)[0]
        size_lazy_layers(run.model, lambda: call(run.model, inputs))
    except Exception as error:
        what = f"has lazy layers, which get no sizes from the first samples: {summary_of(error)}"
        hint = "Set their sizes, or call the model once in its constructor"
        raise ConfigError("C017", what, key="model._target_", value=path, suggestion=hint) from error
    if left := lazy_tensors(run.model):
        what = f"has lazy layers that its forward does not use: {name_some([*left])}"
        raise ConfigError("C017", what, key="model._target_", value=path, suggestion="Remove them")


@contextlib.contextmanager
def _finding_room(target: Target, device: str) -> Iterator[None]:
    """Report weights that do not fit into memory as E002, at the key of the model's largest size."""
    try:
        yield
    except Exception as error:
        if not is_memory_error(error):
            raise
        limit, name = memory_limit(device)
        sizes = {key: _largest(value) for key, value in target.kwargs.items()}
        key = max(sizes, key=lambda key: sizes[key], default="_target_")
        raise MachineError(
            "E002",
            f"the model does not fit in memory ({name}: {num_bytes(limit)})",
            key=f"model.{key}",
            value=target.kwargs.get(key, target.path),
            suggestion="Make it smaller" if device == "cpu" else "Make it smaller, or use parallel=fsdp",
        ) from error


def _check_size(target: Target, info: DataInfo) -> None:
    """Reject weights larger than the free memory: the system would kill the process that fills it."""
    ours = is_ours(target.path) and isinstance(target.resolve(), type)
    if not ours or max(map(_largest, target.kwargs.values()), default=0) < LARGE:
        return
    try:
        with torch.device("meta"):
            needed = sum(each.nbytes for each in build_model(target, info).parameters())
    except (RuntimeError, TypeError) as error:
        needed = math.inf if "overflow" in str(error).lower() else 0
    if needed > memory_limit("cpu")[0]:
        raise MemoryError


def _largest(value: Any) -> int:
    several = value if isinstance(value, (list, tuple)) else [value]
    return max((each for each in several if isinstance(each, int)), default=0)


@contextlib.contextmanager
def _fetching(section: Model) -> Iterator[None]:
    """Report weights that cannot be downloaded as an error of the key that requests them."""
    try:
        yield
    except Exception as error:
        if isinstance(error, PtfastError) or (cause := network_error(error)) is None:
            raise
        asked = {name: keyword.default for name, keyword in keywords(section.target.resolve()).items()}
        asked |= section.target.kwargs | {"weights": section.weights}
        name = next((name for name in _ASK_FOR_WEIGHTS if asked.get(name) not in (None, False, EMPTY)), None)
        off = "null" if name is None or asked[name] is not True else "false"
        hint = "Download them elsewhere and set model.weights to the file"
        if name:
            hint += f", or set model.{name}={off} for random ones"
        raise MachineError(
            "E005",
            f"its weights cannot be downloaded ({type(cause).__name__}: {shorten(cause, 200)})",
            key=f"model.{name or '_target_'}",
            value=asked[name] if name else section.target.path,
            suggestion=hint,
        ) from error


def place_model(run: PartialRun) -> None:
    """Prepare the model for computing: precision, device, rewrites, initial weights."""
    model, has_data = run.model, run.data is not None
    backend, device = run.config.backend, run.device
    many_lengths = has_data and has_many_lengths(run.splits, run.config.batching)
    captures = run.config.compile.mode in ("reduce_overhead", "max_autotune")
    expand_segments(backend, device, run.choices, many_lengths=many_lengths, captures=captures)
    allow_cudnn_attention(backend, device, run.choices, many_lengths=many_lengths)
    if run.precision.half_weights:
        apply_half_weights(model)
    if not run.shards_weights:
        # FSDP moves it one block at a time: the whole may fit on no device.
        with _finding_room(run.config.model.target, run.device.type):
            model.to(run.device)
    if run.config.precision.float8:
        layers = apply_float8(model)
        run.choices.note("float8", layers, f"products of {len(layers)} layers")
    apply_rewrites(
        model,
        run.config.rewrites,
        kind=run.info.kind,
        device=run.device,
        # A trained model drops the biases it was trained without.
        cancelled_biases=partial(on_first_rank, partial(_cancelled_biases, run), run.ranks)
        if has_data
        else None,
        task=run.task,
        # FSDP splits weights into contiguous rows.
        sharded=run.shards_weights,
        choices=run.choices,
    )
    fresh = run.state is None and not run.config.model.weights
    if fresh and has_data and hasattr(model, "init_from_data"):
        _init_from_data(run, model)
    if has_data:
        run.input_type = on_first_rank(partial(_find_input_type, run), run.ranks)


def _init_from_data(run: PartialRun, model: Any) -> None:
    """Let a model with `init_from_data` compute initial weights from training inputs, on the first rank."""
    if isinstance(run.splits.train, IterableSource):
        what = "computes its first weights from the data, but a stream is read only once"
        raise ConfigError("C011", what, key="model._target_", value=run.config.model.target.path)

    def init() -> None:
        with run.display.status("reading first samples"):
            model.init_from_data(next(tensors_in(few_samples(run, model, NUM_INIT_SAMPLES))))

    on_first_rank(init, run.ranks)
    if not run.shards_weights:
        broadcast_buffers([*model.parameters(), *model.buffers()], run.ranks)


def shape_model(run: PartialRun) -> None:
    """Prepare a placed model for training, in place; wrapping for ranks comes last."""
    config, choices, ranks = run.config, run.choices, run.ranks
    model = run.model
    if config.parallel.sync_batchnorm:
        apply_sync_batchnorm(model)
    dropped = [f"{name}.bias" for name in choices.get("dropped_biases") or ()]
    run.grouping = Grouping(model, config.optimizer, dropped)
    run.grouping.freeze()
    known = choices.began_with("checkpointed", list[str])
    blocks = apply_checkpointing(model, config.checkpointing, known=known)
    dynamic = choices.resolve(
        "compile.dynamic",
        config.compile.dynamic,
        bool,
        lambda: (has_many_lengths(run.splits, config.batching), ""),
    )
    if config.compile.mode != "none":
        accumulates = run.micro_batches > ranks.world_size
        run.compilation = Compilation(
            config.compile.mode, run.device.type, dynamic=dynamic, accumulates=accumulates
        )
        run.compilation.apply(model, config.compile.blocks)
        choices.rows["compile"] = run.compilation.describe()
    shards = find_blocks(model, config.parallel.blocks, key="parallel.blocks") if run.shards_weights else {}
    choices.note("checkpointed", list(blocks))
    choices.note("shards", list(shards))

    def wrap() -> Any:
        if config.determinism == "elastic":
            return OrderedSums(model, ranks, run.micro_batches)
        if not ranks.distributed:
            return model
        if run.shards_weights:
            # Its import takes two seconds.
            from ptfast.techniques.parallel.fsdp import Sharded

            return Sharded(
                model,
                ranks,
                run.device,
                blocks=shards.values(),
                autocast_dtype=run.precision.autocast_dtype,
            )
        return GradientAveraging(model, config.parallel)

    run.wrap = wrap
    run.forward = wrap()


def _find_input_type(run: PartialRun) -> torch.dtype:
    """Return the dtype of training images: half if a known model casts them and no other part uses them."""
    model, task, config = run.model, run.task, run.config
    half = torch.bfloat16 if run.precision.half_weights else run.precision.autocast_dtype
    ours = is_ours(task) and not takes_own_steps(task)
    known = comes_from(model, *CASTING) and not run.shards_weights
    seen = run.training_plan.transforms or config.augment.mixup or config.augment.cutmix or config.callbacks
    # Fused like casts: kernels may sum in another order if images begin within a cache line.
    aligned = run.info.input_shape is not None and math.prod(run.info.input_shape) % 32 == 0
    if half is None or not (ours and known and aligned and run.splits.train.images) or seen:
        return torch.float32
    try:
        samples = few_samples(run, model)
        with run.precision.autocast:
            casts = casts_inputs(model, samples[0], half, lambda: task.loss(model, samples))
    except Exception:
        casts = False  # training reports what is wrong; iterable data cannot be sampled
    return half if casts else torch.float32


def _cancelled_biases(run: PartialRun) -> dict[str, str]:
    """Return biases that a BatchNorm subtracts, found on a few samples; empty if tracing fails."""
    model, task = run.model, run.task
    if takes_own_steps(task):
        return {}

    def forward() -> object:
        with run.precision.autocast:
            return task.loss(model, few_samples(run, model))

    try:
        return find_cancelled_biases(model, forward)
    except Exception as error:
        # Training reports what is wrong with the model or the data; iterable data cannot be sampled.
        run.display.note(f"biases before a BatchNorm are kept: {type(error).__name__}: {error}")
        return {}
