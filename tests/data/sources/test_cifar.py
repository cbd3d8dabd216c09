"""CIFAR and its archive: what is read, and downloads that are not whole or not safe."""

from __future__ import annotations

import hashlib
import io
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from ptfast.core.durations import Duration
from ptfast.core.errors import DataError
from ptfast.data.build_data import build_data
from ptfast.data.sources import cifar
from ptfast.data.sources.cifar import Cifar

NAMES = [f"class {i}" for i in range(10)]
VAL = Duration(20, "percent")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder like the extracted archive, with ten images a batch."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for i, name in enumerate([*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]):
        pixels = np.random.default_rng(i).integers(0, 256, (10, 3072), dtype=np.uint8)
        # Protocol 2, as the original.
        (folder / name).write_bytes(pickle.dumps({"data": pixels, "labels": list(range(10))}, protocol=2))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": NAMES}, protocol=2))
    return folder


def test_the_extracted_folder_is_read_by_itself_or_from_its_parent(folder: Path):
    for root in (folder, folder.parent):
        data = build_data(Cifar(root=str(root)), val=VAL, seed=0, task="auto")
        assert data.note == "cifar10: 40 train, 10 val, 10 test"
    assert data.info.class_names == tuple(NAMES)
    assert data.test is not None
    images, labels = data.test.fetch(np.arange(10))
    raw = pickle.loads((folder / "test_batch").read_bytes())["data"]
    assert torch.equal(images[3].permute(2, 0, 1).flatten(), torch.from_numpy(raw[3]))
    assert labels.tolist() == list(range(10))


def test_a_batch_that_is_damaged_or_holds_code_is_refused(folder: Path):
    (folder / "data_batch_2").write_bytes((folder / "data_batch_2").read_bytes()[:100])
    with pytest.raises(DataError, match="data_batch_2: is damaged"):
        Cifar(root=str(folder)).load(val=VAL, seed=0)
    (folder / "data_batch_2").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(DataError, match=r"os\.system is not allowed|system is not allowed"):
        Cifar(root=str(folder)).load(val=VAL, seed=0)


def test_without_a_network_the_error_says_how_to_point_at_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("ptfast.data.sources.cifar._URL", "file:///nowhere/")
    with pytest.raises(
        DataError, match=r"cannot be downloaded and unpacked: .*Set data\.root to .* or use data=imagefolder"
    ) as error:
        Cifar(root=str(tmp_path)).load(val=VAL, seed=0)
    assert error.value.code == "D007"
    with pytest.raises(DataError, match=r"data\.download=false"):
        Cifar(root=str(tmp_path), download=False).load(val=VAL, seed=0)


def archive(path: Path, *members: tuple[str, bytes | str]) -> str:
    """Write a tar of files (bytes) and links (text), and return its MD5."""
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            if isinstance(content, str):
                member.type, member.linkname = tarfile.SYMTYPE, content
                tar.addfile(member)
            else:
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return hashlib.md5(path.read_bytes()).hexdigest()


def test_a_wrong_checksum_and_a_truncated_archive_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    server, home = tmp_path / "server", tmp_path / "home"
    server.mkdir()
    archive(server / "cifar-10-python.tar.gz", ("x", np.random.default_rng(0).bytes(5000)))
    monkeypatch.setattr("ptfast.data.sources.cifar._URL", f"{server.as_uri()}/")
    with pytest.raises(DataError, match=r"is damaged .wrong checksum") as caught:
        Cifar(root=str(home)).load(val=VAL, seed=0)
    assert caught.value.code == "D007"
    half = (server / "cifar-10-python.tar.gz").read_bytes()[:2000]
    (home / "cifar-10-python.tar.gz").write_bytes(half)
    md5 = hashlib.md5(half).hexdigest()
    version = cifar._VERSIONS["cifar10"]._replace(md5=md5)
    monkeypatch.setitem(cifar._VERSIONS, "cifar10", version)
    with pytest.raises(DataError, match=r"cannot be downloaded and unpacked: .*ended"):
        Cifar(root=str(home), download=False).load(val=VAL, seed=0)
