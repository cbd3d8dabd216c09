"""The hot loop: what a step computes, what is logged and evaluated when, and why training ends."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from running import build_run, records, same_bits, summary, train, weights
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

from ptfast.errors import ConfigError, DataError, NumericsError
from ptfast.loading import eval_batch_size
from ptfast.loop import LOOK_S, evaluate, fit
from ptfast.models.mlp import Mlp
from ptfast.optim import start_momentum
from ptfast.precision import build_precision
from ptfast.run import Callback, DataInfo, MicroBatch, Run, StepBatch
from ptfast.tasks.classification import Classification

SMALL = ("model.hidden=[16]", "log_every=5", "saving.every=1000steps", "schedule=constant")


class DoubleMlp(nn.Module):
    """An MLP in float64, where sums in another order agree to 1e-12."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.inner = Mlp(input_shape, num_classes, hidden=[8]).double()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs.double())


class Tagger(nn.Module):
    """One label per token, in float64."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, num_classes, dtype=torch.float64)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.embed(inputs)


def tagged_tokens(num_samples: int = 22) -> TensorDataset:
    """Sequences whose labels are missing in some places, in the first ones everywhere."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(11, (num_samples, 5), generator=generator)
    missing = torch.rand((num_samples, 5), generator=generator) < torch.linspace(1, 0, num_samples)[:, None]
    dataset = TensorDataset(tokens, (tokens % 3).masked_fill(missing, -100))
    dataset.num_classes = 3  # type: ignore[attr-defined]
    return dataset


def blobs(num_samples: int = 50) -> TensorDataset:
    """Two classes that are easy to tell apart."""
    generator = torch.Generator().manual_seed(1)
    targets = torch.arange(num_samples) % 2
    inputs = torch.randn((num_samples, 4), generator=generator) + 3 * targets[:, None]
    return TensorDataset(inputs, targets)


class Exploding(nn.Module):
    """Its loss is not a number from a certain input on."""

    def __init__(self, after: int = 7) -> None:
        super().__init__()
        self.layer, self.after, self.calls = nn.Linear(4, 2), after, 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += self.training
        return self.layer(inputs) * (math.nan if self.calls > self.after else 1.0)


class Stream(IterableDataset[Any]):
    """So many samples, without a length."""

    num_classes = 2

    def __init__(self, num_samples: int = 1000, once: bool = False) -> None:
        self.num_samples, self.once, self.passes = num_samples, once, 0

    def __iter__(self) -> Iterator[Any]:
        # One pass goes to the first sample, which is looked at.
        self.passes += 1
        if self.once and self.passes > 2:
            return
        inputs, targets = blobs().tensors
        for index in range(self.num_samples):
            yield inputs[index % 50], targets[index % 50]


class Recorder(Callback):
    """Notes every event in a list of the class."""

    events: ClassVar[list[tuple[Any, ...]]] = []

    def on_step(self, run: Any, step: int) -> None:
        self.events.append(("step", step))

    def on_evaluation(self, run: Any, step: int, split: str, figures: dict[str, float]) -> None:
        self.events.append((split, step, figures["loss"]))


class Signals(Callback):
    """Sends this process a signal after a step, or in the evaluation after it."""

    def __init__(self, step: int, name: str = "SIGTERM", evaluation: bool = False) -> None:
        self.step, self.number, self.evaluation = step, signal.Signals[name], evaluation

    def on_step(self, run: Any, step: int) -> None:
        if step == self.step and not self.evaluation:
            os.kill(os.getpid(), self.number)

    def on_evaluation(self, run: Any, step: int, split: str, figures: dict[str, float]) -> None:
        if step == self.step and self.evaluation:
            os.kill(os.getpid(), self.number)


class Worse(Callback):
    """Spoils the weights after a step, so that no evaluation gains on the one before."""

    def __init__(self, step: int, by: str = "10") -> None:
        self.step, self.by = step, float(by)

    def on_step(self, run: Any, step: int) -> None:
        if step >= self.step:
            with torch.no_grad():
                next(run.model.parameters()).add_(step * self.by)


def interrupted_blobs(name: str) -> TensorDataset:
    """Data that takes so long to load that a signal comes."""
    os.kill(os.getpid(), signal.Signals[name])
    return blobs()


class Notes:
    """A logger that keeps the config it is told."""

    config: ClassVar[dict[str, Any]] = {}

    def __init__(self, token: str) -> None:
        assert token == "open sesame"

    def open(self, run_dir: Path, config: dict[str, Any]) -> None:
        Notes.config = config

    def log(self, record: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


class Broken(Callback):
    def on_step(self, run: Any, step: int) -> None:
        raise KeyError("mine")


def callback(name: str, /, **keywords: Any) -> str:
    """An argument that names a callback of this file."""
    words = ",".join(f"{key}: {value}" for key, value in keywords.items())
    return f"callbacks=[{{_target_: test_loop.{name}{', ' if words else ''}{words}}}]"


def train_parameters(folder: Path, *words: str) -> dict[str, Tensor]:
    run = build_run(folder, *words)
    assert fit(run) == "finished"
    return {name: value.clone() for name, value in run.model.state_dict().items()}


@pytest.mark.parametrize("micro_batches", [2, 4, 8])
@pytest.mark.parametrize(
    "data",
    [
        # 50 samples of 16 leave a last batch of 2: with 4 micro-batches two shares are empty.
        ("data=custom", "data._target_=test_loop.blobs", "data.val=0", "model._target_=test_loop.DoubleMlp"),
        (
            *("data=custom", "data._target_=test_loop.tagged_tokens", "data.val=0"),
            *("model._target_=test_loop.Tagger", "task=token_classification"),
        ),
    ],
    ids=["samples", "tokens"],
)
def test_accumulation_changes_nothing(tmp_path: Path, data: tuple[str, ...], micro_batches: int) -> None:
    words = (*data, "model=custom", "batch_size=16", "epochs=3", "optimizer=sgd", "schedule=constant")
    words = (*words, "optimizer.lr=0.5", "eval.every=2steps", "log_every=3")
    whole = train_parameters(tmp_path / "1", *words)
    parts = train_parameters(tmp_path / "n", *words, f"micro_batches={micro_batches}")
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=1e-9, atol=1e-9)


def test_tokens_weigh_the_same_wherever_they_stand(tmp_path: Path) -> None:
    """The gradient is that of the mean over all tokens of the step, not of the mean of means."""
    run = build_run(
        tmp_path,
        *("data=custom", "data._target_=test_loop.tagged_tokens", "data.val=0", "task=token_classification"),
        *("model=custom", "model._target_=test_loop.Tagger", "batch_size=22", "micro_batches=11", "steps=1"),
        *("optimizer=sgd", "optimizer.lr=1", "optimizer.momentum=0", "schedule=constant"),
    )
    before = run.model.state_dict()["embed.weight"].clone().requires_grad_()
    tokens, labels = tagged_tokens().tensors
    F.cross_entropy(before[tokens].flatten(0, 1), labels.flatten(), ignore_index=-100).backward()
    fit(run)
    assert before.grad is not None
    torch.testing.assert_close(run.model.state_dict()["embed.weight"], before.detach() - before.grad)


def test_a_stand_in_counts_for_nothing(tmp_path: Path) -> None:
    words = ("data=custom", "data._target_=test_loop.blobs", "data.val=0", "steps=1", "optimizer=sgd")
    run = build_run(tmp_path, *words, "batch_size=50", "micro_batches=2", "schedule=constant")
    other = build_run(tmp_path / "other", *words, "batch_size=50", "micro_batches=2", "schedule=constant")
    (step,) = run.train_loader.steps(0, 1)
    full, (data, _) = step.micro_batches
    stand_in = MicroBatch((data[0] * 1000, data[1]), 0)
    batches = {
        id(run): StepBatch((full, stand_in), full.num_samples),
        id(other): StepBatch((full,), full.num_samples),
    }
    for each in (run, other):
        each.train_loader.steps = lambda first, last, each=each: iter([batches[id(each)]])  # type: ignore[method-assign]
        fit(each)
    assert same_bits(run.model.state_dict(), other.model.state_dict())
    assert run.figures["train"]["loss"] == other.figures["train"]["loss"]


def test_twenty_steps_are_those_of_a_loop_written_by_hand(tmp_path: Path) -> None:
    words = ("steps=20", "batch_size=64", "dataloader.last=drop", "schedule=step", "schedule.every=7steps")
    words = (*words, "optimizer=sgd", "optimizer.fused=false", "gradients.clip_norm=0.5")
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
    assert run.figures["train"]["loss"] == pytest.approx(sum(losses) / 20, rel=1e-6)


def test_lines_are_logged_when_they_are_due(in_tmp: Path) -> None:
    Recorder.events = []
    words = (*SMALL, "steps=23", "eval.every=10steps", "data.val=100samples", callback("Recorder"))
    assert train(*words, "run.dir=a") == 0
    lines = records(Path("a"))
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
    monkeypatch.setattr("ptfast.loop.LOOK_S", LOOK_S * 1e-9)
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
    assert run.figures["train"]["loss"] == pytest.approx(mean, rel=1e-5)


def test_best_follows_the_training_loss_where_nothing_is_held_out(in_tmp: Path) -> None:
    assert train(*SMALL, "steps=20", "data.val=0", "eval.every=10steps", "run.dir=a") == 0
    lines, result = records(Path("a")), summary(Path("a"))
    assert {line["split"] for line in lines} == {"train"}
    means = {10: (lines[0]["loss"] + lines[1]["loss"]) / 2, 20: (lines[2]["loss"] + lines[3]["loss"]) / 2}
    assert result["best_metric"] == "train.loss"
    assert result["best"]["step"] == 20
    assert result["best"]["loss"] == pytest.approx(means[20])
    assert means[20] < means[10]
    assert (Path("a") / "saved" / "best").resolve().name == "step-20"


def test_averaged_weights_are_evaluated_and_put_away_again(tmp_path: Path) -> None:
    words = (*SMALL, "steps=10", "optimizer.lr=0.05", "eval.every=10steps")
    plain, averaged = (build_run(tmp_path / ema, *words, f"ema={ema}") for ema in ("none", "ema"))
    fit(plain)
    fit(averaged)
    assert same_bits(dict(plain.model.state_dict()), dict(averaged.model.state_dict()))
    assert averaged.ema is not None
    assert plain.figures["val"] != averaged.figures["val"]
    averaged.ema.copy_to_model()
    again = evaluate(
        averaged.model,
        averaged.task,
        averaged.eval_loaders["val"],
        device=averaged.device,
        ranks=averaged.ranks,
        precision=build_precision("fp32", averaged.device),
    )
    assert again == averaged.figures["val"]


def test_ranks_evaluate_the_first_ranks_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank averages BatchNorm statistics of its own: those are what must be alike, not the newest."""
    words = ("model=resnet_digits", "model.width=4", "ema.decay=0.9", "steps=3", "data.val=100samples")
    run = build_run(tmp_path, *words, "batch_size=128", "log_every=10")
    sent: list[list[Tensor]] = []

    def note(buffers: list[Tensor], ranks: Any) -> None:
        sent.append([buffer.clone() for buffer in buffers])

    monkeypatch.setattr("ptfast.loop.broadcast_buffers", note)
    fit(run)
    assert run.ema is not None
    newest = [buffer.clone() for buffer in run.model.buffers()]
    run.ema.copy_to_model()
    averaged = list(run.model.buffers())
    assert same_bits(sent[-1], averaged)
    assert not same_bits(newest, averaged)


def test_training_stops_when_nothing_is_gained(in_tmp: Path) -> None:
    words = (*SMALL, "steps=100", "eval.every=2steps", "stop.patience=2", "run.resume=auto", "run.dir=a")
    assert train(*words, callback("Worse", step=5)) == 0
    result = summary(Path("a"))
    assert (result["status"], result["steps"]) == ("stopped", 8)
    assert result["best"]["step"] == 4
    assert "2 evaluations" in result["reason"]
    assert sorted(path.name for path in Path("a/saved").iterdir()) == ["best", "last", "step-4", "step-8"]


def test_not_a_number_is_never_the_best(tmp_path: Path) -> None:
    run = build_run(tmp_path, *SMALL, "steps=6", "eval.every=2steps", "stop.metric=loss", "stop.patience=5")
    losses = iter([math.nan, 2.0, 1.0])
    run.task.figures = lambda loss, values: {"loss": next(losses)}  # type: ignore[method-assign]
    assert fit(run) == "finished"
    assert (run.progress.best_step, run.progress.best_value) == (6, 1.0)


@pytest.mark.parametrize(
    ("words", "mode", "best_step"),
    [
        (("stop.metric=loss",), "min", 6),
        (("stop.metric=loss", "stop.mode=max"), "max", 4),
        (("stop.mode=min",), "min", 2),
        ((), "max", 4),
    ],
)
def test_the_best_is_the_largest_or_the_smallest(
    words: tuple[str, ...], mode: str, best_step: int, tmp_path: Path
) -> None:
    run = build_run(tmp_path, *SMALL, "steps=6", "eval.every=2steps", *words)
    figures = iter([{"loss": 2, "accuracy": 0.1}, {"loss": 3, "accuracy": 0.9}, {"loss": 1, "accuracy": 0.2}])
    run.task.figures = lambda loss, values: next(figures)  # type: ignore[method-assign]
    fit(run)
    assert (run.best_mode, run.progress.best_step) == (mode, best_step)


def test_the_time_given_is_kept_and_the_run_goes_on_later(in_tmp: Path) -> None:
    words = (*SMALL, "steps=20", "run.dir=a", "run.resume=auto")
    assert train(*words, "run.max_time=0.001s") == 0
    result = summary(Path("a"))
    assert (result["status"], result["steps"]) == ("paused", 1)
    assert train(*words) == 0
    assert (summary(Path("a"))["status"], summary(Path("a"))["steps"]) == ("finished", 20)


@pytest.mark.parametrize(
    ("name", "code", "status"),
    [
        ("SIGTERM", 75, "preempted"),
        ("SIGUSR1", 75, "preempted"),
        ("SIGHUP", 75, "preempted"),
        ("SIGINT", 130, "interrupted"),
    ],
)
def test_a_signal_ends_the_run_after_its_step(in_tmp: Path, name: str, code: int, status: str) -> None:
    assert train(*SMALL, "steps=20", "run.dir=a", callback("Signals", step=7, name=name)) == code
    result = summary(Path("a"))
    assert (result["status"], result["steps"], result["reason"]) == (status, 7, name)
    assert (Path("a/saved/last")).resolve().name == "step-7"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 75), ("SIGUSR1", 75), ("SIGINT", 130)])
def test_a_signal_while_the_data_loads_ends_the_run(in_tmp: Path, name: str, code: int) -> None:
    data = ("data=custom", "data._target_=test_loop.interrupted_blobs", f"+data.name={name}")
    assert train(*SMALL, *data, "steps=20", "run.dir=a") == code
    result = summary(Path("a"))
    assert (result["exit_code"], "steps" in result) == (code, False)
    assert result["error"].endswith("before the first step")
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_an_ignored_hang_up_stays_ignored(in_tmp: Path) -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert train(*SMALL, "steps=8", "run.dir=a", callback("Signals", step=7, name="SIGHUP")) == 0
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_a_logger_is_told_no_secret(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "open sesame")
    logger = ("+logger._target_=test_loop.Notes", "+logger.token=${oc.env:MINE}", "run.name=${oc.env:MINE}")
    assert train(*SMALL, *logger, "steps=2", "run.dir=a") == 0
    assert Notes.config["logger"]["token"] == "${oc.env:MINE}"
    assert "sesame" not in str(Notes.config)


def test_the_environment_names_what_was_used(in_tmp: Path) -> None:
    assert train(*SMALL, "steps=2", "run.dir=a", "backend.threads=1") == 0
    environment = json.loads(Path("a/environment.json").read_text())
    assert (environment["device"], environment["threads"], environment["ranks"]) == ("cpu", 1, 1)


def test_a_signal_in_an_evaluation_ends_the_run_soon_after(in_tmp: Path) -> None:
    words = (*SMALL, "steps=20", "eval.every=5steps", "run.dir=a")
    assert train(*words, callback("Signals", step=5, evaluation=True)) == 75
    assert summary(Path("a"))["steps"] <= 6


@pytest.mark.parametrize("step", [4, 8])
def test_an_evaluation_that_is_cut_short_is_made_again(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    words = (*SMALL, "steps=8", "eval.every=4steps", "data.val=600samples", "eval.batch_size=100")
    assert train(*words, "run.dir=whole") == 0
    evaluated, batches = Classification.evaluate, []

    def evaluate_until(self: Classification, *arguments: Any) -> Any:
        batches.append(1)
        if len(batches) == 6 * step // 4 - 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluated(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Classification, "evaluate", evaluate_until)
        assert train(*words, "run.dir=a", "run.resume=auto") == 75
    assert len(batches) == 6 * step // 4 - 3
    assert (summary(Path("a"))["status"], summary(Path("a"))["steps"]) == ("preempted", step)
    assert train(*words, "run.dir=a", "run.resume=auto") == 0
    assert records(Path("a")) == records(Path("whole"))
    assert same_bits(weights(Path("a")), weights(Path("whole")))
    assert (Path("a/saved/best")).resolve().name == (Path("whole/saved/best")).resolve().name


def test_an_evaluation_that_fails_costs_no_training(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> Any:
        raise RuntimeError("out of memory")

    words = (*SMALL, "steps=8", "eval.every=4steps", "run.resume=auto")
    assert train(*words, "run.dir=whole") == 0
    with monkeypatch.context() as patch:
        patch.setattr(Classification, "evaluate", fail)
        assert train(*words, "run.dir=a") == 1
    assert (Path("a/saved/last")).resolve().name == "step-4"
    assert train(*words, "run.dir=a") == 0
    assert records(Path("a")) == records(Path("whole"))


def test_a_signal_in_the_last_step_leaves_the_evaluation_for_later(in_tmp: Path) -> None:
    words = (*SMALL, "steps=6", "run.dir=a", "run.resume=auto")
    assert train(*words, callback("Signals", step=6)) == 75
    assert (summary(Path("a"))["steps"], "val" in summary(Path("a"))) == (6, False)
    assert train(*words, callback("Signals", step=6)) == 0
    assert (summary(Path("a"))["status"], summary(Path("a"))["best"]["step"]) == ("finished", 6)


def test_weights_that_are_not_finite_are_not_saved(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (*SMALL, "steps=20", "saving.every=5steps", "run.dir=a")
    assert train(*words, callback("Worse", step=10, by="'nan'")) == 5
    assert "error[N001]" in capsys.readouterr().err
    assert (Path("a/saved/last")).resolve().name == "step-5"


class Overflowing(nn.Module):
    """Its gradients are not finite in some of its forward passes, counted from 1."""

    def __init__(self, calls: list[int]) -> None:
        super().__init__()
        self.layer, self.calls, self.count = nn.Linear(4, 2), calls, 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.count += self.training
        return self.layer(inputs) * (math.inf if self.training and self.count in self.calls else 1.0)


class Lines(list[dict[str, Any]]):
    """A logger that keeps what it is given."""

    log = list.append


def scaled(folder: Path, calls: list[int], *words: str) -> Run:
    """A run that scales its losses, as fp16 does, with gradients that overflow."""
    data = ("data=custom", "data._target_=test_loop.blobs", "data.val=0", "batch_size=10", "log_every=5")
    model = ("model=custom", "model._target_=test_loop.Overflowing", f"+model.calls={calls}")
    run = build_run(folder, *data, *model, "optimizer=sgd", "schedule=constant", *words)
    run.precision = replace(run.precision, scaler=torch.amp.GradScaler("cpu"))
    start_momentum(run.optimizer)
    run.logger = Lines()
    return run


def test_a_step_that_overflows_is_left_out_and_counted(tmp_path: Path) -> None:
    run = scaled(tmp_path, [7, 8], "steps=15")
    assert fit(run) == "finished"
    lines = run.logger
    assert [line.get("skipped_steps") for line in lines] == [None, 2, None]
    assert all(math.isfinite(line["loss"]) for line in lines)
    assert all(bool(p.isfinite().all()) for p in run.model.parameters())


def test_a_window_of_nothing_but_overflows_has_no_loss(tmp_path: Path) -> None:
    run = scaled(tmp_path, [1, 2, 3, 4, 5], "steps=10")
    assert fit(run) == "finished"
    assert [math.isnan(line["loss"]) for line in run.logger] == [True, False]
    assert run.logger[1]["loss"] < 2


def test_steps_that_overflow_without_end_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(NumericsError, match="in a row"):
        fit(scaled(tmp_path, list(range(1, 100)), "steps=100"))


def test_a_second_ctrl_c_leaves_at_once(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    twice = "callbacks=[{_target_: test_loop.Signals, step: 7, name: SIGINT},"
    twice += "{_target_: test_loop.Signals, step: 7, name: SIGINT}]"
    assert train(*SMALL, "steps=20", "run.dir=a", twice) == 130
    result = summary(Path("a"))
    assert (result["status"], result["exit_code"]) == ("interrupted", 130)
    assert "step 7" in result["error"]
    assert "ptfast: interrupted" in capsys.readouterr().err


def test_a_loss_that_is_not_finite_ends_the_run(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("data=custom", "data._target_=test_loop.blobs", "data.val=0", "batch_size=10", "steps=100")
    words = (*words, "model=custom", "model._target_=test_loop.Exploding", "log_every=5", "run.dir=a")
    assert train(*words) == 5
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert "error[N001]" in line
    assert "nan" in line
    assert "step 10" in line
    assert "optimizer.lr" in line
    assert (summary(Path("a"))["status"], summary(Path("a"))["exit_code"]) == ("failed", 5)
    assert [record["step"] for record in records(Path("a"))] == [5]


def test_the_loss_is_checked_where_it_is_not_logged(tmp_path: Path) -> None:
    words = ("data=custom", "data._target_=test_loop.blobs", "data.val=0", "batch_size=10", "steps=10")
    run = build_run(tmp_path, *words, "optimizer=sgd", "optimizer.lr=1e30", "log_every=1000")
    with pytest.raises(NumericsError, match=r"is inf|is nan"):
        fit(run)


def test_an_error_in_a_callback_names_its_place(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(*SMALL, "steps=5", "run.dir=a", callback("Broken")) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert "KeyError (test_loop.py:" in line
    assert summary(Path("a"))["status"] == "failed"


def test_iterable_data_trains_for_so_many_steps(in_tmp: Path) -> None:
    words = ("data=custom", "data._target_=test_loop.Stream", "batch_size=10", "log_every=10", "run.dir=a")
    assert train(*words, "steps=30") == 0
    result = summary(Path("a"))
    assert (result["steps"], result["samples"]) == (30, 300)
    assert result["best_metric"] == "train.loss"


def test_iterable_data_has_no_other_loader(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("data=custom", "data._target_=test_loop.Stream", "batch_size=10", "steps=3", "run.dir=a")
    assert train(*words, "dataloader.kind=workers") == 2
    assert "error[C011]: dataloader.kind=workers (command line)" in capsys.readouterr().err


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
    assert eval_batch_size(info, 8) == size
    assert eval_batch_size(info, 1000) == (2000 if info.kind == "tokens" else 1000)


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
    assert train("data=custom", "data._target_=test_loop.Stream", "steps=3", "run.dir=a") == 3
    assert "num_classes" in capsys.readouterr().err


def test_iterable_data_that_ends_early_is_told_of(tmp_path: Path) -> None:
    words = ("data=custom", "data._target_=test_loop.Stream", "data.num_samples=35", "data.once=true")
    run = build_run(tmp_path, *words, "batch_size=10", "steps=30", "log_every=10")
    with pytest.raises(DataError, match="step 3 of 30"):
        fit(run)
