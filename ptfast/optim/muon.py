"""Muon for the hidden matrices of a model and AdamW or SGD for the rest, as one optimizer."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from ptfast.core.errors import described
from ptfast.core.sections.section import Fraction, NotNegative, Positive
from ptfast.optim.build_optimizer import FORMULAS, build_step
from ptfast.optim.layerwise import DEVICE_CHUNK_SIZE, laid_out_as, no_sparse

AdjustLr = Literal["match_rms_adamw", "original"]
Rest = Literal["adamw", "sgd"]
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration that makes a matrix nearly orthogonal; the authors' and torch's."""

CPU_MATRIX_SIZE = 1 << 16
"""Elements of the largest matrices that a CPU multiplies faster as one batch than one by one."""


class Muon(Optimizer):
    """Muon for hidden matrices, with equally long steps in all directions, and AdamW or SGD for the rest.

    Muon replaces the momentum of a matrix by the nearest orthogonal matrix (Newton-Schulz iteration, in
    bf16); its authors trained NanoGPT 1.35 times as fast as with AdamW. `hidden_matrices` chooses the
    parameters; a convolution is a matrix with a row for each output channel.

    Args:
        params: parameters in the model's order, named or not, or groups of them; a group may choose its
            optimizer by `muon: true` or `muon: false`.
        lr: learning rate of Muon and the other optimizer, >= 0.
        momentum: Muon's momentum, in [0, 1).
        nesterov: use Nesterov momentum in Muon and SGD.
        weight_decay: weight decay of both, >= 0; decoupled in Muon and AdamW.
        ns_steps: Newton-Schulz iterations, 1 to 99.
        adjust_lr_fn: how Muon's learning rate depends on a matrix's shape. `match_rms_adamw` makes a step
            about as long as AdamW's, so that one rate serves both; `original` needs a higher one, about 0.02.
        normalize: before each step, scale every matrix to the norm of an orthogonal one (the root of its
            number of rows), instead of weight decay; for layers whose scale a following norm cancels.
        cautious: decay only the entries of a matrix that the step moves toward zero.
        rest: the optimizer of all other parameters, `adamw` or `sgd`.
        rest_lr: learning rate of `rest`; null for `lr`.
        rest_names: patterns of further parameters that `rest` trains, such as `*.gate.weight`.
        ends: let Muon also train the first and the last matrix of the model.
        betas: AdamW's decay of the first and second moment.
        eps: AdamW's term in the denominator.
        sgd_momentum: SGD's momentum, in [0, 1).
        fused: use the fused step of AdamW or SGD.
        model: the model, which tells the names and modules of the parameters.

    Cost: `ns_steps * (4 * n * n * m + 2 * n * n * n)` floating-point operations per matrix of n <= m; half
    of AdamW's state. With fp16 gradient scaling the host waits for every step's check. Sources: Jordan et al.
    2024, "Muon: An optimizer for hidden layers in neural networks"; Liu et al. 2025, arXiv:2502.16982;
    `normalize` from KellerJordan/cifar10-airbench, `cautious` from Chen et al. 2025, arXiv:2510.12402.
    """

    needs_whole_layers = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: Positive = 1e-3,
        momentum: Fraction = 0.95,
        nesterov: bool = True,
        weight_decay: NotNegative = 0.1,
        ns_steps: int = 5,
        adjust_lr_fn: AdjustLr = "match_rms_adamw",
        normalize: bool = False,
        cautious: bool = False,
        rest: Rest = "adamw",
        rest_lr: float | None = None,
        rest_names: Sequence[str] = (),
        ends: bool = False,
        betas: tuple[Fraction, Fraction] = (0.9, 0.95),
        eps: Positive = 1e-8,
        sgd_momentum: float = 0.9,
        fused: bool | None = None,
        model: nn.Module | None = None,
    ) -> None:
        if not (0 <= momentum < 1 and 0 < ns_steps < 100):
            raise ValueError(
                f"momentum must be in [0, 1) and ns_steps in 1 to 99, not {momentum} and {ns_steps}"
            )
        if normalize and cautious:
            raise ValueError("cautious is a way to decay, and normalize takes the place of decay")
        shared: dict[str, Any] = {"lr": lr if rest_lr is None else rest_lr, "weight_decay": weight_decay}
        own = {"betas": betas, "eps": eps}
        if rest == "sgd":
            own = {"momentum": sgd_momentum, "nesterov": nesterov and sgd_momentum > 0}
        self._rest = _build_rest(rest, **shared, **own, fused=fused)
        for_muon = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
        for_muon |= {"ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        for_muon |= {"normalize": normalize, "cautious": cautious}
        self._settings = {True: for_muon, False: self._rest.defaults}
        self._choose = partial(hidden_matrices, model=model, rest_names=rest_names)
        given: list[Any] = [params] if isinstance(params, Tensor) else list(params)
        if not given or not isinstance(given[0], dict):
            given = [{"params": given}]
        given = [{**group, "params": _members(group)} for group in given]
        undecided = [member for group in given if "muon" not in group for member in group["params"]]
        hidden = self._choose(undecided, ends=ends) if undecided else set[int]()
        parts = [part for group in given for part in _split(group, hidden)]
        super().__init__(parts, {"lr": lr, "weight_decay": weight_decay, "rest": rest})
        self._step_rest = build_step(self._rest)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch; a group without `muon` is split, and Muon also trains its end matrices.

        ValueError if Muon would train a parameter that is not a matrix of real numbers.
        """
        members = _members(param_group)
        if "muon" not in param_group:
            for part in _split({**param_group, "params": members}, self._choose(members, ends=True)):
                self.add_param_group(part)
            return
        odd = next((p for _, p in map(_named, members) if p.ndim < 2 or not p.is_floating_point()), None)
        if param_group["muon"] and odd is not None:
            raise ValueError(f"Muon takes matrices of real numbers, not {described(odd)}")
        settings = self._settings[bool(param_group["muon"])]
        super().add_param_group({**settings, **param_group, "params": members})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_settings": self._settings, "_choose": self._choose}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Call `closure`, if given, take a step, and return the loss; C011 for sparse hidden matrices."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Loading a state replaces the groups and their state.
        self._rest.state = self.state
        self._rest.param_groups = [group for group in self.param_groups if not group["muon"]]
        try:
            self._step_rest()
        except RuntimeError as error:
            if "sparse" not in str(error):
                raise
            raise no_sparse(f"{type(self._rest).__name__}, which takes the rest, does") from error
        for group in self.param_groups:
            if group["muon"]:
                self._step_matrices(group)
        return loss

    def _step_matrices(self, group: dict[str, Any]) -> None:
        weights, grads, momenta, copied = [], [], [], []
        for weight in group["params"]:
            if weight.grad is None or not weight.numel():
                continue
            if weight.grad.is_sparse:
                raise no_sparse("Muon does")
            state = self.state[weight]
            buffer = state.get("momentum_buffer")
            buffer = torch.zeros_like(weight) if buffer is None else laid_out_as(weight, buffer)
            state["momentum_buffer"] = buffer
            parts = (weights, weight.detach()), (momenta, buffer), (grads, laid_out_as(weight, weight.grad))
            for matrices, tensor in parts:
                matrices.append(as_matrix(weight, tensor))
            if weights[-1].data_ptr() != weight.data_ptr():
                copied.append((weight, weights[-1]))
        if not weights:
            return
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        ahead = torch._foreach_lerp(grads, momenta, group["momentum"]) if group["nesterov"] else momenta
        for indices in _stacks(weights):
            updates = orthogonalize([ahead[index] for index in indices], group["ns_steps"])
            _move([weights[index] for index in indices], updates, group)
        for weight, matrix in copied:
            in_order = _in_order_of_memory(weight, weight.detach())
            in_order.copy_(matrix.view(in_order.shape))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if not hasattr(self, "_rest"):
            self._rest = _build_rest(self.defaults.get("rest", "adamw"))
            self._step_rest = build_step(self._rest)


def as_matrix(weight: Tensor, tensor: Tensor) -> Tensor:
    """View `tensor`, laid out as `weight`, as a matrix: a row for each entry of the first dimension.

    Return a copy if gaps in memory make such a view impossible.
    """
    return _in_order_of_memory(weight, tensor).flatten(1)


def _in_order_of_memory(weight: Tensor, tensor: Tensor) -> Tensor:
    # Columns are in memory order, because their order does not matter to Muon.
    return tensor.permute(0, *sorted(range(1, weight.ndim), key=weight.stride, reverse=True))


def orthogonalize(matrices: Sequence[Tensor], ns_steps: int) -> Tensor:
    """Return nearly orthogonal matrices (singular values 0.5 to 1.5) close to `matrices`, all of one shape.

    Matrices are multiplied as one batch, so that a GPU does not wait for a launch per matrix. Source:
    Jordan et al. 2024, the Newton-Schulz iteration with their coefficients.
    """
    rows, columns = matrices[0].shape
    # A batch of one is slower than a matrix.
    stacked = torch.stack([*matrices]).bfloat16() if len(matrices) > 1 else matrices[0].bfloat16()
    x = stacked.mT if rows > columns else stacked
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    multiply = torch.baddbmm if x.ndim == 3 else torch.addmm
    a, b, c = COEFFICIENTS
    for _ in range(ns_steps):
        gram = x @ x.mT
        x = multiply(x, multiply(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if rows > columns else x).view(len(matrices), rows, columns)


def _move(weights: list[Tensor], updates: Tensor, group: dict[str, Any]) -> None:
    """Step matrices of one shape, with their decay or normalization."""
    rows, columns = weights[0].shape
    decay = group["lr"] * group["weight_decay"]
    if group["normalize"]:
        norms = torch._foreach_clamp_min(torch._foreach_norm(weights), 1e-7)
        torch._foreach_div_(weights, torch._foreach_mul(norms, rows**-0.5))
    elif group["cautious"] and group["weight_decay"]:
        for weight, update in zip(weights, updates.unbind(), strict=True):
            towards_zero = (update * weight >= 0).to(weight.dtype)
            weight.addcmul_(weight, towards_zero, value=-decay)
    elif group["weight_decay"]:
        torch._foreach_mul_(weights, 1 - decay)
    matched = group["adjust_lr_fn"] == "match_rms_adamw"
    length = 0.2 * math.sqrt(max(rows, columns)) if matched else math.sqrt(max(1, rows / columns))
    moves = [*updates.to(weights[0].dtype).unbind()]
    torch._foreach_add_(weights, moves, alpha=-group["lr"] * length)


def _stacks(matrices: list[Tensor]) -> Iterator[list[int]]:
    """Yield the indices of matrices to multiply together: of one shape, type and device."""
    alike: dict[Any, list[int]] = {}
    for place, matrix in enumerate(matrices):
        alike.setdefault((matrix.shape, matrix.dtype, matrix.device), []).append(place)
    for places in alike.values():
        first = matrices[places[0]]
        alone = first.is_cpu and first.numel() > CPU_MATRIX_SIZE
        together = 1 if alone else max(1, DEVICE_CHUNK_SIZE // max(1, first.numel()))
        for start in range(0, len(places), together):
            yield places[start : start + together]


def hidden_matrices(
    parameters: Iterable[Any],
    model: nn.Module | None = None,
    *,
    rest_names: Sequence[str] = (),
    ends: bool = False,
) -> set[int]:
    """Return the ids of the parameters that Muon trains: inner weights with two or more dimensions.

    The other optimizer trains embeddings and parameters that have fewer dimensions, are not named `...weight`
    (positions, class tokens), are complex, or match `rest_names` (case-sensitive). Unless `ends`, it also
    trains the first and last matrix in module order, embeddings counted. Without a model, only dimensions
    are known, and names if `parameters` are pairs of names and parameters.
    """
    if model is None:
        named, modules = [*map(_named, parameters)], []
    else:
        named, modules = list(model.named_parameters(remove_duplicate=False)), list(model.modules())
    for pattern in rest_names:
        if not any(fnmatchcase(name, pattern) for name, _ in named):
            raise ValueError(f"rest_names: nothing is called {pattern}")
    real = [(name, p) for name, p in named if p.ndim >= 2 and p.is_floating_point()]
    matrices = [p for name, p in real if "weight" in name.rpartition(".")[2]]
    others = {id(p) for name, p in named if any(fnmatchcase(name, pattern) for pattern in rest_names)}
    others |= {id(each.weight) for each in modules if isinstance(each, (nn.Embedding, nn.EmbeddingBag))}
    if not ends:
        others |= {id(p) for p in (*matrices[:1], *matrices[-1:])}
    return {id(p) for p in matrices} - others


def _members(group: dict[str, Any]) -> list[Any]:
    """Return the parameters of a group, or pairs of names and parameters."""
    params = group["params"]
    if isinstance(params, set):
        raise TypeError("the parameters of a group need an order, which a set does not have")
    return [params] if isinstance(params, Tensor) else list(params)


def _named(member: Any) -> tuple[str, Tensor]:
    return member if isinstance(member, tuple) else ("weight", member)


def _split(group: dict[str, Any], hidden: set[int]) -> list[dict[str, Any]]:
    """Split a group into hidden matrices and other parameters, unless it has `muon`."""
    if "muon" in group:
        return [group]
    parts: dict[bool, list[Any]] = {True: [], False: []}
    for member in group["params"]:
        parts[id(_named(member)[1]) in hidden].append(member)
    return [{**group, "params": part, "muon": muon} for muon, part in parts.items() if part]


def _build_rest(rest: Rest, **keywords: Any) -> AdamW | SGD:
    # Its groups are set in every step.
    return (SGD if rest == "sgd" else AdamW)([torch.empty(0)], **keywords)


FORMULAS.add(inspect.unwrap(Muon.step))
