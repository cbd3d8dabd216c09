"""A run while it is built."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from ptfast.config.schema import Config
from ptfast.core.resolved import Resolved
from ptfast.core.tensors.saved_state import State
from ptfast.data.build_data import Data
from ptfast.data.loaders.loading import ReaderOptions
from ptfast.optim.parameter_groups import Grouping
from ptfast.run import Run
from ptfast.training.stages.training_plan import TrainingPlan


class Checkpoint(NamedTuple):
    """The folder of a checkpoint, and what it is: `best by val accuracy, step 312`."""

    folder: Path
    label: str


@dataclass(kw_only=True, eq=False, repr=False)
class PartialRun(Run):
    """A run and what its stages build it from; a saved model is one whose first stages alone were walked."""

    config: Config
    before: Resolved
    """What each `auto` became when the run began; empty for a new run."""
    state: State | None = None
    """The saved state to resume, or that of a saved model."""
    checkpoint: Checkpoint | None = None
    """Where a saved model comes from."""
    data: Data | None = None
    """The splits; None for a saved model, and once the run is built."""
    plan: TrainingPlan = field(init=False)
    grouping: Grouping = field(init=False)
    """The config's settings of single parameters."""
    input_type: torch.dtype = torch.float32
    """That training images are given to the model in."""
    reader_options: ReaderOptions = field(init=False)
    """How samples are made ready for the model."""

    @property
    def splits(self) -> Data:
        """The splits, in stages that need them."""
        assert self.data is not None
        return self.data

    @property
    def shards_weights(self) -> bool:
        """True if each rank is going to hold a part of the weights."""
        return self.config.parallel.strategy == "fsdp" and self.ranks.distributed
