"""Compare the prices of four findings of `ptfast audit` with the gain of mending them by hand.

    python scripts/bench_audit.py [--budget 2m] [gelu attention copies single]

Each defect is one of `Encoder` or `Waves` below, which have a keyword for each that mends it. The price is
what the audit says, the gain that of a paired trial of mended code against code as it is, in processes of
their own.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

DEFECTS = {
    "gelu": ("hand-written gelu", "model.gelu=true"),
    "attention": ("hand-written attention", "model.attention=true"),
    "copies": ("arrays copied", "data.shared=true"),
    "single": ("work on single samples", "data.single=false"),
}
"""The check that finds each, and the keyword that mends it."""
WORDS = (
    "data=custom",
    "data._target_=bench_audit.Waves",
    "model=custom",
    "model._target_=bench_audit.Encoder",
    "batch_size=32",
    "dataloader=plain",
)


class Encoder(nn.Module):
    """A small transformer, with what costs speed until a keyword mends it."""

    def __init__(
        self,
        num_classes: int = 2,
        width: int = 96,
        depth: int = 2,
        gelu: bool = False,
        attention: bool = False,
    ) -> None:
        super().__init__()
        self.gelu, self.attention = gelu, attention
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, num_classes)
        self.mixing = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(depth))
        self.widening = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(depth))
        self.narrowing = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs.unflatten(1, (-1, 8)))
        for index, mix in enumerate(self.mixing):
            hidden = hidden + self._attend(mix(self.norms[2 * index](hidden)))
            wide = self.widening[index](self.norms[2 * index + 1](hidden))
            wide = F.gelu(wide) if self.gelu else 0.5 * wide * (1 + torch.erf(wide / math.sqrt(2)))
            hidden = hidden + self.narrowing[index](wide)
        return self.last(hidden.mean(1))

    def _attend(self, mixed: Tensor) -> Tensor:
        queries, keys, values = mixed.unflatten(2, (4, -1)).transpose(1, 2).chunk(3, -1)
        if self.attention:
            attended = F.scaled_dot_product_attention(queries, keys, values)
        else:
            scores = queries @ keys.transpose(-1, -2) / math.sqrt(queries.shape[-1])
            attended = scores.softmax(-1) @ values
        return attended.transpose(1, 2).flatten(2)


class Waves(Dataset[Any]):
    """Series of 1,024 numbers, with what costs speed until a keyword mends it."""

    num_classes = 2

    def __init__(self, size: int = 512, shared: bool = False, single: bool = True) -> None:
        self.shared, self.single = shared, single
        self.targets = torch.arange(size) % 2
        self.series = np.random.default_rng(0).normal(size=(size, 1024)).astype(np.float32)

    def __len__(self) -> int:
        return len(self.series)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        series = torch.from_numpy(self.series[index]) if self.shared else torch.tensor(self.series[index])
        if self.single:
            series = (series - 0.01) / 1.01
        return series, self.targets[index]


def main() -> None:
    """Print a row for each defect."""
    from ptfast.config.read import read_config
    from ptfast.core.durations import Duration
    from ptfast.measure.audit.audit_context import audit_context
    from ptfast.measure.audit.audit_run import CHECKS
    from ptfast.measure.experiment.laboratory import Comparison, Laboratory
    from ptfast.measure.experiment.verdicts import judge
    from ptfast.report.terminal.display import Display, table

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("defects", nargs="*", default=[*DEFECTS])
    parser.add_argument("--budget", default="2m", help="of each comparison, and of the audit")
    asked = parser.parse_args()
    budget_s = Duration.parse(asked.budget, "seconds").seconds
    # The processes of a trial import this file too.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    sys.path.insert(0, str(Path(__file__).parent))
    rows: list[list[str]] = []
    with (
        tempfile.TemporaryDirectory() as name,
        audit_context(read_config(WORDS)[1], Path(name), Display()) as context,
    ):
        findings = [finding for check in CHECKS[:3] for finding in check(context)]
    comparison = Comparison(WORDS, {defect: (*WORDS, DEFECTS[defect][1]) for defect in asked.defects})
    with Laboratory(budget_s=len(asked.defects) * budget_s) as laboratory:
        comparison.measure(laboratory)
    effects, _ = comparison.effects()
    for defect, verdict in zip(asked.defects, judge([*map(effects.get, asked.defects)]), strict=True):
        check, _ = DEFECTS[defect]
        effect = effects.get(defect)
        prices = [found.price for found in findings if found.check == check and found.price]
        price = f"{sum(each.seconds for each in prices) * 1e3:.3g} ms" if prices else "not found"
        gain = comparison.why(defect) or "too little time"
        if effect is not None:
            step_s = comparison.median("step_s")
            saved = (1e3 * step_s * (1 - 1 / ratio) for ratio in (effect.ratio, *effect.interval()))
            gain = "{:.3g} ms [{:.3g} to {:.3g}]".format(*saved)
        rows.append([defect, check, price, gain, verdict])
    table(["defect", "found by", "price", "gain by hand", "verdict"], rows)


if __name__ == "__main__":
    main()
