"""The layers of the package: a module imports only from rows before its own, and light modules stay light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "ptfast"

# A module or package (taken as one) imports only from rows before its own, never from its own row.
LAYERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "0 ground": (
        ("errors", "techniques"),
        (
            "clock",
            "durations",
            "distributed",
            "units",
            "run_folder",
            "machine",
            "splitmix",
            "devices",
            "shards",
        ),
        ("run", "plan", "stopping"),
        ("config",),
        ("blocks",),
    ),
    "1 parts": (
        (
            *("data", "models", "optim", "tasks"),
            *("precision", "schedule", "gradients", "parallel", "checkpointing", "compile", "rewrites"),
            *("curriculum", "backend", "debug", "ema", "flip", "full_size", "seeding", "applies"),
            *("saving", "scaling", "logger", "display", "user_code"),
        ),
    ),
    "1 pages": (("report", "panel"), ("compare", "catalogue")),
    "2 loop": (("measure", "first_step"), ("trainer", "run_state"), ("loop",)),
    "3 build": (
        ("batching",),
        ("loading",),
        ("averaging", "shaping"),
        ("runner",),
        ("evaluate",),
        ("predict",),
    ),
    "4 processes": (("worker", "place", "elastic"), ("launch", "dry_run")),
    "5 tools": (("find",), ("sweep", "pack_command", "find_command", "flags")),
    "6 commands": (("cli",), ("__main__",)),
}
ROWS = [row for rows in LAYERS.values() for row in rows]
RANK = {module: rank for rank, row in enumerate(ROWS) for module in row}

# Importing these takes seconds; a config error or `--help` must not wait for them.
HEAVY = {"torch", "torchvision", "torchmetrics", "matplotlib", "transformers"}
LIGHT_MODULES = ("errors", "durations", "clock", "run", "config", "cli", "__main__")


def imports(source: str, module: str, is_package: bool) -> Iterator[tuple[str, bool]]:
    """Yield the absolute names that `source` imports, and whether each is imported as the module loads.

    Imports under `if TYPE_CHECKING:` are left out: they are gone at run time, and a type may name
    what a later layer defines.
    """

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
                yield from walk(ast.Module(body=child.orelse, type_ignores=[]), at_load)
            else:
                in_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                yield from walk(child, at_load and not in_function)

    yield from walk(ast.parse(source), True)


def violations(package: Path) -> list[str]:
    """What in `package` breaks the table, one sentence each."""
    found = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        own, is_package = parts[0], parts[-1] == "__init__"
        if own not in RANK and own != "__init__":
            found.append(f"{own} has no row in LAYERS")
            continue
        name = ".".join(["ptfast", *(parts[:-1] if is_package else parts)])
        place = path.relative_to(package).as_posix()
        for imported, at_load in imports(path.read_text(encoding="utf-8"), name, is_package):
            top, *rest = imported.split(".")
            if top in ("hydra", "omegaconf") and own != "config":
                found.append(f"{place} imports {top}, which only config/ may")
            if top in HEAVY and at_load and own in LIGHT_MODULES:
                found.append(f"{place} imports {top} as it loads")
            other = rest[0] if rest else ""
            if top == "ptfast" and other in RANK and other != own and RANK[other] >= RANK.get(own, -1):
                found.append(f"{place} imports {other}, which is not in a row before its own")
    return list(dict.fromkeys(found))


def test_the_package_keeps_its_layers() -> None:
    assert violations(PACKAGE) == []


def test_the_tables_name_what_there_is() -> None:
    modules = {
        path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert set(RANK) == modules - {"__init__"}
    table = re.findall(r"^\| [a-z]+ \| (.*) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    named = {
        word.rstrip("/") for row in table for cell in re.findall(r"`(.*?)`", row) for word in cell.split()
    }
    assert named == set(RANK)


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("newcomer.py", "", "newcomer has no row in LAYERS"),
        ("errors.py", "from ptfast.run import DataInfo", "errors.py imports run"),
        ("data/cifar.py", "import ptfast.models.mlp", "data/cifar.py imports models"),
        ("data/cifar.py", "from ..models import mlp", "data/cifar.py imports models"),
        ("data/__init__.py", "from .. import models", "data/__init__.py imports models"),
        ("loop.py", "def f():\n    from ptfast import runner", "loop.py imports runner"),
        ("data/cifar.py", "try:\n    import omegaconf\nexcept ImportError:\n    pass", "imports omegaconf"),
        ("cli.py", "import torch.nn as nn", "cli.py imports torch as it loads"),
        ("__init__.py", "from ptfast.loop import fit", "__init__.py imports loop"),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, path: str, source: str, complaint: str) -> None:
    file = tmp_path / path
    file.parent.mkdir(exist_ok=True)
    file.write_text(source)
    (found,) = violations(tmp_path)
    assert complaint in found


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "data/cifar.py",
            "from ptfast.data import sampler\nfrom . import draws\nfrom ..errors import DataError",
        ),
        (
            "data/cifar.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ptfast.loop import fit",
        ),
        ("cli.py", "def main():\n    import torch\n    from ptfast.launch import launch"),
        ("config/compose.py", "import hydra"),
        ("loop.py", "from ptfast import __version__"),
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
import sys, torch
import ptfast.runner
from ptfast.backend import apply_backend
from ptfast.checkpointing import apply_checkpointing, apply_memory_budget
from ptfast.config.targets import Target
from ptfast.measure.counting import Operators, StepCounter
from ptfast.models.gpt import Gpt
from ptfast.optim import build_optimizer, build_step

heavy = {"torch._dynamo", "torch._functorch.config", "torch.utils.flop_counter"}
apply_backend(1, cudnn_benchmark=True, deterministic=False, device=torch.device("cpu"))
apply_checkpointing(Gpt(5, 4, width=4, heads=2), "none")
apply_memory_budget(None)
assert not heavy & set(sys.modules), "building"
inputs = torch.ones(3, requires_grad=True)
hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
with Operators() as operators, hooks:
    (inputs * inputs).sum().backward()
assert len(operators.found) > 2
assert not heavy & set(sys.modules), "counting"
optimizers = {"torch.optim.SGD": {"lr": 0.1, "fused": "auto"}}
for name in ("lars.Lars", "lamb.Lamb", "nvlamb.Nvlamb", "novograd.Novograd", "muon.Muon"):
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
