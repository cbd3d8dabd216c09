"""The step compiled whole (`compile=step`): the same step, one graph for all rates, what takes its place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compiling import NET, RUN, Remembers, captured_only, forgotten  # noqa: F401 - fixtures
from nets import Net
from running import build_run, records, same_bits, summary, train, training_state, weights
from torch import Tensor

from ptfast.run import Run
from ptfast.training import fit
from ptfast.training.whole_step import obstacle

pytestmark = [
    pytest.mark.usefixtures("forgotten"),
    # What torch itself provokes and hides, in looking at tensors that are no leaves.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

STEP = ("model=mlp", "model.hidden=[16]", "steps=8", "batch_size=64", "logger=none", "log_every=3steps")
OPTIMIZERS = (
    ("optimizer=sgd", "schedule=onecycle", "gradients.clip_norm=0.5"),
    ("optimizer=sgd", "optimizer.nesterov=true", "optimizer.weight_decay=0.01"),
    ("optimizer=sgd", "optimizer.momentum=0", "gradients.clip_value=0.1"),
    ("optimizer=adam", "optimizer.weight_decay=0.1"),
    ("optimizer=adamw", "schedule=onecycle"),
    ("optimizer=lamb", "optimizer.norm_range=[0.1, 10]"),
    ("optimizer=muon", "optimizer.cautious=true"),
    ("optimizer=muon_airbench94",),
)


def trained(folder: Path, *words: str) -> tuple[Run, Remembers]:
    run = build_run(folder, *words)
    run.display = display = Remembers()
    fit.fit(run)
    return run, display


def weights_apart(one: Run, other: Run) -> float:
    """Distance of two runs' weights, as a part of their length."""
    a, b = (torch.cat([p.detach().flatten() for p in run.model.parameters()]) for run in (one, other))
    return float((a - b).norm() / b.norm())


class TestStep:
    @pytest.mark.usefixtures("captured_only")
    @pytest.mark.parametrize("words", OPTIMIZERS, ids=" ".join)
    def test_it_is_the_step_and_one_graph_for_all_rates(self, words: tuple[str, ...], tmp_path: Path) -> None:
        plain, _ = trained(tmp_path / "plain", *STEP, *words)
        whole, display = trained(tmp_path / "whole", *STEP, *words, "compile=step")
        assert whole.compilation is not None
        assert whole.compilation.report() == {"mode": "step", "graphs": 1, "recompiled": 0}
        assert not [warning for warning in display.warnings if "compiled as" in warning]
        # Muon multiplies in bfloat16, where the order of operations shows.
        assert weights_apart(whole, plain) < (1e-3 if "muon" in words[0] else 1e-6)
        for key in ("loss", "grad_norm"):
            assert whole.figures["train"][key] == pytest.approx(plain.figures["train"][key], rel=1e-3)
        kept, others = (run.optimizer.state_dict()["state"] for run in (whole, plain))
        for number, state in others.items():
            assert state.get("step") == kept[number].get("step")

    @pytest.mark.parametrize(
        ("words", "why"),
        [
            (("gradients.accumulate=2",), "a step has 2 micro-batches"),
            (("precision=amp_fp16",), "fp16 skips steps whose gradients overflow"),
            (("checkpointing=full",), "activation checkpointing needs a backward pass of its own"),
            (("optimizer=lars",), "the step of Lars is not written for it"),
            (("optimizer=sgd", "optimizer.dampening=0.1"), "is not written for it with dampening"),
            (("optimizer=nvlamb",), "is not written for it with max_grad_norm"),
        ],
    )
    def test_where_it_cannot_be(self, words: tuple[str, ...], why: str, tmp_path: Path) -> None:
        run = build_run(tmp_path, *NET, *words, "compile=step")
        assert why in (obstacle(run) or "")
        # A state from before nvlamb was lamb has its groups without the limit, which holds all the same.
        for group in run.optimizer.param_groups:
            group.pop("max_grad_norm", None)
        assert why in (obstacle(run) or "")

    @pytest.mark.usefixtures("captured_only")
    def test_the_model_is_compiled_in_its_place(self, tmp_path: Path) -> None:
        run, display = trained(tmp_path, *NET, "optimizer=lars", "compile=step", "steps=2")
        why = "the step of Lars is not written for it"
        assert display.warnings[0] == f"compile=step: {why}; compiled as with compile=model"
        report = {"mode": "model", "instead_of_step": why, "graphs": 1, "recompiled": 0}
        assert run.compilation is not None
        assert run.compilation.report() == report

    @pytest.mark.usefixtures("captured_only")
    def test_what_breaks_the_graph_is_told(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        forward = Net.forward

        def prints(self: Net, images: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return forward(self, images)

        plain, _ = trained(tmp_path / "plain", *RUN, "steps=3")
        monkeypatch.setattr(Net, "forward", prints)
        run, display = trained(tmp_path / "whole", *RUN, "steps=3", "compile=step")
        assert [warning for warning in display.warnings if "compiled as with compile=model" in warning]
        assert weights_apart(run, plain) < 1e-6

    @pytest.mark.usefixtures("captured_only")
    def test_parameters_thaw(self, tmp_path: Path) -> None:
        words = (
            *NET,
            "optimizer=adamw",
            "steps=6",
            "optimizer.groups=[{match: first.*, trains_from: 3steps}]",
        )
        plain, _ = trained(tmp_path / "plain", *words)
        whole, _ = trained(tmp_path / "whole", *words, "compile=step")
        assert weights_apart(whole, plain) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("model=mlp", "model.hidden=[16]", "optimizer=adamw"),
        ("model=resnet_digits", "model.width=4", "model.depth=8", "optimizer=sgd"),
        ("model=resnet_digits", "model.width=4", "model.depth=8", "optimizer=muon", "precision=bf16"),
    ],
    ids=" ".join,
)
def test_a_compiled_step_is_the_step(words: tuple[str, ...], in_tmp: Path) -> None:
    """And a resumed run has every bit, from a step within a log line."""
    words = (*words, "batch_size=64", "steps=6", "saving.every=1steps", "saving.keep=9", "log_every=4steps")
    assert train(*words, "run.dir=plain") == 0
    assert train(*words, "compile=step", "run.dir=whole") == 0
    assert summary(Path("whole"))["compile"] == {"mode": "step", "graphs": 1, "recompiled": 0}
    one, two = (records(Path(name)) for name in ("whole", "plain"))
    losses, others = ([line["loss"] for line in lines] for lines in (one, two))
    assert losses == pytest.approx(others, rel=2e-2 if "precision=bf16" in words else 1e-4)
    assert train(*words, "compile=step", "run.dir=rest", "run.resume=whole/saved/step-3") == 0
    assert same_bits(weights(Path("whole")), weights(Path("rest")))
    assert same_bits(training_state(Path("whole")), training_state(Path("rest")))
