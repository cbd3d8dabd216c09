"""Text from a language model, a token at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ptfast.core.errors import ConfigError
from ptfast.models.transformers import HfModel


def generate(
    model: nn.Module,
    tokens: Tensor,
    *,
    vocab_size: int,
    context_length: int,
    num_new: int = 100,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> Tensor:
    """Draw tokens that go on from `tokens`.

    Models of transformers do so by their own `generate`, with what attention has computed kept, and end where
    their end token is drawn. Any other reads the last `context_length` tokens again for each new one.

    Args:
        model: maps tokens (batch, length) to logits of the next ones (batch, length, classes), in evaluation.
        tokens: of the prompt, (length,), on the device of the model.
        vocab_size: tokens that may be drawn; logits of a model may be of more.
        context_length: tokens that the model was trained on.
        num_new: tokens to draw, at most.
        temperature: above 0; logits are divided by it.
        top_k: how many of the likeliest tokens there are to choose from; None for all, 1 for no choice.
        seed: of the draws; the same on any device up to its rounding.

    Returns:
        Prompt and new tokens, (length + new,).

    Raises:
        ConfigError: C005 for more tokens than a model of transformers has positions for.
    """
    with torch.inference_mode():
        if isinstance(model, HfModel):
            return _by_transformers(model.model, tokens, num_new, vocab_size, temperature, top_k, seed)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(num_new):
            logits = model(tokens[None, -context_length:])[0, -1, :vocab_size].float() / temperature
            if top_k is not None:
                least = logits.topk(min(top_k, len(logits))).values[-1]
                logits = logits.masked_fill(logits < least, -torch.inf)
            drawn = torch.multinomial(logits.softmax(0).cpu(), 1, generator=generator)
            tokens = torch.cat([tokens, drawn.to(tokens.device)])
        return tokens


def _by_transformers(
    model: Any, tokens: Tensor, num_new: int, num_known: int, temperature: float, top_k: int | None, seed: int
) -> Tensor:
    places = getattr(model.config, "max_position_embeddings", None)
    if places is not None and len(tokens) + num_new > places:
        what = f"with the {len(tokens)} of the prompt, more than the {places} tokens of the model's context"
        raise ConfigError("C005", what, key="--max-new-tokens", value=num_new)
    unknown = list(range(num_known, getattr(model.config, "vocab_size", num_known)))
    with torch.random.fork_rng(devices=[tokens.device] if tokens.device.type == "cuda" else []):
        # Its generate draws from torch's own generators.
        torch.manual_seed(seed)
        return model.generate(
            tokens[None],
            attention_mask=torch.ones_like(tokens)[None],
            max_new_tokens=num_new,
            do_sample=True,
            temperature=temperature,
            top_k=top_k or 0,
            suppress_tokens=unknown or None,
        )[0]
