"""Short runs in which a technique acts, for the test of the catalogue: what each did in its first steps."""

from __future__ import annotations

import atexit
import functools
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import stand_ins
import torch
from conftest import ROOT
from PIL import Image
from running import train, weights
from torch import Tensor, nn

from ptfast.config.checks.validate import validate
from ptfast.config.compose import Composed, apply, compose, finish
from ptfast.config.files import paths
from ptfast.config.files.yaml_file import read_yaml
from ptfast.config.schema import Config
from ptfast.core.distributed import Ranks
from ptfast.core.plain_display import Display
from ptfast.core.protocols import Callback, Logger
from ptfast.core.sections.section import Need, Technique
from ptfast.data.packs.pack_sources import plan_images
from ptfast.data.packs.pack_writer import make
from ptfast.run import Run
from ptfast.training.build import build
from ptfast.training.fit import fit

NUM_STEPS = {"exact": 10, "reordered": 10, "reduced": 10, "training": 30}
"""Steps that the promise of a class is about."""
ON_GPU: set[Need] = {"cuda", "nvidia_tf32", "float8"}
"""Needs of techniques whose trials run on a GPU only."""
SLOW: set[Need] = {"compiler", "ranks"}
"""Needs of techniques whose trials take long."""
Words = tuple[str, ...]


@dataclass
class Trial:
    """The outcome of a run."""

    losses: list[float] = field(default_factory=list)
    """Mean loss of each step."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    as_saved: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict
    """How the trained model saves another model's state once it has loaded it; a rewrite may move terms."""
    plain_loss: tuple[float, float] = (math.nan, math.nan)
    """Loss on a fixed batch before the first and after the last step, in float32, as `plain` computes it."""


def every_option() -> set[str]:
    """All option files, as `group/option`."""
    return {f"{group}/{option}" for group in paths.groups() for option in paths.options(group)}


@functools.cache
def chosen_by_plain() -> frozenset[str]:
    """The options that are there under the preset `plain`, by its own word or by default."""
    conf = paths.builtin_root().conf
    defaults = read_yaml(conf / "config.yaml").data["defaults"]
    chosen = {key: value for entry in defaults if isinstance(entry, dict) for key, value in entry.items()}
    plain = read_yaml(conf / "preset" / "plain.yaml").data
    chosen |= {key: value for key, value in plain.items() if "." not in key}
    return frozenset(f"{group}/{option}" for group, option in chosen.items())


def trial_of(technique: Technique) -> Words:
    """The record's trial, with a text at hand, and a pack, shards or JPEG files where it takes them."""
    words = [word.replace("{text}", str(ROOT / "LICENSE")) for word in technique.trial]
    for name, path in {"pack": _pack, "shards": _shards, "images": _images}.items():
        words = [word.replace(f"{{{name}}}", path()) if f"{{{name}}}" in word else word for word in words]
    return tuple(words)


@functools.cache
def _images() -> str:
    """JPEG files of two classes, for as long as the tests run."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    generator = np.random.default_rng(0)
    for i in range(64):
        path = folder / f"class_{i % 2}" / f"{i}.jpg"
        path.parent.mkdir(exist_ok=True)
        pixels = generator.integers(0, 256, (4, 4, 3), dtype=np.uint8).repeat(12, 0).repeat(12, 1)
        Image.fromarray(pixels).save(path, quality=95)
    return str(folder)


@functools.cache
def _files() -> Path:
    """A pack and shards of a few small images, for as long as the tests run."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    stand_ins.write(folder)
    plan = plan_images(folder / "images", size=None, jpeg=False, skip_corrupt=False)
    make(plan, folder / "pack", workers=1)
    return folder


def _pack() -> str:
    return f"{_files()}/pack"


def _shards() -> str:
    return f"{_files()}/shards"


def words_of(technique: Technique, switch: Words, device: str = "cpu") -> Words:
    """Arguments of a trial: the preset `plain`, then what the record says, later words over earlier ones."""
    steps = f"steps={NUM_STEPS[technique.kind]}"
    words = merged("preset=plain", f"device={device}", steps, *trial_of(technique), *switch)
    # Without what `plain` says anyway, more records share their runs.
    return tuple(sorted({*words} - {option.replace("/", "=") for option in chosen_by_plain()}))


def merged(*words: str) -> Words:
    """Each key once, with its last value."""
    return tuple({word.partition("=")[0].lstrip("+"): word for word in words}.values())


@functools.cache
def read(words: Words) -> Config:
    """The config that a user's arguments mean."""
    config = composed(words)
    return validate(config.tree, config.place)


@functools.cache
def composed(words: Words) -> Composed:
    """The same before it is checked. Hydra takes a tenth of a second for each choice of options."""
    groups = {*paths.groups()}
    options = tuple(word for word in words if word.partition("=")[0] in groups)
    values = [word for word in words if word not in options]
    base = _of_options(options)
    tree, places = apply(base.tree_unresolved, base.places, values)
    return finish(tree, places, base.warnings, words, complete=True)


@functools.cache
def _of_options(options: Words) -> Composed:
    """What options make together, each with its section from a config that has one option of every group."""
    presets = tuple(word for word in options if word.startswith("preset="))
    base = compose(presets, complete=False)
    tree, places = dict(base.tree_unresolved), dict(base.places)
    for word in options:
        group, _, option = word.partition("=")
        if word in presets:
            continue
        if option not in paths.options(group):
            return compose(options, complete=False)
        there = one_of_each(presets, list(paths.options(group)).index(option))
        tree[group] = there.tree_unresolved[group]
        places = {key: place for key, place in places.items() if key.partition(".")[0] != group}
        places |= {key: place for key, place in there.places.items() if key.partition(".")[0] == group}
    return replace(base, tree=tree, tree_unresolved=tree, places=places, arguments=options)


@functools.cache
def one_of_each(presets: Words, number: int) -> Composed:
    """A config with the option of this number of every group that has so many."""
    options = {group: list(paths.options(group)) for group in paths.groups() if group != paths.PRESETS}
    chosen = [f"{group}={names[number]}" for group, names in options.items() if number < len(names)]
    return compose([*presets, *chosen], complete=False)


@functools.cache
def trained(words: Words, plain_words: Words | None = None) -> Trial:
    """The run of `words`, trained in this process.

    Args:
        plain_words: the same with the technique off, whose task says what the plain loss is; None for a run
            of which it is not asked.
    """
    trial = Trial()
    with a_run(*words) as run:
        object.__setattr__(run.plan.intervals, "log_steps", range(1, run.total_steps + 1))
        run.logger = _Losses(trial)
        before = math.nan
        if plain_words is not None:
            with a_run(*plain_words) as plain:
                task = plain.task
            before = plain_loss(run, task)
        # Copied by a callback: the end of a run may put averages in the weights' place.
        run.callbacks.append(_Copy(trial))
        with mock.patch("ptfast.training.checkpointer.Checkpointer.save"):
            fit(run)
        trial.as_saved = functools.partial(_loaded_and_saved, run.model)
        if plain_words is not None:
            trial.plain_loss = before, plain_loss(run, task)
    return trial


def trained_by_ranks(words: Words, folder: Path, plain_words: Words | None = None) -> Trial:
    """The run of `words` by two processes, as a user starts it; what else as in `trained`."""
    two = merged("parallel=ddp", "parallel.nproc=2", *words)
    assert train(*two, "log_every=1steps", f"run.dir={folder}") == 0
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    trial = Trial([line["loss"] for line in lines if line["split"] == "train"], weights(folder))
    if plain_words is not None:
        with a_run(*merged(*plain_words, "parallel=single", "parallel.nproc=1")) as plain:
            before = plain_loss(plain, plain.task)
            plain.model.load_state_dict(trial.weights)
            trial.plain_loss = before, plain_loss(plain, plain.task)
    return trial


@contextmanager
def a_run(*words: str) -> Iterator[Run]:
    """A run that was built, with its processes stopped afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        run = build(read(words), ranks=Ranks(), folder=Path(folder), display=Display())
        try:
            yield run
        finally:
            run.close()


@torch.no_grad()
def plain_loss(run: Run, task: Any) -> float:
    """Mean loss of the run's model over its first held-out batch."""
    data, _ = next(iter(run.eval_loaders["val"]))
    was_training = run.model.training
    run.model.eval()
    loss, count = task.evaluate(run.model, data, task.metrics().to(run.device))
    run.model.train(was_training)
    return float(loss) / float(count)


def _loaded_and_saved(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    model.load_state_dict(state)
    return dict(model.state_dict())


class _Losses(Logger):
    """Takes the figures of a run in the logger's place."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial

    def log(self, record: dict[str, Any]) -> None:
        if record["split"] == "train":
            self._trial.losses.append(record["loss"])

    def close(self) -> None:
        """Nothing to close."""


class _Copy(Callback):
    """Keeps the weights of the last step."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial

    def on_step(self, run: Run, step: int) -> None:
        if step == run.total_steps:
            self._trial.weights = {name: t.detach().clone() for name, t in run.model.state_dict().items()}
