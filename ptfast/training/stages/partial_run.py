"""A run while it is being built."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from ptfast.config.schema import Config
from ptfast.core.tensors.checkpoint_files import CheckpointContent
from ptfast.data.build_data import Data
from ptfast.data.loaders.pipeline import LoaderOptions
from ptfast.optim.parameter_groups import Grouping
from ptfast.run import Run
from ptfast.training.stages.training_plan import TrainingPlan


class Checkpoint(NamedTuple):
    """The folder of a checkpoint, and its description: `best by val accuracy, step 312`."""

    folder: Path
    label: str


@dataclass(kw_only=True, eq=False, repr=False)
class PartialRun(Run):
    """A run and the inputs of its stages; a trained model is a run with only the first stages done."""

    state: CheckpointContent | None = None
    """The checkpoint to resume from, or that of a trained model."""
    checkpoint: Checkpoint | None = None
    """The checkpoint of a trained model."""
    data: Data | None = None
    """The splits; None for a trained model, and once the run is built."""
    config: Config
    training_plan: TrainingPlan = field(init=False)
    grouping: Grouping = field(init=False)
    """The config's settings for individual parameters."""
    input_type: torch.dtype = torch.float32
    """The dtype of training images as the model receives them."""
    loader_options: LoaderOptions = field(init=False)
    """How samples are prepared for the model."""

    @property
    def splits(self) -> Data:
        """Return the splits, in stages that need them."""
        assert self.data is not None
        return self.data

    @property
    def shards_weights(self) -> bool:
        """Return True if each rank will have a shard of the weights."""
        return self.config.parallel.strategy == "fsdp" and self.ranks.distributed
