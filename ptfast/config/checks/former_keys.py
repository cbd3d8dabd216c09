"""Keys that had another name, or were there, in the version before; dropped here at the next release."""

from __future__ import annotations

from typing import Any

from ptfast.core.errors import ConfigError

RENAMED: dict[str, tuple[str, Any]] = {"optimizer.backbone_from": ("optimizer.freeze_backbone", None)}
"""Today's names of keys by their former ones, with the default they had."""
REMOVED: dict[str, Any] = {"debug.torch_check": "none", "dataloader.read_ahead": False}
"""Keys that are gone, with the default they had."""
CHANGED = {"augment.brightness": 0.0, "augment.contrast": 0.0, "augment.saturation": 0.0}
"""Former defaults of keys that are null by default now."""


def drop_former(tree: dict[str, Any]) -> list[ConfigError]:
    """Remove former keys from a config, in place; C002 for those with another value than their default.

    The config of an earlier run names every key.
    """
    problems = list[ConfigError]()
    for former in (*RENAMED, *REMOVED):
        name, default = RENAMED.get(former, (None, REMOVED.get(former)))
        section, _, key = former.rpartition(".")
        if isinstance(given := tree.get(section), dict) and key in given:
            value = given.pop(key)
            if value is not None and value != default:
                what = f"renamed: use {name}" if name else "this key is gone"
                problems.append(ConfigError("C002", what, key=former, value=value))
    return problems


def in_todays_keys(flat: dict[str, Any]) -> dict[str, Any]:
    """A flat config of any age by today's names, to be compared with one of today."""
    now = {key: value for key, value in flat.items() if key not in REMOVED or value != REMOVED[key]}
    for former, (name, _) in RENAMED.items():
        if (value := now.pop(former, None)) is not None:
            now[name] = value
    return now | {key: None for key, default in CHANGED.items() if now.get(key) == default}
