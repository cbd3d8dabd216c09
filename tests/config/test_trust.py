"""Names allowed in a config from elsewhere: known packages, and those that the user trusts."""

from __future__ import annotations

import itertools
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from config_trees import HERE, tree, typed

from ptfast.config.checks.trust import check_reach, locate_trusted
from ptfast.config.checks.validate import validate
from ptfast.config.files import paths
from ptfast.config.files.frozen import load
from ptfast.core.errors import COMMAND_LINE, ConfigError, MachineError

UNTRUSTED = [
    "os.system",
    "nt.system",
    "builtins.exec",
    "torch.load",
    "torch.hub.load",
    "torch.ops.load_library",
    "torch.utils.cpp_extension.load_inline",
    "torchvision.datasets.utils.os.system",
    "torchvision.datasets.utils.extract_archive",
    "torchvision.datasets.folder.Image.open",
    "torch.nn.modules.module.torch.hub.load",
    "torch.nn.functional.torch.load",
    "torch.nn.Module.__class__",
    "torch.nn.Module.load_state_dict",
    "torch.optim.lr_scheduler.partial",
    "torch.nnx.Linear",
    "ptfast.core.sections.targets.importlib.import_module",
    "ptfast.core.errors.error_line",
    "ptfast.__main__.main",
    "torch.nn",
]


@pytest.mark.parametrize("path", UNTRUSTED)
def test_what_a_file_from_elsewhere_may_not_name(path: str) -> None:
    with pytest.raises(ConfigError, match="not trusted"):
        locate_trusted(path)


@pytest.mark.parametrize(
    "path",
    ["torch.nn.Linear", "torch.optim.AdamW", "torchvision.models.resnet18", "torchvision.datasets.CIFAR10"],
)
def test_what_it_may_name(path: str) -> None:
    assert callable(locate_trusted(path))


def test_what_built_in_options_name_is_trusted() -> None:
    """A run with any of them can be evaluated elsewhere."""
    files = "".join(path.read_text() for path in paths.builtin_root().conf.glob("*/*.yaml"))
    named = set(re.findall(r"^_target_: (\w+\.\S+)$", files, re.MULTILINE))
    assert {"ptfast.techniques.schedule.lr_schedules.Wsd", "schedulefree.AdamWScheduleFree"} < named
    for path in named:
        if find_spec(path.partition(".")[0]):
            assert callable(locate_trusted(path)), path
        else:
            with pytest.raises(MachineError, match="needs the package"):
                locate_trusted(path)


def test_the_check_comes_before_the_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "strange_pkg.py").write_text("class Net: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="not trusted") as caught:
        locate_trusted("strange_pkg.Net")
    assert "strange_pkg" not in sys.modules
    assert caught.value.suggestion == "If you trust it, add 'trust=[strange_pkg]' to the command line"  # type: ignore[attr-defined]
    assert locate_trusted("strange_pkg.Net", ("strange_pkg",)).__name__ == "Net"
    with pytest.raises(ConfigError, match="not trusted"):
        locate_trusted("strange_pkg.Net", ("strange",))


def untrusted(extra_trust: tuple[str, ...] = (), **changes: Any) -> ConfigError | None:
    good = {"data___target_": "torchvision.datasets.FakeData", "model___target_": "torch.nn.Identity"}
    given = tree(**{**good, **changes})
    given["data"].pop("root", None)
    given["model"].pop("depth", None)
    given["schedule"] = {"_target_": "ptfast.techniques.schedule.lr_schedules.Constant"}
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
        {"data__collate": "os.system"},
        {"data__transform": {"_target_": "os.system", "command": "true"}},
        {"data__transform": [{"deep": {"_target_": "torch.hub.load"}}]},
    ):
        error = untrusted(**changes)
        assert error is not None, changes
        assert error.code == "C009"
        assert "not trusted" in str(error)


def test_packages_that_the_caller_trusts() -> None:
    assert untrusted((HERE,), model___target_=f"{HERE}.Net") is None


FROM_ELSEWHERE = {
    "a variable": ("data: {root: '${oc.env:HOME}'}", "data.root"),
    "a variable in a URL": ("data: {shards: 'https://host/${oc.env:MY_KEY}/a.tar'}", "data.shards"),
    "a resolver made of parts": ("vars: {a: env}\ndata: {root: '${oc.${vars.a}:HOME}'}", "data.root"),
    "a URL": ("data: {shards: 's3://host/a.tar'}", "data.shards"),
    "a command": ("data: {shards: ['pipe:cat x']}", "data.shards"),
}


@pytest.mark.parametrize("name", FROM_ELSEWHERE)
def test_what_a_file_from_elsewhere_may_not_read(name: str, tmp_path: Path) -> None:
    text, key = FROM_ELSEWHERE[name]
    file = tmp_path / "config.yaml"
    file.write_text(f"{text}\n")
    with pytest.raises(ConfigError, match="not trusted, a config file from elsewhere") as caught:
        load(file, trusted=False)
    assert (caught.value.code, caught.value.key) == ("C009", key)
    assert f"{key}=VALUE" in str(caught.value)
    # What the user types is the user's.
    assert load(file, [f"{key}=https://mine/${{oc.env:HOME}}"], trusted=False).tree["data"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("logger.csv.path", path) for path in ("../x.csv", "/tmp/x.csv", "a/../../x", "~/x.csv")),
        *(("logger.mlflow.uri", uri) for uri in ("file:///x", "sqlite:////x.db")),
        *(("run.dir", ".."), ("run.root", "/x"), ("logger.tensorboard.folder", "..")),
    ],
)
def test_a_file_from_elsewhere_writes_into_its_own_folder(key: str, value: str) -> None:
    tree: dict[str, Any] = {}
    section = tree
    *way, last = key.split(".")
    for name in way:
        section = section.setdefault(name, {})
    section[last] = value
    with pytest.raises(ConfigError, match="writes outside its folder") as caught:
        check_reach(tree, lambda key: "config.yaml:3")
    assert (caught.value.code, caught.value.key) == ("C009", key)
    check_reach(tree, lambda key: COMMAND_LINE)
    section[last] = "sqlite:///mlflow.db" if last == "uri" else "runs..old/x"
    check_reach(tree, lambda key: "config.yaml:3")


def test_a_bomb_of_interpolations_is_rejected(tmp_path: Path) -> None:
    names = [f"v{level}" for level in range(40)]
    lines = [f"  {name}: '${{vars.{below}}}${{.{below}}}'" for below, name in itertools.pairwise(names)]
    file = tmp_path / "config.yaml"
    file.write_text("\n".join(["vars:", "  v0: boom", *lines, ""]))
    for trusted in (True, False):
        with pytest.raises(ConfigError, match="expand to more than 1,000,000 characters"):
            load(file, trusted=trusted)
