"""Shards at URLs: read while they are fetched, the same bits for all workers, in a cache of bounded size."""

from __future__ import annotations

import base64
import contextlib
import itertools
import multiprocessing as mp
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import fsspec
import pytest
import torch
from refusals import Capture
from running import same_bits, summary, train, weights
from shard_server import STALL, ShardServer, serving
from streamed import build
from test_webdataset import load, picture, sample, shard, shards

from ptfast.core.errors import ConfigError, DataError, PtfastError
from ptfast.data.loaders.pipeline import batch_pipeline
from ptfast.data.streams import shard_cache
from ptfast.data.streams.shard_cache import ShardCache
from ptfast.data.transforms.augment_plan import Augment

pytest.importorskip("aiohttp")
SIZES = (5, 9, 4)
PATTERN = "train-{000..002}.tar"
SHARD_BYTES = 30_720
"""Of the largest; a tar is padded to 10,240."""


@pytest.fixture
def server(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ShardServer]:
    monkeypatch.setenv("PTFAST_CACHE", "cache")
    monkeypatch.setattr(shard_cache, "_WAIT_S", 0.0)
    shards(SIZES)
    with serving() as server:
        yield server
    prefetched()
    assert not [*Path("cache").rglob("*.partial")]


def prefetched() -> None:
    for thread in [*shard_cache._prefetching.values()]:
        thread.join()


def stream(pattern: str, classes: Any = 3, **options: Any) -> Any:
    return load(pattern, classes=classes, **options)


def steps(data: Any, count: int, first: int = 0, state: Any = None, **options: Any) -> list[Any]:
    """The images and labels of steps of six samples, each micro-batch after another."""
    with contextlib.closing(build(data.train, **options)) as loader:
        if state is not None:
            loader.marks.load(state, first)
        return [
            part.data for step in batch_pipeline(loader, first, first + count) for part in step.micro_batches
        ]


def numbers(batches: list[Any]) -> list[int]:
    """Which of the pictures the samples of batches are."""
    known = [torch.from_numpy(picture(number)).permute(2, 0, 1) for number in range(sum(SIZES))]
    images = [(image * 255).round().byte() for images, _ in batches for image in images]
    return [next(n for n, each in enumerate(known) if torch.equal(image, each)) for image in images]


def cached_bytes() -> int:
    total = 0
    for path in Path("cache/urls").glob("*/*"):
        # A thread that fetches the next shards may remove one; claims have a size and no content.
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size if path.suffix != ".claim" else 0
    return total


def test_each_pass_has_every_sample_once_in_an_order_of_its_own(server: ShardServer) -> None:
    data = stream(server.url + PATTERN)
    assert (data.info.num_classes, data.info.input_shape) == (3, (3, 8, 6))
    assert "in 3 shards that are fetched as they are read, 20GB at a time" in data.note
    batches = steps(data, 9)
    order = numbers(batches)
    passes = [order[i : i + 18] for i in (0, 18, 36)]
    assert all(sorted(each) == list(range(18)) for each in passes)
    assert len({tuple(each) for each in passes}) == 3
    labels = [int(label) for _, labels in batches for label in labels]
    assert labels == [number % 3 for number in order]
    # Whole shards follow one another, and in each the samples are in random order.
    of = [sum(number >= end for end in (5, 14)) for number in passes[0]]
    assert sum(a != b for a, b in itertools.pairwise(of)) == 2
    assert passes[0] != sorted(passes[0])
    assert [server.count(f"train-{number:03d}.tar") for number in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("shuffle_buffer", [None, 6])
def test_all_data_workers_make_the_same_batches(server: ShardServer, shuffle_buffer: int | None) -> None:
    data = stream(server.url + PATTERN, shuffle_buffer=shuffle_buffer)
    plain = steps(data, 6)
    assert same_bits(steps(data, 6, kind="workers", workers=2), plain)
    ranks = [steps(data, 6, rank=rank, world_size=2) for rank in (0, 1)]
    assert same_bits([batch for pair in zip(*ranks, strict=True) for batch in pair], plain)
    assert sorted(numbers(plain)[:18]) == list(range(18))


def test_the_cache_stays_within_its_bound_and_changes_no_bit(server: ShardServer) -> None:
    whole = steps(stream(server.url + PATTERN), 12)
    for path in Path("cache/urls").glob("*/*"):
        path.unlink()
    small = stream(server.url + PATTERN, cache=str(SHARD_BYTES + 100))
    with contextlib.closing(build(small.train)) as loader:
        found = []
        for step in batch_pipeline(loader, 0, 12):
            found += [part.data for part in step.micro_batches]
            assert cached_bytes() <= SHARD_BYTES + 100
    assert same_bits(found, whole)
    assert server.count("train-001.tar") > 2


def test_a_download_that_waits_for_room_removes_no_copy(tmp_path: Path) -> None:
    files = {name: tmp_path / name / f"{name}.tar" for name in ("whole", "coming", "next")}
    for file in files.values():
        file.parent.mkdir()
    files["whole"].write_bytes(bytes(60))
    other = files["coming"].with_suffix(".claim")
    other.write_bytes(bytes(80))
    cache, claim = ShardCache(150), files["next"].with_suffix(".claim")
    assert not cache._claimed(claim, 100)
    assert files["whole"].exists()
    other.unlink()
    assert cache._claimed(claim, 100)
    assert not files["whole"].exists()
    assert claim.stat().st_size == 100


def test_a_buffer_that_spans_more_shards_than_the_cache_holds_is_warned_of(server: ShardServer) -> None:
    cache = str(SHARD_BYTES + 100)
    warning = stream(server.url + PATTERN, cache=cache, shuffle_buffer=12).warning
    assert warning.startswith("data.shuffle_buffer=12 spans about ")
    assert "fetched again" in warning
    assert warning.endswith("Set data.cache=1MiB")
    assert stream(server.url + PATTERN, cache="1MiB", shuffle_buffer=12).warning is None
    assert stream(server.url + PATTERN, cache=cache).warning is None


@pytest.mark.parametrize("shuffle_buffer", [None, 5])
def test_a_resumed_run_fetches_only_what_it_still_reads(
    server: ShardServer, shuffle_buffer: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Indexes of the shards that it has read are kept; their copies need not be."""
    # A thread that fetches the shards of the next pass would be counted, too.
    monkeypatch.setattr(ShardCache, "prefetch", lambda cache, urls: None)
    data = stream(server.url + PATTERN, shuffle_buffer=shuffle_buffer)
    with contextlib.closing(build(data.train)) as loader:
        whole = [[part.data for part in step.micro_batches] for step in batch_pipeline(loader, 0, 12)]
        state = loader.marks.state(11)
    assert state["epoch"] == 3
    for path in Path("cache/urls").glob("*/*"):
        path.unlink()
    server.asked.clear()
    found = steps(data, 1, first=11, state=state)
    assert same_bits(found, whole[11])
    assert len({name for name, _ in server.asked}) < 3
    # Nothing of the first run is left, as on another machine.
    shutil.rmtree("cache")
    again = stream(server.url + PATTERN, shuffle_buffer=shuffle_buffer)
    assert same_bits(steps(again, 1, first=11, state=state), whole[11])


def test_boxes_are_cut_out_of_the_original_images(server: ShardServer) -> None:
    augment = Augment(resized_crop=(0.3, 1.0), size=4, seed=0)
    source = stream(server.url + PATTERN, image_size=6).train
    samples = [*source.read(0)][:4]
    share = shard_share(4)
    images, labels = source.batch(samples, share, augment)
    assert images.shape == (4, 4, 4, 3)
    assert labels.tolist() == source.batch(samples, share, Augment())[1].tolist()


def shard_share(count: int) -> Any:
    from ptfast.data.sampling.sampler import MicroBatchIndices

    return MicroBatchIndices(0, torch.arange(count).numpy(), count)


def test_shards_come_whole_from_a_server_that_fails_for_a_while(
    server: ShardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_cache, "_TIMEOUT_S", 0.2)
    server.faults = {
        "train-000.tar": [700, -503, 0],
        "train-001.tar": [STALL],
        "train-002.tar": [-503, -503, -500, 900],
    }
    found = steps(stream(server.url + PATTERN), 3)
    assert sorted(numbers(found)) == list(range(18))
    assert [server.count(f"train-{number:03d}.tar") for number in range(3)] == [4, 2, 5]


@pytest.mark.parametrize(
    ("name", "faults", "code", "says", "attempts"),
    [
        (
            "train-000.tar",
            [-503] * 5,
            "D007",
            "cannot be downloaded in 5 attempts: the server answers 503",
            5,
        ),
        ("train-000.tar", [700] * 5, "D007", "cannot be downloaded in 5 attempts: ClientPayloadError", 5),
        (
            "train-000.tar",
            [STALL] * 5,
            "D007",
            "cannot be downloaded in 5 attempts: the server sends nothing for 0.1 s",
            5,
        ),
        ("train-000.tar", [-403], "D007", "cannot be downloaded in 1 attempts: the server answers 403", 1),
        ("train-004.tar", [], "D001", "cannot be fetched: FileNotFoundError", 1),
        ("cut.tar", [], "D005", "is truncated: unexpected end of data", 1),
    ],
)
def test_what_does_not_come_whole_is_named_without_credentials(
    server: ShardServer,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    faults: list[int],
    code: str,
    says: str,
    attempts: int,
) -> None:
    monkeypatch.setattr(shard_cache, "_TIMEOUT_S", 0.1)
    whole = Path("shards/train-001.tar").read_bytes()
    Path("shards/cut.tar").write_bytes(whole.rstrip(b"\0"))
    server.faults[name] = faults
    url = server.url.replace("//", "//me:p%40ss@") + f"{name}?signature=abc"
    with pytest.raises(DataError) as caught:
        stream(url)
    error = caught.value
    assert (error.code, error.exit_code) == (code, 3)
    shown = f"{server.url.replace('//', '//<secret>@')}{name}?signature=<secret>"
    assert str(error).startswith(f"{shown}: {says}")
    assert server.count(name) == attempts
    authorization = server.asked[0][1] or ""
    assert base64.b64decode(authorization.removeprefix("Basic ")) == b"me:p@ss"
    # Once it is mended it is fetched anew.
    Path("shards", name).write_bytes(whole)
    server.faults.clear()
    assert len([*stream(url).train.read(0)]) == 9


def test_a_file_that_ends_early_without_an_error_is_noticed(server: ShardServer) -> None:
    """As some stores do: fsspec itself does not compare sizes."""
    content = Path("shards/train-000.tar").read_bytes()
    system = fsspec.filesystem("memory")
    system.pipe("/short/a.tar", content)

    class Short(type(system)):
        def get_file(self, path: str, target: str, callback: Any = None, **options: Any) -> None:
            callback.set_size(len(content))
            Path(target).write_bytes(content[:5000])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_cache, "url_to_fs", lambda url: (Short(), "/short/a.tar"))
        with pytest.raises(DataError, match=r"the connection broke off after 5,000 of 20,480 bytes"):
            stream("memory://short/a.tar")
    assert len([*stream("memory://short/a.tar").train.read(0)]) == 5


def test_what_a_killed_process_left_is_not_taken_for_whole(server: ShardServer) -> None:
    class Dies:
        def get_file(self, path: str, target: str, callback: Any) -> None:
            Path(target).write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)

    def fetch() -> None:
        shard_cache.url_to_fs = lambda url, **options: (Dies(), "")
        ShardCache(10**9).fetch(server.url + "train-000.tar")

    process = mp.get_context("fork").Process(target=fetch)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    [left] = Path("cache/urls").glob("*/*")
    assert left.read_bytes() == b"half"
    # After a while any shard that has too little room clears it away; else it is fetched itself.
    os.utime(left, (0, 0))
    ShardCache(Path("shards/train-001.tar").stat().st_size).fetch(server.url + "train-001.tar")
    assert [path.name for path in Path("cache/urls").glob("*/*")] == ["train-001.tar"]
    left.write_bytes(b"half")
    cache = ShardCache(10**9)
    assert len(cache.fetch(server.url + "train-000.tar").offsets) == 5


def test_several_that_want_the_same_fetch_it_once(server: ShardServer) -> None:
    server.faults = {f"train-00{number}.tar": [700] for number in range(3)}
    cache, found = ShardCache(10**9), list[Any]()
    urls = [f"{server.url}train-00{number}.tar" for number in range(3)] * 3
    threads = [Thread(target=lambda url=url: found.append(cache.fetch(url))) for url in urls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 9
    assert [server.count(f"train-00{number}.tar") for number in range(3)] == [2] * 3


def test_a_copy_that_is_damaged_is_fetched_anew(server: ShardServer) -> None:
    url, cache = server.url + "train-001.tar", ShardCache(10**9)
    cache.fetch(url)
    cache.path(url).write_bytes(cache.path(url).read_bytes()[:3000])
    with pytest.raises(DataError, match=f"{url}: is truncated"):
        cache.fetch(url)
    assert len(cache.fetch(url).offsets) == 9


def test_a_query_names_the_file_and_a_user_does_not(server: ShardServer) -> None:
    for user, query in (("a", "key=1"), ("b", "key=1"), ("a", "key=2")):
        stream(f"{server.url.replace('//', f'//{user}:hush@')}train-000.tar?{query}")
    assert server.count("train-000.tar") == 2


def test_names_may_hold_any_letters(server: ShardServer) -> None:
    Path("shards/train-001.tar").rename("shards/k\u00e4fer 1.tar")
    assert len([*stream(server.url + "k\u00e4fer 1.tar").train.read(0)]) == 9


def test_another_host_is_not_told_the_password(server: ShardServer) -> None:
    stream(server.url.replace("//", "//me:hush@") + "moved/train-000.tar")
    assert [bool(authorization) for _, authorization in server.asked] == [True, False]


def test_what_a_stream_of_shards_needs_is_said(server: ShardServer, monkeypatch: pytest.MonkeyPatch) -> None:
    url = server.url + "train-000.tar"
    refused: list[tuple[dict[str, Any], str, str]] = [
        ({"classes": None}, "C016", r"data.classes: is needed, .* Set data.classes=1000"),
        ({"cache": "lots"}, "C005", r"data.cache=lots: is no size"),
        (
            {"cache": "9kB"},
            "C011",
            r"data.cache=8.8 KiB: is smaller than the shard .*train-000.tar, .* 20 KiB",
        ),
    ]
    for options, code, says in refused:
        with pytest.raises(ConfigError, match=says) as caught:
            stream(url, **options)
        assert caught.value.code == code
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    for url, code, says in (
        ("http://127.0.0.1:1/a.tar", "E004", "Install it with pip install 'ptfast[http]'"),
        ("s3://bucket/a.tar", "E004", "Install it with pip install 'ptfast[s3]'"),
        ("memory://shards/none.tar", "D001", "FileNotFoundError"),
        ("ghost://a.tar", "D001", "Protocol not known: ghost"),
    ):
        with pytest.raises(PtfastError) as failed:
            stream(url)
        assert failed.value.code == code
        assert str(failed.value).startswith(f"{url}: ")
        assert says in str(failed.value)


@pytest.mark.parametrize(("label", "classes"), [(b"7", 3), (b"dog", 3), (b"dog", ["cat", "cow"])])
def test_a_label_that_is_no_class_is_named(server: ShardServer, label: bytes, classes: Any) -> None:
    shard(Path("shards/odd.tar"), sample(7, label))
    with pytest.raises(
        DataError, match=r"odd.tar/000007.png: has the label (7|dog), which is none"
    ) as caught:
        stream(server.url + "odd.tar", classes=classes)
    assert caught.value.code == "D004"


def test_names_of_classes_are_numbered_as_they_are_given(server: ShardServer) -> None:
    shard(Path("shards/names.tar"), [*sample(0, b"dog"), *sample(1, b"cat"), *sample(2, b"dog")])
    data = stream(server.url + "names.tar", classes=["dog", "cat"])
    assert data.info.class_names == ("dog", "cat")
    [images, labels] = data.train.batch([*data.train.read(0)], shard_share(3), Augment())
    by_picture = {int(image.sum()): int(label) for image, label in zip(images, labels, strict=True)}
    assert [by_picture[int(picture(number).sum())] for number in range(3)] == [0, 1, 0]


def test_files_that_are_no_images_are_left_out_and_failures_of_the_server_are_not(
    server: ShardServer,
) -> None:
    files = [file for number in range(6) for file in sample(number)]
    files[7] = (files[7][0], files[7][1][:60])
    shard(Path("shards/bad.tar"), files)
    train = stream(server.url + "bad.tar", on_corrupt="skip").train
    labels = train.batch([*train.read(0)], shard_share(6), Augment())[1]
    assert sorted(labels.tolist()) == [-100, 0, 1, 1, 2, 2]
    for path in Path("cache/urls").glob("*/*"):
        path.unlink()
    server.faults["bad.tar"] = [-503] * 5
    with pytest.raises(DataError, match="in 5 attempts"):
        train.batch([*train.read(0)], shard_share(6), Augment())


def test_one_split_at_urls_makes_streams_of_all(server: ShardServer) -> None:
    data = stream("shards/train-000.tar", val_shards=server.url + "train-001.tar")
    assert [len([*source.read(0)]) for source in (data.train, data.val)] == [5, 9]
    with pytest.raises(ConfigError, match=r"data.classes=3: is for shards at URLs"):
        stream("shards/train-000.tar")


def test_a_run_is_resumed_to_the_same_bits(server: ShardServer, capsys: Capture) -> None:
    words = ("data=webdataset", f"data.shards={server.url}{PATTERN}", "data.classes=3", "data.cache=1MB")
    words = (*words, f"data.val_shards={server.url}train-001.tar", "model=mlp", "model.hidden=[4]")
    words = (*words, "batch_size=6", "augment=crop_flip", "schedule=constant", "saving.every=4steps")
    words = (*words, "dataloader=plain", "eval.every=12steps")
    assert train(*words, "steps=24", "run.dir=whole") == 0
    assert train(*words, "steps=20", "run.dir=parts") == 0
    assert train(*words, "steps=24", "run.dir=parts", "run.resume=auto") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "read again from the start of its pass 7 up to step 20" in out
    assert same_bits(weights(Path("parts")), weights(Path("whole")))
    assert summary(Path("whole"))["val"] == summary(Path("parts"))["val"]
