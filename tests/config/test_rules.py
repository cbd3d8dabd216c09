"""Rules across keys: one length, batches that divide, keys that agree, and what this machine can run."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from config_trees import Tree, cannot_run, check, refused, typed

from ptfast.config.checks.rules import check_batch, unused_keys
from ptfast.config.families import FAMILIES
from ptfast.core.distributed import WORLD
from ptfast.core.errors import ConfigError


@pytest.mark.parametrize(
    ("places", "epochs", "steps"),
    [
        ({"epochs": "conf/config.yaml:22", "steps": "command line"}, None, 100),
        ({"epochs": "conf/config.yaml:22", "steps": "recipes/mine.yaml:5"}, None, 100),
        ({"epochs": "command line", "steps": "recipes/mine.yaml:5"}, 10, None),
        ({"epochs": "command line", "steps": "command line"}, "C011", "C011"),
        ({"epochs": "mine.yaml:3", "steps": "mine.yaml:4"}, "C011", "C011"),
    ],
)
def test_one_of_epochs_and_steps(places: dict[str, str], epochs: Any, steps: Any) -> None:
    if epochs == "C011":
        assert refused(lambda key: places.get(key, ""), steps=100).code == "C011"
    else:
        config = check(lambda key: places.get(key, ""), steps=100)
        assert (config.epochs, config.steps) == (epochs, steps)


def test_a_run_needs_a_length() -> None:
    assert refused(epochs=None).code == "C016"


@pytest.mark.parametrize(
    "changes",
    [
        {"gradients__clip_norm": 1, "gradients__clip_value": 1},
        {"optimizer__nesterov": True, "optimizer__momentum": 0},
        {"steps": 10, "epochs": None, "schedule__warmup": "11steps"},
        {"micro_batches": 8, "gradients__accumulate": 2},
        {"parallel__strategy": "single", "parallel__nproc": 2},
        {"optimizer__fused": True, "optimizer__foreach": True},
    ],
)
def test_keys_that_contradict_each_other(changes: Tree) -> None:
    assert refused(**changes).code == "C011"


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        ("optimizer__reference_batch", 64, {"optimizer__lr_scaling": "linear"}),
        ("curriculum__over", "50%", {"curriculum__image_size_from": "auto"}),
        ("curriculum__length_multiple", 8, {"curriculum__length_from": "auto"}),
        ("parallel__bucket_mb", 10.0, {"parallel__strategy": "ddp"}),
        ("augment__resized_ratio", [0.5, 2.0], {"augment__resized_crop": [0.3, 1.0]}),
        ("ema__swa_every", "2epochs", {"ema__swa_start": "75%"}),
        ("debug__active", 3, {"debug__mode": "profiler"}),
        ("compile__dynamic", False, {"compile__mode": "model"}),
        ("checkpointing__every", 2, {"checkpointing__mode": "every_n"}),
        ("sweep__metric", "val.loss", None),
    ],
)
def test_keys_that_would_change_nothing(
    key: str, value: Any, remedy: Tree | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ptfast.core.devices.check_compiler", lambda device: None)
    (warning,) = unused_keys(check(**{key: value}), typed)
    assert warning.startswith(f"{key.replace('__', '.')}=")
    assert "means nothing" in warning
    if remedy is not None:
        assert not list(unused_keys(check(**{key: value}, **remedy), typed))
    # An option file may bring figures for a switch that is off.
    assert not list(unused_keys(check(**{key: value}), lambda key: "mine.yaml:3"))


@pytest.mark.parametrize("kind", ["plain", "memory", "device", "packed"])
def test_keys_of_workers_where_there_are_none(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_rules = [replace(family, rules=()) for family in FAMILIES]
    monkeypatch.setattr("ptfast.config.checks.rules.FAMILIES", without_rules)
    keys: Tree = {"dataloader__workers": 4, "dataloader__prefetch": 3, "backend__worker_threads": 2}
    warnings = list(unused_keys(check(dataloader__kind=kind, **keys), typed))
    assert [warning.partition("=")[0].replace(".", "__") for warning in warnings] == list(keys)
    assert all(f"means nothing to dataloader={kind}" in warning for warning in warnings)
    for other in ("auto", "workers"):
        assert not list(unused_keys(check(dataloader__kind=other, **keys), typed))


def test_keys_that_what_is_chosen_leaves_without_effect() -> None:
    (warning,) = unused_keys(check(batching__pack=True, batching__multiple=8), typed)
    assert warning.startswith("batching.multiple=8")
    tokens = {"batching__buckets": True, "batching__batch_tokens": 4096}
    assert "dataloader.drop_last=true" in " ".join(
        unused_keys(check(**tokens, dataloader__drop_last=True), typed)
    )
    only = {"batch_size": "command line"}
    (warning,) = unused_keys(check(**tokens, batch_size=32), lambda key: only.get(key, "mine.yaml:3"))
    assert warning.startswith("batch_size=32 (command line): means nothing to training by batching.batch_tok")
    assert not list(unused_keys(check(batch_size=32), typed))
    (warning,) = unused_keys(check(run__name="mine", run__dir="there"), typed)
    assert warning.startswith("run.name=mine (command line): means nothing next to run.dir=there")
    assert not list(unused_keys(check(run__name="mine"), typed))


def test_memory_is_not_pinned_for_a_cpu() -> None:
    if not torch.cuda.is_available():
        assert cannot_run(dataloader__pin=True).key == "dataloader.pin"


def cut(batch_size: int, micro_batches: int | None, ranks: int, accumulate: int = 1) -> int:
    config = check(batch_size=12, gradients={"accumulate": accumulate})
    return check_batch(
        config.model_copy(update={"batch_size": batch_size, "micro_batches": micro_batches}), ranks
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            (7, None, 2),
            "7: cannot be cut into 2 micro-batches (2 ranks) evenly. The nearest that divide are 6 and 8",
        ),
        ((1, None, 2), "The nearest that divides is 2"),
        ((64, None, 2, 3), "are 60 and 66"),
        (
            (64, 3, 2),
            "micro_batches=3: cannot be shared evenly by 2 ranks. The nearest that divide are 2 and 4",
        ),
    ],
)
def test_a_batch_that_does_not_divide(arguments: tuple[Any, ...], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cut(*arguments)
    assert caught.value.code == "C010"
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "micro_batches"),
    [((64, None, 1), 1), ((64, None, 2, 4), 8), ((64, 8, 2), 8), ((64, 8, 2, 4), 8)],
)
def test_a_batch_that_divides(arguments: tuple[Any, ...], micro_batches: int) -> None:
    assert cut(*arguments) == micro_batches


def test_ranks_that_do_not_divide_the_batch() -> None:
    assert refused(micro_batches=7).code == "C010"
    error = refused(batch_size=7, parallel={"strategy": "ddp", "nproc": 2}, device="cpu")
    assert (error.code, error.key) == ("C010", "batch_size")
    assert check(batch_size=7, parallel={"strategy": "ddp", "nproc": "auto"}).batch_size == 7


@pytest.mark.parametrize(("gpus", "fits"), [(2, False), (4, True)])
def test_more_ranks_than_gpus(gpus: int, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    changes = {"device": "cuda", "parallel": {"strategy": "ddp", "nproc": 4}}
    if fits:
        check(**changes)
    else:
        error = refused(**changes)
        assert (error.code, error.key) == ("C012", "parallel.nproc")
        assert f"this machine has {gpus}" in str(error)
        # Ranks that somebody has started may see one GPU each.
        started = {name: "1" for name in WORLD if name != "WORLD_SIZE"}
        for name, value in {**started, "WORLD_SIZE": "4"}.items():
            monkeypatch.setenv(name, value)
        check(**changes)


def test_compiling_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    check(compile__mode="none")
    error = cannot_run(compile__mode="model", device="cpu")
    assert "Install g++, or use compile=none" in str(error)


def test_kernels_by_timing_are_not_deterministic() -> None:
    error = refused(backend__deterministic=True, backend__cudnn_benchmark=True)
    assert (error.code, error.key) == ("C011", "backend.cudnn_benchmark")
    check(backend__deterministic=True, backend__cudnn_benchmark="auto")


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for changes in ({}, {"parallel": {"strategy": "ddp", "nproc": 4}}):
        error = cannot_run(device="cuda", **changes)
        assert error.key == "device"
        assert "Use device=cpu" in str(error)


def test_number_formats_that_the_device_has_not() -> None:
    error = cannot_run(precision__mode="tf32", device="cpu")
    assert error.key == "precision"
    assert "TF32 needs an NVIDIA GPU, and this is cpu" in str(error)
    for mode in ("amp", "bf16", "amp_fp16", "bf16_true"):
        check(precision__mode=mode, device="cpu")
