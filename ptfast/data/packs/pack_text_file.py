"""Packing a text file: tokenised once, piece by piece, into one array of ids on disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ptfast.core.errors import DataError
from ptfast.data.decoding.text_tokenizer import BUILT_IN, Tokenizer, Vocabulary, encode_anew, learn_tokenizer
from ptfast.data.packs.pack_reader import Manifest, SourceFacts, SplitFacts, TextFacts, header_of
from ptfast.data.packs.pack_writer import Piece, Plan
from ptfast.data.sources.text_dataset import cut_into_documents

PIECE_BYTES = 4 * 2**20
"""Text that a process converts at once: a hundred times as much in Python's lists of numbers."""
WHOLE_BYTES = 64 * 2**20
"""The same for running text and a tokenizer of others, which may look beyond the end of a line."""
_SPLIT = "text"
_BLANK = b" \t\r\n"


class _TextJob(NamedTuple):
    """Bytes of a file."""

    path: str
    start: int
    stop: int


def plan_text(path: Path, *, tokenizer: str = "characters", documents: str = "none") -> Plan:
    """Cut the text file `path` into jobs, between lines or documents.

    Args:
        tokenizer, documents: as of `TextFile`.

    Raises:
        DataError: D001, D002 or D005 for a file that is not there, empty or no UTF-8.
    """
    path = path.resolve()
    source = SourceFacts.of(path, [str(path)])
    whole = documents == "none" and tokenizer not in BUILT_IN
    jobs = list(_jobs(path, WHOLE_BYTES if whole else PIECE_BYTES, blank_lines=documents == "paragraphs"))
    found = learn_tokenizer(tokenizer, map(_read, jobs), None)
    if isinstance(found, Vocabulary) and not any(entry.strip() for entry in found.entries):
        raise DataError("D002", "holds no text", key="SRC", value=path)
    manifest = Manifest("tokens", source, {}, text=TextFacts(tokenizer, found.describe(), documents))
    return Plan(
        header={**header_of(manifest), "jobs": len(jobs)},
        jobs=[(_SPLIT, job) for job in jobs],
        num_seen=source.bytes,
        # Characters become two bytes or four, and longer tokens fewer.
        estimated_bytes=2 * source.bytes if tokenizer == "characters" else source.bytes,
        convert=partial(convert_text, tokenizer=found, documents=documents),
        describe=partial(_describe, manifest),
    )


def convert_text(job: _TextJob, *, tokenizer: Tokenizer, documents: str) -> Piece:
    """Tokenise the text of a job."""
    texts = cut_into_documents(_read(job), documents)
    encoded = encode_anew(texts, tokenizer)
    facts = {"text_bytes": sum(len(part.encode()) for part in texts), "dtype": encoded.tokens.dtype.name}
    rows = encoded.lengths.astype("<i8").tobytes()
    tokens = encoded.tokens.astype(encoded.tokens.dtype.newbyteorder("<"), copy=False)
    return Piece(tokens.tobytes(), rows, len(texts), job.stop - job.start, facts)


def _describe(
    manifest: Manifest, splits: dict[str, SplitFacts], facts: dict[str, list[dict[str, Any]]], _folder: Path
) -> Manifest:
    assert manifest.text is not None
    if not splits[_SPLIT].bytes:
        raise DataError("D002", "holds no text", key="SRC", value=manifest.source.path)
    text_bytes = sum(piece["text_bytes"] for piece in facts[_SPLIT])
    text = replace(manifest.text, dtype=facts[_SPLIT][0]["dtype"], text_bytes=text_bytes)
    return replace(manifest, splits=splits, text=text)


def _read(job: _TextJob) -> str:
    with Path(job.path).open("rb") as file:
        file.seek(job.start)
        content = file.read(job.stop - job.start)
    try:
        return content.decode("utf-8-sig" if job.start == 0 else "utf-8")
    except UnicodeDecodeError as error:
        what, hint = f"is not UTF-8 text (byte {job.start + error.start:,})", "Convert it with iconv -t utf-8"
        raise DataError("D005", what, key="SRC", value=job.path, suggestion=hint) from None


def _jobs(path: Path, piece_bytes: int, *, blank_lines: bool) -> Iterator[_TextJob]:
    """Pieces of at least `piece_bytes` up to the end of a line; with `blank_lines`, up to the next text."""
    size, start = path.stat().st_size, 0
    if not size:
        raise DataError("D002", "holds no text", key="SRC", value=path)
    with path.open("rb") as file:
        while start < size:
            file.seek(start + piece_bytes)
            # The rest of the line that the seek has hit is skipped: it may look blank.
            file.readline()
            stop = file.tell()
            if blank_lines:
                while (line := file.readline()) and line.strip(_BLANK):
                    pass
                stop = file.tell()
                while (line := file.readline()) and not line.strip(_BLANK):
                    stop = file.tell()
            stop = min(stop, size)
            yield _TextJob(str(path), start, stop)
            start = stop
