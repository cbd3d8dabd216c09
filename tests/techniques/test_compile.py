"""Compiling: in place, counted, for training alone; the C++ compiler itself is at work in the slow tests."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiling import NET, RUN, Remembers, captured_only, forgotten  # noqa: F401 - fixtures
from nets import Net
from running import WITH_TESTS, build_run, same_bits, summary, train, training_state, weights
from torch import Tensor, nn

from ptfast.core.devices import check_compiler
from ptfast.core.errors import ConfigError, MachineError, PtfastError
from ptfast.models.gpt import Gpt
from ptfast.models.resnet_cifar import ResNetCifar
from ptfast.run import Run
from ptfast.techniques.compile.compilation import Compilation
from ptfast.training import fit

MODES = ("blocks", "model", "max_autotune")
pytestmark = [
    pytest.mark.usefixtures("forgotten"),
    # What torch itself provokes and hides, in looking at tensors that are no leaves.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


def grads(model: nn.Module, inputs: Tensor, *, autocast: bool = False) -> list[Tensor]:
    """Gradients and buffers after one step's forward and backward."""
    torch.manual_seed(1)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outputs = model(inputs)
    outputs.float().square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None] + [
        buffer.clone() for buffer in model.buffers()
    ]


class TestRefusals:
    def test_cuda_graphs_without_cuda(self) -> None:
        with pytest.raises(MachineError, match="compile=reduce_overhead: CUDA graphs need a CUDA") as caught:
            Compilation("reduce_overhead", "cpu")
        assert caught.value.code == "E005"
        assert caught.value.exit_code == 4

    def test_without_a_compiler(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ptfast.core.devices.check_compiler", check_compiler)
        monkeypatch.setattr("ptfast.core.devices.shutil.which", lambda name: None)
        with pytest.raises(MachineError, match=r"compile=model: compiling needs a C\+\+ compiler"):
            Compilation("model", "cpu")

    @pytest.mark.parametrize(
        ("words", "code", "text"),
        [
            (["compile=reduce_overhead", "device=cpu"], "E005", "Use compile=model"),
            (["compile=reduce_overhead", "gradients.accumulate=2"], "C011", "overwrites the gradients"),
            (["compile=reduce_overhead", "micro_batches=2"], "C011", "one micro-batch per rank"),
            (["compile=blocks"], "C011", "Mlp has no repeated blocks. Name modules"),
            (["compile=blocks", "compile.blocks=[layer.*]"], "C005", "matches no module"),
        ],
    )
    def test_in_a_config(self, words: list[str], code: str, text: str, tmp_path: Path) -> None:
        with pytest.raises(PtfastError) as caught:
            build_run(tmp_path, "model=mlp", *words)
        assert caught.value.code == code
        assert text in str(caught.value)


@pytest.mark.usefixtures("captured_only")
class TestRun:
    def test_it_is_counted_booked_and_left_out_of_evaluations(self, in_tmp: Path) -> None:
        """A hundred samples give a whole batch and a smaller one: every block has two lengths."""
        words = (*RUN, "data.val=1697samples", "epochs=2", "compile=blocks")
        run = build_run(
            Path("run"),
            *words,
        )
        run.display = display = Remembers()
        names = list(run.model.state_dict())
        assert run.compilation is not None
        assert run.compilation.describe() == "blocks, 3 of them"
        fit.fit(run)
        assert list(run.model.state_dict()) == names
        assert run.compilation.report() == {"mode": "blocks", "graphs": 1, "recompiled": 1}
        assert run.compilation.complaint(1.0, 100) is None
        assert display.notes[-1].startswith("compiled 1 graph in ")
        assert run.clock.seconds["warm_up"] > 0

    def test_whatever_is_compiled_is_warming_up(self, in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A smaller last batch, too, whose code is made in the second step."""
        build = Compilation.__init__

        def compile_slowly(graph: Any, inputs: Any) -> Any:
            time.sleep(0.5)
            return graph

        def built(self: Compilation, *args: Any, **kwargs: Any) -> None:
            build(self, *args, **kwargs)
            self.options["backend"] = compile_slowly

        monkeypatch.setattr(Compilation, "__init__", built)
        assert train(*RUN, "data.val=1697samples", "epochs=2", "compile=blocks", "run.dir=run") == 0
        budget = summary(Path("run"))["time_budget"]
        assert budget["warm_up"] >= 1
        assert budget["forward"] + budget["backward"] < 0.5

    def test_rehearsing_changes_no_bit(self, tmp_path: Path) -> None:
        words = (*RUN, "steps=3", "model.dropout=0.2")
        runs = [build_run(tmp_path / mode, *words, f"compile={mode}") for mode in ("none", "model")]
        for run in runs:
            fit.fit(run)
        assert same_bits(dict(runs[0].model.state_dict()), dict(runs[1].model.state_dict()))

    def test_many_lengths_are_complained_of_once(self, tmp_path: Path) -> None:
        compilation = Compilation("model", "cpu")
        compilation.apply(model := Net((64,), 3))
        model(torch.randn(9, 64))
        compilation.start(1.0)
        for length in (8, 7, 6):
            assert compilation.complaint(1.0, 100) is None
            model(torch.randn(length, 64))
        text = "3 graphs compiled again while training: shapes or settings change; set compile.dynamic=true"
        assert (compilation.complaint(1.0, 100) or "").startswith(text)
        assert compilation.complaint(1.0, 100) is None
        assert compilation.report()["advice"].startswith(text)

    def test_a_run_too_short_to_repay_it_is_warned_of_once(self) -> None:
        compilation = Compilation("model", "cpu")
        compilation.start(31.0)
        assert compilation.complaint(0.1, 400) is None
        assert (compilation.complaint(0.1, 60) or "").startswith(
            "compiling took 31 s, and all 60 steps take about 6 s: unless steps become twice as fast"
        )
        assert compilation.complaint(0.1, 60) is None

    def test_dynamic_takes_any_length(self) -> None:
        compilation = Compilation("model", "cpu", dynamic=True)
        compilation.apply(model := Net((64,), 3))
        for length in (9, 8, 7):
            model(torch.randn(length, 64))
        assert compilation.num_graphs == 1

    def test_evaluation_is_plain(self) -> None:
        compilation = Compilation("model", "cpu")
        compilation.apply(model := Net((64,), 3).eval())
        run: Any = SimpleNamespace(compilation=compilation)
        with Run.uncompiled(run), torch.inference_mode():
            model(torch.randn(9, 64))
        assert compilation.num_graphs == 0

    def test_many_forms_of_one_class(self) -> None:
        """More than torch lets one function have before it gives up."""
        compilation = Compilation("blocks", "cpu")
        model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width)) for width in range(2, 12)))
        compilation.apply(model, ["*"])
        for block, width in zip(model, range(2, 12), strict=True):
            block(torch.randn(4, width))
        assert compilation.num_graphs == 10

    def test_what_is_variable_in_length_is_compiled_for_any(self, tmp_path: Path) -> None:
        (tmp_path / "train.tsv").write_text("".join(f"{'a ' * n}\t{n % 2}\n" for n in range(1, 41)))
        text = ("data=text_tsv", f"data.path={tmp_path / 'train.tsv'}", "model=text_encoder", "compile=model")
        assert build_run(tmp_path / "run", *text).choices.get("compile.dynamic") is True
        assert build_run(tmp_path / "digits", *RUN).choices.get("compile.dynamic") is False


# With the C++ compiler.


class Largest(nn.Module):
    """Its last gradient goes to entries that equal the largest, as rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.norm(self.conv(x))).amax((2, 3))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("autocast", [False, True])
def test_compiled_code_computes_the_same(mode: Any, autocast: bool) -> None:
    torch.manual_seed(0)
    for model, inputs in (
        (ResNetCifar(10, depth=8, width=4), torch.randn(4, 3, 8, 8)),
        (Gpt(16, 8, width=8, depth=2, heads=2), torch.randint(16, (4, 8))),
        *([(Largest(), torch.randn(4, 3, 6, 6))] if mode != "blocks" else []),
    ):
        compilation, compiled = Compilation(mode, "cpu"), copy.deepcopy(model)
        compilation.apply(compiled)
        found = (grads(one, inputs, autocast=autocast) for one in (compiled, model))
        one, two = (torch.cat([value.flatten() for value in values]) for values in found)
        assert (one - two).norm() < (0.05 if autocast else 1e-5) * two.norm()
        assert compilation.num_graphs


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("extra", [(), ("precision=bf16", "gradients.accumulate=2", "ema=ema")])
def test_a_resumed_run_has_every_bit(mode: str, extra: tuple[str, ...], in_tmp: Path) -> None:
    """From the last, smaller batch of an epoch too, whose code is then compiled first."""
    words = (*RUN, "model.dropout=0.2", "data.val=1637samples", "epochs=2", "saving.every=1steps")
    words = (*words, f"compile={mode}", "saving.keep=9", *extra)
    assert train(*words, "run.dir=whole") == 0
    steps = summary(Path("whole"))["steps"]
    assert steps == 6
    for step in (2, 3):
        torch.compiler.reset()
        assert train(*words, f"run.dir=rest-{step}", f"run.resume=whole/saved/step-{step}") == 0
        assert same_bits(weights(Path("whole")), weights(Path(f"rest-{step}")))
        assert same_bits(training_state(Path("whole")), training_state(Path(f"rest-{step}")))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["blocks", "model"])
def test_several_ranks(mode: str, in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", WITH_TESTS["PYTHONPATH"])
    words = (*RUN, "micro_batches=2", "steps=6", "saving.every=3steps", "saving.keep=9", "eval.every=3steps")
    assert train(*words, "run.dir=alone") == 0
    ranks = (*words, "parallel=ddp", "parallel.nproc=2", "device=cpu")
    assert train(*ranks, f"compile={mode}", "run.dir=whole") == 0
    for name, value in weights(Path("whole")).items():
        torch.testing.assert_close(value, weights(Path("alone"))[name], rtol=1e-4, atol=1e-5)
    assert summary(Path("whole"))["compile"]["recompiled"] == 0
    assert train(*ranks, f"compile={mode}", "run.dir=rest", "run.resume=whole/saved/step-3") == 0
    assert same_bits(weights(Path("whole")), weights(Path("rest")))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["blocks", "model"])
def test_with_activation_checkpointing(mode: str, in_tmp: Path) -> None:
    words = (*RUN, "steps=3", f"compile={mode}")
    assert train(*words, "run.dir=kept") == 0
    assert train(*words, "checkpointing=full", "run.dir=again") == 0
    for name, value in weights(Path("again")).items():
        torch.testing.assert_close(value, weights(Path("kept"))[name], rtol=1e-4, atol=1e-5)


@pytest.mark.gpu("triton", "CUDA graphs")
@pytest.mark.parametrize("mode", ["reduce_overhead", "max_autotune"])
def test_cuda_graphs(mode: str, in_tmp: Path) -> None:
    words = (*RUN, "device=cuda", "steps=12", "eval.every=4steps", "precision=amp_fp16", "gradients=clip")
    assert train(*words, "run.dir=plain") == 0
    assert train(*words, f"compile={mode}", "run.dir=graphs") == 0
    for name, value in weights(Path("graphs")).items():
        torch.testing.assert_close(value, weights(Path("plain"))[name], rtol=1e-2, atol=1e-2)


def test_accumulation_gives_up_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Compilation("max_autotune", "cpu", accumulates=True).options["mode"].endswith("no-cudagraphs")
    monkeypatch.setattr("ptfast.techniques.compile.compilation.compiler", lambda section, device: None)
    with pytest.raises(ConfigError, match="overwrites the gradients"):
        Compilation("reduce_overhead", "cpu", accumulates=True)
