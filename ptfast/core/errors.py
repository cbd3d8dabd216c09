"""Error types with their exit codes, their one-line messages, and suggestions of the nearest valid name."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ptfast.core.sections.secret_values import SECRET, hide_credentials, is_secret
from ptfast.core.sections.spelling import nearest

EXIT_OK = 0
EXIT_BUG = 1
EXIT_FINDINGS = 8
EXIT_PREEMPTED = 75
EXIT_INTERRUPTED = 130

CODES = {
    "C001": "an argument that cannot be read",
    "C002": "unknown key",
    "C003": "unknown option of a group, or unknown recipe",
    "C004": "a value of the wrong type",
    "C005": "a value out of its range",
    "C006": "a key given twice",
    "C007": "a YAML file that cannot be read",
    "C008": "an interpolation that cannot be resolved",
    "C009": "a target that is not trusted, does not exist or is of the wrong kind",
    "C010": "a batch that does not divide",
    "C011": "keys that contradict each other",
    "C012": "more ranks than GPUs, or no pretrained weights available",
    "C013": "an unsafe name",
    "C014": "a sweep that cannot be run",
    "C015": "unknown command or flag",
    "C016": "a required value that is missing",
    "C017": "a model, loss, task or callback that fails, or returns the wrong thing",
    "D001": "a data path that is missing or of the wrong kind",
    "D002": "an empty dataset",
    "D003": "classes that are missing, empty or different between splits",
    "D004": "labels that do not fit the task",
    "D005": "a data file that cannot be read",
    "D006": "too few samples",
    "D007": "an archive, download or pack that is not whole, not safe or out of date",
    "D008": "a dataset, collate function or loader worker that fails",
    "E001": "a folder that cannot be written, or that some machines cannot access",
    "E002": "not enough space",
    "E003": "a run directory that is in use by another run",
    "E004": "a package that is not installed",
    "E005": "something that this machine or process cannot run, such as a device or number format",
    "E006": "a tracking service that cannot be reached or rejects the call",
    "N001": "a loss or gradient that is not finite",
    "N002": "a gradient that does not fit its loss",
    "N003": "an export that gives other outputs than its model, or a model with random outputs",
    "S001": "a damaged checkpoint",
    "S002": "a checkpoint of another model",
    "S003": "a checkpoint of another config",
    "S004": "a checkpoint that does not exist",
    "P001": "a rank that failed or hangs",
    "P002": "processes that cannot be launched",
}


PACKAGE = str(Path(__file__).parents[1])
INSTALLED = (
    *(PACKAGE, *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}),
    *(path for path in sys.path if path.endswith("-packages")),
)
"""Folders of installed code, which is not the user's own."""
COMMAND_LINE = "command line"
"""The `place` of an argument or flag."""
MOST_CHARS = 2000
"""Maximum length of an error or of a traceback line, when shown or written."""


class PtfastError(Exception):
    """A failure that the user can fix, printed as one line without a traceback.

    Args:
        code: a key of `CODES`.
        what: the problem, as a clause without a full stop.
        key: the config key or file.
        value: the given value; shown as `key=value`, unless the key's name marks it as a secret.
        place: the source of the value: `command line` (the default for flags), or `file.yaml:12`.
        suggestion: the remedy, as a sentence without its full stop.
    """

    exit_code = EXIT_BUG
    others: tuple[PtfastError, ...] = ()
    """Other errors that were found at the same time, printed below this one."""

    def __init__(
        self,
        code: str,
        what: str,
        *,
        key: str | None = None,
        value: Any = None,
        place: str | None = None,
        suggestion: str | None = None,
    ) -> None:
        assert code in CODES, f"unregistered error code {code}"
        self.code, self.what, self.key, self.value = code, _cut(what), key or None, value
        is_flag = (key or "").startswith("--")
        self.place, self.suggestion = place or (COMMAND_LINE if is_flag else None), suggestion
        subject = self.key or ""
        if self.key and value is not None:
            # An unknown key may be a misspelled secret, unless it is closer to another key.
            meant = suggestion.name if isinstance(suggestion, Meant) else ""
            hidden = is_secret(self.key, misspelt=code == "C002" and not meant) or is_secret(meant)
            subject = f"{self.key}={SECRET if hidden else shorten(shown(value))}"
        if self.place:
            subject = f"{subject} ({self.place})" if subject else self.place
        line = one_line(f"{subject}: {self.what}" if subject else self.what)
        line = f"{line}. {one_line(suggestion)}" if suggestion else line
        super().__init__(line if line.endswith(("?", ".", "!")) else line + ".")

    def at(self, key: str, value: Any = None) -> PtfastError:
        """Return the error with `key` as a prefix of its key, and with `value` if it has none."""
        full = f"{key}.{self.key}" if self.key and key else key or self.key
        return self.changed(key=full, value=value if self.value is None else self.value)

    def changed(self, **changes: Any) -> PtfastError:
        """Return the error with some of its `parts` replaced."""
        error = type(self)(**self.parts | changes)
        error.others = self.others
        return error

    def moved(self, section: str, place: str) -> PtfastError:
        """Return the error with `place` instead of `section` in its key and its suggestion."""
        if (self.key or "").split(".")[0] != section:
            return self
        hint, (old, new) = self.suggestion, (f"{section}.", f"{place}.")
        if hint is not None:
            hint = Meant(hint.name.replace(old, new)) if isinstance(hint, Meant) else hint.replace(old, new)
        return self.changed(key=place + (self.key or "").removeprefix(section), suggestion=hint)

    @property
    def hint(self) -> str | None:
        """Return the suggestion, for programs that call ptfast."""
        return self.suggestion

    @property
    def parts(self) -> dict[str, Any]:
        """Return the constructor arguments of this error."""
        names = ("code", "what", "key", "value", "place", "suggestion")
        return {name: getattr(self, name) for name in names}

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross process boundaries (loader workers, ranks): rebuild them from their parts.
        return partial(type(self), **self.parts), (), {"others": self.others}


class ConfigError(PtfastError):
    """A config that cannot be run: unknown keys, bad values, contradictions. Exit code 2."""

    exit_code = 2


class DataError(PtfastError):
    """Data that is missing, unreadable or does not fit the task. Exit code 3."""

    exit_code = 3


class MachineError(PtfastError):
    """Something missing on this machine: space, rights, packages, devices, number formats. Exit code 4."""

    exit_code = 4


class NumericsError(PtfastError):
    """A training value that is NaN or infinite. Exit code 5."""

    exit_code = 5


class SavedStateError(PtfastError):
    """A checkpoint that is damaged or belongs to something else. Exit code 6."""

    exit_code = 6


class ParallelError(PtfastError):
    """A rank that died or hangs, or ranks that cannot be launched. Exit code 7."""

    exit_code = 7


def rebuilt(parts: Mapping[str, Any]) -> PtfastError:
    """Return the error with these `parts`, of the class of its code."""
    kinds = (ConfigError, DataError, MachineError, NumericsError, SavedStateError, ParallelError)
    return dict(zip("CDENSP", kinds, strict=True))[parts["code"][0]](**parts)


def not_set(key: str) -> ConfigError:
    """Return the error for a required value that is not set."""
    return ConfigError("C016", "required, but not set", key=key, suggestion=f"Give {key}=VALUE")


def cannot_write(
    error: OSError, key: str, value: Any = None, *, suggestion: str | None = None
) -> MachineError:
    """Return the error for a file or folder that cannot be written: E002 if no space is left, else E001."""
    full = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}.get(error.errno or 0)
    reason = "a link stands in its place" if error.errno == errno.ELOOP else error.strerror or error
    with contextlib.suppress(OSError, AttributeError):
        disk = os.statvfs(Path(key).absolute().parent)
        if error.errno == errno.ENOSPC and disk.f_files and not disk.f_ffree:
            full = "the disk has no room for more files (its inodes are used up)"
    what = full or f"cannot be written: {reason}"
    return MachineError("E002" if full else "E001", what, key=key, value=value, suggestion=suggestion)


def import_extra(module: str, extra: str, key: str, value: Any = None) -> Any:
    """Import a module of an optional extra, or raise an E004 with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        what = f"needs the package {module.partition('.')[0]}, which cannot be imported ({error})"
        hint = f"Install it with pip install 'ptfast[{extra}]'"
        raise MachineError("E004", what, key=key, value=value, suggestion=hint) from error


class ReportedError(Exception):
    """A failure that another process has reported.

    Args:
        line: the line that the user sees.
        details: the traceback.
        error: the error itself, if the process sent its parts.
        summary: the error's type and text otherwise.
    """

    def __init__(
        self,
        line: str,
        exit_code: int,
        details: str = "",
        error: PtfastError | None = None,
        summary: str = "",
    ) -> None:
        super().__init__(line)
        self.exit_code, self.details, self.error = exit_code, details, error
        self.summary = summary if error is None else str(error)


def together(errors: Sequence[PtfastError]) -> PtfastError:
    """Return the first of `errors`, to be raised, with the rest as its `others`."""
    flat = [one for error in errors for one in (error, *error.others)]
    flat[0].others = tuple({str(one): one for one in flat[1:] if str(one) != str(flat[0])}.values())
    return flat[0]


def error_line(error: BaseException) -> str:
    """Return the line that a user sees for an error, and a line for each of its `others`."""
    if isinstance(error, PtfastError):
        return "\n".join(f"ptfast: error[{one.code}]: {one}" for one in (error, *error.others))
    if isinstance(error, (ReportedError, KeyboardInterrupt)):
        return str(error) if isinstance(error, ReportedError) else "ptfast: interrupted"
    place = traceback.extract_tb(error.__traceback__)[-1] if error.__traceback__ else None
    where = f" ({Path(place.filename).name}:{place.lineno})" if place else ""
    text = " ".join(_cut(text_of(error)).split()) or "no message"
    what = f"{type(error).__name__}{where}: {text}"
    return f"ptfast: error: {what}. Add --traceback to see where it comes from."


def exit_code_of(error: BaseException) -> int:
    if isinstance(error, (PtfastError, ReportedError)):
        return error.exit_code
    return EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else EXIT_BUG


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an error, as Python prints it."""
    if isinstance(error, ReportedError):
        return error.details
    return "\n".join(_cut(line.rstrip("\n")) for line in traceback.format_exception(error))


def text_of(error: BaseException) -> str:
    """Return the text of an error; empty if its `__str__` fails."""
    with contextlib.suppress(Exception):
        return str(error)
    return ""


def _cut(text: str) -> str:
    return text if len(text) <= MOST_CHARS else f"{hide_credentials(text)[:MOST_CHARS]} ..."


def shorten(value: Any, max_chars: int = 80) -> str:
    """Return `value` as text of at most `max_chars` characters, with control characters escaped."""
    text = one_line(str(value))
    return text if len(text) <= max_chars else text[: max_chars - 3] + "..."


def shown(value: Any) -> Any:
    """Return `value` as it is written on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{','.join(str(shown(item)) for item in value)}]"
    return value


def described(value: Any) -> str:
    """Describe the kind of `value` in a few words: `a Tensor of float32 (64, 10)`."""
    kind = type(value).__name__
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        shape = ", ".join(str(size) for size in value.shape)
        return f"a {kind} of {str(value.dtype).removeprefix('torch.')} ({shape})"
    if isinstance(value, dict) and value:
        return f"a {kind} with the keys {name_some([str(key) for key in value])}"
    if isinstance(value, (tuple, list)) and value:
        return f"a {kind} of {len(value)}, the first {shorten(described(value[0]))}"
    if value is None or isinstance(value, (bool, int, float, str)):
        return "None" if value is None else f"the {kind} {shorten(repr(value), 40)}"
    return f"a {kind}"


def summary_of(error: BaseException, depth: int = 0) -> str:
    """Return an error's type and text, and its place in the user's code below `depth` frames."""
    stack = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    places = [
        f" ({Path(file).name}:{line})" for file, line in stack[depth:] if not file.startswith(INSTALLED)
    ]
    text = one_line(_cut(text_of(error))).rstrip(". ")
    return type(error).__name__ + (places[-1] if places else "") + (f": {text}" if text else "")


def user_place(frame: Any) -> str:
    """Return ` (FILE:LINE)` of the innermost frame of the user's code, from `frame` up; empty without one."""
    while frame is not None and frame.f_code.co_filename.startswith((*INSTALLED, "<")):
        frame = frame.f_back
    return "" if frame is None else f" ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


def name_of(made: Any) -> str:
    """Return the import path of a function or class, or of an object's class."""
    made = getattr(made, "func", made)  # unwrap a functools.partial
    kinds = [made] if hasattr(made, "__qualname__") else type(made).__mro__
    # FSDP replaces the class of a sharded model by a generated class.
    named = next(kind for kind in kinds if not kind.__module__.startswith("torch.distributed.fsdp"))
    return f"{named.__module__}.{named.__qualname__}"


def name_some(names: Sequence[str], most: int = 5) -> str:
    """Return the first `most` names, and the number of the rest."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def one_line(text: str) -> str:
    """Return `text` as one line, with control characters escaped and the credentials of URLs hidden."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in hide_credentials(text))


class Meant(str):
    """The sentence `Did you mean NAME?`, with the name as an attribute."""

    name: str

    def __new__(cls, name: str) -> Meant:
        sentence = super().__new__(cls, f"Did you mean {name}?")
        sentence.name = name
        return sentence

    def __getnewargs__(self) -> tuple[str]:
        return (self.name,)


def did_you_mean(word: str, candidates: Iterable[str], template: str = "{}") -> Meant | None:
    """Return `Meant` for the candidate closest to `word`, formatted by `template`; None if none is close."""
    found = nearest(word, candidates)
    return None if found is None else Meant(template.format(found))
