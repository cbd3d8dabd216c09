"""Records of how the learning rate moves over a run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Annotated

from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError, PtfastError
from ptfast.core.resolved import Resolved
from ptfast.core.sections.coerce import InUnit
from ptfast.core.sections.section import Family, TargetSection, Technique, longer_than_run


class Schedule(TargetSection):
    """How the learning rate moves over the run."""

    warmup: Annotated[Duration, InUnit("steps")] = Duration(0, "steps")
    """Length of the linear rise at the beginning, such as `5%` or `200steps`."""


def durations_that_fit(schedule: Schedule, epochs: int | None, steps: int | None) -> Iterator[PtfastError]:
    """Refuse a warm-up longer than the run, and milestones of one unit that do not rise."""
    if problem := longer_than_run("schedule.warmup", schedule.warmup, epochs, steps):
        yield problem
    values = schedule.target.kwargs.get("milestones")
    if not isinstance(values, (list, tuple)):
        return
    units = {value.unit for value in values if isinstance(value, Duration)}
    numbers = [value.value if isinstance(value, Duration) else value for value in values]
    if len(units) <= 1 and numbers != sorted(numbers):
        what = "milestones must be in rising order"
        yield ConfigError("C011", what, key="schedule.milestones", value=values)


def panel(schedule: Schedule, resolved: Resolved) -> dict[str, object]:
    """The shape of the learning rate, what tells it from others of its name, and the warm-up."""
    words = [schedule.target.path.rsplit(".", 1)[-1]]
    if (rise := schedule.target.kwargs.get("rise")) is not None:
        words.append(f"rises for {rise}")
    if (decay := schedule.target.kwargs.get("decay")) is not None:
        words.append(f"decays over the last {decay}")
    if (patience := schedule.target.kwargs.get("patience")) is not None:
        words.append(f"patience {patience}")
    if schedule.warmup.value:
        words.append(f"warm-up {schedule.warmup}")
    momentum = resolved.momentum
    return {"schedule": ", ".join(words + ([f"momentum {momentum}"] if momentum else []))}


_schedule = partial(
    Technique,
    kind="training",
    off=("schedule=constant",),
    alternatives="schedule",
    trial=("optimizer.lr=0.01",),
)

TECHNIQUES: tuple[Technique, ...] = (
    _schedule(
        name="warm-up",
        on=("schedule.warmup=20%",),
        off=("schedule.warmup=0",),
        why="The first steps are short while gradients change quickly, which allows a higher rate later.",
        claim="ResNet-50 at a batch of 8,192 loses accuracy without it, and matches a batch of 256 with it.",
        source="Goyal et al. 2017, arXiv:1706.02677.",
        avoid="The schedule already starts low, as one cycle and triangular schedules do.",
        audit="A loss that jumps up in the first hundred steps at a high rate.",
        alternatives=None,
    ),
    _schedule(
        name="one cycle",
        on=("schedule=onecycle",),
        why="A very high rate in the middle of the run acts as regularisation, so a shorter run is enough.",
        claim="ResNet-56 on CIFAR-10: 92.4 % after 10,000 iterations, in steps 90.3 % after 80,000 (Smith's "
        "logs, which lack steps over as short a run).",
        source="Smith, Topin 2018, arXiv:1708.07120; Smith 2018, arXiv:1803.09820.",
        avoid="The length of the run is not known in advance.",
        audit="A constant rate, or one divided now and then, over many epochs.",
    ),
    _schedule(
        name="one cycle as in torch",
        on=("schedule=onecycle_torch",),
        why="One cycle with torch's shape: a shorter rise from a lower rate, then a long cosine decay.",
        claim="fast.ai's variant, which its authors found better than two equal phases; no figure is given.",
        source="torch.optim.lr_scheduler.OneCycleLR, whose defaults it takes.",
        avoid="The length of the run is not known in advance.",
        audit="A constant rate, or one divided now and then, over many epochs.",
    ),
    _schedule(
        name="cycled momentum",
        on=("schedule=onecycle", "schedule.momentum_max=0.95", "schedule.momentum_min=0.85"),
        off=("schedule=onecycle", "schedule.momentum_max=null", "schedule.momentum_min=null"),
        why="Low momentum at a high rate keeps the effective step in check, which allows a higher rate.",
        claim="Part of one cycle: as good as the best constant momentum, and stable at higher rates.",
        source="Smith 2018, arXiv:1803.09820, section 4.3.",
        avoid="The optimizer has no momentum; the panel then says that it is not cycled.",
        audit="One cycle with a constant momentum.",
        alternatives=None,
    ),
    _schedule(
        name="cyclical learning rate",
        on=("schedule=cyclic",),
        why="Cycling between two bounds escapes plateaus and avoids searching for the one best rate.",
        claim="CIFAR-10: 81.4 % after 25,000 iterations, where a fixed rate took 70,000.",
        source="Smith 2017, arXiv:1506.01186.",
        avoid="The length of the run is known: one cycle does better.",
        audit="A constant rate that was never searched for.",
    ),
    _schedule(
        name="cosine",
        on=("schedule=cosine",),
        why="The rate is high early on and reaches zero at the end, whatever the length of the run.",
        claim="As good as tuned steps without steps to tune; the restarts that the paper adds are left out.",
        source="Loshchilov, Hutter 2017, arXiv:1608.03983.",
        avoid="The run is to be extended later.",
        audit="A constant rate.",
    ),
    _schedule(
        name="linear decay",
        on=("schedule=linear",),
        why="The rate falls to zero in a straight line, so the last steps are small enough to settle.",
        claim="Better overall than other usual schedules, cosine included, on ten problems of deep learning.",
        source="Defazio, Cutkosky, Mehta, Mishchenko 2023, arXiv:2310.07831.",
        avoid="The run is to be extended later.",
        audit="A constant rate.",
    ),
    _schedule(
        name="warm-up, stable, decay",
        on=("schedule=wsd",),
        why="The rate stays high longer than a cosine's, and a state before the decay can be continued.",
        claim="With a decay over 10 to 20 % of the run about as good as a cosine, on language models.",
        source="Hu et al. 2024, arXiv:2404.06395; Hägele et al. 2024, arXiv:2405.18392.",
        avoid="You use weights from before the decay: a rate that falls throughout gives better ones.",
        audit="Several cosine runs of different lengths from the same start.",
    ),
    _schedule(
        name="polynomial decay",
        on=("schedule=polynomial",),
        why="The rate falls quickly at first and slowly towards zero at the end.",
        claim="Used with LARS at large batches (power 2), LAMB (power 1) and for segmentation (power 0.9).",
        source="You 2017, arXiv:1708.03888; You 2020, arXiv:1904.00962; Chen 2016, arXiv:1606.00915.",
        avoid="The run is to be extended later.",
        audit="A constant rate.",
    ),
    _schedule(
        name="steps at milestones",
        on=("schedule=multistep",),
        why="Each cut in the rate removes the gradient noise that kept the loss up.",
        claim="How the ResNets were trained: 91.25 % with ResNet-20 on CIFAR-10.",
        source="He, Zhang, Ren, Sun 2015, arXiv:1512.03385.",
        avoid="You want the same accuracy sooner: one cycle or linear decay need fewer steps.",
        audit="A constant rate.",
    ),
    _schedule(
        name="reduce on plateau",
        on=("schedule=plateau",),
        why="The rate is cut when evaluations stop improving, so there are no milestones to find.",
        claim="How the ResNets were trained on ImageNet: the rate is divided by 10 when the error plateaus.",
        source="He, Zhang, Ren, Sun 2015, arXiv:1512.03385, section 3.4; torch's ReduceLROnPlateau.",
        avoid="The length of the run is known: a cosine or linear decay needs fewer epochs.",
        audit="A rate that is lowered by hand, run after run, when the accuracy stalls.",
    ),
    _schedule(
        name="steps at equal distances",
        on=("schedule=step",),
        why="The same with cuts at a fixed interval, so there are no milestones to find.",
        claim="As with milestones; torchvision and PyTorch's ImageNet example cut every 30 epochs.",
        source="torch.optim.lr_scheduler.StepLR; pytorch/examples, imagenet.",
        avoid="You want the same accuracy sooner: one cycle or linear decay need fewer steps.",
        audit="A constant rate.",
    ),
)

FAMILY = Family(
    name="schedule",
    rules=(durations_that_fit,),
    panel=panel,
    techniques=TECHNIQUES,
)
