"""The saved state of a run: written, and restored."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ptfast.core.distributed import broadcast_object
from ptfast.core.errors import NumericsError, PtfastError, SavedStateError, name_of, summary_of
from ptfast.core.resolved import Progress
from ptfast.core.tensors.dtensors import local_part, shard_like
from ptfast.core.tensors.saved_state import (
    ShardedDraft,
    State,
    abandon_after,
    check_length,
    list_states,
    point,
    prune,
    step_of,
    write_state,
)
from ptfast.core.tensors.trees import tensors_in
from ptfast.optim.build_optimizer import load_optimizer, state_by_name
from ptfast.run import Run
from ptfast.training.user_code import callback_states


def save_training(
    run: Run,
    *,
    background: bool = False,
    best_only: bool = False,
    tell: Callable[[Path], Any] = lambda folder: None,
) -> None:
    """Write the current state, mark it if it is the best, delete those that are no more kept; on every rank.

    Args:
        background: it may be written while training goes on.
        best_only: it is saved as one of the best alone, so that `saving.keep` does not count it.
        tell: called on the first rank with the folder, when the state is on disk.
    """
    run.saver.begin()
    if not (run.ranks.is_first or run.sharded):
        return
    model = run.model.state_dict()
    for name in run.left_out:
        del model[name]
    training: dict[str, Any] = {"optimizer": run.optimizer.state_dict()}
    if run.precision.scaler is not None:
        training["scaler"] = run.precision.scaler.state_dict()
    if run.ema is not None:
        training["ema"] = run.ema.state_dict()
    if run.schedule.on_metric is not None:
        training["schedule"] = run.schedule.on_metric.state_dict()
    if run.sharded:
        training["optimizer"] = state_by_name(run.optimizer, run.model)
    to_check = _to_check(model, run)
    training["callbacks"] = callback_states(run) if run.ranks.is_first else []
    facts = {
        "progress": asdict(run.progress),
        "best_figures": run.best_figures,
        "best_metric": ".".join(run.followed),
        "figures": run.figures,
        "info": asdict(run.info),
        "resolved": asdict(run.resolved),
        "stream": run.marks.state(run.progress.step) if run.marks is not None else None,
        "best_only": best_only,
    }
    saved = run.folder / "saved"
    step, keep, is_first = run.progress.step, run.keep_states, run.ranks.is_first
    write = partial(run.saver.write, background=background, lasting=_lasting(run, training))
    best_steps = [kept for _, kept in run.progress.best_states]

    def mark(state_folder: Path) -> Path:
        if best_steps[:1] == [step]:
            point(saved, "best", state_folder)
        prune(saved, keep, best_steps)
        return state_folder

    if not run.sharded:

        def write_whole(content: Any) -> Path:
            *parts, weights = content
            _check_finite(weights, step)
            return mark(write_state(saved, step, State(*parts)))

        # Marked by the thread as well: links and folders change in the order of the saves.
        content = model, training, facts, to_check
        write(content, write_whole, lambda done: tell(done()), together=False)
        return
    draft = ShardedDraft(saved, step, State(model, training, copy.deepcopy(facts)), run.ranks)

    def write_part(content: Any) -> tuple[str, str]:
        tensors, weights = content
        _check_finite(weights, step)
        return draft.write(tensors)

    def publish(written: Callable[[], tuple[str, str]]) -> None:
        state_folder = draft.publish(written)
        if is_first:
            tell(mark(state_folder))

    write((draft.tensors, to_check), write_part, publish, together=True)


def _lasting(run: Run, training: dict[str, Any]) -> list[Tensor]:
    """What nothing changes in forward and backward passes: weights and the optimizer's state, on CUDA."""
    # A user's own models and tasks may write to weights as they compute; buffers change in any model.
    known = name_of(run.model).partition(".")[0] in ("ptfast", "torchvision", "timm")
    if not known or not name_of(run.task).startswith("ptfast.") or run.device.type != "cuda":
        return []
    parts = [*run.model.parameters(), *tensors_in([training["optimizer"], training.get("ema")])]
    return [local_part(part.detach()) for part in parts]


def _to_check(model: dict[str, Tensor], run: Run) -> list[Tensor]:
    """This rank's trained weights, and buffers; on a device that is not waited for, largest magnitudes."""
    named = [(name, p) for name, p in run.model.named_parameters() if p.requires_grad and p.numel()]
    parts = [local_part(model.get(name, p.detach())).detach() for name, p in named]
    parts += [model[name] for name in run.finite_buffers if name in model]
    parts = [part for part in parts if part.numel()]
    if run.device.type == "cpu" or not parts:
        return parts
    # The largest magnitude does not overflow, as a sum of squares may, and is NaN where one is.
    return [torch.stack(list(torch._foreach_norm(parts, math.inf)))]


def _check_finite(weights: list[Tensor], step: int) -> None:
    parts = (torch.view_as_real(part) if part.is_complex() else part for part in weights)
    if not all(bool(end.isfinite()) for part in parts for end in torch.aminmax(part)):
        what = f"weights or buffers are not finite after step {step}"
        hint = "Lower optimizer.lr or clip with gradients.clip_norm=1; the last saved state is older"
        raise NumericsError("N001", what, suggestion=hint)


def restore_model(run: Run, state: State) -> None:
    """Put a saved state's weights into the model: all of them, or this rank's part if they are sharded."""
    # The versions of modules, which torch leaves beside the names, have to stay.
    own, weights = run.model.state_dict(), copy.copy(state.model)
    try:
        weights.update({name: shard_like(own.get(name), value) for name, value in weights.items()})
        weights.update({name: own[name] for name in run.left_out})
        run.model.load_state_dict(weights)
    except Exception as error:
        reason = (str(error).splitlines()[1] if "\n" in str(error) else summary_of(error)).strip().rstrip(".")
        hint = "Resume with the config it was saved with, or warm-start with model.weights"
        raise SavedStateError(
            "S002", f"it belongs to another model: {reason}", key="run.resume", suggestion=hint
        ) from error


def restore_training(run: Run, state: State, steps_before: int) -> None:
    """Restore all but the weights of a run that was to have `steps_before` steps then."""
    try:
        _restore_parts(run, state)
    except PtfastError:
        raise
    except Exception as error:
        what = f"it does not fit this run: {summary_of(error)}"
        hint = "Resume from another saved/step-N folder"
        raise SavedStateError("S002", what, key="run.resume", suggestion=hint) from error
    step = run.progress.step
    extendable = all(part is None or part.extendable for part in (run.freezing, run.ema))
    if steps_before != run.total_steps:
        extendable = extendable and run.schedule.begins_like(steps_before, step)
    check_length(step, steps_before, run.total_steps, extendable)
    if run.ranks.is_first:
        _restore_saved(run, run.folder / "saved")
    # Which states are kept is decided by every rank for itself.
    run.progress.best_states = broadcast_object(run.progress.best_states, run.ranks)


def _restore_saved(run: Run, saved: Path) -> None:
    """Abandon states after the one resumed, forget best ones that are gone, and put both links right."""
    if (current := saved / f"step-{run.progress.step}").is_dir():
        abandon_after(saved, current)
    known = {step_of(folder) for folder in list_states(saved)}
    best = [(value, step) for value, step in run.progress.best_states if step in known]
    run.progress.best_states = best[: run.keep_best]
    # A kill between a state and the link to it leaves the link behind, as does `saving.best=0`.
    if run.progress.best_states:
        point(saved, "best", saved / f"step-{run.progress.best_states[0][1]}")
    else:
        (saved / "best").unlink(missing_ok=True)


def _restore_parts(run: Run, state: State) -> None:
    load_optimizer(run.optimizer, state.training["optimizer"])
    if run.precision.scaler is not None and "scaler" in state.training:
        run.precision.scaler.load_state_dict(state.training["scaler"])
    if run.ema is not None:
        run.ema.load_state_dict(state.training["ema"])
    if run.schedule.on_metric is not None:
        run.schedule.on_metric.load_state_dict(state.training["schedule"])
    callbacks: list[Any] = run.callbacks
    for callback, callback_state in zip(callbacks, state.training["callbacks"], strict=True):
        if callback_state is not None:
            callback.load_state_dict(callback_state)
    run.progress = Progress(**state.facts["progress"])
    if run.marks is not None and (stream := state.facts.get("stream")) is not None:
        note = run.marks.load(stream, run.progress.step)
        run.resumed_note = "; ".join(filter(None, (note, run.resumed_note)))
    run.best_figures = state.facts["best_figures"]
    run.figures = {split: values for split, values in state.facts["figures"].items() if split != "test"}
