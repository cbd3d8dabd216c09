"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009): 60,000 color images of 32x32 pixels, downloaded once."""

from __future__ import annotations

import hashlib
import os
import pickle
import tarfile
import urllib.request
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from ptfast.core.durations import Duration
from ptfast.core.errors import DataError, cannot_write, summary_of
from ptfast.core.machine import cache_folder
from ptfast.data.dataset import Splits, image_info
from ptfast.data.map_source import TensorSource
from ptfast.data.streams.shard_cache import locked


class _Version(NamedTuple):
    folder: str
    archive: str
    md5: str
    train: tuple[str, ...]
    test: str
    meta: str
    labels: str
    names: str
    mean: tuple[float, ...]
    std: tuple[float, ...]


_URL = "https://www.cs.toronto.edu/~kriz/"
_VERSIONS = {
    "cifar10": _Version(
        folder="cifar-10-batches-py",
        archive="cifar-10-python.tar.gz",
        md5="c58f30108f718f92721af3b95e74349a",
        train=tuple(f"data_batch_{i}" for i in range(1, 6)),
        test="test_batch",
        meta="batches.meta",
        labels="labels",
        names="label_names",
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
    ),
    "cifar100": _Version(
        folder="cifar-100-python",
        archive="cifar-100-python.tar.gz",
        md5="eb9058c3a382ffc7106e4002c42a8d85",
        train=("train",),
        test="test",
        meta="meta",
        labels="fine_labels",
        names="fine_label_names",
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
    ),
}


class Cifar:
    """CIFAR-10 or CIFAR-100, with their train and test splits.

    Args:
        name: `cifar10` or `cifar100`.
        root: the extracted folder (`cifar-10-batches-py`), or a folder with it or its archive; also where
            a download goes. Default: `$PTFAST_DATA`, or the cache folder.
        download: whether to download it.

    Raises:
        DataError: by `load`, D001 if it is not there, D005 if a file is damaged, D007 if a download fails.
    """

    def __init__(self, name: str = "cifar10", root: str | None = None, download: bool = True) -> None:
        if name not in _VERSIONS:
            what = "no such version"
            raise DataError("D001", what, key="data.name", value=name, suggestion="Use cifar10 or cifar100")
        self.name, self.download = name, download
        self.root = Path(root or os.environ.get("PTFAST_DATA") or cache_folder() / "data").expanduser()

    def load(self, *, val: Duration, seed: int) -> Splits:
        version = _VERSIONS[self.name]
        folder = self._folder(version)
        names = tuple(_read(folder / version.meta)[version.names])
        normalize = {"mean": [255 * m for m in version.mean], "std": [255 * s for s in version.std]}
        info = image_info((3, 32, 32), class_names=names, normalize=normalize)
        sources = dict[str, TensorSource]()
        for split, files in (("train", version.train), ("test", (version.test,))):
            parts = [_read(folder / name) for name in files]
            try:
                planes = np.concatenate([part["data"] for part in parts]).reshape(-1, 3, 32, 32)
                labels = torch.tensor([label for part in parts for label in part[version.labels]])
            except (KeyError, ValueError) as error:
                what = f"is not a batch of CIFAR: {error}"
                raise DataError("D005", what, key=str(folder / files[0])) from None
            pixels = np.ascontiguousarray(planes.transpose(0, 2, 3, 1))
            sources[split] = TensorSource(torch.from_numpy(pixels), labels, images=True)
        return Splits.of(info, sources)

    def _folder(self, version: _Version) -> Path:
        if (found := self._found(version)) is not None:
            return found
        hint = (
            f"Set data.root to the extracted folder {version.folder}, "
            "or use data=imagefolder data.root=FOLDER for class folders of images"
        )
        archive = self.root / version.archive
        if not self.download and not archive.is_file():
            what = f"contains no {version.folder}, and data.download=false"
            raise DataError("D001", what, key="data.root", value=self.root, suggestion=hint)
        if self.root.exists() and not self.root.is_dir():
            what = "is a file, not a folder"
            raise DataError("D001", what, key="data.root", value=self.root, suggestion=hint)
        try:
            with locked(self.root):
                return self._found(version) or self._fetch(version, archive, hint)
        except OSError as error:
            raise cannot_write(error, str(self.root), suggestion=hint) from None

    def _found(self, version: _Version) -> Path | None:
        files = (version.meta, *version.train, version.test)
        folders = (self.root, self.root / version.folder)
        return next((each for each in folders if all((each / name).is_file() for name in files)), None)

    def _fetch(self, version: _Version, archive: Path, hint: str) -> Path:
        """Download the archive unless an intact one is there, and unpack it."""

        def is_intact() -> bool:
            content = archive.read_bytes() if archive.is_file() else b""
            return hashlib.md5(content, usedforsecurity=False).hexdigest() == version.md5

        what, partial = "is damaged (wrong checksum)", archive.with_suffix(".partial")
        try:
            if self.download and not is_intact():
                with urllib.request.urlopen(_URL + version.archive, timeout=20) as source:
                    partial.write_bytes(source.read())
                partial.replace(archive)
            if is_intact():
                with tarfile.open(archive) as tar:
                    # Check all members before unpacking the first; the filter shortens absolute paths.
                    if any(tarfile.data_filter(each, str(self.root)).name != each.name for each in tar):
                        raise tarfile.TarError("contains an absolute path")
                    tar.extractall(self.root, filter="data")
                return self.root / version.folder
        except (OSError, EOFError, tarfile.TarError) as error:
            what = f"cannot be downloaded and unpacked: {summary_of(error)}"
        raise DataError("D007", what, key=str(archive), suggestion=hint)


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickles the arrays and plain values of the batches, and rejects code."""

    _numpy: ClassVar = {"ndarray": np.ndarray, "dtype": np.dtype, "_reconstruct": np.empty(0).__reduce__()[0]}

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "numpy" and name in self._numpy:
            return self._numpy[name]
        if (module, name) == ("_codecs", "encode"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed")


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return _ArrayUnpickler(file, encoding="latin1").load()
    except OSError as error:
        raise DataError("D001", f"cannot be read: {error.strerror}", key=str(path)) from None
    except Exception as error:
        what = f"is damaged: {str(error) or type(error).__name__}"
        raise DataError("D005", what, key=str(path), suggestion="Delete it to fetch it anew") from None
