"""`ptfast pack`: what it says, what it refuses, and the runs that train from what it has made."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from packs import files_of, load, pack, refused, tree
from running import same_bits, train, weights

from ptfast.cli.command_line import run
from ptfast.core.auto_choices import read_choices
from ptfast.core.errors import ConfigError, DataError, MachineError, PtfastError
from ptfast.data.loaders import PACK_FILES
from ptfast.data.packs import pack_reader
from ptfast.data.packs.pack_sources import plan_images
from ptfast.data.packs.pack_writer import make

__all__ = ["tree"]


def test_the_command(tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "pack"
    (tree / "train" / "cat" / "2.jpg").write_bytes(b"")
    line = ["pack", str(tree), str(folder), "--size", "8", "--workers", "1", "--on-corrupt", "skip"]
    assert run(line) == 0
    out = capsys.readouterr().out
    assert "packing 0/14" in out
    assert "packed 13 images" in out
    assert f"skipped {tree / 'train' / 'cat' / '2.jpg'}: is empty (0 bytes)" in out
    assert f"ptfast train data=imagefolder data.root={folder}" in out
    assert load(folder).info.input_shape == (3, 8, 8)
    before = files_of(folder)
    assert run(line) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert files_of(folder) == before
    assert run([*line[:3], "--size", "6", "--workers", "1", "--on-corrupt=skip"]) == 0
    assert "packing again" in capsys.readouterr().out
    assert load(folder).info.input_shape == (3, 6, 6)
    assert run(["pack", "--verify", str(folder)]) == 0
    assert "is complete" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("pack images", "C016", "needs a source and a folder"),
        ("pack nowhere dst", "D001", "no such file or folder"),
        ("pack images dst --size 0", "C005", "Give pixels"),
        ("pack images dst --size big", "C005", "or keep"),
        ("pack images dst --workers none", "C005", "expected a whole number above 0"),
        ("pack images dst --on-corrupt ignore", "C005", "Use error or skip"),
        ("pack images dst --jpeg --size 8", "C011", "keeps the files"),
        ("pack images images/dst", "C011", "within its source"),
        ("pack images full", "C011", "not empty and contains no pack"),
        ("pack images file", "C011", "is a file"),
        ("pack images of-another", "C011", "contains a pack of"),
        ("pack images file/inside", "E001", "cannot be written: Not a directory"),
        ("pack --verify images", "D001", "contains no pack"),
        ("pack --verify images --jpeg", "C011", "takes one pack and no other argument"),
    ],
)
def test_what_makes_no_sense_is_rejected(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, words: str, code: str, says: str
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "manifest.json").write_text('{"name": "of something else"}')
    (tmp_path / "file").write_text("")
    if "of-another" in words:
        pack(tree / "test", tmp_path / "of-another")
    assert run(words.split()) != 0
    error = capsys.readouterr().err
    assert f"error[{code}]" in error
    assert says in error
    assert error.count("\n") == 1
    assert (tmp_path / "full" / "manifest.json").exists()


def test_what_the_machine_lacks_is_said(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("shutil.disk_usage", lambda _: usage._replace(free=100))
        with pytest.raises(MachineError, match=r"needs about 5.9 KiB, and 100 B are free") as caught:
            pack(tree, tmp_path / "pack")
        assert caught.value.code == "E002"

    def fill(seen: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    wanted = {"size": None, "jpeg": False, "skip_corrupt": False}
    with pytest.raises(MachineError, match="the disk is full") as caught:
        make(plan_images(tree, **wanted), tmp_path / "pack", 1, fill)
    assert caught.value.code == "E002"
    # Another process writes it.
    path = str(tmp_path / "pack" / pack_reader.UNFINISHED)
    code = f"import fcntl; f = open({path!r}, 'a'); fcntl.flock(f, 2); print('held', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(MachineError, match="being written by another process"):
            pack(tree, tmp_path / "pack")
        process.communicate("\n")


def die(job: Any) -> Any:
    os._exit(9)


def test_a_process_that_dies_is_told(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ptfast.data.packs.pack_sources.IMAGE_BYTES", 1)
    plan = plan_images(tree, size=None, jpeg=False, skip_corrupt=False)
    with pytest.raises(DataError, match=r"--workers=2 .* a worker process died") as caught:
        make(replace(plan, convert=die), tmp_path / "pack", 2)
    assert caught.value.code == "D008"
    assert "unfinished" in str(refused(tmp_path / "pack"))


def test_a_pack_of_something_else_says_what_reads_it(tree: Path, tmp_path: Path):
    pack(tree, tmp_path / "pack")
    path = tmp_path / "pack" / pack_reader.MANIFEST
    path.write_text(path.read_text().replace('"kind": "pixels"', '"kind": "tokens"'))
    shutil.rmtree(tree)
    with pytest.raises(PtfastError, match="data=text_file"):
        load(tmp_path / "pack")


RUN = ("data=imagefolder", "data.val=0", "model=mlp", "model.hidden=[8]", "batch_size=4", "epochs=2")


def trained_on(folder: Path, root: Path, *words: str) -> dict[str, torch.Tensor]:
    assert train(*RUN, f"data.root={root}", *words, f"run.dir={folder}") == 0
    return weights(folder)


def test_training_from_a_pack_is_training_from_the_folder(tree: Path, tmp_path: Path):
    pack(tree, tmp_path / "pack")
    augment = ("augment=crop_flip", "augment.crop_padding=2")
    expected = trained_on(tmp_path / "files", tree, "dataloader=plain", *augment)
    workers = [f"workers dataloader.workers={number}" for number in (0, 2)]
    for kind in ("packed", "plain", "memory", "auto", *workers):
        words = f"dataloader={kind}".split()
        found = trained_on(tmp_path / kind, tmp_path / "pack", *words, *augment)
        assert same_bits(found, expected), kind
    assert read_choices(tmp_path / "auto")["dataloader.kind"].value == "packed"
    cropped = ("augment=resized_crop", "data.image_size=8", "dataloader=plain")
    jpeg = tmp_path / "jpeg"
    pack(tree, jpeg, jpeg=True)
    expected = trained_on(tmp_path / "cropped", tree, *cropped)
    for root in (jpeg, tmp_path / "pack"):
        assert same_bits(trained_on(tmp_path / f"from-{root.name}", root, *cropped), expected)
        by_workers = (*cropped[:-1], "dataloader=workers", "dataloader.workers=2")
        assert same_bits(trained_on(tmp_path / f"workers-{root.name}", root, *by_workers), expected)


def test_a_folder_is_evaluated_by_what_has_trained_from_its_pack(tree: Path, tmp_path: Path, capsys: Any):
    pack(tree, tmp_path / "pack")
    trained_on(tmp_path / "run", tmp_path / "pack", "dataloader=packed")

    def evaluated(*words: str) -> str:
        capsys.readouterr()
        assert run(["eval", str(tmp_path / "run"), *words]) == 0
        return capsys.readouterr().out

    assert evaluated(f"data.root={tree}") == evaluated()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("data=digits", "only image folders and text files are packed"),
        (
            "data=imagefolder data.root=images",
            "Make one with ptfast pack images images-packed and use data.root=",
        ),
        ("data=text_file data.path=file model=gpt", "Make one with ptfast pack file file-packed"),
    ],
)
def test_what_is_no_pack_is_not_read_as_one(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, words: str, says: str
):
    assert {pack_reader.MANIFEST, pack_reader.UNFINISHED} == set(PACK_FILES)
    monkeypatch.chdir(tree.parent)
    (tree.parent / "file").write_text("a text")
    assert run(["train", *words.split(), "dataloader=packed"]) == ConfigError.exit_code
    error = capsys.readouterr().err
    assert "error[C011]: dataloader.kind=packed" in error
    assert says in error


def test_files_that_moved_are_noticed(tree: Path, tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "pack"
    pack(tree, folder)
    (tree / "train" / "cat" / "1.jpg").rename(tree / "train" / "dog" / "moved.jpg")
    assert run(["pack", "--verify", str(folder)]) == DataError.exit_code
    assert "train/cat (5 files, now 4), train/dog (5 files, now 6)" in capsys.readouterr().err


def test_the_remedy_makes_the_same_pack(tree: Path, tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "pack"
    pack(tree, folder, size=6)
    with (folder / "train.bin").open("ab") as file:
        file.write(b"x")
    assert run(["pack", "--verify", str(folder)]) == DataError.exit_code
    assert f"{folder} --size 6" in capsys.readouterr().err


def test_what_was_skipped_is_not_passed_over(tree: Path, tmp_path: Path, capsys: Any) -> None:
    (tree / "train" / "cat" / "bad.png").write_bytes(b"no image")
    words = ["pack", str(tree), str(tmp_path / "pack")]
    assert run([*words, "--on-corrupt", "skip"]) == 0
    assert run(words) == DataError.exit_code
    assert "cannot be packed" in capsys.readouterr().err
    assert run([*words, "--on-corrupt", "skip"]) == 0


@pytest.mark.parametrize(
    ("name", "says"), [("nothing", "no such file or folder"), ("pack", "is already a pack")]
)
def test_sources_that_are_none(name: str, says: str, tree: Path, tmp_path: Path, capsys: Any) -> None:
    pack(tree, tmp_path / "pack")
    assert run(["pack", str(tmp_path / name), str(tmp_path / "other")]) == DataError.exit_code
    assert f"SRC={tmp_path / name}: {says}" in capsys.readouterr().err
