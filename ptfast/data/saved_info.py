"""The facts about the data that a saved model was trained on, and whether data of now agrees with them."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from ptfast.core.errors import DataError, SavedStateError, name_some
from ptfast.core.protocols import DataInfo
from ptfast.data.data_fingerprint import differing
from ptfast.data.label_checks import differing_names

_MUST_AGREE = {
    "kind": "the kind of data",
    "task": "what the labels are for",
    "num_classes": "the number of classes",
    "class_names": "the classes",
    "input_shape": "the shape of the inputs",
    "vocab_size": "the size of the vocabulary",
    "context_length": "the length of sequences",
    "num_train": "the number of training samples",
}


def read_info(facts: dict[str, Any]) -> DataInfo:
    """The data's facts as they were saved; JSON's lists become tuples again."""
    names = {field.name for field in fields(DataInfo)}
    known: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in facts.items()
        if name in names
    }
    return DataInfo(**known)


def check_same_data(saved: DataInfo, found: DataInfo, *, trains: bool = True) -> str:
    """Refuse to resume with other data than before: the model would read it wrongly, in silence.

    Args:
        trains: whether it is trained on, so that samples have to be the same ones, too.

    Returns:
        What has changed and alters no step of training, in words; empty if nothing has.

    Raises:
        SavedStateError: S003, naming what has changed.
    """
    changed = [
        f"{what}{_shown(before, now)}"
        for name, what in _MUST_AGREE.items()
        if (before := getattr(saved, name)) != (now := getattr(found, name)) and before is not None
    ]
    if saved.extra.get("tokenizer") != found.extra.get("tokenizer"):
        changed.append("the vocabulary")
    before, now = (info.extra.get("contents", {}) for info in (saved, found))
    # States of before there were contents do not say what they were trained on.
    parts = differing(before, now) if before and now else {}
    of_training = [words for name, words in parts.items() if trains and name.partition("/")[0] == "train"]
    if changed or of_training:
        some = [*changed, *([name_some(of_training, 3)] if of_training else [])]
        what = f"the data has changed since the state was saved: {', '.join(some)}"
        hint = "Put it back as it was, or start afresh with run.resume=never"
        raise SavedStateError("S003", what, key="data", suggestion=hint)
    return name_some(list(parts.values()), 3) if parts else ""


def as_known(known: DataInfo, found: DataInfo) -> DataInfo:
    """The facts to read other data by: those that the model knows, if it can read the data at all.

    Args:
        known: the data that the model was trained on.
        found: the other data.
    """
    if (known.kind, known.task) != (found.kind, found.task):
        raise _misfit("D004", f"is {found.kind} data for {found.task}", f"{known.kind} data for {known.task}")
    if known.class_names and found.class_names and known.class_names != found.class_names:
        raise _differing_classes(known.class_names, found.class_names)
    for name, what in (("num_classes", "classes"), ("vocab_size", "tokens")):
        before, now = getattr(known, name), getattr(found, name)
        if before is not None and now is not None and now > before:
            raise _misfit("D004", f"has {now:,} {what}", f"{before:,}")
    if known.kind in ("image", "features") and known.input_shape != found.input_shape:
        raise _misfit("D005", f"has inputs of shape {_list(found.input_shape)}", _list(known.input_shape))
    return replace(
        known,
        ignores_labels=known.ignores_labels or found.ignores_labels,
        token_bytes=found.token_bytes,
        num_train=found.num_train,
    )


def _misfit(code: str, what: str, known: str) -> DataError:
    return DataError(code, f"{what}; the model was trained on {known}", key="data")


def _differing_classes(known: tuple[str, ...], found: tuple[str, ...]) -> DataError:
    differ = differing_names(found, known, "which the model does not know") or "they are in another order"
    what = f"its classes differ from those of training: {differ}"
    return DataError("D003", what, key="data", suggestion="Give it the class folders of the training data")


def _shown(before: Any, now: Any) -> str:
    if isinstance(before, int) and isinstance(now, int):
        return f" ({before:,}, now {now:,})"
    if isinstance(before, tuple) and isinstance(now, tuple) and len(before) <= 4 >= len(now):
        return f" ({_list(before)}, now {_list(now)})"
    return ""


def _list(items: tuple[Any, ...] | None) -> str:
    return (
        "x".join(map(str, items)) if items and isinstance(items[0], int) else ", ".join(map(str, items or ()))
    )
