"""Rules across keys of a config: those of the run as a whole here, those of its parts beside the parts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from ptfast.config.catalogue import FAMILIES
from ptfast.config.schema import Config, RunOptions
from ptfast.core import devices
from ptfast.core.errors import COMMAND_LINE, ConfigError, PtfastError, shown
from ptfast.core.sections.section import Place, Rule, Section, Unused, call_with
from ptfast.techniques.curriculum import Curriculum
from ptfast.techniques.gradients import Gradients
from ptfast.techniques.parallel import Parallel

MAX_NAME_CHARS = 100
PACKAGE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_NAME = re.compile(r"\w[\w.+=@,\- ]*")


def across_keys(config: Config, place: Place) -> tuple[Config, list[PtfastError]]:
    """The config with one length, and what contradicts itself or cannot run here.

    What the machine lacks is looked up, which may take torch, only where nothing else is wrong.
    """
    config, problem = _one_length(config, place)
    facts = {**dict(config), "place": place}
    found = [problem] if problem else []
    rules = [rule for family in FAMILIES for rule in family.rules]
    of_machine = [rule for family in FAMILIES for rule in family.machine_rules]
    found += _problems((safe_names, *rules, evenly_cut), facts)
    return config, found or _problems((device_is_there, *of_machine), facts)


def _problems(rules: Iterable[Rule], facts: dict[str, Any]) -> list[PtfastError]:
    found: list[PtfastError] = []
    for rule in rules:
        problems = call_with(rule, facts)
        found += [problems] if isinstance(problems, PtfastError) else problems or []
    return found


UNUSED_OF_RUN = (
    Unused(
        ("run.root", "run.name"),
        lambda run: run.dir is None,
        "beside run.dir={run.dir}, which is the run's own folder",
        "one of the two",
    ),
    Unused(
        ("sweep.metric", "sweep.mode", "sweep.parallel"),
        lambda: False,
        "to a single run",
        "-m for a sweep, or stop.metric and stop.mode for what `best` follows",
    ),
)


def unused_keys(config: Config, place: Place) -> Iterator[str]:
    """A warning for each key of the command line, other than its default, that has no effect.

    No error: in a sweep over the switch that it belongs to, a key has no effect in some of the runs. Keys of
    an option file stay, ready for its switch.
    """
    facts = dict(config)
    for unused in (*(each for family in FAMILIES for each in family.unused), *UNUSED_OF_RUN):
        if call_with(unused.used, facts):
            continue
        for key in unused.keys:
            section_name, _, name = key.rpartition(".")
            section: Section = facts[section_name] if section_name else config
            value = getattr(section, name)
            if place(key) == COMMAND_LINE and value != type(section).model_fields[name].get_default():
                otherwise = unused.otherwise.format(**facts)
                yield f"{key}={shown(value)} ({COMMAND_LINE}): means nothing {otherwise}. Use {unused.remedy}"


def check_batch(
    batch_size: int,
    micro_batches: int | None,
    ranks: int,
    accumulate: int = 1,
    first: int | Literal["auto"] | None = None,
    place: str | None = None,
) -> int:
    """The number of micro-batches that a batch is cut into, if it can be cut evenly.

    Args:
        batch_size: samples of an optimizer step, over all ranks.
        micro_batches: as configured; None for `ranks * accumulate`.
        ranks: processes that train.
        accumulate: micro-batches of each rank where `micro_batches` does not say it.
        first: samples of the first steps, where batches grow.
        place: where the batch size was given.

    Raises:
        ConfigError: C010, naming the nearest number that divides.
    """
    problem = _batch_problem(batch_size, micro_batches, ranks, accumulate, first)
    if problem is not None:
        raise problem.placed(place)
    return micro_batches or ranks * accumulate


def _one_length(config: Config, place: Place) -> tuple[Config, PtfastError | None]:
    """Keep one of epochs and steps: the command line over a file, and steps over the default epochs."""
    if config.epochs is None and config.steps is None:
        return config, ConfigError(
            "C016", "required, but not set", key="epochs", suggestion="Set epochs or steps"
        )
    if config.epochs is None or config.steps is None:
        return config, None
    loser = losing_length(place)
    if loser is None:
        what = f"contradicts epochs={config.epochs}"
        hint = "Give one of the two"
        return config, ConfigError("C011", what, key="steps", value=config.steps, suggestion=hint)
    return config.model_copy(update={loser: None}), None


def losing_length(place: Place) -> str | None:
    """The one of epochs and steps that gives way where both are set; None where they contradict."""
    epochs_file, steps_file = (place(key).rpartition(":")[0] or place(key) for key in ("epochs", "steps"))
    if epochs_file == steps_file:
        return None
    return "steps" if epochs_file == COMMAND_LINE else "epochs"


def safe_names(run: RunOptions, recipe: str | None, trust: list[str]) -> Iterator[PtfastError]:
    """Refuse names of folders and packages that are none."""
    for key, name in {"run.name": run.name, "recipe": recipe}.items():
        if name is not None and (problem := _name_problem(name, key)):
            yield problem
    for key, path in {"run.dir": run.dir, "run.root": run.root}.items():
        if path is not None and (not path or not path.isprintable()):
            yield ConfigError("C013", "not a safe path", key=key, value=path)
    for package in trust:
        if not PACKAGE.fullmatch(package):
            yield ConfigError("C013", "not the name of a package", key="trust", value=package)


def _name_problem(name: str, key: str) -> PtfastError | None:
    if len(name) > MAX_NAME_CHARS:
        what = f"longer than {MAX_NAME_CHARS} characters"
    elif _NAME.fullmatch(name) and ".." not in name and name == name.strip():
        return None
    else:
        what = "not a safe name"
    hint = "Use letters, digits and the characters . _ - + = @, and begin with a letter or digit"
    return ConfigError("C013", what, key=key, value=name, suggestion=hint)


def device_is_there(device: str) -> PtfastError | None:
    """Refuse a device that this machine does not have."""
    return devices.cannot_run(devices.lack_of_device(device), "device", device)


def evenly_cut(
    parallel: Parallel,
    gradients: Gradients,
    curriculum: Curriculum,
    batch_size: int,
    micro_batches: int | None,
) -> PtfastError | None:
    """Refuse a batch that ranks and micro-batches cannot share evenly, where their number is known."""
    ranks = 1
    if parallel.strategy != "single":
        if parallel.nproc == "auto":
            return None
        ranks = parallel.nproc * parallel.nnodes
    first = curriculum.batch_size_from
    return _batch_problem(batch_size, micro_batches, ranks, gradients.accumulate, first)


def _batch_problem(
    batch_size: int,
    micro_batches: int | None,
    ranks: int,
    accumulate: int,
    first: int | Literal["auto"] | None,
) -> PtfastError | None:
    parts = micro_batches or ranks * accumulate
    if parts % ranks:
        what = f"cannot be shared evenly by {ranks} ranks"
        return ConfigError(
            "C010", what, key="micro_batches", value=parts, suggestion=_nearest_multiples(parts, ranks)
        )
    if micro_batches and accumulate > 1 and micro_batches != ranks * accumulate:
        what = f"contradicts gradients.accumulate={accumulate} on {ranks} rank{'s' * (ranks > 1)}"
        return ConfigError(
            "C011", what, key="micro_batches", value=micro_batches, suggestion="Give one of the two"
        )
    of_what = f"{parts} micro-batches" + (f" ({ranks} ranks)" if ranks > 1 else "")
    for key, size in {"batch_size": batch_size, "curriculum.batch_size_from": first}.items():
        if isinstance(size, int) and size % parts:
            what, hint = f"cannot be cut into {of_what} evenly", _nearest_multiples(size, parts)
            return ConfigError("C010", what, key=key, value=size, suggestion=hint)
    return None


def _nearest_multiples(value: int, of: int) -> str:
    below, above = value // of * of, (value // of + 1) * of
    return (
        f"The nearest that divide are {below} and {above}"
        if below
        else f"The nearest that divides is {above}"
    )
