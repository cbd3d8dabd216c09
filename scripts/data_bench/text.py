"""A 4-layer, 384-wide encoder trained at batch 16 on texts of clip(lognormal(3.6, 0.7), 8, 256) tokens"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data_bench import Row

NUM_TEXTS, MAX_LENGTH, VOCAB_SIZE = 8_000, 256, 8_192
ENCODER = ("model=text_encoder", "model.width=384", "model.depth=4", "model.heads=6")
ENCODER += ("model.dropout=0.1", "model.word_dropout=0")
PLAIN = ("preset=plain", "batch_size=16", "epochs=1", "log_every=1000000steps", "device=cpu")
QUICK = ("precision=bf16", "optimizer.fused=true")


class Drawn:
    """Random tokens in texts of random length, with a random label each."""

    name = "drawn"

    def load(self, **_: Any) -> Any:
        from ptfast.core.protocols import DataInfo
        from ptfast.data.dataset import Splits
        from ptfast.data.decoding.text_tokenizer import Encoded
        from ptfast.data.sources.ragged_text import TextSource

        generator = np.random.default_rng(0)
        lengths = np.clip(generator.lognormal(3.6, 0.7, NUM_TEXTS), 8, MAX_LENGTH).astype(np.int64)
        texts = Encoded(generator.integers(1, VOCAB_SIZE, int(lengths.sum()), dtype=np.uint16), lengths)
        labels = torch.from_numpy(generator.integers(0, 2, NUM_TEXTS))
        info = DataInfo(
            kind="text",
            task="classification",
            num_classes=2,
            vocab_size=VOCAB_SIZE,
            pad_id=0,
            context_length=MAX_LENGTH,
        )
        return Splits(info, TextSource(texts, labels, 0, MAX_LENGTH))


def build(folder: Path) -> list[Row]:
    rows = {
        "float32, padded to 256": (2, ("batching=none",)),
        "float32, padded to the longest of the batch": (3, ("batching=longest",)),
        "float32, batches of like length": (6, ("batching=buckets",)),
        "float32, batches of 736 tokens": (6, ("batching=tokens", "batching.batch_tokens=736")),
        "bfloat16 and fused, padded to 256": (2, ("batching=none", *QUICK)),
        "bfloat16 and fused, batches of like length": (12, ("batching=buckets", *QUICK)),
        "bfloat16 and fused, batches of 736 tokens": (
            12,
            ("batching=tokens", "batching.batch_tokens=736", *QUICK),
        ),
    }
    return [row(folder / str(i), name, *rest) for i, (name, rest) in enumerate(rows.items())]


def row(folder: Path, name: str, num_steps: int, words: tuple[str, ...]) -> Row:
    run, lengths = a_run(folder, *words)
    return Row(
        name, training(run, lengths, num_steps), "token", f"{run.choices.get('padding_share'):.1%} padding"
    )


def a_run(folder: Path, *words: str) -> tuple[Any, np.ndarray]:
    """A run that is built, and the lengths of its texts."""
    from ptfast.config.read import read_config
    from ptfast.core.distributed import Ranks
    from ptfast.core.plain_display import Display
    from ptfast.training.build import build as build_run
    from ptfast.training.stages.data_stage import load_data

    folder.mkdir()
    data = ("data=custom", f"data._target_={__name__}.Drawn", "data.val=0", "data.normalize=false")
    sys.modules.setdefault(__name__, sys.modules[Drawn.__module__])
    threads = f"backend.threads={torch.get_num_threads()}"
    config = read_config((*PLAIN, *data, *ENCODER, threads, *words))[1]
    lengths = load_data(config).train.lengths
    assert lengths is not None
    return build_run(config, ranks=Ranks(), folder=folder, display=Display()), lengths


def training(run: Any, lengths: np.ndarray, num_steps: int) -> Callable[[], int]:
    """The next steps of a run, one call after another; returns how many tokens were no padding."""
    from ptfast.training.loop.step import Trainer

    trainer, plan = Trainer(run), run.train_loader.plan
    batches = run.train_loader.steps(0, run.total_steps)

    def order(epoch: int) -> np.ndarray:
        from ptfast.data.sampling.length_buckets import LengthPlan
        from ptfast.data.sampling.sampler import permutation

        by_length = isinstance(plan, LengthPlan)
        return plan.order(epoch) if by_length else permutation(run.seed, epoch, len(lengths))

    def work() -> int:
        first = run.progress.step
        trainer.train(batches, first + num_steps)
        taken = [plan.batch(step) for step in range(first, first + num_steps)]
        return sum(int(lengths[order(epoch)[start:stop]].sum()) for epoch, start, stop in taken)

    return work
