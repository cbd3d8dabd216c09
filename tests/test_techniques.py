"""Every technique keeps the promise of its class, and every option of every group is known and trains."""

from __future__ import annotations

import ast
import itertools
import re
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from conftest import ROOT
from failures import failures
from torch.utils._python_dispatch import TorchDispatchMode
from trials import (
    NUM_STEPS,
    ON_GPU,
    SLOW,
    Trial,
    a_run,
    chosen_by_plain,
    composed,
    every_option,
    trained,
    trained_by_ranks,
    words_of,
)

from ptfast.config.catalogue import CATALOGUE
from ptfast.config.files import paths
from ptfast.core.devices import multiplies_bf16
from ptfast.core.protocols import DataInfo
from ptfast.core.sections.section import PROMISES, Need, Technique
from ptfast.data.loaders.pipeline import LoaderOptions, Prepare
from ptfast.data.map_source import TensorSource, as_tensor
from ptfast.training.loop.step import Trainer

BY_NAME = {technique.name: technique for technique in CATALOGUE}
SWITCHED = [technique for technique in CATALOGUE if technique.on]

PUBLICATION = re.compile(r"\b(19|20)\d\d\b|\w/\w|documentation|tutorial|Guide|data sheet")
"""A source says where figures can be looked up: a year, a repository, documentation."""
NO_TECHNIQUES = {
    "data": "what is trained on",
    "model": "what is trained",
    "saving": "what is kept",
    "numerics": "what becomes of steps that are not finite",
    "logger": "where figures go",
    "sampling": "which samples come, for data in which some are rare",
    "preset": "sets of techniques",
}
"""Groups of which no option is a technique, and what they are about."""
ALWAYS_ON = {
    "threads by cores": "test_backend.py::test_ranks_share_the_cores",
    "tensors made on the device": "test_techniques.py::test_a_step_makes_no_tensor_on_the_host",
    "debugging aids off": "test_debug_aids.py::test_off_leaves_the_run_as_it_is",
    "arrays without a copy": "test_techniques.py::test_built_in_data_shares_the_memory_of_its_arrays",
    "tokens kept on disk": "test_batching.py::test_tokens_are_kept_under_text_and_tokenizer",
    "gradients set to None": "test_gradients.py::test_none_and_zero_give_the_same_bits",
    "loss over the global count of items": "test_accumulation.py::test_accumulation_changes_nothing",
    "running sums on the device": "test_techniques.py::test_a_step_reads_nothing",
    "inference mode": "test_fit.py::test_an_evaluation_keeps_nothing_for_a_backward_pass",
    "larger evaluation batches": "test_fit.py::test_evaluation_takes_what_fits_into_memory",
    "weights converted once a step": "test_accumulation.py::test_a_step_converts_its_weights_once",
    "learning rates from a table": "test_schedule.py::test_any_segment_of_any_option_is_the_same_function",
}
"""Techniques that cannot be switched off, and the test that shows each."""
NOT_EMULATED = (
    "nvidia_tf32",
    "float8",
    "compiler",
    "expandable segments",
    "one kernel for a batch of images",
)
"""Needs and names of techniques whose trials take a real GPU."""
NOT_FOR_SPEED = {"backend/deterministic": "the same bits in every run, at the price of speed"}
"""Options that are no techniques, in groups that hold some."""
SAME_NUMBERS_ELSEWHERE = {
    "optimizer/adamw_finetune": "optimizer/adamw",
    "optimizer/adamw_gpt": "optimizer/adamw",
    "optimizer/adamw_gpt2": "optimizer/adamw",
    "optimizer/adamw_onecycle": "optimizer/adamw",
    "optimizer/adamw_text": "optimizer/adamw",
    "optimizer/muon_airbench94": "optimizer/muon",
    "optimizer/sgd_airbench96": "optimizer/sgd",
    "optimizer/sgd_cifar": "optimizer/sgd",
    "optimizer/sgd_imagenet": "optimizer/sgd",
}
"""Options with a recipe's numbers for another option."""


def name_of(value: Any) -> str:
    return value.name.replace(" ", "-") if isinstance(value, Technique) else str(value)


def marked(technique: Technique) -> Any:
    """The record as a parameter, marked by what its trial needs."""
    marks = []
    if ON_GPU & {*technique.needs}:
        real = (need for need in (*technique.needs, technique.name) if need in NOT_EMULATED)
        marks.append(pytest.mark.gpu(*real))
    if SLOW & {*technique.needs}:
        marks.append(pytest.mark.slow)
    for need, package in {"schedulefree": "schedulefree", "peft": "peft", "float8": "torchao"}.items():
        if need in technique.needs:
            marks.append(pytest.mark.skipif(find_spec(package) is None, reason=f"needs {package}"))
    if "model=hf" in technique.trial:
        marks.append(pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers"))
    if "compiler" in technique.needs:
        # The compiler looks at every tensor's gradient, and hides torch's warning only once it is given.
        marks.append(pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"))
    return pytest.param(technique, marks=marks, id=name_of(technique))


# The records themselves.


def test_names_are_unique() -> None:
    assert [name for name, count in Counter(t.name for t in CATALOGUE).items() if count > 1] == []


def test_a_record_is_complete() -> None:
    assert failures(check_complete, CATALOGUE) == []


def check_complete(technique: Technique) -> None:
    for text in (technique.why, technique.claim, technique.avoid, technique.audit):
        assert text.endswith(".")
    assert technique.measured.endswith(".") or not technique.measured
    assert technique.source
    assert technique.name == technique.name.strip()
    assert technique.kind in PROMISES
    assert set(technique.needs) <= set(get_args(Need))
    assert (technique.drift is not None) == (technique.kind == "reduced")
    assert bool(technique.on) == bool(technique.off)
    if not technique.on:
        file, _, function = ALWAYS_ON[technique.name].partition("::")
        tree = ast.parse(next((ROOT / "tests").rglob(file)).read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def numbers(text: str) -> set[str]:
    return set(re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", text))


def test_every_figure_of_a_record_has_its_source() -> None:
    """Others' figures have a publication; ours have the command that measures them, beside it in the docs."""
    assert failures(check_figures, CATALOGUE) == []


def check_figures(technique: Technique) -> None:
    for text in (technique.claim, technique.source):
        assert not re.search(r"\b(here|our|measured)\b", text), text
    if numbers(technique.claim):
        assert PUBLICATION.search(technique.source), technique.source
    assert bool(technique.measured) == bool(technique.command)
    if technique.command:
        python, script, *words = technique.command.split()
        assert python == "python"
        code = (ROOT / script).read_text()
        assert all(f'"{word}"' in code for word in words if word.startswith("--"))
        pages = [path.read_text() for path in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"))]
        sections = [section for page in pages for section in page.split("\n## ")]
        beside = " ".join(section for section in sections if script in section)
        assert all(word in beside for word in words)
        assert numbers(technique.measured) <= numbers(beside)


@pytest.mark.parametrize("technique", SWITCHED, ids=name_of)
def test_the_switch_changes_the_config_and_back(technique: Technique) -> None:
    """Off is what `plain` says, unless the recipe decides."""
    on, off = (composed(words_of(technique, switch)).tree for switch in (technique.on, technique.off))
    assert on != off
    if technique.kind != "training":
        assert off == composed(words_of(technique, ())).tree


def test_options_that_records_name_exist() -> None:
    known = every_option()
    for technique in CATALOGUE:
        assert set(technique.options) <= known, technique.name


def test_every_option_has_a_record() -> None:
    """An option is a technique's, what is there when it is off, or of a group that holds no techniques."""
    named = {option for technique in CATALOGUE for option in technique.options}
    words = [word for technique in CATALOGUE for word in technique.off]
    off = {word.replace("=", "/") for word in words if "." not in word} | chosen_by_plain()
    assert not named & set(SAME_NUMBERS_ELSEWHERE)
    known = (
        named
        | off
        | set(NOT_FOR_SPEED)
        | {o for o, base in SAME_NUMBERS_ELSEWHERE.items() if base in named | off}
    )
    assert {option for option in every_option() - known if option.split("/")[0] not in NO_TECHNIQUES} == set()


def test_a_group_without_techniques_has_none() -> None:
    assert set(NO_TECHNIQUES) <= set(paths.groups())
    for technique in CATALOGUE:
        assert not {option.split("/")[0] for option in technique.options} & set(NO_TECHNIQUES)


# What the classes promise.


def trainer_of(technique: Technique, folder: Path) -> Callable[..., Trial]:
    """The processes that train the record's runs: this one, or two that it starts."""
    if "ranks" not in technique.needs:
        return trained
    numbers = itertools.count()
    return lambda words, *plain: trained_by_ranks(words, folder / f"run{next(numbers)}", *plain)


# What the compiler itself provokes and hides, in looking at tensors that are no leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("technique", [marked(t) for t in SWITCHED if t.kind != "training"])
def test_it_gives_what_plain_gives(technique: Technique, tmp_path: Path) -> None:
    """Exact: the same bits after ten steps; reordered: rounding; reduced: a bounded drift of the loss."""
    device = "cuda" if ON_GPU & {*technique.needs} else "cpu"
    train_it = trainer_of(technique, tmp_path)
    off, on = (train_it(words_of(technique, switch, device)) for switch in (technique.off, technique.on))
    assert len(off.losses) == len(on.losses) == NUM_STEPS[technique.kind]
    # A rewrite may take parameters away, never add any.
    assert on.weights
    assert set(on.weights) <= set(off.weights)
    if technique.kind == "exact":
        for name, value in on.weights.items():
            assert torch.equal(value, off.weights[name]), name
    elif technique.kind == "reordered":
        # On a GPU, cuDNN's ways of computing a convolution differ by more than rounding.
        assert distance(on.weights, on.as_saved(off.weights)) < (1e-4 if device == "cpu" else 1e-2)
    elif device == "cpu" and "half" in technique.needs and not multiplies_bf16("cpu"):
        assert on.losses == off.losses, "amp is float32 on a CPU that gains nothing by bf16"
    else:
        assert technique.drift is not None
        drift = max(abs(a - b) / abs(b) for a, b in zip(on.losses, off.losses, strict=True))
        assert 0 < drift < technique.drift


@pytest.mark.parametrize("technique", [marked(t) for t in SWITCHED if t.kind == "training"])
def test_it_trains(technique: Technique, tmp_path: Path) -> None:
    """The plain loss on held-out samples falls by a fifth in thirty steps."""
    device = "cuda" if ON_GPU & {*technique.needs} else "cpu"
    off, on = (words_of(technique, switch, device) for switch in (technique.off, technique.on))
    before, after = trainer_of(technique, tmp_path)(on, off).plain_loss
    assert after < 0.8 * before


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Norm of the difference of two models' weights, relative to that of the second."""
    names = [name for name, value in one.items() if value.is_floating_point()]
    left, right = (torch.cat([w[name].double().flatten() for name in names]) for w in (one, other))
    return float((left - right).norm() / right.norm())


# What cannot be switched off.


class Operations(TorchDispatchMode):
    """Names of what is computed while it is open."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def operations() -> set[str]:
    """The operations of steps that do not log."""
    with a_run("model.hidden=[16]", "log_every=50", "micro_batches=2", "gradients.clip_norm=1") as run:
        trainer = Trainer(run)
        batches = run.train_loader.steps(0, 20)
        trainer.train(batches, 2)
        with Operations() as operations:
            trainer.train(batches, 8)
    return operations.names


def test_a_step_reads_nothing(operations: set[str]) -> None:
    assert {"addmm", "_foreach_norm"} & operations
    assert not operations & {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "_to_copy"}


def test_a_step_makes_no_tensor_on_the_host(operations: set[str]) -> None:
    assert not operations & {"lift_fresh", "scalar_tensor", "_to_copy", "arange", "full", "zeros"}


def test_built_in_data_shares_the_memory_of_its_arrays() -> None:
    array = np.arange(6, dtype=np.float32).reshape(3, 2)
    tensor = as_tensor(array)
    array[1, 1] = 7
    assert tensor[1, 1] == 7
    inputs = TensorSource(tensor, torch.arange(3)).inputs
    assert inputs.data_ptr() == tensor.data_ptr()
    info = DataInfo(kind="features", task="classification")
    prepare = Prepare(LoaderOptions(torch.device("cpu")), info, images=False)
    assert prepare.move(inputs) is inputs
    assert prepare.inputs(inputs) is inputs
