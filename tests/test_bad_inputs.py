"""Bad input of every kind: one line saying what, where and what to do, the right exit code, nothing left."""

from __future__ import annotations

import hashlib
import pickle
import re
import socket
from pathlib import Path
from typing import Any

import bad_configs
import bad_data
import bad_streams
import numpy as np
import pytest
from bad_configs import Case
from bad_data import IMAGES, OWN, BadData
from conftest import RunPtfast
from hurried_lines import HURRIED
from refusals import Capture, Patch, assert_refused, assert_says, train_once, tree

from ptfast.cli import command_line
from ptfast.data.sources import cifar

pytestmark = pytest.mark.usefixtures("in_tmp")


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in bad_configs.CASES.items()])
def test_configs(case: Case, capsys: Capture, monkeypatch: Patch) -> None:
    refuse(case, capsys, monkeypatch)


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in HURRIED.items()])
def test_hurried_command_lines(case: Case, capsys: Capture, monkeypatch: Patch) -> None:
    refuse(case, capsys, monkeypatch)


def refuse(case: Case, capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    for name, content in case.files.items():
        Path(name).write_text(content)
    for name, stand_in in case.patches.items():
        monkeypatch.setattr(name, stand_in)
    assert_refused(case.words, case.code, case.says, capsys)


BAD_DATA = {**bad_data.CASES, **bad_streams.CASES}


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in BAD_DATA.items()])
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
def test_surprises_of_yaml_are_warned_of(text: str, warning: str, capsys: Capture) -> None:
    Path("mine.yaml").write_text(text)
    _, err = train_once("recipe=./mine.yaml", "steps=1", capsys=capsys)
    assert err.startswith(f"ptfast: warning: {warning}")
    assert len(err.splitlines()) == 1


def test_a_whole_number_may_be_written_as_a_float(capsys: Capture) -> None:
    assert command_line.run(["train", "epochs=1e3", "--cfg", "job"]) == 0
    assert re.search(r"^epochs: 1(000|e3|000\.0)$", capsys.readouterr().out, re.MULTILINE)


def test_images_of_other_kinds_are_converted_and_said(capsys: Capture) -> None:
    bad_data.class_folders("cat", "dog")
    for name, mode in {"cmyk.jpg": "CMYK", "grey.png": "L", "deep.png": "I;16"}.items():
        bad_data.image(Path("images/train/cat", name), mode)
    out, err = train_once(*IMAGES.split(), capsys=capsys)
    assert "3 images that are not 8-bit RGB were converted" in out
    assert not err


@pytest.mark.parametrize("member", [("../evil", b"x"), ("/tmp/evil", b"x"), ("link", "/etc/passwd")])
def test_unsafe_archives(member: tuple[str, Any], capsys: Capture, monkeypatch: Patch) -> None:
    file = Path("home/cifar-10-python.tar.gz")
    bad_data.archive(file, ("fine", b"x"), member)
    declare(file, monkeypatch)
    says = ("home/cifar-10-python.tar.gz: cannot be downloaded and unpacked: ",)
    assert_refused(["train", "data=cifar10", "data.root=home"], "D007", says, capsys)


@pytest.mark.parametrize("download", ["true", "false"])
def test_wrong_checksum(download: str, capsys: Capture, monkeypatch: Patch) -> None:
    """Both the file there and the server's are wrong."""
    for name in ("home", "server"):
        bad_data.archive(Path(name, "cifar-10-python.tar.gz"), ("x", name.encode()))
    monkeypatch.setattr(cifar, "_URL", f"{Path('server').absolute().as_uri()}/")
    says = ("wrong checksum", "data=imagefolder data.root=FOLDER")
    line = f"train data=cifar10 data.root=home data.download={download}"
    assert_refused(line.split(), "D007", says, capsys)


def test_an_interrupted_download_is_replaced(capsys: Capture, monkeypatch: Patch) -> None:
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


def test_a_data_set_that_cannot_be_pickled_under_spawn(capsys: Capture, monkeypatch: Patch) -> None:
    Path("their_sets.py").write_text(bad_data.THEIR_SETS)
    monkeypatch.setattr("torch.multiprocessing.get_start_method", lambda: "spawn")
    says = ("data (command line): the dataset cannot be sent to worker processes", "by spawn", "=plain")
    assert_refused(f"train {OWN}Unpicklable {bad_data.WORKERS}".split(), "D008", says, capsys)


def test_as_a_user_sees_it(run_ptfast: RunPtfast, in_tmp: Path) -> None:
    done = run_ptfast("train", "recipe=resnet_cfar")
    assert_says(done.err, "C003", ("Did you mean resnet_cifar?",))
    assert done.code == 2
    assert not tree(in_tmp)


@pytest.mark.slow
def test_ranks_say_it_once(run_ptfast: RunPtfast, in_tmp: Path) -> None:
    """They meet at a port that is free, whatever `MASTER_PORT` says."""
    line = "train parallel=ddp parallel.nproc=2 device=cpu data=imagefolder data.root=nope"
    with socket.create_server(("localhost", 0)) as server:
        port = str(server.getsockname()[1])
        done = run_ptfast(*line.split(), env={"MASTER_ADDR": "localhost", "MASTER_PORT": port})
    assert_says(done.err, "D001", ("data.root=nope (command line): no such folder",))
    assert done.code == 3
    assert not tree(in_tmp)


def test_the_traceback_is_there_for_who_asks(capsys: Capture) -> None:
    assert command_line.run(["train", "optimizer.lrr=0.1", "--traceback"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1].startswith("ptfast: error[C002]: ")
