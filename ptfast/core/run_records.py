"""The progress of a run, and the types of its JSON files."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

# In Python 3.10 and 3.11, pydantic cannot use the TypedDict of `typing`.
from typing_extensions import NotRequired, Required, TypedDict

from ptfast.core import run_directory
from ptfast.core.protocols import DataInfo

LEAST_STEPS, LEAST_S = 5, 1.0
"""The minimum of steps and seconds after warm-up to report throughput: fewer would be too noisy."""


@dataclass
class Progress:
    """The progress of a run, saved and restored with the weights."""

    step: int = 0
    samples: int = 0
    best_value: float | None = None
    best_step: int | None = None
    best_states: list[tuple[float, int]] = field(default_factory=list)
    """Value and step of the best evaluations with kept checkpoints, the best first."""
    evaluations_without_gain: int = 0
    timed_steps: int = 0
    """Steps that count for throughput, over all attempts, without warm-up and measured steps."""
    timed_samples: int = 0
    timed_s: float = 0.0
    """Seconds of the timed steps."""
    window_loss: float = 0.0
    """Sum of the item losses since the last log line, so that a resumed run logs the same loss."""
    window_items: float = 0.0
    epoch_loss: float = 0.0
    """Sum of the item losses since the last evaluation, without those in `window_loss`."""
    epoch_items: float = 0.0
    evaluation_due: bool = False
    """The evaluation of this step has not run yet."""
    skipped_steps: int = 0
    """Steps that were skipped because the loss or gradients were not finite, or overflowed in fp16."""
    skipped_before: int = 0
    """`skipped_steps` before the last step: the lag of the fp16 schedule in the next step."""
    skipped_logged: int = 0
    """`skipped_steps` at the last log line."""
    recent_losses: list[float] = field(default_factory=list)
    """Losses of the latest log lines, the newest last."""
    loss_spikes: int = 0
    largest_spike: dict[str, float] | None = None
    """Its `step`, its `loss`, and the `usual` loss at that time."""

    def advance(self, num_samples: int) -> None:
        """Count one more optimizer step, of `num_samples` samples over all ranks."""
        self.step += 1
        self.samples += num_samples

    @property
    def samples_per_s(self) -> float | None:
        """Return training samples per second without warm-up; None if the run was too short."""
        enough = self.timed_steps >= LEAST_STEPS and self.timed_s >= LEAST_S
        return self.timed_samples / self.timed_s if enough else None


# Pydantic checks the types below when a file is read, because it may come from a stranger.
Number = float | None
"""A metric; null in JSON if it is not finite."""
Numbers = dict[str, Number]
Count = Annotated[int, Field(ge=0)]


class Normalization(TypedDict):
    mean: list[float]
    std: list[float]


class Vocabulary(TypedDict):
    kind: Literal["words", "characters"]
    entries: list[str]
    unknown_id: int | None


class HubTokenizer(TypedDict):
    kind: Literal["hub"]
    source: str
    content: str


class ColumnFacts(TypedDict):
    __pydantic_config__ = ConfigDict(extra="forbid")  # pyright: ignore[reportGeneralTypeIssues]
    name: str
    kind: Literal["number", "date", "category"]
    fill: float
    flags: bool
    comma: Literal["", "decimal", "thousands"]
    values: list[str]


class TableFacts(TypedDict):
    columns: list[ColumnFacts]
    missing: list[str]
    delimiter: str
    target: str


class InputFacts(TypedDict, total=False):
    """`DataInfo.extra`; a user's dataset may add facts of its own."""

    __pydantic_config__ = ConfigDict(extra="allow")  # pyright: ignore[reportGeneralTypeIssues]
    normalize: Normalization
    tokenizer: Vocabulary | HubTokenizer
    max_length: Count | None
    max_value: int | float
    input_shape: list[int]
    columns: list[str] | None
    table: TableFacts
    contents: dict[str, Annotated[list[int | str], Field(min_length=3, max_length=3)]]


@dataclass(frozen=True)
class AutoChoice:
    """The resolved value of a config key."""

    key: str
    value: Any
    reason: str = ""
    """The reason of the choice; empty if the config sets it, or if there was no alternative."""

    def __str__(self) -> str:
        value = self.value if isinstance(self.value, str) else json.dumps(self.value)
        return f"{self.key}={value} because {self.reason}"


class SavedChoices(TypedDict):
    """`resolved.json`."""

    choices: list[AutoChoice]
    facts: dict[str, Any]


class CheckpointFacts(TypedDict):
    """`state.json`."""

    __pydantic_config__ = ConfigDict(extra="allow")  # pyright: ignore[reportGeneralTypeIssues]
    progress: Progress
    info: DataInfo
    choices: NotRequired[SavedChoices]
    figures: dict[str, Numbers]
    best_figures: Numbers


class Manifest(TypedDict):
    """`manifest.json` of a checkpoint."""

    format: int
    step: Count
    best_only: NotRequired[bool]
    sha256: dict[str, str]


class Spikes(TypedDict):
    count: int
    largest: Numbers


class Goodput(TypedDict):
    attempts: int
    seconds: Numbers


class Roofline(TypedDict, total=False):
    line: str
    step_s: Number
    floors_s: dict[str, float]
    waits_s: dict[str, float]


class Summary(TypedDict, total=False):
    """The entries of `summary.json` that are read again."""

    status: str
    exit_code: int
    error: str
    recipe: str | None
    arguments: list[str]
    steps: Count
    wall_s: Number
    train_samples_per_s: Number
    peak_memory_bytes: Number
    best_metric: str
    weights: str
    train: Numbers
    val: Numbers
    test: Numbers
    best: Numbers
    evals: dict[str, Numbers]
    loss_spikes: Spikes
    time_budget: Numbers
    goodput: Goodput | None
    roofline: Roofline
    next: list[str]


class Environment(TypedDict, total=False):
    """The entries of `environment.json` that are read again."""

    command_line: list[str]
    started: str
    threads: int
    ranks: int


class Digests(TypedDict):
    """`secrets.json`."""

    salt: Annotated[str, Field(pattern="^([0-9a-f]{2})*$")]
    digests: dict[str, str]


ClassCount = TypedDict("ClassCount", {"class": str | float, "samples": Count})
ClassRow = TypedDict(
    "ClassRow",
    {
        "class": str | float,
        "samples": Annotated[int, Field(gt=0)],
        "hits": Count,
        "mistaken": list[ClassCount],
    },
)


class Sample(TypedDict, total=False):
    target: Required[str | Number]
    prediction: Required[str | Number]
    probability: Number
    pixels: Number
    image: str
    text: str


class Examples(TypedDict, total=False):
    """`examples.json`."""

    split: str
    num_samples: Count
    classes: list[ClassRow]
    samples: list[Sample]


Lines = list[list[Number]] | list[list[list[Number]]]
"""Points of a curve by axis, or of one curve per class."""


class Tables(TypedDict):
    """A file of `metrics`."""

    step: int | float
    split: str
    class_names: list[str] | None
    metrics: dict[str, dict[str, Any]]


class MetricsLine(TypedDict):
    """A line of `metrics.jsonl`."""

    __pydantic_config__ = ConfigDict(extra="allow")  # pyright: ignore[reportGeneralTypeIssues]
    step: int | float


class AttemptFacts(TypedDict):
    """A line of `attempts.jsonl`."""

    started: float
    from_step: Count
    step: Count
    status: str | None
    seconds: dict[str, float]


@functools.cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def checked(kind: Any, text: str) -> Any:
    """Parse JSON as `kind`, without unknown entries; ValueError names the first entry of a wrong type."""
    try:
        return adapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, found['loc']))}: {found['msg']}") from None


def read_known(path: Path, kind: Any) -> dict[str, Any]:
    """Read a JSON object like `read_json`, without the entries whose type differs from `kind`."""
    found = run_directory.read_json(path)
    try:
        adapter(kind).validate_python(found, strict=True)
    except ValidationError as error:
        for each in error.errors(include_url=False):
            found.pop(str(each["loc"][0]), None)
    return found
