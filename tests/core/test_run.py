"""A run's record of how it was built, and when the host looks up from training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ptfast.core.auto_choices import AutoChoice, AutoChoices, read_choices
from ptfast.core.errors import SavedStateError
from ptfast.run import LoopIntervals


def test_choices_are_read_as_they_were_written(tmp_path: Path) -> None:
    choices = AutoChoices()
    assert choices.choose("backend.threads", 3, "others are busy") == 3
    choices.choose("rewrites.channels_last", False)
    choices.note("dropped_biases", {"a": "b"}, "1 before a BatchNorm")
    choices.write(tmp_path)
    read = read_choices(tmp_path)
    assert {name: record.value for name, record in read.items()} == choices.values()
    assert str(read["backend.threads"]) == "backend.threads=3 because others are busy"
    assert choices.rows == {"dropped biases": "1 before a BatchNorm"}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"threads": 2, "a_key_of_another_version": [1]}', 2),
        ('{"threads": 0, "device": ""}', None),
        ("{}", None),
        ("not JSON", None),
        (None, None),
    ],
)
def test_files_of_other_versions_are_read_too(tmp_path: Path, content: str | None, expected: object) -> None:
    if content is not None:
        (tmp_path / "resolved.json").write_text(content)
    choices = AutoChoices(read_choices(tmp_path))
    assert choices.began_with("backend.threads", int) == expected
    assert choices.began_with("device", str) is None


def test_what_a_run_of_version_0_1_chose_is_found_by_todays_keys() -> None:
    stored = Path(__file__).parent.parent / "training" / "golden" / "version_0_1"
    choices = AutoChoices(read_choices(stored))
    assert choices.previous["task"] == AutoChoice("task", "classification", "whole numbers")
    for key, kind, value in (
        ("backend.cudnn_benchmark", bool, False),
        ("rewrites.channels_last", bool, False),
        ("compile.dynamic", bool, False),
        ("precision.mode", str, "fp32"),
        ("dropped_biases", dict[str, str], {}),
        ("world_size", int, 1),
        ("total_steps", int, 20),
        ("teacher", str, None),
    ):
        assert choices.began_with(key, kind) == value, key


@pytest.mark.parametrize(
    ("note", "mode"),
    [
        ("bf16 autocast (amp on cpu)", "bf16"),
        ("fp16 autocast with gradient scaling", "amp_fp16"),
        ("fp32 (amp: bf16 is no faster on this CPU), high matmuls: 2.0x", "fp32"),
    ],
)
def test_the_precision_of_version_0_1_is_read_from_its_sentence(tmp_path: Path, note: str, mode: str) -> None:
    (tmp_path / "resolved.json").write_text(json.dumps({"precision": note}))
    assert AutoChoices(read_choices(tmp_path)).began_with("precision.mode", str) == mode


def test_a_state_stands_in_for_a_file_that_is_gone(tmp_path: Path) -> None:
    choices = AutoChoices()
    choices.choose("backend.threads", 2)
    for facts in ({"resolved": {"threads": 2}}, {"choices": choices.as_json()}):
        assert read_choices(tmp_path, facts)["backend.threads"].value == 2
    assert read_choices(tmp_path, {}) == {}
    choices.choose("backend.threads", 3)
    choices.write(tmp_path)
    assert read_choices(tmp_path, {"resolved": {"threads": 2}})["backend.threads"].value == 3


@pytest.mark.parametrize(
    "content", ['{"choices": [{"key": 1, "value": 2}], "facts": {}}', '{"choices": {}, "facts": {}}']
)
def test_a_damaged_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "resolved.json").write_text(content)
    with pytest.raises(SavedStateError, match="choices"):
        read_choices(tmp_path)


def test_a_value_of_another_type_is_named() -> None:
    choices = AutoChoices({"backend.threads": AutoChoice("backend.threads", "many")})
    with pytest.raises(SavedStateError, match=r"backend\.threads: Input should be a valid integer"):
        choices.began_with("backend.threads", int)


@pytest.mark.parametrize(
    ("wanted", "before", "expected"),
    [
        ("auto", None, ("made now", "why")),
        ("auto", "kept", ("kept", "then")),
        ("given", "kept", ("given", "")),
    ],
)
def test_what_the_config_gives_is_not_overruled(
    wanted: str, before: str | None, expected: tuple[str, str]
) -> None:
    previous = {"key": AutoChoice("key", before, "then")} if before else None
    choices = AutoChoices(previous)
    assert choices.resolve("key", wanted, str, lambda: ("made now", "why")) == expected[0]
    assert choices.made["key"] == AutoChoice("key", *expected)


def test_the_host_looks_up_where_the_next_thing_is_due() -> None:
    intervals = LoopIntervals(range(5, 21, 5), (7, 14), (), switch_steps=(6,))
    assert [intervals.next_stop(step, 20) for step in (0, 5, 6, 7, 14, 15, 20)] == [5, 6, 7, 10, 15, 20, 20]
