"""The claims of blog posts, guides and papers, as pairs of configs that trials can compare."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ptfast.core.sections.technique import Need

Words = tuple[str, ...]
Finding = Literal["confirmed", "refuted", "cannot tell", "not testable here"]


@dataclass(frozen=True)
class Claim:
    """A figure that a source promises of a technique.

    Args:
        technique: as people call it.
        says: the promise in the source's figures.
        source: who says it, and of what.
        workload: overrides of both runs; `{images}`, `{files}` and `{texts}` stand for data made for it.
        without, with_it: overrides of the run without the technique, and of that with it.
        least, most: the range in which the ratio has to lie: of samples per second, or of memory saved
            (without over with); above 1 is better. To gain more than is claimed refutes nothing.
        needs: of the machine.
        takes: what a test would take that no trial of some seconds can give; there is no workload then.
        against: what the technique is held against, where that is no override.
    """

    technique: str
    says: str
    source: str
    workload: Words = ()
    without: str = ""
    with_it: str = ""
    quantity: Literal["speed", "memory"] = "speed"
    least: float = 1.0
    most: float = math.inf
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
REPEATED = "often repeated; first source not found"
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
        *("mixed precision", "1.5 to 5.5 times float32", AMP),
        *(WIDE, "precision=fp32", "precision=amp"),
        least=1.5,
        needs=("half",),
    ),
    Claim(
        *("mixed precision", "1.5 to 5.5 times float32", f"{AMP}; newer GPUs have TF32, too"),
        *(WIDE, "precision=tf32", "precision=amp"),
        least=1.5,
        needs=("half", "nvidia_tf32"),
    ),
    Claim(
        *("mixed precision", "less memory", AMP),
        *(WIDE, "precision=fp32", "precision=amp"),
        quantity="memory",
        least=1.02,
        needs=("half",),
    ),
    Claim(
        *("worker processes", "twice as fast", f"{GUIDE}, after an MNIST example"),
        *(FILES, "dataloader=plain", "dataloader=workers dataloader.workers=4"),
        least=2.0,
        needs=("cores",),
    ),
    Claim(
        *("worker processes", "four for each GPU are best", GUIDE),
        *(FILES, "dataloader=workers dataloader.workers=2", "dataloader=workers dataloader.workers=4"),
        needs=("cuda", "cores"),
    ),
    Claim(
        *("pinned memory", "faster copies to the GPU", TUNING_GUIDE),
        *((*WIDE, "dataloader=plain"), "dataloader.pin=false", "dataloader.pin=true"),
        needs=("cuda",),
    ),
    Claim(
        *("largest batch", "512 is 4 times as fast as 64", REPEATED),
        *(RESNET, "batch_size=64", "batch_size=512"),
        least=4.0,
    ),
    Claim(
        *("fused optimizer", "5 % of the step", REPEATED),
        *((*RESNET, "optimizer=adamw"), "optimizer.fused=false", "optimizer.fused=true"),
        least=1.05,
    ),
    Claim(
        *("activation checkpointing", "30 % more time", CHECKPOINTING),
        *(RESNET, "checkpointing=none", "checkpointing=full"),
        least=1 / 1.3,
        most=1.0,
    ),
    Claim(
        *("activation checkpointing", "7 times less memory", f"{CHECKPOINTING}, 1,000 layers"),
        *(LARGE, "checkpointing=none", "checkpointing=full"),
        quantity="memory",
        least=7.0,
    ),
    Claim(
        *("gradient accumulation", "less memory", GUIDE),
        *(LARGE, "gradients.accumulate=1", "gradients.accumulate=4"),
        quantity="memory",
        least=1.02,
    ),
    Claim(
        *("dynamic padding", "1.17 to 4.7 times padding to one length", PADDING),
        *(TEXTS, "batching=none", "batching=longest"),
        least=1.17,
    ),
    Claim(
        *("uniform-length batches", "1.17 to 1.6 times dynamic padding", PADDING),
        *(TEXTS, "batching=longest", "batching=buckets"),
        least=1.17,
    ),
    Claim(
        *("gradients set to None", "a write and a read of all gradients less", TUNING_GUIDE),
        *(RESNET, f"model._target_={ZEROED}"),
        against="filled with zeros",
    ),
    Claim(
        *("fused pointwise operations", "fewer kernels that wait for memory", TUNING_GUIDE),
        *(TEXTS, "compile=none", "compile=pointwise"),
        needs=("compiler",),
    ),
    Claim(
        *("one cycle", "10 times fewer steps than in steps"),
        source="Smith, Topin 2018, arXiv:1708.07120: ResNet-56 on CIFAR-10",
        takes="hours of training: ptfast race, see docs/race.md",
    ),
    Claim(
        *("DDP against DataParallel", "faster, even on one machine", TUNING_GUIDE),
        takes="several GPUs, and a loop by hand: ptfast has no DataParallel",
    ),
    Claim(
        *("all of them", "35 minutes become 10"),
        source="often repeated: DistilBERT, 150,000 texts, a T4; no breakdown",
        takes="that GPU and model; ptfast ablate +recipe=NAME says it of yours",
    ),
)
"""In the order in which the sources give them."""
