"""A checkpoint on disk: what is read is what was written, or it is rejected."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from running import same_bits, whole_facts, write_shards, write_state
from safetensors import SafetensorError

from ptfast.core.distributed import Ranks
from ptfast.core.errors import ConfigError, MachineError, SavedStateError
from ptfast.core.tensors import checkpoint_files
from ptfast.core.tensors.checkpoint_files import CheckpointContent, read_checkpoint
from ptfast.core.tensors.checkpoint_folders import (
    abandon_after,
    find_to_resume,
    list_checkpoints,
    point,
    prune,
    restore_links,
)
from ptfast.core.tensors.dtensors import pack, unpack, write_tensors
from ptfast.models.warm_start import _read_pt


def a_state(value: float = 1.0, step: int = 3) -> CheckpointContent:
    model = {"weight": torch.full((3, 4), value), "count": torch.tensor(7)}
    training = {"optimizer": {"state": {0: {"step": torch.tensor(2.0)}}, "param_groups": [{"lr": 0.1}]}}
    return CheckpointContent(model, training, {**whole_facts(step), "names": ["a", "b"]})


def write_by_ranks(saved: Path, step: int, state: CheckpointContent) -> Path:
    """As ranks write together, of whom this is the only one."""
    return write_shards(saved, step, state, Ranks())


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return tmp_path / "run" / "saved"


@pytest.mark.parametrize("write", [write_state, write_by_ranks])
def test_what_is_read_is_what_was_written(saved: Path, write: Any) -> None:
    folder = write(saved, 3, a_state())
    state = read_checkpoint(folder)
    assert same_bits(state.model, a_state().model)
    assert same_bits(state.training, a_state().training)
    assert state.facts == a_state().facts
    assert (saved / "last").readlink() == Path("step-3")
    assert sorted(path.name for path in saved.iterdir()) == ["last", "step-3"]


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "missing"])
@pytest.mark.parametrize(
    ("write", "name"),
    [
        *((write_state, name) for name in ("model.pt", "training.pt", "state.json", "manifest.json")),
        *((write_by_ranks, name) for name in ("shard-00001-of-00001.safetensors", "tree.json")),
    ],
)
def test_a_damaged_file_is_named(saved: Path, write: Any, name: str, damage: str) -> None:
    path = write(saved, 3, a_state()) / name
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 0x80
    path.write_bytes({"cut": content[:-5], "empty": b""}.get(damage, bytes(content)))
    if damage == "missing":
        path.unlink()
    with pytest.raises(SavedStateError) as caught:
        read_checkpoint(saved / "step-3")
    assert caught.value.code == "S001"
    assert name in str(caught.value) or name == "manifest.json"


def test_a_pickled_object_is_rejected_without_running_it(saved: Path, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(tmp_path / "ran"),))

    folder = write_state(saved, 3, a_state())
    pickled, plain = {"x": Bomb()}, pickle.dumps(Bomb())
    for write in (lambda path: torch.save(pickled, path), lambda path: path.write_bytes(plain)):
        write(folder / "model.pt")
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["sha256"]["model.pt"] = checkpoint_files._sha256(folder / "model.pt")
        (folder / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(SavedStateError, match=r"model\.pt"):
            read_checkpoint(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("saved_by", range(1, 6))
def test_rows_of_some_ranks_are_read_by_any_others(tmp_path: Path, saved_by: int) -> None:
    """Four rows in files of one to five ranks, of whom one may have none, read by as many."""
    weight = torch.arange(12, dtype=torch.bfloat16).view(4, 3)
    files = [tmp_path / f"shard-{rank}.safetensors" for rank in range(saved_by)]
    shares = weight.chunk(saved_by)
    for rank, file in enumerate(files):
        write_tensors(file, {"weight": shares[rank]} if rank < len(shares) else {})
    found = unpack({"weight": {"rows": "weight"}}, files)["weight"]
    assert found.shape == weight.shape
    for read_by in range(1, 6):
        ends = [min(4, rank * -(-4 // read_by)) for rank in range(read_by + 1)]
        shares = [found.rows(start, stop) for start, stop in pairwise(ends)]
        assert torch.equal(torch.cat(shares), weight)
        assert {(share.dtype, share.shape[1:]) for share in shares} == {(weight.dtype, (3,))}


def test_what_ranks_save_beside_tensors_is_kept(tmp_path: Path) -> None:
    whole = torch.tensor(2.5)
    nest: dict[str, Any] = {
        "a": {1: (0.9, 0.999), "1": [None, True, float("inf"), "x"], "bytes": b"\x00\xff"},
        "names/met": {"twice": whole, "again": whole},
        "names": {"met/twice": torch.zeros(0, 3), "half": torch.ones(2).half()},
    }
    packed, tensors = pack(nest, is_first=True)
    write_tensors(tmp_path / "shard.safetensors", tensors)
    assert same_bits(unpack(json.loads(json.dumps(packed)), [tmp_path / "shard.safetensors"]), nest)
    assert pack(nest, is_first=False)[1] == {}
    with pytest.raises(ConfigError, match=r"a/0/kind is a PosixPath, where tensors and plain values"):
        pack({"a": [{"kind": tmp_path}]}, is_first=True)


def test_a_tree_that_misleads_is_rejected(saved: Path) -> None:
    """Changed, and its checksum with it."""
    folder = write_by_ranks(saved, 3, a_state())
    for tree in (
        "[",
        '{"model": {"rows": "nothing"}}',
        '{"model": {"run": "this"}}',
        '{"model": {"dict": []}}',
    ):
        (folder / "tree.json").write_text(tree)
        with pytest.raises(SavedStateError, match=r"tree\.json: it cannot be read"):
            read_checkpoint(folder, check=False)


def test_what_the_manifest_does_not_name_is_not_read(saved: Path) -> None:
    folder, other = (write_by_ranks(saved, step, a_state(float(step), step)) for step in (1, 2))
    shutil.copy(other / "shard-00001-of-00001.safetensors", folder / "shard-00000-of-00002.safetensors")
    assert same_bits(read_checkpoint(folder).model, a_state(1.0).model)


def test_a_compressed_file_is_rejected_before_it_fills_the_memory(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(1000)}, tmp_path / "plain.pt")
    bomb = tmp_path / "bomb.pt"
    packed = zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, packed:
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    assert checkpoint_files.load_tensors(tmp_path / "plain.pt")
    with pytest.raises(SavedStateError, match="cannot be read"):
        checkpoint_files.load_tensors(bomb)
    with pytest.raises(SavedStateError, match="is damaged"):
        _read_pt(bomb)


def test_a_newer_format_says_so(saved: Path) -> None:
    folder = write_state(saved, 3, a_state())
    manifest = json.loads((folder / "manifest.json").read_text()) | {
        "format": checkpoint_files.EXPORT_FORMAT + 1
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(SavedStateError, match="newer"):
        read_checkpoint(folder)


def test_prune_keeps_the_newest_the_last_and_the_best(saved: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        folder = write_state(saved, step, a_state(step, step))
        if step == 2:
            point(saved, "best", folder)
        prune(saved, 2)
    assert [path.name for path in list_checkpoints(saved)] == ["step-5", "step-4", "step-2"]
    assert (saved / "best").resolve().name == "step-2"
    write_state(saved, 6, a_state(6, 6))
    prune(saved, 1, best_steps=[2, 4])
    assert [path.name for path in list_checkpoints(saved)] == ["step-6", "step-4", "step-2"]


def test_states_of_an_attempt_gone_back_from_are_dropped(saved: Path) -> None:
    for step in (10, 20, 30):
        folder = write_state(saved, step, a_state(step=step))
    point(saved, "best", folder)
    abandon_after(saved, saved / "step-10")
    assert list_checkpoints(saved) == [saved / "step-10"] == [find_to_resume(saved.parent)]
    # A kill leaves them on disk until the next state is written.
    assert (saved / ".step-30.abandoned").is_dir()
    write_state(saved, 15, a_state(step=15))
    prune(saved, 2)
    assert sorted(path.name for path in saved.iterdir()) == ["last", "step-10", "step-15"]


def test_states_saved_as_the_best_alone_do_not_count(saved: Path) -> None:
    for step in range(1, 8):
        state = a_state(step=step)
        state.facts["best_only"] = step not in (2, 4, 7)
        write_state(saved, step, state)
        prune(saved, 3, best_steps=[step])
    assert [path.name for path in list_checkpoints(saved)] == ["step-7", "step-4", "step-2"]


@pytest.mark.parametrize("left_out", [[], ["step-3", "step-5"]])
def test_a_copy_with_folders_for_links_holds_the_same_states(
    saved: Path, tmp_path: Path, left_out: list[str]
) -> None:
    for step in (3, 5):
        folder = write_state(saved, step, a_state(step, step))
        if step == 3:
            point(saved, "best", folder)
    copy = tmp_path / "copy"
    shutil.copytree(saved.parent, copy, ignore=lambda *_: left_out)
    assert [read_checkpoint(each).facts["progress"]["step"] for each in list_checkpoints(copy / "saved")] == [
        5,
        3,
    ]
    restore_links(copy / "saved")
    assert (copy / "saved/last").readlink() == Path("step-5")
    assert (copy / "saved/best").readlink() == Path("step-3")
    assert sorted(path.name for path in (copy / "saved").iterdir()) == ["best", "last", "step-3", "step-5"]
    write_state(copy / "saved", 6, a_state(6, 6))
    assert find_to_resume(copy).name == "step-6"


def test_a_state_is_written_over_one_of_the_same_step(saved: Path) -> None:
    folder = write_state(saved, 3, a_state(1.0))
    (folder / "model.pt").write_bytes(b"damaged")
    write_state(saved, 3, a_state(2.0))
    assert read_checkpoint(folder).model["weight"][0, 0] == 2.0


def test_a_kill_while_a_step_is_saved_again_leaves_one_of_both(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_state(saved, 3, a_state(1.0, 3))
    rename = Path.rename

    def rename_or_die(path: Path, target: Path) -> Path:
        if path.name.startswith(".step-3."):
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename_or_die)
        with pytest.raises(KeyboardInterrupt):
            write_state(saved, 3, a_state(2.0, 3))
    (left,) = list_checkpoints(saved)
    assert find_to_resume(saved.parent) == left
    assert read_checkpoint(left).model["weight"][0, 0] == 1.0
    write_state(saved, 3, a_state(3.0, 3))
    prune(saved, 1)
    assert sorted(path.name for path in saved.iterdir()) == ["last", "step-3"]


@pytest.mark.parametrize(
    ("write", "moment"),
    [
        *((write_state, moment) for moment in ("save", "flush", "rename", "point")),
        *((write_by_ranks, moment) for moment in ("flush", "seal", "rename", "point")),
    ],
)
def test_a_kill_while_saving_leaves_the_state_before(
    saved: Path, monkeypatch: pytest.MonkeyPatch, write: Any, moment: str
) -> None:
    class Killed(BaseException):
        pass

    write(saved, 1, a_state(1.0, 1))
    owner: Any = {"save": torch, "rename": Path}.get(moment, checkpoint_files)
    name = {"flush": "_flush", "seal": "_seal"}.get(moment, moment)

    def kill(*args: Any, **kwargs: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, kill)
        with pytest.raises(Killed):
            write(saved, 2, a_state(2.0, 2))
    newest = list_checkpoints(saved)[0]
    assert read_checkpoint(newest).model["weight"][0, 0] == (2.0 if moment == "point" else 1.0)
    assert read_checkpoint(find_to_resume(saved.parent)).model["weight"][0, 0] == 1.0
    # A process of the same id, as in a container, is not stopped by the draft that was left.
    write(saved, 2, a_state(3.0, 2))
    prune(saved, 1)
    assert sorted(path.name for path in saved.iterdir()) == ["last", "step-2"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("num_weights", [3, 300_000])
def test_torchs_writer_hides_no_full_disk(
    saved: Path, monkeypatch: pytest.MonkeyPatch, num_weights: int
) -> None:
    monkeypatch.setattr(Path, "open", lambda path, mode: open("/dev/full", mode))  # noqa: PTH123, SIM115
    state = CheckpointContent({"weight": torch.zeros(num_weights)}, {}, whole_facts(1))
    with pytest.raises(
        MachineError, match=r"saved: the disk is full\. Free some space and run again from"
    ) as caught:
        write_state(saved, 1, state)
    assert caught.value.code == "E002"
    assert list(saved.iterdir()) == []


@pytest.mark.parametrize("write", [write_state, write_by_ranks])
@pytest.mark.parametrize(
    ("number", "code", "says"),
    [
        (errno.ENOSPC, "E002", "the disk is full. Free some space and run again"),
        (errno.EDQUOT, "E002", "the disk quota is used up. Free some space and run again"),
        (errno.EIO, "E001", "cannot be written: Input/output error. Fix that and run again"),
        (errno.EROFS, "E001", "cannot be written: Read-only file system. Fix that and run again"),
    ],
)
def test_a_disk_that_fails_is_told_by_its_own_error(
    saved: Path, monkeypatch: pytest.MonkeyPatch, write: Any, number: int, code: str, says: str
) -> None:
    def fail(state: Any, file: Any) -> None:
        if write is write_state:
            file.write(b"half")
            raise OSError(number, os.strerror(number))
        raise SafetensorError(f"Error while serializing: I/O error: it failed (os error {number})")

    for after in ("from the start", "with run.resume=auto; step-1 is intact"):
        with monkeypatch.context() as patch:
            patch.setattr(torch, "save", fail)
            patch.setattr("safetensors.torch.save_file", fail)
            with pytest.raises(MachineError) as caught:
                write(saved, 2, a_state(step=2))
        assert caught.value.code == code
        assert f"{says} {after}." in str(caught.value)
        write(saved, 1, a_state(step=1))
    assert sorted(path.name for path in saved.iterdir()) == ["last", "step-1"]


def test_an_error_of_the_device_is_not_taken_for_a_full_disk(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(state: Any, path: Path) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(RuntimeError, match="illegal memory"):
        write_state(saved, 2, a_state(step=2))
    assert list(saved.iterdir()) == []


def test_a_state_is_found_from_a_run_a_link_and_a_folder(saved: Path, tmp_path: Path) -> None:
    for step in (1, 2):
        write_state(saved, step, a_state(step=step))
    for path in (saved.parent, saved, saved / "last", saved / "step-2"):
        assert find_to_resume(path).name == "step-2"
    assert find_to_resume(saved / "step-1").name == "step-1"
    (saved / "last").unlink()
    assert find_to_resume(saved.parent).name == "step-2"
    shutil.rmtree(saved)
    for path in (saved.parent, tmp_path / "nowhere"):
        with pytest.raises(SavedStateError) as caught:
            find_to_resume(path)
        assert caught.value.code == "S004"
