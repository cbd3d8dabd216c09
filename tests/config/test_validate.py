"""A composed config checked as a whole: what is refused, with which words, and what comes out typed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from config_trees import HERE, Tree, check, in_file, refused, to_tree, tree, typed

from ptfast.config.checks.validate import TASKS, validate
from ptfast.config.schema import FREE_KEYS, Config, changed_keys
from ptfast.core.durations import Duration
from ptfast.core.errors import error_line
from ptfast.core.sections.targets import Target

NUMBERS = ("optimizer__lr", "epochs", "eval__every", "run__max_time")
"""Keys of a number, a whole number, a duration and a wall time."""


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


def test_numbers_are_read_from_text_in_one_way() -> None:
    config = check(**dict.fromkeys(NUMBERS, " +1_0 "))
    assert (config.epochs, config.optimizer.target.kwargs["lr"]) == (10, 10)
    assert config.eval.every.value == 10
    assert config.run.max_time == Duration(10, "seconds")


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
    again = validate(to_tree(config), in_file)
    assert again == config
    assert to_tree(again) == to_tree(config)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"optimizer__lrr": 0.1},
            "optimizer.lrr=0.1 (command line): unknown key. Did you mean optimizer.lr?",
        ),
        (
            {"recpie": "resnet_cifar"},
            "recpie=resnet_cifar (command line): unknown key. Did you mean recipe=resnet_cifar?",
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
    assert error_line(error) == (
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
        *((key, text, "C004") for key in NUMBERS for text in ("\uff13", "3_", "3__0", "0x3", "\u0663")),
        *((key, huge, "C005") for key in NUMBERS for huge in (10**400, "1" * 5000, "1e400")),
        ("eval__every", "\uff13epochs", "C004"),
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


def test_the_tasks_are_those_that_can_be_built() -> None:
    from ptfast.core.protocols import TASKS as BUILT_IN

    assert set(TASKS) == {"auto", *BUILT_IN}
    assert check(task="ptfast.tasks.classification.Classification").task.name.endswith("Classification")


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
        ({"dataloader__workers": 2, "dataloader__drop_last": True}, ["dataloader.drop_last"]),
        ({"parallel": {"strategy": "ddp"}, "logger": {"_target_": f"{HERE}.Writer"}, "saving__keep": 9}, []),
    ],
)
def test_what_changed_since(changes: Tree, keys: list[str]) -> None:
    old, new = check(), check(**changes)
    assert changed_keys(to_tree(old), to_tree(new)) == keys


def test_a_secret_is_no_change() -> None:
    assert changed_keys({"data": {"api_key": "<secret>", "root": "a"}}, {"data": {"api_key": "x"}}) == [
        "data.root"
    ]


def test_free_keys_exist() -> None:
    for key in FREE_KEYS:
        section, _, name = key.partition(".")
        assert section in Config.model_fields
        assert not name or name in type(getattr(check(), section)).model_fields
