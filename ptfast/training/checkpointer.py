"""Checkpoints of a run: its stateful parts, saved and restored by name."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ptfast.core.distributed import broadcast_object
from ptfast.core.errors import PtfastError, SavedStateError, described, summary_of
from ptfast.core.protocols import Stateful
from ptfast.core.run_records import Progress
from ptfast.core.tensors.checkpoint_files import CheckpointContent, ShardedDraft, WholeDraft
from ptfast.core.tensors.checkpoint_folders import (
    abandon_after,
    check_length,
    list_checkpoints,
    point,
    prune,
    step_of,
)
from ptfast.core.tensors.checkpoint_writer import CheckpointWriter
from ptfast.core.tensors.dtensors import is_sharded, local_part, shard_like
from ptfast.optim.build_optimizer import load_optimizer, state_by_name
from ptfast.run import Run
from ptfast.training.user_code import UserPart

OPTIONAL = ("scaler", "stream")
"""Parts that a checkpoint may lack, if it was saved with another precision or other data."""


@dataclass(frozen=True)
class Saved:
    """A part of a run that two functions save and restore."""

    state_dict: Callable[[], Any]
    load_state_dict: Callable[[Any], object]


def stateful_parts(run: Run) -> dict[str, Stateful]:
    """Return the parts in a run's checkpoints besides weights and progress, in the order of restoring."""

    def optimizer_state() -> dict[str, Any]:
        # Each rank has a shard of the weights, or all of them.
        return state_by_name(run.optimizer, run.model) if run.sharded else run.optimizer.state_dict()

    def load_stream(state: dict[str, Any]) -> None:
        note = marks.load(state, run.progress.step)
        run.resumed_note = "; ".join(filter(None, (note, run.resumed_note)))

    def load_callbacks(states: list[Any]) -> None:
        callbacks: list[Any] = run.callbacks
        for callback, state in zip(callbacks, states, strict=True):
            if state is not None:
                callback.load_state_dict(state)

    marks: Any = getattr(run.train_loader.batches, "marks", None)
    stream = None if marks is None else Saved(lambda: marks.state(run.progress.step), load_stream)
    parts: dict[str, Stateful | None] = {
        "optimizer": Saved(optimizer_state, lambda state: load_optimizer(run.optimizer, state)),
        "scaler": run.precision.scaler,
        "ema": run.ema,
        "schedule": run.schedule.on_metric,
        "stream": stream,
        "callbacks": Saved(lambda: callback_states(run) if run.ranks.is_first else [], load_callbacks),
    }
    on_gradients: Any = run.clip or ()
    for step in (each for each in on_gradients if hasattr(each, "state_dict")):
        name = type(step).__name__
        # The second instance of a class is named `Name#2`.
        alike = sum(key.partition("#")[0] == name for key in parts)
        parts[f"{name}#{alike + 1}" if alike else name] = step
    return {name: part for name, part in parts.items() if part is not None}


def callback_states(run: Run) -> list[Any]:
    """Return the states of callbacks that have one; C017 for values that cannot be loaded again."""
    states: list[Any] = []
    callbacks: list[Any] = run.callbacks
    for index, callback in enumerate(callbacks):
        states.append(callback.state_dict() if hasattr(callback, "state_dict") else None)
        if (odd := _unsavable(states[-1])) is not None:
            what = f"state_dict returns {described(odd)}, but only tensors and plain values can be saved"
            raise UserPart(f"callbacks.{index}._target_", callback).error(what)
    return states


def _unsavable(value: Any) -> Any:
    """Return the first value of a nested structure that is neither a whole tensor nor plain, if any."""
    if isinstance(value, (dict, list, tuple)):
        inner = [*value, *value.values()] if isinstance(value, dict) else value
        return next((odd for item in inner if (odd := _unsavable(item)) is not None), None)
    whole = isinstance(value, Tensor) and not is_sharded(value)
    plain = whole or type(value) in (type(None), bool, int, float, str, bytes)
    return None if plain else value


class Checkpointer:
    """Saves and restores a run: whole or in shards, at once or in the background."""

    writer: CheckpointWriter
    """Writes the files, in the background if allowed; set once the run is built."""
    left_out: Sequence[str] = ()
    """Names of the frozen weights from `model.weights`, which checkpoints omit."""

    def __init__(self, run: Run) -> None:
        self.run, self._saved = run, run.folder / "saved"
        self._finite_buffers: list[str] = []

    def begin(self, state: CheckpointContent | None) -> None:
        """Collect the stateful parts, and restore them from `state` if the run is resumed.

        Buffers that are finite now must be finite in every checkpoint; others, such as masks of -inf, are not
        checked.
        """
        run = self.run
        saving = run.plan.saving
        every_s = saving.every.seconds if saving.every.unit == "seconds" else None
        self.writer = CheckpointWriter(run.ranks, run.clock, saving.background, every_s)
        run.stateful = stateful_parts(run)
        if state is not None:
            self.restore(state, run.choices.began_with("total_steps", int) or 0)
        buffers = dict(run.model.named_buffers())
        for name in run.model.state_dict().keys() & buffers.keys():
            if buffers[name].is_floating_point() and bool(buffers[name].isfinite().all()):
                self._finite_buffers.append(name)

    def save(
        self,
        *,
        background: bool = False,
        best_only: bool = False,
        tell: Callable[[Path], object] = lambda folder: None,
    ) -> None:
        """Write a checkpoint, mark it if it is the best, and delete outdated ones; call it on every rank.

        Args:
            background: whether it may be written while training continues.
            best_only: whether it is saved only as one of the best, so that `saving.keep` does not count it.
            tell: called on the first rank with the folder once it is on disk.
        """
        run, step = self.run, self.run.progress.step
        self.writer.begin()
        if not (run.ranks.is_first or run.sharded):
            return
        model = run.model.state_dict()
        for name in self.left_out:
            del model[name]
        must_be_finite = self._to_check(model)
        parts = {name: part.state_dict() for name, part in run.stateful.items()}
        state = CheckpointContent(model, parts, copy.deepcopy(self._facts(best_only)))
        best_steps = [kept for _, kept in run.progress.best_states]

        def mark(folder: Path) -> None:
            if best_steps[:1] == [step]:
                point(self._saved, "best", folder)
            prune(self._saved, run.plan.saving.keep, best_steps)

        if run.sharded:
            draft = ShardedDraft(self._saved, step, state, run.ranks, mark)
        else:
            draft = WholeDraft(self._saved, step, state, mark)
        self.writer.write(draft, check=must_be_finite, tell=tell, background=background)

    def restore_model(self, state: CheckpointContent) -> None:
        """Load the weights: all of them, or this rank's shard if they are sharded."""
        # `copy` keeps the module versions, which torch stores in an attribute.
        model, weights = self.run.model, copy.copy(state.model)
        own = model.state_dict()
        try:
            weights.update({name: shard_like(own.get(name), value) for name, value in weights.items()})
            weights.update({name: own[name] for name in self.left_out})
            model.load_state_dict(weights)
        except Exception as error:
            lines = str(error).splitlines()
            reason = (lines[1] if len(lines) > 1 else summary_of(error)).strip().rstrip(".")
            hint = "Resume with the config it was saved with, or warm-start with model.weights"
            what = f"it belongs to another model: {reason}"
            raise SavedStateError("S002", what, key="run.resume", suggestion=hint) from error

    def restore(self, state: CheckpointContent, steps_before: int) -> None:
        """Restore everything but the weights, for a run that was planned with `steps_before` steps."""
        run, parts = self.run, parts_of(state)
        try:
            run.progress = Progress(**state.facts["progress"])
            for name, part in run.stateful.items():
                if name in parts or name not in OPTIONAL:
                    part.load_state_dict(parts[name])
            run.best_metrics = state.facts["best_figures"]
            metrics = state.facts["figures"].items()
            run.metrics = {split: values for split, values in metrics if split != "test"}
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
            self._restore_links()
        # All ranks need this list to rank evaluations.
        run.progress.best_states = broadcast_object(run.progress.best_states, run.ranks)

    def _facts(self, best_only: bool) -> dict[str, Any]:
        """Return the content of `state.json`: progress, metrics, the data, and the automatic choices."""
        run = self.run
        return {
            "progress": asdict(run.progress),
            "best_figures": run.best_metrics,
            "best_metric": ".".join(run.plan.followed),
            "figures": run.metrics,
            "info": asdict(run.info),
            "choices": run.choices.as_json(),
            "best_only": best_only,
        }

    def _to_check(self, model: dict[str, Tensor]) -> list[Tensor]:
        """Return this rank's trained weights and buffers; on a GPU only their largest magnitudes."""
        run = self.run
        named = [(name, p) for name, p in run.model.named_parameters() if p.requires_grad and p.numel()]
        parts = [local_part(model.get(name, p.detach())).detach() for name, p in named]
        parts += [model[name] for name in self._finite_buffers if name in model]
        parts = [part for part in parts if part.numel()]
        if run.device.type == "cpu" or not parts:
            return parts
        # The largest magnitude cannot overflow like a sum of squares, and is NaN if a value is NaN.
        return [torch.stack(list(torch._foreach_norm(parts, math.inf)))]

    def _restore_links(self) -> None:
        """Abandon checkpoints after the one resumed from, forget missing best ones, and repair both links."""
        run, saved = self.run, self._saved
        if (current := saved / f"step-{run.progress.step}").is_dir():
            abandon_after(saved, current)
        known = {step_of(folder) for folder in list_checkpoints(saved)}
        best = [(value, step) for value, step in run.progress.best_states if step in known]
        run.progress.best_states = best[: int(run.plan.saving.best)]
        # A kill between a checkpoint and the link to it leaves an old link, as does `saving.best=0`.
        if run.progress.best_states:
            point(saved, "best", saved / f"step-{run.progress.best_states[0][1]}")
        else:
            (saved / "best").unlink(missing_ok=True)


def parts_of(state: CheckpointContent) -> dict[str, Any]:
    """Return the parts of a checkpoint; version 0.1 kept the position in a stream among the facts."""
    stream = state.facts.get("stream")
    return state.training if stream is None else {**state.training, "stream": stream}
