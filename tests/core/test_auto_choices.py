"""Automatic choices as runs keep them."""

from __future__ import annotations

import json
from pathlib import Path

from ptfast.core.auto_choices import AutoChoices, read_choices


def test_a_reason_of_version_0_1_belongs_to_its_choice(tmp_path: Path) -> None:
    written = {"dataloader": "memory", "dataloader_reason": "it fits", "precision": "bf16 as it is fast"}
    (tmp_path / "resolved.json").write_text(json.dumps(written))
    found = read_choices(tmp_path)
    assert "dataloader_reason" not in found
    assert (found["dataloader.kind"].value, found["dataloader.kind"].reason) == ("memory", "it fits")
    assert AutoChoices(found).began_with("precision.mode", str) == "bf16"
