"""The JSON Schema of recipes: what trains passes, anything else fails, and hovering explains a key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from config_trees import explained_schema
from conftest import ROOT

from ptfast.config.editors.help import argument_docs
from ptfast.config.editors.json_schema import schema
from ptfast.config.files.paths import RECIPES, options
from ptfast.config.files.yaml_file import read_yaml
from ptfast.config.read import read_config
from ptfast.config.schema import Config
from ptfast.core.errors import PtfastError

jsonschema = pytest.importorskip("jsonschema", reason="needs the package jsonschema")

GOOD = [
    "preset: fast",
    "defaults:\n  - optimizer: sgd",
    "defaults:\n  - /optimizer: sgd\n  - override /model: gpt\n  - _self_",
    "defaults: [resnet_cifar]\nmodel: {depth: 32}",
    "optimizer: {lr: 1e-2, betas: [0.9, 0.99], fused: auto}",
    "optimizer: {lr: '${oc.env:LR}'}\nseed: ${batch_size}",
    "optimizer: {decay_1d: false, groups: [{match: '*.bias', lr_scale: 64, trains_until: 50%}]}",
    "optimizer: {_target_: torch.optim.RMSprop, alpha: 0.5}",
    "model: {_target_: mine.Net, dropout: some, anything: 1}",
    "defaults: [{model: timm}]\nmodel: {name: resnet18, drop_path_rate: 0.1}",
    "defaults: [{model: custom}]\nmodel: {_target_: mine.Net}",
    "schedule: {warmup: 200, end: 0.1}\nsaving: {every: 2 epochs}",
    "saving: {every: 10m}",
    "run: {max_time: 1h30m, name: 3}\nparallel: {timeout: 90}",
    "epochs: null\nsteps: 100\nlog_every: 5steps",
    "ema: {decay: 0.999}\ngradients: {clip_norm: 1}",
    "task: regression\ndata: {val: 0, normalize: false}",
    "task: {name: classification, label_smoothing: 0.1}",
    "task: mine.Task",
    "task: {name: mine.Task, anything: 1}",
    "task: {_target_: mine.Task, anything: 1}",
    "data: {collate: mine.collate}",
    "data: {collate: {_target_: mine.collate, length: 3}}",
    "callbacks: [mine.Note, {_target_: mine.Other, path: x}]\ntrust: [mine]",
    "hydra: {sweeper: {max_batch_size: 2}}\ndefaults: [{override /hydra/launcher: joblib}]",
]
BAD = [
    "preset: fats",
    "defaults: [{optimizer: sdg}]",
    "defaults: [{optimiser: sgd}]",
    "optimiser: {lr: 1}",
    "optimizer: {lrr: 0.1}",
    "optimizer: {lr: abc}",
    "optimizer: {groups: [{match: '*.bias', lr_scael: 64}]}",
    "optimizer: {groups: [{lr_scale: 64}]}",
    "optimizer: {groups: {match: '*.bias'}}",
    "optimizer: {lr: -1}",
    "optimizer: {betas: [0.9, 1.5]}",
    "optimizer: {betas: [0.9]}",
    "optimizer: {_target_: 5}",
    "defaults: [{model: mlp}]\nmodel: {hiden: [8]}",
    "model: {weights: [1]}",
    "ema: {decay: 3}",
    "run: {max_time: 2hh}",
    "run: {max_time: 3epochs}",
    "data: {val: 2epochs}",
    "log_every: 5 stepps",
    "epochs: 0",
    "epochs: 1.5",
    "batch_size: many",
    "task: {name: classification, lable_smoothing: 0.1}",
    "task: {label_smoothing: 3}",
    "task: clasification",
    "precision: {mode: fp8}",
    "augment: {flip: maybe}",
    "saving: {kep: 3}",
    "schedule: {warmup: fast}",
]


@pytest.fixture(scope="module")
def validator() -> Any:
    found = schema()
    jsonschema.Draft202012Validator.check_schema(found)
    return jsonschema.Draft202012Validator(found)


@pytest.mark.parametrize("text", GOOD)
def test_good_recipes_pass(text: str, validator: Any, in_tmp: Path) -> None:
    Path("mine.yaml").write_text(text)
    assert [error.message for error in validator.iter_errors(read_yaml(Path("mine.yaml")).data)] == []


@pytest.mark.parametrize("text", BAD)
def test_bad_recipes_do_not(text: str, validator: Any, in_tmp: Path) -> None:
    Path("mine.yaml").write_text(text)
    assert not validator.is_valid(read_yaml(Path("mine.yaml")).data)
    with pytest.raises(PtfastError):
        read_config(["recipe=./mine.yaml"])


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml")))
def test_the_recipes_pass(name: str, validator: Any) -> None:
    data = read_yaml(options(RECIPES)[name]).data
    assert [error.message for error in validator.iter_errors(data)] == []


def test_every_key_is_there_and_explained() -> None:
    found = explained_schema()["properties"]
    assert set(found) == {"defaults", "hydra", *Config.model_fields} - {"recipe"}
    unexplained = [
        f"{name}.{key}"
        for name, part in found.items()
        for key, value in {"": part, **part.get("properties", {})}.items()
        if not value.get("description") and name != "hydra"
    ]
    assert unexplained == []
    assert found["saving"]["properties"]["every"]["default"] == "1epochs"
    assert found["optimizer"]["properties"]["betas"]["description"].startswith("coefficients")


def test_descriptions_come_from_docstrings() -> None:
    def documented(a: int, b: int, c: int, d: int, e: int) -> None:
        """Summary that names `d`.

        Args:
            a: the first,
                over two lines.
            b (int, optional): the second.
            c, e: others.

        Returns:
            f: nothing.
        """

    assert argument_docs(documented) == {
        "a": "the first, over two lines.",
        "b": "the second.",
        "c": "others.",
        "d": "Summary that names `d`.",
        "e": "others.",
    }
