"""Muon for the hidden matrices of a model and AdamW for the rest, as one optimizer.

Sources: Jordan, Jin, Boza, You, Cesista, Newhouse, Bernstein 2024, "Muon: An optimizer for hidden layers in
neural networks"; Liu et al. 2025, "Muon is Scalable for LLM Training", arXiv:2502.16982. Both steps are
torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from ptfast.core.errors import ConfigError
from ptfast.core.tensors.torch_internals import muon_update
from ptfast.optim.fused_steps import build_step
from ptfast.optim.layer_batches import laid_out_as

AdjustLr = Literal["match_rms_adamw", "original"]
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration that makes a matrix orthogonal, about; the authors' and torch's."""


class Muon(Optimizer):
    """Steps as long in rare directions of a hidden matrix as in common ones; AdamW for all other parameters.

    Muon replaces the momentum of a matrix by the nearest orthogonal matrix (Newton-Schulz iteration, in
    bf16); its authors trained NanoGPT 1.35 times as fast with it as with AdamW. Convolutions are matrices
    with a row for each output channel. `hidden_matrices` says which parameters these are.

    Args:
        params: parameters in the model's order, or pairs of name and parameter, or groups of parameters; a
            group may say itself whose it is, with `muon: true` or `muon: false`.
        lr: learning rate of both, >= 0.
        momentum: of Muon, in [0, 1).
        nesterov: of Muon.
        weight_decay: of both; decoupled, as AdamW's; >= 0.
        ns_steps: Newton-Schulz iterations, 1 to 99.
        adjust_lr_fn: how Muon's rate depends on a matrix's shape. `match_rms_adamw` makes a step about as
            long as AdamW's, so that one rate serves both; `original` needs a higher one, about 0.02.
        adamw_lr: learning rate of AdamW; null: `lr`.
        adamw_names: patterns such as `*.gate.weight` of names that AdamW takes besides.
        ends: let Muon have the first and the last matrix of the model too.
        betas: of AdamW.
        eps: of AdamW.
        fused: of AdamW.
        model: where parameters come without names: what they are called and belong to.

    Cost: `ns_steps * (4 * n * n * m + 2 * n * n * n)` floating-point operations per matrix of n <= m, one
    after another; half of AdamW's state. With fp16 gradient scaling the host waits for every step's check.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        ns_steps: int = 5,
        adjust_lr_fn: AdjustLr = "match_rms_adamw",
        adamw_lr: float | None = None,
        adamw_names: Sequence[str] = (),
        ends: bool = False,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        fused: bool | None = None,
        model: nn.Module | None = None,
    ) -> None:
        if not (0 <= momentum < 1 and 0 < ns_steps < 100):
            raise ValueError(
                f"momentum must be in [0, 1) and ns_steps in 1 to 99, not {momentum} and {ns_steps}"
            )
        self._rest = _build_rest(lr if adamw_lr is None else adamw_lr, betas, eps, weight_decay, fused)
        for_muon = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
        for_muon |= {"ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        given = list(params)
        if not given or not isinstance(given[0], dict):
            given = [{"params": given}]
        if any("muon" not in group for group in given):
            named = [pair for group in given for pair in _named(list(group["params"]), model)]
            hidden = hidden_matrices(_in_order(named, model), model, adamw_names=adamw_names, ends=ends)
            given = [part for group in given for part in _split(group, hidden)]
        groups = [{**(for_muon if group["muon"] else self._rest.defaults), **group} for group in given]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})
        self._step_rest = build_step(self._rest)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step.

        Args:
            closure: computes the loss and its gradients; called first, and its loss returned.

        Raises:
            ConfigError: C011 for a sparse gradient of a hidden matrix.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Loading puts new groups and state in the place of the old.
        self._rest.state = self.state
        self._rest.param_groups = [group for group in self.param_groups if not group["muon"]]
        self._step_rest()
        for group in self.param_groups:
            if group["muon"]:
                self._step_matrices(group)
        return loss

    def _step_matrices(self, group: dict[str, Any]) -> None:
        weights, grads, momenta = [], [], []
        for weight in group["params"]:
            if weight.grad is None:
                continue
            if weight.grad.is_sparse:
                hint = "Build the embedding with sparse=False, or name it in optimizer.adamw_names"
                raise ConfigError("C011", "Muon takes no sparse gradients", key="optimizer", suggestion=hint)
            state = self.state[weight]
            buffer = state.get("momentum_buffer")
            buffer = torch.zeros_like(weight) if buffer is None else laid_out_as(weight, buffer)
            state["momentum_buffer"] = buffer
            order = _memory_order(weight)
            weights.append(_as_matrix(weight.detach(), order))
            momenta.append(_as_matrix(buffer, order))
            grads.append(_as_matrix(laid_out_as(weight, weight.grad), order))
        names = ("lr", "weight_decay", "momentum", "nesterov", "ns_steps", "adjust_lr_fn")
        keywords = {name: group[name] for name in names}
        muon_update(
            weights, grads, momenta, **keywords, ns_coefficients=COEFFICIENTS, eps=1e-7, has_complex=False
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if not hasattr(self, "_rest"):
            self._rest = _build_rest(1e-3, (0.9, 0.999), 1e-8, 0.0, None)
            self._step_rest = build_step(self._rest)


def hidden_matrices(
    named: Sequence[tuple[str, Tensor]],
    model: nn.Module | None = None,
    *,
    adamw_names: Sequence[str] = (),
    ends: bool = False,
) -> set[int]:
    """Ids of the parameters that Muon takes: weights of two dimensions or more between the ends of a model.

    Left to AdamW are: what has fewer dimensions; what is called otherwise than `...weight` (positions, class
    tokens); embeddings, known by their module, or by `emb` in the name where there is no model; the first
    and the last matrix in the order of modules, embeddings counted, unless `ends`; and what `adamw_names`
    matches.

    Args:
        named: names, empty where unknown, and parameters in the model's order.
        model: their model.
        adamw_names: patterns of further names for AdamW; case counts.
        ends: give Muon the first and the last matrix too.

    Raises:
        ValueError: for a pattern that matches no name.
    """
    for pattern in adamw_names:
        if not any(fnmatchcase(name, pattern) for name, _ in named):
            raise ValueError(f"adamw_names: nothing is called {pattern}")
    placed = named if model is None else list(model.named_parameters(remove_duplicate=False))
    matrices = [(name, p) for name, p in placed if p.ndim >= 2 and (not name or "weight" in _last(name))]
    others = {id(p) for name, p in named if any(fnmatchcase(name, pattern) for pattern in adamw_names)}
    if model is None:
        others |= {id(p) for name, p in matrices if "emb" in name}
    else:
        embeddings = (m for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)))
        others |= {id(embedding.weight) for embedding in embeddings}
    if not ends:
        others |= {id(p) for _, p in (*matrices[:1], *matrices[-1:])}
    return {id(p) for _, p in matrices} - others


def _named(given: list[Any], model: nn.Module | None) -> list[tuple[str, Tensor]]:
    if given and isinstance(given[0], tuple):
        return given
    names = {} if model is None else {id(p): name for name, p in model.named_parameters()}
    return [(names.get(id(p), ""), p) for p in given]


def _in_order(named: list[tuple[str, Tensor]], model: nn.Module | None) -> list[tuple[str, Tensor]]:
    """As the model holds them, however they are grouped."""
    places = {} if model is None else {id(p): place for place, p in enumerate(model.parameters())}
    return sorted(named, key=lambda pair: places.get(id(pair[1]), 0))


def _split(group: dict[str, Any], hidden: set[int]) -> list[dict[str, Any]]:
    """A group as one of hidden matrices and one of the others, as far as there are any."""
    if "muon" in group:
        return [group]
    parameters = [given[1] if isinstance(given, tuple) else given for given in group["params"]]
    parts = {flag: [p for p in parameters if (id(p) in hidden) is flag] for flag in (True, False)}
    return [{**group, "params": part, "muon": flag} for flag, part in parts.items() if part]


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _build_rest(
    lr: float, betas: tuple[float, float], eps: float, weight_decay: float, fused: bool | None
) -> AdamW:
    # Its groups are put in at every step.
    return AdamW([torch.empty(0)], lr, betas, eps, weight_decay, fused=fused)


def _memory_order(weight: Tensor) -> list[int]:
    """The dimensions with those after the first in the order in which they lie in memory."""
    return [0, *sorted(range(1, weight.ndim), key=weight.stride, reverse=True)]


def _as_matrix(tensor: Tensor, order: list[int]) -> Tensor:
    """A view with a row for each entry of the first dimension; the order of columns is nothing to Muon."""
    return tensor.permute(order).view(len(tensor), -1)
