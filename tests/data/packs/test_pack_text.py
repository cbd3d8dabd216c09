"""Packs of text: the tokens of the file, whatever pieces it was cut into."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ptfast.cli.command_line import run
from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError, DataError
from ptfast.data.build_data import build_data
from ptfast.data.packs import pack_reader
from ptfast.data.packs.pack_sources import plan_text
from ptfast.data.packs.pack_writer import make
from ptfast.data.sources.text_dataset import TextFile

TEN = Duration(10, "percent")
TEXT = "".join(
    f"{'  ' * (i % 3)}line {i} of naïve text, 漢字{i % 7} and so on{' ' * (i % 2)}\n{gap}"
    for i, gap in enumerate(["", "", "\n", "", " \t\n\n", "\r\n"] * 30)
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xef\xbb\xbf" + TEXT.encode())
    return path


def pack(path: Path, folder: Path, workers: int = 1, **options: Any) -> pack_reader.Manifest:
    return make(plan_text(path, **options), folder, workers)


def load(path: Path, **options: Any) -> Any:
    source = TextFile(str(path), context_length=16, **options)
    return build_data(source, val=TEN, seed=0, task="auto", normalize=False)


def assert_same(one: Any, other: Any) -> None:
    # Files and packs of them are told from what they become in ways of their own.
    one_extra, other_extra = ({**data.info.extra, "contents": None} for data in (one, other))
    assert one_extra == other_extra
    assert (one.info.vocab_size, one.info.token_bytes) == (other.info.vocab_size, other.info.token_bytes)
    for split in ("train", "val"):
        left, right = getattr(one, split), getattr(other, split)
        assert len(left) == len(right)
        indices = np.arange(len(left))
        for epoch in (0, 1):
            pairs = zip(left.fetch(indices, epoch), right.fetch(indices, epoch), strict=True)
            assert all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("documents", ["none", "lines", "paragraphs"])
@pytest.mark.parametrize("tokenizer", ["characters", "words"])
def test_a_pack_is_the_text_it_was_made_from(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: str, documents: str
):
    options: Any = {"tokenizer": tokenizer, "documents": documents}
    expected = load(file, **options)
    for piece_bytes in (1, 97, 500, 10**6):
        monkeypatch.setattr("ptfast.data.packs.pack_sources.TEXT_BYTES", piece_bytes)
        folder = tmp_path / f"pack{piece_bytes}"
        pack(file, folder, **options)
        assert len(plan_text(file, **options).jobs) > 1 or piece_bytes == 10**6
        found = load(folder, **options)
        assert found.train.storage == "pack"
        assert_same(found, expected)


def test_a_tokenizer_of_others_looks_across_lines(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    options: Any = {"tokenizer": str(tmp_path / "tokenizer.json")}
    pack(file, tmp_path / "whole", **options)
    assert_same(load(tmp_path / "whole", **options), load(file, **options))
    # In pieces it is the same text, if not always in the same tokens.
    monkeypatch.setattr("ptfast.data.packs.pack_sources.WHOLE_BYTES", 500)
    pack(file, tmp_path / "pieces", **options)
    assert len(plan_text(file, **options).jobs) > 5
    ids = np.fromfile(tmp_path / "pieces" / "text.bin", np.uint16)
    assert tokenizer.decode(ids.tolist()) == TEXT


def test_large_vocabularies_take_four_bytes(tmp_path: Path):
    path = tmp_path / "words.txt"
    path.write_text("\n".join(f"w{i}" for i in range(2**16 + 5)))
    manifest = pack(path, tmp_path / "pack", tokenizer="words")
    assert manifest.data_bytes == 4 * (2**16 + 5)
    assert_same(load(tmp_path / "pack", tokenizer="words"), load(path, tokenizer="words"))


def test_it_must_be_read_as_it_was_packed(file: Path, tmp_path: Path):
    pack(file, tmp_path / "pack", tokenizer="words", documents="lines")
    with pytest.raises(ConfigError, match=r"made with tokenizer=words\. Use data.tokenizer=words") as caught:
        load(tmp_path / "pack", documents="lines")
    assert caught.value.code == "C011"
    with pytest.raises(ConfigError, match="documents=lines"):
        load(tmp_path / "pack", tokenizer="words")
    # A model reads other data by its own vocabulary, and all that a pack has is tokens of its own.
    known = load(tmp_path / "pack", tokenizer="words", documents="lines").info
    source = TextFile(str(tmp_path / "pack"), documents="lines")
    assert build_data(source, val=TEN, seed=0, task="auto", known=known).train.storage == "pack"
    other = tmp_path / "other.txt"
    other.write_text("other words " * 200)
    pack(other, tmp_path / "another", tokenizer="words", documents="lines")
    source = TextFile(str(tmp_path / "another"), documents="lines")
    with pytest.raises(DataError, match="another vocabulary than the model has"):
        build_data(source, val=TEN, seed=0, task="auto", known=known)


def test_a_changed_text_is_seen_and_damage_too(file: Path, tmp_path: Path):
    folder = tmp_path / "pack"
    pack(file, folder)
    stat = file.stat()
    file.write_text(TEXT + "more")
    with pytest.raises(DataError, match="has changed since") as caught:
        load(folder)
    assert caught.value.code == "D007"
    assert f"data.path={file}" in str(caught.value)
    file.write_bytes(b"\xef\xbb\xbf" + TEXT.encode())
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    load(folder)
    (folder / "text.bin").write_bytes((folder / "text.bin").read_bytes()[:-2] + b"\0\0")
    with pytest.raises(DataError, match="checksum"):
        load(folder)


def test_what_was_interrupted_is_made_anew(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ptfast.data.packs.pack_sources.TEXT_BYTES", 300)
    pack(file, tmp_path / "whole", workers=2)

    def interrupt(seen: int) -> None:
        if seen > 3000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(plan_text(file), tmp_path / "pack", 1, interrupt)
    with pytest.raises(DataError, match="unfinished"):
        load(tmp_path / "pack")
    pack(file, tmp_path / "pack")
    for name in ("manifest.json", "text.bin", "text.index"):
        assert (tmp_path / "pack" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_the_command(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "pack"
    line = ["pack", str(file), str(folder), "--tokenizer=words", "--documents", "lines"]
    assert run(line) == 0
    out = capsys.readouterr().out
    assert "tokens into" in out
    assert f"data=text_file data.path={folder} data.tokenizer=words data.documents=lines" in out
    assert json.loads((folder / "manifest.json").read_text())["text"]["documents"] == "lines"
    assert run(line) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert run([*line[:3], "--tokenizer=words"]) == 0
    assert "nothing to do" not in capsys.readouterr().out
    assert run(["train", "data=imagefolder", f"data.root={folder}"]) == DataError.exit_code
    assert "Use data=text_file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "words", "code", "says"),
    [
        (b"", "", "D002", "contains no text"),
        (b" \n\n ", "", "D002", "contains no text"),
        (b"text \xff\xfe", "", "D005", "byte 5"),
        (b"text", "--size 8", "C011", "for images"),
        (b"text", "--documents books", "C005", "lines or paragraphs"),
        (b"text", "--tokenizer nowhere.json", "D005", "no tokenizer"),
    ],
)
def test_what_cannot_be_packed_is_refused(
    tmp_path: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
    content: bytes,
    words: str,
    code: str,
    says: str,
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "file").write_bytes(content)
    assert run(["pack", str(tmp_path / "file"), str(tmp_path / "dst"), *words.split()]) != 0
    error = capsys.readouterr().err
    assert f"error[{code}]" in error
    assert says in error
