"""Check every key of a composed config; return the typed `Config`, or raise all errors with their places."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import ValidationError

from ptfast.config.checks.data_sections import with_inherited
from ptfast.config.checks.former_keys import drop_former
from ptfast.config.checks.rules import across_keys
from ptfast.config.checks.target_checks import Locate, check_target
from ptfast.config.checks.trust import locate_trusted
from ptfast.config.files import paths
from ptfast.config.schema import Config, entry_of, flatten, section_of
from ptfast.core import protocols
from ptfast.core.errors import ConfigError, Meant, PtfastError, did_you_mean, not_set, together
from ptfast.core.sections.section import GATHERED, PlaceOf, Section
from ptfast.core.sections.spelling import nearest
from ptfast.core.sections.targets import Target, keywords, locate, parse_target, parse_value
from ptfast.data import SPLIT_KEYS, DataSection

REQUIRED = "???"
TASKS = ("auto", *protocols.TASKS)


def validate(
    tree: dict[str, Any], place: PlaceOf, *, trusted: bool = True, extra_trust: Iterable[str] = ()
) -> Config:
    """Return the typed config, in which one of `epochs` and `steps` is None.

    Args:
        place: returns where a dotted key was given: `command line` or `file.yaml:12`.
        trusted: False for a file that is not the user's own; its targets must be in trusted packages.
        extra_trust: packages that the user trusts; the `trust` in an untrusted tree is ignored.

    Raises:
        ConfigError: all errors of single keys, unknown keys first; else all broken rules across keys;
            else all requirements that this machine does not meet.
    """
    locate_target = locate if trusted else partial(locate_trusted, packages=tuple(extra_trust))
    # Misspelled or missing fixed keys are reported before anything is imported, above all torch.
    checker = _Checker(tree, None)
    config = checker.check()
    if all(problem.code not in ("C002", "C016") for problem in checker.problems):
        checker = _Checker(tree, locate_target)
        config = checker.check()
    if not checker.problems:
        assert config is not None
        config, checker.problems = across_keys(config, place)
    if checker.problems:
        problems = sorted(checker.problems, key=lambda problem: (problem.code != "C002", problem.code[0]))
        first = {problem.key: problem for problem in reversed(problems)}
        raise together([p.changed(place=place(p.key or "")) for p in problems if p is first[p.key]])
    assert config is not None
    return config


# Names of keys in other programs, and the keys here.
ELSEWHERE = {
    "lr": "optimizer.lr",
    "learning_rate": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "num_workers": "dataloader.workers",
    "max_epochs": "epochs",
    "num_epochs": "epochs",
    "max_steps": "steps",
    "gpus": "parallel.nproc",
    "devices": "parallel.nproc",
    "output_dir": "run.dir",
    "pretrained": "model.weights",
    "agc": "gradients.clip_adaptive",
    "max_norm": "gradients.clip_norm",
    "grad_clip": "gradients.clip_norm",
    "gradient_clip_val": "gradients.clip_norm",
    "pin_memory": "dataloader.pin",
    "prefetch_factor": "dataloader.prefetch",
    "gradient_checkpointing": "checkpointing.mode",
    "accumulate_grad_batches": "gradients.accumulate",
    "gradient_accumulation_steps": "gradients.accumulate",
}


def key_named(name: str, others: Iterable[str] = ()) -> str | None:
    """Return the dotted key, fixed or in `others`, that a bare name stands for here or in other programs."""
    fixed = [f"{section}.{key}" for section in Config.model_fields for key in _known_keys(section)]
    known = [*Config.model_fields, *fixed, *others]
    return ELSEWHERE.get(name) or next((key for key in known if key.rpartition(".")[2] == name), None)


class _Checker:
    """Collects errors of single keys; without `locate`, targets are not checked."""

    def __init__(self, tree: dict[str, Any], locate: Locate | None) -> None:
        self.tree, self.locate = tree, locate
        self.problems: list[PtfastError] = []

    def check(self) -> Config | None:
        """Return the config, or None if it is invalid; `problems` lists the errors."""
        self.problems += drop_former(self.tree)
        prepared = self._given(self.tree)
        try:
            prepared = with_inherited(prepared)
        except PtfastError as problem:
            self.problems.append(problem)
            return None
        for name, field in Config.model_fields.items():
            section, given = section_of(field.annotation), prepared.get(name)
            if section and "target" in section.model_fields and isinstance(given, dict):
                prepared[name] = self._separate(name, given, section)
        evals: Any = prepared.get("evals")
        for name, own in evals.items() if isinstance(evals, dict) else ():
            if isinstance(own, dict):
                evals[name] = self._separate(f"evals.{name}", own, DataSection)
        for name in ("callbacks", "metrics"):
            if isinstance(given := prepared.get(name), (list, dict)):
                items = given.items() if isinstance(given, dict) else enumerate(given)
                targets = {key: self._target(item, f"{name}.{key}", name) for key, item in items}
                prepared[name] = targets if isinstance(given, dict) else [*targets.values()]
        if "task" in prepared:
            prepared["task"] = self._task(prepared["task"])
        try:
            return Config.model_validate(prepared)
        except ValidationError as error:
            found = error.errors(include_url=False, include_input=True)
            self.problems += [self._of_pydantic(dict(item)) for item in found]
            return None

    def _given(self, tree: Any, prefix: str = "") -> Any:
        """Return the tree without its `???` values, and note them as not set."""
        if not isinstance(tree, (dict, list)):
            return tree
        items = tree if isinstance(tree, dict) else dict(enumerate(tree))
        for key in (key for key, value in items.items() if value == REQUIRED):
            # It may have been given under a misspelled name.
            own = {*_known_keys(prefix.rstrip(".")), *(k for k, value in items.items() if value == REQUIRED)}
            others = [name for name in map(str, items) if name not in own and not name.startswith("_")]
            near = nearest(str(key), others)
            hint = {"suggestion": f"Did you mean {prefix}{key} by {prefix}{near}?"} if near else {}
            self.problems.append(not_set(f"{prefix}{key}").changed(**hint))
        given = {
            key: self._given(value, f"{prefix}{key}.") for key, value in items.items() if value != REQUIRED
        }
        return given if isinstance(tree, dict) else list(given.values())

    def _separate(self, name: str, given: dict[str, Any], section: type[Section]) -> dict[str, Any]:
        """Return a section's fixed keys, with its target's keywords gathered under `target`."""
        fields, kind = section.model_fields, "data" if section is DataSection else name
        fixed = [key for key in fields if key not in GATHERED]
        if name != kind:
            # An evaluation set is used whole, unless it is held out of the training data.
            given, fixed = {"val": 0, **given}, ["val", "collate", *SPLIT_KEYS]
        if kind == "data" and self.locate is not None:
            with contextlib.suppress(PtfastError):  # reported when the target is checked
                taken = {*SPLIT_KEYS} & {*keywords(self.locate(str(given.get("_target_"))))}
                taken = {key for key in taken if given.get(key) not in (None, fields[key].default)}
                fixed = [key for key in fixed if key not in taken]
        prepared = {key: value for key, value in given.items() if key in fixed}
        rest = {key: value for key, value in given.items() if key not in fixed}
        if fields["target"].is_required() or rest.get("_target_") is not None:
            if prepared.get("collate") is not None:
                prepared["collate"] = self._target(prepared["collate"], f"{name}.collate", called=True)
            return {**prepared, "target": self._target(rest, name, kind, fixed)}
        rest.pop("_target_", None)
        prepared["target"] = None
        if "several" in fields:
            parts = {key: part for key, part in rest.items() if isinstance(part, dict) and "_target_" in part}
            rest = {key: value for key, value in rest.items() if key not in parts}
            prepared["several"] = {
                key: self._target(part, f"{name}.{key}", name)
                for key, part in parts.items()
                if part["_target_"] is not None
            }
        return prepared | rest

    def _target(
        self, given: Any, key: str, section: str = "", fixed: Iterable[str] = (), *, called: bool = False
    ) -> Target:
        """Return the checked target, or `Target("")` if invalid; a `called` function is called later."""
        target = {"_target_": given} if isinstance(given, str) else given
        try:
            target = parse_target(target) if isinstance(target, dict) else target
            if not isinstance(target, Target):
                what = "expected an import path, or a mapping with _target_"
                raise ConfigError("C004", what, value=given)
        except PtfastError as problem:
            self.problems.append(problem.at(key))
            return Target("")
        if self.locate is None:
            return target
        if called:
            try:
                target = replace(target, partial=not isinstance(self.locate(target.path), type))
            except PtfastError as problem:
                self.problems.append(problem.at(f"{key}._target_", target.path))
                return Target("")
        target, found = check_target(target, section, fixed=fixed, locate=self.locate, prefix=key)
        self.problems += found
        return target

    def _task(self, given: Any) -> Any:
        """Return the task's name, with its options checked and gathered under `options`."""
        given = given if isinstance(given, dict) else {"name": given}
        name = given.get("_target_", given.get("name", "auto"))
        try:
            if not isinstance(name, str):
                raise ConfigError("C004", "expected the name or import path of a task", value=name)
            if name not in TASKS and "." not in name:
                hint = did_you_mean(name, TASKS) or f"Known are {', '.join(TASKS)}, or an import path"
                raise ConfigError("C003", "unknown task", value=name, suggestion=hint)
            options = {key: value for key, value in given.items() if key not in ("name", "_target_")}
            options = {key: parse_value(value, key) for key, value in options.items()}
        except PtfastError as problem:
            self.problems.append(problem.at("task"))
            return {}
        if options.get("loss") is not None:
            options["loss"] = self._target(options["loss"], "task.loss", called=True)
            if not options["loss"].path:
                return {}
        if not options and name in TASKS:
            return {"name": name}
        if self.locate is None:
            return {"name": name, "options": options}
        # `auto` takes the options of any built-in task.
        paths = protocols.TASKS.values() if name == "auto" else [protocols.TASKS.get(name, name)]
        attempts = [
            check_target(Target(path, options), "task", fixed=("name",), locate=self.locate) for path in paths
        ]
        target, found = min(attempts, key=lambda attempt: len(attempt[1]))
        for problem in found:
            of_name = problem.key == "task._target_"
            self.problems.append(problem.changed(key="task", value=name) if of_name else problem)
        return {"name": name, "options": target.kwargs}

    def _of_pydantic(self, item: dict[str, Any]) -> PtfastError:
        key, kind, value = ".".join(map(str, item["loc"])), item["type"], item["input"]
        if kind == "extra_forbidden":
            return self._unknown(key, value)
        if kind == "missing":
            return not_set(key)
        cause = getattr(item.get("ctx", {}).get("error"), "__cause__", None)
        if isinstance(cause, PtfastError):
            return cause.at(key, value)
        known = _known_keys(key)
        if isinstance(value, str) and value in paths.options(key):
            hint = f"In a recipe's defaults write `- override /{key}: {value}`"
            what = f"{value} is an option of {key}"
            return ConfigError("C004", what, key=key, value=value, suggestion=hint)
        expected = f"expected keys such as {key}.{known[0]}" if known else item["msg"].lower()
        return ConfigError("C004", expected, key=key, value=value)

    def _unknown(self, key: str, value: Any) -> PtfastError:
        """Return the error for an unknown key of a fixed section, or at the top level."""
        section, _, name = key.rpartition(".")
        leaf = ""
        if isinstance(value, dict) and (leaves := flatten(value)):
            leaf, value = next(iter(leaves.items()))
        near = None if name in ELSEWHERE else nearest(name, _known_keys(section))
        prefix, suffix = section and f"{section}.", leaf and f".{leaf}"
        if near == "recipe" and not section:
            meant = f"recipe={value}"
        elif near:
            meant = f"{prefix}{near}{suffix}"
        else:
            meant = key_named(name, [known for known in flatten(self.tree) if known != f"{key}{suffix}"])
        hint = Meant(meant) if meant else None
        return ConfigError("C002", "unknown key", key=f"{key}{suffix}", value=value, suggestion=hint)


def _known_keys(section: str) -> list[str]:
    """Return the fixed keys of a section, or the top-level keys for an empty name."""
    model: type[Section] = Config
    for name in filter(None, section.split(".")):
        if name.isdigit():
            continue  # an index of a list
        field = model.model_fields.get(name)
        inner = (section_of(field.annotation) or entry_of(field.annotation)) if field else None
        if inner is None:
            return []
        model = inner
    return [name for name in model.model_fields if name not in GATHERED]
