"""The claims of blog posts, guides and papers, as pairs of configs that trials can compare."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ptfast.core.sections.technique import Need

Words = tuple[str, ...]
Quantity = Literal["speed", "memory"]
Finding = Literal["confirmed", "refuted", "cannot tell", "not testable here"]


@dataclass(frozen=True)
class Claim:
    """A figure that a source promises of a technique.

    Args:
        technique: as people call it.
        says: the promise in the source's figures.
        source: who says it, and of what.
        least, most: the range in which the ratio has to lie: of samples per second, or of memory saved
            (without over with); above 1 is better. To gain more than is claimed refutes nothing.
        workload: overrides of both runs; `{images}`, `{files}` and `{texts}` stand for data made for it.
        without, with_it: overrides of the run without the technique, and of that with it.
        needs: of the machine.
        takes: what a test would take that no trial of some seconds can give; there is no workload then.
        against: what the technique is held against, where that is no override.
    """

    technique: str
    says: str
    source: str
    quantity: Quantity = "speed"
    least: float = 1.0
    most: float = math.inf
    workload: Words = ()
    without: Words = ()
    with_it: Words = ()
    needs: tuple[Need, ...] = ()
    takes: str = ""
    against: str = ""


def judge(claim: Claim, low: float, high: float) -> Finding:
    """Compare a measured interval with the range that is claimed.

    Args:
        low, high: 95 % interval of the ratio.

    Returns:
        `confirmed` if all of the interval lies in the range, `refuted` if none does, else `cannot tell`.
    """
    if claim.least <= low and high <= claim.most:
        return "confirmed"
    if high < claim.least or claim.most < low:
        return "refuted"
    return "cannot tell"


AMP = "PyTorch blog 2022, 'What Every User Should Know About Mixed Precision Training', V100s"
GUIDE = "Kuhn 2021, 'Faster Deep Learning Training with PyTorch'"
TUNING_GUIDE = "PyTorch Performance Tuning Guide"
CHECKPOINTING = "Chen et al. 2016, arXiv:1604.06174"
PADDING = "Benesty 2020, CamemBERT-base on X-NLI, RTX 2080 Ti"
ZEROED = "ptfast.measure.claims.zeroed_gradients.ZeroedResNet"

RESNET: Words = ("data=arrays", "data.path={images}", "model=resnet20", "optimizer=sgd")
WIDE: Words = (*RESNET, "model.width=32")
LARGE: Words = (*RESNET, "batch_size=256")
FILES: Words = ("data=imagefolder", "data.root={files}", "data.image_size=128", "model=mlp", "batch_size=32")
TEXTS: Words = (
    *("data=text_file", "data.path={texts}", "data.documents=lines", "data.context_length=256"),
    *("model=gpt", "model.width=64", "model.depth=2", "batch_size=16"),
)

CLAIMS = (
    Claim(
        technique="mixed precision",
        says="1.5 to 5.5 times float32",
        source=AMP,
        least=1.5,
        workload=WIDE,
        without=("precision=fp32",),
        with_it=("precision=amp",),
        needs=("half",),
    ),
    Claim(
        technique="mixed precision",
        says="1.5 to 5.5 times float32",
        source=f"{AMP}; newer GPUs have TF32, too",
        least=1.5,
        workload=WIDE,
        without=("precision=tf32",),
        with_it=("precision=amp",),
        needs=("half", "nvidia_tf32"),
    ),
    Claim(
        technique="mixed precision",
        says="less memory",
        source=AMP,
        quantity="memory",
        least=1.02,
        workload=WIDE,
        without=("precision=fp32",),
        with_it=("precision=amp",),
        needs=("half",),
    ),
    Claim(
        technique="worker processes",
        says="twice as fast",
        source=f"{GUIDE}, after an MNIST example",
        least=2.0,
        workload=FILES,
        without=("dataloader=plain",),
        with_it=("dataloader=workers", "dataloader.workers=4"),
        needs=("cores",),
    ),
    Claim(
        technique="worker processes",
        says="four for each GPU are best",
        source=GUIDE,
        workload=FILES,
        without=("dataloader=workers", "dataloader.workers=2"),
        with_it=("dataloader=workers", "dataloader.workers=4"),
        needs=("cuda", "cores"),
    ),
    Claim(
        technique="pinned memory",
        says="faster copies to the GPU",
        source=TUNING_GUIDE,
        workload=(*WIDE, "dataloader=plain"),
        without=("dataloader.pin=false",),
        with_it=("dataloader.pin=true",),
        needs=("cuda",),
    ),
    Claim(
        technique="largest batch",
        says="512 is 4 times as fast as 64",
        source="often repeated; first source not found",
        least=4.0,
        workload=RESNET,
        without=("batch_size=64",),
        with_it=("batch_size=512",),
    ),
    Claim(
        technique="fused optimizer",
        says="5 % of the step",
        source="often repeated; first source not found",
        least=1.05,
        workload=(*RESNET, "optimizer=adamw"),
        without=("optimizer.fused=false",),
        with_it=("optimizer.fused=true",),
    ),
    Claim(
        technique="activation checkpointing",
        says="30 % more time",
        source=CHECKPOINTING,
        least=1 / 1.3,
        most=1.0,
        workload=RESNET,
        without=("checkpointing=none",),
        with_it=("checkpointing=full",),
    ),
    Claim(
        technique="activation checkpointing",
        says="7 times less memory",
        source=f"{CHECKPOINTING}, 1,000 layers",
        quantity="memory",
        least=7.0,
        workload=LARGE,
        without=("checkpointing=none",),
        with_it=("checkpointing=full",),
    ),
    Claim(
        technique="gradient accumulation",
        says="less memory",
        source=GUIDE,
        quantity="memory",
        least=1.02,
        workload=LARGE,
        without=("gradients.accumulate=1",),
        with_it=("gradients.accumulate=4",),
    ),
    Claim(
        technique="dynamic padding",
        says="1.17 to 4.7 times padding to one length",
        source=PADDING,
        least=1.17,
        workload=TEXTS,
        without=("batching=none",),
        with_it=("batching=longest",),
    ),
    Claim(
        technique="uniform-length batches",
        says="1.17 to 1.6 times dynamic padding",
        source=PADDING,
        least=1.17,
        workload=TEXTS,
        without=("batching=longest",),
        with_it=("batching=buckets",),
    ),
    Claim(
        technique="gradients set to None",
        says="a write and a read of all gradients less",
        source=TUNING_GUIDE,
        workload=RESNET,
        without=(f"model._target_={ZEROED}",),
        against="filled with zeros",
    ),
    Claim(
        technique="fused pointwise operations",
        says="fewer kernels that wait for memory",
        source=TUNING_GUIDE,
        workload=TEXTS,
        without=("compile=none",),
        with_it=("compile=pointwise",),
        needs=("compiler",),
    ),
    Claim(
        technique="one cycle",
        says="10 times fewer steps than in steps",
        source="Smith, Topin 2018, arXiv:1708.07120: ResNet-56 on CIFAR-10",
        takes="hours of training: ptfast race, see docs/race.md",
    ),
    Claim(
        technique="DDP against DataParallel",
        says="faster, even on one machine",
        source=TUNING_GUIDE,
        takes="several GPUs, and a loop by hand: ptfast has no DataParallel",
    ),
    Claim(
        technique="all of them",
        says="35 minutes become 10",
        source="often repeated: DistilBERT, 150,000 texts, a T4; no breakdown",
        takes="that GPU and model; ptfast ablate +recipe=NAME says it of yours",
    ),
)
"""In the order in which the sources give them."""
