"""`ptfast --help`: commands and config groups on one screen, and all of one command or group."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from ptfast.cli.arguments import INDENT, WIDTH, Command, help_of
from ptfast.core.errors import ConfigError
from ptfast.core.sections.nearest_name import did_you_mean


def help_text(commands: Mapping[str, Command], topic: str | None = None) -> str:
    """Return what `--help` prints, of everything or of one command or config group.

    Raises:
        ConfigError: C003, there is no such topic.
    """
    if topic is None:
        return _overview(commands)
    if topic in commands:
        return help_of(topic, commands[topic])
    from ptfast.config.files import paths
    from ptfast.config.schema import Config, section_of

    fields = {name: section_of(field.annotation) for name, field in Config.model_fields.items()}
    if "=" in topic:
        group, option = topic.split("=", 1)
        return "\n".join(_of_option(group, option, fields.get(group)))
    sections = [name for name, section in fields.items() if section is not None]
    known = dict.fromkeys([*commands, *paths.groups(), *sections])
    if topic not in known:
        hint = did_you_mean(topic, known, "ptfast --help {}") or "ptfast --help lists commands and groups"
        raise ConfigError("C003", "no such command or config group", key=topic, suggestion=hint)
    return "\n".join(_of_group(topic, fields.get(topic)))


def _overview(commands: Mapping[str, Command]) -> str:
    from ptfast import __version__
    from ptfast.config.files import paths

    groups = textwrap.fill(
        " ".join(sorted([*paths.groups(), "task"])), WIDTH, initial_indent="  ", subsequent_indent="  "
    )
    main = {name: command for name, command in commands.items() if command.examples}
    rows = "\n".join(f"  {name:<12}{command.summary}" for name, command in main.items())
    others = ", ".join(name for name in commands if name not in main)
    return f"""\
ptfast {__version__}: PyTorch training from YAML, as fast as this machine allows
  ptfast train +recipe=resnet_digits optimizer=adamw optimizer.lr=1e-3

Commands; ptfast COMMAND --help shows arguments, flags and examples:
{rows}
  {"also":<12}{others}
Config groups; ptfast --help GROUP shows options (GROUP=OPTION) and keys:
{groups}"""


def _of_group(group: str, section: Any) -> Iterator[str]:
    """The options of a group, the keys of its section, and those of single options."""
    from ptfast.config.checks.source_keywords import source_keywords
    from ptfast.config.checks.target_kinds import built_in_targets
    from ptfast.config.editors.docstrings import field_docs
    from ptfast.config.editors.help import entries
    from ptfast.core.sections.coerce import describe
    from ptfast.core.sections.targets import plain

    if section is not None:
        yield textwrap.fill(f"{group}: {' '.join((section.__doc__ or '').split())}", WIDTH) + "\n"
    if options := entries(group):
        yield f"Options, chosen with {group}=OPTION:"
        yield from (_row(option.name, option.summary) for option in options)
        yield ""
    fields = section.model_fields if section is not None else {}
    fixed = {key: field for key, field in fields.items() if key not in ("target", "options")}
    if fixed:
        yield f"Keys and defaults, set with {group}.KEY=VALUE:"
    for key, field in fixed.items():
        default = None if field.is_required() else plain(field.get_default(call_default_factory=True))
        value = json.dumps(default).strip('"')
        yield _row(f"{key}={value}", f"{field_docs(section).get(key, '')} ({describe(field.annotation)})")
    targets = built_in_targets(group)
    if targets:
        yield "\nKeys of single options, and of those built on them:"
    for path, names in targets.items():
        keywords = source_keywords(path)
        own = (keywords or [])[group in ("optimizer", "task") :]
        text = "those of its library" if keywords is None else ", ".join(own) or "none"
        yield _row(", ".join(names), text)
    if targets:
        yield f"\nptfast --help {group}=OPTION explains an option's. A class of your own has its own."
    if targets and options:
        yield f"ptfast train {group}=OPTION --cfg job prints the values that an option sets."


def _of_option(group: str, option: str, section: Any) -> Iterator[str]:
    """The keys that one option's target takes, with their defaults and what they mean."""
    from ptfast.config.checks.options import check_option
    from ptfast.config.checks.target_kinds import own_parameters
    from ptfast.config.compose import compose
    from ptfast.config.editors.docstrings import argument_docs, field_docs
    from ptfast.config.files import paths
    from ptfast.core.sections.coerce import EMPTY
    from ptfast.core.sections.targets import locate

    check_option(group, option, paths.groups(), None)
    values = compose([f"{group}={option}"], complete=False).tree[group]
    yield f"{group}={option} sets, and takes with {group}.KEY=VALUE:"
    target = locate(values["_target_"]) if isinstance(values.get("_target_"), str) else None
    docs = field_docs(section) if section is not None else {}
    docs = {**docs, **(argument_docs(target) if target is not None else {})}
    parameters = own_parameters(target, group) if target is not None else {}
    for key in dict.fromkeys([*parameters, *(key for key in values if key != "_target_")]):
        default = parameters[key].default if key in parameters else EMPTY
        value = values.get(key, default)
        yield _row(key if value is EMPTY else f"{key}={value}", docs.get(key, ""))


def _row(name: str, text: str) -> str:
    """A name and what it means, wrapped."""
    indent = " " * INDENT
    start = f"  {name:<{INDENT - 3}} "
    lead = start if len(start) <= INDENT else f"{start.rstrip()}\n{indent}"
    return lead + textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent).lstrip()
