"""Rules across keys for the run as a whole; rules for one part of it are next to that part's code."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from operator import attrgetter

from ptfast.config.families import FAMILIES
from ptfast.config.schema import Config, RunOptions
from ptfast.core import devices
from ptfast.core.errors import COMMAND_LINE, ConfigError, PtfastError, shown
from ptfast.core.sections.section import PlaceOf, Rule, Section, Unused, call_with
from ptfast.data.transforms import AugmentSection

_MAX_NAME_CHARS = 100
_NAME = re.compile(r"\w[\w.+=@,\- ]*")
_PACKAGE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def across_keys(config: Config, place: PlaceOf) -> tuple[Config, list[PtfastError]]:
    """Return the config with one length, and its broken rules; machine rules only if no other is broken."""
    found: list[PtfastError] = []
    if config.epochs is None and config.steps is None:
        what = "required, but not set"
        found.append(ConfigError("C016", what, key="epochs", suggestion="Set epochs or steps"))
    elif config.epochs is not None and config.steps is not None:
        if loser := losing_length(place):
            config = config.model_copy(update={loser: None})
        else:
            what, hint = f"contradicts epochs={config.epochs}", "Give one of the two"
            found.append(ConfigError("C011", what, key="steps", value=config.steps, suggestion=hint))
    if config.data.overfit is not None:
        config = config.model_copy(update={"augment": AugmentSection(targets=config.augment.targets)})
    facts = dict(config)

    def broken(rules: Iterable[Rule]) -> Iterator[PtfastError]:
        for rule in rules:
            problems = call_with(rule, facts)
            yield from [problems] if isinstance(problems, PtfastError) else problems or []

    found += broken((safe_names, *(rule for family in FAMILIES for rule in family.rules)))
    found += evenly_cut(config)
    of_machine = (rule for family in FAMILIES for rule in family.machine_rules)
    return config, found or [*broken((device_is_there, *of_machine))]


UNUSED_OF_RUN = (
    Unused(
        ("run.root", "run.name"),
        lambda run: run.dir is None,
        "next to run.dir={run.dir}, which is the run's own folder",
        "one of the two",
    ),
    Unused.without("model.lora.rank", "8", *(f"model.lora.{key}" for key in ("alpha", "dropout", "targets"))),
    Unused(
        ("sweep.metric", "sweep.mode", "sweep.parallel"),
        lambda: False,
        "to a single run",
        "-m for a sweep, or stop.metric and stop.mode for what `best` follows",
    ),
)


def unused_keys(config: Config, place: PlaceOf) -> Iterator[str]:
    """Yield warnings about typed keys without effect; not errors, because a sweep may vary their switch."""
    facts = dict(config)
    for unused in (*(each for family in FAMILIES for each in family.unused), *UNUSED_OF_RUN):
        if call_with(unused.used, facts):
            continue
        for key in unused.keys:
            section_name, _, name = key.rpartition(".")
            section: Section = attrgetter(section_name)(config) if section_name else config
            value = getattr(section, name)
            if place(key) == COMMAND_LINE and value != type(section).model_fields[name].get_default():
                otherwise = unused.otherwise.format(**facts).replace("=None", "=null")
                yield f"{key}={shown(value)} ({COMMAND_LINE}): means nothing {otherwise}. Use {unused.remedy}"


def losing_length(place: PlaceOf) -> str | None:
    """Return which of `epochs` and `steps` is overridden if both are set; None if they contradict."""
    epochs_file, steps_file = (place(key).rpartition(":")[0] or place(key) for key in ("epochs", "steps"))
    if epochs_file == steps_file:
        return None
    return "steps" if epochs_file == COMMAND_LINE else "epochs"


def safe_names(run: RunOptions, recipe: str | None, trust: list[str]) -> Iterator[PtfastError]:
    for key, name in {"run.name": run.name, "recipe": recipe}.items():
        if name is None:
            continue
        safe = _NAME.fullmatch(name) and ".." not in name and name == name.strip()
        long = len(name) > _MAX_NAME_CHARS
        if long or not safe:
            what = f"longer than {_MAX_NAME_CHARS} characters" if long else "not a safe name"
            hint = "Use letters, digits and the characters . _ - + = @, and begin with a letter or digit"
            yield ConfigError("C013", what, key=key, value=name, suggestion=hint)
    for key, path in {"run.dir": run.dir, "run.root": run.root}.items():
        if path is not None and (not path or not path.isprintable()):
            yield ConfigError("C013", "not a safe path", key=key, value=path)
    for package in trust:
        if not _PACKAGE.fullmatch(package):
            yield ConfigError("C013", "not the name of a package", key="trust", value=package)


def device_is_there(device: str) -> PtfastError | None:
    return devices.cannot_run(devices.check_device(device), "device", device)


def evenly_cut(config: Config) -> list[ConfigError]:
    """Return the errors of splitting a batch over ranks and micro-batches, if their number is known."""
    parallel = config.parallel
    nproc, nnodes = (1, 1) if parallel.strategy == "single" else (parallel.nproc, parallel.nnodes)
    try:
        if nproc != "auto":
            check_batch(config, nproc * nnodes)
    except ConfigError as problem:
        return [problem]
    return []


def check_batch(config: Config, ranks: int, known: int = 0) -> int:
    """Return the number of micro-batches (`known` when resuming); raise C010 or C011 if it does not fit."""

    def nearest(value: int, of: int) -> str:
        below = value // of * of
        found = f"divide are {below} and {below + of}" if below else f"divides is {of}"
        return f"The nearest that {found}"

    micro_batches, accumulate = known or config.micro_batches, 1 if known else config.gradients.accumulate
    parts = micro_batches or ranks * accumulate
    if parts % ranks:
        what, hint = f"cannot be shared evenly by {ranks} ranks", nearest(parts, ranks)
        raise ConfigError("C010", what, key="micro_batches", value=parts, suggestion=hint)
    if micro_batches and accumulate > 1 and micro_batches != ranks * accumulate:
        what = f"contradicts gradients.accumulate={accumulate} on {ranks} rank{'s' * (ranks > 1)}"
        hint = "Give one of the two"
        raise ConfigError("C011", what, key="micro_batches", value=micro_batches, suggestion=hint)
    of_what = f"{parts} micro-batches" + (f" ({ranks} ranks)" if ranks > 1 else "")
    if config.batch_size % parts:
        what, hint = f"cannot be cut into {of_what} evenly", nearest(config.batch_size, parts)
        raise ConfigError("C010", what, key="batch_size", value=config.batch_size, suggestion=hint)
    return parts
