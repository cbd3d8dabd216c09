"""Several datasets in one, drawn by their weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bad_data import image
from refusals import assert_refused
from resuming import arm, assert_same_run
from running import build_run, train
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset

from ptfast.core.batch_plan import BatchPlan
from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError, DataError
from ptfast.data.build_data import build_data
from ptfast.data.decoding.text_tokenizer import read_tokenizer
from ptfast.data.loaders.loader_choice import choose
from ptfast.data.mixture import Mixture
from ptfast.data.sampling.sampler import Sampler, Sharding
from ptfast.data.sources.arrays import Arrays
from ptfast.data.sources.imagefolder import ImageFolder
from ptfast.data.sources.table import Table
from ptfast.data.sources.text_dataset import TextTsv

SIZES, SHARES = (60, 30, 20), (0.5, 0.3, 0.2)
PARTS = ("data=mix", "data.parts.a={data: arrays, path: a.npz, weight: 5}")
PARTS = (*PARTS, "data.parts.b.path=b.npz", "data.parts.b.weight=3", "data.parts.c.path=c.npz")
PARTS = (*PARTS, "data.parts.c.weight=2", "data.val=10samples", "model.hidden=[8]", "seed=3")


@pytest.fixture
def arrays(in_tmp: Path) -> Path:
    """A folder of arrays whose first feature is the number of their file; two classes."""
    for number, (name, size) in enumerate(zip("abc", SIZES, strict=True)):
        rows = np.random.default_rng(number).normal(size=(size, 4)).astype(np.float32)
        rows[:, 0] = number
        np.savez(in_tmp / f"{name}.npz", x=rows, y=np.arange(size) % 2)
    return in_tmp


def read(source: Any, val: int = 0, **given: Any) -> Any:
    return build_data(source, **{"seed": 3, "task": "auto", "val": Duration(val, "samples"), **given})


def mixed(folder: Path, val: int = 0) -> Any:
    parts = {name: Arrays(str(folder / f"{name}.npz")) for name in "abc"}
    return read(Mixture(parts, dict(zip("abc", SHARES, strict=True))), val, normalize=False)


def part_of(data: Any) -> Any:
    return data.train.inputs[:, 0].numpy().astype(int)


def folder_of(root: str, **classes: int) -> None:
    """Class folders of so many small images each."""
    for name, size in classes.items():
        for number in range(size):
            image(Path(root, name, f"{number}-{size}.png"), size=(8, 8))


def test_each_epoch_has_the_share_of_each_part_that_the_weights_say(arrays: Path) -> None:
    data = mixed(arrays, val=10)
    parts, drawn = part_of(data), np.zeros(100, np.int64)
    for epoch in range(20):
        order = data.order(7, epoch)
        assert len(order) == data.info.num_train == 100
        np.testing.assert_array_equal(np.bincount(parts[order]), [50, 30, 20])
        drawn += np.bincount(order, minlength=100)
    # Passes go on from epoch to epoch: no sample comes twice more often than another of its part.
    for number, share in enumerate(SHARES):
        own = drawn[parts == number]
        assert own.sum() == round(share * 2000)
        assert own.max() - own.min() <= 1


def test_batches_are_mixed_as_by_chance(arrays: Path) -> None:
    data = mixed(arrays)
    orders = np.concatenate([data.order(1, epoch) for epoch in range(400)])
    batches = part_of(data)[orders].reshape(-1, 11)
    counts = np.stack([(batches == number).sum(1) for number in range(3)], 1)
    chance = np.random.default_rng(0).multivariate_hypergeometric([55, 33, 22], 11, size=4000)
    np.testing.assert_allclose(counts.mean(0), np.array(SHARES) * 11)
    np.testing.assert_allclose(counts.var(0), chance.var(0), rtol=0.1)


@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_and_micro_batches_share_out_the_same_samples(arrays: Path, world_size: int) -> None:
    data = mixed(arrays)
    plan, order = BatchPlan(data.info.num_train, 16), partial(data.order, 5)
    shardings = [Sharding(plan, 4 * world_size, rank, world_size) for rank in range(world_size)]
    samplers = [Sampler(sharding, 5, order) for sharding in shardings]
    assert plan.steps_per_epoch == 7  # the last one of 14 samples
    shares = [share for step in range(7) for sampler in samplers for share in sampler.step(step)[0]]
    seen = np.concatenate([share.indices[: share.num_samples] for share in shares])
    np.testing.assert_array_equal(seen, data.order(5, 0))
    np.testing.assert_array_equal(np.bincount(part_of(data)[seen]), [55, 33, 22])


def test_a_run_trains_on_what_the_order_names(arrays: Path) -> None:
    words = (*PARTS, "data.normalize=false", "epochs=2", "batch_size=16", "gradients.accumulate=4")
    run, data = build_run(arrays / "run", *words), mixed(arrays, val=10)
    assert run.total_steps == 2 * 7
    given = [micro.data[0] for step in run.train_loader.steps(0, 14) for micro in step.micro_batches]
    stated = np.concatenate([data.order(3, epoch) for epoch in range(2)])
    assert torch.equal(torch.cat(given), data.train.inputs[torch.from_numpy(stated)])


def test_a_stopped_run_goes_on_to_the_same_bits(arrays: Path) -> None:
    words = (*PARTS, "epochs=3", "batch_size=16", "gradients.accumulate=4", "saving.every=4steps")
    words = (*words, "callbacks=[{_target_: resuming.Armed, step: 10}]", "run.resume=auto", "log_every=1")
    assert train(*words, "run.dir=whole") == 0
    arm("SIGTERM")
    assert train(*words, "run.dir=a") == 75
    assert train(*words, "run.dir=a") == 0
    assert_same_run(arrays / "whole", arrays / "a")


def test_image_folders_give_the_same_batches_under_every_loader(in_tmp: Path) -> None:
    folder_of("a", cat=6, dog=7)
    folder_of("b", dog=5, bat=4, cat=3)
    words = ("data=mix", "data.parts.b={data: imagefolder, root: b}", "data.parts.a.root=a", "data.val=0")
    words = (*words, "batch_size=8", "epochs=2", "model.hidden=[4]", "augment.flip=true")

    def batches(*loader: str) -> list[tuple[Tensor, Tensor]]:
        run = build_run(in_tmp / "run", *words, *loader)
        assert run.info.class_names == ("bat", "cat", "dog")
        assert "50.0% b, 50.0% a; a: classes are matched by name" in run.data_note
        found = [micro.data for step in run.train_loader.steps(0, 8) for micro in step.micro_batches]
        run.close()
        return found

    plain = batches("dataloader=plain")
    for loader in (("dataloader=memory",), ("dataloader=workers", "dataloader.workers=1")):
        for (pixels, labels), (others, other_labels) in zip(plain, batches(*loader), strict=True):
            assert torch.equal(pixels, others)
            assert torch.equal(labels, other_labels)
    # 12 or 13 draws of 12 samples of b, and of 13 of a, in each epoch.
    assert torch.cat([labels for _, labels in plain]).bincount(minlength=3).sum() == 50


def test_classes_of_each_part_keep_their_names(in_tmp: Path) -> None:
    folder_of("a", cat=6, dog=7)
    folder_of("b", dog=5, bat=4, cat=3)
    run = build_run(
        in_tmp / "run", "data=mix", "data.parts=[{data: imagefolder, root: b}, {root: a}]", "data.val=0"
    )
    sizes = run.train_loader._data.train.known_labels()  # pyright: ignore[reportAttributeAccessIssue]
    assert sizes.bincount().tolist() == [4, 9, 12]


def test_tables_are_prepared_as_the_first_is(in_tmp: Path) -> None:
    for name, scale in (("a", 1), ("b", 100)):
        rows = [f"{scale * number},{'red' if number % 2 else 'blue'},{number % 2}" for number in range(40)]
        Path(f"{name}.csv").write_text("\n".join(["size,color,y", *rows]))
    parts = {name: Table(f"{name}.csv", "y") for name in "ab"}
    data = read(Mixture(parts, {"a": 1.0, "b": 3.0}), val=8)
    alone = read(Table("a.csv", "y"), val=8)
    assert data.info.extra["table"] == alone.info.extra["table"]
    assert (len(data.train), len(data.val)) == (64, 16)
    assert torch.equal(data.train.inputs[:32], alone.train.inputs)
    np.testing.assert_array_equal(np.bincount(data.order(0, 0) // 32), [16, 48])


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["data.parts.b.root=none"], "D001", "data.parts.b.root=none (command line): no such folder"),
        (["data.parts.b.root=empty"], "D002", "data.parts.b.root=empty (command line): is an empty folder"),
        (["data.parts.b.root=odd"], "D003", "data.parts.b (command line): its classes differ"),
        (["data.parts.b={data: arrays, path: x.npz}"], "D004", "is features data for classification"),
        (["data.parts.b={root: a, weight: -1}"], "C005", "must be above 0"),
        (["data.parts.b={root: a, weight: 0.001}"], "D002", "data.parts.b (command line): none of the 12"),
        (["data.parts.b={root: a, wait: 2}"], "C002", "data.parts.b.wait=2 (command line): unknown key"),
        (["data.parts.b={data: imagefoldr}"], "C003", "Did you mean data=imagefolder?"),
        (["data.parts.b={root: a}", "sampling=weighted"], "C011", "draws its parts by their weights"),
        (["data.parts.b={root: a}", "batching.pack=true"], "C011", "draws its parts by their weights"),
    ],
)
def test_what_cannot_be_mixed_is_rejected(
    words: list[str], code: str, says: str, in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder_of("a", cat=3, dog=3)
    folder_of("odd", cat=3, fox=3)
    Path("empty").mkdir()
    np.savez("x.npz", x=np.ones((9, 4), np.float32), y=np.arange(9) % 2)
    words = ["data=mix", "data.parts.a={data: imagefolder, root: a}", "data.val=0", *words]
    assert_refused(["train", *words], code, (says,), capsys)


def test_data_that_has_changed_is_rejected_on_resume(
    arrays: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (*PARTS, "epochs=1", "batch_size=16", "run.dir=a", "schedule=constant")
    assert train(*words) == 0
    rows = np.ones((30, 4), np.float32)
    np.savez("b.npz", x=rows, y=np.arange(30) % 2)
    assert train(*words, "run.resume=auto", "epochs=2") == 6
    assert "the data has changed" in capsys.readouterr().err


def test_a_part_that_is_a_stream_is_rejected(in_tmp: Path) -> None:
    with pytest.raises(DataError, match="a part is read as a stream") as caught:
        read(Mixture({"a": range_of(9), "b": Stream()}, {"a": 1.0, "b": 1.0}))
    assert (caught.value.code, caught.value.key) == ("D008", "data.parts")


def test_parts_of_several_kinds_are_no_images_beside_numbers_and_skip_no_file(in_tmp: Path) -> None:
    folder_of("a", cat=3, dog=3)
    numbers = TensorDataset(torch.rand(9, 3, 8, 8), torch.arange(9) % 2)
    for other, words in (
        (numbers, "some parts are images and others are not"),
        (TensorDataset(torch.zeros(9, 3, 8, 8, dtype=torch.uint8), torch.arange(9) % 2), "on_corrupt=skip"),
    ):
        parts = {"a": ImageFolder("a", on_corrupt="skip"), "b": other}
        with pytest.raises(DataError, match=words) as caught:
            read(Mixture(parts, {"a": 1.0, "b": 1.0}))
        assert (caught.value.code, caught.value.key) == ("D008", "data.parts")


def test_a_loader_in_memory_is_rejected_for_a_part_whose_samples_change(in_tmp: Path) -> None:
    lazy, fixed = range_of(9), range_of(6)
    lazy.set_epoch = lambda epoch: None  # pyright: ignore[reportAttributeAccessIssue]
    data = read(Mixture({"a": fixed, "b": lazy}, {"a": 1.0, "b": 1.0}), normalize=False)
    with pytest.raises(ConfigError, match="the dataset has set_epoch"):
        choose(data.train, kind="memory")


def test_datasets_of_a_user_and_files_are_fetched_each_by_its_own(in_tmp: Path) -> None:
    folder_of("a", cat=3, dog=3)
    draw = np.random.default_rng(0).integers(0, 256, (9, 8, 8, 3), dtype=np.uint8)
    pixels = TensorDataset(torch.from_numpy(draw).permute(0, 3, 1, 2), torch.arange(9) % 2)
    lazy = read(Mixture({"a": range_of(9), "b": range_of(6)}, {"a": 1.0, "b": 2.0}), normalize=False)
    inputs, labels = lazy.train.fetch(np.array([14, 3, 9, 0]))
    assert inputs[:, 0].tolist() == [5, 3, 0, 0]
    assert labels.tolist() == [1, 1, 0, 0]
    np.testing.assert_array_equal(np.bincount((lazy.order(0, 0) >= 9).astype(int)), [5, 10])
    files = read(Mixture({"a": ImageFolder("a"), "b": pixels}, {"a": 1.0, "b": 1.0}), normalize=False)
    images, _ = files.train.fetch(np.array([14, 0]))
    assert torch.equal(images[0], torch.from_numpy(draw[8]))
    alone = ImageFolder("a").load(val=Duration(0, "percent"), seed=0).train.fetch(np.array([0]))
    assert torch.equal(images[1], alone[0][0])
    tensors = read(Mixture({"a": pixels, "b": pixels}, {"a": 1.0, "b": 2.0}))
    np.testing.assert_array_equal(np.bincount(tensors.order(0, 0) // 9), [6, 12])


def test_samples_of_two_shapes_cannot_be_in_one_batch(in_tmp: Path) -> None:
    wide = [(torch.zeros(3), 0), (torch.ones(3), 1)]
    with pytest.raises(DataError, match=r"parts differ in shape|inputs of shape") as caught:
        read(Mixture({"a": range_of(9), "b": wide}, {"a": 1.0, "b": 1.0})).train.fetch(np.arange(11))
    assert caught.value.code in ("D005", "D008")


def test_labelled_texts_share_the_tokenizer_of_the_first_part(in_tmp: Path) -> None:
    Path("a.tsv").write_text(
        "".join(f"good film {'very ' * (n % 5)}\tyes\nbad film\tno\n" for n in range(10))
    )
    Path("b.tsv").write_text("".join(f"good unseen\tyes\nfilm {'film ' * n}\tno\n" for n in range(5)))
    parts = {name: TextTsv(path=f"{name}.tsv", max_length=6) for name in "ab"}
    data, alone = read(Mixture(parts, {"a": 1.0, "b": 1.0})), read(TextTsv(path="a.tsv", max_length=6))
    assert data.info.extra["tokenizer"] == alone.info.extra["tokenizer"]
    assert [*map(len, (data.train, alone.train))] == [30, 20]
    texts, labels = data.train.fetch(np.array([20, 3, 29]))
    own, own_labels = alone.train.fetch(np.array([3]))
    assert torch.equal(texts[1, : own.shape[1]], own[0])
    assert labels.tolist() == [1, own_labels.item(), 0]
    read_b = read_tokenizer(data.info.extra["tokenizer"])
    assert texts[0, :2].tolist() == read_b.encode("good unseen")
    assert (texts[2] == read_b.encode("film")[0]).sum() == 5
    np.testing.assert_array_equal(np.bincount(data.order(0, 0) // 20), [15, 15])


def test_running_texts_are_mixed_to_the_same_bits_under_every_loader_and_after_a_stop(in_tmp: Path) -> None:
    Path("a.txt").write_text("abcdefgh" * 200)
    Path("b.txt").write_text("hgfedcba" * 100)
    words = ("data=mix", "data.parts.a={data: text_file, path: a.txt, context_length: 8, weight: 3}")
    words = (
        *words,
        "data.parts.b.path=b.txt",
        "model=gpt",
        "model.width=8",
        "model.depth=1",
        "model.heads=1",
    )
    words = (*words, "batch_size=16", "steps=12", "optimizer=adamw", "device=cpu", "seed=3")
    rising = 0
    given: list[list[Tensor]] = []
    for loader in (("dataloader=plain",), ("dataloader=workers", "dataloader.workers=1")):
        run = build_run(in_tmp / "run", *words, *loader)
        batches = [micro.data for step in run.train_loader.steps(0, 12) for micro in step.micro_batches]
        given.append([part for pair in batches for part in pair])
        run.close()
    for one, other in zip(*given, strict=True):
        assert torch.equal(one, other)
    for inputs, targets in zip(given[0][::2], given[0][1::2], strict=True):
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        rising += int((inputs[:, 1] != (inputs[:, 0] - 1) % 8).sum())
    assert rising / (12 * 16) == pytest.approx(0.75, abs=0.1)
    words = (*words, "saving.every=4steps", "run.resume=auto", "log_every=1")
    words = (*words, "callbacks=[{_target_: resuming.Armed, step: 6}]")
    assert train(*words, "run.dir=whole") == 0
    arm("SIGTERM")
    assert train(*words, "run.dir=cut") == 75
    assert train(*words, "run.dir=cut") == 0
    assert_same_run(in_tmp / "whole", in_tmp / "cut")


class Stream(IterableDataset[Any]):
    num_classes = 2

    def __iter__(self) -> Any:
        yield from ((torch.full((2,), float(n)), n % 2) for n in range(9))


class range_of:  # noqa: N801 - reads as a function
    """A dataset of a user's own."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return torch.full((2,), float(number)), number % 2
