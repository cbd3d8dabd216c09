"""Config values to the types that annotations, defaults and key names ask for: `true` is no number here."""

from __future__ import annotations

import collections.abc
import inspect
import math
import re
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from ptfast.core.durations import Duration, DurationRangeError, Unit, is_finite, read_number
from ptfast.core.errors import ConfigError, PtfastError, did_you_mean

EMPTY: Any = inspect.Parameter.empty
SEQUENCES = (
    list,
    tuple,
    set,
    frozenset,
    collections.abc.Sequence,
    collections.abc.Iterable,
    collections.abc.Collection,
)
MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_SCALARS = (bool, int, float, str, Path, Duration)


@dataclass(frozen=True)
class Range:
    """Bounds of a number; as metadata of `Annotated`, or looked up by the name of a key."""

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def check(self, value: float) -> None:
        """Raise an error unless `value` lies within."""
        too_low = value <= self.low if self.open_low else value < self.low
        too_high = value >= self.high if self.open_high else value > self.high
        if too_low or too_high:
            raise ConfigError("C005", f"must be {self}")

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"{'above' if self.open_low else 'at least'} {self.low:g}"
        low = f"{'above' if self.open_low else 'at least'} {self.low:g}"
        return f"{low} and {'below' if self.open_high else 'at most'} {self.high:g}"


@dataclass(frozen=True)
class InUnit:
    """As metadata of an `Annotated[Duration, ...]`: the unit of a bare number, and the units allowed."""

    default: Unit
    allowed: tuple[Unit, ...] = ("steps", "epochs", "samples", "percent")


POSITIVE = Range(0, open_low=True)
NOT_NEGATIVE = Range(0)
AT_LEAST_ONE = Range(1)
FRACTION = Range(0, 1, open_high=True)

_COUNT_NAMES = (
    *("width", "depth", "heads", "layers", "num_layers", "num_heads", "hidden", "hidden_size", "channels"),
    *("in_channels", "num_classes", "vocab_size", "context_length", "max_length", "image_size", "batch_size"),
)
_RANGES: dict[str, Range] = {
    **dict.fromkeys(_COUNT_NAMES, AT_LEAST_ONE),
    **dict.fromkeys(("lr", "max_lr", "base_lr", "eps", "temperature"), POSITIVE),
    **dict.fromkeys(("min_lr", "eta_min", "final_lr", "weight_decay", "lr_decay"), NOT_NEGATIVE),
    **dict.fromkeys(("momentum", "betas", "alpha", "label_smoothing"), FRACTION),
    **dict.fromkeys(("dropout", "attention_dropout", "drop_rate"), FRACTION),
    **dict.fromkeys(("drop_path", "drop_path_rate", "stochastic_depth_prob"), FRACTION),
    **dict.fromkeys(("decay", "memory_budget"), Range(0, 1, open_low=True, open_high=True)),
}


def coerce(
    value: Any, annotation: Any = EMPTY, *, name: str = "", default: Any = EMPTY, unit: Unit = "steps"
) -> Any:
    """`value` as the type that `annotation` asks for.

    Args:
        value: plain YAML data, a `Duration` or a `Target`.
        annotation: a type annotation; classes other than the plain ones accept anything.
        name: the key; well-known names such as `lr` have a range of their own.
        default: the keyword's default; stands in for a missing annotation, and gives a duration its unit.
        unit: the unit of a bare number where a duration is asked for and nothing else says it.

    Raises:
        ConfigError: C004 or C005, without a key.
    """
    annotation, bounds = asked_for(annotation, name, default)
    result = _coerce(value, annotation, _unit_of_default(default, unit))
    if bounds is not None:
        _check_range(result, bounds)
    return result


def asked_for(annotation: Any, name: str, default: Any) -> tuple[Any, Range | None]:
    """The type that a value must have, and the range that its name calls for; arguments as for `coerce`."""
    if annotation is EMPTY or annotation is Any:
        annotation = _annotation_of_default(name, default)
    bounds = _RANGES.get(name)
    return annotation, bounds if bounds is not None and _within(default, bounds) else None


def describe(annotation: Any) -> str:
    """Describe a value of this type, for `expected ...`."""
    annotation, _ = strip(annotation)
    if is_union(annotation):
        return _either([word for member in get_args(annotation) for word in _words(member)])
    return _either(_words(annotation))


def _words(annotation: Any) -> list[str]:
    annotation, metadata = strip(annotation)
    origin = get_origin(annotation) or annotation
    if origin is Literal:
        return [str(choice) for choice in get_args(annotation)]
    if origin in SEQUENCES:
        return ["a list"]
    if origin in MAPPINGS:
        return ["a mapping"]
    if origin is Duration:
        return [
            "a wall time such as 10m" if units_of(metadata, "steps").default == "seconds" else "a duration"
        ]
    names = {
        bool: ["true", "false"],
        int: ["a whole number"],
        float: ["a number"],
        str: ["text"],
        Path: ["a path"],
    }
    names[type(None)] = ["null"]
    return names.get(origin, [getattr(origin, "__name__", str(origin))])


def _either(words: list[str]) -> str:
    words = list(dict.fromkeys(words))
    if "a number" in words and "a whole number" in words:
        words.remove("a whole number")
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _coerce(value: Any, annotation: Any, unit: Unit = "steps") -> Any:
    annotation, metadata = strip(annotation)
    origin = get_origin(annotation) or annotation
    if is_union(annotation):
        result = _to_union(value, annotation, unit)
    elif origin is Literal:
        result = _to_literal(value, get_args(annotation))
    elif origin in (None, type(None)):
        if value is not None:
            raise ConfigError("C004", "expected null")
        return None
    elif origin is Duration:
        result = _to_duration(value, units_of(metadata, unit))
    elif origin in _CONVERTERS:
        result = _CONVERTERS[origin](value)
    elif origin in SEQUENCES:
        result = _to_sequence(value, origin, get_args(annotation), unit)
    elif origin in MAPPINGS:
        result = _to_mapping(value, get_args(annotation), unit)
    else:
        _refuse_not_finite(value)
        result = value
    for bounds in metadata:
        if isinstance(bounds, Range):
            _check_range(result, bounds)
    return result


def _to_bool(value: Any) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise _expected("true or false", value)
    return value


def _to_float(value: Any) -> float:
    number = _to_number(value, "a number")
    return float(number)


def _to_int(value: Any) -> int:
    number = _to_number(value, "a whole number")
    if isinstance(number, float) and not number.is_integer():
        raise _expected("a whole number", value)
    return int(number)


def _to_number(value: Any, expected: str = "a number") -> float:
    if isinstance(value, str) and (number := read_number(value)) is not None:
        value = number  # from ${oc.env:...}, which is always text
    if isinstance(value, str) and value.strip().lower().lstrip("+-") in (
        "nan",
        ".nan",
        "inf",
        ".inf",
        "infinity",
    ):
        value = float(value.strip().replace(".", ""))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        octal = isinstance(value, str) and re.fullmatch("0o[0-7]+", value)
        raise _expected(expected, value, f"Write {int(octal[0], 8)} for the octal {value}" if octal else None)
    _refuse_not_finite(value)
    return value


def _to_str(value: Any) -> str:
    if isinstance(value, (bool, list, dict)) or value is None:
        hint = "Put it in quotes" if isinstance(value, bool) else None
        raise _expected("text", value, hint)
    return str(value)


def _to_path(value: Any) -> Path:
    if not isinstance(value, (str, Path)):
        raise _expected("a path", value)
    return Path(value)


def _to_duration(value: Any, in_unit: InUnit) -> Duration:
    try:
        duration = Duration.parse(value, in_unit.default)
    except DurationRangeError as error:
        raise ConfigError("C005", str(error)) from None
    except ValueError as error:
        raise ConfigError("C004", str(error)) from None
    if duration.unit not in in_unit.allowed:
        given = "a wall time" if duration.unit == "seconds" else duration.unit
        raise ConfigError("C004", f"expected {_either(list(in_unit.allowed))}, not {given}")
    return duration


def _to_literal(value: Any, choices: tuple[Any, ...]) -> Any:
    for choice in choices:
        if type(choice) is type(value) and choice == value:
            return choice
    known = [str(choice) for choice in choices]
    suggestion = did_you_mean(value, known) if isinstance(value, str) else None
    raise ConfigError("C004", f"expected {_either(known)}", suggestion=suggestion)


def _to_union(value: Any, annotation: Any, unit: Unit) -> Any:
    members = get_args(annotation)
    if value is None and type(None) in members:
        return None
    exact = [
        member
        for member in members
        if get_origin(strip(member)[0]) is None and strip(member)[0] is type(value)
    ]
    opaque = [member for member in members if not is_known(member)]
    problem = None
    for member in [*exact, *(member for member in members if member not in exact and member not in opaque)]:
        try:
            return _coerce(value, member, unit)
        except PtfastError as found:
            if problem is None or (found.code == "C005" and problem.code != "C005"):
                problem = found
    only_opaque = all(member in opaque or member is type(None) for member in members)
    if opaque and (only_opaque or not isinstance(value, (bool, int, float, str, list, dict, type(None)))):
        _refuse_not_finite(value)
        return value
    # `or null` would help nobody who meant to give a value.
    known = [member for member in members if member not in opaque and member is not type(None)]
    if problem is not None and (problem.code == "C005" or len(known) == 1):
        raise problem
    suggestion = problem.suggestion if problem else None
    what = f"expected {_either([word for member in known for word in _words(member)])}"
    raise ConfigError("C004", what, suggestion=suggestion)


def _to_sequence(value: Any, origin: Any, arguments: tuple[Any, ...], unit: Unit) -> Any:
    if not isinstance(value, (list, tuple)):
        raise _expected("a list", value, "Write [...] around it")
    if origin is tuple and arguments and arguments[-1] is not Ellipsis:
        if len(value) != len(arguments):
            raise ConfigError("C004", f"expected a list of {len(arguments)} values")
        return tuple(_coerce(item, member, unit) for item, member in zip(value, arguments, strict=True))
    items = [_coerce(item, arguments[0] if arguments else Any, unit) for item in value]
    return origin(items) if origin in (tuple, set, frozenset) else items


def _to_mapping(value: Any, arguments: tuple[Any, ...], unit: Unit) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise _expected("a mapping", value)
    member = arguments[1] if len(arguments) == 2 else Any
    return {key: _coerce(item, member, unit) for key, item in value.items()}


_CONVERTERS: dict[Any, Any] = {bool: _to_bool, int: _to_int, float: _to_float, str: _to_str, Path: _to_path}


def _expected(what: str, value: Any, suggestion: str | None = None) -> PtfastError:
    got = (
        {None: ", not null", True: ", not true", False: ", not false"}.get(value, "")
        if _is_constant(value)
        else ""
    )
    return ConfigError(
        "C004", f"expected {what}{got if value != '' else ', got nothing'}", suggestion=suggestion
    )


def _is_constant(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _refuse_not_finite(value: Any) -> None:
    if isinstance(value, (int, float)) and not is_finite(value):
        raise ConfigError("C005", "must be a finite number")
    if isinstance(value, (list, tuple)):
        for item in value:
            _refuse_not_finite(item)


def _check_range(value: Any, bounds: Range) -> None:
    if isinstance(value, (list, tuple)):
        for item in value:
            _check_range(item, bounds)
    elif isinstance(value, Duration):
        bounds.check(value.value)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        bounds.check(value)


def _within(default: Any, bounds: Range) -> bool:
    """Return True if a keyword's default keeps to the range of its name, which else means something else."""
    try:
        _check_range(default, bounds)
    except PtfastError:
        return False
    return True


def _annotation_of_default(name: str, default: Any) -> Any:
    """The type that an untyped keyword's default, or its name, stands for."""
    if isinstance(default, bool):
        return bool | None
    if isinstance(default, float):
        return float | list[float]
    if name in _COUNT_NAMES:
        return int | list[int] | None
    if isinstance(default, int) or name in _RANGES:
        number = int | float | list[int | float]
        return number | None if default in (None, EMPTY) else number
    if isinstance(default, Duration):
        return Duration
    return Any


def _unit_of_default(default: Any, unit: Unit) -> Unit:
    first = default[0] if isinstance(default, (list, tuple)) and default else default
    return first.unit if isinstance(first, Duration) else unit


def units_of(metadata: tuple[Any, ...], unit: Unit) -> InUnit:
    """Return the units of a duration by an annotation's metadata; `unit` is otherwise a bare number's."""
    for item in metadata:
        if isinstance(item, InUnit):
            return item
    return InUnit(unit, ("seconds",)) if unit == "seconds" else InUnit(unit)


def strip(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """An annotation without `Annotated`, and its metadata."""
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        return inner, tuple(metadata)
    return annotation, ()


def is_union(annotation: Any) -> bool:
    """Return True if an annotation is one of several types."""
    return get_origin(annotation) in (Union, types.UnionType)


def is_known(annotation: Any) -> bool:
    """Return True if values are coerced to a type, not taken as they are."""
    annotation, _ = strip(annotation)
    origin = get_origin(annotation) or annotation
    known = (*_SCALARS, *SEQUENCES, *MAPPINGS, type(None), None, Literal, Any, Union, types.UnionType)
    return origin in known
