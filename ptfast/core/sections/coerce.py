"""Coercion of config values to their annotated types (`true` is not a number), and names of types."""

from __future__ import annotations

import collections.abc
import math
import re
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from ptfast.core.durations import NUMBER, TIME, Duration, DurationRangeError, Unit, is_finite, read_number
from ptfast.core.errors import ConfigError, PtfastError, did_you_mean

_SEQUENCES = (
    *(list, tuple, set, frozenset),
    *(collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection),
)
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_NOTHING = (None, type(None))
_UNIONS = (Union, types.UnionType)


@dataclass(frozen=True)
class Range:
    """Bounds of a number or a duration, or of each item of a list, as metadata of an `Annotated` type."""

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def contains(self, value: Any) -> bool:
        """Return True if every number in `value` is in range; other values always are."""
        if isinstance(value, (list, tuple)):
            return all(self.contains(item) for item in value)
        number = value.value if isinstance(value, Duration) else value
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            return True
        low = number > self.low if self.open_low else number >= self.low
        high = number < self.high if self.open_high else number <= self.high
        return low and high

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        low = {"exclusiveMinimum" if self.open_low else "minimum": self.low}
        high = {"exclusiveMaximum" if self.open_high else "maximum": self.high}
        limits = {name: limit for name, limit in (low | high).items() if math.isfinite(limit)}

        def limited(found: Any) -> Any:
            if isinstance(found, list):
                return [limited(item) for item in found]
            if not isinstance(found, dict):
                return found
            kinds = found.get("type", ())
            is_number = not {"integer", "number"}.isdisjoint([kinds] if isinstance(kinds, str) else kinds)
            found = {key: limited(part) for key, part in found.items()}
            return (
                {key: part for key, part in found.items() if key != "minimum"} | limits
                if is_number
                else found
            )

        return limited(handler(schema))


@dataclass(frozen=True)
class InUnit:
    """The unit of bare numbers and the allowed units of a duration, as metadata of an `Annotated` type."""

    default: Unit
    allowed: tuple[Unit, ...] = ("steps", "epochs", "samples", "percent")

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        # JSON schema uses JavaScript's regular expressions.
        units = "|".join("percent|%" if unit == "percent" else f"{unit}?" for unit in self.allowed)
        time = f"|{TIME}" if "seconds" in self.allowed else ""
        pattern = rf"^\s*(?=\S)(({NUMBER})\s*({units})?{time})\s*$|\$\{{.+\}}"
        return {"type": ["number", "string"], "minimum": 0, "pattern": pattern}


POSITIVE = Range(0, open_low=True)
NOT_NEGATIVE = Range(0)
AT_LEAST_ONE = Range(1)
FRACTION = Range(0, 1, open_high=True)
_STEPS = InUnit("steps")


def coerce(value: Any, annotation: Any, in_unit: InUnit = _STEPS) -> Any:
    """Convert `value` to the type of `annotation`; C004 or C005, without a key, if it does not fit.

    Args:
        value: plain YAML data, a `Duration` or a `Target`.
        annotation: a type annotation; unknown classes accept any value.
        in_unit: the units of durations if the annotation does not give them.
    """
    kind, arguments, metadata, in_unit = _parts(annotation, in_unit)
    result = value
    if kind in _UNIONS:
        result = _to_union(value, arguments, in_unit)
    elif kind is Literal:
        if not any(type(choice) is type(value) and choice == value for choice in arguments):
            known = [str(choice) for choice in arguments]
            suggestion = did_you_mean(value, known) if isinstance(value, str) else None
            raise ConfigError("C004", f"expected {_either(known)}", suggestion=suggestion)
    elif kind in _NOTHING:
        if value is not None:
            raise ConfigError("C004", "expected null")
    elif kind is Duration:
        try:
            result = Duration.parse(value, in_unit.default)
        except ValueError as error:
            code = "C005" if isinstance(error, DurationRangeError) else "C004"
            raise ConfigError(code, str(error)) from None
        if result.unit not in in_unit.allowed:
            given = "a wall time" if result.unit == "seconds" else result.unit
            raise ConfigError("C004", f"expected {_either(in_unit.allowed)}, not {given}")
    elif kind in _PLAIN:
        result = _to_plain(value, kind)
    elif kind in _SEQUENCES:
        if not isinstance(value, (list, tuple)):
            raise _expected("a list", value, "Write [...] around it")
        is_fixed = kind is tuple and arguments and arguments[-1] is not Ellipsis
        members = arguments if is_fixed else (arguments[0] if arguments else Any,) * len(value)
        if len(value) != len(members):
            raise ConfigError("C004", f"expected a list of {len(members)} values")
        result = [coerce(item, member, in_unit) for item, member in zip(value, members, strict=True)]
        result = kind(result) if kind in (tuple, set, frozenset) else result
    elif kind in _MAPPINGS:
        if not isinstance(value, dict):
            raise _expected("a mapping", value)
        member = arguments[1] if len(arguments) == 2 else Any
        result = {key: coerce(item, member, in_unit) for key, item in value.items()}
    else:
        _reject_not_finite(value)
    for bounds in metadata:
        if isinstance(bounds, Range) and not bounds.contains(result):
            low = f"{'above' if bounds.open_low else 'at least'} {bounds.low:g}"
            high = f" and {'below' if bounds.open_high else 'at most'} {bounds.high:g}"
            raise ConfigError("C005", f"must be {low}{high if bounds.high < math.inf else ''}")
    return result


def describe(annotation: Any) -> str:
    """Describe a type, for messages of the form `expected ...`."""
    return _either(_words(annotation))


def _words(annotation: Any) -> Sequence[str]:
    kind, arguments, _, in_unit = _parts(annotation)
    if kind in _UNIONS:
        return [word for member in arguments for word in _words(member)]
    if kind is Literal:
        return [str(choice) for choice in arguments]
    if kind in _SEQUENCES:
        return ["a list"]
    if kind in _MAPPINGS:
        return ["a mapping"]
    if kind is Duration:
        return ["a wall time such as 10m" if in_unit.default == "seconds" else "a duration"]
    if kind in _NOTHING:
        return ["null"]
    return _PLAIN[kind] if kind in _PLAIN else [getattr(kind, "__name__", str(kind))]


def _either(words: Sequence[str]) -> str:
    words = list(dict.fromkeys(words))
    if "a number" in words and "a whole number" in words:
        words.remove("a whole number")
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _expected(what: str, value: Any, suggestion: str | None = None) -> PtfastError:
    got = ", got nothing" if value == "" else ""
    if value is None or isinstance(value, bool):
        got = f", not {'null' if value is None else str(value).lower()}"
    return ConfigError("C004", f"expected {what}{got}", suggestion=suggestion)


def _reject_not_finite(value: Any) -> None:
    for item in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(item, (list, tuple)):
            _reject_not_finite(item)
        elif isinstance(item, (int, float)) and not is_finite(item):
            raise ConfigError("C005", "must be a finite number")


_PLAIN: dict[Any, tuple[str, ...]] = {
    bool: ("true", "false"),
    int: ("a whole number",),
    float: ("a number",),
    str: ("text",),
    Path: ("a path",),
}
"""Plain types, and the descriptions of their values."""


def _to_plain(value: Any, kind: Any) -> Any:
    if kind is bool:
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if not isinstance(value, bool):
            raise _expected("true or false", value)
        return value
    if kind is str:
        if isinstance(value, (bool, list, dict)) or value is None:
            raise _expected("text", value, "Put it in quotes" if isinstance(value, bool) else None)
        return str(value)
    if kind is Path:
        if not isinstance(value, (str, Path)):
            raise _expected("a path", value)
        return Path(value)
    number = value
    if isinstance(value, str):  # from ${oc.env:...}, which is always text
        not_finite = value.strip().lower().lstrip("+-").removeprefix(".") in ("nan", "inf", "infinity")
        number = math.nan if not_finite else read_number(value)
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        octal = isinstance(value, str) and re.fullmatch("0o[0-7]+", value)
        hint = f"Write {int(octal[0], 8)} for the octal {value}" if octal else None
        raise _expected(_PLAIN[kind][0], value, hint)
    _reject_not_finite(number)
    if kind is int and isinstance(number, float) and not number.is_integer():
        raise _expected("a whole number", value)
    return kind(number)


def _to_union(value: Any, members: tuple[Any, ...], in_unit: InUnit) -> Any:
    if value is None and type(None) in members:
        return None
    known = [member for member in members if _is_known(member) and member is not type(None)]
    has_opaque = len(known) + (type(None) in members) < len(members)
    problem = None
    # Try a member of the value's own type first: text remains text even if a number is allowed.
    for member in sorted(known, key=lambda member: _parts(member)[:2] != (type(value), ())):
        try:
            return coerce(value, member, in_unit)
        except PtfastError as found:
            if problem is None or (found.code == "C005" and problem.code != "C005"):
                problem = found
    is_plain = value is None or isinstance(value, (bool, int, float, str, list, dict))
    if has_opaque and not (known and is_plain):
        _reject_not_finite(value)
        return value
    if problem is not None and (problem.code == "C005" or len(known) == 1):
        raise problem
    # `or null` does not help a user who meant to give a value.
    what = f"expected {_either([word for member in known for word in _words(member)])}"
    raise ConfigError("C004", what, suggestion=problem.suggestion if problem else None)


def _parts(annotation: Any, in_unit: InUnit = _STEPS) -> tuple[Any, tuple[Any, ...], list[Any], InUnit]:
    """Split an annotation into its type, arguments, metadata and units."""
    metadata: list[Any] = []
    if get_origin(annotation) is Annotated:
        annotation, *metadata = get_args(annotation)
        in_unit = next((item for item in metadata if isinstance(item, InUnit)), in_unit)
    return get_origin(annotation) or annotation, get_args(annotation), metadata, in_unit


def _is_known(annotation: Any) -> bool:
    """Return True if values are coerced to this type, not passed through."""
    known = (*_PLAIN, Duration, *_SEQUENCES, *_MAPPINGS, *_NOTHING, Literal, Any, *_UNIONS)
    return _parts(annotation)[0] in known
