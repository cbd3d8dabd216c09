"""A composed config checked as a whole: what is refused, with which words, and what comes out typed."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from ptfast.config.schema import FREE_KEYS, Config, changed_keys
from ptfast.config.targets import Target
from ptfast.config.validate import TASKS, check_batch, validate
from ptfast.durations import Duration
from ptfast.errors import ConfigError, render

HERE = __name__
Tree = dict[str, Any]


class Points(Dataset[int]):
    """A data set."""

    def __init__(self, root: str = "data", name: str = "points") -> None:
        self.root, self.name = root, name

    def __getitem__(self, index: int) -> int:
        return index


class Net(torch.nn.Module):
    """A model."""

    def __init__(self, num_classes: int = 2, depth: int = 2) -> None:
        super().__init__()


class Shape:
    """A schedule."""

    def __init__(self, milestones: list[Duration] | None = None) -> None:
        self.milestones = milestones

    def factor(self, clock: Any) -> Any:
        return clock


class Writer:
    """A logger."""

    def __init__(self, folder: str = "log") -> None:
        self.folder = folder

    def log(self, record: Any) -> None:
        """Nothing."""


class Watch:
    """A callback."""

    def __init__(self, every: int = 1) -> None:
        self.every = every

    def on_step(self, run: Any, step: int) -> None:
        """Nothing."""


TREE: Tree = {
    "epochs": 10,
    "steps": None,
    "batch_size": 64,
    "data": {"_target_": f"{HERE}.Points", "root": "data", "val": "10%"},
    "model": {"_target_": f"{HERE}.Net", "depth": 3},
    "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9, "fused": "auto"},
    "schedule": {"_target_": f"{HERE}.Shape", "warmup": "5%"},
    "logger": {"_target_": None},
    "run": {"name": None, "root": "runs"},
    "eval": {"every": "1epochs"},
    "callbacks": [],
    "trust": [],
}


def tree(**changes: Any) -> Tree:
    """`TREE` with values set by dotted key, written with `__` for the dot."""
    changed = copy.deepcopy(TREE)
    for key, value in changes.items():
        *sections, name = key.split("__")
        place = changed
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return changed


def typed(key: str) -> str:
    return "command line"


def in_file(key: str) -> str:
    return f"mine.yaml:{sum(map(ord, key))}"


def check(place: Callable[[str], str] = typed, **changes: Any) -> Config:
    return validate(tree(**changes), place)


def refused(place: Callable[[str], str] = typed, **changes: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        check(place, **changes)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    return caught.value


def test_values_come_out_typed() -> None:
    config = check(epochs=1e3, eval__every="500 steps", stop__patience=3, run__max_time="1h30m", data__val=0)
    assert config.epochs == 1000
    assert isinstance(config.epochs, int)
    assert config.eval.every == Duration(500, "steps")
    assert config.run.max_time == Duration(5400, "seconds")
    assert config.data.val == Duration(0, "samples")
    assert config.data.target == Target(f"{HERE}.Points", {"root": "data"})
    assert config.schedule.warmup == Duration(5, "percent")
    assert config.logger.target is None
    assert config.parallel.timeout.seconds == 600


def test_the_tree_is_not_changed_and_the_config_cannot_be() -> None:
    given = tree(callbacks=[f"{HERE}.Watch"])
    before = copy.deepcopy(given)
    config = validate(given, typed)
    assert given == before
    with pytest.raises(ValueError, match="frozen"):
        config.epochs = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"steps": 100, "epochs": None},
        {"logger": {"_target_": f"{HERE}.Writer", "folder": "x"}},
        {"callbacks": [f"{HERE}.Watch", {"_target_": f"{HERE}.Watch", "every": 5}]},
        {"optimizer": {"_target_": "torch.optim.AdamW", "betas": [0.9, 0.95]}},
        {"schedule__milestones": ["30%", "60%"], "schedule__warmup": 100, "run__max_time": "90s"},
        {"dataloader__workers": 2, "rewrites__channels_last": False, "ema__decay": 0.999},
    ],
)
def test_what_is_written_reads_back_equal(changes: Tree) -> None:
    config = check(**changes)
    again = validate(config.to_tree(), in_file)
    assert again == config
    assert again.to_tree() == config.to_tree()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"optimizer__lrr": 0.1},
            "optimizer.lrr=0.1 (command line): unknown key. Did you mean optimizer.lr?",
        ),
        (
            {"recpie": "resnet_cifar"},
            "recpie=resnet_cifar (command line): unknown key. Did you mean +recipe=resnet_cifar?",
        ),
        ({"epoch": 3}, "epoch=3 (command line): unknown key. Did you mean epochs?"),
        (
            {"optimiser": {"lr": 0.1}},
            "optimiser.lr=0.1 (command line): unknown key. Did you mean optimizer.lr?",
        ),
        ({"eval__evry": 3}, "eval.evry=3 (command line): unknown key. Did you mean eval.every?"),
        ({"momentum": 0.9}, "momentum=0.9 (command line): unknown key. Did you mean optimizer.momentum?"),
        ({"model__weight": "x"}, "model.weight=x (command line): unknown key. Did you mean model.weights?"),
        ({"data__vall": "5%"}, "data.vall=5% (command line): unknown key. Did you mean data.val?"),
        ({"callbacks": [{"_target_": f"{HERE}.Watch", "evry": 2}]}, "Did you mean callbacks.0.every?"),
        ({"logger__folder": "x"}, "logger.folder=x (command line): unknown key."),
        ({"model___recursive_": False}, "model._recursive_=false (command line): unknown key."),
    ],
)
def test_nothing_unknown_is_let_through(changes: Tree, line: str) -> None:
    error = refused(**changes)
    assert error.code == "C002"
    assert line in str(error)


def test_the_line_a_user_sees() -> None:
    error = refused(optimizer__lrr=0.1)
    assert render(error) == (
        "ptfast: error[C002]: optimizer.lrr=0.1 (command line): unknown key. Did you mean optimizer.lr?"
    )


def test_unknown_keys_come_first_and_the_place_is_the_keys_own() -> None:
    error = refused(in_file, epochs=-1, optimizer__lr="abc", saving__kep=3)
    assert (error.code, error.key) == ("C002", "saving.kep")
    assert error.place == in_file("saving.kep")


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("optimizer__lr", "abc", "C004"),
        ("optimizer__lr", "", "C004"),
        ("optimizer__lr", "1e", "C004"),
        ("optimizer__lr", None, "C004"),
        ("optimizer__lr", True, "C004"),
        ("optimizer__lr", [0.1], "C004"),
        ("optimizer__lr", float("nan"), "C005"),
        ("optimizer__lr", float("inf"), "C005"),
        ("optimizer__lr", -1, "C005"),
        ("epochs", 3.5, "C004"),
        ("epochs", True, "C004"),
        ("epochs", "many", "C004"),
        ("epochs", 0, "C005"),
        ("epochs", -1, "C005"),
        ("batch_size", 0, "C005"),
        ("batch_size", None, "C004"),
        ("batch_size", True, "C004"),
        ("seed", -1, "C005"),
        ("seed", 1e30, "C005"),
        ("device", "gpu", "C004"),
        ("log_every", 0, "C005"),
        ("log_every", "5m", "C004"),
        ("eval__every", "-1epochs", "C005"),
        ("eval__every", "1epox", "C004"),
        ("eval", 5, "C004"),
        ("model", "resnet20", "C004"),
        ("stop__patience", 0, "C005"),
        ("run__max_time", "5steps", "C004"),
        ("run__name", True, "C004"),
        ("run__resume", True, "C004"),
        ("data__val", "5epochs", "C004"),
        ("data__val", "120%", "C005"),
        ("data__normalize", "maybe", "C004"),
        ("dataloader__workers", -1, "C005"),
        ("dataloader__workers", "many", "C004"),
        ("dataloader__kind", "wrokers", "C004"),
        ("gradients__clip_norm", 0, "C005"),
        ("gradients__accumulate", 0, "C005"),
        ("parallel__nproc", 1.5, "C004"),
        ("ema__decay", 1.5, "C005"),
        ("ema__decay", 0, "C005"),
        ("ema__decay", float("nan"), "C005"),
        ("rewrites__channels_last", "yes", "C004"),
        ("schedule__warmup", "101%", "C005"),
        ("schedule__warmup", -5, "C005"),
        ("callbacks", 3, "C004"),
        ("callbacks", [3], "C004"),
        ("trust", "pkg", "C004"),
        ("task", "clasification", "C003"),
        ("task", "os.system", "C009"),
        ("data", "???", "C016"),
        ("data__root", "???", "C016"),
        ("model___target_", "???", "C016"),
        ("optimizer___target_", None, "C016"),
        ("model___target_", "resnet", "C009"),
        ("optimizer___target_", "torch.optim.Adamm", "C009"),
        ("optimizer___target_", "os.system", "C009"),
        ("schedule__warmup", "11epochs", "C011"),
        ("schedule__milestones", ["60%", "30%"], "C011"),
        ("schedule__milestones", [60, 30], "C011"),
        ("run__root", "a\nb", "C013"),
        ("trust", ["a/b"], "C013"),
        ("micro_batches", 0, "C005"),
    ],
)
def test_a_bad_value(key: str, value: Any, code: str) -> None:
    error = refused(**{key: value})
    assert error.code == code
    assert error.key is not None
    assert error.key.startswith(key.replace("___", "._").replace("__", "."))


@pytest.mark.parametrize(
    "name",
    [
        "../../x",
        "a/b",
        "a\\b",
        "..",
        ".",
        "",
        "-rf",
        "a\nb",
        "\x1b[31mred",
        "a" * 101,
        " a",
        "a ",
        "a..b",
        "~",
        "$HOME",
    ],
)
def test_an_unsafe_name(name: str) -> None:
    error = refused(run__name=name)
    assert (error.code, error.key) == ("C013", "run.name")
    assert "\x1b" not in str(error)


@pytest.mark.parametrize("name", ["first", "lr=0.1,wd=5e-4", "Größe 3", "v1.2-b_c+d@e", 20240131])
def test_a_safe_name(name: Any) -> None:
    assert check(run__name=name).run.name == str(name)


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
    ],
)
def test_keys_that_contradict_each_other(changes: Tree) -> None:
    assert refused(**changes).code == "C011"


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
        check_batch(*arguments)
    assert caught.value.code == "C010"
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "micro_batches"),
    [((64, None, 1), 1), ((64, None, 2, 4), 8), ((64, 8, 2), 8), ((64, 8, 2, 4), 8)],
)
def test_a_batch_that_divides(arguments: tuple[Any, ...], micro_batches: int) -> None:
    assert check_batch(*arguments) == micro_batches


def test_ranks_that_do_not_divide_the_batch() -> None:
    assert refused(micro_batches=7).code == "C010"
    error = refused(batch_size=7, parallel={"strategy": "ddp", "nproc": 2}, device="cpu")
    assert (error.code, error.key) == ("C010", "batch_size")
    assert check(batch_size=7, parallel={"strategy": "ddp", "nproc": "auto"}).batch_size == 7


@pytest.mark.parametrize(("gpus", "fits"), [(0, False), (2, False), (4, True)])
def test_more_ranks_than_gpus(gpus: int, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    changes = {"device": "cuda", "parallel": {"strategy": "ddp", "nproc": 4}}
    if fits:
        check(**changes)
    else:
        error = refused(**changes)
        assert (error.code, error.key) == ("C012", "parallel.nproc")
        assert f"this machine has {gpus}" in str(error)


def test_compiling_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    check(compile__mode="none")
    error = refused(compile__mode="model", device="cpu")
    assert error.code == "C012"
    assert "Install g++, or use compile=none" in str(error)


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    error = refused(device="cuda")
    assert (error.code, error.key) == ("C012", "device")
    assert "Use device=cpu" in str(error)


def test_float16_needs_cuda() -> None:
    error = refused(precision__mode="amp_fp16", device="cpu")
    assert error.code == "C012"
    assert "needs a CUDA device, not cpu. Use precision=amp" in str(error)
    check(precision__mode="bf16", device="cpu")


def test_the_tasks_are_those_that_can_be_built() -> None:
    from ptfast import tasks

    assert set(TASKS) == {"auto", *tasks.TASKS}
    assert check(task="ptfast.tasks.classification.Classification").task.name.endswith("Classification")


def untrusted(extra_trust: tuple[str, ...] = (), **changes: Any) -> ConfigError | None:
    good = {"data___target_": "torchvision.datasets.FakeData", "model___target_": "torch.nn.Identity"}
    given = tree(**{**good, **changes})
    given["data"].pop("root", None)
    given["model"].pop("depth", None)
    given["schedule"] = {"_target_": "ptfast.schedule.Constant"}
    try:
        validate(given, typed, trusted=False, extra_trust=extra_trust)
    except ConfigError as error:
        return error
    return None


def test_a_file_from_elsewhere_may_name_only_trusted_packages() -> None:
    assert untrusted() is None
    for changes in (
        {"model___target_": "os.system"},
        {"model___target_": f"{HERE}.Net"},
        {"model___target_": f"{HERE}.Net", "trust": [HERE]},
        {"optimizer___target_": "torchvision.datasets.utils.os.system"},
        {"callbacks": [f"{HERE}.Watch"]},
        {"logger": {"_target_": f"{HERE}.Writer"}},
        {"task": f"{HERE}.Net"},
        {"data__transform": {"_target_": "os.system", "command": "true"}},
        {"data__transform": [{"deep": {"_target_": "torch.hub.load"}}]},
    ):
        error = untrusted(**changes)
        assert error is not None, changes
        assert error.code == "C009"
        assert "not trusted" in str(error)


def test_packages_that_the_caller_trusts() -> None:
    assert untrusted((HERE,), model___target_=f"{HERE}.Net") is None


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({}, []),
        ({"optimizer__lr": 0.2, "batch_size": 32}, ["batch_size", "optimizer.lr"]),
        ({"model___target_": "torch.nn.Identity"}, ["model._target_"]),
        (
            {"seed": 5, "epochs": 20, "run__name": "x", "eval__every": 3, "log_every": 7, "device": "cpu"},
            ["seed"],
        ),
        ({"dataloader__workers": 2, "dataloader__last": "drop"}, ["dataloader.last"]),
        ({"parallel": {"strategy": "ddp"}, "logger": {"_target_": f"{HERE}.Writer"}, "saving__keep": 9}, []),
    ],
)
def test_what_changed_since(changes: Tree, keys: list[str]) -> None:
    old, new = check(), check(**changes)
    assert changed_keys(old.to_tree(), new.to_tree()) == keys


def test_a_secret_is_no_change() -> None:
    assert changed_keys({"data": {"api_key": "<secret>", "root": "a"}}, {"data": {"api_key": "x"}}) == [
        "data.root"
    ]


def test_free_keys_exist() -> None:
    for key in FREE_KEYS:
        section, _, name = key.partition(".")
        assert section in Config.model_fields
        assert not name or name in type(getattr(check(), section)).model_fields
