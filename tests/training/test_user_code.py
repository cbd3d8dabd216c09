"""Faults of a user's own model, loss, task or callback are reported in a line that names it."""

from __future__ import annotations

from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from misfits import LOSSES, MODELS, TASKS, Loss, Net, Task
from running import build_run, summary, train
from toys import SMALL

from ptfast.cli import command_line
from ptfast.core.errors import ConfigError
from ptfast.core.protocols import DataInfo
from ptfast.run import Run
from ptfast.tasks import build_task
from ptfast.training.loop.first_step import FirstStep, with_output_check
from ptfast.training.user_code import failure

NET = ("model=custom", "model._target_=misfits.Net", "log_every=5", "saving.every=1000steps")
HOW = {
    "tuple": "returns a tuple of 2, the first the str",
    "dict": "returns a dict with the keys scores",
    "None": "returns None",
    "scalar": "returns a Tensor of float32 ()",
    "other batch": "returns a Tensor of float32 (7, 10)",
    "fewer classes": "returns a Tensor of float32 (64, 5)",
    "classes": "returns a Tensor of int64 (64)",
    "string": "returns the str 'logits'",
}
IN_STEPS = ("nan", "changed", "leaves", "talks", "silent")
"""Faults that no forward pass alone shows."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return build_run(tmp_path_factory.mktemp("run"), *SMALL, "steps=1")


def refused(run: Run, **changes: Any) -> str:
    """The message about the first forward pass of a run with other parts."""
    changed = copy(run)
    vars(changed).update(changes)
    batch = next(run.train_loader.steps(0, 1))
    with pytest.raises(ConfigError) as caught:
        FirstStep(changed).loss(changed.model, *batch.micro_batches[0])
    assert (caught.value.code, caught.value.exit_code) == ("C017", 2)
    return str(caught.value)


@pytest.mark.parametrize("how", [name for name in MODELS if name not in IN_STEPS])
def test_outputs_that_no_task_takes_are_told(run: Run, how: str) -> None:
    text = refused(run, model=Net(how))
    assert text.startswith("model._target_=misfits.Net: ")
    assert HOW.get(how, "") in text
    expected = {
        "detached": "without a gradient",
        "raises": "forward raises KeyError (misfits.py:",
        "wrong shape": "cannot be multiplied",
    }
    assert expected.get(how, "Classification needs floats of shape (64, 10)") in text


@pytest.mark.parametrize("how", [name for name in LOSSES if name != "not finite"])
def test_what_is_no_loss_is_told(run: Run, how: str) -> None:
    text = refused(run, task=build_task("classification", run.info, loss=Loss(how)))
    assert text.startswith("task.loss._target_=misfits.Loss: ")
    expected = {
        "raises": "ZeroDivisionError (misfits.py:",
        "detached": "without a gradient",
        "whole number": "a Tensor of int64 () without a gradient",
        "other batch": "gives a Tensor of float32 (3) for targets of shape (64)",
    }
    assert expected.get(how, "where a Tensor is expected: their mean loss, (), or the loss of each") in text


@pytest.mark.parametrize("how", TASKS)
def test_what_a_task_of_ones_own_gives_is_told(run: Run, how: str) -> None:
    text = refused(run, task=Task(None, how))
    assert text.startswith("task=misfits.Task: ")
    said = {"raises": "KeyError (misfits.py:", "float": "returns the float"}
    assert said.get(how, "loss returns a ") in text


def test_a_model_of_ptfasts_that_does_not_fit_the_data_is_told(run: Run) -> None:
    class Mlp(type(run.model)):  # type: ignore[misc] - its module is what counts
        pass

    Mlp.__module__ = type(run.model).__module__
    text = refused(run, model=Mlp((1, 4, 4), 10))
    assert "ptfast.models.mlp" in text
    assert "given a Tensor of float32 (64, 1, 8, 8)" in text


@pytest.mark.parametrize(
    ("task", "info", "targets", "fits", "misfits"),
    [
        ("classification", DataInfo("image", "", num_classes=3), (5,), [(5, 3), (5, 9)], [(5, 2), (5,)]),
        ("regression", DataInfo("features", ""), (5,), [(5,), (5, 1)], [(5, 2), (1,)]),
        ("regression", DataInfo("features", ""), (5, 2), [(5, 2)], [(5,), (5, 1)]),
        ("multilabel", DataInfo("image", "", num_classes=3), (5, 3), [(5, 3)], [(5, 4), (5,)]),
        (
            "token_classification",
            DataInfo("other", "", num_classes=3),
            (5, 7),
            [(5, 7, 3)],
            [(5, 3), (35, 3)],
        ),
        (
            "language_modelling",
            DataInfo("tokens", "", vocab_size=9),
            (5, 7),
            [(5, 7, 9)],
            [(5, 7, 8), (5, 9)],
        ),
    ],
)
def test_every_task_says_what_fits(
    task: str, info: DataInfo, targets: tuple[int, ...], fits: list[Any], misfits: list[Any]
) -> None:
    built, data = build_task(task, info), (torch.ones(5, 4), torch.zeros(targets, dtype=torch.int64))
    for shape, fine in [*((shape, True) for shape in fits), *((shape, False) for shape in misfits)]:
        seen = with_output_check(lambda inputs, shape=shape: torch.ones(shape), None, built, data)
        if fine:
            assert seen(data[0]).shape == shape
        else:
            with pytest.raises(ConfigError, match="needs floats"):
                seen(data[0])


def test_a_loss_of_ones_own_takes_what_it_likes(run: Run) -> None:
    """More or fewer outputs than classes, and where nothing else looks at them, anything."""
    data = (torch.ones(5, 4), torch.zeros(5, dtype=torch.int64))
    own = build_task("classification", run.info, loss=torch.nn.CrossEntropyLoss())
    assert with_output_check(lambda inputs: torch.ones(5, 1), None, own, data)(data[0]).shape == (5, 1)
    hf = build_task("hf", run.info)
    with pytest.raises(ConfigError, match="needs a mapping, object or tuple with loss and logits"):
        with_output_check(lambda inputs: torch.ones(5, 10), None, hf, data)(data[0])


COMMANDS = {
    "a tuple": (
        (*NET, "model.how=tuple"),
        "model._target_=misfits.Net (command line): forward returns a tuple",
    ),
    "not a number": ((*NET, "model.how=nan"), "returns outputs that are not finite in the first step"),
    "a constructor that exits": ((*NET, "model.how=exits"), "constructor raises SystemExit (misfits.py:"),
    "a constructor": ((*NET, "model.how=constructor"), "constructor raises OSError (misfits.py:"),
    "changed in place": ((*NET, "model.how=changed"), "the backward pass raises RuntimeError"),
    "kept over steps": ((*NET, "model.how=kept"), "backward through the graph a second time"),
    "an exit": ((*NET, "model.how=leaves"), "forward raises SystemExit (misfits.py:"),
    "evaluation": ((*NET, "'model.how=evaluates otherwise'"), "in evaluation, but Classification"),
    "a float": (("task.loss._target_=misfits.Loss", "task.loss.how=float"), "gives the float"),
    "an infinite loss": (
        ("task.loss._target_=misfits.Loss", "'task.loss.how=not finite'"),
        "not finite, although",
    ),
    "one argument": (("task.loss._target_=misfits.of_outputs",), "cannot be called with outputs and targets"),
    "on_start": (("callbacks=[{_target_: misfits.Hooked, how: on_start}]",), "on_start raises KeyError (mis"),
    "on_step": (
        ("callbacks=[{_target_: misfits.Hooked, how: on_step}]",),
        "callbacks.0._target_=misfits.Hoo",
    ),
    "a state": (
        ("callbacks=[{_target_: misfits.Hooked, how: state_dict}]",),
        "state_dict returns a PosixPath",
    ),
}


@pytest.mark.parametrize(("words", "said"), COMMANDS.values(), ids=COMMANDS)
def test_no_run_is_left_of_parts_that_cannot_train(
    in_tmp: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    words = tuple(word.strip("'") for word in words)
    assert command_line.run(["train", "steps=3", "preset=plain", *words]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert "error[C017]: " in line
    assert said in line
    assert not Path("runs").exists()


def test_samples_that_are_not_finite_are_the_datas_fault(
    in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("data=custom", "data._target_=misfits.unknown", "data.normalize=false", "batch_size=20")
    assert train(*words, "steps=3") == 3
    assert "samples contain numbers that are not finite (" in capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        ((*NET, "model.how=late"), 6),
        (("callbacks=[{_target_: misfits.Hooked, how: on_evaluation}]",), 6),
        (("callbacks=[{_target_: misfits.Hooked, how: figure}]",), 6),
    ],
)
def test_a_run_that_fails_later_keeps_what_it_saved(
    in_tmp: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], steps: int
) -> None:
    words = (*words, "steps=12", "saving.every=6steps", "eval.every=6steps", "run.dir=a")
    assert train(*words) == 2
    error = capsys.readouterr().err
    assert "error[C017]: " in error
    assert "misfits.py:" in error or "adds a Tensor of float32 (2) as the metric mine" in error
    assert (Path("a/saved/last")).resolve().name == f"step-{steps}"
    result = summary(Path("a"))
    assert (result["status"], result["exit_code"]) == ("failed", 2)
    assert "misfits." in result["error"]


LATER = {
    "lazy": ((*NET, "model.how=unused lazy"), "has lazy layers that its forward does not use: spare.weight"),
    "None": (
        (*NET, "model.how='None'", "model.at=3"),
        "returns None, but Classification needs floats of shape",
    ),
    "shape": ((*NET, "model.how=fewer classes", "model.at=3"), "(64, 5), but Classification needs floats of"),
    "text": ((*NET, "model.how=talks", "model.at=3"), "raises ValueError (misfits.py:", "word word"),
    "no text": ((*NET, "model.how=silent"), "raises SpeechlessError (misfits.py:"),
    "label": (("data=custom", "data._target_=misfits.LateFloat"), "D004", "of float32 (64): RuntimeError"),
    "figure": (("callbacks=[{_target_: misfits.Hooked, how: huge}]",), "adds the int 1000000"),
    "metric": (("metrics.own._target_=misfits.Measured",), "metrics.own._target_=misfits.Measured", "None"),
    "word": (
        ("metrics.own._target_=misfits.Measured", "metrics.own.what=good"),
        "gives the str 'good', where",
    ),
    "package": (("metrics.own._target_=misfits.Measured", "metrics.own.what=import"), "ModuleNotFoundError"),
    "function": (("metrics.own._target_=misfits.measure",), "misfits.measure (command line): update raises"),
}


@pytest.mark.parametrize(("words", "says"), [(each[0], each[1:]) for each in LATER.values()], ids=LATER)
def test_no_fault_of_a_users_part_is_a_bug(
    in_tmp: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: tuple[str, ...]
) -> None:
    words = ("steps=4", "eval.every=4steps", "saving.every=1steps", "run.dir=a", *words)
    assert train(*words) == (3 if "D004" in says else 2)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert "error[C017]: " in line or "error[D004]: " in line
    assert all(text in line for text in says), line
    assert sum(file.stat().st_size for file in Path().glob("a/*.[jh]*")) + len(line) < 100_000


def test_an_evaluation_that_fails_names_the_model(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(*NET, "model.how=right", "steps=2", "run.dir=a") == 0
    path = Path("a/config.yaml")
    path.write_text(path.read_text().replace("how: right", "how: tuple"))
    assert command_line.run(["eval", "a", "trust=[misfits]"]) == 2
    assert "error[C017]: model._target_=misfits.Net" in capsys.readouterr().err


def test_a_bug_of_ours_is_called_one(run: Run) -> None:
    with pytest.raises(ValueError, match="parameter groups") as caught:
        run.optimizer.load_state_dict({"state": {}, "param_groups": [1, 2]})
    assert failure(caught.value, run) is None
    assert failure(ConfigError("C005", "said"), run) is None
