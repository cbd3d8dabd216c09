"""What metrics give besides figures, kept beside a run: matrices, curves, a figure for each class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ptfast.core import run_directory


def write_tables(
    run_dir: Path,
    split: str,
    step: int,
    tables: Mapping[str, tuple[str, Any]],
    class_names: Sequence[str] | None,
) -> None:
    """Write RUN_DIR/metrics/<split>.json in place of that of an earlier step.

    Args:
        tables: by the metric's name, its class and its value: a tensor, or a nest of such.

    Raises:
        MachineError: E001 when it cannot be written.
    """
    folder = run_dir / run_directory.METRICS
    run_directory.create_folder(folder)
    metrics = {name: {"kind": kind, "values": plain(value)} for name, (kind, value) in tables.items()}
    content = {"step": step, "split": split, "class_names": class_names, "metrics": metrics}
    run_directory.write_json(folder / f"{split}.json", content)


def read_tables(run_dir: Path) -> list[dict[str, Any]]:
    """The files of a run's folder `metrics`, those of `val` and `test` last."""
    files = sorted((run_dir / run_directory.METRICS).glob("*.json"), key=lambda file: file.stem == "test")
    return [content for file in files if (content := run_directory.read_json(file)).get("metrics")]


def plain(value: Any) -> Any:
    """A table's value as lists of numbers."""
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value
