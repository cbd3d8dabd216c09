"""The hot loop: what a step computes, and what is logged and evaluated when."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from running import build_run, records, same_bits, summary, train, weights
from torch import Tensor
from toys import (
    SMALL,
    Notes,
    Recorder,
    Stream,
    callback,
)

import ptfast
from ptfast.core.errors import ConfigError, DataError
from ptfast.core.protocols import DataInfo
from ptfast.models.mlp import Mlp
from ptfast.training.fit import fit
from ptfast.training.loop.votes import EXCHANGE_S
from ptfast.training.stages.data_stage import eval_batch_size


def test_twenty_steps_are_those_of_a_loop_written_by_hand(tmp_path: Path) -> None:
    words = (
        "steps=20",
        "batch_size=64",
        "dataloader.drop_last=true",
        "schedule=step",
        "schedule.every=7steps",
    )
    words = (*words, "optimizer=sgd", "optimizer.fused=false", "gradients.clip_norm=0.5", "log_every=20")
    run = build_run(tmp_path, *words)
    batches = [step.micro_batches[0].data for step in run.train_loader.steps(0, 20)]
    torch.manual_seed(0)
    model = Mlp(run.info.input_shape, 10)  # type: ignore[arg-type]
    model.load_state_dict(run.model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7)
    losses = []
    for inputs, targets in batches:
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    fit(run)
    assert same_bits(dict(run.model.state_dict()), dict(model.state_dict()))
    assert run.metrics["train"]["loss"] == pytest.approx(sum(losses) / 20, rel=1e-6)


def test_lines_are_logged_when_they_are_due(in_tmp: Path) -> None:
    Recorder.events = []
    words = (*SMALL, "steps=23", "eval.every=10steps", "data.val=100samples", callback("Recorder"))
    assert train(*words, "run.dir=a") == 0
    lines = records(Path("a"))
    written = [json.loads(line) for line in Path("a/metrics.jsonl").read_text().splitlines()]
    assert all(line["step_s"] > 0 for line in written if line["split"] == "train")
    assert all(line["peak_memory_bytes"] > 2**20 for line in written if line["split"] == "train")
    assert [line["step"] for line in lines if line["split"] == "train"] == [5, 10, 15, 20, 23]
    assert [line["step"] for line in lines if line["split"] == "val"] == [10, 20, 23]
    steps = [event for event in Recorder.events if event[0] == "step"]
    assert steps == [("step", step) for step in range(1, 24)]
    evaluations = [(line["split"], line["step"], line["loss"]) for line in lines if line["split"] != "train"]
    assert [event for event in Recorder.events if event[0] != "step"] == evaluations
    result = summary(Path("a"))
    assert result["status"] == "finished"
    assert sum(result["time_budget"].values()) == pytest.approx(result["wall_s"])
    assert result["val"]["loss"] == lines[-1]["loss"]


def test_looking_up_often_changes_no_figure(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (*SMALL, "steps=20", "model.dropout=0.2")
    assert train(*words, "run.dir=a") == 0
    monkeypatch.setattr("ptfast.training.loop.votes.EXCHANGE_S", EXCHANGE_S * 1e-9)
    assert train(*words, "run.dir=b") == 0
    assert records(Path("a")) == records(Path("b"))
    assert same_bits(weights(Path("a")), weights(Path("b")))


def test_the_loss_of_a_window_is_the_mean_over_its_samples(tmp_path: Path) -> None:
    run = build_run(tmp_path, *SMALL, "steps=5", "optimizer.lr=1e-12", "batch_size=1000", "eval.every=5steps")
    seen = [step.micro_batches[0].data for step in run.train_loader.steps(0, 5)]
    with torch.no_grad():
        sums = [F.cross_entropy(run.model(x), y, reduction="sum").item() for x, y in seen]
    fit(run)
    # 1,617 samples in batches of 1,000 and 617.
    mean = sum(sums) / sum(len(y) for _, y in seen)
    assert run.metrics["train"]["loss"] == pytest.approx(mean, rel=1e-5)


def test_ranks_evaluate_the_first_ranks_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank averages BatchNorm statistics of its own: those are what must be alike, not the newest."""
    words = ("model=resnet_digits", "model.width=4", "ema.decay=0.9", "steps=3", "data.val=100samples")
    run = build_run(tmp_path, *words, "batch_size=128", "log_every=10")
    sent: list[list[Tensor]] = []

    def note(buffers: list[Tensor], ranks: Any) -> None:
        sent.append([buffer.clone() for buffer in buffers])

    monkeypatch.setattr("ptfast.training.evaluate.broadcast_buffers", note)
    fit(run)
    assert run.ema is not None
    newest = [buffer.clone() for buffer in run.model.buffers()]
    run.ema.copy_to_model()
    averaged = list(run.model.buffers())
    assert same_bits(sent[-2], averaged)
    assert same_bits(sent[-1], newest)
    assert not same_bits(newest, averaged)


def test_a_logger_is_told_no_secret(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "open sesame")
    logger = ("+logger._target_=toys.Notes", "+logger.token=${oc.env:MINE}", "run.name=${oc.env:MINE}")
    assert train(*SMALL, *logger, "steps=2", "run.dir=a") == 0
    assert Notes.config["logger"]["token"] == "${oc.env:MINE}"
    assert "sesame" not in str(Notes.config)


def test_the_environment_names_what_was_used(in_tmp: Path) -> None:
    assert train(*SMALL, "steps=2", "run.dir=a", "backend.threads=1") == 0
    environment = json.loads(Path("a/environment.json").read_text())
    assert (environment["device"], environment["threads"], environment["ranks"]) == ("cpu", 1, 1)
    assert (environment["ptfast"], environment["torch"]) == (ptfast.__version__, torch.__version__)


def test_iterable_data_trains_for_so_many_steps(in_tmp: Path) -> None:
    words = ("data=custom", "data._target_=toys.Stream", "batch_size=10", "log_every=10", "run.dir=a")
    assert train(*words, "steps=30") == 0
    result = summary(Path("a"))
    assert (result["steps"], result["samples"]) == (30, 300)
    assert result["best_metric"] == "train.loss"


def test_iterable_data_has_no_other_loader(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("data=custom", "data._target_=toys.Stream", "batch_size=10", "steps=3", "run.dir=a")
    assert train(*words, "dataloader.kind=memory") == 2
    assert "error[C011]: dataloader.kind=memory (command line)" in capsys.readouterr().err


def test_an_evaluation_keeps_nothing_for_a_backward_pass(tmp_path: Path) -> None:
    run = build_run(tmp_path, *SMALL, "steps=2", "eval.every=2steps")
    seen: list[tuple[bool, bool]] = []

    def note(module: torch.nn.Module, inputs: Any, output: Tensor) -> None:
        seen.append((module.training, output.requires_grad or not torch.is_inference_mode_enabled()))

    run.model.register_forward_hook(note)
    fit(run)
    assert {training for training, _ in seen} == {True, False}
    assert all(training is keeps for training, keeps in seen)


@pytest.mark.parametrize(
    ("info", "size"),
    [
        (DataInfo("image", "classification", input_shape=(3, 32, 32)), 256),
        (DataInfo("image", "classification", input_shape=(3, 224, 224)), 8),
        (DataInfo("features", "regression", input_shape=(100,)), 256),
        (DataInfo("tokens", "language_modelling", context_length=1024), 16),
        (DataInfo("other", "hf"), 8),
    ],
)
def test_evaluation_takes_what_fits_into_memory(info: DataInfo, size: int) -> None:
    section = SimpleNamespace(batch_size=None)
    config = SimpleNamespace(batch_size=8, eval=section)
    run: Any = SimpleNamespace(info=info, config=config, micro_batches=1)
    assert eval_batch_size(run) == size
    config.batch_size = 1000
    assert eval_batch_size(run) == (2000 if info.kind == "tokens" else 1000)
    section.batch_size = 24
    assert eval_batch_size(run) == 24


def test_a_figure_that_no_language_model_has_is_refused_at_once(in_tmp: Path) -> None:
    Path("text.txt").write_text("so it goes. " * 200)
    words = ("data=text_file", "data.path=text.txt", "data.context_length=16", "model=gpt", "steps=5")
    with pytest.raises(ConfigError, match="loss, perplexity") as caught:
        build_run(in_tmp / "a", *words, "stop.metric=accuracy")
    assert (caught.value.code, caught.value.key) == ("C005", "stop.metric")


def test_iterable_data_has_to_say_how_many_classes_it_has(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(Stream, "num_classes")
    assert train("data=custom", "data._target_=toys.Stream", "steps=3", "run.dir=a") == 3
    assert "num_classes" in capsys.readouterr().err


def test_iterable_data_that_ends_early_is_told_of(tmp_path: Path) -> None:
    words = ("data=custom", "data._target_=toys.Stream", "data.num_samples=35", "data.once=true")
    run = build_run(tmp_path, *words, "batch_size=10", "steps=30", "log_every=10")
    with pytest.raises(DataError, match="step 3 of 30"):
        fit(run)
