"""Repeat an evaluation from a saved state, and load a saved model for whatever comes after training."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ptfast.config.schema import Config
from ptfast.core.distributed import Ranks
from ptfast.core.errors import EXIT_OK, ConfigError
from ptfast.core.protocols import DataInfo, Task
from ptfast.core.saved_state import State, read_state
from ptfast.data.build_data import check_same_data, read_info
from ptfast.data.loaders.side_stream import open_side_stream
from ptfast.models.build_model import build_model
from ptfast.tasks.build_task import build_task
from ptfast.techniques.backend.torch_settings import apply_backend, resolve_device
from ptfast.techniques.ema.weight_averages import Average
from ptfast.techniques.precision.number_formats import Precision, apply_half_weights, build_precision
from ptfast.techniques.rewrites.model_rewrites import apply_channels_last, drop_biases
from ptfast.training.fit import evaluate
from ptfast.training.pad_batches import check_full_size
from ptfast.training.prepare_data import build_eval_loaders, full_size, load_data
from ptfast.training.state import restore_model
from ptfast.training.test_time_flip import check_flip
from ptfast.training.user_code import naming_user_code


@dataclass
class SavedModel:
    """A model as it was trained, on its device and ready to evaluate."""

    model: nn.Module
    average: Average | None
    """Of its weights, where they were averaged; not in the model yet."""
    task: Task
    info: DataInfo
    device: torch.device
    precision: Precision
    channels_last: bool
    micro_batches: int
    """That a batch was cut into in training: what is known to fit into memory."""
    step: int


def load_saved(config: Config, state_folder: Path) -> SavedModel:
    """Build the model of a saved state, and the average of its weights where there is one. Needs no data.

    Raises:
        SavedStateError: S001 when the state is damaged, S002 when it is of another model.
    """
    state: State = read_state(state_folder)
    device = resolve_device(config.device, Ranks())
    resolved = state.facts["resolved"]
    apply_backend(
        threads=resolved["threads"],
        cudnn_benchmark=False,
        deterministic=config.backend.deterministic,
        device=device,
    )
    info = read_info(state.facts["info"])
    model = build_model(config.model.target, info)
    channels_last = bool(resolved["channels_last"])
    if channels_last:
        apply_channels_last(model)
    matmul = resolved.get("matmul_precision", "highest")
    precision = build_precision(config.precision.mode, device, matmul)
    if precision.half_weights:
        apply_half_weights(model)
    drop_biases(model, resolved["dropped_biases"])
    restore_model(model.to(device), state)
    average = None
    if "ema" in state.training:
        # What never trained was not averaged.
        averaged = state.training["ema"]["averages"]
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in averaged)
        average = Average(model)
        average.load_state_dict(state.training["ema"])
    model.eval()
    task = build_task(config.task.name, info, **config.task.build_options())
    check_flip(config.eval.flip, info, task, targets=config.augment.targets)
    check_full_size(config.eval.last, task)
    micro_batches, step = int(resolved["micro_batches"]), int(state.facts["progress"]["step"])
    return SavedModel(model, average, task, info, device, precision, channels_last, micro_batches, step)


def evaluate_saved(
    config: Config, state_folder: Path, split: str | None = None, *, other_data: bool = False
) -> int:
    """Evaluate a saved state on every split its data has besides `train`, or on one, and print the figures.

    Args:
        other_data: whether the config names other data than the model was trained on. It is read by the
            vocabulary, the statistics and the classes of training.

    Raises:
        ConfigError: C005 when the data has no such split.
        DataError: D003, D004 or D005 when the model cannot read the other data.
        SavedStateError: S003 when the data of training has changed.
    """
    saved = load_saved(config, state_folder)
    if other_data:
        data = load_data(config, known=saved.info)
    else:
        data = load_data(config, measured=saved.info.extra.get("normalize"))
        if changed := check_same_data(saved.info, data.info, trains=False):
            what = f"has changed since training, which may have seen what is held out now: {changed}"
            print(f"ptfast: warning: data: {what}", file=sys.stderr)
    task = build_task(config.task.name, data.info, **config.task.build_options())
    loaders = build_eval_loaders(
        config,
        data,
        micro_batches=saved.micro_batches,
        rank=0,
        num_ranks=1,
        normalize=config.data.normalize,
        device=saved.device,
        channels_last=saved.channels_last,
        side=open_side_stream(saved.device) if config.dataloader.side_stream else None,
        worker_threads=config.backend.worker_threads,
        **config.dataloader.model_dump(include={"kind", "workers", "prefetch", "pin"}),
    )
    if not loaders:
        hint = "Hold some out with data.val=10%"
        raise ConfigError("C005", "the data has no split besides train", key="data", suggestion=hint)
    if split is not None and split not in loaders:
        hint = f"There are: {', '.join(loaders)}"
        raise ConfigError("C005", "the data has no such split", key="--split", value=split, suggestion=hint)
    for name in [split] if split else loaders:
        with naming_user_code(saved):
            figures = evaluate(
                saved.model,
                task,
                loaders[name],
                device=saved.device,
                ranks=Ranks(),
                precision=saved.precision,
                average=saved.average,
                flip=config.eval.flip,
                full_size=full_size(config, data.info, saved.micro_batches),
            )
        left_out = {"left_out": loaders[name].left_out} if loaders[name].left_out else {}
        print(json.dumps({"step": saved.step, "split": name, **figures, **left_out}))
    for loader in loaders.values():
        loader.close()
    return EXIT_OK
