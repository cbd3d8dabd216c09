"""Targets by import path: found, built and checked against their signature."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
from torch import nn

from ptfast.config.checks.target_checks import (
    check_target,
)
from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError, did_you_mean
from ptfast.core.sections.spelling import nearest
from ptfast.core.sections.targets import (
    EMPTY,
    Target,
    keywords,
    parse_target,
    plain,
)

HERE = __name__


class Net(nn.Module):
    """A model with the usual kinds of keywords."""

    def __init__(
        self,
        num_classes: int,
        depth: int = 2,
        dropout: float = 0.0,
        norm: Literal["batch", "layer"] = "batch",
        sizes: tuple[int, int] = (8, 8),
        folder: Path | None = None,
        inner: nn.Module | None = None,
        untyped=1e-3,
        flag=True,
    ) -> None:
        super().__init__()
        self.num_classes, self.depth, self.inner, self.sizes = num_classes, depth, inner, sizes


class Made:
    """A class whose `__new__` takes the keywords, and whose attribute `func` belongs to no `partial`."""

    func = None

    def __new__(cls, norm: Literal["batch", "layer"] = "batch") -> Made:
        return object.__new__(cls)


class Called:
    """An object that is called."""

    def __call__(self, step: int, norm: Literal["batch", "layer"] = "batch") -> float:
        return 1.0


called = Called()
THIRTY_PERCENT = Duration(30, "percent")


class Shape:
    """A schedule."""

    def __init__(self, milestones: list[Duration], every: Duration = THIRTY_PERCENT) -> None:
        self.milestones, self.every = milestones, every

    def factor(self, clock: Any) -> Any:
        return clock


class Watch:
    """A callback by its methods alone."""

    def on_step(self, run: Any, step: int) -> None:
        """Nothing."""


def make_net(num_classes: int, width: int = 0) -> nn.Module:
    return Net(num_classes, depth=width)


def make_number() -> int:
    return 3


NOT_CALLABLE = 5


def checked(section: str, path: str, **kwargs: Any) -> Target:
    target, problems = check_target(Target(path, kwargs), section)
    assert problems == []
    return target


def refused(section: str, path: str, **kwargs: Any) -> ConfigError:
    _, problems = check_target(Target(path, kwargs), section)
    assert len(problems) == 1, [str(problem) for problem in problems]
    return problems[0].changed(place="here")


def test_builds_with_facts_it_takes_and_lacks() -> None:
    target = Target(f"{HERE}.Net", {"depth": 5})
    net = target.build(num_classes=3, depth=9, vocab_size=100, dropout=None)
    assert (net.num_classes, net.depth) == (3, 5)


def test_builds_nested_targets_first() -> None:
    tree = {
        "_target_": f"{HERE}.Net",
        "num_classes": 2,
        "inner": {"_target_": "torch.nn.ReLU", "inplace": True},
    }
    target = parse_target(tree)
    assert plain(target) == tree
    inner = target.build().inner
    assert isinstance(inner, nn.ReLU)
    assert inner.inplace


def test_partial_binds_instead_of_calling() -> None:
    tree = {"_target_": f"{HERE}.Net", "_partial_": True, "depth": 7}
    target, problems = check_target(parse_target(tree), "")
    assert problems == []
    assert plain(target) == tree
    assert target.build()(num_classes=1).depth == 7


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("torch.optim.Adamm", "torch.optim has no Adamm. Did you mean torch.optim.Adam?"),
        ("torch.optim.AdmaW", "Did you mean torch.optim.AdamW?"),
        ("torch.optm.AdamW", "torch has no optm. Did you mean torch.optim?"),
        ("nosuchpackage.Thing", "there is no module nosuchpackage. Is nosuchpackage installed"),
        ("torch.optim.AdamW.nothing", "torch.optim.AdamW has no nothing"),
    ],
)
def test_a_path_that_does_not_exist(path: str, said: str) -> None:
    error = refused("optimizer", path)
    assert error.code == "C009"
    assert said in str(error)


def test_a_module_that_fails_to_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "breaks_on_import.py").write_text("import nosuchpackage\n")
    (tmp_path / "raises_on_import.py").write_text("raise RuntimeError('out of coffee')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "No module named 'nosuchpackage'" in str(refused("model", "breaks_on_import.Net"))
    assert "RuntimeError: out of coffee" in str(refused("model", "raises_on_import.Net"))


def test_modules_in_the_current_folder_are_found(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (in_tmp / "my_own_models.py").write_text("import torch\nclass Net(torch.nn.Module): pass\n")
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    assert checked("model", "my_own_models.Net").resolve().__name__ == "Net"


@pytest.mark.parametrize("path", [None, "???", 5, "a b", "os.system('x')", "a..b", ""])
def test_what_is_no_import_path(path: Any) -> None:
    with pytest.raises(ConfigError, match=r"import path|required"):
        parse_target({"_target_": path})


@pytest.mark.parametrize(
    ("section", "path"),
    [
        ("optimizer", "os.system"),
        ("optimizer", "torch.nn.Linear"),
        ("optimizer", "torch.optim.Optimizer"),
        ("optimizer", "torch.optim"),
        ("model", "os.system"),
        ("model", "subprocess.run"),
        ("model", "torch.optim.SGD"),
        ("model", "torch.relu"),
        ("model", "torch.ops.load_library"),
        ("model", f"{HERE}.make_number"),
        ("model", f"{HERE}.NOT_CALLABLE"),
        ("data", "os"),
        ("data", "os.system"),
        ("data", "shutil.rmtree"),
        ("data", "torch.nn.Linear"),
        ("data", f"{HERE}.Watch"),
        ("schedule", f"{HERE}.make_number"),
        ("logger", f"{HERE}.Net"),
        ("callbacks", f"{HERE}.Net"),
        ("callbacks", f"{HERE}.make_net"),
    ],
)
def test_the_wrong_kind(section: str, path: str) -> None:
    error = refused(section, path)
    assert error.code == "C009"
    assert error.key == f"{section}._target_"


@pytest.mark.parametrize(
    ("section", "path", "kwargs"),
    [
        ("optimizer", "torch.optim.AdamW", {"lr": 1e-3}),
        ("model", f"{HERE}.Net", {}),
        ("model", f"{HERE}.make_net", {"width": 2}),
        ("model", "torchvision.models.resnet18", {"anything": 1}),
        ("data", "torchvision.datasets.FakeData", {"size": 10}),
        ("schedule", f"{HERE}.Shape", {"milestones": []}),
        ("callbacks", f"{HERE}.Watch", {}),
        ("callbacks", "ptfast.core.protocols.Callback", {}),
    ],
)
def test_the_right_kind(section: str, path: str, kwargs: dict[str, Any]) -> None:
    assert checked(section, path, **kwargs).kwargs == kwargs


class NoClose:
    def open(self, run_dir: Any, config: Any) -> None: ...
    def log(self, record: Any) -> None: ...


class OddLog(NoClose):
    def log(self, record: Any, more: Any) -> None: ...
    def close(self) -> None: ...


def test_a_logger_is_told_which_method_it_lacks() -> None:
    assert "is not a logger: it has no method close. A logger has open(" in str(
        refused("logger", f"{HERE}.NoClose")
    )
    assert "log cannot be called as log(self, record)" in str(refused("logger", f"{HERE}.OddLog"))


def test_a_module_is_answered_with_its_class() -> None:
    assert "Did you mean torch.optim.SGD?" in str(refused("optimizer", "torch.optim.sgd"))


@pytest.mark.parametrize(
    ("section", "path", "name", "hint"),
    [
        ("optimizer", "torch.optim.SGD", "lrr", "Did you mean optimizer.lr?"),
        ("optimizer", "torch.optim.SGD", "wieght_decay", "Did you mean optimizer.weight_decay?"),
        ("optimizer", "torch.optim.SGD", "betas", "It takes lr, momentum"),
        ("optimizer", "torch.optim.SGD", "params", "It takes lr, momentum"),
        ("optimizer", "torch.optim.RMSprop", "fused", "It takes lr"),
        ("model", f"{HERE}.Net", "dept", "Did you mean model.depth?"),
    ],
)
def test_an_unknown_keyword(section: str, path: str, name: str, hint: str) -> None:
    error = refused(section, path, **{name: True, **({"num_classes": 2} if section == "model" else {})})
    assert (error.code, error.key) == ("C002", f"{section}.{name}")
    assert error.suggestion is not None
    assert error.suggestion.startswith(hint)


def test_a_fixed_key_is_suggested_too() -> None:
    _, (problem,) = check_target(Target(f"{HERE}.Net", {"weight": "x"}), "model", fixed=["weights"])
    assert problem.suggestion == "Did you mean model.weights?"


def test_a_missing_keyword_is_named_unless_it_comes_from_the_data() -> None:
    checked("model", f"{HERE}.Net")
    error = refused("schedule", f"{HERE}.Shape")
    assert (error.code, error.key) == ("C016", "schedule.milestones")


def test_problems_inside_nested_targets_have_the_full_key() -> None:
    inner = Target("torch.nn.Linear", {"in_features": 2, "out_features": 3, "biass": True})
    error = refused("model", f"{HERE}.Net", inner=inner)
    assert str(error) == "model.inner.biass=true (here): unknown key. Did you mean model.inner.bias?"


@pytest.mark.parametrize(
    ("word", "candidates", "found"),
    [
        ("lrr", ["lr", "betas"], "lr"),
        ("recpie", ["precision", "recipe", "epochs"], "recipe"),
        ("resnet_cfar", ["resnet_cifar", "resnet_digits"], "resnet_cifar"),
        ("bacth_size", ["batch_size", "saving"], "batch_size"),
        ("momentun", ["momentum", "nesterov"], "momentum"),
        ("ampp", ["amp", "amp_fp16", "bf16"], "amp"),
        ("batch-size", ["batch_size"], "batch_size"),
        ("lr", ["optimizer.lr", "epochs"], "optimizer.lr"),
        ("zzz", ["lr", "betas"], None),
        ("x", [], None),
    ],
)
def test_the_nearest_name(word: str, candidates: list[str], found: str | None) -> None:
    assert nearest(word, candidates) == found
    assert did_you_mean(word, candidates) == (f"Did you mean {found}?" if found else None)


@pytest.mark.parametrize("function", [Net, Made, called, partial(Net, depth=1)])
def test_annotations_of_any_callable_are_evaluated(function: Any) -> None:
    assert keywords(function)["norm"].annotation == Literal["batch", "layer"]


def test_an_annotation_that_cannot_be_evaluated_hides_no_other() -> None:
    class Local:
        pass

    def function(norm: Literal["batch", "layer"] = "batch", local: Local | None = None) -> None:
        pass

    for found in (keywords(function), keywords(partial(function))):
        assert found["norm"].annotation == Literal["batch", "layer"]
        assert found["local"].annotation is EMPTY


def test_a_misspelt_key_of_ours_is_answered_without_torch() -> None:
    code = """
import sys
from ptfast.config.read import read_config
from ptfast.core.errors import ConfigError
for argument in ("saving.keeep=1", "epohcs=3", "precision.foo=1"):
    try:
        read_config(["recipe=resnet_digits", argument])
    except ConfigError as error:
        assert error.code == "C002", error
    else:
        raise AssertionError(argument)
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
