"""Keys and values of the previous version and their replacements; removed in the next release."""

from __future__ import annotations

from typing import Any, NamedTuple

from ptfast.core.errors import ConfigError


class Former(NamedTuple):
    """The replacement of a key from the previous version."""

    default: Any
    """Its default in the previous version."""
    key: str | None = None
    """Its current name, unchanged if only values were removed; None if the key was removed."""
    values: tuple[tuple[Any, Any], ...] = ()
    """Pairs of a former value and its replacement."""

    def today(self, value: Any) -> Any:
        """Return the current value for a former one."""
        return next((new for old, new in self.values if old == value), value)


FORMER = {
    "backend.hold_memory": Former(True, "backend.reuse_memory"),
    "parallel.prefetch": Former(1),
    "parallel.static_graph": Former(False),
    "optimizer.backbone_from": Former(None, "optimizer.freeze_backbone"),
    "dataloader.last": Former("auto", "dataloader.drop_last", (("keep", False), ("drop", True))),
    "debug.torch_check": Former("none"),
    "dataloader.read_ahead": Former(False),
    "eval.last": Former("keep"),
    "curriculum.batch_size_from": Former(None),
    "compile.keep": Former(False),
    "parallel.float8_gather": Former(False),
    "augment.augmix_severity": Former(3),
    # Both former values computed the same as `highest` and `none`, up to rounding.
    "precision.matmul_precision": Former(None, "precision.matmul_precision", (("auto", "highest"),)),
    "compile.mode": Former(None, "compile.mode", (("pointwise", "none"),)),
}
_SCHEDULES = "ptfast.techniques.schedule.lr_schedules"
CHANGED = {"augment.brightness": 0.0, "augment.contrast": 0.0, "augment.saturation": 0.0}
"""Former defaults of keys whose default is now null."""


def drop_former(tree: dict[str, Any]) -> list[ConfigError]:
    """Remove former keys from a config in place; return a C002 for each that is not at its default."""
    problems = list[ConfigError]()
    for name, former in FORMER.items():
        section, _, key = name.rpartition(".")
        if isinstance(given := tree.get(section), dict) and key in given:
            value, today = given[key], former.today(given[key])
            if former.key == name and today == value:
                continue
            del given[key]
            if value is not None and value != former.default:
                shown = str(today).lower() if isinstance(today, bool) else today
                way = "this value is gone" if former.key == name else "renamed"
                what = f"{way}: use {former.key}={shown}" if former.key else "this key is gone"
                problems.append(ConfigError("C002", what, key=name, value=value))
    return problems


def drop_gone(tree: dict[str, Any]) -> None:
    """Remove training settings that no longer exist from the config of a run whose model is only loaded."""
    for name, former in FORMER.items():
        section, _, key = name.rpartition(".")
        if former.key is None and isinstance(given := tree.get(section), dict):
            given.pop(key, None)
    if (tree.get("schedule") or {}).get("_target_") == f"{_SCHEDULES}.Cyclic":
        tree["schedule"] = {"_target_": f"{_SCHEDULES}.Constant"}
    for group in (tree.get("optimizer") or {}).get("groups") or ():
        group.pop("clip_norm", None)


def rename_former(tree: dict[str, Any]) -> None:
    """Rename former keys, in place, in the whole config of an earlier run."""
    for name, former in FORMER.items():
        section, _, key = name.rpartition(".")
        if former.key and isinstance(given := tree.get(section), dict) and key in given:
            today, value = former.key.rpartition(".")[2], former.today(given[key])
            if today == key:
                given[key] = value
            else:
                del given[key]
                given.setdefault(today, value)


def in_todays_keys(flat: dict[str, Any]) -> dict[str, Any]:
    """Return a flat config of any version with current names, for comparison with a current one."""
    now = dict(flat)
    for name, former in FORMER.items():
        value = now.pop(name, former.default)
        if value != former.default:
            now[former.key or name] = former.today(value)
    return now | {key: None for key, default in CHANGED.items() if now.get(key) == default}
