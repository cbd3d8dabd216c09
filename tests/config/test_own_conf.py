"""A user's own conf: variables, groups of their own, folders elsewhere; and all that is wrong at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from shown import fences

from ptfast.cli.command_line import run
from ptfast.config.compose import compose
from ptfast.config.files import paths
from ptfast.config.files.frozen import freeze, load
from ptfast.config.read import read_config
from ptfast.core.errors import ConfigError, error_line

RECIPE = """\
defaults:
  - paths: laptop
  - override /data: imagefolder

vars:
  width: 8
model:
  hidden: ["${vars.width}", "${vars.width}"]
data:
  root: ${paths.root}/images
"""


def write(file: str, text: str) -> None:
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture(autouse=True)
def own_conf(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(paths.CONFIG_DIR, "")
    write("conf/paths/laptop.yaml", "root: /home/me\nscratch: /tmp\n")
    write("conf/paths/cluster.yaml", "root: /data\n")
    write("recipes/mine.yaml", RECIPE)


def refused(*arguments: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read_config(arguments)
    return error_line(caught.value).replace("ptfast: error", "").splitlines()


def test_variables_stand_for_values_and_are_replaced_by_them() -> None:
    composed, config = read_config(["recipe=mine", "vars.width=16"])
    assert config.model.target.kwargs["hidden"] == [16, 16]
    freeze(composed, Path("config.yaml"))
    tree = load(Path("config.yaml")).tree
    assert "paths" not in tree
    assert not tree["vars"]
    assert tree["model"]["hidden"] == [16, 16]
    assert read_config(["batch_size=${vars.size}", "vars.size=12"])[1].batch_size == 12


def test_a_variable_that_nothing_refers_to_is_unknown() -> None:
    typed = "(command line): no key refers to"
    assert refused("recipe=mine", "vars.widht=3") == [
        f"[C002]: vars.widht {typed} ${{vars.widht}}. Did you mean vars.width?"
    ]
    assert refused("recipe=mine", "paths.rot=/x") == [
        f"[C002]: paths.rot {typed} ${{paths.rot}}. Did you mean paths.root?"
    ]
    assert "Did you mean ${vars.width}?" in refused("recipe=mine", "batch_size=${vars.widht}")[0]
    freeze(compose(["recipe=mine"]), Path("config.yaml"))
    with pytest.raises(ConfigError, match=r"config\.yaml has values in place of variables"):
        load(Path("config.yaml"), ["vars.width=3"])


def test_a_group_of_ones_own_is_chosen_as_any_other() -> None:
    def root(*arguments: str) -> str:
        return str(read_config(arguments)[1].data.target.kwargs["root"])

    assert root("recipe=mine") == "/home/me/images"
    assert root("recipe=mine", "paths=cluster") == "/data/images"
    assert root("recipe=mine", "paths.root=/x") == "/x/images"
    write("recipes/theirs.yaml", "defaults:\n  - mine\n  - paths: cluster\n")
    assert root("recipe=theirs") == "/data/images"
    assert root("recipe=theirs", "paths=laptop") == "/home/me/images"
    assert root("data=imagefolder", "data.root=${paths.root}", "paths=cluster") == "/data"


def test_an_experiment_sets_keys_of_all_groups_over_a_recipe() -> None:
    text = "# @package _global_\ndefaults:\n  - override /model: resnet20\n  - override /data: digits\n\n"
    write("conf/experiment/narrow.yaml", f"{text}batch_size: 16\nmodel:\n  width: 4\n")
    _, config = read_config(["experiment=narrow"])
    assert (config.batch_size, config.model.target.kwargs["width"]) == (16, 4)
    composed, config = read_config(["recipe=resnet_digits", "experiment=narrow", "batch_size=32"])
    assert (config.batch_size, config.model.target.kwargs["width"]) == (32, 4)
    assert composed.place("model.width") == "conf/experiment/narrow.yaml:8"
    write("recipes/experiment/short.yaml", "defaults:\n  - mine\n\nepochs: 1\n")
    assert read_config(["recipe=experiment/short"])[1].epochs == 1


def test_an_option_that_sets_nothing_is_warned_of() -> None:
    write("conf/experiment/narrow.yaml", "batch_size: 16\n")
    (warning,) = compose(["experiment=narrow"]).warnings
    assert warning.startswith("experiment (command line): no key refers to what it sets.")


def test_the_page_shows_errors_as_they_are() -> None:
    page = "docs/concepts/configuration.md"
    (errors,) = [text for text in fences(page, "") if "error[C003]: precision=ampp" in text]
    for line, real in zip(
        errors.splitlines(), refused("optimizer.lrr=0.1", "epochs=0", "precision=ampp"), strict=True
    ):
        assert line.removeprefix("ptfast: error").startswith(real[:70])


def test_a_folder_elsewhere_is_searched_first(capsys: pytest.CaptureFixture[str]) -> None:
    write("shared/paths/cluster.yaml", "root: /shared\n")
    write("shared/recipes/ours.yaml", "defaults:\n  - mine\n  - paths: cluster\n")
    assert run(["train", "--config-dir", "shared", "recipe=ours", "--cfg", "job"]) == 0
    assert "root: /shared\n" in capsys.readouterr().out
    assert paths.groups().count("paths") == 1
    assert "recipes" not in paths.groups()


def test_all_that_is_wrong_is_told_at_once() -> None:
    first, second, third = refused("saving.keeep=1", "epochs=0", "precision=ampp", "precision.moed=x")
    assert first.startswith("[C003]: precision=ampp (command line): no such option")
    assert second.startswith("[C002]: saving.keeep=1 (command line): unknown key. Did you mean")
    assert third == "[C005]: epochs=0 (command line): must be at least 1."
    write("recipes/bad.yaml", "seed: -1\nbatch_size: many\nmodel: {hiden: [8]}\neval:\n  every: ${nope}\n")
    (alone,) = refused("recipe=bad")
    assert alone.startswith("[C008]: eval.every=${nope} (recipes/bad.yaml:5): there is no key nope")
    codes = [line[1:5] for line in refused("recipe=bad", "eval.every=1")]
    assert codes == ["C002", "C004", "C005"]
    write("recipes/bad.yaml", "defaults:\n  - model: resnt20\n  - data: didgits\n")
    assert [line[8:13] for line in refused("recipe=bad")] == ["model", "data="]
    (alone,) = refused("recipe=nope", "model.width=3")
    assert alone.startswith("[C003]: recipe=nope")
