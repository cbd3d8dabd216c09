"""A problem with one value of a config, before it is known where the value was given."""

from __future__ import annotations

from typing import Any

from ptfast.core.devices import Unsupported
from ptfast.core.errors import ConfigError, MachineError, PtfastError


class Problem(ValueError):  # noqa: N818 - one message of many until `error` makes it the one that is raised
    """Something wrong with one config value, before its place is known.

    Args:
        code: a key of `core.errors.CODES`: of the config, or E005 for what only this machine cannot do.
        what: what is wrong, as a clause.
        key: the dotted key; callers further out prepend theirs.
        value: the value given.
        suggestion: what to do about it.
    """

    def __init__(
        self, code: str, what: str, *, key: str = "", value: Any = None, suggestion: str | None = None
    ) -> None:
        super().__init__(what)
        self.code, self.what, self.key, self.value, self.suggestion = code, what, key, value, suggestion

    def at(self, key: str, value: Any = None) -> Problem:
        """The same problem with `key` in front of its own, and `value` where it has none."""
        full = f"{key}.{self.key}" if self.key and key else key or self.key
        shown = value if self.value is None else self.value
        return Problem(self.code, self.what, key=full, value=shown, suggestion=self.suggestion)

    def error(self, place: str | None) -> PtfastError:
        """The error a user sees: a `MachineError` where the machine is in the way, else a `ConfigError`."""
        return (MachineError if self.code.startswith("E") else ConfigError)(
            self.code,
            self.what,
            key=self.key or None,
            value=shown(self.value),
            place=place or None,
            suggestion=self.suggestion,
        )


def not_set(key: str) -> Problem:
    """Refuse a config without a value that it needs."""
    return Problem("C016", "required, but not set", key=key, suggestion=f"Give {key}=VALUE")


def cannot_run(lack: Unsupported | None, key: str, value: Any) -> Problem | None:
    """An E005 for a lack that stops a run; one that only slows it down is no problem."""
    if lack is None or lack.runs:
        return None
    return Problem("E005", lack.what, key=key, value=value, suggestion=lack.remedy)


def shown(value: Any) -> Any:
    """`value` as it is written on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{','.join(str(shown(item)) for item in value)}]"
    return value
