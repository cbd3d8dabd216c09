"""Keys and values that the version before had, and today's in their place; dropped at the next release."""

from __future__ import annotations

from typing import Any, NamedTuple

from ptfast.core.errors import ConfigError


class Former(NamedTuple):
    """What became of a key of the version before."""

    default: Any
    """Its value where it was not set."""
    key: str | None = None
    """Its name today, the same if only values are gone; None if the key is."""
    values: tuple[tuple[Any, Any], ...] = ()
    """Former values and today's."""

    def today(self, value: Any) -> Any:
        """Today's value for a former one."""
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
    # Both computed as `highest` and `none` do, but for rounding.
    "precision.matmul_precision": Former(None, "precision.matmul_precision", (("auto", "highest"),)),
    "compile.mode": Former(None, "compile.mode", (("pointwise", "none"),)),
}
_SCHEDULES = "ptfast.techniques.schedule.lr_schedules"
CHANGED = {"augment.brightness": 0.0, "augment.contrast": 0.0, "augment.saturation": 0.0}
"""Former defaults of keys that are null by default now."""


def drop_former(tree: dict[str, Any]) -> list[ConfigError]:
    """Remove former keys from a config, in place; C002 for those with another value than their default."""
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
    """Leave out of the config of an earlier run, whose model is used, how training went that is gone."""
    for name, former in FORMER.items():
        section, _, key = name.rpartition(".")
        if former.key is None and isinstance(given := tree.get(section), dict):
            given.pop(key, None)
    if (tree.get("schedule") or {}).get("_target_") == f"{_SCHEDULES}.Cyclic":
        tree["schedule"] = {"_target_": f"{_SCHEDULES}.Constant"}
    for group in (tree.get("optimizer") or {}).get("groups") or ():
        group.pop("clip_norm", None)


def rename_former(tree: dict[str, Any]) -> None:
    """Give the keys in a whole config of an earlier run, which names every key, their names of today."""
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
    """A flat config of any age by today's names, to be compared with one of today."""
    now = dict(flat)
    for name, former in FORMER.items():
        value = now.pop(name, former.default)
        if value != former.default:
            now[former.key or name] = former.today(value)
    return now | {key: None for key, default in CHANGED.items() if now.get(key) == default}
