"""Warm start: load saved weights into a model, with a fresh head if the classes differ."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ptfast.core.errors import SavedStateError
from ptfast.core.run_directory import read_json
from ptfast.core.tensors.checkpoint_files import TREE, check_files, check_stored, read_parts
from ptfast.core.tensors.checkpoint_folders import name_checkpoint
from ptfast.core.tensors.dtensors import whole
from ptfast.core.tensors.trees import map_tensors

KEY = "model.weights"
NUM_SHOWN = 3


def load_weights(model: nn.Module, source: str | Path, *, replace_head: bool = False) -> list[str]:
    """Copy the weights in `source` into `model`, in place.

    The file cannot run code, and checksums detect damage. Prefixes that `torch.compile` and data-parallel
    wrappers leave in names are removed.

    Args:
        source: a `.pt` or `.safetensors` file, a run directory (its best checkpoint, else its last), or the
            folder of one checkpoint, by one rank or several. Averaged weights (`ema`) are used if present.
        replace_head: keep the initial weights of layers that differ only in their number of outputs.

    Returns:
        Messages for the user.

    Raises:
        SavedStateError: there is no such file (S004), it is damaged or contains pickled objects (S001), or it
            belongs to another model (S002).
    """
    path = _find_file(Path(source))
    if path.name == TREE:
        check_files(path.parent)
        model_part, training = read_parts(path.parent)
        weights = map_tensors(whole, model_part)
    else:
        weights, training = _read(path), {}
        # For a run, use its averaged weights, if any; for a file, use its own weights.
        if not Path(source).is_file() and path.with_name("training.pt").is_file():
            training = _read_pt(path.with_name("training.pt"))
    average = training.get("ema", {})
    # Before the first update, the averages are only the initial weights.
    averages = map_tensors(whole, average["averages"]) if average.get("updates") else {}
    weights = _plain_names(model, weights | averages)
    head, fresh = _check_fit(model, weights, path, replace_head)
    model.load_state_dict({name: value for name, value in weights.items() if name not in head}, strict=False)
    kind = "averaged weights" if averages else "weights"
    # A run's folder, unlike a file, does not tell which checkpoint was chosen.
    facts = {} if Path(source).is_file() else read_json(path.with_name("state.json"))
    which = f" ({name_checkpoint(path.parent, facts)})" if "progress" in facts else ""
    return [f"{kind} from {path}{which}", *(f"fresh head: {line}" for line in fresh)]


def _plain_names(model: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return `weights` without the prefixes of `torch.compile` and DDP, unless the model has them itself."""
    own = model.state_dict()
    weights = {name.replace("_orig_mod.", ""): value for name, value in weights.items()}
    while weights and all(name.startswith("module.") and name not in own for name in weights):
        weights = {name.removeprefix("module."): value for name, value in weights.items()}
    return weights


def _check_fit(
    model: nn.Module, weights: dict[str, Tensor], path: Path, replace_head: bool
) -> tuple[list[str], list[str]]:
    """Return weights that stay random because only the number of outputs differs, and a message for each.

    Raises:
        SavedStateError: S002 for weights that do not fit.
    """
    own, head, shapes = model.state_dict(), list[str](), dict[str, str]()
    for name, ours in own.items():
        theirs = weights.get(name)
        if theirs is None or theirs.shape == ours.shape:
            continue
        layer = model.get_submodule(name.rpartition(".")[0])
        if isinstance(layer, (nn.Linear, nn.Conv2d)) and theirs.dim() and theirs.shape[1:] == ours.shape[1:]:
            head.append(name)
        there, here = ("x".join(map(str, each.shape)) or "a scalar" for each in (theirs, ours))
        shapes[name] = f"{name} is {there} there and {here} here"
    problems = [f"{name} is missing" for name in own if name not in weights]
    problems += [f"{name} is not in this model" for name in weights if name not in own]
    problems += [line for name, line in shapes.items() if name not in head]
    fresh = [shapes[name] for name in head]
    if problems or (fresh and not replace_head):
        hint = "Build the model that was saved: its run's config.yaml names it"
        if any(".lora_A." in name for name in weights.keys() - own.keys()):
            hint = "They were trained with LoRA: give what `ptfast export` makes of that run"
        if not problems:
            hint = "Set model.replace_head=true to start with a fresh head"
        problems = problems or fresh
        more = f"; and {len(problems) - NUM_SHOWN} more" if len(problems) > NUM_SHOWN else ""
        what = f"the weights do not fit this model: {'; '.join(problems[:NUM_SHOWN])}{more}"
        raise SavedStateError("S002", what, key=KEY, value=path, suggestion=hint)
    return head, fresh


def _find_file(source: Path) -> Path:
    if source.is_file():
        # The file of one rank is only a part of the checkpoint in its folder.
        tree = source.resolve().with_name(TREE)
        return tree if tree.is_file() else source.resolve()
    for folder in ("saved/best", "saved/last", "best", "last", "."):
        for name in ("model.pt", "model.safetensors", TREE):
            if (source / folder / name).is_file():
                return (source / folder / name).resolve()
    what = "the folder contains no saved weights" if source.is_dir() else "no such file or folder"
    hint = "Give a .pt or .safetensors file, a run directory, or `pretrained`"
    raise SavedStateError("S004", what, key=KEY, value=source, suggestion=hint)


def _read(path: Path) -> dict[str, Tensor]:
    """Return the named tensors of one file, on the CPU."""
    if path.suffix == ".safetensors":
        try:
            content = load_file(path, device="cpu")
        except Exception as error:
            raise _damaged(path) from error
    else:
        content = _read_pt(path)
    for wrapper in ("model", "state_dict"):
        if isinstance(content, dict) and isinstance(content.get(wrapper), dict):
            content = content[wrapper]
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise SavedStateError("S002", "the file contains no named tensors", key=KEY, value=path)
    return content


def _read_pt(path: Path) -> Any:
    try:
        # torch does not verify checksums: a flipped bit would become a wrong weight.
        check_stored(path)
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                broken = archive.testzip()
            if broken is not None:
                raise zipfile.BadZipFile(broken)
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # A damaged pickle may raise anything.
        if "Unsupported" in str(error):
            what = "contains pickled objects, which could run code; only tensors are read"
            raise _damaged(path, what) from error
        raise _damaged(path) from error


def _damaged(
    path: Path, what: str = "is damaged (truncated, empty or changed since it was written)"
) -> SavedStateError:
    return SavedStateError("S001", what, key=KEY, value=path, suggestion="Give another file or state folder")
