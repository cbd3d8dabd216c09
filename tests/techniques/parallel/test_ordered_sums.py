"""`determinism=elastic`: one rank or several, and changed in the middle of a run, to the same bits."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_cases import SELDOM
from running import WITH_TESTS, build_run, records, same_bits, train, training_state, weights
from strategy_cases import ELASTIC
from toys import Lines

from ptfast.core.distributed import Ranks
from ptfast.core.errors import ConfigError
from ptfast.core.tensors.checkpoint_folders import list_checkpoints
from ptfast.techniques.parallel.ordered_sums import OrderedStatistics
from ptfast.training.fit import fit

TEXT = ("data=text_file", "data.path=text", "data.context_length=16", "model=gpt", "model.width=32")
TEXT = (*TEXT, "model.depth=2", "batch_size=16", "precision=bf16", "ema=ema", "optimizer=muon")
IMAGES = (
    "recipe=resnet_digits",
    "model.width=8",
    "batch_size=64",
    "gradients.clip_norm=0.5",
    "augment.mixup=0.2",
)
IMAGES = (*IMAGES, "ema=swa", "ema.swa_start=8steps", "ema.swa_every=4steps")


def test_two_ranks_take_the_steps_of_one(in_tmp: Path, two_ranks: dict[str, Any]) -> None:
    """Of six micro-batches, each rank has three: what it adds first ends in the middle of a pair."""
    run = build_run(Path("one"), *ELASTIC)
    run.logger = Lines()
    assert fit(run) == "finished"
    others, states = (
        two_ranks["elastic"],
        (training_state(f) for f in (Path("one"), Path(two_ranks["folder"], "elastic"))),
    )
    assert [line["loss"] for line in run.logger] == others["losses"]
    assert same_bits(weights(Path("one")), others["weights"])
    assert same_bits(*states)


def test_parameters_that_no_sample_uses_stay_as_they_are(tmp_path: Path, two_ranks: dict[str, Any]) -> None:
    """Those that some rank uses move on all, in the steps in which it does."""
    run = build_run(tmp_path, *SELDOM)
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    assert fit(run) == "finished"
    ended = weights(tmp_path)
    moved = {name for name, value in ended.items() if not torch.equal(value, before[name])}
    assert moved == {f"{layer}.{kind}" for layer in ("used", "seldom") for kind in ("weight", "bias")}
    assert same_bits(ended, two_ranks["seldom"])
    plain = build_run(tmp_path / "plain", *(word for word in SELDOM if word != "determinism=elastic"))
    assert fit(plain) == "finished"
    for name, value in weights(tmp_path / "plain").items():
        torch.testing.assert_close(ended[name], value)


def test_a_step_that_is_cut_short_leaves_statistics_alone() -> None:
    """A signal may end it, and the state of the step before is saved."""
    norms = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3, momentum=None))
    statistics = OrderedStatistics(norms, Ranks())
    for ends in (False, True):
        before = {name: value.clone() for name, value in norms.state_dict().items()}
        with suppress(KeyboardInterrupt), statistics.step():
            norms(torch.randn(8, 3))
            statistics.keep()
            norms(torch.randn(8, 3))
            if not ends:
                raise KeyboardInterrupt
            statistics.keep()
        assert same_bits(before, norms.state_dict()) != ends
    assert norms[0].num_batches_tracked == 2


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("micro_batches=4", "parallel=fsdp"),
        ("micro_batches=4", "parallel=ddp", "parallel.sync_batchnorm=true"),
        ("micro_batches=4", "parallel=ddp", "parallel.compression=bf16"),
    ],
)
def test_what_depends_on_the_ranks_is_refused(in_tmp: Path, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="determinism") as caught:
        build_run(Path("refused"), "determinism=elastic", *words)
    assert caught.value.code == "C011"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [IMAGES, TEXT], ids=["images", "text"])
def test_killed_on_four_ranks_and_on_two_it_ends_on_one(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, kind: tuple[str, ...]
) -> None:
    for name, value in WITH_TESTS.items():
        monkeypatch.setenv(name, value)
    Path("text").write_text("to be or not to be, that is the question. " * 200)
    words = (
        *kind,
        "determinism=elastic",
        "micro_batches=4",
        "steps=24",
        "log_every=4steps",
        "eval.every=6steps",
    )
    words = (*words, "saving.every=3steps", "callbacks=[{_target_: callbacks.Misfortune}]")
    Path("misfortune").write_text("0 99 SIGKILL")
    assert train(*words, "run.dir=whole") == 0
    for ranks, rank, step in ((4, 2, 8), (2, 1, 17)):
        Path("misfortune").write_text(f"{rank} {step} SIGKILL")
        on = ("parallel=ddp", f"parallel.nproc={ranks}")
        assert train(*words, *on, "run.dir=chain", "run.resume=auto") != 0
        assert list_checkpoints(Path("chain/saved"))[0].name == f"step-{step - step % 3}"
    Path("misfortune").write_text("0 99 SIGKILL")
    assert train(*words, "run.dir=chain", "run.resume=auto") == 0
    assert same_bits(*(weights(Path(name)) for name in ("whole", "chain")))
    assert same_bits(*(training_state(Path(name)) for name in ("whole", "chain")))
    assert records(Path("whole")) == records(Path("chain"))
