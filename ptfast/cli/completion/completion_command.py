"""Shell completion for commands, flags, groups, options, recipes and keys; Hydra is not imported."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from ptfast.cli.arguments import COMMON
from ptfast.cli.commands import COMMANDS
from ptfast.config.files import paths
from ptfast.core.errors import EXIT_OK, ConfigError, PtfastError

_SCRIPTS = {file.suffix[1:]: file for file in Path(__file__).parent.glob("completion.*")}


def completion(args: Namespace) -> int:
    """Print the completion script for `bash`, `zsh` or `fish`."""
    shell = args.words[0] if args.words else "bash"
    if shell not in _SCRIPTS:
        what = "no completion for this shell"
        raise ConfigError("C015", what, key=shell, suggestion="Name bash, zsh or fish")
    print(_SCRIPTS[shell].read_text(encoding="utf-8"))
    return EXIT_OK


def complete(words: Sequence[str]) -> list[str]:
    """Return completions of the last of the words after `ptfast`; that word is empty after a space."""
    word = words[-1] if words else ""
    if len(words) <= 1:
        return [name for name in COMMANDS if name.startswith(word)]
    if (command := COMMANDS.get(words[0])) is None:
        return []
    if word.startswith("-"):
        # `find lr` has the flags of lr.
        command = next((command.kinds[each] for each in words if each in command.kinds), command)
        return sorted(flag.name for flag in (*command.flags, *COMMON) if flag.name.startswith(word))
    if len(words) == 2 and command.kinds:
        return [name for name in command.kinds if name.startswith(word)]
    if words[0] == "techniques":
        from ptfast.config.catalogue import CATALOGUE

        names = [technique.name.replace(" ", "-") for technique in CATALOGUE]
        return [name for name in names if name.startswith(word)]
    try:
        return _config(word, words[:-1])
    except (PtfastError, OSError):
        return []


def _config(word: str, before: Sequence[str]) -> list[str]:
    head, equals, typed = word.partition("=")
    prefix = head[: len(head) - len(head.lstrip("+~"))]
    key = head.lstrip("+~")
    if equals:
        done, comma, part = typed.rpartition(",")
        names = [*paths.options(key)] if key == paths.RECIPES or key in paths.groups() else []
        if key == paths.RECIPES and part.startswith((".", "/")):
            inside = part[: part.rfind("/") + 1]
            files = [f for f in Path(inside or ".").glob("*") if f.is_dir() or f.suffix == ".yaml"]
            names = sorted(f"{inside}{file.name}{'/' if file.is_dir() else ''}" for file in files)
        return [f"{head}={done}{comma}{name}" for name in names if name.startswith(part)]
    groups = [f"{group}=" for group in (paths.RECIPES, *paths.groups())]
    keys = [f"{name}=" for name in known_keys(before)]
    if "." not in key:
        # Complete one step at a time: sections first, then their keys after the dot.
        keys = sorted({f"{k.partition('.')[0]}." if "." in k else k for k in keys})
    found = [name for name in [*groups, *keys] if name.startswith(key)]
    return [prefix + name for name in dict.fromkeys(found)]


def known_keys(arguments: Sequence[str]) -> list[str]:
    """Return every dotted key of the config selected by `arguments`: of its sections and its option files."""
    from ptfast.config.files.yaml_file import lineage, read_yaml
    from ptfast.config.schema import VARIABLES, defaults, flatten

    primary = read_yaml(paths.builtin_root().conf / "config.yaml")
    chosen, known = primary.choices, {*flatten(defaults()), *flatten(primary.data)}
    given = dict(a.lstrip("+").split("=", 1) for a in arguments if "=" in a)
    recipe = paths.recipe_file(given.get(paths.RECIPES, ""))
    for content in lineage(paths.RECIPES, recipe) if recipe else []:
        known |= {key for key in content.places if key.startswith(f"{VARIABLES}.")}
        chosen |= content.choices
    chosen |= {group: option for group, option in given.items() if group in chosen}
    for group, option in chosen.items():
        file = paths.options(group).get(str(option))
        for content in lineage(group, file) if file else []:
            known |= {*flatten({group: content.data})}
    return sorted(key for key in known if "defaults" not in key.split("."))
