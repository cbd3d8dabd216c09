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
from ptfast.data.sources.cifar import Cifar
from ptfast.data.streams.download import fetch_archive, unpack

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
        DataError, match=r"cannot be downloaded: .*Set data\.root to .* or use data=imagefolder"
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


def test_an_archive_is_fetched_checked_and_kept(tmp_path: Path):
    (tmp_path / "server").mkdir()
    source, home = tmp_path / "server" / "a.tar.gz", tmp_path / "home"
    md5 = archive(source, ("data/x", b"content"))
    url = source.as_uri()
    got = fetch_archive(url, md5, home, "")
    unpack(got, home)
    assert (home / "data" / "x").read_bytes() == b"content"
    # Interrupted: half of it lies there under the final name.
    got.write_bytes(got.read_bytes()[:50])
    assert fetch_archive(url, md5, home, "").read_bytes() == source.read_bytes()
    source.unlink()
    assert fetch_archive(url, md5, home, "") == got
    got.write_bytes(b"half")
    with pytest.raises(DataError, match=r"is damaged .* and cannot be downloaded"):
        fetch_archive(url, md5, home, "")


def test_a_wrong_checksum_leaves_nothing(tmp_path: Path):
    (tmp_path / "server").mkdir()
    source = tmp_path / "server" / "a.tar.gz"
    archive(source, ("x", b"content"))
    with pytest.raises(DataError, match="wrong checksum"):
        fetch_archive(source.as_uri(), "0" * 32, tmp_path / "home", "")
    assert [path.name for path in tmp_path.iterdir()] == ["server"]


@pytest.mark.parametrize(
    "member", [("../evil", b"x"), ("/tmp/evil", b"x"), ("a/../../evil", b"x"), ("link", "/etc")]
)
def test_members_that_leave_the_folder_are_refused_before_anything_is_unpacked(
    tmp_path: Path, member: tuple[str, bytes | str]
):
    path, home = tmp_path / "a.tar.gz", tmp_path / "home"
    home.mkdir()
    archive(path, ("good", b"x"), member)
    with pytest.raises(DataError, match="holds an unsafe member"):
        unpack(path, home)
    assert list(home.iterdir()) == []


def test_a_truncated_archive_is_refused(tmp_path: Path):
    path = tmp_path / "a.tar.gz"
    archive(path, ("x", np.random.default_rng(0).bytes(5000)))
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(DataError, match="cannot be unpacked"):
        unpack(path, tmp_path / "home")
