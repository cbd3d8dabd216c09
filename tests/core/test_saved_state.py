"""State on disk: what is read is what was written, or it is refused."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from running import same_bits

from ptfast.core import saved_state
from ptfast.core.errors import MachineError, SavedStateError
from ptfast.core.saved_state import State, find_state, list_states, point, prune, read_state, write_state


def a_state(value: float = 1.0) -> State:
    model = {"weight": torch.full((3, 4), value), "count": torch.tensor(7)}
    training = {"optimizer": {"state": {0: {"step": torch.tensor(2.0)}}, "param_groups": [{"lr": 0.1}]}}
    return State(model, training, {"progress": {"step": 3, "best_value": 0.5}, "names": ["a", "b"]})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return tmp_path / "run" / "saved"


def test_what_is_read_is_what_was_written(saved: Path) -> None:
    folder = write_state(saved, 3, a_state())
    state = read_state(folder)
    assert same_bits(state.model, a_state().model)
    assert same_bits(state.training, a_state().training)
    assert state.facts == a_state().facts
    assert (saved / "last").readlink() == Path("step-3")
    assert sorted(path.name for path in saved.iterdir()) == ["last", "step-3"]


@pytest.mark.parametrize("name", ["model.pt", "training.pt", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "missing"])
def test_a_damaged_file_is_named(saved: Path, name: str, damage: str) -> None:
    path = write_state(saved, 3, a_state()) / name
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 0x80
    path.write_bytes({"cut": content[:-5], "empty": b""}.get(damage, bytes(content)))
    if damage == "missing":
        path.unlink()
    with pytest.raises(SavedStateError) as caught:
        read_state(saved / "step-3")
    assert caught.value.code == "S001"
    assert name in str(caught.value) or name == "manifest.json"


def test_a_pickled_object_is_refused_without_running_it(saved: Path, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(tmp_path / "ran"),))

    folder = write_state(saved, 3, a_state())
    pickled, plain = {"x": Bomb()}, pickle.dumps(Bomb())
    for write in (lambda path: torch.save(pickled, path), lambda path: path.write_bytes(plain)):
        write(folder / "model.pt")
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["sha256"]["model.pt"] = saved_state._sha256(folder / "model.pt")
        (folder / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(SavedStateError, match=r"model\.pt"):
            read_state(folder)
    assert not (tmp_path / "ran").exists()


def test_a_newer_format_says_so(saved: Path) -> None:
    folder = write_state(saved, 3, a_state())
    manifest = json.loads((folder / "manifest.json").read_text()) | {"format": saved_state.FORMAT + 1}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(SavedStateError, match="newer"):
        read_state(folder)


def test_prune_keeps_the_newest_the_last_and_the_best(saved: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        folder = write_state(saved, step, a_state(step))
        if step == 2:
            point(saved, "best", folder)
        prune(saved, 2)
    assert [path.name for path in list_states(saved)] == ["step-5", "step-4", "step-2"]
    assert (saved / "best").resolve().name == "step-2"


def test_states_of_an_attempt_gone_back_from_are_dropped(saved: Path) -> None:
    for step in (10, 20, 30):
        folder = write_state(saved, step, a_state())
    point(saved, "best", folder)
    write_state(saved, 15, a_state())
    prune(saved, 2)
    assert [path.name for path in list_states(saved)] == ["step-15", "step-10"]
    assert not (saved / "best").is_symlink()


def test_a_state_is_written_over_one_of_the_same_step(saved: Path) -> None:
    folder = write_state(saved, 3, a_state(1.0))
    (folder / "model.pt").write_bytes(b"damaged")
    write_state(saved, 3, a_state(2.0))
    assert read_state(folder).model["weight"][0, 0] == 2.0


@pytest.mark.parametrize("moment", ["save", "flush", "rename", "point"])
def test_a_kill_while_saving_leaves_the_state_before(
    saved: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    class Killed(BaseException):
        pass

    write_state(saved, 1, a_state(1.0))
    owner: Any = {"save": torch, "flush": saved_state, "rename": Path, "point": saved_state}[moment]
    name = {"save": "save", "flush": "_flush", "rename": "rename", "point": "point"}[moment]

    def kill(*args: Any, **kwargs: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, kill)
        with pytest.raises(Killed):
            write_state(saved, 2, a_state(2.0))
    newest = list_states(saved)[0]
    assert read_state(newest).model["weight"][0, 0] == (2.0 if moment == "point" else 1.0)
    assert read_state(find_state(saved.parent)).model["weight"][0, 0] == 1.0
    # A process of the same id, as in a container, is not stopped by the draft that was left.
    write_state(saved, 2, a_state(3.0))
    prune(saved, 1)
    assert sorted(path.name for path in saved.iterdir()) == ["last", "step-2"]


def test_a_full_disk_leaves_nothing_behind(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_state(saved, 1, a_state())

    def full(state: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(MachineError) as caught:
        write_state(saved, 2, a_state())
    assert caught.value.code == "E002"
    assert sorted(path.name for path in saved.iterdir()) == ["last", "step-1"]


def test_an_error_of_the_device_is_not_taken_for_a_full_disk(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(state: Any, path: Path) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(RuntimeError, match="illegal memory"):
        write_state(saved, 2, a_state())
    assert list(saved.iterdir()) == []


def test_a_state_is_found_from_a_run_a_link_and_a_folder(saved: Path, tmp_path: Path) -> None:
    for step in (1, 2):
        write_state(saved, step, a_state())
    for path in (saved.parent, saved, saved / "last", saved / "step-2"):
        assert find_state(path).name == "step-2"
    assert find_state(saved / "step-1").name == "step-1"
    (saved / "last").unlink()
    assert find_state(saved.parent).name == "step-2"
    shutil.rmtree(saved)
    for path in (saved.parent, tmp_path / "nowhere"):
        with pytest.raises(SavedStateError) as caught:
            find_state(path)
        assert caught.value.code == "S004"
