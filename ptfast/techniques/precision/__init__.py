"""The number formats of weights, activations and products."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Literal

from ptfast.core import devices
from ptfast.core.errors import ConfigError, PtfastError
from ptfast.core.sections.section import Family, Section, Technique


class Precision(Section):
    """The number format that forward and backward compute in."""

    mode: Literal["fp32", "tf32", "amp", "bf16", "amp_fp16", "bf16_true"] = "fp32"
    """`amp` chooses by device: native bfloat16, else float16 with a gradient scaler on CUDA, else float32."""
    matmul_precision: Literal["auto", "highest", "high", "medium"] = "highest"
    """Of float32 matrix products, measured before use; `auto` is the quickest as exact as float32."""
    tf32_convolutions: bool = True
    """cuDNN may round inputs of float32 convolutions to TF32, as torch by itself lets it."""
    float8: bool = False
    """Multiply in float8 in linear layers, by torchao; under bfloat16."""


def float8_under_bf16(precision: Precision) -> PtfastError | None:
    """Refuse float8 products under another format than bfloat16."""
    if not precision.float8 or precision.mode in ("amp", "bf16", "bf16_true"):
        return None
    what = f"its products come in bfloat16, and precision={precision.mode} computes in another format"
    return ConfigError("C011", what, key="precision.float8", value=True, suggestion="Use precision=bf16")


def formats_of_the_device(precision: Precision, device: str) -> Iterator[PtfastError]:
    """Refuse number formats that the device cannot compute in."""
    # fp32 and amp run anywhere: torch need not be imported to know.
    if precision.mode not in ("fp32", "amp"):
        lack = devices.lack_of_precision(precision.mode, devices.usable_type(device))
        if problem := devices.cannot_run(lack, "precision", precision.mode):
            yield problem
    if precision.float8:
        lack = devices.lack_of_float8(devices.usable_type(device))
        if problem := devices.cannot_run(lack, "precision.float8", True):
            yield problem


_SMALL = ("model.hidden=[16]",)

_precision = partial(
    Technique, kind="reduced", off=("precision=default",), alternatives="precision", trial=_SMALL, drift=0.01
)

TECHNIQUES: tuple[Technique, ...] = (
    _precision(
        name="mixed precision",
        on=("precision=amp",),
        why="Half-precision numbers halve memory traffic and use matrix units; the format fits the device.",
        claim="1.5 to 5.5x over float32 on V100s, and 1.3 to 2.5x more on A100s, on a variety of networks.",
        source="Micikevicius et al. 2017, arXiv:1710.03740; PyTorch blog 2022 on mixed precision.",
        avoid="The loss needs float32 throughout; CPUs that gain nothing by bf16 stay at fp32.",
        audit="A forward pass outside torch.autocast on a device with matrix units.",
        needs=("half",),
    ),
    _precision(
        name="bfloat16 autocast",
        on=("precision=bf16",),
        why="Half-precision products with the range of float32, so gradients need no scaling.",
        claim="Matches float32 in as many steps, at the same settings, in several fields.",
        source="Kalamkar et al. 2019, arXiv:1905.12322.",
        measured="On a CPU that multiplies bfloat16, `resnet_cifar` trains on 784 samples/s with "
        "preset=fast, which has it, and on 581 with preset=safe.",
        command="python scripts/bench_switches.py resnet_cifar",
        avoid="The hardware emulates bf16, which is slow.",
        audit="A forward pass outside torch.autocast on a device with bf16.",
        needs=("bf16",),
    ),
    _precision(
        name="float16 autocast",
        on=("precision=amp_fp16",),
        why="Half-precision products, 3 bits finer than bf16; loss scaling makes up for the smaller range.",
        claim="1.5 to 5.5x over float32 on V100s, on a variety of networks.",
        source="Micikevicius et al. 2017, arXiv:1710.03740; PyTorch blog 2022 on mixed precision.",
        avoid="bf16 is as fast: steps whose scaled gradients overflow are lost.",
        audit="bf16 on a GPU before Ampere, or a GradScaler beside an optimizer that is not fused.",
        needs=("fp16",),
    ),
    _precision(
        name="bfloat16 weights",
        on=("precision=bf16_true",),
        why="Weights, gradients and optimizer state take half the memory, and no step casts them.",
        claim="Half of float32's memory; rounding cancels small updates, which can cost accuracy.",
        source="Zamirai et al. 2020, arXiv:2010.06192.",
        avoid="Small learning rates: a bf16 weight ignores changes below about 1/256 of its value.",
        audit="A model that fits into memory only in half width, trained with autocast.",
        needs=("bf16",),
        drift=0.02,
    ),
    _precision(
        name="float8 products",
        on=("precision.float8=true",),
        off=("precision.float8=false",),
        why="Matrix units multiply 8-bit numbers twice as fast; large transformers are mostly linear layers.",
        claim="Compiled, up to 1.25 times bfloat16's throughput at 8B weights on 8 GPUs, 1.5 at 405B on 512.",
        source="torchao documentation, 'Quantized Training'; Micikevicius et al. 2022, arXiv:2209.05433.",
        avoid="Layers have under some thousand channels, or are not compiled: scaling costs too much.",
        audit="A bfloat16 transformer of a billion parameters or more on a GPU of capability 8.9 or later.",
        needs=("float8",),
        trial=("precision=bf16", "model=mlp", "model.hidden=[32,32]"),
        drift=0.05,
        alternatives=None,
    ),
    _precision(
        name="TF32",
        on=("precision=tf32",),
        why="Tensor cores take float32 inputs rounded to 10 bits and accumulate in float32.",
        claim="156 against 19.5 TFLOP/s at peak on an A100; torch by itself uses it in convolutions only.",
        source="NVIDIA's data sheet of the A100; PyTorch notes, 'CUDA semantics'.",
        avoid="Products that need more than three digits, such as ill-conditioned linear algebra.",
        audit="torch.get_float32_matmul_precision() is 'highest' on a GPU of capability 8.0 or later.",
        about=("precision/fp32",),
        needs=("nvidia_tf32",),
    ),
    Technique(
        name="measured matrix products",
        kind="reordered",
        on=("precision.matmul_precision=auto",),
        off=("precision.matmul_precision=highest",),
        why="On some CPUs torch's `medium` setting selects another library that is faster at full precision.",
        claim="The speed of the CPU's quicker kind, which is timed first; no figure is given.",
        source="PyTorch documentation of torch.set_float32_matmul_precision.",
        avoid="Layers with about 64 features, whose products are too small for it.",
        audit="Large float32 Linear layers on a CPU at the setting `highest`.",
        trial=_SMALL,
    ),
)

FAMILY = Family(
    name="precision",
    rules=(float8_under_bf16,),
    machine_rules=(formats_of_the_device,),
    panel=lambda resolved: {
        "float8": f"products of {len(resolved.float8)} layers" if resolved.float8 else None
    },
    techniques=TECHNIQUES,
)
