"""Saving the state of a run around trials, and restoring it."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

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
    model, optimizer = copy.deepcopy(run.model.state_dict()), copy.deepcopy(run.optimizer.state_dict())
    scaler = run.precision.scaler
    scaling = copy.deepcopy(scaler.state_dict()) if scaler is not None else {}
    kept = {name: getattr(run, name) for name in HIDDEN}
    of_python, of_numpy, status = random.getstate(), np.random.get_state(), run.status
    figures, best_figures = dict(status.figures), dict(status.best_figures)
    run.status = replace(
        status, progress=replace(status.progress), figures=figures, best_figures=best_figures
    )
    run.ema, run.callbacks, run.watchers = None, [], []
    was_training = run.model.training
    try:
        with torch.random.fork_rng([run.device] if run.device.type == "cuda" else []):
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
        random.setstate(of_python)
        np.random.set_state(of_numpy)
