"""Every key of every option and section, misspelt by one edit, is refused, and the right key is suggested."""

from __future__ import annotations

from importlib.util import find_spec
from random import Random
from string import ascii_lowercase
from typing import NamedTuple

import pytest
import torch

from ptfast.config.checks.target_checks import own_parameters
from ptfast.config.compose import compose
from ptfast.config.files import paths
from ptfast.config.read import read_config
from ptfast.config.schema import Config, entry_of, section_of
from ptfast.core.errors import PtfastError
from ptfast.core.protocols import DataInfo
from ptfast.core.sections.section import GATHERED
from ptfast.core.sections.targets import locate, swallows_keywords
from ptfast.models.build_model import build_model

REQUIRED = {
    "data/arrays": ("data.path=x.npz",),
    "data/custom": ("data._target_=stand_ins.Points",),
    "data/hf": ("data.path=there",),
    "data/text_file": ("data.path=x.txt",),
    "data/imagefolder": ("data.root=there",),
    "data/mask_folder": ("data.root=there",),
    "data/webdataset": ("data.shards=there",),
    "model/custom": ("model._target_=stand_ins.Net",),
    "model/hf": ("model.name=distilbert",),
    "model/timm": ("model.name=resnet10t",),
}
PACKAGES = {"model/timm": "timm", "model/hf": "transformers", "optimizer/adamw_schedulefree": "schedulefree"}
PACKAGES |= {"optimizer/sgd_schedulefree": "schedulefree", "logger/mlflow": "mlflow", "logger/wandb": "wandb"}
IMAGES = DataInfo("image", "classification", 3, input_shape=(3, 16, 16), in_channels=3)
NEARLY_ALL = 0.97
"""Part of the misspellings whose suggestion is right: `lz` may be anything."""


class Misspelt(NamedTuple):
    words: tuple[str, ...]
    """Arguments, the misspelt one last."""
    key: str
    """The dotted key that was meant."""


def edits(word: str, random: Random) -> list[str]:
    """One misspelling of each kind: a letter left out, replaced, exchanged with the next, added."""
    place, letter = random.randrange(len(word)), random.choice(f"{ascii_lowercase}_")
    before, after = word[:place], word[place:]
    swapped = after[1:2] + after[:1] + after[2:]
    return [before + after[1:], before + letter + after[1:], before + swapped, before + letter + after]


def misspelt(words: tuple[str, ...], prefix: str, keys: set[str], random: Random) -> list[Misspelt]:
    """Misspellings of the keys of one section that are no keys of it themselves."""
    return [
        Misspelt((*words, f"{prefix}{wrong}=1"), prefix + key)
        for key in sorted(keys)
        for wrong in edits(key, random)
        if wrong and wrong not in keys
    ]


def of_option(group: str, option: str, random: Random) -> list[Misspelt]:
    """Misspellings of all that `group=option` sets, and may set."""
    words = (f"{group}={option}", *REQUIRED.get(f"{group}/{option}", ()))
    tree = compose(words, complete=False).tree[group]
    path = tree.pop("_target_", None)
    keys = {*tree} | (set(own_parameters(locate(path), group)) if path else set())
    return misspelt(words, f"{group}.", keys, random)


def of_sections(random: Random) -> list[Misspelt]:
    """Misspellings of top-level keys, of sections and of their fixed keys, those of lists of entries too."""
    found = misspelt((), "", {*Config.model_fields} - {"recipe", "vars"}, random)
    for name, field in Config.model_fields.items():
        section = section_of(field.annotation)
        fixed = {*section.model_fields} - {*GATHERED} if section else set()
        found += misspelt((), f"{name}.", fixed, random)
        for key, inner in section.model_fields.items() if section else ():
            if (entry := entry_of(inner.annotation)) is not None:
                there = misspelt((), "", {*entry.model_fields}, random)
                prefix = f"{name}.{key}.0."
                found += [Misspelt((f"{prefix}{each.words[0]}",), prefix + each.key) for each in there]
        wrong = next(each for each in edits(name, random)[::-1] if each not in Config.model_fields)
        found += [Misspelt((f"{wrong}.{key}=1",), f"{name}.{key}") for key in sorted(fixed)[:1]]
    return found


def options() -> list[tuple[str, str]]:
    groups = [group for group in paths.groups() if group != paths.PRESETS]
    named = [(group, option) for group in groups for option in paths.options(group)]
    return [name for name in named if find_spec(PACKAGES.get("/".join(name), "torch"))]


def read_and_build(words: tuple[str, ...]) -> None:
    """Read a config and, where only a library knows what its models take, build the model."""
    _, config = read_config(words)
    assert swallows_keywords(locate(config.model.target.path)), words
    with torch.device("meta"):
        build_model(config.model.target, IMAGES)


def check(cases: list[Misspelt]) -> None:
    """Each is refused as an unknown key, itself named; nearly all suggest the key that was meant."""
    wrong = []
    for words, key in cases:
        *before, last = words
        given, entry, inner = last.partition("=")[0], *last.partition(".0.")[::2]
        words = (*before, f"{entry}=[{{{inner.replace('=', ':')}}}]") if inner else words
        with pytest.raises(PtfastError) as caught:
            read_and_build(words)
        error = caught.value
        assert (error.code, error.key, error.exit_code) == ("C002", given, 2), (words, str(error))
        if error.suggestion not in (f"Did you mean {key}?", f"Did you mean +{key}=1?"):
            wrong.append(f"{' '.join(words)}: {error.suggestion}")
    assert len(wrong) <= (1 - NEARLY_ALL) * len(cases), wrong


def some(cases: list[Misspelt], most: int, random: Random) -> list[Misspelt]:
    return random.sample(cases, min(most, len(cases)))


def test_keys_of_sections() -> None:
    random = Random(0)
    check(some(of_sections(random), 50, random))


def test_keys_of_options() -> None:
    random = Random(0)
    library = ("model", "torchvision")
    chosen = [library, *random.sample(options(), 7)]
    check([case for group, option in chosen for case in some(of_option(group, option, random), 5, random)])


@pytest.mark.slow
def test_all_keys() -> None:
    random = Random(1)
    of_options = [case for group, option in options() for case in of_option(group, option, random)]
    check([*of_sections(random), *of_options])


def test_a_required_key_under_another_name() -> None:
    with pytest.raises(PtfastError) as caught:
        read_config(["model=timm", "model.nmae=resnet10t"])
    assert caught.value.code == "C016"
    assert str(caught.value).endswith("required, but not set. Did you mean model.name by model.nmae?")
    with pytest.raises(PtfastError, match=r"required, but not set\. Give data.target=VALUE\."):
        read_config(["data=table", "data.path=rows.csv"])
