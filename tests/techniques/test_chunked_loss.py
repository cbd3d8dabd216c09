"""The last layer and the loss in chunks, against the two of them by themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from running import build_run, train
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ptfast.core.errors import ConfigError
from ptfast.core.protocols import IGNORE_INDEX, DataInfo, LinearLogits
from ptfast.core.tensors.trees import tensors_in
from ptfast.models.gpt import Gpt
from ptfast.tasks.language_modelling import LanguageModelling
from ptfast.techniques.rewrites.model_rewrites import apply_chunked_head

TASK = LanguageModelling(DataInfo(kind="tokens", task="language_modelling", vocab_size=97))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_loss_and_gradients_are_those_of_the_logits(tied: bool, half: bool) -> None:
    torch.manual_seed(0)
    model = Gpt(97, 16, width=8, depth=1, heads=2, tied_head=tied)
    tokens, targets = torch.randint(97, (4, 16)), torch.randint(97, (4, 16))
    targets[1, 5:] = IGNORE_INDEX

    def taken() -> tuple[torch.Tensor, list[torch.Tensor]]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss, _ = TASK.loss(model, (tokens, targets))
        (3 * loss).backward()
        return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]

    loss, gradients = taken()
    evaluated = model.eval()(tokens)
    apply_chunked_head(model.train(), TASK)
    chunked, own = taken()
    within = {"rtol": 2e-2, "atol": 2e-1} if half else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(chunked.float(), loss.float(), **within)
    torch.testing.assert_close(own, gradients, **within)
    assert torch.equal(model.eval()(tokens), evaluated)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_types_are_summed_in_float32(half: torch.dtype) -> None:
    draws = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(4096, 16, generator=draws), torch.randn(1000, 16, generator=draws)
    targets = torch.randint(1000, (4096,), generator=draws)

    def taken(dtype: torch.dtype, *, chunked: bool) -> list[torch.Tensor]:
        leaves = [each.to(half).to(dtype).requires_grad_() for each in (hidden, weight)]
        wide = torch.promote_types(dtype, torch.float32)
        logits = LinearLogits(*leaves) if chunked else (leaves[0] @ leaves[1].T).to(wide)
        loss = TASK.loss_sum(logits, targets)
        return [loss.detach().double(), *(each.double() for each in torch.autograd.grad(loss / 8, leaves))]

    exact = taken(torch.float64, chunked=False)

    def errors(found: list[torch.Tensor]) -> list[float]:
        return [float((mine - true).norm() / true.norm()) for mine, true in zip(found, exact, strict=True)]

    loss, *gradients = errors(taken(half, chunked=True))
    _, *plain = errors(taken(half, chunked=False))
    assert loss < 1e-5
    assert all(mine < 1.25 * theirs for mine, theirs in zip(gradients, plain, strict=True)), (
        gradients,
        plain,
    )


class Largest(TorchDispatchMode):
    """The most numbers in a tensor that is made while it is open."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.numbers = max([self.numbers, *(tensor.numel() for tensor in tensors_in(result))])
        return result


def test_no_tensor_of_all_logits_is_made() -> None:
    model = Gpt(4096, 64, width=8, depth=1, heads=2)
    apply_chunked_head(model, TASK)
    tokens = torch.zeros(8, 64, dtype=torch.long)
    with Largest() as largest:
        loss, _ = TASK.loss(model, (tokens, tokens))
        loss.backward()
    assert 0 < largest.numbers < 8 * 64 * 4096 / 4


@pytest.mark.gpu
def test_peak_memory_is_that_of_a_chunk() -> None:
    tokens, vocab_size = torch.zeros(8, 128, dtype=torch.long, device="cuda"), 4096
    whole = tokens.numel() * vocab_size * 4
    peaks = {}
    for chunked in (False, True):
        model = Gpt(vocab_size, 128, width=64, depth=1, heads=2).cuda()
        if chunked:
            apply_chunked_head(model, TASK)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        TASK.loss(model, (tokens, tokens))[0].backward()
        peaks[chunked] = torch.cuda.max_memory_allocated() - before
        del model
    assert peaks[False] > 2 * whole
    assert peaks[True] < whole


def test_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="Classification needs the logits"):
        build_run(tmp_path, "model=mlp", "rewrites.chunked_loss=true")
    with pytest.raises(ConfigError, match="Linear has no last layer `head`"):
        apply_chunked_head(nn.Linear(2, 2), TASK)
    assert train("rewrites.chunked_loss=true", "parallel=fsdp") == 2
    assert "which parallel=fsdp gathers only for its forward pass" in capsys.readouterr().err
