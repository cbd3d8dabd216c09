"""The four tasks of `bench_peers.py`: two on images from JPEG files, two on texts."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from peers import Job

MAX_LENGTH = 128
"""Tokens of a text, at most."""
VAL_IMAGES, VAL_WINDOWS = 1000, 160
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TEXT_MODEL = {"width": 128, "depth": 2, "heads": 4, "dropout": 0.2, "word_dropout": 0.1}


@dataclass
class TaskJob(Job):
    """A job on real data."""

    data: Path = Path()
    """Holds `cifar/`, `sst2/` and `tinyshakespeare.txt`."""
    cache: Path = Path()
    """Where the job keeps what it makes of them."""
    num_train: int = 0
    """Training samples of an epoch."""
    target: float = 0.0
    """Accuracy, or loss, to reach."""

    def prepare(self) -> None:
        """Make what the job reads, unless it is there."""

    def words(self) -> list[str]:
        """The job as ptfast's overrides."""
        raise NotImplementedError

    @classmethod
    def reached_s(cls, evaluations: list[tuple[float, float]], target: float) -> float | None:
        """When the target was first reached, on straight lines from one evaluation to the next."""
        sign, before = 1 if cls.counts_correct else -1, None
        for moment, figure in evaluations:
            if sign * figure >= sign * target:
                if before is None:
                    return moment
                return before[0] + (moment - before[0]) * (target - before[1]) / (figure - before[1])
            before = moment, figure
        return None


class ImageJob(TaskJob):
    """CIFAR-10 from JPEG files: the first ones of each class."""

    side: ClassVar[int]
    """Pixels of a side as the model sees it."""
    file_side: ClassVar[int]
    """The same in the files: 32 as they are, or scaled up."""
    moves: ClassVar[dict[str, dict[str, Any]]]
    """torchvision's random transforms of training images."""

    @property
    def tree(self) -> Path:
        return self.cache / f"cifar-{self.num_train}-{self.file_side}"

    def prepare(self) -> None:
        if self.tree.exists():
            return
        from PIL import Image

        draft, size = self.tree.with_suffix(".draft"), (self.file_side, self.file_side)
        shutil.rmtree(draft, ignore_errors=True)
        for split, source, number in (("train", "train", self.num_train), ("val", "test", VAL_IMAGES)):
            for folder in sorted((self.data / "cifar" / source).iterdir()):
                (draft / split / folder.name).mkdir(parents=True)
                for file in sorted(folder.iterdir())[: number // 10]:
                    copy = draft / split / folder.name / file.name
                    if self.file_side == 32:
                        shutil.copyfile(file, copy)
                    else:
                        Image.open(file).resize(size, Image.Resampling.BICUBIC).save(copy, quality=90)
        draft.rename(self.tree)

    def train_moves(self) -> list[nn.Module]:
        from torchvision.transforms import v2

        return [getattr(v2, name)(**keywords) for name, keywords in self.moves.items()]

    def samples(self, split: str) -> Dataset[Any]:
        from torchvision.datasets import ImageFolder
        from torchvision.io import decode_image
        from torchvision.transforms import v2

        moves = self.train_moves() if split == "train" else [v2.Resize(self.side)]
        change = v2.Compose([*moves, v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])
        return ImageFolder(str(self.tree / split), transform=change, loader=decode_image)


class ResNet(ImageJob):
    """ResNet-20 at 32x32, with crops and flips, SGD with Nesterov momentum."""

    side = file_side = 32
    moves = {"RandomCrop": {"size": 32, "padding": 4}, "RandomHorizontalFlip": {}}  # noqa: RUF012
    weight_decay = 5e-4

    def build_model(self) -> nn.Module:
        from ptfast.models.resnet_cifar import ResNetCifar

        return ResNetCifar(num_classes=10).to(memory_format=torch.channels_last)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        groups = [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": self.weight_decay},
            {"params": [p for p in model.parameters() if p.ndim == 1]},
        ]
        return torch.optim.SGD(groups, lr=self.lr, momentum=0.9, nesterov=True, fused=True)

    def words(self) -> list[str]:
        data = ["data=imagefolder", f"data.root={self.tree}", "augment=crop_flip"]
        return [*data, "model=resnet20", "optimizer=sgd_cifar", f"optimizer.weight_decay={self.weight_decay}"]


class MobileNet(ImageJob):
    """timm's MobileNetV3-Small at 224x224, with random resized crops and flips."""

    side, file_side = 224, 256
    moves = {"RandomResizedCrop": {"size": 224}, "RandomHorizontalFlip": {}}  # noqa: RUF012
    name = "mobilenetv3_small_100"

    def build_model(self) -> nn.Module:
        import timm

        return timm.create_model(self.name, num_classes=10).to(memory_format=torch.channels_last)

    def words(self) -> list[str]:
        data = ["data=imagefolder", f"data.root={self.tree}", "data.image_size=224", "augment=resized_crop"]
        model = ["model=timm", f"model.name={self.name}"]
        return [*data, *model, "optimizer=adamw", "optimizer.weight_decay=0"]


class Sst2(TaskJob):
    """SST-2 by a transformer of two blocks, trained from nothing; padded to the longest text of a batch."""

    groups_lengths = True

    def build_model(self) -> nn.Module:
        from ptfast.models.text_encoder import TextEncoder

        vocab_size = len(self._ids(self._rows("train"))) + 2
        return TextEncoder(vocab_size, 2, context_length=MAX_LENGTH, **TEXT_MODEL)

    def _rows(self, name: str) -> list[list[str]]:
        """Texts and labels of one file."""
        return [line.split("\t") for line in (self.data / f"sst2/{name}.tsv").read_text().splitlines()]

    def _ids(self, rows: list[list[str]]) -> dict[str, int]:
        """Words from the most frequent on; 0 is padding and 1 an unknown word."""
        counts = Counter(word for text, _ in rows for word in text.split())
        return {word: number for number, (word, _) in enumerate(counts.most_common(), 2)}

    def samples(self, split: str) -> Any:
        rows = train = self._rows("train")
        if split != "train":
            rows = self._rows("dev")
        ids = self._ids(train)
        texts = [[ids.get(word, 1) for word in text.split()[:MAX_LENGTH]] for text, _ in rows]
        return [(torch.tensor(text), int(label)) for text, (_, label) in zip(texts, rows, strict=True)]

    def collate(self, samples: list[Any]) -> tuple[Tensor, Tensor]:
        texts, labels = zip(*samples, strict=True)
        return nn.utils.rnn.pad_sequence(list(texts), batch_first=True), torch.tensor(labels)

    def words(self) -> list[str]:
        data = ["data=text_tsv", f"data.root={self.data / 'sst2'}", "batching=buckets", "model=text_encoder"]
        model = [f"model.{name}={value}" for name, value in TEXT_MODEL.items()]
        return [*data, *model, "optimizer=adamw", "optimizer.weight_decay=0"]


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a text at random places, `size` an epoch: characters, and those that follow them."""

    def __init__(self, characters: Tensor, size: int) -> None:
        self.characters, self.size = characters, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = int(torch.randint(len(self.characters) - MAX_LENGTH, ()))
        window = self.characters[start : start + MAX_LENGTH + 1]
        return window[:-1], window[1:]


class Shakespeare(TaskJob):
    """A GPT of 0.8 million parameters on the characters of tiny Shakespeare."""

    counts_correct = False

    def _characters(self) -> tuple[Tensor, int]:
        """The number of each character, and how many there are."""
        text = (self.data / "tinyshakespeare.txt").read_text()
        ids = {character: number for number, character in enumerate(sorted(set(text)))}
        return torch.tensor([ids[character] for character in text]), len(ids)

    def build_model(self) -> nn.Module:
        from ptfast.models.gpt import Gpt

        return Gpt(self._characters()[1], MAX_LENGTH)

    def samples(self, split: str) -> Dataset[Any]:
        characters, _ = self._characters()
        cut = len(characters) - VAL_WINDOWS * MAX_LENGTH
        if split == "train":
            return Windows(characters[:cut], self.num_train)
        return TensorDataset(
            *(characters[i : i + len(characters) - cut].view(VAL_WINDOWS, -1) for i in (cut - 1, cut))
        )

    def words(self) -> list[str]:
        data = ["data=text_file", f"data.path={self.data / 'tinyshakespeare.txt'}", "model=gpt"]
        return [*data, f"data.val={VAL_WINDOWS}samples", "optimizer=adamw", "optimizer.weight_decay=0"]


TASKS: dict[str, tuple[type[TaskJob], dict[str, Any]]] = {
    "resnet": (ResNet, {"batch_size": 64, "epochs": 3, "lr": 0.05, "num_train": 2560, "target": 0.35}),
    "mobilenet": (MobileNet, {"batch_size": 32, "epochs": 3, "lr": 2e-3, "num_train": 800, "target": 0.18}),
    "sst2": (Sst2, {"batch_size": 64, "epochs": 3, "lr": 1e-3, "num_train": 6920, "target": 0.75}),
    "gpt": (Shakespeare, {"batch_size": 16, "epochs": 4, "lr": 2e-3, "num_train": 800, "target": 2.6}),
}
"""What is trained and for how long; nearly every run reaches its target."""
