"""Texts of unequal length: how they are padded, which come together, and what is kept of tokenising them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from resuming import Armed, arm, assert_same_run, train_in_child
from running import build_run, records, summary, train

from ptfast.config.read import read_config
from ptfast.core.batch_plan import BatchPlan, DropLast
from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError
from ptfast.core.protocols import IGNORE_INDEX
from ptfast.data.decoding import text_tokenizer
from ptfast.data.decoding.text_tokenizer import Encoded, Vocabulary, encode
from ptfast.data.map_source import Padding
from ptfast.data.sampling.length_buckets import LengthPlan, padding_share
from ptfast.data.sampling.sampler import Sampler, Sharding, permutation
from ptfast.data.sources.ragged_text import Documents, TextSource
from ptfast.training.stages.data_stage import load_data
from ptfast.training.stages.training_plan import has_many_lengths

__all__ = ["Armed"]
LENGTHS = np.clip(np.random.default_rng(0).lognormal(3.6, 0.7, 1500), 8, 256).astype(np.int64)
LIMIT = 256


def texts_of(lengths: np.ndarray) -> Encoded:
    """Texts whose tokens are 100 times their number, and up."""
    tokens = np.concatenate([100 * i + 1 + np.arange(length) for i, length in enumerate(lengths)])
    return Encoded(tokens.astype(np.uint16), np.asarray(lengths))


def plan_of(lengths: np.ndarray = LENGTHS, **options: Any) -> LengthPlan:
    defaults: dict[str, Any] = {"batch_size": 16, "batch_tokens": None, "drop_last": False, "seed": 1}
    return LengthPlan(lengths, limit=LIMIT, **{"padding": Padding(), **defaults, **options})


def alone(plan: BatchPlan) -> Sampler:
    """The samples of a plan that one rank takes all of."""
    return Sampler(Sharding(plan, 1), seed=1)


def batches_of(plan: LengthPlan, epoch: int = 0) -> list[list[int]]:
    steps = plan.steps_per_epoch or 0
    found = [plan.batch(epoch * steps + step) for step in range(steps)]
    assert {which for which, _, _ in found} == {epoch}
    return [plan.order(epoch)[start:stop].tolist() for _, start, stop in found]


# Padding


def test_texts_are_padded_to_the_longest_to_a_multiple_or_to_the_limit() -> None:
    source = TextSource(texts_of(np.array([3, 10, 0, 40])), torch.arange(4), 0, 20)
    shape = {}
    for padding in (Padding(), Padding(multiple=8), Padding(fixed=True)):
        source.padding = padding
        tokens, labels = source.fetch(np.array([1, 0, 2]))
        shape[padding] = tokens.shape
        assert tokens[0].tolist() == [101 + i for i in range(10)] + [0] * (tokens.shape[1] - 10)
        assert tokens[1].tolist() == [1, 2, 3] + [0] * (tokens.shape[1] - 3)
        assert not tokens[2].any()
        assert labels.tolist() == [1, 0, 2]
    assert [*shape.values()] == [(3, 10), (3, 16), (3, 20)]
    assert source.fetch(np.array([3]))[0].tolist() == [[301 + i for i in range(20)]]
    assert source.num_long == 1


def test_padding_reaches_a_part_of_a_source() -> None:
    source = TextSource(texts_of(np.array([3, 10, 5])), torch.arange(3), 0, 20)
    part = source.take(np.array([2, 0]))
    part.padding = Padding(multiple=8)
    assert part.fetch(np.array([0, 1]))[0].shape == (2, 8)
    lengths = part.lengths
    assert lengths is not None
    assert lengths.tolist() == [5, 3]


@pytest.mark.parametrize("words", [("model=gpt", "model.heads=2"), ("model=text_encoder", "model.depth=2")])
def test_padding_changes_no_output(words: tuple[str, ...], tmp_path: Path) -> None:
    """A model sees the same texts, however long the batch is."""
    classify = "data=text_tsv" if "text_encoder" in words[0] else "data=text_file"
    (tmp_path / "text").write_text("".join(f"{'ab ' * (1 + 5 * n % 17)}\t{n % 2}\n" for n in range(40)))
    more = (
        ("data.documents=lines", "data.context_length=64") if "file" in classify else ("data.max_length=64",)
    )
    paths = (classify, f"data.path={tmp_path / 'text'}", *more, "model.width=16", *words, "batch_size=8")
    losses = []
    for options in (("batching=none",), ("batching=longest",), ("batching.multiple=8",)):
        run = build_run(tmp_path / options[0], *paths, *options, "epochs=1")
        run.model.eval()
        (batch,) = next(iter(run.train_loader.steps(0, 1))).micro_batches
        loss, count = run.task.loss(run.model, batch.data)
        losses.append((float(loss.detach()), float(count)))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)


# Documents


def test_a_document_is_predicted_from_its_own_beginning() -> None:
    source = Documents(texts_of(np.array([4, 1, 8])), 0, 3)
    assert len(source) == 4
    assert source.num_long == 1
    inputs, targets = source.fetch(np.array([0, 1, 2, 3]))
    assert inputs.tolist() == [[1, 2, 3], [201, 202, 203], [204, 205, 206], [207, 0, 0]]
    assert targets.tolist() == [[2, 3, 4], [202, 203, 204], [205, 206, 207], [208, -100, -100]]
    predicted = targets[targets != IGNORE_INDEX]
    assert sorted(predicted.tolist()) == [2, 3, 4, *range(202, 209)]
    assert source.ignores_labels


@pytest.mark.parametrize(
    ("documents", "inputs"), [("lines", ["ab", "cd", "e"]), ("paragraphs", ["ab\ncd", "e"])]
)
def test_lines_and_paragraphs_are_documents(documents: str, inputs: list[str], tmp_path: Path) -> None:
    (tmp_path / "text").write_text("ab\ncd\n\n \ne\n")
    words = ("data=text_file", f"data.path={tmp_path / 'text'}", f"data.documents={documents}", "data.val=0")
    run = build_run(tmp_path / "run", *words, "model=gpt", "model.width=8", "batch_size=8", "epochs=1")
    (batch,) = next(iter(run.train_loader.steps(0, 1))).micro_batches
    entries = run.info.extra["tokenizer"]["entries"]
    rows = [
        "".join(entries[token] for token, target in zip(*pair, strict=True) if target != IGNORE_INDEX)
        for pair in zip(batch.data[0].tolist(), batch.data[1].tolist(), strict=True)
    ]
    assert sorted(rows) == inputs
    assert int(run.task.count(batch.data, 8)) == sum(map(len, inputs))


# Batches by length


@pytest.mark.parametrize("drop_last", [False, True, "pad"])
@pytest.mark.parametrize("options", [{}, {"batch_tokens": 1000}, {"padding": Padding(multiple=64)}])
def test_every_sample_comes_once_an_epoch(options: dict[str, Any], drop_last: DropLast) -> None:
    plan = plan_of(drop_last=drop_last, **options)
    for epoch in (0, 1, 7):
        batches = batches_of(plan, epoch)
        seen = [index for batch in batches for index in batch]
        by_tokens = "batch_tokens" in options
        assert len(set(seen)) == 1500 - (1500 % 16 if drop_last is True and not by_tokens else 0)
        assert len(seen) - len(set(seen)) == (-1500 % 16 if drop_last == "pad" and not by_tokens else 0)
        assert {len(batch) for batch in batches} <= plan.all_sizes()
        assert batches == batches_of(plan_of(drop_last=drop_last, **options), epoch)


def test_lengths_of_a_batch_are_alike_and_batches_in_no_order() -> None:
    batches = batches_of(plan_of())
    means = [float(LENGTHS[batch].mean()) for batch in batches]
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.3
    share = padding_share(alone(plan_of()), LENGTHS, LIMIT, Padding())
    padded = sum(int(LENGTHS[batch].max()) * len(batch) for batch in batches)
    assert share == pytest.approx(1 - LENGTHS.sum() / padded)
    assert share < 0.05
    assert padding_share(alone(BatchPlan(1500, 16)), LENGTHS, LIMIT, Padding()) > 0.5
    fixed = padding_share(alone(BatchPlan(1500, 16)), LENGTHS, LIMIT, Padding(fixed=True))
    assert fixed == pytest.approx(1 - LENGTHS.mean() / LIMIT)


def test_who_meets_whom_changes_from_epoch_to_epoch() -> None:
    plan = plan_of()
    pairs = [
        {(a, b) for batch in batches_of(plan, epoch) for a in batch for b in batch if a < b}
        for epoch in (0, 1)
    ]
    assert len(pairs[0] & pairs[1]) < 0.5 * len(pairs[0])


def test_no_batch_takes_more_tokens_than_there_are_for_it() -> None:
    for padding in (Padding(), Padding(multiple=8)):
        plan = plan_of(batch_tokens=1000, padding=padding)
        sizes = [
            padding.width(int(LENGTHS[batch].max()), LIMIT) * len(batch)
            for epoch in (0, 3)
            for batch in batches_of(plan, epoch)
        ]
        assert max(sizes) <= 1000
        assert np.mean(sizes) > 850


def test_epochs_and_samples_are_counted_in_steps() -> None:
    plan = plan_of(batch_tokens=1000)
    steps = plan.steps_per_epoch or 0
    assert plan.steps(Duration(3, "epochs"), None) == 3 * steps
    assert plan.steps(Duration(750, "samples"), None) == round(steps / 2)
    assert plan.epoch_at(2 * steps) == 2
    assert plan.batch(2 * steps)[0] == 2


def test_ranks_share_a_batch_out() -> None:
    def shares(rank: int, world_size: int) -> list[int]:
        sampler = Sampler(Sharding(plan_of(batch_tokens=600), 4, rank, world_size), seed=1)
        found = [share for step in range(40) for share in sampler.step(step)[0]]
        return [index for share in found for index in share.indices[: share.num_samples].tolist()]

    both = shares(0, 2) + shares(1, 2)
    assert sorted(both) == sorted(shares(0, 1))
    assert len(set(both)) == len(both)


# A run


def text(folder: Path) -> tuple[str, ...]:
    """Arguments of a small language model on lines of unequal length."""
    file = folder / "text.txt"
    file.write_text("".join("abcdefgh"[n % 8] * (3 + n * n % 29) + "\n" for n in range(300)))
    small = ("model=gpt", "model.width=8", "model.depth=1", "model.heads=1", "model.dropout=0.2")
    lines = ("data=text_file", f"data.path={file}", "data.documents=lines", "data.context_length=32")
    return (*lines, *small, "batch_size=16", "log_every=4", "optimizer.lr=0.01")


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_killed_run_ends_with_the_same_bits(in_tmp: Path) -> None:
    rhythm = ("steps=24", "saving.every=5steps", "eval.every=8steps", "micro_batches=2")
    armed = ("callbacks=[{_target_: test_batching.Armed, step: 18}]", "run.resume=auto")
    words = (*text(in_tmp), *rhythm, *armed, "batching=tokens", "batching.batch_tokens=400")
    assert train(*words, "run.dir=whole") == 0
    arm("SIGKILL")
    assert train_in_child(*words, "run.dir=killed") < 0
    assert train(*words, "run.dir=killed") == 0
    assert_same_run(Path("whole"), Path("killed"))
    assert 0 < (share := summary(Path("whole"))["padding_share"]) < 0.2
    assert {line["padding_share"] for line in records(Path("whole")) if line["split"] == "train"} == {share}


def test_the_panel_says_how_much_is_padding(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(*text(in_tmp), "steps=2", "batching=tokens", "batching.batch_tokens=500") == 0
    shown = capsys.readouterr().out
    assert "batches of like length, padded to the longest of each batch: " in shown
    assert "up to 500 tokens: " in shown


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("batching=buckets",), r"batching.buckets=true.*: image data has no samples of unequal length"),
        (("batching.batch_tokens=99",), r"batching.batch_tokens=99.*: needs texts of similar length"),
        (
            ("batching=tokens", "optimizer.lr_scaling=linear", "optimizer.reference_batch=64"),
            r"lr_scaling=linear.*: token-budget batches have no batch size",
        ),
    ],
)
def test_what_cannot_be_is_refused(words: tuple[str, ...], reason: str, in_tmp: Path) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        build_run(in_tmp / "run", *words)
    assert caught.value.code == "C011"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            ("batching=tokens", "batching.batch_tokens=20"),
            r"batch_tokens=20: is too small for the longest text",
        ),
        (("model.context_length=16",), r"data.context_length=32: the model accepts at most 16 tokens"),
    ],
)
def test_a_text_that_is_too_long_is_refused(words: tuple[str, ...], reason: str, in_tmp: Path) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        build_run(in_tmp / "run", *text(in_tmp), *words)
    assert caught.value.code == "C011"


def test_texts_that_are_cut_are_counted(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a b c d e\t0\na b\t1\na\t0\nb\t1\n")
    words = ("data=text_tsv", f"data.path={tmp_path / 'text'}", "data.max_length=3", "data.val=1samples")
    run = build_run(tmp_path / "run", *words, "model=text_encoder", "batch_size=2")
    assert run.data_note.endswith("; 1 of 4 texts are truncated to 3 tokens")


@pytest.mark.parametrize(
    ("words", "many"),
    [
        ((), True),
        (("batching=buckets",), True),
        (("batching=tokens", "batching.batch_tokens=500", "batching.multiple=64"), True),
        (("batching.multiple=8",), False),
        (("batching=none",), False),
        (("batching=pack",), False),
    ],
)
def test_code_for_any_length_is_compiled_where_there_are_many(
    words: tuple[str, ...], many: bool, in_tmp: Path
) -> None:
    config = read_config((*text(in_tmp), *words))[1]
    assert has_many_lengths(load_data(config), config.batching) == many


# Tokens on disk


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PTFAST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(text_tokenizer, "CACHE_FROM_CHARACTERS", 1)
    return tmp_path / "cache" / "tokens"


def test_tokens_are_kept_under_text_and_tokenizer(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["to be or", "", "not to be"]
    words = Vocabulary.of("words", texts, 1)
    first = encode(texts, words)
    assert first.tokens.tolist() == [token for text in texts for token in words.encode(text)]
    assert first.lengths.tolist() == [3, 0, 3]
    (entry,) = cache.iterdir()

    def fail(*_: object) -> Any:
        raise AssertionError("tokenised again")

    def same_tokens(one: Encoded, other: Encoded) -> bool:
        return bool((one.tokens == other.tokens).all() and (one.lengths == other.lengths).all())

    with monkeypatch.context() as patch:
        patch.setattr(words, "encode_all", fail)
        again = encode(texts, words)
        # Another rank of this machine reads what the first one has stored, and hashes nothing.
        patch.setattr(text_tokenizer.hashlib, "sha256", fail)
        patch.setattr(text_tokenizer, "once_per_machine", lambda store: entry)
        assert same_tokens(encode(texts, words), first)
    assert same_tokens(again, first)
    encode(["to be or", "not to be"], words)
    encode(texts, Vocabulary.of("words", [*texts, "more"], 1))
    assert len([*cache.iterdir()]) == 3
    damaged = bytearray(entry.read_bytes())
    damaged[damaged.index(first.tokens.tobytes())] ^= 1
    entry.write_bytes(damaged)
    assert (encode(texts, words).tokens == first.tokens).all()
    entry.write_bytes(b"")
    assert (encode(texts, words).tokens == first.tokens).all()


@pytest.mark.parametrize("texts", [["añ\n", "\U0001d6fcb", ""], ["abc"]])
def test_characters_are_looked_up_all_at_once(texts: list[str]) -> None:
    for vocabulary in (
        Vocabulary.of("characters", texts, 1),
        Vocabulary("characters", sorted(set("".join(texts))), None),
    ):
        tokens, lengths = vocabulary.encode_all(texts)
        assert tokens.tolist() == [token for text in texts for token in vocabulary.encode(text)]
        assert lengths.tolist() == [*map(len, texts)]


def test_padding_is_counted_where_a_last_batch_is_filled_up() -> None:
    lengths = np.array([1, 2, 3, 4, 5])
    plan = BatchPlan(5, 4, "pad")
    share = padding_share(Sampler(Sharding(plan, 4), 0), lengths, 8, Padding(fixed=True))
    order = permutation(0, 0, 5)
    seen = lengths[np.concatenate([order, order[:3]])]
    assert share == pytest.approx(1 - seen.sum() / (8 * 8))
