"""Records of rewrites of a model that leave its formula as it is."""

from __future__ import annotations

from ptfast.core.resolved import Resolved
from ptfast.core.sections.section import Family, OrAuto, Section, Technique


class Rewrites(Section):
    """Rewrites of the model that leave its formula as it is."""

    channels_last: bool | OrAuto = "auto"
    """Store images with the channels innermost; `auto` where that usually pays."""
    bias_before_norm: bool = True
    """Keep a layer's bias where the BatchNorm right behind subtracts it again."""
    chunked_loss: bool = False
    """Compute the last layer of a language model and its loss together, for some tokens at a time."""
    fused_rms_norm: bool = False
    """Compute RMS norms that the model writes in single operators by torch's kernel."""


def panel(rewrites: Rewrites, resolved: Resolved) -> dict[str, object]:
    """Rewrites that took place; the memory format stands with the model."""
    dropped = len(resolved.dropped_biases or ())
    return {
        "rewrites": f"{dropped} biases before a BatchNorm dropped" if dropped else None,
        "loss": "with the last layer, chunk by chunk" if rewrites.chunked_loss else None,
        "norms": f"{len(resolved.fused_norms)} RMS norms by torch's kernel"
        if rewrites.fused_rms_norm
        else None,
    }


TECHNIQUES: tuple[Technique, ...] = (
    Technique(
        name="channels last",
        kind="reordered",
        on=("rewrites.channels_last=true",),
        why="Convolutions read all channels of a pixel together, without converting the layout and back.",
        claim="8 to 35 % on Volta GPUs, 26 to 76 % on Intel's CPUs since Ice Lake (PyTorch); under AMP on an "
        "RTX 3090 1.11 times in the median of 796 models, ResNet-50 1.47, ViT 1.0, RegNetY 0.38 (timm).",
        source="PyTorch tutorial 'Channels Last Memory Format'; timm, "
        "results/benchmark-train-amp-nhwc-pt112-cu113-rtx3090.csv beside that of nchw.",
        avoid="Most convolutions are grouped or depthwise, or the model has none.",
        audit="Convolution weights that are contiguous in the default layout in a model of images.",
        about=("rewrites/default",),
        needs=("images", "convolutions"),
        trial=("model=resnet_digits", "optimizer=sgd"),
    ),
    Technique(
        name="no bias before batch norm",
        kind="reordered",
        on=("rewrites.bias_before_norm=false",),
        why="BatchNorm subtracts any bias again, so adding it and reducing its gradient are wasted passes.",
        claim="Saves some memory-bound kernels per such layer; the guide gives no figure.",
        source="PyTorch Performance Tuning Guide, 'Disable bias for convolutions ...'; arXiv:1502.03167.",
        avoid="A pattern in optimizer.groups names such a bias, or it should train on with its norm frozen.",
        audit="A convolution or linear layer with a bias, whose output goes to one BatchNorm alone.",
        about=("rewrites/default",),
        needs=("batchnorm",),
        trial=("model=mlp", "model.batch_norm=true", "optimizer=sgd"),
    ),
    Technique(
        name="chunked loss",
        kind="reordered",
        on=("rewrites.chunked_loss=true",),
        why="Logits over a large vocabulary, their softmax and gradient never exist all at once.",
        claim="The memory of the loss of Gemma 2 (2B) falls from 24 GB to 1 MB at the same speed, by the "
        "source's own kernels; without them it pays where tokens and vocabulary outnumber channels.",
        source="Wijmans et al. 2024, arXiv:2411.09009.",
        avoid="The vocabulary is no larger than the model's width, or memory is not short.",
        audit="A language model whose vocabulary is many times its width, and logits of the whole batch.",
        about=("rewrites/default",),
        needs=("sequences",),
        trial=("data=text_file", "data.path={text}", "model=gpt", "optimizer=sgd"),
    ),
    Technique(
        name="fused RMS norm",
        kind="reordered",
        on=("rewrites.fused_rms_norm=true",),
        why="A norm in single operators reads and writes the activations in each; one kernel does it once.",
        claim="Several times the speed of single operators, by the source's own kernel; none for torch's.",
        source="Hsu et al. 2024, 'Liger Kernel', arXiv:2410.10989; torch.nn.RMSNorm.",
        avoid="The model is compiled, which fuses these operators anyway.",
        audit="A module that divides its input by the root of its mean square, over the last dimension.",
        about=("rewrites/default",),
        needs=("rms_norm",),
        trial=(
            *("data=text_file", "data.path={text}", "data.context_length=16", "model=hf", "model.name=llama"),
            *("++model.hidden_size=16", "++model.intermediate_size=32", "++model.num_hidden_layers=1"),
            *("++model.num_attention_heads=2", "++model.num_key_value_heads=2", "batch_size=16"),
            *("optimizer=sgd", "optimizer.lr=0.01"),
        ),
    ),
)

FAMILY = Family(
    name="rewrites",
    panel=panel,
    techniques=TECHNIQUES,
)
