"""Read YAML strictly, with the line of every key, and find the files that options and recipes inherit."""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ptfast.config.files import paths
from ptfast.core.errors import ConfigError, shorten

MAX_NODES = 100_000
_FLOAT = re.compile(
    r"""[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
    |[0-9][0-9_]*[eE][-+]?[0-9]+
    |\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?
    |\.(?:inf|Inf|INF))$|\.(?:nan|NaN|NAN)$""",
    re.VERBOSE,
)
_ODD_SPACE = re.compile(
    r"""(?: *|[^#"']*?[:,\[{-])([\xa0\u1680\u2000-\u200b\u202f\u205f\u3000])|[^"']*?([\x85\u2028\u2029])"""
)
"""Characters that look like a space where YAML needs one, or that end a line invisibly."""
_BOOL, _INT, _STR = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:int", "tag:yaml.org,2002:str"


class _Loader(yaml.SafeLoader if TYPE_CHECKING else getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
    """YAML 1.1 with `1e-3` read as a number and dates left as text."""


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern) for tag, pattern in resolvers if not tag.endswith((":timestamp", ":float", ":value"))
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


@dataclass(frozen=True)
class YamlFile:
    """The content of a file."""

    path: Path
    text: str
    data: dict[str, Any]
    places: dict[str, str] = field(default_factory=dict)
    """`file:line` of each dotted key, list items by index: `callbacks.0`."""
    warnings: list[str] = field(default_factory=list)
    """Warnings about values that YAML 1.1 reads differently than they look."""

    @property
    def defaults(self) -> list[Any]:
        """The entries of its defaults list, if it has one."""
        entries = self.data.get("defaults")
        return entries if isinstance(entries, list) else []

    @property
    def choices(self) -> dict[str, Any]:
        """The options that its defaults list chooses, by group."""
        return {
            str(key).removeprefix("override ").strip().lstrip("/"): option
            for entry in self.defaults
            if isinstance(entry, dict)
            for key, option in entry.items()
        }


class _Text:
    """A file's text, and its lines as editors count them."""

    def __init__(self, name: str, text: str) -> None:
        # YAML also ends lines at U+0085, U+2028 and U+2029; editors do not.
        self.name, self.lines = name, text.split("\n")
        self._starts = [0, *(match.end() for match in re.finditer("\n", text))]

    def line(self, mark: Any) -> int:
        """Return the line of a parser mark, counted from 0."""
        return bisect_right(self._starts, mark.index) - 1

    def error(self, mark: Any, problem: str, *, unread: bool = False) -> ConfigError:
        """Return the error at a mark, or for `unread` YAML at an odd space in or just above its line."""
        if mark is None:
            return ConfigError("C007", problem, place=self.name)
        last, at, column = self.line(mark), self.line(mark), mark.index - self._starts[self.line(mark)]
        for line in range(last, -1, -1) if unread else ():
            if found := _ODD_SPACE.match(self.lines[line]):
                at, column = line, found.end() - 1
                character = self.lines[line][column]
                called = f"U+{ord(character):04X} ({unicodedata.name(character, 'next line').lower()})"
                problem = f"YAML does not take {called} for a space"
                break
            if line < last and self.lines[line].partition("#")[0].strip():
                break
        place = f"{self.name}:{at + 1}:{column + 1}"
        return ConfigError("C007", f"{problem}: `{shorten(self.lines[at].rstrip())}`", place=place)


def read_yaml(path: Path, *, allow_empty: bool = False) -> YamlFile:
    """Read a file of one mapping, or only comments if `allow_empty`; a C007 names the line and column."""
    name = paths.shown(path)
    try:
        content = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError("C007", "not a UTF-8 text file", place=name) from None
    except OSError as error:
        raise ConfigError("C007", f"cannot be read: {error.strerror}", place=name) from None
    text = _Text(name, content)
    try:
        loader = _Loader(content)
        node = loader.get_single_node()
        if node is None:
            if not (allow_empty and content.strip()):
                raise ConfigError("C007", "the file is empty", place=name)
            return YamlFile(path, content, {})
        if not isinstance(node, yaml.MappingNode):
            raise text.error(node.start_mark, "expected `key: value` lines", unread=True)
        file = YamlFile(path, content, {})
        for key, key_node, value_node in _walk(node, "", text, [MAX_NODES]):
            file.places[key] = f"{name}:{text.line(key_node.start_mark) + 1}"
            if isinstance(value_node, yaml.ScalarNode) and "${" in value_node.value:
                # Imported late: shell completion reads files too, and does not need omegaconf.
                from ptfast.config.checks.interpolations import check_grammar

                check_grammar(key, value_node.value, file.places[key])
            if surprise := _surprise(value_node):
                file.warnings.append(f"{key}={value_node.value} ({file.places[key]}): {surprise}")
        file.data.update(loader.construct_document(node))
    except yaml.MarkedYAMLError as error:
        raise _unreadable(text, error) from None
    except RecursionError:
        raise ConfigError("C007", "nested too deeply, or in itself", place=name) from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError("C007", f"cannot be read as YAML: {shorten(error)}", place=name) from None
    return file


def _walk(
    node: yaml.Node, prefix: str, text: _Text, budget: list[int]
) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    """Yield (dotted key, key node, value node) below `node`; reject keys that repeat or are not text."""
    budget[0] -= 1
    if budget[0] < 0:
        raise ConfigError("C007", "too large, or anchors that multiply it", place=text.name)
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            key = f"{prefix}{index}"
            yield key, item, item
            yield from _walk(item, f"{key}.", text, budget)
    elif isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key_node, value_node in node.value:
            label = str(key_node.value)
            if key_node.tag in (_BOOL, "tag:yaml.org,2002:null"):
                raise text.error(key_node.start_mark, f"the key `{label}` is not read as text; quote it")
            if label in seen and label != "<<":
                raise text.error(key_node.start_mark, f"the key `{label}` is given twice")
            seen.add(label)
            yield f"{prefix}{label}", key_node, value_node
            yield from _walk(value_node, f"{prefix}{label}.", text, budget)


def _surprise(node: yaml.Node) -> str | None:
    """Return a warning for an unquoted value that YAML 1.1 reads in a surprising way."""
    if not isinstance(node, yaml.ScalarNode) or node.style not in (None, ""):
        return None
    value = node.value
    if node.tag == _BOOL and value.lower() not in ("true", "false"):
        return f"YAML reads {value} as {str(yaml.safe_load(value)).lower()}. Quote it to keep the text"
    if node.tag == _INT and ":" in value:
        return f"YAML reads {value} as the number {yaml.safe_load(value)}. Quote it to keep the text"
    if node.tag == _INT and re.fullmatch(r"[-+]?0[0-7_]+", value):
        return (
            f"YAML reads {value} as the octal number {yaml.safe_load(value)}. Write it without the leading 0"
        )
    if node.tag == _STR and re.fullmatch(r"0o[0-7]+", value):
        return f"YAML reads {value} as text. Write {int(value, 8)} for the number"
    return None


def _unreadable(text: _Text, error: yaml.MarkedYAMLError) -> ConfigError:
    problem = (error.problem or "cannot be read as YAML").replace("\t", "\\t")
    mark, context = error.problem_mark or error.context_mark, error.context or ""
    if error.context_mark and ("flow" in context or "simple key" in context):
        # Point to the opening bracket or the line without a colon, not to where the parser gave up.
        mark = error.context_mark
        if "flow" in context:
            problem = "a bracket that is not closed, or a missing comma"
    if "tab" in problem or "\\t" in problem:
        problem = "a tab, where YAML takes only spaces"
    return text.error(mark, problem, unread=True)


SELF = "_self_"
"""Entry of a defaults list that stands for the file's own keys, which otherwise come last."""


def lineage(group: str, file: Path, heirs: tuple[Path, ...] = ()) -> list[YamlFile]:
    """Return the files that make up an option of `group` or a recipe, including itself; the last wins."""
    content, chain = read_yaml(file, allow_empty=group != paths.RECIPES), (*heirs, file)
    layers: list[YamlFile] = []
    for index, entry in enumerate(content.defaults):
        if entry == SELF:
            layers.append(content)
        elif isinstance(entry, str):
            place = content.places[f"defaults.{index}"]
            if group == paths.RECIPES:
                base = paths.find_recipe(entry, place, file.parent)
            elif (base := paths.options(group).get(entry)) is None:
                continue  # only Hydra may know it
            start = next((index for index, one in enumerate(chain) if one.samefile(base)), None)
            if start is not None:
                circle = " -> ".join(map(paths.shown, [*chain[start:], base]))
                hint = "Take the entry out, or name another file"
                what = f"inherits itself, {circle}"
                raise ConfigError("C007", what, key="defaults", value=entry, place=place, suggestion=hint)
            layers += lineage(group, base, chain)
    return layers if SELF in content.defaults else [*layers, content]
