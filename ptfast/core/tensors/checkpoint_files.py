"""A checkpoint on disk: written atomically, verified before use, and loaded without running code."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ptfast.core.distributed import Ranks, broadcast_object, once_per_rank
from ptfast.core.errors import SavedStateError, cannot_write, shorten
from ptfast.core.protocols import DataInfo
from ptfast.core.run_directory import CONFIG
from ptfast.core.run_records import CheckpointFacts, InputFacts, Manifest, Progress, checked
from ptfast.core.tensors.checkpoint_folders import MANIFEST, REPLACED, hide, list_checkpoints, point
from ptfast.core.tensors.dtensors import pack, unpack, write_tensors

FORMAT = 1
SHARDED_FORMAT = 2
"""Format of a checkpoint that several ranks have written."""
EXPORT_FORMAT = 3
"""Format of an export: only weights, in a folder with its own config."""
WEIGHTS = "model.safetensors"
"""The weights of an export."""
TREE = "tree.json"
"""The values of a sharded checkpoint besides its tensors, and the place of each tensor."""
_PARTS = {FORMAT: ("model.pt", "training.pt"), SHARDED_FORMAT: (TREE,), EXPORT_FORMAT: (WEIGHTS, CONFIG)}
"""Required files of each format besides `state.json`."""
_FACTS = {
    "progress": {field.name for field in fields(Progress)},
    "info": {field.name for field in fields(DataInfo)},
}
"""The known names in `state.json`."""


Mark = Callable[[Path], object]


@dataclass(frozen=True)
class CheckpointContent:
    """The content of one checkpoint folder.

    Args:
        model: the plain model's state dict; if several ranks wrote it, its tensors are of type `SavedTensor`.
        training: optimizer, gradient scaler and averaged weights, by name; tensors and plain values only.
        facts: JSON: progress, the data's facts, the automatic choices.
    """

    model: dict[str, Any]
    training: dict[str, Any]
    facts: dict[str, Any]


class WholeDraft:
    """A checkpoint that one rank is writing to disk.

    The folder is written under another name, flushed to disk and renamed, so that a kill at any moment leaves
    either the whole checkpoint or none. The manifest has each file's SHA-256, because torch does not detect
    flipped bits. Errors are those of `cannot_write`; they leave no files.

    Args:
        mark: called with the folder once it is in place, before `saved` changes in any other way.
    """

    together = False
    """Whether every rank writes a part, and all ranks publish it together."""

    def __init__(
        self, saved: Path, step: int, content: CheckpointContent, mark: Mark = lambda folder: None
    ) -> None:
        self._folder, self.step, self._mark = saved / f".step-{step}.{os.getpid()}", step, mark
        self.content = content
        """The argument for `write`, which also accepts a copy of it."""

    def write(self, content: CheckpointContent) -> Path:
        """Write the files and put the folder in place; return it."""
        folder = self._folder
        try:
            with writing(folder.parent):
                # A killed process may have left one under the same id: ids repeat in containers.
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                for name, values in (("model.pt", content.model), ("training.pt", content.training)):
                    # Open the file here: given a path, torch's writer hides the system's error.
                    with (folder / name).open("wb") as file:
                        torch.save(values, file)
                final = _seal(folder, self.step, content.facts, FORMAT)
        except Exception:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._mark(final)
        return final

    def publish(self, written: Callable[[], Path]) -> Path:
        """Return the folder that `write` has written, or raise its error."""
        return written()


class ShardedDraft:
    """A checkpoint of which each rank writes a part, with the guarantees of `WholeDraft`.

    Each rank writes its rows to its own file, so that it needs no memory for the parts of other ranks. When
    all files are on disk, the first rank adds the tree, the facts and the manifest, and renames the folder.
    Until then the folder is not a checkpoint.
    """

    together = True

    def __init__(
        self,
        saved: Path,
        step: int,
        content: CheckpointContent,
        ranks: Ranks,
        mark: Mark = lambda folder: None,
    ) -> None:
        self.step, self._ranks, self._facts, self._mark = step, ranks, content.facts, mark
        self._folder = saved / f".step-{step}.{broadcast_object(uuid.uuid4().hex, ranks)}"
        parts = {"model": content.model, "training": content.training}
        self._tree, self.content = pack(parts, is_first=ranks.is_first)

    def write(self, content: dict[str, Tensor]) -> tuple[str, str]:
        """Write this rank's file, and return its name and checksum."""
        with writing(self._folder.parent):
            self._folder.mkdir(parents=True, exist_ok=True)
            name = f"shard-{self._ranks.rank + 1:05}-of-{self._ranks.world_size:05}.safetensors"
            write_tensors(self._folder / name, content)
            _flush(self._folder / name)
            return name, _sha256(self._folder / name)

    def publish(self, written: Callable[[], tuple[str, str]]) -> Path:
        """Complete the checkpoint on all ranks, and return its folder; all ranks raise an error of any."""

        def complete() -> Path:
            with writing(self._folder.parent):
                (self._folder / TREE).write_text(json.dumps(self._tree, indent=1))
                final = _seal(self._folder, self.step, self._facts, SHARDED_FORMAT, digests)
            self._mark(final)
            return final

        try:
            digests = dict(once_per_rank(written, self._ranks))
            return once_per_rank(complete if self._ranks.is_first else lambda: self._folder, self._ranks)[0]
        except Exception:
            if self._ranks.is_first:
                shutil.rmtree(self._folder, ignore_errors=True)
            raise


def _seal(
    draft: Path, step: int, facts: dict[str, Any], version: int, digests: Mapping[str, str] | None = None
) -> Path:
    """Add the facts and the manifest to a draft, and make it the last checkpoint."""
    saved = draft.parent
    write_manifest(draft, step, facts, version, digests)
    final = saved / f"step-{step}"
    # An attempt that went further, or an earlier save of this step, may have left one. A kill leaves either.
    old = hide(final, REPLACED) if final.exists() else None
    draft.rename(final)
    _flush(saved)
    point(saved, "last", final)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)
    return final


def write_manifest(
    draft: Path, step: int, facts: dict[str, Any], version: int, digests: Mapping[str, str] | None = None
) -> None:
    """Add facts and a manifest to a folder; `digests` has the checksums of files that are known already."""
    digests = dict(digests or {})
    (draft / "state.json").write_text(json.dumps(facts, indent=1))
    own = [path for path in sorted(draft.iterdir()) if path.name not in digests]
    digests |= {path.name: _sha256(path) for path in own}
    best_only = bool(facts.get("best_only"))
    manifest = {"format": version, "step": step, "best_only": best_only, "sha256": digests}
    (draft / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for path in [*own, draft / MANIFEST, draft]:
        _flush(path)


def read_facts(folder: Path, *, check: bool = True) -> dict[str, Any]:
    """Return the JSON part of a checkpoint, after `check_files`; S001 if another version wrote it."""
    step, file = check_files(folder, check=check)["step"], folder / "state.json"
    try:
        text = file.read_text()
        facts = json.loads(text)
        if facts["progress"]["step"] != step:
            raise ValueError("facts of another step")
        given = {"progress": {*facts["progress"]}, "info": {*facts["info"]}}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(file, "the file lacks facts that a run resumes from") from error
    if any(given[name] - known for name, known in _FACTS.items()):
        hint = f"Go on with that version, or start afresh from its weights: model.weights={folder}"
        raise damaged(folder, "it was saved by another version of ptfast", hint)
    try:
        checked(CheckpointFacts, text)
        checked(InputFacts, json.dumps(facts["info"]["extra"]))
        return facts
    except ValueError as error:
        raise damaged(file, f"a fact in it has the wrong type ({shorten(error)})") from error


def check_files(folder: Path, *, check: bool = True) -> dict[str, Any]:
    """Check every file of a checkpoint against its manifest, and return the manifest.

    Args:
        check: False if the files have been hashed already for this load.

    Raises:
        SavedStateError: S001 for a file that is missing, changed or invalid, or for a newer format.
    """
    try:
        manifest = checked(Manifest, (folder / MANIFEST).read_text())
        version, digests = manifest["format"], manifest["sha256"]
        if not {"state.json", *(_PARTS[version] if version <= EXPORT_FORMAT else ())} <= digests.keys():
            raise ValueError("files are not named")
    except (OSError, ValueError, KeyError, RecursionError) as error:
        raise damaged(folder / MANIFEST, "the manifest cannot be read") from error
    if version > EXPORT_FORMAT:
        what = f"format {version} is newer than this ptfast reads ({EXPORT_FORMAT})"
        raise damaged(folder, what, "Upgrade ptfast")
    for name, digest in digests.items():
        path = folder / Path(name).name
        if not path.is_file():
            raise damaged(path, "the file is missing")
        if check and _sha256(path) != digest:
            raise damaged(path, "the file has changed since it was written (truncated, or bits flipped)")
    return manifest


def read_checkpoint(folder: Path, *, check: bool = True) -> CheckpointContent:
    """Read a whole checkpoint to the CPU without running code; sharded tensors are read when needed."""
    facts = read_facts(folder, check=check)
    return CheckpointContent(*read_parts(folder), facts)


def read_parts(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the `model` and `training` parts of a checkpoint of any format, after its files were checked."""
    if (folder / "model.pt").is_file() and not (folder / TREE).is_file():
        return load_tensors(folder / "model.pt"), load_tensors(folder / "training.pt")
    source = folder / TREE
    try:
        if not source.is_file():
            source = folder / WEIGHTS
            return load_file(source), {}
        # Take the names from the manifest: another machine may have an outdated listing of the folder.
        known = json.loads((folder / MANIFEST).read_text())["sha256"]
        files = sorted(folder / Path(name).name for name in known if name.startswith("shard-"))
        parts = unpack(json.loads((folder / TREE).read_text()), files)
        return parts["model"], parts["training"]
    except Exception as error:
        raise damaged(source, "it cannot be read, or does not fit the files next to it") from error


def check_stored(path: Path) -> None:
    """Reject (BadZipFile) compressed entries, which torch never writes: a small file could fill memory."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise zipfile.BadZipFile("compressed")


def load_tensors(path: Path) -> dict[str, Any]:
    """Load a file of tensors and plain values to the CPU."""
    try:
        check_stored(path)
        return dict(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:
        pickled = "weights_only" in str(error).lower()
        what = "it contains a pickled object, which could run code" if pickled else "it cannot be read"
        raise damaged(path, what) from error


def damaged(path: Path, what: str, suggestion: str | None = None) -> SavedStateError:
    """Return the error for a checkpoint that must not be used."""
    hint = suggestion or "Resume from another saved/step-N folder, or start afresh with run.resume=never"
    return SavedStateError("S001", what, key=str(path), suggestion=hint)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
        return digest.hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def writing(saved: Path) -> Iterator[None]:
    """Report write failures inside this block as errors of the machine."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        # Writers may hide the system's error behind their own.
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            found = re.search(r"\(os error (\d+)\)", str(cause))
            number = int(found[1]) if found else 0
            cause = OSError(number, os.strerror(number)) if number else cause.__cause__ or cause.__context__
        if cause is None:
            raise
        found = list_checkpoints(saved)
        after = f"with run.resume=auto; {found[0].name} is intact" if found else "from the start"
        failure = cannot_write(cause, str(saved))
        remedy = "Free some space" if failure.code == "E002" else "Fix that"
        raise failure.changed(suggestion=f"{remedy} and run again {after}") from error
