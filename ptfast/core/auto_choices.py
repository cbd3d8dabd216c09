"""The automatic choices of a run, as recorded in `resolved.json` and in checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ptfast.core import run_directory
from ptfast.core.errors import SavedStateError
from ptfast.core.run_records import AutoChoice, SavedChoices, adapter, checked


class AutoChoices:
    """The automatic choices of a run, and facts without a config key; rank 0 writes `resolved.json`."""

    def __init__(self, previous: dict[str, AutoChoice] | None = None) -> None:
        self.previous = previous or {}
        """The choices and facts of the resumed run's first start."""
        self.made: dict[str, AutoChoice] = {}
        self.facts: dict[str, Any] = {}
        self.rows: dict[str, str | None] = {}

    def choose(self, key: str, value: Any, reason: str = "") -> Any:
        """Record the value of a key, and return it."""
        self.made[key] = AutoChoice(key, value, reason)
        return value

    def note(self, name: str, value: Any, row: str | None = None) -> None:
        """Record a fact, and its row in the panel if it has one."""
        self.facts[name], self.rows[name.replace("_", " ")] = value, row

    def resolve(self, key: str, wanted: Any, kind: Any, decide: Callable[[], tuple[Any, str]]) -> Any:
        """Record and return the value of a key: the config's value, unless that is `auto`.

        For `auto` it is the value of type `kind` that the run started with. Without one, `decide` returns the
        value and its reason.
        """
        if wanted != "auto":
            return self.choose(key, wanted)
        before = self.began_with(key, kind)
        return self.choose(key, *(decide() if before is None else (before, self.previous[key].reason)))

    def get(self, name: str) -> Any:
        """Return the value of a key or a fact; None if it is not recorded."""
        return self.made[name].value if name in self.made else self.facts.get(name)

    def began_with(self, name: str, kind: Any) -> Any:
        """Return the value that the run started with (None for a new run); S001 if it is not a `kind`."""
        found = self.previous.get(name)
        try:
            return found and adapter(kind | None).validate_python(found.value, strict=True)
        except ValidationError as error:
            raise _damaged(f"{name}: {error.errors(include_url=False)[0]['msg']}") from None

    def values(self) -> dict[str, Any]:
        """Return all values, by key or name."""
        return {key: choice.value for key, choice in self.made.items()} | self.facts

    def as_json(self) -> dict[str, Any]:
        """Return the content of `resolved.json`."""
        return {"choices": [*map(asdict, self.made.values())], "facts": self.facts}

    def write(self, folder: Path) -> None:
        """Write them to a run directory; called on the first rank."""
        run_directory.write_json(folder / run_directory.RESOLVED, self.as_json())


_KEYS_OF_0_1 = {
    "class_weights": "task.class_weights",
    "threads": "backend.threads",
    "cudnn_benchmark": "backend.cudnn_benchmark",
    "flushes_denormals": "backend.flush_denormals",
    "matmul_precision": "precision.matmul_precision",
    "channels_last": "rewrites.channels_last",
    "compile_dynamic": "compile.dynamic",
    "dataloader": "dataloader.kind",
    "workers": "dataloader.workers",
    "num_ranks": "world_size",
}


def _of_version_0_1(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the `resolved.json` of version 0.1, which had a field for each choice and fact."""
    # 0 and "" meant that the choice was not made yet.
    decided = {
        name: value
        for name, value in tree.items()
        if (value or isinstance(value, (bool, dict))) and name.removesuffix("_reason") not in {*tree} - {name}
    }
    choices = [
        {"key": _KEYS_OF_0_1.get(name, name), "value": value, "reason": tree.get(f"{name}_reason", "")}
        for name, value in decided.items()
    ]
    if isinstance(note := decided.get("precision"), str):
        mode = {"bf16": "bf16", "fp16": "amp_fp16"}.get(note.partition(" ")[0], "fp32")
        choices.append({"key": "precision.mode", "value": mode, "reason": "the run began with it"})
    return {"choices": choices, "facts": {}}


def read_choices(folder: Path, facts: Mapping[str, Any] | None = None) -> dict[str, AutoChoice]:
    """Read a run's choices and facts from its directory, or from a checkpoint's `facts` if there is no file.

    S001 if the file is damaged.
    """
    facts, path = facts or {}, folder / run_directory.RESOLVED
    tree = run_directory.read_json(path) or facts.get("choices") or facts.get("resolved") or {}
    try:
        saved = checked(SavedChoices, json.dumps(tree if "choices" in tree else _of_version_0_1(tree)))
    except ValueError as error:
        raise _damaged(str(error), path) from None
    noted = (AutoChoice(name, value) for name, value in saved["facts"].items())
    return {record.key: record for record in (*saved["choices"], *noted)}


def _damaged(what: str, path: str | Path = run_directory.RESOLVED) -> SavedStateError:
    hint = "Remove the file: the checkpoint has the same facts"
    return SavedStateError("S001", what, key=str(path), suggestion=hint)
