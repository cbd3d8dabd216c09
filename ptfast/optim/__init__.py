"""Records of the optimizers, and of how their steps are computed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Literal

from pydantic import Field

from ptfast.core.durations import Duration
from ptfast.core.errors import COMMAND_LINE, ConfigError, PtfastError
from ptfast.core.sections.coerce import NOT_NEGATIVE, POSITIVE, InUnit, Range
from ptfast.core.sections.section import Count, Place, Section, TargetSection, Unused
from ptfast.core.sections.targets import Target, keywords
from ptfast.core.sections.technique import Family, Technique
from ptfast.techniques.ema import Ema
from ptfast.techniques.gradients import Gradients
from ptfast.techniques.parallel import Parallel
from ptfast.techniques.schedule import Schedule


class ParameterGroup(Section):
    """Settings of the parameters whose names match; where entries disagree, the later one counts."""

    match: str
    """Pattern of names, such as `*.bias` or `layers.0.*`; `*` stands for dots too, and case counts."""
    lr_scale: Annotated[float, POSITIVE] | None = None
    """Factor on the learning rate."""
    weight_decay: Annotated[float, NOT_NEGATIVE] | None = None
    """Weight decay in place of the optimizer's."""
    name: str | None = None
    """Name of their optimizer for a task that takes its own steps, such as `critic`."""
    clip_norm: Annotated[float, POSITIVE] | None = None
    """Largest norm of these parameters' gradients taken as one, in place of `gradients.clip_norm`."""
    trains_from: Annotated[Duration, InUnit("epochs")] | None = None
    """Length of training after which they begin to train."""
    trains_until: Annotated[Duration, InUnit("epochs")] | None = None
    """Length of training after which they stop; 0 keeps them frozen throughout."""


class Optimizer(TargetSection):
    """The optimizer, and settings of single parameters."""

    decay_1d: bool = True
    """Norms and biases (parameters of at most one dimension) have weight decay."""
    layer_decay: Annotated[float, Range(0, 1, open_low=True)] | None = None
    """Factor on the learning rate for every layer between a parameter and the output, such as 0.75."""
    backbone_from: Annotated[Duration, InUnit("epochs")] | None = None
    """Length of training after which all below the last layer begins to train, such as `1epochs`."""
    groups: list[ParameterGroup] = Field(default_factory=list)
    """Settings of parameters by name: a list such as `[{match: "*.bias", lr_scale: 64}]`."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How the learning rate grows with the batch size from that at `reference_batch`."""
    reference_batch: Count | None = None
    """The batch size that learning rate and weight decay are given for."""


_WHOLE_LAYERS = (
    "cautious_adamw.CautiousAdamW",
    "lars.Lars",
    "lamb.Lamb",
    "nvlamb.Nvlamb",
    "novograd.Novograd",
    "muon.Muon",
)
"""Our optimizers that step over whole layers, of which a rank under fsdp has a part."""


def one_way_of_clipping_groups(gradients: Gradients, optimizer: Optimizer) -> PtfastError | None:
    """Refuse another way of clipping beside norms of groups, which take the place of the global one."""
    other = next((name for name in ("clip_value", "clip_adaptive") if getattr(gradients, name)), None)
    limits = [(index, group.clip_norm) for index, group in enumerate(optimizer.groups) if group.clip_norm]
    if other is None or not limits:
        return None
    what = "contradicts optimizer.groups.{}.clip_norm={:g}".format(*limits[0])
    value, hint = getattr(gradients, other), "Set one of the two to null"
    return ConfigError("C011", what, key=f"gradients.{other}", value=value, suggestion=hint)


def reference_of_scaling(optimizer: Optimizer) -> PtfastError | None:
    """Refuse to scale the learning rate from no batch size."""
    if optimizer.lr_scaling == "none" or optimizer.reference_batch is not None:
        return None
    what, hint = "there is no batch size to scale from", "Set optimizer.reference_batch=256, say"
    return ConfigError("C011", what, key="optimizer.lr_scaling", value=optimizer.lr_scaling, suggestion=hint)


def momentum_of_nesterov(optimizer: Optimizer) -> PtfastError | None:
    """Refuse Nesterov's momentum without a momentum."""
    kwargs = optimizer.target.kwargs
    if kwargs.get("nesterov") is not True or kwargs.get("momentum") != 0:
        return None
    hint = "Set optimizer.momentum=0.9, or optimizer.nesterov=false"
    return ConfigError(
        "C011", "Nesterov needs a momentum", key="optimizer.nesterov", value=True, suggestion=hint
    )


def momentum_to_cycle(optimizer: Optimizer, schedule: Schedule, place: Place) -> PtfastError | None:
    """Refuse momenta typed for the schedule where the optimizer has none; those of an option stay off."""
    momenta = {name: schedule.target.kwargs.get(name) for name in ("momentum_max", "momentum_min")}
    typed = [name for name in momenta if momenta[name] and place(f"schedule.{name}") == COMMAND_LINE]
    if not typed or _has_momentum(optimizer.target):
        return None
    what = f"there is no momentum to cycle in {optimizer.target.path} as it is configured"
    hint = "Leave it out, or choose an optimizer with a momentum or betas, such as optimizer=sgd"
    key = f"schedule.{typed[0]}"
    return ConfigError("C011", what, key=key, value=momenta[typed[0]], suggestion=hint)


def _has_momentum(optimizer: Target) -> bool:
    given = {name: p.default for name, p in keywords(optimizer.resolve()).items() if p.default is not p.empty}
    given |= optimizer.kwargs
    return bool(given.get("momentum") or given.get("betas", (0,))[0])


def one_form_of_step(optimizer: Optimizer) -> PtfastError | None:
    """Refuse steps that are both fused and by lists of tensors."""
    kwargs = optimizer.target.kwargs
    if kwargs.get("fused") is not True or kwargs.get("foreach") is not True:
        return None
    what, hint = "contradicts optimizer.fused=true", "Leave one of the two out"
    return ConfigError("C011", what, key="optimizer.foreach", value=True, suggestion=hint)


def _trains_in_part(group: ParameterGroup) -> bool:
    """Return True if what the entry is about trains in a part of the run only."""
    begins, ends = group.trains_from, group.trains_until
    return bool(begins is not None and begins.value) or bool(ends is not None and ends.value)


def shared_out_parameters(optimizer: Optimizer, parallel: Parallel) -> Iterator[PtfastError]:
    """Refuse optimizers and freezing that ranks with parts of the weights or gradients cannot follow."""
    path, sharded = optimizer.target.path, parallel.strategy == "fsdp"
    backbone = optimizer.backbone_from
    waits = backbone is not None and bool(backbone.value)
    switching = waits or any(map(_trains_in_part, optimizer.groups))
    if switching and parallel.compression == "powersgd":
        what = "keeps the error of each bucket, and freezing changes the buckets"
        hint = "Use parallel.compression=bf16, or freeze throughout with trains_until: 0"
        yield ConfigError("C011", what, key="parallel.compression", value="powersgd", suggestion=hint)
    if sharded and path.startswith("ptfast.optim.") and path.endswith(_WHOLE_LAYERS):
        what = "needs whole layers, and under parallel=fsdp each rank has only a part of each"
        hint = "Use parallel=ddp, or an element-wise optimizer such as optimizer=adamw"
        yield ConfigError("C011", what, key="optimizer", value=path, suggestion=hint)
    if sharded and path == "torch.optim.Adafactor":
        what = "torch's Adafactor does not support the sharded weights of parallel=fsdp"
        yield ConfigError("C011", what, key="optimizer", value=path, suggestion="Use optimizer=adamw")
    if sharded and switching:
        what = "parallel=fsdp shards weights once, by what trains at the start"
        key, hint = "optimizer.groups", "Freeze throughout with trains_until: 0, or use parallel=ddp"
        if waits:
            key, hint = "optimizer.backbone_from", "Set it to null, or use parallel=ddp"
        yield ConfigError("C011", what, key=key, value=backbone, suggestion=hint)


def no_schedule_beside_schedule_free(
    optimizer: Optimizer, schedule: Schedule, ema: Ema, parallel: Parallel
) -> Iterator[PtfastError]:
    """Refuse what a schedule-free optimizer takes the place of, and ranks with parts of the weights."""
    if not optimizer.target.path.startswith("schedulefree."):
        return
    path = schedule.target.path
    if not path.endswith(".Constant"):
        what = "a schedule-free optimizer averages its weights in place of a schedule"
        hint = "Use schedule=constant, with schedule.warmup=5%"
        yield ConfigError("C011", what, key="schedule", value=path.rpartition(".")[2], suggestion=hint)
    if ema.decay is not None or ema.swa_start is not None:
        what = "a schedule-free optimizer keeps an average of its own"
        yield ConfigError("C011", what, key="ema", suggestion="Use ema=none")
    if parallel.strategy == "fsdp":
        what = "needs whole weights, and under parallel=fsdp each rank has only a part of each"
        key, hint = "optimizer", "Use parallel=ddp"
        yield ConfigError("C011", what, key=key, value=optimizer.target.path, suggestion=hint)


def panel(groups_note: str | None) -> dict[str, object]:
    """Settings of single parameters."""
    return {"parameters": groups_note}


_SMALL = ("model.hidden=[16]",)
_LAYERWISE_AVOID = "Batches of hundreds, at which a plain optimizer trains as well, with fewer settings."

_optimizer = partial(Technique, kind="training", off=("optimizer=adamw",), alternatives="optimizer")

TECHNIQUES: tuple[Technique, ...] = (
    _optimizer(
        name="fused optimizer step",
        kind="reordered",
        on=("optimizer.fused=auto",),
        off=("optimizer.fused=false",),
        why="One kernel updates weights and state in a single pass over memory; a step of separate "
        "operations makes about ten.",
        claim="The quickest of torch's three ways to take a step, before foreach and the loop over "
        "parameters.",
        source="PyTorch documentation of torch.optim, 'Algorithms'.",
        measured="A step on one CPU thread at the size of ResNet-18 and of DistilBERT: AdamW 8.4 and 45 ms "
        "instead of 46 and 322, SGD with Nesterov's momentum 6.1 and 32 ms instead of 38 and 283, "
        "with plain momentum 6.1 and 33 ms instead of 16 and 113.",
        command="python scripts/bench_optimizers.py --threads 1 --cpu-time",
        avoid="Never: optimizer.fused=auto skips it where it is not supported.",
        audit="torch.optim.SGD, Adam or AdamW without fused=True.",
        alternatives="step kernel",
        trial=_SMALL,
    ),
    _optimizer(
        name="foreach optimizer step",
        kind="reordered",
        on=("optimizer.foreach=true", "optimizer.fused=false"),
        off=("optimizer.fused=false",),
        why="Each operation of the step handles all parameters in a few launches instead of one launch per "
        "parameter.",
        claim="What torch takes on GPUs of itself: quicker there than a loop over parameters, slower than"
        " a fused step.",
        source="PyTorch documentation of torch.optim, 'Algorithms'.",
        avoid="On the CPU, or where the fused step runs.",
        audit="torch.optim with foreach=False on a GPU, or an optimizer that loops over parameters.",
        alternatives="step kernel",
        trial=_SMALL,
    ),
    _optimizer(
        name="sgd with momentum",
        on=("optimizer=sgd",),
        why="The cheapest step, with one number of state per weight; convolutional networks with BatchNorm "
        "need no more epochs than with adaptive optimizers.",
        claim="On CIFAR-10 a lower test error than Adam's.",
        source="Wilson, Roelofs, Stern, Srebro, Recht 2017, arXiv:1705.08292.",
        measured="A fused step takes 0.73 of AdamW's time at ResNet-18's size and 0.71 at DistilBERT's.",
        command="python scripts/bench_optimizers.py --threads 1 --cpu-time",
        avoid="Transformers, whose gradients differ too much in scale between layers.",
        audit="A ResNet under Adam.",
    ),
    _optimizer(
        name="adam",
        on=("optimizer=adam",),
        off=("optimizer=sgd",),
        why="Step sizes do not depend on the gradient's scale, so one learning rate suits all layers.",
        claim="On sparse features of IMDB's reviews a lower loss after as many epochs than SGD with "
        "Nesterov's momentum by far; on images of CIFAR-10 about as low a one.",
        source="Kingma, Ba 2015, arXiv:1412.6980.",
        avoid="With weight decay, which AdamW keeps out of the moments.",
        audit="SGD on a transformer.",
        trial=("optimizer.lr=0.01",),
    ),
    _optimizer(
        name="adamw",
        on=("optimizer=adamw",),
        off=("optimizer=sgd",),
        why="Adam with decoupled weight decay, which is not rescaled by the gradient's magnitude.",
        claim="A lower test error than Adam with L2 on CIFAR-10 and ImageNet32, at the same length.",
        source="Loshchilov, Hutter 2019, arXiv:1711.05101.",
        avoid="Memory is short: it keeps two numbers per weight.",
        audit="torch.optim.Adam with a weight decay.",
        trial=("optimizer.lr=0.01",),
    ),
    _optimizer(
        name="schedule-free adamw",
        on=("optimizer=adamw_schedulefree", "schedule=constant"),
        off=("optimizer=adamw", "schedule=constant"),
        why="Averaging the weights replaces a decaying learning rate, so the model is nearly as good at any "
        "step as if the run had been planned to end there.",
        claim="As good as schedules from convex problems to large models; it won the self-tuning track of "
        "AlgoPerf in 2024.",
        source="Defazio, Yang, Khaled, Mishchenko, Mehta, Cutkosky 2024, arXiv:2405.15682.",
        avoid="A recipe whose schedule is tuned for its length.",
        audit="A cosine in a run that is stopped early, or prolonged.",
        needs=("schedulefree",),
        trial=("optimizer.lr=0.01",),
    ),
    _optimizer(
        name="schedule-free sgd",
        on=("optimizer=sgd_schedulefree", "schedule=constant"),
        off=("optimizer=sgd", "schedule=constant"),
        why="The same for SGD, at a higher rate than with momentum.",
        claim="As good as SGD under a schedule for image classification, and often better.",
        source="Defazio, Yang, Khaled, Mishchenko, Mehta, Cutkosky 2024, arXiv:2405.15682.",
        avoid="A recipe whose schedule is tuned for its length.",
        audit="SGD with steps at milestones in a run that is stopped early, or prolonged.",
        needs=("schedulefree",),
    ),
    _optimizer(
        name="cautious weight decay",
        on=("optimizer=adamw_cautious",),
        why="Decay is skipped where it opposes the gradient, so the weights converge to a minimum of the "
        "loss itself.",
        claim="A lower loss and a higher accuracy than decoupled decay, without tuning, for language models "
        "of millions to billions of weights and on ImageNet, with AdamW, Lion and Muon.",
        source="Chen et al. 2025, arXiv:2510.12402.",
        avoid="Without weight decay it has no effect.",
        audit="AdamW with a weight decay of 0.1 or more.",
        trial=("optimizer.lr=0.01", "optimizer.weight_decay=0.1"),
    ),
    _optimizer(
        name="nadam",
        on=("optimizer=nadam",),
        why="Adam with Nesterov's look-ahead along the momentum.",
        claim="A lower loss than Adam after as many steps in its author's few comparisons.",
        source="Dozat 2016, 'Incorporating Nesterov Momentum into Adam', ICLR workshop.",
        avoid="Step time matters: torch has no fused NAdam.",
        audit="Adam with a high beta1, where the momentum often overshoots.",
    ),
    _optimizer(
        name="radam",
        on=("optimizer=radam",),
        why="Steps are not rescaled until enough gradients have been seen, which makes a warm-up "
        "unnecessary.",
        claim="As good as Adam with a tuned warm-up, without one.",
        source="Liu, Jiang, He, Chen, Liu, Gao, Han 2020, arXiv:1908.03265.",
        avoid="Together with a warm-up, which does the same; torch has no fused RAdam.",
        audit="Adam that diverges in its first steps, without schedule.warmup.",
        trial=("optimizer.lr=0.03",),
    ),
    _optimizer(
        name="adafactor",
        on=("optimizer=adafactor",),
        why="Second moments are stored per row and column, which frees memory for a larger model or batch.",
        claim="Adam's results on machine translation with a state of almost nothing.",
        source="Shazeer, Stern 2018, arXiv:1804.04235.",
        avoid="Memory is not short.",
        audit="Out-of-memory errors while Adam's state takes twice the weights.",
    ),
    _optimizer(
        name="muon",
        on=("optimizer=muon",),
        why="Updates of hidden matrices are orthogonalised, so rare directions move as far as common ones "
        "and fewer steps are needed.",
        claim="The NanoGPT speed record, held with AdamW before, by 1.35 times; 94 % on CIFAR-10 in 2.59 "
        "s on an A100.",
        source="Jordan et al. 2024, 'Muon: An optimizer for hidden layers in neural networks'; "
        "KellerJordan/cifar10-airbench.",
        avoid="On a CPU or at small batches: the matrix iteration is expensive compared with such a step.",
        audit="AdamW on a transformer or ResNet that is trained from scratch at a large batch.",
    ),
    _optimizer(
        name="sgd beside muon",
        on=("optimizer=muon", "optimizer.rest=sgd", "optimizer.rest_lr=0.05"),
        off=("optimizer=muon", "optimizer.rest=adamw", "optimizer.rest_lr=null"),
        why="Biases, norms and the first and last layers of a convolutional network train as well with SGD "
        "as with AdamW, with half the state.",
        claim="A part of 94 % on CIFAR-10 in 2.59 s on an A100.",
        source="KellerJordan/cifar10-airbench, airbench94_muon.py.",
        avoid="Transformers, whose embeddings and head have gradients of very different scale.",
        audit="Muon on a convolutional network with AdamW for biases and norms.",
        trial=("model=resnet_digits", "optimizer.lr=0.02"),
        alternatives=None,
    ),
    _optimizer(
        name="normalized weights",
        on=("optimizer=muon", "optimizer.normalize=true"),
        off=("optimizer=muon", "optimizer.normalize=false"),
        why="A norm after a layer cancels its scale, so keeping the weights at one length keeps the relative"
        " step size constant without a weight decay to tune.",
        claim="A part of 94 % on CIFAR-10 in 2.59 s on an A100; its own share is not given.",
        source="KellerJordan/cifar10-airbench, airbench94_muon.py.",
        avoid="Layers without a norm after them, whose scale matters.",
        audit="Muon with weight decay on layers that a BatchNorm follows.",
        trial=("model=resnet_digits", "optimizer.lr=0.02"),
        alternatives=None,
    ),
    _optimizer(
        name="lars",
        on=("optimizer=lars",),
        off=("optimizer=sgd",),
        why="Each layer moves by a fraction of its own norm, so batches of thousands, which keep many GPUs "
        "busy, still converge.",
        claim="ResNet-50 on ImageNet at a batch of 32,768 without loss of accuracy.",
        source="You, Gitman, Ginsburg 2017, arXiv:1708.03888.",
        measured="A step on one CPU thread takes 1.31 to 1.35 of fused AdamW's, and 0.25 to 0.53 of timm's "
        "LARS.",
        command="python scripts/bench_optimizers.py --threads 1 --cpu-time",
        avoid="Batches of hundreds, where a plain optimizer trains as well with fewer settings.",
        audit="SGD at a batch of 8,192 or more, with a warm-up and still diverging.",
    ),
    _optimizer(
        name="lamb",
        on=("optimizer=lamb",),
        why="Adam in which each layer moves by a fraction of its own norm, for transformers at batches of "
        "thousands.",
        claim="BERT at batches of 32,768 and more in 76 minutes on a TPUv3 pod, as good as at 512.",
        source="You et al. 2020, arXiv:1904.00962.",
        measured="A step on one CPU thread takes 2.1 of fused AdamW's, and 0.20 to 0.29 of timm's LAMB.",
        command="python scripts/bench_optimizers.py --threads 1 --cpu-time",
        avoid="Batches of hundreds, where a plain optimizer trains as well with fewer settings.",
        audit="AdamW at a batch of thousands of sequences.",
    ),
    _optimizer(
        name="nvlamb",
        on=("optimizer=nvlamb",),
        why="LAMB with gradients clipped before the moments are updated, so that large early gradients do "
        "not shrink later steps.",
        claim="How NVIDIA trains BERT at large batches.",
        source="Sreenivas et al. 2019, NVIDIA developer blog, 'Pretraining BERT with Layer-wise Adaptive "
        "Learning Rates'.",
        measured="A step on one CPU thread takes 2.6 to 2.8 of fused AdamW's, which takes 1.50 to 1.54 with "
        "clipping, and 0.19 to 0.32 of timm's.",
        command="python scripts/bench_optimizers.py --threads 1 --cpu-time",
        avoid="Batches of hundreds, where a plain optimizer trains as well with fewer settings.",
        audit="LAMB with gradients.clip_norm, which takes further passes.",
    ),
    _optimizer(
        name="novograd",
        on=("optimizer=novograd",),
        why="Gradients are normalised per layer, which needs one number of state per weight instead of two.",
        claim="As good as tuned SGD or AdamW on images, speech and translation, with half of Adam's state.",
        source="Ginsburg et al. 2019, arXiv:1905.11286.",
        measured="A step on one CPU thread takes 1.07 to 1.14 of fused AdamW's, and 0.26 of timm's NovoGrad.",
        command="python scripts/bench_optimizers.py --threads 1 --cpu-time",
        avoid="You want to keep a rate tuned for AdamW: NovoGrad needs its own.",
        audit="AdamW where its state does not fit into the memory.",
    ),
)

FAMILY = Family(
    name="optimizer",
    rules=(
        no_schedule_beside_schedule_free,
        one_way_of_clipping_groups,
        momentum_of_nesterov,
        momentum_to_cycle,
        reference_of_scaling,
        one_form_of_step,
        shared_out_parameters,
    ),
    unused=(
        Unused(
            ("optimizer.reference_batch",),
            lambda optimizer: optimizer.lr_scaling != "none",
            "to optimizer.lr_scaling=none",
            "optimizer.lr_scaling=linear",
        ),
    ),
    panel=panel,
    techniques=TECHNIQUES,
)
