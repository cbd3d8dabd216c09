"""Runs of models whose parameters are slices, complex, empty, single numbers or sparsely trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from running import build_run, same_bits, training_state, weights
from torch import Tensor, nn

from ptfast.core.errors import ConfigError
from ptfast.run import Run
from ptfast.training.fit import fit
from ptfast.training.user_code import naming_user_code

HERE = "test_odd_parameters"
WORDS = (
    *("data=custom", "data._target_=toys.blobs", "data.val=10samples", "batch_size=10", "steps=8"),
    *("model=custom", "schedule=constant", "log_every=4", "dataloader=plain", "saving.every=4steps"),
    "saving.keep=2",
)


class Sliced(nn.Module):
    """Its first weight is a part of a larger one, and a buffer has one number in memory."""

    def __init__(self, num_classes: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, num_classes)
        self.first.weight = nn.Parameter(torch.randn(6, 16)[:, :4])
        self.register_buffer("ones", torch.ones(1).expand(6))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last((self.first(inputs) * self.ones).relu())


class Spectral(Sliced):
    """A complex parameter, an empty one, one that nothing uses, and a single number."""

    def __init__(self, num_classes: int = 2) -> None:
        super().__init__(num_classes)
        self.filter = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        self.scale, self.empty = nn.Parameter(torch.ones(())), nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Linear(3, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(torch.fft.irfft(torch.fft.rfft(inputs) * self.filter) * self.scale)


class Words(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self, num_classes: int = 2) -> None:
        super().__init__()
        self.embedding, self.last = nn.Embedding(5, 4, sparse=True), nn.Linear(4, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.embedding(inputs.abs().long().clamp(max=4)).mean(1))


def fitted(folder: Path, model: str, *words: str, **given: Any) -> Run:
    run = build_run(folder, *WORDS, f"model._target_={HERE}.{model}", *words, **given)
    assert fit(run) == "finished"
    return run


@pytest.mark.parametrize(
    "words",
    [
        ("optimizer=adamw",),
        ("optimizer=sgd", "ema.decay=0.8"),
        ("optimizer=adamw", "ema=swa", "ema.swa_every=1steps", "gradients.clip_norm=0.5"),
        ("optimizer=adamw", "numerics=skip", "gradients.clip_adaptive=0.1"),
        ("optimizer=adamw", "gradients.clip_value=0.01", "gradients.log_norm=true"),
        ("optimizer._target_=torch.optim.Adagrad",),
    ],
    ids=" ".join,
)
def test_a_slice_trains_as_without_fused_steps(words: tuple[str, ...], tmp_path: Path) -> None:
    for fused in ("auto", "false"):
        fitted(tmp_path / fused, "Sliced", *words, f"optimizer.fused={fused}")
    assert same_bits(*(weights(tmp_path / fused) for fused in ("auto", "false")))
    fused, unfused = (training_state(tmp_path / each) for each in ("auto", "false"))
    assert same_bits(fused.get("ema"), unfused.get("ema"))
    resumed = build_run(
        tmp_path / "resumed",
        *WORDS,
        f"model._target_={HERE}.Sliced",
        *words,
        "optimizer.fused=auto",
        checkpoint_folder=tmp_path / "auto" / "saved" / "step-4",
    )
    fit(resumed)
    assert same_bits(weights(tmp_path / "resumed"), weights(tmp_path / "auto"))


@pytest.mark.parametrize(
    "words",
    [
        ("optimizer=adamw", "ema.decay=0.8", "gradients.clip_norm=0.5", "gradients.log_norm=true"),
        ("optimizer=sgd", "numerics=skip", "gradients.clip_adaptive=0.1"),
        ("optimizer=muon", "ema=swa", "ema.swa_every=1steps"),
    ],
    ids=" ".join,
)
def test_complex_and_empty_parameters_train(words: tuple[str, ...], tmp_path: Path) -> None:
    before = dict(build_run(tmp_path / "built", *WORDS, f"model._target_={HERE}.Spectral").model.state_dict())
    fitted(tmp_path / "run", "Spectral", *words)
    after = weights(tmp_path / "run")
    moved = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
    assert {"first.weight", "filter", "scale", "last.weight"} <= moved
    assert not moved & {"unused.weight", "unused.bias", "ones"}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    "words",
    [(), ("gradients.clip_norm=0.5",), ("numerics=skip", "ema.decay=0.8"), ("gradients.log_norm=true",)],
    ids=" ".join,
)
def test_sparse_gradients_train(words: tuple[str, ...], tmp_path: Path) -> None:
    run = fitted(tmp_path, "Words", "optimizer=sgd", "optimizer.weight_decay=0", *words)
    assert run.choices.get("optimizer") == "for-loop: embedding.weight has sparse gradients"


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    ("model", "words", "key"),
    [
        ("Words", ("optimizer=sgd", "gradients.clip_value=1"), "gradients.clip_value"),
        ("Words", ("optimizer=sgd", "gradients.clip_adaptive=0.1"), "gradients.clip_adaptive"),
        ("Words", ("optimizer=adamw",), "optimizer"),
        ("Words", ("optimizer=muon",), "optimizer"),
        ("Words", ("optimizer=lamb",), "optimizer"),
        ("Spectral", ("optimizer=sgd", "gradients.clip_value=1"), "gradients.clip_value"),
        ("Spectral", ("optimizer=sgd", "precision=amp_fp16"), "precision"),
        ("Spectral", ("optimizer=lamb",), "optimizer"),
        ("Spectral", ("optimizer=adafactor",), "optimizer._target_"),
    ],
)
def test_what_cannot_be_done_to_such_gradients_is_rejected(
    model: str, words: tuple[str, ...], key: str, tmp_path: Path
) -> None:
    def train() -> None:
        run = build_run(tmp_path, *WORDS, f"model._target_={HERE}.{model}", *words)
        with naming_user_code(run):
            fit(run)

    with pytest.raises(ConfigError) as caught:
        train()
    assert caught.value.key == key
