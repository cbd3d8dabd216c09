"""Records of how a model is evaluated, and of the average of its weights that is."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError, PtfastError
from ptfast.core.sections.coerce import InUnit
from ptfast.core.sections.section import Every, Family, Section, Share, Technique, Unused


class Ema(Section):
    """The average of the weights that is evaluated and used in their place."""

    decay: Share | None = None
    """Share that each step keeps of a moving average, such as 0.999; null for no moving average."""
    warmup: bool = False
    """Keep less in the first steps, by 1 - step ** (-2/3) up to `decay`, as timm does; for short runs."""
    swa_start: Annotated[Duration, InUnit("epochs")] | None = None
    """From where on weights are averaged, all equally (SWA), such as `75%`; null for no such average."""
    swa_every: Every = Duration(1, "epochs")
    """How far apart the weights lie that SWA averages, such as `1epochs` or `100steps`."""


def one_average(ema: Ema) -> PtfastError | None:
    """Refuse two averages of the weights, of which one alone could be evaluated."""
    if ema.decay is None or ema.swa_start is None:
        return None
    what, hint = f"contradicts ema.decay={ema.decay:g}", "Set one of the two to null"
    return ConfigError("C011", what, key="ema.swa_start", value=ema.swa_start, suggestion=hint)


_RATE = ("optimizer.lr=0.01",)

_evaluation = partial(Technique, kind="training")

TECHNIQUES: tuple[Technique, ...] = (
    _evaluation(
        name="inference mode",
        kind="exact",
        why="Nothing is recorded for a backward pass that never comes, and no views or versions are tracked.",
        claim="Activations are freed at once, and less is recorded of every operation than under no_grad.",
        source="torch.inference_mode, documentation.",
        avoid="Never.",
        audit="An evaluation loop without torch.inference_mode() or torch.no_grad().",
    ),
    _evaluation(
        name="larger evaluation batches",
        kind="reordered",
        why="Without gradients memory has room for larger batches, so fewer are needed.",
        claim="As much as kernels gain by it; no figure is given.",
        source="PyTorch Performance Tuning Guide, 'Disable gradient calculation for validation ...'.",
        avoid="Memory is short: set eval.batch_size.",
        audit="Evaluation at the batch size of training on a device that is not full.",
    ),
    _evaluation(
        name="test-time flip",
        on=("eval.flip=true",),
        why="The average of two views of an image is more accurate, which saves epochs at equal accuracy.",
        claim="Part of airbench's 94 % on CIFAR-10. Evaluations take twice the forward passes.",
        source="Jordan 2024, arXiv:2404.00498.",
        avoid="Left and right mean something, as in text or digits, or evaluation takes long.",
        audit="Images that were mirrored in training and are not in evaluation.",
        needs=("images",),
        trial=("model=mlp", "model.hidden=[16]", *_RATE),
    ),
    _evaluation(
        name="test-time shift",
        on=("eval.shift=1",),
        why="Strided networks see a moved image differently; several views save epochs at equal accuracy.",
        claim="Part of airbench's 94 % on CIFAR-10, with the flip. Evaluations take three times the passes.",
        source="Jordan 2024, arXiv:2404.00498; KellerJordan/cifar10-airbench.",
        avoid="A single pixel matters (8 x 8 digits), outputs are pixels (refused), or evaluation is slow.",
        audit="Images that were cropped at random in training and are looked at once in evaluation.",
        needs=("images",),
        trial=("model=mlp", "model.hidden=[16]", *_RATE),
    ),
    _evaluation(
        name="moving average of the weights",
        on=("ema=ema",),
        off=("ema=none",),
        why="The average of recent weights is about where a lower rate would lead, without the extra steps.",
        claim="How Inception-v3 is evaluated on ImageNet; its own share is not given.",
        source="Polyak, Juditsky 1992; Szegedy et al. 2015, arXiv:1512.00567, section 8.",
        avoid="No memory for a copy of the weights, or fewer steps than 1 / (1 - ema.decay): see ema.warmup.",
        audit="Figures that jump from evaluation to evaluation.",
        alternatives="average of the weights",
        trial=_RATE,
    ),
    _evaluation(
        name="stochastic weight averaging",
        on=("ema=swa", "ema.swa_every=5steps"),
        off=("ema=none", "ema.swa_every=1epochs"),
        why="At a rate that stays high, the weights wander around a wide minimum; their mean lies inside it.",
        claim="ResNet-164 on CIFAR-100 reaches 79.8 % where SGD reaches 78.5, in as many epochs.",
        source="Izmailov, Podoprikhin, Garipov, Vetrov, Wilson 2018, arXiv:1803.05407.",
        avoid="The rate falls to zero by the end: the weights no longer wander.",
        audit="A constant or cyclic rate whose last weights are used.",
        alternatives="average of the weights",
        trial=_RATE,
    ),
)

FAMILY = Family(
    name="evaluation",
    rules=(one_average,),
    unused=(
        Unused.without("ema.swa_start", "75%", "ema.swa_every"),
        Unused.without("ema.decay", "0.999", "ema.warmup"),
    ),
    panel=lambda average: {"average": average},
    techniques=TECHNIQUES,
)
