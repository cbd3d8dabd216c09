"""Compare published claims about techniques with this machine.

    python scripts/bench_claims.py [--budget 4m] [--out FOLDER]

Each claim is tested with blocks of four trials on generated data, two with the technique and two without.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from PIL import Image
from torch import Tensor, nn

from ptfast.cli.arguments import path, seconds
from ptfast.config.catalogue import ThisMachine
from ptfast.config.files.overlay import check_out
from ptfast.config.overrides import merge
from ptfast.core import run_directory
from ptfast.core.errors import EXIT_INTERRUPTED, EXIT_OK
from ptfast.core.sections.section import Need
from ptfast.measure.experiment.laboratory import BASE, NOT_REACHED, Comparison, Laboratory
from ptfast.measure.experiment.verdicts import ALPHA, Effect
from ptfast.measure.outputs import write_results
from ptfast.models.resnet_cifar import ResNetCifar
from ptfast.report.terminal.display import table, terminal_display

Words = tuple[str, ...]
Finding = Literal["confirmed", "refuted", "cannot tell", "not testable here"]


@dataclass(frozen=True)
class Claim:
    """A published claim about a technique.

    Args:
        says: the claim, in the source's numbers.
        source: who claims it, and for which setup.
        workload: overrides of both runs; `{images}`, `{files}` and `{texts}` stand for generated data.
        without, with_it: overrides of the run without the technique, and of the run with it.
        least, most: range of the ratio that confirms the claim: of samples per second, or of memory saved
        (without over with); above 1 is better. A gain above the range still confirms the claim.
        takes: what a test needs beyond a trial of seconds; such a claim has no workload.
    """

    technique: str
    says: str
    source: str
    workload: Words = ()
    without: str = ""
    with_it: str = ""
    needs: tuple[Need, ...] = ()
    quantity: Literal["speed", "memory"] = "speed"
    least: float = 1.0
    most: float = math.inf
    takes: str = ""


def judge(claim: Claim, low: float, high: float) -> Finding:
    """Compare the 95 % interval of a measured ratio with the claimed range."""
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
ONE_CYCLE = "Smith, Topin 2018, arXiv:1708.07120: ResNet-56 on CIFAR-10"

RESNET: Words = ("data=arrays", "data.path={images}", "model=resnet20", "optimizer=sgd")
WIDE: Words = (*RESNET, "model.width=32")
LARGE: Words = (*RESNET, "batch_size=256")
FILES: Words = ("data=imagefolder", "data.root={files}", "data.image_size=128", "model=mlp", "batch_size=32")
TEXTS: Words = (
    *("data=text_file", "data.path={texts}", "data.documents=lines", "data.context_length=256"),
    *("model=gpt", "model.width=64", "model.depth=2", "batch_size=16"),
)

Workload = tuple[Words, str, str, tuple[Need, ...]]
"""`workload`, `without`, `with_it` and `needs` of a claim."""
AUTOCAST: Workload = (WIDE, "precision=fp32", "precision=amp", ("half",))
OVER_TF32: Workload = (WIDE, "precision=tf32", "precision=amp", ("half", "nvidia_tf32"))
TWO_WORKERS, FOUR_WORKERS = (f"dataloader=workers dataloader.workers={count}" for count in (2, 4))
WORKERS: Workload = (FILES, "dataloader=plain", FOUR_WORKERS, ("cores",))
MORE_WORKERS: Workload = (FILES, TWO_WORKERS, FOUR_WORKERS, ("cuda", "cores"))
PINNED: Workload = ((*WIDE, "dataloader=plain"), "dataloader.pin=false", "dataloader.pin=true", ("cuda",))
LARGER: Workload = (RESNET, "batch_size=64", "batch_size=512", ())
FUSED: Workload = ((*RESNET, "optimizer=adamw"), "optimizer.fused=false", "optimizer.fused=true", ())
RECOMPUTED: Workload = (RESNET, "checkpointing=none", "checkpointing=full", ())
RECOMPUTED_LARGE: Workload = (LARGE, *RECOMPUTED[1:])
ACCUMULATED: Workload = (LARGE, "gradients.accumulate=1", "gradients.accumulate=4", ())
PADDED: Workload = (TEXTS, "batching=none", "batching=longest", ())
BUCKETS: Workload = (TEXTS, "batching=longest", "batching=buckets", ())
NO_GRADIENTS: Workload = (RESNET, "model._target_=bench_claims.ZeroedResNet", "", ())

CLAIMS = (
    Claim("mixed precision", "1.5 to 5.5 times float32", AMP, *AUTOCAST, least=1.5),
    Claim(
        *("mixed precision", "1.5 to 5.5 times float32", f"{AMP}; newer GPUs have TF32, too"),
        *OVER_TF32,
        least=1.5,
    ),
    Claim("mixed precision", "less memory", AMP, *AUTOCAST, quantity="memory", least=1.02),
    Claim("worker processes", "twice as fast", f"{GUIDE}, after an MNIST example", *WORKERS, least=2.0),
    Claim("worker processes", "four for each GPU are best", GUIDE, *MORE_WORKERS),
    Claim("pinned memory", "faster copies to the GPU", TUNING_GUIDE, *PINNED),
    Claim("largest batch", "512 is 4 times as fast as 64", REPEATED, *LARGER, least=4.0),
    Claim("fused optimizer", "5 % of the step", REPEATED, *FUSED, least=1.05),
    Claim("activation checkpointing", "30 % more time", CHECKPOINTING, *RECOMPUTED, least=1 / 1.3, most=1.0),
    Claim(
        *("activation checkpointing", "7 times less memory", f"{CHECKPOINTING}, 1,000 layers"),
        *RECOMPUTED_LARGE,
        quantity="memory",
        least=7.0,
    ),
    Claim("gradient accumulation", "less memory", GUIDE, *ACCUMULATED, quantity="memory", least=1.02),
    Claim("dynamic padding", "1.17 to 4.7 times padding to one length", PADDING, *PADDED, least=1.17),
    Claim("uniform-length batches", "1.17 to 1.6 times dynamic padding", PADDING, *BUCKETS, least=1.17),
    Claim(
        *("gradients set to None", "saves a write and a read of all gradients", TUNING_GUIDE), *NO_GRADIENTS
    ),
    Claim(
        *("one cycle", "10 times fewer steps than a step schedule", ONE_CYCLE),
        takes="hours of training: ptfast race, see docs/speed/race.md",
    ),
    Claim(
        *("DDP against DataParallel", "faster, even on one machine", TUNING_GUIDE),
        takes="several GPUs, and a hand-written loop: ptfast has no DataParallel",
    ),
    Claim(
        *("all of them", "35 minutes become 10"),
        source="often repeated: DistilBERT, 150,000 texts, a T4; no breakdown",
        takes="that GPU and model; ptfast ablate recipe=NAME measures yours",
    ),
)
"""In the order of the sources."""


def compare_claims(*, budget_s: float, out: Path | None = None) -> int:
    """Compare every claim that can be tested here with blocked pairs of trials on generated data.

    The claims share `budget_s` evenly. With 95 % confidence, all intervals contain their true ratios at once.
    """
    check_out(out)
    machine, code, pairs = ThisMachine(), EXIT_OK, dict[Claim, Comparison]()
    untestable: dict[Claim, str] = {}
    with (
        tempfile.TemporaryDirectory(prefix="ptfast-") as scratch,
        Laboratory(budget_s=budget_s) as laboratory,
    ):
        paths = make_data(Path(scratch))
        for claim in CLAIMS:
            workload = ["preset=plain", *(word.format(**paths) for word in claim.workload)]
            without, with_it = (merge(workload, own.split()) for own in (claim.without, claim.with_it))
            if lack := claim.takes or next(filter(None, map(machine.lacks, claim.needs)), ""):
                untestable[claim] = lack
            else:
                pairs[claim] = Comparison(without, {claim.technique: with_it})
        try:
            with terminal_display().status(f"comparing {len(pairs)} pairs of configs", laboratory.left_s):
                while laboratory.left_s > laboratory.block_s:
                    for pair in pairs.values():
                        pair.measure(laboratory, least=0, most=len(pair.blocks) + 1)
        except KeyboardInterrupt:
            code = EXIT_INTERRUPTED
    rows: list[list[str]] = []
    records: list[dict[str, Any]] = []
    for claim in CLAIMS:
        pair, effect = pairs.get(claim), None
        finding, here = "not testable here", untestable.get(claim, "")
        if pair is not None:
            effect = pair.effects()[0].get(claim.technique)
            finding, here = _compare(claim, pair, effect, len(pairs))
        rows.append([claim.technique, claim.says, claim.without, here, finding])
        facts = {"technique": claim.technique, "says": claim.says, "source": claim.source}
        facts |= {"finding": finding, "here": here, "range": [claim.least, claim.most]}
        blocks = [[run.record() for _, run in block] for block in (pair.blocks if pair else ())]
        records.append(facts | {"effect": effect and effect.record(), "blocks": blocks})
    table(["technique", "claim", "against", "here", "finding"], rows)
    command = ["scripts/bench_claims.py", "--budget", f"{budget_s:g}s"]
    facts = {"command": command, "environment": run_directory.environment([]), "claims": records}
    write_results("claims", out, None, facts)
    return code


def _compare(claim: Claim, pair: Comparison, effect: Effect | None, num_pairs: int) -> tuple[Finding, str]:
    """Return the finding on a claim and the ratio measured, or the reason if there is no ratio."""
    if effect is None:
        why = pair.why(claim.technique) or NOT_REACHED
        return "cannot tell" if why == NOT_REACHED else "not testable here", why
    if claim.quantity == "memory":
        # Training memory beyond that of a built run.
        taken = [
            pair.median("peak_memory_bytes", name) - pair.median("built_bytes", name)
            for name in (BASE, claim.technique)
        ]
        ratio = taken[0] / max(taken[1], 1)
        return judge(claim, ratio, ratio), f"{ratio:.2f}x"
    low, high = effect.interval(1 - ALPHA / num_pairs)
    return judge(claim, low, high), f"{effect.ratio:.2f}x [{low:.2f}-{high:.2f}]"


NUM_IMAGES, NUM_FILES, NUM_TEXTS = 4096, 512, 2000
LENGTHS = (8, 256)
"""Shortest and longest text in characters; most are short, like real texts."""


def make_data(folder: Path) -> dict[str, Path]:
    """Generate the data of the workloads, and return its paths by placeholder. Cost: a few seconds."""
    images_file, files, texts = folder / "images.npz", folder / "files", folder / "texts.txt"
    chance = np.random.default_rng(0)
    images = chance.integers(0, 256, (NUM_IMAGES, 32, 32, 3), dtype=np.uint8)
    np.savez(images_file, train_x=images, train_y=chance.integers(0, 10, NUM_IMAGES))
    # JPEG files of 256 x 256 that take about as long to decode as photographs of that size.
    for number in range(NUM_FILES):
        pixels = chance.integers(0, 256, (64, 64, 3), dtype=np.uint8)
        file = files / f"class_{number % 2}" / f"{number:04d}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).resize((256, 256), Image.Resampling.BICUBIC).save(file, quality=90)
    lengths = np.clip(chance.lognormal(4.0, 0.7, NUM_TEXTS).astype(int), *LENGTHS)
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz      ", np.uint8)
    lines = (chance.choice(letters, length).tobytes().decode() for length in lengths)
    texts.write_text("".join(f"{line.strip() or 'a'}\n" for line in lines))
    return {"images": images_file, "files": files, "texts": texts}


class ZeroedResNet(ResNetCifar):
    """A ResNet whose gradients are kept and filled with zeros, as by `zero_grad(set_to_none=False)`.

    That costs a write of all gradients, and a read when the backward pass adds to them.
    """

    _kept: Mapping[nn.Parameter, Tensor] = MappingProxyType({})

    def forward(self, images: Tensor) -> Tensor:
        """Map (batch, in_channels, height, width) to logits (batch, num_classes)."""
        if self.training:
            self._kept = self._kept or {each: each.detach().clone() for each in self.parameters()}
            for parameter, gradient in self._kept.items():
                parameter.grad = gradient.zero_()
        return super().forward(images)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--budget", type=seconds, default=240.0)
    parser.add_argument("--out", type=path)
    args = parser.parse_args()
    return compare_claims(budget_s=args.budget, out=args.out)


if __name__ == "__main__":
    sys.exit(main())
