"""Parameter groups: settings of each parameter by its name, its dimensions and its depth."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError
from ptfast.core.tensors.torch_internals import BatchNorm
from ptfast.optim import Optimizer, ParameterGroup
from ptfast.optim.muon import Muon
from ptfast.optim.novograd import Novograd
from ptfast.techniques.repeated_blocks import find_blocks

START = Duration(0, "epochs")


@dataclass(frozen=True)
class RequestedGroup:
    """Settings of one parameter; parameters with equal settings form a group."""

    lr_scale: float = 1.0
    weight_decay: float | None = None
    name: str | None = None
    """Name of an optimizer that the task steps itself."""
    trains_from: Duration = START
    trains_until: Duration | None = None

    @property
    def frozen(self) -> bool:
        """Return True if the parameter never trains."""
        return self.trains_until is not None and not self.trains_until.value


class Grouping:
    """Settings of the parameters of a model, by plain name.

    A learning rate is the optimizer's, times `layer_decay` for every layer above (`layer_depths`), times an
    entry's `lr_scale`. An entry of `groups` overrides `decay_1d`, `freeze_backbone` and earlier entries. Any
    name of a parameter that several modules share may match.

    Args:
        model: the plain model.
        dropped: names of parameters that a rewrite has removed; patterns may match them.

    Raises:
        ConfigError: C005 for a pattern that matches no parameter, or a named optimizer without parameters;
            C011 for settings by layer in a model of one layer.
    """

    def __init__(self, model: nn.Module, section: Optimizer, dropped: Collection[str] = ()) -> None:
        self._model, self._freeze_backbone = model, section.freeze_backbone
        decay_1d, layer_decay, groups = section.decay_1d, section.layer_decay, section.groups
        by_layer = {"layer_decay": layer_decay, "freeze_backbone": section.freeze_backbone}
        of_layers = {key: value for key, value in by_layer.items() if value is not None}
        names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        depths = layer_depths(model) if of_layers else {}
        deepest = max(depths.values(), default=0)
        for key, value in of_layers.items():
            if not deepest:
                what = "this model has one layer only"
                raise ConfigError("C011", what, key=f"optimizer.{key}", value=value)
        notes = []
        if not decay_1d:
            notes.append("no decay on norms and biases")
        if layer_decay is not None:
            notes.append(f"lr x {layer_decay:g} per layer, {deepest + 1} layers")
        if section.freeze_backbone is not None:
            notes.append(f"all below the last layer from {section.freeze_backbone}")
        self._asked: dict[str, RequestedGroup] = {}
        matches = [0] * len(groups)
        for name, parameter in model.named_parameters():
            scale = 1.0 if layer_decay is None else layer_decay ** (deepest - depths[name])
            asked = RequestedGroup(
                lr_scale=scale, weight_decay=None if decay_1d or parameter.ndim > 1 else 0.0
            )
            if section.freeze_backbone is not None and depths[name] < deepest:
                asked = replace(asked, trains_from=section.freeze_backbone)
            for index, entry in enumerate(groups):
                if any(fnmatchcase(other, entry.match) for other in names[id(parameter)]):
                    matches[index] += 1
                    changes: dict[str, Any] = {key: v for key, v in entry if key != "match" and v is not None}
                    if entry.lr_scale is not None:
                        changes["lr_scale"] = scale * entry.lr_scale
                    asked = replace(asked, **changes)
            self._asked[name] = asked
        for index, entry in enumerate(groups):
            if not matches[index] and not any(fnmatchcase(name, entry.match) for name in dropped):
                every_name = [name for known in names.values() for name in known]
                near = difflib.get_close_matches(entry.match.replace("*", ""), every_name, n=3, cutoff=0.0)
                key, hint = f"optimizer.groups.{index}.match", f"The nearest are {', '.join(near)}"
                what = "matches no parameter"
                raise ConfigError("C005", what, key=key, value=entry.match, suggestion=hint)
            notes.append(f"{entry.match} ({matches[index]}){_format_override(entry)}")
        self.note = "; ".join(notes) or None
        """The settings, for the panel; None if there are none."""
        stepped = {asked.name for asked in self._asked.values() if not asked.frozen}
        for index, entry in enumerate(groups):
            if entry.name is not None and entry.name not in stepped:
                what = "later entries or freezing leave it no parameter"
                key = f"optimizer.groups.{index}.name"
                raise ConfigError("C005", what, key=key, value=entry.name)

    def freeze(self) -> None:
        """Freeze parameters that never train, before the model is wrapped; C011 if all are frozen."""
        frozen = [parameter for asked, parameter in self._parameters() if asked.frozen]
        for parameter in frozen:
            parameter.requires_grad_(False)
        if frozen and not any(parameter.requires_grad for parameter in self._model.parameters()):
            raise ConfigError("C011", "every parameter is frozen throughout", key="optimizer.groups")

    def parts(self) -> list[dict[str, Any]] | None:
        """Return groups of trainable parameters, in model order, with their settings; or None."""
        if self.note is None:
            return None
        parts: dict[RequestedGroup, dict[str, Any]] = {}
        for asked, parameter in self._parameters():
            if parameter.requires_grad:
                said = {"weight_decay": asked.weight_decay, "optimizer": asked.name}
                given = {key: value for key, value in said.items() if value is not None}
                part = parts.setdefault(asked, {"params": [], "lr_scale": asked.lr_scale, **given})
                part["params"].append(parameter)
        return list(parts.values())

    def freezing(self, steps_of: Callable[[str, Duration], int], total_steps: int) -> Freezing | None:
        """Return when each parameter trains, or None if all always train; C011 if one never does.

        `steps_of` converts the duration of a key to steps.
        """
        members: dict[RequestedGroup, list[Tensor]] = {}
        for asked, parameter in self._parameters():
            if parameter.requires_grad:
                members.setdefault(asked, []).append(parameter)
        windows, others = [], False
        for asked, parameters in members.items():
            if asked.trains_until is None and not asked.trains_from.value:
                others = True
                continue
            waits = asked.trains_from == self._freeze_backbone and asked.trains_until is None
            key = "optimizer.freeze_backbone" if waits else "optimizer.groups"
            first, last = steps_of(key, asked.trains_from), math.inf
            if asked.trains_until is not None:
                last = steps_of(key, asked.trains_until)
            if first >= min(last, total_steps):
                until = f" until {asked.trains_until}" if asked.trains_until is not None else ""
                what = f"training from {asked.trains_from}{until} is no step of {total_steps:,}"
                raise ConfigError("C011", what, key=key)
            windows.append(Window(parameters, first, last))
        if not windows:
            return None
        ends = [end for asked in members for end in (asked.trains_from, asked.trains_until)]
        extendable = all(end is None or end.unit != "percent" for end in ends)
        return Freezing(windows, others=others, total_steps=total_steps, extendable=extendable)

    def _parameters(self) -> list[tuple[RequestedGroup, Tensor]]:
        return [(self._asked[name], parameter) for name, parameter in self._model.named_parameters()]


def scale_for_batch(optimizer: torch.optim.Optimizer, section: Optimizer, batch_size: int) -> str | None:
    """Scale learning rate and weight decay from the reference batch to the run's; return the factors.

    A batch k times as large means k times fewer steps over the same samples. SGD compensates with k times the
    learning rate (`linear`, up to some thousands of images), Adam's family with the root of k (`sqrt`). If a
    step decays by `lr * weight_decay` (SGD, AdamW, Adafactor, NovoGrad, Muon), weights should decay equally
    per sample, so `sqrt` also multiplies the decay by the root of k. Other optimizers keep their decay.

    Sources: Goyal et al. 2017, arXiv:1706.02677 (linear, decay kept); Malladi, Lyu, Panigrahi, Arora 2022,
        arXiv:2205.10287 (root, for Adam); Wang, Aitchison 2024, arXiv:2405.13698 (learning rate times decay
        in proportion to the batch).
    """
    rule, reference_batch = section.lr_scaling, section.reference_batch
    if rule == "none" or reference_batch is None:
        return None
    ratio = batch_size / reference_batch
    factor = ratio if rule == "linear" else math.sqrt(ratio)
    decay_factor = 1.0
    for group in optimizer.param_groups:
        group["lr"] *= factor
        group["initial_lr"] = float(group["lr"])
        decoupled = group.get("decoupled_weight_decay") or isinstance(
            optimizer, (torch.optim.SGD, torch.optim.Adafactor, Muon, Novograd)
        )
        if decoupled and group.get("weight_decay"):
            decay_factor = ratio / factor
            group["weight_decay"] *= decay_factor
    decay = "" if decay_factor == 1 else f", weight decay x {decay_factor:g}"
    return f"lr x {factor:g}{decay} from batch {reference_batch}"


def reference_lr(optimizer: torch.optim.Optimizer, name: str = "lr") -> float:
    """Return an optimizer's learning rate without group scales; `name="initial_lr"` gives the base one."""
    group = min(optimizer.param_groups, key=lambda group: group.get("lr_scale", 1.0) != 1.0)
    return group[name] / group.get("lr_scale", 1.0)


def _format_override(entry: ParameterGroup) -> str:
    """Describe an entry for the panel."""
    until = entry.trains_until
    parts = {
        "of {}": entry.name,
        "lr x {:g}": entry.lr_scale,
        "decay {:g}": entry.weight_decay,
        "from {}": entry.trains_from,
        "frozen" if until is not None and not until.value else "until {}": until,
    }
    return "".join(f" {text.format(value)}" for text, value in parts.items() if value is not None)


def layer_depths(model: nn.Module) -> dict[str, int]:
    """Return the layer number of each parameter by name, from 0 at the input, in module order.

    A layer is a repeated block of `find_blocks` (a transformer's layer, a residual block) or, in a model
    without blocks, a module with a matrix of its own. Parameters before the first layer (embeddings, a stem)
    form one layer below. Parameters after the last form one layer above if they include a matrix (a head,
    with the norm before it). Parameters between two layers belong to the earlier one.

    Source: the code of Bao, Dong, Piao, Wei 2022, "BEiT", arXiv:2106.08254.
    """
    named = list(model.named_parameters())
    blocks = list(find_blocks(model)) or [
        name
        for name, module in model.named_modules()
        if name and any(parameter.ndim >= 2 for parameter in module.parameters(recurse=False))
    ]
    depth, depths, after = 0, {}, []
    for name, parameter in named:
        inside = [index + 1 for index, block in enumerate(blocks) if name.startswith(f"{block}.")]
        if inside:
            depth, after = inside[0], []
        elif depth == len(blocks):
            after.append((name, parameter.ndim))
        depths[name] = depth
    if any(ndim >= 2 for _, ndim in after):
        depths |= {name: depth + 1 for name, _ in after}
    lowest = min(depths.values(), default=0)
    return {name: depth - lowest for name, depth in depths.items()}


def keep_frozen_statistics(model: nn.Module) -> None:
    """Put BatchNorm in evaluation mode in modules whose parameters are all frozen."""
    for module in model.modules():
        parameters = [*module.parameters()]
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            for norm in (part for part in module.modules() if isinstance(part, BatchNorm)):
                norm.eval()


@dataclass(frozen=True)
class Window:
    """Parameters that train in steps `first` (counted from 0) up to, not including, `last`."""

    parameters: Sequence[Tensor]
    first: int
    last: float
    """Infinite if they train to the end."""


class Freezing:
    """Parameters that train only in a part of the run.

    A frozen parameter needs no gradient: it is not updated or decayed, its momentum stays, and backward stops
    where nothing below trains. BatchNorm updates its statistics, except under `keep_frozen_statistics`.

    Args:
        others: whether some parameters always train; otherwise, C011 for a step in which none trains.
        extendable: whether a longer run would freeze at the same steps.
    """

    def __init__(
        self, windows: Sequence[Window], *, others: bool, total_steps: int, extendable: bool
    ) -> None:
        self._windows, self.extendable = windows, extendable
        edges = {edge for window in windows for edge in (window.first, window.last)}
        self.switch_steps = tuple(sorted(int(edge) for edge in edges if 0 < edge < total_steps))
        for step in (0, *self.switch_steps):
            if not others and not any(window.first <= step < window.last for window in windows):
                what = f"no parameter trains at step {step:,}"
                hint = "Let some begin earlier or train longer"
                raise ConfigError("C011", what, key="optimizer.groups", suggestion=hint)

    def apply(self, step: int) -> bool:
        """Enable gradients only for the parameters that train in `step`; return True if any changed."""
        changed = False
        for window in self._windows:
            trains = window.first <= step < window.last
            for parameter in window.parameters:
                changed |= parameter.requires_grad is not trains
                parameter.requires_grad_(trains)
        return changed
