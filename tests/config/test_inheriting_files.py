"""Recipes and option files that inherit from others, and circles of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_compose import empty_folder, refusal, write

from ptfast.cli.completion.completion_command import complete
from ptfast.config.compose import compose
from ptfast.config.files import paths
from ptfast.config.files.yaml_file import lineage
from ptfast.core.errors import ConfigError

__all__ = ["empty_folder"]


def test_recipes_inherit() -> None:
    write("recipes/base.yaml", "defaults:\n  - model: resnet20\nepochs: 2\nbatch_size: 8\n")
    write("recipes/child.yaml", "defaults:\n  - base\n  - _self_\nepochs: 4\n")
    tree = compose(["recipe=child"]).tree
    assert (tree["epochs"], tree["batch_size"], tree["model"]["depth"]) == (4, 8, 20)


@pytest.mark.parametrize(
    "base",
    ["{absolute}", "{absolute}.yaml", "./base.yaml", "../a@b c/base", "base", "base.yaml"],
)
def test_recipes_inherit_from_files_of_their_own_folder_or_of_any(base: str) -> None:
    folder = "a@b c"
    write(f"{folder}/base.yaml", "defaults:\n  - override /data: cifar10\nepochs: 2\nbatch_size: 8\n")
    entry = base.format(absolute=Path(folder, "base").absolute())
    write(f"{folder}/child.yaml", f"defaults:\n  - {entry}\n  - optimizer: sgd\nepochs: 4\n")
    composed = compose([f"recipe=./{folder}/child.yaml"])
    tree = composed.tree
    assert (tree["epochs"], tree["batch_size"], tree["data"]["name"]) == (4, 8, "cifar10")
    assert "momentum" in tree["optimizer"]
    assert composed.place("batch_size") == f"{folder}/base.yaml:4"


def test_a_recipe_by_path_inherits_one_by_name() -> None:
    write("recipes/base.yaml", "epochs: 3\n")
    write("far/child.yaml", "defaults:\n  - resnet_cifar\n  - base\nbatch_size: 8\n")
    tree = compose(["recipe=far/child.yaml"]).tree
    assert (tree["epochs"], tree["batch_size"], tree["data"]["name"]) == (3, 8, "cifar10")


def test_a_preset_is_inherited_with_its_recipe() -> None:
    write("base.yaml", "defaults:\n  - precision: bf16\npreset: plain\n")
    write("child.yaml", "defaults:\n  - ./base.yaml\n  - dataloader: workers\nepochs: 4\n")
    tree = compose(["recipe=./child.yaml"]).tree
    assert (tree["preset"], tree["optimizer"]["fused"]) == ("plain", False)
    assert (tree["precision"]["mode"], tree["dataloader"]["kind"]) == ("bf16", "workers")
    write("other.yaml", "defaults:\n  - ./base.yaml\npreset: fast\n")
    assert compose(["recipe=./other.yaml"]).tree["optimizer"]["fused"] == "auto"


@pytest.mark.parametrize(
    ("files", "given", "place", "circle"),
    [
        ({"a.yaml": "./a.yaml"}, "recipe=./a.yaml", "a.yaml:2", "a.yaml -> a.yaml"),
        (
            {"a.yaml": "b", "b.yaml": "c", "c.yaml": "./b.yaml"},
            *("recipe=./a.yaml", "c.yaml:2", "b.yaml -> c.yaml -> b.yaml"),
        ),
        (
            {"recipes/resnet_digits.yaml": "resnet_digits"},
            *(
                "recipe=resnet_digits",
                "recipes/resnet_digits.yaml:2",
                "recipes/resnet_digits.yaml -> recipes",
            ),
        ),
        (
            {"conf/optimizer/sgd.yaml": "sgd"},
            *("optimizer=sgd", "conf/optimizer/sgd.yaml:2", "conf/optimizer/sgd.yaml -> conf/optimizer/sgd"),
        ),
        (
            {"conf/model/a.yaml": "b", "conf/model/b.yaml": "a"},
            *(
                "model=a",
                "conf/model/b.yaml:2",
                "conf/model/a.yaml -> conf/model/b.yaml -> conf/model/a.yaml",
            ),
        ),
    ],
)
def test_files_that_inherit_each_other_are_named(
    files: dict[str, str], given: str, place: str, circle: str
) -> None:
    for file, base in files.items():
        write(file, f"defaults:\n  - {base}\n")
    error = refusal(given)
    assert (error.code, error.key, error.place, error.exit_code) == ("C007", "defaults", place, 2)
    assert f"inherits itself, {circle}" in str(error)
    # What reads the same files without Hydra gets through, too.
    group, _, option = given.lstrip("+").partition("=")
    assert complete(["train", given, "optimizer."]) == []
    with pytest.raises(ConfigError):
        lineage(group, paths.recipe_file(option) or paths.options(group)[option])


def test_options_that_choose_each_other_without_end_are_rejected() -> None:
    write("conf/optimizer/a.yaml", "defaults:\n  - /model: a\n")
    write("conf/model/a.yaml", "defaults:\n  - /optimizer: a\n")
    assert refusal("optimizer=a").code == "C007"
