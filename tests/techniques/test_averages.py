"""Averages of weights against torch's own, evaluated beside the raw ones and put away again; views."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from running import build_run, records, same_bits, summary, train, training_state
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn, update_bn

from ptfast.cli import command_line
from ptfast.core.errors import ConfigError, SavedStateError
from ptfast.core.plain_display import Display
from ptfast.core.protocols import DataInfo
from ptfast.run import Run
from ptfast.techniques.ema.weight_averages import MovingAverage, Swa
from ptfast.training.evaluate import TtaModel, check_tta, evaluate
from ptfast.training.fit import fit
from ptfast.training.loop.step import Trainer

SMALL = ("model.hidden=[16]", "batch_size=64", "log_every=5")
CONVOLUTIONS = ("model=resnet_digits", "model.width=4", "batch_size=128", "optimizer.lr=0.05")


def conv_net(groups: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(4, 8, 3, groups=groups), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 3))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 4, 3, 3)).square().sum().backward()
    optimizer.step()


def test_equals_torchs_averaged_model():
    model = conv_net()
    ema, reference = (
        MovingAverage(model, 0.9),
        AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(5):
        train_step(model, optimizer)
        ema.update(1)
        reference.update_parameters(model)
    with ema.swapped():
        for ours, theirs in zip(model.parameters(), reference.module.parameters(), strict=True):
            assert torch.equal(ours, theirs)
        torch.testing.assert_close(model[1].running_var, reference.module[1].running_var)


@pytest.mark.parametrize("fp16", [False, True])
def test_the_decay_ramps_as_in_timm(fp16: bool) -> None:
    model = conv_net()
    ema, average = MovingAverage(model, 0.8, warmup=True), model[3].weight.detach().clone()
    optimizer, shares = torch.optim.SGD(model.parameters(), lr=0.01), []
    for step in range(1, 21):
        train_step(model, optimizer)
        ema.update(1, torch.tensor(False) if fp16 else None)
        # ModelEmaV3.get_decay with use_warmup, warmup_gamma 1 and warmup_power 2/3.
        shares.append(min(1 - (1 + (step - 1) / 1.0) ** -(2 / 3), 0.8))
        average.lerp_(model[3].weight.detach(), 1 - shares[-1])
        torch.testing.assert_close(ema.state_dict()["averages"]["3.weight"], average, rtol=1e-5, atol=1e-7)
    assert shares[0] == 0
    assert 0.79 < shares[10] < shares[11] == 0.8


@pytest.mark.parametrize("resumed", [1, 4])
@pytest.mark.parametrize("words", [(), ("precision=amp_fp16", "gradients.accumulate=2")])
def test_a_ramp_that_was_killed_ends_with_the_same_bits(
    in_tmp: Path, words: tuple[str, ...], resumed: int
) -> None:
    rhythm = ("model.hidden=[16]", "batch_size=64", "saving.every=1steps", "saving.keep=20", "steps=8")
    words = (*rhythm, *words, "ema=ema", "ema.warmup=true", "eval.every=2steps")
    assert train(*words, "run.dir=whole") == 0
    assert train(*words, f"run.resume=whole/saved/step-{resumed}", "run.dir=again") == 0
    assert same_bits(training_state(Path("again")), training_state(Path("whole")))
    assert training_state(Path("whole"))["ema"]["updates"] == 8


def test_metrics_say_whose_weights_they_are(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("model.hidden=[16]", "batch_size=64", "log_every=5steps", "steps=10", "eval.every=5steps")
    assert train(*words, "ema=ema", "run.dir=averaged") == 0
    assert "(averaged weights)" in capsys.readouterr().out
    assert {line.get("weights") for line in records(Path("averaged")) if line["split"] == "val"} == {
        "averaged"
    }
    assert summary(Path("averaged"))["weights"] == "averaged"
    assert "val, averaged weights" in Path("averaged/report.html").read_text()
    assert command_line.run(["eval", "averaged"]) == 0
    assert '"weights": "averaged"' in capsys.readouterr().out
    assert train(*words, "ema=swa", "ema.swa_start=10steps", "ema.swa_every=10steps", "run.dir=swa") == 0
    by_step = {line["step"]: line for line in records(Path("swa")) if line["split"] == "val"}
    assert [by_step[step]["weights"] for step in (5, 10)] == ["last", "averaged"]
    assert train(*words, "run.dir=plain") == 0
    assert "weights" not in summary(Path("plain"))


@pytest.mark.parametrize("inference", [False, True])
def test_swapping_is_undone_bit_for_bit(inference):
    model = conv_net()
    ema, optimizer = MovingAverage(model, 0.5), torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        train_step(model, optimizer)
        ema.update(1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    addresses = [p.data_ptr() for p in model.parameters()]
    with torch.inference_mode(inference), ema.swapped():
        assert not torch.equal(model[0].weight, before["0.weight"])
        model(torch.randn(4, 4, 3, 3))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert addresses == [p.data_ptr() for p in model.parameters()]
    train_step(model, optimizer)


def test_weights_come_back_after_an_error():
    model = conv_net()
    ema = MovingAverage(model, 0.5)
    ema.update(1)
    with torch.no_grad():
        model[3].weight.fill_(7)
    with pytest.raises(KeyError), ema.swapped():
        raise KeyError
    assert (model[3].weight == 7).all()


def test_state_goes_on_where_it_was():
    model = conv_net()
    ema, optimizer = MovingAverage(model, 0.9), torch.optim.SGD(model.parameters(), lr=0.01)
    train_step(model, optimizer)
    ema.update(1)
    other = MovingAverage(model, 0.9)
    other.load_state_dict(
        {**ema.state_dict(), "averages": {n: t.clone() for n, t in ema.state_dict()["averages"].items()}}
    )
    train_step(model, optimizer)
    for each in (ema, other):
        each.update(1)
    for name, average in ema.state_dict()["averages"].items():
        assert torch.equal(average, other.state_dict()["averages"][name])
    assert other.state_dict()["updates"] == 2


def test_state_of_another_model():
    for other in (nn.Linear(2, 2), conv_net(groups=2)):
        with pytest.raises(SavedStateError, match=r"another model: \S+ differs") as caught:
            MovingAverage(other, 0.9).load_state_dict(MovingAverage(conv_net(), 0.9).state_dict())
        assert caught.value.code == "S002"


def test_what_does_not_train_is_left_alone():
    model = conv_net()
    model[0].requires_grad_(False)
    assert set(MovingAverage(model, 0.9).state_dict()["averages"]) == {
        "1.weight",
        "1.bias",
        "1.running_mean",
        "1.running_var",
        "3.weight",
        "3.bias",
    }


def test_swa_equals_torchs_averaged_model_and_update_bn():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 3))
    batches = [torch.randn(6, 4, 3, 3) for _ in range(4)]

    def forward(watched: Any) -> None:
        for images in batches:
            model(images)

    swa = Swa(model, [4, 6, 8], forward)
    reference = AveragedModel(model, multi_avg_fn=get_swa_multi_avg_fn())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    swa.finalize()
    assert not swa.ready
    for step in range(1, 10):
        train_step(model, optimizer)
        swa.update(step)
        if step in (4, 6, 8):
            reference.update_parameters(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.train()
    swa.finalize()
    assert model.training
    assert model[1].momentum == 0.1
    assert same_bits(dict(model.state_dict()), before)
    update_bn(batches, reference)
    expected = {name.removeprefix("module."): value for name, value in reference.state_dict().items()}
    for name, average in swa.state_dict()["averages"].items():
        torch.testing.assert_close(average, expected[name], rtol=1e-6, atol=1e-7)
    assert swa.state_dict()["updates"] == 3


def test_statistics_are_measured_without_dropout():
    """As they are used: dropout raises the variance that the layers behind it see."""
    torch.manual_seed(0)
    inputs = torch.randn(4096, 8)
    model = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(8))
    swa = Swa(model, [1], lambda watched: model(inputs))
    swa.update(1)
    swa.finalize()
    torch.testing.assert_close(swa.state_dict()["averages"]["1.running_var"], inputs.var(0))


def test_a_step_that_was_left_out_does_not_count():
    model, plain = conv_net(), conv_net()
    left_out, kept = torch.tensor(True), torch.tensor(False)
    ema, reference = MovingAverage(model, 0.9), MovingAverage(plain, 0.9)
    ema.update(1, left_out)
    assert not ema.ready
    for step, skipped in enumerate((kept, left_out, kept, left_out, kept), 1):
        with torch.no_grad():
            if not skipped:
                for each in (*model.parameters(), *plain.parameters()):
                    each.add_(0.1)
        ema.update(step, skipped)
        if not skipped:
            reference.update(step)
    ours, theirs = ema.state_dict(), reference.state_dict()
    assert ours["updates"] == theirs["updates"] == 3
    for name, average in theirs["averages"].items():
        torch.testing.assert_close(ours["averages"][name], average)


def test_the_trainer_says_which_fp16_steps_were_left_out(tmp_path: Path) -> None:
    run = build_run(tmp_path, *SMALL, "precision=amp_fp16", "ema.decay=0.5", "steps=3")
    trainer, scaler, batches = Trainer(run), run.precision.scaler, run.train_loader.steps(0, 3)
    updates, averages = [], []
    assert run.ema is not None
    for step, scale in enumerate((2.0**40, 2.0**10, 2.0**40), 1):
        scaler.load_state_dict({**scaler.state_dict(), "scale": scale})
        trainer.update.scale = scaler.scale(torch.ones(()))
        trainer.train(batches, step)
        state = run.ema.state_dict()
        updates.append(state["updates"])
        averages.append({name: value.clone() for name, value in state["averages"].items()})
    assert updates == [0, 1, 1]
    assert same_bits(averages[1], averages[2])


def test_averaged_weights_are_evaluated_beside_the_raw_ones_and_put_away_again(tmp_path: Path) -> None:
    words = (*SMALL, "steps=10", "optimizer.lr=0.05", "eval.every=10steps")
    plain, averaged = (build_run(tmp_path / ema, *words, f"ema={ema}") for ema in ("none", "ema"))
    fit(plain)
    fit(averaged)
    assert same_bits(dict(plain.model.state_dict()), dict(averaged.model.state_dict()))
    figures = averaged.metrics["val"]
    assert {name.removeprefix("raw_"): figures[name] for name in figures if "raw" in name} == plain.metrics[
        "val"
    ]
    assert averaged.ema is not None
    averaged.ema.copy_to_model()
    averaged.ema = None
    again = evaluated(averaged)
    assert again != plain.metrics["val"]
    assert again == {name: figures[name] for name in figures if "raw" not in name}


def evaluated(run: Run) -> dict[str, float]:
    return evaluate(run, run.eval_loaders["val"])


def test_swa_from_training_to_a_saved_state(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Raw figures before there is an average, both afterwards; `ptfast eval` repeats them."""
    words = (*CONVOLUTIONS, "ema=swa", "ema.swa_start=50%", "ema.swa_every=2steps", "eval.every=4steps")
    assert train(*words, "steps=12", "run.dir=run") == 0
    assert "4 steps from 6 to 12, BatchNorm measured" in capsys.readouterr().out
    by_step = {each["step"]: each for each in records(Path("run")) if each["split"] == "val"}
    assert "raw_loss" not in by_step[4]
    assert by_step[12]["raw_loss"] != by_step[12]["loss"]
    assert command_line.run(["eval", "run"]) == 0
    out = capsys.readouterr().out
    for name, value in summary(Path("run"))["val"].items():
        assert f'"{name}": {value}' in out


def test_a_state_with_frozen_weights_is_evaluated(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frozen = 'optimizer.groups=[{match: "*.bias", trains_until: 0}]'
    assert train(*SMALL, "steps=4", "ema=ema", frozen, "run.dir=run") == 0
    capsys.readouterr()
    assert command_line.run(["eval", "run"]) == 0
    out = capsys.readouterr().out
    for name, value in summary(Path("run"))["val"].items():
        assert f'"{name}": {value}' in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("ema=swa", "ema.decay=0.9"), "ema.swa_start=75%"),
        (("ema=swa", "steps=20"), "no step from 15 to 20 is averaged by ema.swa_every=1epochs"),
        (("eval.flip=true", "data=text_file", "data.path=some.txt", "model=gpt"), "eval.flip=true"),
    ],
)
def test_refused(words: tuple[str, ...], says: str, in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("some.txt").write_text("to be or not to be, that is the question. " * 100)
    assert train(*words) == 2
    err = capsys.readouterr().err
    assert "error[C011]" in err
    assert says in err


def test_a_percentage_of_the_run_cannot_be_extended(tmp_path: Path) -> None:
    for start, extendable in (("50%", False), ("1epochs", True)):
        run = build_run(tmp_path / start, *SMALL, "epochs=2", "ema=swa", f"ema.swa_start={start}")
        assert run.ema is not None
        assert run.ema.extendable is extendable


def test_flip_averages_the_outputs_for_an_image_and_its_mirror_image():
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5))
    model.eval()
    images = torch.randn(3, 1, 3, 4)
    both = TtaModel(model, flip=True)
    assert not both.training
    mirrored = images[..., [3, 2, 1, 0]]
    torch.testing.assert_close(both(images), (model(images) + model(mirrored)) / 2)
    torch.testing.assert_close(both(images), both(mirrored))


@pytest.mark.parametrize("flip", [False, True])
def test_shifted_views_weigh_as_in_airbench(flip: bool) -> None:
    """Half for the image where it is; what comes into view is reflected."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(20, 5)).eval()
    images = torch.arange(40.0).reshape(2, 1, 4, 5) / 40
    up = images[:, :, [1, 2, 3, 2]][..., [1, 2, 3, 4, 3]]
    down = images[:, :, [1, 0, 1, 2]][..., [1, 0, 1, 2, 3]]

    def looked(view: torch.Tensor) -> torch.Tensor:
        return (model(view) + model(view[..., [4, 3, 2, 1, 0]])) / 2 if flip else model(view)

    expected = 0.5 * looked(images) + 0.25 * looked(up) + 0.25 * looked(down)
    torch.testing.assert_close(TtaModel(model, flip=flip, shift=1)(images), expected)


def test_flip_in_evaluation_leaves_training_alone(tmp_path: Path) -> None:
    words = (*SMALL, "steps=6", "eval.every=6steps")
    plain, flipped = (build_run(tmp_path / on, *words, f"eval.flip={on}") for on in ("false", "true"))
    for run in (plain, flipped):
        fit(run)
    assert same_bits(dict(plain.model.state_dict()), dict(flipped.model.state_dict()))
    assert flipped.metrics["val"]["loss"] != plain.metrics["val"]["loss"]
    plain.evaluation = flipped.evaluation
    assert flipped.metrics["val"] == evaluated(plain)


def test_views_need_images() -> None:
    check_tta(False, 0, DataInfo(kind="text", task="classification"), None)
    with pytest.raises(ConfigError, match=r"eval.flip=true: only images can be flipped"):
        check_tta(True, 0, DataInfo(kind="features", task="classification"), None)
    small = DataInfo(kind="image", task="classification", input_shape=(1, 8, 8))
    check_tta(False, 7, small, None)
    with pytest.raises(ConfigError, match=r"eval.shift=8: the images have 8 x 8 pixels"):
        check_tta(False, 8, small, None)


@pytest.mark.parametrize(
    ("steps", "decay", "said"),
    [
        (100, 0.9999, ["averages over 10,000 steps, but the run has 100", "Set ema.decay=0.9"]),
        (2345, 0.9999, ["averages over 10,000 steps, but the run has 2,345", "Set ema.decay=0.99"]),
        (50, 0.99, ["averages over 100 steps, but the run has 50", "Use ema=none"]),
        (100, 0.99, None),
    ],
)
def test_an_average_that_outlasts_the_run_is_warned_of_unless_it_warms_up(
    steps, decay, said, tmp_path, monkeypatch
):
    warned: list[str] = []
    monkeypatch.setattr(Display, "warn", lambda _, text: warned.append(text))
    words = ("data=custom", "data._target_=toys.blobs", "batch_size=5", "model=mlp", "model.hidden=[4]")
    build_run(tmp_path / "a", *words, f"steps={steps}", f"ema.decay={decay}", "ema.warmup=true")
    assert not warned
    build_run(tmp_path, *words, f"steps={steps}", f"ema.decay={decay}")
    about = [text for text in warned if text.startswith("ema.decay=")]
    assert len(about) == (said is not None)
    assert all(text.endswith(f"{said[1]}, or ema.warmup=true") and said[0] in text for text in about)
