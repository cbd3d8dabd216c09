"""Models, datasets and callbacks with one defect each, on a line that ends in `# planted`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from ptfast.core.protocols import Callback
from ptfast.tasks.classification import Classification


class RmsNorm(nn.Module):
    """An RMS norm as models write it."""

    def __init__(self, width: int, offset: float = 0.0, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.variance_epsilon, self.offset = nn.Parameter(torch.randn(width)), eps, offset

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight + self.offset) * wide.to(x.dtype)


class Net(nn.Module):
    """Two layers; the defects are between them."""

    def __init__(self, num_classes: int = 2, defect: str = "") -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, num_classes)
        self.defect = defect
        if defect == "bias":
            self.norm = nn.BatchNorm1d(8)
        if defect == "rms":
            self.norm = RmsNorm(8)
        if defect == "dropout":
            self.drop = nn.Dropout(0.0)
        if defect == "unused":
            self.spare = nn.Linear(8, 8)
        if defect == "parallel":
            self.inner = nn.DataParallel(nn.Linear(8, 8))
        if defect == "width":
            self.first, self.last = nn.Linear(4, 13), nn.Linear(13, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        if self.defect:
            hidden = getattr(self, f"_{self.defect}", lambda hidden: hidden)(hidden)
        return self.last(hidden)

    def _bias(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)

    def _rms(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)

    def _dropout(self, hidden: Tensor) -> Tensor:
        return self.drop(hidden)

    def _parallel(self, hidden: Tensor) -> Tensor:
        return self.inner(hidden)

    def _attention(self, hidden: Tensor) -> Tensor:
        queries = hidden.view(-1, 4, 2)
        weights = (queries @ queries.transpose(1, 2) / math.sqrt(2)).softmax(-1)  # planted
        return (weights @ queries).flatten(1)

    def _gelu(self, hidden: Tensor) -> Tensor:
        return 0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2)))  # planted

    def _gelu_tanh(self, hidden: Tensor) -> Tensor:
        inner = math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)
        return 0.5 * hidden * (1 + torch.tanh(inner))  # planted

    def _float64(self, hidden: Tensor) -> Tensor:
        return (hidden.double() * 2).float()  # planted

    def _item(self, hidden: Tensor) -> Tensor:
        return hidden / max(hidden.detach().abs().max().item(), 1.0)  # planted

    def _cpu(self, hidden: Tensor) -> Tensor:
        self.seen = hidden.detach().cpu()  # planted
        return hidden

    def _branch(self, hidden: Tensor) -> Tensor:
        if hidden.detach().sum() > 1e9:  # planted
            return hidden * 2
        return hidden

    def _nonzero(self, hidden: Tensor) -> Tensor:
        self.seen = (hidden.detach() > 0).nonzero()  # planted
        return hidden

    def _mask(self, hidden: Tensor) -> Tensor:
        self.seen = hidden.detach()[hidden.detach() > 0]  # planted
        return hidden

    def _print(self, hidden: Tensor) -> Tensor:
        print(f"{hidden.detach().mean()}", end="")  # planted
        return hidden

    def _made(self, hidden: Tensor) -> Tensor:
        return hidden + torch.zeros(8).to(hidden.device)  # planted

    def _anomaly(self, hidden: Tensor) -> Tensor:
        torch.autograd.set_detect_anomaly(True)  # planted
        return hidden

    def _evaluation(self, hidden: Tensor) -> Tensor:
        with torch.enable_grad():
            return hidden * 1  # planted

    def _broken(self, hidden: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return hidden

    def _untraced(self, hidden: Tensor) -> Tensor:
        if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
            raise RuntimeError("not under a mode")
        return hidden

    def _clean(self, hidden: Tensor) -> Tensor:
        """What is near each defect, and is none."""
        queries = hidden.view(-1, 4, 2)
        attended = F.scaled_dot_product_attention(queries, queries, queries).flatten(1)
        kept = (queries @ queries.transpose(1, 2)).softmax(-1)
        self.seen = kept.mean(1)
        hidden = F.gelu(attended) + (kept @ queries).flatten(1) + torch.zeros(8, device=hidden.device)
        hidden = hidden * (1 + torch.tanh(hidden)) * torch.erf(hidden)
        return hidden.masked_fill(hidden > 100, 0.0) if hidden.shape[0] > 0 else hidden


class Points(Dataset[Any]):
    """Two classes, made a sample at a time."""

    num_classes = 2

    def __init__(self, defect: str = "", size: int = 64) -> None:
        self.defect = defect
        self.targets = torch.arange(size) % 2
        self.points = np.random.default_rng(0).normal(size=(size, 4)).astype(np.float32)
        if defect == "scale":
            self.points = self.points * 30 + 100

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:  # planted
        point = self.copied(index) if self.defect == "copy" else torch.from_numpy(self.points[index])
        return self.changed(point) if self.defect == "single" else point, self.targets[index]

    def copied(self, index: int) -> Tensor:
        return torch.tensor(self.points[index])  # planted

    def changed(self, point: Tensor) -> Tensor:
        return (point - 0.5) / 2  # planted


class Pictures(Dataset[Any]):
    """PNG files in memory, decoded by PIL."""

    num_classes = 2

    def __init__(self, size: int = 40) -> None:
        import io

        from PIL import Image

        self.targets, self.files = torch.arange(size) % 2, []
        for number in range(size):
            file = io.BytesIO()
            Image.fromarray(np.full((512, 512, 3), 6 * number, np.uint8)).save(file, "PNG")
            self.files.append(file.getvalue())

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:  # planted
        import io

        from PIL import Image

        image = np.asarray(Image.open(io.BytesIO(self.files[index])))
        pixels = image[:2, :2, 0].astype(np.float32).reshape(4) / 64 - 2
        return torch.from_numpy(pixels), self.targets[index]


class Padded(Dataset[Any]):
    """Tokens that are filled up to one length already."""

    num_classes, vocab_size = 2, 9

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, int]:  # planted
        tokens = torch.zeros(16, dtype=torch.int64)
        tokens[: 2 + index % 3] = 1 + torch.arange(2 + index % 3)
        return tokens, index % 2


class Ragged(Dataset[Any]):
    """Tokens of unequal length, which it states."""

    num_classes, vocab_size = 2, 9

    def __init__(self) -> None:
        self.lengths = [2 + 14 * (index % 2) for index in range(64)]

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return 1 + torch.arange(self.lengths[index]) % 8, index % 2


def _flipped(self: Any, point: Tensor) -> Tensor:
    return point


class Augmented(Points):
    """Points behind a transform of torchvision, which takes one at a time."""

    def __init__(self) -> None:
        super().__init__()
        # Importing torchvision would take seconds.
        self.transform = type("Flip", (), {"__module__": "torchvision.transforms", "__call__": _flipped})()

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:  # planted
        return self.transform(torch.from_numpy(self.points[index])), self.targets[index]


class Sums(nn.Module):
    """Adds up the embeddings of tokens."""

    def __init__(self, vocab_size: int, num_classes: int) -> None:
        super().__init__()
        self.embed, self.last = nn.Embedding(vocab_size, 8), nn.Linear(8, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.embed(tokens).mean(1))


class Reading(Callback):
    """Reads a weight after each step."""

    def on_step(self, run: Any, step: int) -> None:
        float(next(run.model.parameters()).detach().sum())  # planted


class Reads(Classification):
    """Reads the loss in each step."""

    def loss(self, model: nn.Module, data: Any) -> Any:
        loss, count = super().loss(model, data)
        self.last = loss.item()  # planted
        return loss, count
