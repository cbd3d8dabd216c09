"""Records of what happens to gradients between backward and the optimizer's step."""

from __future__ import annotations

from functools import partial

from ptfast.core.sections.section import Count, Family, Positive, Section, Technique


class Gradients(Section):
    """Treatment of gradients between backward and the optimizer's step."""

    accumulate: Count = 1
    """Micro-batches of each rank in one optimizer step, where `micro_batches` does not say it."""
    clip_norm: Positive | None = None
    """Largest global norm of the gradients."""
    clip_value: Positive | None = None
    """Largest absolute value of each gradient."""
    clip_adaptive: Positive | None = None
    """Largest norm of a unit's gradient as a part of its weights' norm, such as 0.01; the head is spared."""
    log_norm: bool = True
    """Log the global norm of the gradients before clipping as `grad_norm`."""


_gradients = partial(Technique, kind="training")

TECHNIQUES: tuple[Technique, ...] = (
    _gradients(
        name="clipping by global norm",
        on=("gradients=clip",),
        off=("gradients=default",),
        why="A single large gradient cannot throw the weights off, so higher rates are stable.",
        claim="Recurrent networks train where gradients explode; steps that would diverge stay bounded.",
        source="Pascanu, Mikolov, Bengio 2013, arXiv:1211.5063.",
        avoid="The norm exceeds the limit in most steps: then it is a lower learning rate in disguise.",
        audit="Losses that jump, with gradients.clip_norm at null; gradients.log_norm=true shows the norms.",
        alternatives="clipping",
    ),
    _gradients(
        name="clipping by value",
        on=("gradients.clip_value=0.5",),
        off=("gradients.clip_value=null",),
        why="Limits every entry of the gradient in one pass, without computing a norm.",
        claim="Bounds derivatives of LSTM layers; unlike clipping by norm, it turns the step.",
        source="Graves 2013, arXiv:1308.0850, section 2.1.",
        avoid="Clipping by norm works as well, which is nearly always.",
        audit="Single large entries in gradients that are small otherwise.",
        alternatives="clipping",
    ),
    _gradients(
        name="adaptive clipping",
        on=("gradients=adaptive",),
        off=("gradients=default",),
        why="Each unit's gradient is limited by its weights: large batches work without normalisation.",
        claim="NFNets, without BatchNorm, match EfficientNet-B7 and train up to 8.7 times as fast.",
        source="Brock, De, Smith, Simonyan 2021, arXiv:2102.06171.",
        avoid="A normalised network at an ordinary batch size, or another kind of clipping (refused).",
        audit="A network without normalisation layers and gradients.clip_adaptive at null.",
        alternatives="clipping",
    ),
    _gradients(
        name="clipping by group",
        on=('optimizer.groups=[{match: "*.bias", clip_norm: 0.1}]',),
        off=("optimizer.groups=[]",),
        why="One part with large gradients, such as a new head, does not shrink the steps of all others.",
        claim="No figure is known; it keeps the norms of parts apart.",
        source="torch.nn.utils.clip_grad_norm_ once for each group.",
        avoid="The global norm rarely exceeds its limit.",
        audit="A global norm that one part of the model makes up, with gradients.clip_norm on.",
        alternatives="named groups",
    ),
    _gradients(
        name="gradients set to None",
        kind="exact",
        why="Backward writes new gradients instead of zeroing the old ones and adding.",
        claim="Saves a write and a read of all gradients per step; parameters without one are not decayed.",
        source="PyTorch Performance Tuning Guide, 'Use parameter.grad = None'.",
        avoid="A parameter without a gradient in some steps must still follow its momentum.",
        audit="zero_grad(set_to_none=False), or gradient.zero_() in a loop.",
    ),
    _gradients(
        name="gradient norm without a wait",
        kind="exact",
        on=("gradients.log_norm=true",),
        why="The norm is computed only where it is logged and stays on the device until then.",
        claim="What clip_grad_norm_(...).item() costs in every step is paid once per log line.",
        source="PyTorch Performance Tuning Guide, 'Avoid unnecessary CPU-GPU synchronization'.",
        avoid="You do not look at the norm.",
        audit=".item() on a gradient norm in every step.",
    ),
)

FAMILY = Family(
    name="gradients",
    panel=lambda gradients: {
        "clip norm": gradients.clip_norm,
        "clip value": gradients.clip_value,
        "clip adaptive": gradients.clip_adaptive and f"{gradients.clip_adaptive:g} of a unit's weights",
    },
    techniques=TECHNIQUES,
)
