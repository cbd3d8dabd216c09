"""Saving the state of a run around trials, and restoring it."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ptfast.core.run import Run
from ptfast.optim.build_optimizer import load_optimizer

HIDDEN = ("schedule", "ema", "callbacks", "watchers", "status")
"""Attributes of a run that are replaced during a trial."""


@contextmanager
def preserving_state(run: Run) -> Iterator[None]:
    """Train `run` inside this, and find its weights, optimizer, progress and random state as before.

    Callbacks and averaged weights are switched off meanwhile.

    Cost: a copy of weights and optimizer state on the device.
    """
    model = _copied(run.model.state_dict())
    optimizer = _copied(run.optimizer.state_dict())
    scaler = run.precision.scaler
    scaling = copy.deepcopy(scaler.state_dict()) if scaler is not None else {}
    kept = {name: getattr(run, name) for name in HIDDEN}
    random_state, status = _random_state(run.device), run.status
    figures, best_figures = dict(status.figures), dict(status.best_figures)
    run.status = replace(
        status, progress=replace(status.progress), figures=figures, best_figures=best_figures
    )
    run.ema, run.callbacks, run.watchers = None, [], []
    was_training = run.model.training
    try:
        yield
    finally:
        with torch.no_grad():
            for name, value in run.model.state_dict().items():
                value.copy_(model[name])
        run.optimizer.zero_grad(set_to_none=True)
        run.optimizer.state.clear()
        load_optimizer(run.optimizer, optimizer)
        if scaler is not None:
            scaler.load_state_dict(scaling)
        for name, value in kept.items():
            setattr(run, name, value)
        run.model.train(was_training)
        _restore_random(random_state, run.device)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {name: _copied(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(item) for item in value)
    return copy.deepcopy(value)


def _random_state(device: torch.device) -> tuple[Any, ...]:
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), on_device


def _restore_random(state: tuple[Any, ...], device: torch.device) -> None:
    of_python, of_numpy, of_torch, on_device = state
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    torch.set_rng_state(of_torch)
    if on_device is not None:
        torch.cuda.set_rng_state(on_device, device)
