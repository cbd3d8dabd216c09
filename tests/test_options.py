"""Every option of every group composes, validates and trains, or says what this machine lacks for it."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import stand_ins
from running import summary, train
from stand_ins import SMALL, WITH
from trials import ON_GPU, SLOW, Words, composed, every_option, merged, read, trained, trial_of, words_of

from ptfast.config.catalogue import CATALOGUE
from ptfast.config.compose import compose
from ptfast.config.files import paths
from ptfast.core.errors import MachineError
from ptfast.core.sections.section import Need, Technique

PACKAGES = {
    "model/timm": "timm",
    "model/hf": "transformers",
    "logger/tensorboard": "tensorboard",
    "logger/wandb": "wandb",
    "logger/mlflow": "mlflow",
}
"""Options that need a package which the test extra may not bring; without it they say so."""
NEEDS: dict[str, tuple[Need, ...]] = {"debug/nvtx": ("cuda",)}
"""Options that need more than their technique does."""
WHOLE_RUNS = ("saving", "logger")
"""Groups that act around the loop: their options are trained by the command."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stand-ins")
    stand_ins.write(folder)
    return folder


def technique_of(option: str) -> Technique | None:
    """The record that an option belongs to: the one that switches it on, or else names it."""
    word = option.replace("/", "=")
    on = [technique for technique in CATALOGUE if word in technique.on]
    named = [technique for technique in CATALOGUE if option in technique.options]
    return next(iter(on + named), None)


def is_trained_elsewhere(option: str) -> bool:
    """Return True if the test of a technique, or one of its own, trains with the option."""
    technique, word = technique_of(option), option.replace("/", "=")
    group, name = option.split("/")
    if option not in WITH and "???" in paths.options(group)[name].read_text("utf-8"):
        tests = (file.read_text("utf-8") for file in Path(__file__).parent.rglob("test_*.py"))
        trains = re.compile(rf'\b(?:train|trained|build_run)\([^)]*"{word}"')
        return any(trains.search(text) for text in tests)
    if technique is None or word not in technique.on:
        return False
    return not {*technique.needs, *NEEDS.get(option, ())} & (ON_GPU | SLOW)


@pytest.mark.parametrize("option", sorted(each for each in every_option() if not is_trained_elsewhere(each)))
def test_it_trains(option: str, files: Path, in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    technique = technique_of(option)
    words = words_for(option, technique, files)
    needs = {*(technique.needs if technique is not None else ()), *NEEDS.get(option, ())}
    if is_refused(words) or needs & (ON_GPU | SLOW):
        # What can be trained here is trained by the slow test of its technique.
        assert needs
        return
    monkeypatch.setitem(sys.modules, "datasets", stand_ins.datasets())
    monkeypatch.setenv("WANDB_MODE", "offline")
    if option.split("/")[0] in WHOLE_RUNS:
        there = find_spec(PACKAGES.get(option, "torch")) is not None
        assert train(*words, "run.dir=run") == (0 if there else MachineError.exit_code)
        assert not there or summary(Path("run"))["steps"] == 2
        return
    if find_spec(PACKAGES.get(option, "torch")) is None:
        with pytest.raises(MachineError, match="pip install") as caught:
            trained(words)
        assert caught.value.code == "E004"
    else:
        assert trained(words).losses


def test_trials_are_composed_as_hydra_would() -> None:
    for technique in [technique for technique in CATALOGUE if technique.on][::25]:
        words = words_of(technique, technique.on)
        quickly, whole = composed(words), compose(words)
        assert (quickly.tree, quickly.places) == (whole.tree, whole.places), technique.name


def words_for(option: str, technique: Technique | None, files: Path) -> Words:
    """Arguments of a run with the option: the trial of its technique, or two steps."""
    word = option.replace("/", "=")
    if technique is not None and word in technique.on:
        return words_of(technique, technique.on)
    beside = WITH.get(option) or (trial_of(technique) if technique is not None else ())
    beside = [each.replace("FILES", str(files)) for each in beside]
    model = () if any(each.startswith("model=") for each in (word, *beside)) else SMALL
    return merged("preset=plain", "device=cpu", *model, *beside, word, "steps=2")


def is_refused(words: Words) -> bool:
    """Return True if the config is refused for what this machine lacks, with a remedy; else it is valid."""
    try:
        read(words)
    except MachineError as error:
        refusal = error
    else:
        return False
    assert refusal.code in ("E004", "E005")
    assert refusal.suggestion
    return True
