"""Checks of a model: useless layers, widths unsuited to tensor cores, and formulas with a torch kernel."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from torch import nn

from ptfast.core.errors import name_some
from ptfast.core.protocols import takes_own_steps
from ptfast.core.units import counted
from ptfast.measure.audit.audit_context import AuditContext, Finding
from ptfast.techniques.rewrites.model_rewrites import find_cancelled_biases, find_rms_norms

TILE = 8
"""Columns of a half-precision tile in tensor cores (NVIDIA, Matrix Multiplication guide)."""
WIDTH_SHARE = 0.01
"""Smallest share of the model's weights for which a layer's width is checked."""
NAMED = 3
_WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)


def check_model(context: AuditContext) -> Iterator[Finding]:
    """Yield findings on the layers, the parameters and the formulas of the model."""
    yield from _check_biases(context)
    yield from _check_widths(context)
    yield from _check_formulas(context)
    if norms := context.run.choices.get("fused_norms") or [*find_rms_norms(context.run.model)]:
        what, where = f"{counted(len(norms), 'RMS norm')} in single operators", name_some(norms, NAMED)
        mend, overrides = "torch.nn.RMSNorm", ("rewrites.fused_rms_norm=true",)
        handled = context.config.rewrites.fused_rms_norm
        yield Finding("hand-written rms norm", what, where, mend, overrides, "reordered", handled=handled)
    run, operators = context.run, context.operators
    modules = dict(run.model.named_modules())
    for name, module in modules.items():
        if isinstance(module, nn.DataParallel):
            what = "nn.DataParallel copies the model in every step"
            mend = "the model without it; parallel=ddp where there are several GPUs"
            yield Finding("data parallel", what, name or type(module).__name__, mend)
    parameters = dict(run.model.named_parameters())
    if context.unused and not context.untraced:
        total = sum(parameters[name].numel() for name in context.unused)
        what = f"{counted(len(context.unused), 'parameter')} of {total:,} numbers got no gradient in any step"
        mend = "leave these layers out, or set requires_grad=False"
        yield Finding("unused parameters", what, name_some(context.unused, NAMED), mend)
    if names := [name for name, p in parameters.items() if "float64" in str(p.dtype)]:
        what = f"{counted(len(names), 'parameter')} in float64"
        yield Finding("float64", what, name_some(names, NAMED), "model.float()", kind="reduced")
    else:
        for place, count in operators.doubles.items():
            what = f"float64, {counted(count, 'operator')} in a forward pass"
            mend = "dtype=torch.float32 where it is made, or .float()"
            yield Finding("float64", what, place, mend, kind="reduced")


def _check_biases(context: AuditContext) -> Iterator[Finding]:
    run, kept = context.run, context.config.rewrites.bias_before_norm
    found = [*(run.choices.get("dropped_biases") or ())]
    if kept and not takes_own_steps(run.task):

        def forward() -> object:
            with run.precision.autocast:
                return run.task.loss(run.model, context.batch)

        with run.uncompiled():
            found = [*find_cancelled_biases(run.model, forward)]
    if found:
        count = "1 bias" if len(found) == 1 else f"{len(found)} biases"
        what, where = f"{count} that the following BatchNorm subtracts again", name_some(found, NAMED)
        mend, overrides = "bias=False in these layers", ("rewrites.bias_before_norm=false",)
        yield Finding("bias before a norm", what, where, mend, overrides, "reordered", handled=not kept)


def _check_widths(context: AuditContext) -> Iterator[Finding]:
    run, info = context.run, context.run.info
    if context.device_type != "cuda" or context.config.precision.mode in ("fp32", "tf32"):
        return
    given = {info.in_channels, info.num_classes, *(info.input_shape or ())}
    whole = sum(p.numel() for p in run.model.parameters())
    odd: dict[int, list[str]] = {}
    for name, module in run.model.named_modules():
        if not isinstance(module, _WEIGHTED) or module.weight.numel() < WIDTH_SHARE * whole:
            continue
        rows, columns = module.weight.shape[:2]
        widths = (columns, rows // getattr(module, "groups", 1))
        # The data sets these widths, not the model.
        if (width := next((each for each in widths if each % TILE and each not in given), None)) is not None:
            odd.setdefault(width, []).append(name)
    for width, names in odd.items():
        wider = math.ceil(width / TILE) * TILE
        kind = "a vocabulary" if width == info.vocab_size else "a width"
        what = f"{kind} of {width}, not a multiple of {TILE}, so half-precision kernels pad"
        mend = f"{wider} instead of {width}"
        yield Finding("widths unsuited to tensor cores", what, name_some(names, NAMED), mend, kind="training")


def _check_formulas(context: AuditContext) -> Iterator[Finding]:
    """Yield findings on hand-written formulas for which torch has a kernel."""
    softmaxes = context.operators.softmaxes
    attentions = Counter(each.place for each in softmaxes if each.weighs and not each.elsewhere)
    for place, count in attentions.items():
        what = f"attention by a softmax between two products, {times(count)} a step"
        mend = "F.scaled_dot_product_attention(q, k, v, attn_mask=..., dropout_p=..., is_causal=...)"
        yield Finding("hand-written attention", what, place, mend, kind="reordered")
    for (place, approximate), count in context.operators.gelus.items():
        what = f"GELU in single operators, {times(count)} a step"
        mend = 'F.gelu(x, approximate="tanh")' if approximate == "tanh" else "F.gelu(x)"
        yield Finding("hand-written gelu", what, place, mend, kind="reordered")


def times(count: float) -> str:
    return "once" if count == 1 else f"{count:g} times"
