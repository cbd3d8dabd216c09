"""Activation checkpointing: the gradients and buffers of a model without it, from fewer saved tensors."""

from __future__ import annotations

import contextlib
import copy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from config_trees import check, refused
from conftest import ROOT
from running import build_run, same_bits, train, weights
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from ptfast.checkpointing import (
    CheckpointedForward,
    apply_checkpointing,
    apply_memory_budget,
    naming_mismatch,
)
from ptfast.compile import Compilation
from ptfast.distributed import Ranks
from ptfast.errors import ConfigError
from ptfast.models.gpt import Gpt
from ptfast.models.mlp import Mlp
from ptfast.models.resnet_cifar import ResNetCifar
from ptfast.panel import checkpointing_row
from ptfast.parallel import RunningStatistics

MODES = ("full", "every_n", "selective")
SEED = 5


class Odd(nn.Module):
    """A block with every kind of state that a second forward pass could spoil."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.linear = spectral_norm(nn.Linear(6, 6))
        self.norm = norm
        self.act = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("table", torch.ones(6))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("var", torch.ones(6))

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        self.calls = self.calls + 1
        x = x + self.dropout(self.act(self.norm(self.linear(x)))) * scale * self.table
        return F.batch_norm(x, self.mean, self.var, training=self.training)


class OddNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        norms = [nn.BatchNorm1d(6), nn.BatchNorm1d(6, momentum=None), nn.SyncBatchNorm(6), nn.BatchNorm1d(6)]
        self.blocks = nn.ModuleList(Odd(norm) for norm in norms)
        self.blocks[3].norm.requires_grad_(False)

    def train(self, mode: bool = True) -> OddNet:
        super().train(mode)
        self.blocks[3].norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=x.new_tensor(0.5))
        return x


def resnet() -> nn.Module:
    return ResNetCifar(4, 3, depth=14, width=4)


def gpt() -> nn.Module:
    return Gpt(11, 12, width=16, depth=3, heads=2, dropout=0.2)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "batch norm": (resnet, lambda: torch.randn(4, 3, 8, 8)),
    "dropout": (gpt, lambda: torch.randint(11, (2, 12))),
    "odd": (OddNet, lambda: torch.randn(5, 6)),
}


def pair(make: Callable[[], nn.Module], mode: Any, **options: Any) -> tuple[nn.Module, nn.Module]:
    """The same model without and with checkpointing."""
    torch.manual_seed(0)
    plain = make().train()
    other = copy.deepcopy(plain)
    apply_checkpointing(other, mode, every=2, **options)
    return plain, other


def step(model: nn.Module, inputs: Tensor, seed: int = SEED) -> Tensor:
    """Forward and backward of one micro-batch, seeded like the loop's."""
    torch.manual_seed(seed)
    loss = model(inputs).float().square().sum()
    loss.backward()
    return torch.stack([loss.detach(), torch.rand(())])


def assert_same(plain: nn.Module, other: nn.Module) -> None:
    assert same_bits(plain.state_dict(), other.state_dict())
    for (name, one), (other_name, two) in zip(
        plain.named_parameters(), other.named_parameters(), strict=True
    ):
        assert name == other_name
        assert (one.grad is None) == (two.grad is None)
        assert one.grad is None or torch.equal(one.grad, two.grad), name


@contextlib.contextmanager
def saved_bytes() -> Iterator[list[int]]:
    """Counts the bytes that a forward pass saves for the backward pass, a storage once."""
    found: list[int] = []
    storages: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            storages.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found
    found.append(sum(tensor.untyped_storage().nbytes() for tensor in storages.values()))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", MODES)
def test_gradients_and_buffers_are_the_same_bits(mode: str, case: str) -> None:
    make, draw = CASES[case]
    plain, other = pair(make, mode)
    for seed in (1, 2, 3):
        inputs = draw()
        assert torch.equal(step(plain, inputs, seed), step(other, inputs, seed))
    assert_same(plain, other)


@pytest.mark.parametrize("mode", MODES)
def test_under_autocast(mode: str) -> None:
    make, draw = CASES["batch norm"]
    plain, other = pair(make, mode)
    inputs = draw()
    for model in (plain, other):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(inputs).float().square().sum()
        loss.backward()
    assert_same(plain, other)


@pytest.mark.parametrize("case", CASES)
def test_fewer_bytes_are_saved(case: str) -> None:
    make, draw = CASES[case]
    inputs, counts = draw(), {}
    for mode in ("none", "every_n", "selective", "full"):
        _, model = pair(make, mode)
        with saved_bytes() as found:
            model(inputs)
        counts[mode] = found[0]
    assert counts["full"] < counts["every_n"] < counts["none"]
    if hasattr(torch.utils.checkpoint, "torch_remat") or case != "odd":
        assert counts["full"] <= counts["selective"] < counts["none"]


def test_a_block_is_computed_twice_in_training_and_once_in_evaluation() -> None:
    _, model = pair(gpt, "full")
    tokens, calls = torch.randint(11, (2, 12)), []
    model.blocks[1].feed_in.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    step(model, tokens)
    assert calls == [True, True]
    model.eval()
    with torch.inference_mode():
        model(tokens)
    with torch.no_grad():
        model(tokens)
    assert calls[2:] == [False, False]


def test_names_stay_and_a_copy_has_its_own_layers() -> None:
    plain, other = pair(gpt, "selective")
    assert [*plain.state_dict()] == [*other.state_dict()]
    assert [name for name, _ in plain.named_modules()] == [name for name, _ in other.named_modules()]
    other.load_state_dict(plain.state_dict())
    twin = copy.deepcopy(other)
    step(twin, torch.randint(11, (2, 12)))
    assert all(p.grad is None for p in other.parameters())
    assert all(p.grad is not None for p in twin.parameters())


def test_which_blocks() -> None:
    assert list(apply_checkpointing(resnet(), "every_n", every=4)) == ["blocks.0", "blocks.4"]
    model = gpt()
    found = apply_checkpointing(model, "full", blocks="blocks")
    assert list(found) == ["blocks.0", "blocks.1", "blocks.2"]
    assert all(isinstance(block.forward, CheckpointedForward) for block in model.blocks)
    chosen = apply_checkpointing(gpt(), "full", blocks=["blocks.1", "head"])
    assert list(chosen) == ["blocks.1", "head"]
    assert apply_checkpointing(gpt(), "none") == apply_checkpointing(gpt(), "budget") == {}


def test_what_matches_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"checkpointing\.blocks=bloks\.\*: .*There is blocks"):
        apply_checkpointing(gpt(), "full", blocks="bloks.*")
    with pytest.raises(ConfigError, match="Mlp has no blocks that recur") as caught:
        apply_checkpointing(Mlp((4,), 2), "full")
    assert caught.value.code == "C011"


class NormOfItsOwn(nn.BatchNorm1d):
    """A norm that nothing is known of but that it has buffers, as those of timm."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


def test_a_norm_that_stands_still_at_first_writes_once_later() -> None:
    def trained(mode: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), NormOfItsOwn(4)) for _ in range(3)))
        apply_checkpointing(model, mode)
        norms = [module for module in model.modules() if isinstance(module, NormOfItsOwn)]
        for writes in (False, True, True):
            for norm in norms:
                norm.training = writes
            model(torch.randn(8, 4)).square().sum().backward()
        return model.state_dict()

    assert same_bits(trained("full"), trained("none"))


def test_an_empty_share_leaves_the_statistics_alone() -> None:
    """The loop's stand-in sample counts for nothing, in the recomputation neither."""
    make, draw = CASES["batch norm"]
    for mode in ("none", *MODES):
        _, model = pair(make, mode)
        before = copy.deepcopy(model.state_dict())
        with RunningStatistics(model, Ranks()).untouched():
            step(model, draw())
        assert same_bits(before, model.state_dict())
        step(model, draw())
        assert model.norm.num_batches_tracked == model.blocks[0].norm1.num_batches_tracked == 1


@pytest.mark.parametrize("static_graph", [False, True])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_under_ddp(static_graph: bool, tmp_path: Path) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        for make, draw in (CASES["batch norm"], CASES["dropout"]):
            for mode in MODES:
                plain, other = pair(make, mode)
                first, second = draw(), draw()
                ddp = nn.parallel.DistributedDataParallel(other, static_graph=static_graph)
                for inputs in (first, second):
                    step(plain, inputs)
                with contextlib.nullcontext() if static_graph else ddp.no_sync():
                    step(ddp, first)
                step(ddp, second)
                assert_same(plain, other)
    finally:
        torch.distributed.destroy_process_group()


class InPlace(nn.Module):
    def __init__(self, act: nn.Module | None) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(4, 4), act

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return self.act(x) if self.act is not None else x.mul_(2).sin()


def test_a_kept_result_is_not_overwritten() -> None:
    plain, other = pair(
        lambda: nn.Sequential(*(InPlace(nn.ReLU(inplace=True)) for _ in range(2))), "selective"
    )
    inputs = torch.randn(3, 4)
    for model in (plain, other):
        step(model, inputs)
    assert_same(plain, other)
    _, model = pair(lambda: nn.Sequential(InPlace(None), InPlace(None)), "selective")
    with pytest.raises(ConfigError, match=r"checkpointing=selective: .* Use checkpointing=full"):
        step(model, inputs)


def test_a_run_trains_and_resumes_to_the_same_bits(in_tmp: Path) -> None:
    words = (
        *("model=resnet_digits", "model.width=4", "model.depth=14", "steps=4", "saving.every=2steps"),
        *("saving.keep=3", "batch_size=16", "micro_batches=2", "dataloader.last=drop"),
    )
    assert train(*words, "run.dir=plain") == 0
    assert train(*words, "checkpointing=every_n", "run.dir=whole") == 0
    goes_on = ("run.dir=resumed", "run.resume=whole/saved/step-2")
    assert train(*words, "checkpointing=every_n", *goes_on) == 0
    assert same_bits(weights(Path("plain")), weights(Path("whole")))
    assert same_bits(weights(Path("whole")), weights(Path("resumed")))


def test_what_was_found_is_written_and_shown(tmp_path: Path) -> None:
    words = ("model=resnet_digits", "model.depth=14", "checkpointing=every_n")
    run = build_run(tmp_path, *words)
    assert run.resolved["checkpointed"] == ["blocks.0", "blocks.2", "blocks.4"]
    again = build_run(tmp_path, *words)
    assert again.resolved["checkpointed"] == ["blocks.0", "blocks.2", "blocks.4"]
    config = check(checkpointing={"mode": "every_n", "every": 2}).checkpointing
    row = checkpointing_row(config, run.resolved["checkpointed"])
    assert row == "all in 3 blocks computed again (blocks.0 to blocks.4, 1 in 2)"
    off = check(checkpointing={"mode": "none"}).checkpointing
    assert checkpointing_row(off, []) is None


@pytest.mark.parametrize(
    ("checkpointing", "code", "key"),
    [
        ({"mode": "budget", "memory_budget": 0.5}, "C011", "checkpointing"),
        ({"mode": "every_n"}, "C016", "checkpointing.every"),
        ({"mode": "budget", "memory_budget": 1.5}, "C005", "checkpointing.memory_budget"),
        ({"mode": "every_n", "every": 0}, "C005", "checkpointing.every"),
    ],
)
def test_contradictions(checkpointing: dict[str, Any], code: str, key: str) -> None:
    error = refused(checkpointing=checkpointing)
    assert (error.code, error.key) == (code, key)


def test_a_recipe_s_keys_of_another_mode_are_left_alone() -> None:
    check(lambda key: "mine.yaml:3", checkpointing={"mode": "none", "blocks": ["layers.*"], "every": 3})


def test_a_budget_of_the_compiler() -> None:
    """The partitioner that the budget steers, without the C++ compiler behind it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh(), nn.GELU())
    inputs, counts, grads = torch.randn(64, 8), {}, {}
    for budget in (None, 0.2):
        apply_memory_budget(budget)
        try:
            compiled = copy.deepcopy(model)
            compiled.compile(backend="aot_eager_decomp_partition")
            with saved_bytes() as found:
                loss = compiled(inputs).square().sum()
            loss.backward()
        finally:
            apply_memory_budget(None)
        counts[budget], grads[budget] = found[0], [p.grad for p in compiled.parameters()]
    assert counts[0.2] < 0.7 * counts[None]
    torch.testing.assert_close(grads[0.2], grads[None], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["batch norm", "gpt"])
def test_a_compiled_model(case: str) -> None:
    torch.manual_seed(0)
    model: nn.Module = ResNetCifar(4, 3, depth=8, width=4) if case == "batch norm" else Gpt(11, 12, 16, 2, 2)
    inputs = torch.randn(4, 3, 8, 8) if case == "batch norm" else torch.randint(11, (2, 12))
    expected = copy.deepcopy(model)
    expected.compile()
    step(expected, inputs)
    for mode in ("full", "selective", "budget"):
        other = copy.deepcopy(model)
        apply_checkpointing(other, mode)  # type: ignore[arg-type]
        apply_memory_budget(0.3 if mode == "budget" else None)
        other.compile()
        step(other, inputs)
        apply_memory_budget(None)
        torch.testing.assert_close(other.state_dict(), expected.state_dict(), rtol=1e-5, atol=1e-6)
        for one, two in zip(other.parameters(), expected.parameters(), strict=True):
            scale = two.grad.abs().max()
            torch.testing.assert_close(one.grad / scale, two.grad / scale, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("compile_mode", ["pointwise", "blocks"])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_compiled_in_parts(mode: Any, compile_mode: Any) -> None:
    plain, other = pair(lambda: ResNetCifar(4, 3, depth=8, width=4), mode)
    Compilation(compile_mode, "cpu").apply(other)
    inputs = torch.randn(4, 3, 8, 8)
    assert torch.allclose(step(plain, inputs), step(other, inputs))
    torch.testing.assert_close(other.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)
    for one, two in zip(other.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-5 * float(two.grad.abs().max()))


class Dropped(nn.Module):
    """Where an output is not zero, the gradient of its weight is not, if the same draws made both."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.dropout = nn.Parameter(torch.ones(500)), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.weight * x).sin().sin()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_dropout_of_a_compiled_model(mode: Any) -> None:
    model = nn.Sequential(Dropped())
    apply_checkpointing(model, mode, blocks="0")
    model.compile()
    output = model(torch.rand(500) + 0.5)
    output.sum().backward()
    assert 0.3 < (output != 0).float().mean() < 0.7
    assert torch.equal(output != 0, model[0].weight.grad != 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "distilbert"])
def test_models_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    small = {
        "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2},
        "llama": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        },
        "distilbert": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 16},
    }[name]
    config = transformers.AutoConfig.for_model(name, vocab_size=13, **small)
    tokens = torch.randint(13, (2, 7))

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = transformers.AutoModel.from_config(config)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.model(input_ids=tokens).last_hidden_state

    for mode in MODES:
        plain, other = pair(Last, mode)
        assert torch.equal(step(plain, tokens), step(other, tokens))
        assert_same(plain, other)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet50", "vit_tiny_patch16_224", "convnext_atto"])
def test_models_of_timm(name: str) -> None:
    timm = pytest.importorskip("timm")
    images = torch.randn(2, 3, 64, 64)
    size = {"img_size": 64} if name.startswith("vit") else {}
    for mode in MODES:
        plain, other = pair(lambda: timm.create_model(name, num_classes=4, drop_path_rate=0.2, **size), mode)
        assert torch.equal(step(plain, images), step(other, images))
        assert_same(plain, other)


@pytest.mark.slow
def test_the_compiler_is_loaded_by_nothing_that_is_off() -> None:
    code = (
        "import sys, ptfast.runner, ptfast.checkpointing as c; from ptfast.models.gpt import Gpt;"
        "c.apply_checkpointing(Gpt(5, 4, width=4, heads=2), 'none'); c.apply_memory_budget(None);"
        "assert not {'torch._dynamo', 'torch._functorch.config'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_on_a_gpu(mode: str) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for make, draw in CASES.values():
            plain, other = pair(lambda make=make: make().cuda(), mode)
            inputs = draw().cuda()
            with torch.autocast("cuda", torch.bfloat16):
                assert torch.equal(step(plain, inputs), step(other, inputs))
            assert_same(plain, other)
    finally:
        torch.use_deterministic_algorithms(False)


class Changing(nn.Module):
    """Keeps one tensor more for backward in every second call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x).exp() if self.calls % 2 else self.linear(x)


def test_a_block_that_computes_something_else_the_second_time() -> None:
    model = nn.Sequential(*(Changing() for _ in range(3)))
    apply_checkpointing(model, "full", blocks="*")
    with pytest.raises(ConfigError, match="the second time") as caught, naming_mismatch("full"):
        model(torch.randn(2, 4)).sum().backward()
    assert caught.value.code == "C011"
