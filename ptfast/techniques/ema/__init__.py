"""Records of how a model is evaluated, and of the average of its weights that is."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from ptfast.core.durations import Duration
from ptfast.core.sections.coerce import InUnit
from ptfast.core.sections.key_rules import Unused
from ptfast.core.sections.problem import Problem
from ptfast.core.sections.section import Every, Section
from ptfast.core.sections.technique import Technique


class Ema(Section):
    """The average of the weights that is evaluated and used in their place."""

    decay: float | None = None
    """Share that each step keeps of a moving average, such as 0.999; null for no moving average."""
    swa_start: Annotated[Duration, InUnit("epochs")] | None = None
    """From where on weights are averaged, all equally (SWA), such as `75%`; null for no such average."""
    swa_every: Every = Duration(1, "epochs")
    """How far apart the weights lie that SWA averages, such as `1epochs` or `100steps`."""


def one_average(ema: Ema) -> Problem | None:
    """Refuse two averages of the weights, of which one alone could be evaluated."""
    if ema.decay is None or ema.swa_start is None:
        return None
    what, hint = f"contradicts ema.decay={ema.decay:g}", "Set one of the two to null"
    return Problem("C011", what, key="ema.swa_start", value=ema.swa_start, suggestion=hint)


RULES = (one_average,)
UNUSED = (
    Unused(
        ("ema.swa_every",),
        lambda ema: ema.swa_start is not None,
        "without such an average",
        "ema.swa_start=75%",
    ),
)


def panel(average: str | None) -> dict[str, object]:
    """The average that is evaluated, in words."""
    return {"average": average}


_RATE = ("optimizer.lr=0.01",)

_evaluation = partial(Technique, family="evaluation", kind="training")

TECHNIQUES: tuple[Technique, ...] = (
    _evaluation(
        name="inference mode",
        kind="exact",
        why="Nothing is kept for a backward pass that never comes, nor counted for views and versions.",
        claim="Activations are freed at once, and less is recorded of every operation than under no_grad.",
        source="torch.inference_mode, documentation.",
        avoid="Never.",
        audit="An evaluation loop without torch.inference_mode() or torch.no_grad().",
    ),
    _evaluation(
        name="larger evaluation batches",
        kind="reordered",
        why="Without gradients there is room for more samples in a forward pass, of which fewer are needed.",
        claim="As much as kernels gain by it; no figure is given.",
        source="PyTorch Performance Tuning Guide, 'Disable gradient calculation for validation or "
        "inference'.",
        avoid="Memory is short: eval.batch_size sets it.",
        audit="Evaluation at the batch size of training on a device that is not full.",
    ),
    _evaluation(
        name="evaluation at one size",
        kind="reordered",
        on=("eval.last=pad",),
        off=("eval.last=keep",),
        why="A split's last batch comes at the size of the others, with stand-ins that count for nothing, so "
        "that no kernel is searched for another shape.",
        claim="Saves that search, once for each split that does not divide; a full batch is computed for it.",
        source="As a padded last batch does in training, with what the stand-ins give left out.",
        avoid="Kernels are not searched by trying, or a split is much smaller than eval.batch_size.",
        audit="cudnn.benchmark and a held-out split that the batch size does not divide.",
        trial=("model=mlp", "model.hidden=[16]"),
    ),
    _evaluation(
        name="test-time flip",
        on=("eval.flip=true",),
        off=("eval.flip=false",),
        why="Two looks at an image err less than one, which saves epochs for the same accuracy.",
        claim="airbench's 94 % on CIFAR-10 is counted with it. The forward passes of evaluations double.",
        source="Jordan 2024, arXiv:2404.00498.",
        avoid="Left and right mean something, as in text or digits, or evaluations take long.",
        audit="Images that were mirrored in training and are not in evaluation.",
        needs=("images",),
        trial=("model=mlp", "model.hidden=[16]", *_RATE),
    ),
    _evaluation(
        name="test-time shift",
        on=("eval.shift=1",),
        off=("eval.shift=0",),
        why="A network that strides tells an image moved by a pixel from the image, and several looks err "
        "less than one, which saves epochs for the same accuracy.",
        claim="airbench's 94 % on CIFAR-10 is counted with it, beside the flip. The forward passes of "
        "evaluations treble.",
        source="Jordan 2024, arXiv:2404.00498; KellerJordan/cifar10-airbench.",
        avoid="A single pixel matters, as in the 8 x 8 of digits, outputs are pixels (refused), or "
        "evaluations take long.",
        audit="Images that were cropped at random in training and are looked at once in evaluation.",
        needs=("images",),
        trial=("model=mlp", "model.hidden=[16]", *_RATE),
    ),
    _evaluation(
        name="moving average of the weights",
        on=("ema=ema",),
        off=("ema=none",),
        why="The average of the last steps is where a lower rate would have led, at once.",
        claim="How Inception-v3 is evaluated on ImageNet; its own share is not given.",
        source="Polyak, Juditsky 1992, 'Acceleration of Stochastic Approximation by Averaging'; Szegedy et"
        " al. 2015, arXiv:1512.00567, section 8.",
        avoid="Memory for a copy of the weights is short; runs of fewer steps than 1 / (1 - ema.decay).",
        audit="Figures that jump from evaluation to evaluation.",
        alternatives="average of the weights",
        trial=_RATE,
    ),
    _evaluation(
        name="stochastic weight averaging",
        on=("ema=swa", "ema.swa_every=5steps"),
        off=("ema=none", "ema.swa_every=1epochs"),
        why="Weights that wander at a rate that stays high surround a minimum wider than any of them has "
        "found; their mean lies within it.",
        claim="At the same length VGG-16 and ResNet-164 come to 73.9 and 79.8 % on CIFAR-100, where SGD "
        "comes to 72.6 and 78.5 %; pretrained ResNets gain more than half a point on ImageNet in "
        "ten more epochs.",
        source="Izmailov, Podoprikhin, Garipov, Vetrov, Wilson 2018, arXiv:1803.05407.",
        avoid="The rate falls to nothing by the end: the weights do not wander any more.",
        audit="A constant or cyclic rate whose last weights are used.",
        alternatives="average of the weights",
        trial=_RATE,
    ),
)
