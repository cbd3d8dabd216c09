"""A run's record of how it was built, and when the host looks up from training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ptfast.core.resolved import Resolved, resolved_or
from ptfast.run import Cadence


def test_what_was_resolved_is_read_as_it_was_written(tmp_path: Path) -> None:
    resolved = Resolved(threads=3, channels_last=False, dropped_biases={"a": "b"}, curriculum=["grows"])
    resolved.write(tmp_path)
    assert Resolved.read(tmp_path) == resolved


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"threads": 2, "a_key_of_another_version": [1]}', Resolved(threads=2)),
        ("{}", Resolved()),
        ("not JSON", Resolved()),
        (None, Resolved()),
    ],
)
def test_files_of_other_versions_are_read_too(
    tmp_path: Path, content: str | None, expected: Resolved
) -> None:
    if content is not None:
        (tmp_path / "resolved.json").write_text(content)
    assert Resolved.read(tmp_path) == expected


def test_a_state_stands_in_for_a_file_that_is_gone(tmp_path: Path) -> None:
    facts = {"resolved": {"threads": 2, "a_key_of_another_version": [1]}}
    assert Resolved.read(tmp_path, facts) == Resolved(threads=2)
    assert Resolved.read(tmp_path, {}) == Resolved()
    Resolved(threads=3).write(tmp_path)
    assert Resolved.read(tmp_path, facts) == Resolved(threads=3)


def test_resolved_json_keeps_the_keys_of_earlier_runs(tmp_path: Path) -> None:
    """Notebooks and scripts read them."""
    Resolved().write(tmp_path)
    keys = """
        channels_last checkpointed compile_dynamic cudnn_attention cudnn_benchmark curriculum dataloader
        dataloader_reason deterministic device dropped_biases expands_segments float8 flushes_denormals
        fused_images fused_norms holds_memory interop_threads lr_scaling matmul_precision micro_batches
        momentum num_ranks optimizer padding padding_share precision sampling shards side_stream
        task task_reason threads threads_reason total_steps worker_threads workers
    """
    assert set(keys.split()) <= set(json.loads((tmp_path / "resolved.json").read_text()))


@pytest.mark.parametrize(
    ("wanted", "before", "expected"),
    [("auto", 0, "auto"), ("auto", 4, 4), (2, 4, 2), ("auto", "", "auto"), ("plain", "memory", "plain")],
)
def test_what_the_config_gives_is_not_overruled(wanted: object, before: object, expected: object) -> None:
    assert resolved_or(wanted, before) == expected


def test_the_host_looks_up_where_the_next_thing_is_due() -> None:
    cadence = Cadence(range(5, 21, 5), (7, 14), (), switch_steps=(6,))
    assert [cadence.next_stop(step, 20) for step in (0, 5, 6, 7, 14, 15, 20)] == [5, 6, 7, 10, 15, 20, 20]
