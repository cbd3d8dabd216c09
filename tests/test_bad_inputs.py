"""Bad input of every kind: one line saying what, where and what to do, the right exit code, nothing left."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bad_configs
import bad_data
import numpy as np
import pytest
import torch
from bad_configs import Case
from bad_data import ARRAYS, IMAGES, OWN, BadData
from conftest import ROOT, RunPtfast

from ptfast import cli
from ptfast.data import cifar

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: Patch) -> Path:
    """An empty current folder, on a module path of the test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "their_sets", raising=False)
    return tmp_path


def tree(folder: Path) -> set[str]:
    """Every file and folder below."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def assert_says(stderr: str, code: str, says: tuple[str, ...]) -> None:
    """One printable line of standard error, with the code and the texts."""
    lines = stderr.splitlines()
    assert len(lines) == 1, stderr
    assert lines[0].startswith(f"ptfast: error[{code}]: "), lines[0]
    assert lines[0].isprintable()
    assert lines[0].endswith((".", "?")), lines[0]
    for text in says:
        assert text in lines[0]
    assert not re.search(r"hunter|Traceback", lines[0])


def assert_refused(words: Sequence[str], code: str, says: tuple[str, ...], capsys: Capture) -> None:
    """The command is refused with one line, and leaves the folder as it found it."""
    before = tree(Path())
    exit_code = cli.run(words)
    assert_says(capsys.readouterr().err, code, says)
    assert exit_code == bad_configs.EXIT_CODES[code[0]]
    assert tree(Path()) - before <= {"__pycache__"} | {f for f in tree(Path()) if "__pycache__/" in f}


def train_once(*words: str, capsys: Capture) -> tuple[str, str]:
    """Train in this process, which must succeed; returns standard output and standard error."""
    exit_code = cli.run(["train", *words])
    out, err = capsys.readouterr()
    assert exit_code == 0, err
    return out, err


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in bad_configs.CASES.items()])
def test_configs(case: Case, capsys: Capture, monkeypatch: Patch) -> None:
    refuse(case, capsys, monkeypatch)


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in bad_configs.HURRIED.items()])
def test_hurried_command_lines(case: Case, capsys: Capture, monkeypatch: Patch) -> None:
    refuse(case, capsys, monkeypatch)


def refuse(case: Case, capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    for name, content in case.files.items():
        Path(name).write_text(content)
    for name, stand_in in case.patches.items():
        monkeypatch.setattr(name, stand_in)
    assert_refused(case.words, case.code, case.says, capsys)


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in bad_data.CASES.items()])
def test_data(case: BadData, capsys: Capture) -> None:
    case.make()
    assert_refused(["train", *case.line.split()], case.code, case.says, capsys)


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        (
            "run: {max_time: 12:30:00}",
            "run.max_time=12:30:00 (mine.yaml:1): YAML reads 12:30:00 as the number 45000",
        ),
        ("augment: {flip: no}", "augment.flip=no (mine.yaml:1): YAML reads no as false"),
        ("run: {name: 0o10}", "run.name=0o10 (mine.yaml:1): YAML reads 0o10 as text"),
    ],
)
def test_25_surprises_of_yaml_are_warned_of(text: str, warning: str, capsys: Capture) -> None:
    Path("mine.yaml").write_text(text)
    _, err = train_once("+recipe=./mine.yaml", "steps=1", capsys=capsys)
    assert err.startswith(f"ptfast: warning: {warning}")
    assert len(err.splitlines()) == 1


def test_10_a_whole_number_may_be_written_as_a_float(capsys: Capture) -> None:
    assert cli.run(["train", "epochs=1e3", "--cfg", "job"]) == 0
    assert re.search(r"^epochs: 1(000|e3|000\.0)$", capsys.readouterr().out, re.MULTILINE)


def test_45_images_of_other_kinds_are_converted_and_said(capsys: Capture) -> None:
    bad_data.class_folders("cat", "dog")
    for name, mode in {"cmyk.jpg": "CMYK", "grey.png": "L", "deep.png": "I;16"}.items():
        bad_data.image(Path("images/train/cat", name), mode)
    out, err = train_once(*IMAGES.split(), capsys=capsys)
    assert "3 images that are not 8-bit RGB were converted" in out
    assert not err


@pytest.mark.parametrize("member", [("../evil", b"x"), ("/tmp/evil", b"x"), ("link", "/etc/passwd")])
def test_49_unsafe_archives(member: tuple[str, Any], capsys: Capture, monkeypatch: Patch) -> None:
    file = Path("home/cifar-10-python.tar.gz")
    bad_data.archive(file, ("fine", b"x"), member)
    declare(file, monkeypatch)
    says = (f"home/cifar-10-python.tar.gz: holds an unsafe member: {member[0]}",)
    assert_refused(["train", "data=cifar10", "data.root=home"], "D007", says, capsys)


@pytest.mark.parametrize("download", ["true", "false"])
def test_50_wrong_checksum(download: str, capsys: Capture, monkeypatch: Patch) -> None:
    """What lies there is wrong, and so is what the server gives."""
    for name in ("home", "server"):
        bad_data.archive(Path(name, "cifar-10-python.tar.gz"), ("x", name.encode()))
    monkeypatch.setattr(cifar, "_URL", f"{Path('server').absolute().as_uri()}/")
    says = ("wrong checksum", "data=imagefolder data.root=FOLDER")
    line = f"train data=cifar10 data.root=home data.download={download}"
    assert_refused(line.split(), "D007", says, capsys)


def test_51_an_interrupted_download_is_replaced(capsys: Capture, monkeypatch: Patch) -> None:
    draw = np.random.default_rng(0)
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    batch = {"data": draw.integers(0, 256, (4, 3072), dtype=np.uint8), "labels": [0, 1, 2, 3]}
    files = [(f"cifar-10-batches-py/{name}", pickle.dumps(batch)) for name in names]
    meta = pickle.dumps({"label_names": [str(i) for i in range(10)]})
    whole, half = Path("server/cifar-10-python.tar.gz"), Path("home/cifar-10-python.tar.gz")
    bad_data.archive(whole, ("cifar-10-batches-py/batches.meta", meta), *files)
    declare(whole, monkeypatch)
    half.parent.mkdir()
    half.write_bytes(whole.read_bytes()[:500])
    half.with_suffix(".partial").write_bytes(b"half")
    line = "data=cifar10 data.root=home batch_size=4 steps=1"
    train_once(*line.split(), capsys=capsys)
    assert sorted(path.name for path in half.parent.iterdir()) == ["cifar-10-batches-py", half.name]


def declare(file: Path, monkeypatch: Patch) -> None:
    """Have `file` taken for the archive of CIFAR-10, and its folder for the server."""
    md5 = hashlib.md5(file.read_bytes(), usedforsecurity=False).hexdigest()
    monkeypatch.setitem(cifar._VERSIONS, "cifar10", cifar._VERSIONS["cifar10"]._replace(md5=md5))
    monkeypatch.setattr(cifar, "_URL", f"{file.parent.absolute().as_uri()}/")


def test_52_a_data_set_that_cannot_be_pickled_under_spawn(capsys: Capture, monkeypatch: Patch) -> None:
    Path("their_sets.py").write_text(bad_data.THEIR_SETS)
    monkeypatch.setattr("torch.multiprocessing.get_start_method", lambda: "spawn")
    says = ("data (command line): the data set cannot be sent to worker processes", "by spawn", "=plain")
    assert_refused(f"train {OWN}Unpicklable {bad_data.WORKERS}".split(), "D008", says, capsys)


def test_57_a_port_in_use_is_none_of_ours(run_ptfast: RunPtfast) -> None:
    """Ranks meet at a port that the system has free, whatever MASTER_PORT says."""
    import socket

    with socket.create_server(("localhost", 0)) as server:
        port = str(server.getsockname()[1])
        line = "train parallel=ddp parallel.nproc=2 device=cpu steps=1"
        done = run_ptfast(*line.split(), env={"MASTER_ADDR": "localhost", "MASTER_PORT": port})
    assert done.code == 0, done.err


def test_58_more_workers_than_cores(capsys: Capture, monkeypatch: Patch) -> None:
    Path("their_sets.py").write_text(bad_data.THEIR_SETS)
    monkeypatch.setattr("ptfast.data.machine.os.sched_getaffinity", lambda pid: {0})
    line = f"{OWN}Good dataloader=workers dataloader.workers=2"
    out, err = train_once(*line.split(), capsys=capsys)
    assert "dataloader.workers=2 take turns on 1 of this machine's cores" in out + err


def test_59_a_second_run_in_the_same_folder(capsys: Capture) -> None:
    from ptfast import run_folder

    Path("held").mkdir()
    with run_folder.hold(Path("held")):
        says = (f"held: in use by process {os.getpid()} on ", "Wait for it to end, or set another run.dir")
        assert_refused(["train", "run.dir=held"], "E003", says, capsys)


def test_54_a_folder_that_is_a_file(capsys: Capture) -> None:
    Path("file").write_text("x")
    says = ("cannot be written", "Set run.root or run.dir to a folder you may write")
    assert_refused(["train", "run.root=file"], "E001", says, capsys)


def test_54_a_folder_that_cannot_be_written(capsys: Capture) -> None:
    if os.geteuid() == 0:
        pytest.skip("nothing stops root from writing; the read-only file system below does")
    Path("locked").mkdir(mode=0o555)
    says = ("locked/train/", "cannot be written (Permission denied)", "Set run.root or run.dir")
    assert_refused(["train", "run.root=locked"], "E001", says, capsys)


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
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_54_a_read_only_file_system() -> None:
    Path("small").mkdir()
    done = in_mounts("mount -t tmpfs -o ro tmpfs small", "train", "run.root=small")
    assert_says(done.stderr, "E001", ("small/train/", "(Read-only file system)", "Set run.root or run.dir"))
    assert done.returncode == 4


def test_55_a_full_disk() -> None:
    """The state does not fit: nothing half written is taken for one."""
    Path("small").mkdir()
    mount, look = "mount -t tmpfs -o size=200k tmpfs small", "find small/run/saved"
    done = in_mounts(mount, "train", "steps=2", "run.dir=small/run", after=look)
    assert "step-" not in done.stdout
    assert_says(done.stderr, "E002", ("small/run/saved: the state could not be written", "Free some space"))
    assert done.returncode == 4


def test_56_shared_memory_too_small() -> None:
    for name in ("cat", "dog"):
        for number in range(4):
            bad_data.image(Path("images/train", name, f"{number}.jpg"), size=(150, 150))
    words = f"train {IMAGES} data.val=0 model.hidden=[4] {bad_data.WORKERS}".split()
    done = in_mounts("mount -t tmpfs -o size=64k tmpfs /dev/shm", *words)
    assert_says(done.stderr, "E002", ("/dev/shm: too small for the batches of the workers", "--shm-size"))
    assert done.returncode == 4


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a few steps, not to be changed."""
    run = tmp_path_factory.mktemp("trained") / "run"
    assert cli.run(["train", "steps=4", "run.dir=" + str(run)]) == 0
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


DAMAGES = {
    "truncated": (_cut, "S001", "model.pt: the file has changed since it was written"),
    "one bit flipped": (_flip, "S001", "model.pt: the file has changed since it was written"),
    "zeroed": (lambda s: (s / "model.pt").write_bytes(bytes(9000)), "S001", "model.pt: the file has changed"),
    "empty": (lambda s: (s / "manifest.json").write_text(""), "S001", "the manifest cannot be read"),
    "a file gone": (lambda s: (s / "training.pt").unlink(), "S001", "training.pt: the file is missing"),
    "a newer format": (_newer, "S001", "format 99 is newer than this ptfast reads (1). Upgrade ptfast"),
    "a pickled object": (_pickled, "S001", "model.pt: it holds a pickled object, which could run code"),
    "another model's shapes": (_reshape, "S002", "of another model"),
}


@pytest.mark.parametrize("command", ["eval run", "train steps=4 run.resume=run run.dir=on"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_60_damaged_states(damage: str, command: str, trained: Path, capsys: Capture) -> None:
    shutil.copytree(trained, "run", symlinks=True)
    change, code, what = DAMAGES[damage]
    change(Path("run/saved/step-4"))
    assert_refused(command.split(), code, (what,), capsys)


def test_60_the_config_has_changed_since(trained: Path, capsys: Capture) -> None:
    line = f"train steps=4 seed=4 optimizer.lr=0.1 run.resume={trained}"
    says = ("the config has changed since: optimizer.lr, seed", "run.resume=never")
    assert_refused(line.split(), "S003", says, capsys)


def test_60_another_number_of_classes(trained: Path, capsys: Capture) -> None:
    bad_data.arrays([0, 1, 2] * 8, features=64)
    line = f"train {ARRAYS} model.weights={trained}"
    says = (f"model.weights={trained}"[:60], "is 10 there and 3 here", "Set model.replace_head=true")
    assert_refused(line.split(), "S002", says, capsys)
    _, err = train_once(*line.split()[1:], "model.replace_head=true", capsys=capsys)
    assert not err


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module."])
def test_60_prefixes_of_wrappers_load(prefix: str, trained: Path, capsys: Capture) -> None:
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


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("train +recipe=resnet_cfar", "C003", "Did you mean resnet_cifar?"),
        ("train optimizer.lrr=0.1", "C002", "Did you mean optimizer.lr?"),
        ("train data=imagefolder data.root=nope", "D001", "data.root=nope (command line): no such folder"),
    ],
)
def test_as_a_user_sees_it(line: str, code: str, says: str, run_ptfast: RunPtfast, folder: Path) -> None:
    done = run_ptfast(*line.split())
    assert_says(done.err, code, (says,))
    assert done.code == bad_configs.EXIT_CODES[code[0]]
    assert not tree(folder)


def test_ranks_say_it_once(run_ptfast: RunPtfast, folder: Path) -> None:
    done = run_ptfast(
        *["train", "parallel=ddp", "parallel.nproc=2", "device=cpu", "data=imagefolder", "data.root=nope"]
    )
    assert_says(done.err, "D001", ("data.root=nope (command line): no such folder",))
    assert done.code == 3
    assert not tree(folder)


def test_the_traceback_is_there_for_who_asks(capsys: Capture) -> None:
    assert cli.run(["train", "optimizer.lrr=0.1", "--traceback"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1].startswith("ptfast: error[C002]: ")
