"""Tokenizers of the package `tokenizers`, and the transformers model that reads what they number."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from running import summary, train

from ptfast.cli.command_line import run
from ptfast.core.durations import Duration
from ptfast.data.sources.text_dataset import TextTsv

tokenizers = pytest.importorskip("tokenizers", reason="needs the package tokenizers")
WORDS = ["[PAD]", "[UNK]", "[CLS]", "good", "bad", "film"]


@pytest.fixture
def own_tokenizer(in_tmp: Path) -> str:
    """`own/tokenizer.json`, beside `train.tsv` and `dev.tsv` of two-word texts."""
    numbers = {word: number for number, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A", special_tokens=[("[CLS]", 2)]
    )
    tokenizer.enable_truncation(2)
    Path("own").mkdir()
    tokenizer.save("own/tokenizer.json")
    for split in ("train", "dev"):
        Path(f"{split}.tsv").write_text("good film\t1\nbad\t0\n" * 8)
    return "own/tokenizer.json"


def test_a_file_numbers_the_words_with_its_special_ones_and_nothing_cut(own_tokenizer: str) -> None:
    splits = TextTsv(".", tokenizer=own_tokenizer).load(val=Duration(0, "samples"), seed=0)
    tokens, _ = splits.train.fetch(np.arange(2))
    assert tokens.tolist() == [[2, 3, 5], [2, 4, 0]]
    assert (splits.info.vocab_size, splits.info.pad_id) == (len(WORDS), 0)


def test_a_transformers_model_trains_and_predicts(
    own_tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="needs the package transformers")
    sizes = ("model.dim=64", "model.hidden_dim=64", "model.n_layers=1", "model.n_heads=2")
    words = ("data=text_tsv", "data.root=.", f"data.tokenizer={own_tokenizer}", "batch_size=8", "epochs=30")
    assert train(*words, "model=hf", "model.name=distilbert", *sizes, "optimizer.lr=0.003", "run.dir=r") == 0
    assert summary(Path("r"))["val"]["accuracy"] == 1.0
    Path("own/tokenizer.json").unlink()
    Path("new.txt").write_text("bad\ngood film\n")
    capsys.readouterr()
    assert run(["predict", "r", "new.txt"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [line["class"] for line in lines] == ["0", "1"]
