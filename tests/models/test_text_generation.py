"""Text from language models: the likeliest tokens, draws by a seed, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ptfast.cli.predict_command import generate
from ptfast.core.errors import ConfigError
from ptfast.core.protocols import DataInfo
from ptfast.models.gpt import Gpt

PROMPT = torch.tensor([1, 2])


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return Gpt(vocab_size=9, context_length=6, width=16, depth=1).eval()


def gpt2() -> nn.Module:
    pytest.importorskip("transformers", reason="needs the package transformers")
    from ptfast.models.transformers import build

    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
    info = DataInfo("tokens", "language_modelling", vocab_size=9)
    model = build("gpt2", info, **sizes).eval()
    assert model.model.config.vocab_size > 9  # type: ignore[union-attr]
    return model


def likeliest(model: nn.Module, tokens: Tensor, num_new: int, context: int) -> list[int]:
    for _ in range(num_new):
        logits = model(tokens[None][:, -context:])[0, -1, :9]
        tokens = torch.cat([tokens, logits.argmax()[None]])
    return tokens.tolist()


@pytest.mark.parametrize("build", [gpt, pytest.param(gpt2, marks=pytest.mark.slow)])
def test_tokens_are_drawn_by_the_seed_or_the_likeliest(build: Any) -> None:
    model = build()

    def drawn(**asked: Any) -> list[int]:
        return generate(model, PROMPT, vocab_size=9, context_length=6, num_new=10, **asked).tolist()

    context = 6 if isinstance(model, Gpt) else 16
    assert drawn(top_k=1) == drawn(top_k=1, seed=1) == likeliest(model, PROMPT, 10, context)
    assert drawn(temperature=1e-3) == drawn(top_k=1)
    before = torch.random.get_rng_state()
    texts = [tuple(drawn(seed=seed)) for seed in (0, 0, 1, 2)]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3
    assert all(text[:2] == (1, 2) and len(text) == 12 and max(text) < 9 for text in texts)


def test_fewer_tokens_to_choose_from() -> None:
    model = gpt()
    first = {
        int(generate(model, PROMPT, vocab_size=9, context_length=6, num_new=1, top_k=2, seed=s)[-1])
        for s in range(20)
    }
    assert first == set(model(PROMPT[None])[0, -1].topk(2).indices.tolist())


@pytest.mark.slow
def test_more_tokens_than_places() -> None:
    with pytest.raises(ConfigError, match="exceeds the model's context of 16 tokens") as caught:
        generate(gpt2(), PROMPT, vocab_size=9, context_length=6, num_new=15)
    assert (caught.value.code, caught.value.key) == ("C005", "--max-new-tokens")
