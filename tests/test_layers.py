"""The rooms of the package: files import from rooms before their own, in no circle; light ones stay light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

PACKAGE = ROOT / "ptfast"

ROOMS = (
    *("core", "techniques", "optim", "data", "models", "tasks", "config", "run", "profiling", "report"),
    *("training", "launch", "measure", "cli", "api"),
)
"""A file imports only from its own room and from those before it."""
MODULES = {"run", "api"}
"""Rooms that are a module; the others are folders."""
MOST_LINES = 400
LONGER = {"data/sources/custom_dataset.py": 410, "report/html/run_report.py": 440}
"""Modules that are still to be split, and the length that they may not exceed."""
MOST_ENTRIES = 15

WHOLE_CONFIG = {
    "config/": "makes it",
    "cli/": "the commands",
    "launch/": "the half of `train` that starts processes",
    "measure/": "the half of `find` that measures: a trial is a config with keys changed",
    "training/build.py": "hands each part its own section",
    "training/stages/": "what `build` walks; commands load data by `load_data` and `build_choice`",
    "training/saved_model.py": "builds a model to evaluate, by the stages of `build`",
}
"""The only places that take the whole config, and why; all others take their own section, or values."""

# Importing these takes seconds; a config error or `--help` must not wait for them.
HEAVY = {"torch", "torchvision", "torchmetrics", "transformers"}
LIGHT = (
    "__main__",
    "config/",
    "cli/command_line",
    "cli/flags",
    "core/errors",
    "core/durations",
    "core/clock",
    "core/protocols",
)
LIGHT_MODULES = (
    "__main__",
    "config.compose",
    "config.read",
    "cli.command_line",
    "core.protocols",
    "core.clock",
)


def files(package: Path) -> dict[str, Path]:
    """The modules of a package by name, such as `data.sampling.sampler`; a folder's own by the folder's."""
    names = {path: path.relative_to(package).with_suffix("").parts for path in sorted(package.rglob("*.py"))}
    return {".".join(parts[:-1] if parts[-1] == "__init__" else parts): path for path, parts in names.items()}


def imports(source: str, module: str, is_package: bool) -> Iterator[tuple[str, bool]]:
    """Yield the absolute names that `source` imports, and whether each is imported as the module loads."""

    def walk(node: ast.AST, at_load: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, at_load) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    parents = module.split(".") if is_package else module.split(".")[:-1]
                    base = ".".join(
                        [*parents[: len(parents) - child.level + 1], *filter(None, [child.module])]
                    )
                yield from ((f"{base}.{alias.name}", at_load) for alias in child.names)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                yield from walk(ast.Module(body=child.body, type_ignores=[]), False)
                yield from walk(ast.Module(body=child.orelse, type_ignores=[]), at_load)
            else:
                in_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                yield from walk(child, at_load and not in_function)

    yield from walk(ast.parse(source), True)


def violations(package: Path) -> list[str]:
    """Imports in `package` that break the order of the rooms or go in a circle, one sentence each."""
    found, modules = [], files(package)
    graph: dict[str, set[str]] = {module: set() for module in modules}
    for module, path in modules.items():
        place = path.relative_to(package).as_posix()
        room = module.partition(".")[0]
        room = room if "/" in place or room in ROOMS else ""
        if room and room not in ROOMS:
            found.append(f"{place} is in none of ROOMS")
            continue
        name = f"ptfast.{module}".removesuffix(".")
        for imported, at_load in imports(path.read_text("utf-8"), name, path.name == "__init__.py"):
            top, _, rest = imported.partition(".")
            if top in ("hydra", "omegaconf") and room != "config":
                found.append(f"{place} imports {top}, which only config/ may")
            if top in HEAVY and at_load and place.startswith(LIGHT):
                found.append(f"{place} imports {top} as it loads")
            if imported == "ptfast.config.schema.Config" and not place.startswith(tuple(WHOLE_CONFIG)):
                found.append(f"{place} takes the whole Config, not its own section of it")
            if top != "ptfast":
                continue
            while rest and rest not in modules:
                rest = rest.rpartition(".")[0]
            other = rest.partition(".")[0]
            if room and other in ROOMS and ROOMS.index(other) > ROOMS.index(room):
                found.append(f"{place} imports {rest}, which is in a later room")
            elif rest and rest != module:
                graph[module].add(rest)
    found += [f"a circle: {', '.join(circle)}" for circle in circles(graph)]
    return list(dict.fromkeys(found))


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The modules that import each other: what is left once all that begin or end nothing are taken out."""
    left = {module: set(others) for module, others in graph.items()}
    while True:
        wanted = {other for others in left.values() for other in others}
        ends = {module for module, others in left.items() if not others or module not in wanted}
        if not ends:
            return [sorted(left)] if left else []
        left = {module: others - ends for module, others in left.items() if module not in ends}


def test_modules_are_short() -> None:
    lengths = {
        path.relative_to(PACKAGE).as_posix(): len(path.read_text("utf-8").splitlines())
        for path in PACKAGE.rglob("*.py")
    }
    assert {name: n for name, n in lengths.items() if n > LONGER.get(name, MOST_LINES)} == {}


def test_the_package_keeps_its_rooms() -> None:
    assert violations(PACKAGE) == []


def test_whoever_may_take_the_whole_config_does() -> None:
    importing = [path for path in PACKAGE.rglob("*.py") if "schema import Config" in path.read_text("utf-8")]
    places = [path.relative_to(PACKAGE).as_posix() for path in importing]
    assert [room for room in WHOLE_CONFIG if not any(place.startswith(room) for place in places)] == []


def test_names_and_folders_can_be_told_apart() -> None:
    """A newcomer who searches for a module finds one, and a folder fits on a screen."""
    entries = [path for path in PACKAGE.rglob("*") if path.suffix == ".py" or path.is_dir()]
    entries = [path for path in entries if path.name not in ("__init__.py", "__main__.py", "__pycache__")]
    assert [name for name, count in Counter(path.stem for path in entries).items() if count > 1] == []
    crowded = Counter(path.parent for path in entries)
    assert [str(folder) for folder, count in crowded.items() if count > MOST_ENTRIES] == []


def test_contributing_names_the_rooms_in_their_order() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    table = re.findall(r"^\| `(\w+)(?:/|\.py)` \|", text, re.MULTILINE)
    assert tuple(table) == ROOMS
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms == {*ROOMS} - MODULES


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("newcomer/one.py", "", "newcomer/one.py is in none of ROOMS"),
        ("core/errors.py", "from ptfast.data.cifar import Cifar", "core/errors.py imports data"),
        ("data/cifar.py", "import ptfast.models.mlp", "data/cifar.py imports models"),
        ("data/cifar.py", "from ..models import mlp", "data/cifar.py imports models"),
        ("data/__init__.py", "from .. import models", "data/__init__.py imports models"),
        ("data/cifar.py", "def f():\n    from ptfast.cli import flags", "data/cifar.py imports cli"),
        ("data/cifar.py", "if TYPE_CHECKING:\n    from ptfast.cli import x", "data/cifar.py imports cli"),
        ("data/cifar.py", "try:\n    import omegaconf\nexcept ImportError:\n    pass", "imports omegaconf"),
        ("cli/flags.py", "import torch.nn as nn", "cli/flags.py imports torch as it loads"),
        ("training/fit.py", "from ptfast.config.schema import Config", "takes the whole Config"),
        ("data/a.py", "from ptfast.data.b import x", "a circle: data.a, data.b"),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, path: str, source: str, complaint: str) -> None:
    others = {"data/cifar.py": "", "models/mlp.py": "", "models/__init__.py": "", "cli/__init__.py": ""}
    others["data/b.py"] = "from ptfast.data import a" if "circle" in complaint else ""
    for name, text in {**others, path: source}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (found,) = violations(tmp_path)
    assert complaint in found


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("data/cifar.py", "from ptfast.data import sampler\nfrom . import draws\nfrom ..core import errors"),
        ("data/cifar.py", "if TYPE_CHECKING:\n    from ptfast.core.errors import DataError"),
        ("cli/flags.py", "def main():\n    import torch\n    from ptfast.launch.launcher import launch"),
        ("config/compose.py", "import hydra"),
        ("training/fit.py", "from ptfast import __version__"),
    ],
)
def test_a_right_import_is_let_through(tmp_path: Path, path: str, source: str) -> None:
    file = tmp_path / path
    file.parent.mkdir(exist_ok=True)
    file.write_text(source)
    assert violations(tmp_path) == []


def test_light_modules_load_without_heavy_ones() -> None:
    code = (
        "import importlib, sys\n"
        f"for name in {LIGHT_MODULES}:\n"
        "    importlib.import_module('ptfast.' + name)\n"
        f"    assert not (heavy := {HEAVY} & set(sys.modules)), f'{{name}} loads {{heavy}}'"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_what_compiles_nothing_does_not_load_the_compiler() -> None:
    """In one process for all of it, since it takes seconds to start."""
    code = """
import io, sys, torch
from PIL import Image
import ptfast.training.build
from ptfast.techniques.backend import Backend
from ptfast.techniques.backend.torch_settings import apply_backend
from ptfast.techniques.checkpointing import Checkpointing
from ptfast.techniques.checkpointing.activation_checkpointing import apply_checkpointing, apply_memory_budget
from ptfast.core.sections.targets import Target
from ptfast.core.tensors.torch_internals import backward
from ptfast.data.decoding.image_decoding import decode
from ptfast.profiling.operator_counting import Operators, StepCounter
from ptfast.models.gpt import Gpt
from ptfast.optim.build_optimizer import build_optimizer, build_step

heavy = {"torch._dynamo", "torch._functorch.config", "torch.utils.flop_counter", "sympy", "torchvision"}
apply_backend(Backend(threads=1, cudnn_benchmark=True), device=torch.device("cpu"))
apply_checkpointing(Gpt(5, 4, width=4, heads=2), Checkpointing(mode="none"))
apply_memory_budget(None)
assert not heavy & set(sys.modules), "building"
inputs = torch.ones(3, requires_grad=True)
hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
with Operators() as operators, hooks:
    backward((inputs * inputs).sum(), torch.tensor(0.5))
assert inputs.grad.tolist() == [1, 1, 1]
assert len(operators.calls) > 2
assert not heavy & set(sys.modules), "counting"
file = io.BytesIO()
Image.new("RGB", (16, 16)).save(file, "JPEG")
assert decode(file.getvalue(), "black.jpg").pixels.shape == (16, 16, 3)
assert not heavy & set(sys.modules), "decoding"
optimizers = {"torch.optim.SGD": {"lr": 0.1, "fused": "auto"}}
ours = "lars.Lars", "lamb.Lamb", "novograd.Novograd", "muon.Muon"
for name in ours:
    optimizers[f"ptfast.optim.{name}"] = {}
for path, keywords in optimizers.items():
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3)))
    optimizer, _ = build_optimizer(Target(path, keywords), model, torch.device("cpu"))
    model(torch.ones(1, 2)).sum().backward()
    build_step(optimizer)()
    optimizer.load_state_dict(optimizer.state_dict())
    assert not heavy & set(sys.modules), path
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
