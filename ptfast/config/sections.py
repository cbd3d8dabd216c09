"""The sections of a config: the fixed keys of every group, their types, ranges and defaults."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from ptfast.config.coerce import AT_LEAST_ONE, NOT_NEGATIVE, POSITIVE, InUnit, Range, coerce
from ptfast.config.targets import Target, built, plain
from ptfast.durations import Duration

Count = Annotated[int, AT_LEAST_ONE]
OrAuto = Literal["auto"]
Part = Annotated[float, Range(0, 1, open_low=True)]
Ratio = Annotated[float, POSITIVE]
Every = Annotated[Duration, InUnit("epochs"), POSITIVE]
WallTime = Annotated[Duration, InUnit("seconds", ("seconds",)), POSITIVE]


class Section(BaseModel):
    """Base of all sections: frozen, closed, values coerced by `ptfast.config.coerce` before pydantic."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, defer_build=True)

    @field_validator("*", mode="before")
    @classmethod
    def _coerced(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields[info.field_name or ""]
        annotation = field.annotation
        for metadata in field.metadata:
            annotation = Annotated[annotation, metadata]  # type: ignore[valid-type]
        return coerce(value, annotation, name=info.field_name or "")

    def to_tree(self) -> dict[str, Any]:
        """Plain YAML-able data that validates to an equal object."""
        tree: dict[str, Any] = {}
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, Section):
                tree[name] = value.to_tree()
            elif name == "target":
                tree.update(value.to_tree() if value else {"_target_": None})
            elif name == "options":
                tree.update(plain(value))
            elif isinstance(value, list) and any(isinstance(item, Section) for item in value):
                tree[name] = [item.to_tree() for item in value]
            else:
                tree[name] = plain(value)
        return tree


class TargetSection(Section):
    """A section with `_target_`: the target's keywords and fixed keys side by side."""

    target: Target


class Task(Section):
    """What a batch is and what its loss means: a name or import path, and the task's keywords beside it."""

    name: str = "auto"
    """A built-in task, `auto` for what the data is for, or the import path of your own."""
    options: dict[str, Any] = Field(default_factory=dict)

    def build_options(self) -> dict[str, Any]:
        """Keywords of the task's constructor; what they name by import path is built."""
        return built(self.options)


class Eval(Section):
    """When the held-out splits are evaluated."""

    every: Every = Duration(1, "epochs")
    """How often `val` is evaluated, such as `1epochs` or `500steps`."""
    batch_size: Count | None = None
    """Samples of an evaluation's batch on each rank; null for at least 256."""
    last: Literal["keep", "drop", "pad"] = "keep"
    """Whether a split's last, smaller batch is evaluated; `pad` fills it with stand-ins that do not count."""
    flip: bool = False
    """Average what the model says of an image and of its mirror image; predictions too."""


class Stop(Section):
    """When training ends before its last step."""

    patience: Count | None = None
    """Stop after so many evaluations without a better one; null never stops early."""
    metric: str | None = None
    """The figure that `best` and `patience` follow; null for the task's own."""
    mode: Literal["auto", "min", "max"] = "auto"
    """Which way that figure is better; `auto` goes by its name."""


class RunOptions(Section):
    """Where the run lies, what it goes on from, how long it may take."""

    name: str | None = None
    """Folder under `run.root`; null for the recipe's name."""
    root: str = "runs"
    """Folder of all runs."""
    dir: str | None = None
    """The run's own folder; null for a new one under `run.root`."""
    resume: Literal["auto", "never"] | str = "never"
    """`never`, `auto` (the newest unfinished run of this config), or a state folder to go on from."""
    max_time: WallTime | None = None
    """Save and leave after so much wall time, such as `2h`."""


class Sweep(Section):
    """What the runs of a sweep are ranked by."""

    metric: str = "auto"
    """The figure that runs are ranked by, such as `val.loss`; `auto` for what `best` follows."""
    mode: Literal["auto", "min", "max"] = "auto"
    """Which way it is better; `auto` goes by its name."""


class Data(TargetSection):
    """The data set, and what of it is held out."""

    val: Annotated[Duration, InUnit("samples", ("percent", "samples"))] = Duration(10, "percent")
    """What is held out for validation where the data has no such split: `10%`, `500samples` or 0."""
    normalize: bool = True
    """Bring inputs to mean 0 and standard deviation 1 of the training data."""
    shuffle_buffer: Count | None = None
    """Samples that come next in a stream, of which one is drawn; null for the order that data lies in."""


class Model(TargetSection):
    """The model and the weights it starts from."""

    weights: str | None = None
    """What to start from: `pretrained`, a file or a run folder; null for random weights."""
    replace_head: bool = False
    """Keep random weights where those of the last layer do not fit."""


class Dataloader(Section):
    """How samples reach the training loop."""

    kind: Literal["auto", "plain", "workers", "memory", "device", "packed"] = "auto"
    """Who reads: this process, workers, memory or device once, or a pack; `auto` takes the quickest."""
    workers: Annotated[int, NOT_NEGATIVE] | OrAuto = "auto"
    """Worker processes of each rank."""
    prefetch: Count = 2
    """Batches that each worker reads ahead."""
    pin: bool | OrAuto = "auto"
    """Page-locked memory, from which copies to the GPU run beside the training."""
    side_stream: bool = True
    """Copy the next batch to a CUDA device while this one trains, on a stream of its own."""
    read_ahead: bool = False
    """Read the next batch in a thread while this one trains, on a CPU."""
    last: Literal["keep", "drop", "pad"] = "keep"
    """Whether an epoch's last, smaller batch is trained on; `pad` fills it from the epoch's start."""


class Batching(Section):
    """Which texts come together in a batch, and how they come to one length."""

    padding: Literal["longest", "fixed"] = "longest"
    """Up to the longest text of the batch, or in every batch up to the longest that the data keeps."""
    multiple: Literal[1, 8, 64] = 1
    """Pad to a multiple of so many tokens: 8 suits tensor cores, 64 keeps the shapes few."""
    buckets: bool = False
    """Batches of texts of like length, in a random order; every text once in an epoch."""
    batch_tokens: Count | None = None
    """Tokens of one optimizer step over all ranks, padding included, in place of `batch_size` samples."""
    pack: bool = False
    """Documents of a text to model side by side in windows of the context length, each seen by itself."""


class Augment(Section):
    """Random changes to training images."""

    crop_padding: Annotated[int, NOT_NEGATIVE] = 0
    """Pixels of padding around an image before a random crop of its size."""
    flip: bool | Literal["alternating"] = False
    """Mirror half of the images, drawn anew every epoch; `alternating` turns each over every epoch."""
    resized_crop: tuple[Part, Part] | None = None
    """Least and largest part of an image's area that is cut out and scaled to full size; null for none."""
    resized_ratio: tuple[Ratio, Ratio] = (0.75, 1.3333)
    """Least and largest width of such a part over its height."""
    cutout: Annotated[int, NOT_NEGATIVE] = 0
    """Side in pixels of a square that is hidden; 0 for none."""
    brightness: Annotated[float, Range(0, 3)] = 0.0
    """Largest change of brightness, as a part of it."""
    contrast: Annotated[float, Range(0, 3)] = 0.0
    """Largest change of contrast, as a part of it."""
    saturation: Annotated[float, Range(0, 3)] = 0.0
    """Largest change of saturation, as a part of it."""
    rotation_degrees: Annotated[float, Range(0, 180)] = 0.0
    """Largest turn either way."""
    translation: Annotated[float, Range(0, 1)] = 0.0
    """Largest shift each way, as a part of height and width."""
    scaling: Annotated[float, Range(0, 1, open_high=True)] = 0.0
    """Largest change of size, as a part of it."""
    mixup: Annotated[float, NOT_NEGATIVE] = 0.0
    """Blend each sample with another: parameter of its Beta distribution; 0 for none."""
    cutmix: Annotated[float, NOT_NEGATIVE] = 0.0
    """Paste a patch of another image into each: parameter of its Beta distribution; 0 for none."""
    targets: Literal["auto", "keep"] = "auto"
    """`auto` moves masks with their images, and refuses targets that may be places; `keep` moves none."""


class Curriculum(Section):
    """What is small at first and grows while training goes on."""

    image_size_from: Count | OrAuto | None = None
    """Pixels of the shorter side of images at first; `auto` for half of theirs, null for all."""
    image_size_multiple: Count = 32
    """Sizes in between are multiples of it; every size is one more shape to find kernels for."""
    length_from: Count | OrAuto | None = None
    """Tokens of sequences at first; `auto` for a quarter of theirs, null for all."""
    length_multiple: Count = 64
    """Lengths in between are multiples of it."""
    batch_size_from: Count | OrAuto | None = None
    """Samples of a batch at first, by which it then grows; `auto` for a quarter, null for all."""
    over: Annotated[Duration, InUnit("steps"), POSITIVE] = Duration(60, "percent")
    """How long it takes to grow to full size, such as `60%` or `5epochs`."""


class Precision(Section):
    """The number format that forward and backward compute in."""

    mode: Literal["fp32", "tf32", "amp", "bf16", "amp_fp16", "bf16_true"] = "fp32"
    """`amp` chooses by device: native bfloat16, else float16 with a gradient scaler on CUDA, else float32."""
    matmul_precision: Literal["auto", "highest", "high", "medium"] = "highest"
    """Of float32 matrix products, measured before use; `auto` is the quickest as exact as float32."""


class ParameterGroup(Section):
    """What holds for the parameters whose names match; where entries disagree, the later one counts."""

    match: str
    """Pattern of names, such as `*.bias` or `layers.0.*`; `*` stands for dots too, and case counts."""
    lr_scale: Annotated[float, POSITIVE] | None = None
    """What the learning rate is multiplied by."""
    weight_decay: Annotated[float, NOT_NEGATIVE] | None = None
    """Weight decay in place of the optimizer's."""
    clip_norm: Annotated[float, POSITIVE] | None = None
    """Largest norm of these parameters' gradients taken as one, in place of `gradients.clip_norm`."""
    trains_from: Annotated[Duration, InUnit("epochs")] | None = None
    """Length of training after which they begin to train."""
    trains_until: Annotated[Duration, InUnit("epochs")] | None = None
    """Length of training after which they stop; 0 keeps them frozen throughout."""


class Optimizer(TargetSection):
    """What changes the weights."""

    decay_1d: bool = True
    """Whether norms and biases (parameters of at most one dimension) have weight decay."""
    layer_decay: Annotated[float, Range(0, 1, open_low=True)] | None = None
    """Factor on the learning rate for every layer between a parameter and the output, such as 0.75."""
    groups: list[ParameterGroup] = Field(default_factory=list)
    """What holds for parameters by name: a list such as `[{match: "*.bias", lr_scale: 64}]`."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How the learning rate grows with the batch size from that at `reference_batch`."""
    reference_batch: Count | None = None
    """The batch size that learning rate and weight decay are given for."""


class Schedule(TargetSection):
    """How the learning rate moves over the run."""

    warmup: Annotated[Duration, InUnit("steps")] = Duration(0, "steps")
    """Length of the linear rise at the beginning, such as `5%` or `200steps`."""


class Gradients(Section):
    """What happens to gradients between backward and the optimizer's step."""

    accumulate: Count = 1
    """Micro-batches of each rank in one optimizer step, where `micro_batches` does not say it."""
    clip_norm: Annotated[float, POSITIVE] | None = None
    """Largest global norm of the gradients."""
    clip_value: Annotated[float, POSITIVE] | None = None
    """Largest absolute value of each gradient."""
    clip_adaptive: Annotated[float, POSITIVE] | None = None
    """Largest norm of a unit's gradient as a part of its weights' norm, such as 0.01; the head is spared."""
    log_norm: bool = False
    """Log the global norm of the gradients before clipping as `grad_norm`."""


class Parallel(Section):
    """The processes that train together."""

    strategy: Literal["single", "ddp", "fsdp"] = "single"
    """One process; several with averaged gradients; several that share the weights out, too."""
    nproc: Count | OrAuto = "auto"
    """Processes on this machine; `auto` for one per visible GPU."""
    nnodes: Count = 1
    """Machines that train together."""
    timeout: WallTime = Duration(600, "seconds")
    """How long ranks wait for one another before the run fails."""
    sync_batchnorm: bool = False
    """BatchNorm takes its statistics over all ranks."""
    gradient_as_bucket_view: bool = True
    """ddp: gradients lie in the buffers that are sent, which saves a copy of them."""
    bucket_mb: Annotated[float, POSITIVE] = 25.0
    """ddp: megabytes of gradients that are sent together."""
    static_graph: bool = False
    """ddp: every step uses the same parameters in the same order."""
    unused_parameters: bool = False
    """ddp: look in every step for parameters that the loss does not depend on."""
    compression: Literal["none", "bf16", "fp16", "powersgd"] = "none"
    """ddp: what gradients are sent as."""
    powersgd_rank: Count = 1
    """Columns of the thin matrices that `compression=powersgd` sends."""
    powersgd_start: Annotated[int, Range(2, 2**31)] = 1000
    """Steps that send whole gradients before."""
    blocks: list[str] | Literal["auto"] = "auto"
    """fsdp: parts gathered at a time, as patterns of names such as `layers.*`; `auto` finds what repeats."""


class Checkpointing(Section):
    """Activations that backward computes again."""

    mode: Literal["none", "full", "every_n", "selective", "budget"] = "none"
    """What is computed again: all of blocks, of every n-th, their cheap parts, or the compiler's choice."""
    blocks: str | tuple[str, ...] = "auto"
    """A pattern or patterns of module names, such as `layers.*`; `auto` for the blocks that recur."""
    every: Count | None = None
    """For `every_n`: 2 takes every second block."""
    memory_budget: float | None = None
    """For `budget`: the share that is kept of what a compiled model keeps."""


class Rewrites(Section):
    """Rewrites of the model that leave its formula as it is."""

    channels_last: bool | OrAuto = "auto"
    """Store images with the channels innermost; `auto` where that usually pays."""
    bias_before_norm: bool = True
    """Keep a layer's bias where the BatchNorm right behind subtracts it again."""


class Compile(Section):
    """What `torch.compile` takes."""

    mode: Literal["none", "pointwise", "blocks", "model", "reduce_overhead", "max_autotune"] = "none"
    """Elementwise chains, repeated blocks, the model, it in CUDA graphs, or with the quickest kernels."""
    blocks: str | tuple[str, ...] = "auto"
    """For `blocks`: a pattern or patterns of module names; `auto` for the blocks that recur."""
    dynamic: bool | OrAuto = "auto"
    """One code for batches of any length; `auto` for texts that come in more than a few lengths."""


class Ema(Section):
    """The average of the weights that is evaluated and used in their place."""

    decay: float | None = None
    """Share that each step keeps of a moving average, such as 0.999; null for no moving average."""
    swa_start: Annotated[Duration, InUnit("epochs")] | None = None
    """From where on weights count alike in an average (SWA), such as `75%`; null for no such average."""
    swa_every: Every = Duration(1, "epochs")
    """How far apart the weights lie that SWA averages, such as `1epochs` or `100steps`."""


class Backend(Section):
    """Threads and kernels."""

    threads: Count | OrAuto = "auto"
    """Threads of each rank."""
    worker_threads: Count = 1
    """Threads of each of the loader's worker processes."""
    cudnn_benchmark: bool | OrAuto = "auto"
    """Let cuDNN time its kernels and take the quickest; `auto` while the shapes of inputs are few."""
    deterministic: bool = False
    """Only kernels that give the same bits in every run."""


class Debug(Section):
    """Looks at a run that slow it down and change nothing in it."""

    mode: Literal["none", "anomaly", "profiler", "nvtx", "gradcheck", "memory"] = "none"
    """What is looked at: NaN, operators, marks for Nsight Systems, the gradient of the loss, or memory."""
    wait: Annotated[int, NOT_NEGATIVE] = 5
    """Steps before `profiler` and `memory` start."""
    warmup: Annotated[int, NOT_NEGATIVE] = 2
    """Further steps, in which `profiler` runs without recording."""
    active: Count = 5
    """Steps that `profiler` and `memory` look at."""


class Saving(Section):
    """When states are saved, and how many are kept."""

    every: Every = Duration(1, "epochs")
    """How often the state is saved, such as `1epochs` or `500steps`."""
    keep: Count = 1
    """Newest states that are kept."""
    best: bool = True
    """Keep the state of the best evaluation too."""


class Logger(Section):
    """Where figures go besides metrics.jsonl."""

    target: Target | None = None
