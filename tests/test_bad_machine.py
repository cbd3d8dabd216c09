"""Bad environments and bad checkpoints: one line, the right exit code, nothing half done."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bad_data
import bad_streams
import pytest
import torch
from bad_data import ARRAYS, IMAGES, OWN
from conftest import ROOT
from refusals import Capture, Patch, assert_refused, assert_says, train_once

from ptfast.cli import command_line
from ptfast.core import run_directory

pytestmark = pytest.mark.usefixtures("in_tmp")


def test_more_workers_than_cores(capsys: Capture, monkeypatch: Patch) -> None:
    Path("their_sets.py").write_text(bad_data.THEIR_SETS)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    line = f"{OWN}Good dataloader=workers dataloader.workers=2"
    out, err = train_once(*line.split(), capsys=capsys)
    assert "dataloader.workers=2 take turns on 1 of this machine's cores" in out + err


def test_a_second_run_in_the_same_folder(capsys: Capture) -> None:
    Path("held").mkdir()
    with run_directory.lock(Path("held")):
        says = (f"held: in use by process {os.getpid()} on ", "Wait for it to end, or set another run.dir")
        assert_refused(["train", "run.dir=held"], "E003", says, capsys)


def test_a_folder_that_is_a_file_is_rejected(capsys: Capture) -> None:
    Path("file").write_text("x")
    says = ("cannot be written", "Set run.root or run.dir to a folder you may write")
    assert_refused(["train", "run.root=file"], "E001", says, capsys)


def test_a_folder_that_cannot_be_written_is_rejected(capsys: Capture) -> None:
    if os.geteuid() == 0:
        pytest.skip("nothing stops root from writing; the read-only file system below does")
    Path("locked").mkdir(mode=0o555)
    says = ("locked/train/", "cannot be written: Permission denied", "Set run.root or run.dir")
    assert_refused(["train", "run.root=locked"], "E001", says, capsys)


def test_a_user_without_a_home(capsys: Capture, monkeypatch: Patch) -> None:
    """Neither HOME nor an entry in /etc/passwd, as in a container under a number: nothing is remembered."""

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("PTFAST_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", home)
    for name in ("cat", "dog"):
        for number in range(2):
            bad_data.image(Path("images/train", name, f"{number}.jpg"))
    train_once(*f"{IMAGES} data.val=0".split(), capsys=capsys)
    says = ("/dev/null/ptfast/data: cannot be written", "Set data.root")
    assert_refused(["train", "data=cifar10"], "E001", says, capsys)


STREAM = f"{bad_streams.STREAM}LargeStream".replace("epochs=1", "steps=9")


def in_mounts(command: str, *words: str, after: str = "true") -> subprocess.CompletedProcess[str]:
    """Run ptfast where `command` has mounted what it wants, then `after`; skip where this user may not."""
    unshare = shutil.which("unshare")
    prefix = [unshare or "", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if unshare is None or subprocess.run([*prefix, command], capture_output=True).returncode:
        pytest.skip("this user may not mount")
    return subprocess.run(
        [
            *prefix,
            f'{command} && "$@"; code=$?; {after}; exit $code',
            "",
            sys.executable,
            "-m",
            "ptfast",
            *words,
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.slow
def test_a_read_only_file_system_is_rejected() -> None:
    Path("small").mkdir()
    done = in_mounts("mount -t tmpfs -o ro tmpfs small", "train", "run.root=small")
    assert_says(
        done.stderr,
        "E001",
        ("small/train/", "cannot be written: Read-only file system", "Set run.root or run.dir"),
    )
    assert done.returncode == 4


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("parallel=fsdp", "parallel.nproc=2")])
def test_a_full_disk(more: tuple[str, ...]) -> None:
    """The state does not fit: nothing half written is taken for one."""
    Path("small").mkdir()
    mount, look = "mount -t tmpfs -o size=200k tmpfs small", "find small/run/saved"
    done = in_mounts(mount, "train", "steps=2", "run.dir=small/run", *more, after=look)
    assert "step-" not in done.stdout
    assert_says(done.stderr, "E002", ("small/run/saved: the disk is full", "Free some space"))
    assert done.returncode == 4


@pytest.mark.slow
@pytest.mark.parametrize("data", [IMAGES, STREAM])
def test_shared_memory_too_small(data: str) -> None:
    Path("their_streams.py").write_text(bad_streams.STREAMS)
    for name in ("cat", "dog"):
        for number in range(4):
            bad_data.image(Path("images/train", name, f"{number}.jpg"), size=(150, 150))
    words = f"train {data} data.val=0 model.hidden=[4] {bad_data.WORKERS}".split()
    done = in_mounts("mount -t tmpfs -o size=64k tmpfs /dev/shm", *words)
    assert_says(done.stderr, "E002", ("/dev/shm: too small for the batches of the workers", "--shm-size"))
    assert done.returncode == 4


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a few steps, not to be changed."""
    run = tmp_path_factory.mktemp("trained") / "run"
    assert command_line.run(["train", "steps=4", "run.dir=" + str(run)]) == 0
    return run


def reseal(state: Path, name: str) -> None:
    """Make the manifest believe what the file holds now."""
    manifest = json.loads((state / "manifest.json").read_text())
    manifest["sha256"][name] = hashlib.sha256((state / name).read_bytes()).hexdigest()
    (state / "manifest.json").write_text(json.dumps(manifest))


def _flip(state: Path) -> None:
    content = bytearray((state / "model.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (state / "model.pt").write_bytes(content)


def _newer(state: Path) -> None:
    manifest = json.loads((state / "manifest.json").read_text()) | {"format": 99}
    (state / "manifest.json").write_text(json.dumps(manifest))


def _reshape(state: Path) -> None:
    weights = torch.load(state / "model.pt", weights_only=True)
    torch.save({name: value[:3] for name, value in weights.items()}, state / "model.pt")
    reseal(state, "model.pt")


def _pickled(state: Path) -> None:
    torch.save({"layers": Path("x")}, state / "model.pt")
    reseal(state, "model.pt")


def _cut(state: Path) -> None:
    (state / "model.pt").write_bytes((state / "model.pt").read_bytes()[:1000])


def _changed(name: str, changes: dict[str, Any]) -> Callable[[Path], None]:
    def change(state: Path) -> None:
        content = json.loads((state / name).read_text()) | changes
        (state / name).write_text(json.dumps(content))
        if name != "manifest.json":
            reseal(state, name)

    return change


def _saved(name: str, content: Any) -> Callable[[Path], None]:
    def change(state: Path) -> None:
        torch.save(content, state / name)
        reseal(state, name)

    return change


def _deep(state: Path) -> None:
    (state / "state.json").write_text("[" * 100_000)
    reseal(state, "state.json")


def _went_back(state: Path) -> None:
    progress = json.loads((state / "state.json").read_text())["progress"]
    _changed("state.json", {"progress": {**progress, "went_back": False}})(state)


FACTS = "state.json: the file lacks facts that a run resumes from"
DAMAGES = {
    "truncated": (_cut, "S001", "model.pt: the file has changed since it was written"),
    "one bit flipped": (_flip, "S001", "model.pt: the file has changed since it was written"),
    "zeroed": (lambda s: (s / "model.pt").write_bytes(bytes(9000)), "S001", "model.pt: the file has changed"),
    "empty": (lambda s: (s / "manifest.json").write_text(""), "S001", "the manifest cannot be read"),
    "a file gone": (lambda s: (s / "training.pt").unlink(), "S001", "training.pt: the file is missing"),
    "a newer format": (_newer, "S001", "format 99 is newer than this ptfast reads (3). Upgrade ptfast"),
    "a pickled object": (_pickled, "S001", "model.pt: it contains a pickled object, which could run code"),
    "another model's shapes": (_reshape, "S002", "another model"),
    "a format of nobody": (_changed("manifest.json", {"format": -1}), "S001", "the manifest cannot be read"),
    "nothing to check": (_changed("manifest.json", {"sha256": {}}), "S001", "the manifest cannot be read"),
    "another step": (_changed("manifest.json", {"step": 3}), "S001", FACTS),
    "no progress": (_changed("state.json", {"progress": None}), "S001", FACTS),
    "a step beyond reach": (_changed("state.json", {"progress": {"step": -(10**12)}}), "S001", FACTS),
    "no facts of the data": (_changed("state.json", {"info": {}}), "S001", "(info.kind: Field required)"),
    "a fact more": (_went_back, "S001", "it was saved by another version of ptfast. Go on with that version"),
    "too deep": (_deep, "S001", FACTS),
    "no weights": (_saved("model.pt", [1]), "S001", "model.pt: it cannot be read"),
    "names that are numbers": (_saved("model.pt", {1: 2}), "S002", "another model"),
}
TRAINING: dict[str, Callable[[Any], Any]] = {
    "no optimizer": lambda training: training.pop("optimizer"),
    "no groups": lambda training: training["optimizer"].pop("param_groups"),
    "another's momenta": lambda training: training["optimizer"]["state"][0].update(exp_avg=torch.zeros(3)),
}


@pytest.mark.parametrize("command", ["eval run", "train steps=4 run.resume=run run.dir=on"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_states(damage: str, command: str, trained: Path, capsys: Capture) -> None:
    shutil.copytree(trained, "run", symlinks=True)
    change, code, what = DAMAGES[damage]
    change(Path("run/saved/step-4"))
    assert_refused(command.split(), code, (what,), capsys)


def test_the_weights_of_another_version_start_a_new_run(trained: Path, capsys: Capture) -> None:
    shutil.copytree(trained, "run", symlinks=True)
    _went_back(Path("run/saved/step-4"))
    _, err = train_once("steps=1", "model.weights=run", capsys=capsys)
    assert not err


@pytest.mark.parametrize("change", TRAINING.values(), ids=TRAINING)
def test_an_optimizer_that_does_not_fit(change: Callable[[Any], Any], trained: Path, capsys: Capture) -> None:
    """With the right checksum; a fused kernel would read momenta beyond their end."""
    shutil.copytree(trained, "run", symlinks=True)
    state = Path("run/saved/step-4")
    training = torch.load(state / "training.pt", weights_only=True)
    change(training)
    _saved("training.pt", training)(state)
    line = "train steps=4 run.resume=run run.dir=on"
    assert_refused(line.split(), "S002", ("run.resume (command line)", "it does not fit this run"), capsys)


def test_the_config_has_changed_since(trained: Path, capsys: Capture) -> None:
    line = f"train steps=4 seed=4 optimizer.lr=0.1 run.resume={trained}"
    says = ("the config has changed since: optimizer.lr, seed", "run.resume=never")
    assert_refused(line.split(), "S003", says, capsys)


def test_another_number_of_classes(trained: Path, capsys: Capture) -> None:
    bad_data.arrays([0, 1, 2] * 8, features=64)
    line = f"train {ARRAYS} model.weights={trained}"
    says = (f"model.weights={trained}"[:60], "is 10 there and 3 here", "Set model.replace_head=true")
    assert_refused(line.split(), "S002", says, capsys)
    _, err = train_once(*line.split()[1:], "model.replace_head=true", capsys=capsys)
    assert not err


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module."])
def test_prefixes_of_wrappers_load(prefix: str, trained: Path, capsys: Capture) -> None:
    weights = torch.load(trained / "saved/last/model.pt", weights_only=True)
    torch.save({prefix + name: value for name, value in weights.items()}, "wrapped.pt")
    train_once("steps=1", "model.weights=wrapped.pt", capsys=capsys)


def test_commands_on_a_run(trained: Path, capsys: Capture) -> None:
    run = str(trained)
    for line, code, text in (
        (f"eval {run} optimizer.lrr=1", "C002", "Did you mean optimizer.lr?"),
        (f"eval {run} --split nope", "C005", "There are: val"),
        (f"predict {run}", "C016", "Usage: ptfast predict RUN PATH..."),
        (f"predict {run} missing.png", "D001", "missing.png: no such file or folder"),
        (f"compare {run} --metric nope", "C005", "There are: best.accuracy"),
    ):
        assert_refused(line.split(), code, (text,), capsys)


def test_out_of_memory_says_what_to_do(capsys: Capture, monkeypatch: Patch) -> None:
    def take_too_much(*_: object, **__: object) -> None:
        torch.empty(2**60)

    monkeypatch.setattr("ptfast.training.fit.fit", take_too_much)
    says = ("batch_size=64", "not enough memory for a step", "ptfast find batch finds a size that fits")
    assert_refused(["train", "model=mlp", "run.dir=full"], "E002", says, capsys)
