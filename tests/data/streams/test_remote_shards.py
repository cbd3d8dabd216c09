"""Shards at URLs: the same as local ones, whatever becomes of the connections, and never in part."""

from __future__ import annotations

import base64
import hashlib
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import fsspec
import pytest
from running import same_bits
from test_webdataset import fetched, load, sample, shard, shards

from ptfast.core.errors import DataError, MachineError, PtfastError
from ptfast.data.streams import remote_shards

PATTERN = "train-{000..003}.tar"


class Server(ThreadingHTTPServer):
    """Serves the files in `shards`, over connections that break off."""

    resumes = obeys = True
    shift = 0
    """By which parts begin later than asked for."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server_port}/"
        self.asked: list[tuple[str, str | None, str | None]] = []
        """File, range and authorization of each request."""
        self.breaks: dict[str, list[int]] = {}
        """By file, the bytes after which each answer breaks off, one after another; below 0, an error."""

    def count(self, name: str) -> int:
        return [asked[0] for asked in self.asked].count(name)


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server: Any = self.server
        name, span = unquote(self.path.split("?")[0].rpartition("/")[2]), self.headers["Range"]
        server.asked.append((name, span, self.headers["Authorization"]))
        if self.path.startswith("/moved/"):
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{server.server_port}/{name}")
            return self.end_headers()
        file, start = Path("shards", name), 0
        if not file.is_file():
            return self.send_error(404)
        breaks = server.breaks.get(name)
        if breaks and breaks[0] < 0:
            return self.send_error(-breaks.pop(0))
        content = file.read_bytes()
        version = hashlib.md5(content).hexdigest()
        if span and server.resumes and (self.headers["If-Range"] == version or not server.obeys):
            start = int(span.removeprefix("bytes=").rstrip("-")) + server.shift
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.send_header("ETag", version)
        self.end_headers()
        self.wfile.write(content[start:][: breaks.pop(0) if breaks else None])
        return None

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("PTFAST_CACHE", "cache")
    monkeypatch.setattr(remote_shards, "_WAIT_S", 0.0)
    with Server() as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()
    assert not [*Path("cache").rglob("*.partial")]


def contents(data: Any) -> Any:
    return data.info.extra["contents"]


@pytest.mark.parametrize("resumes", [True, False])
def test_shards_come_whole_over_connections_that_break_off(server: Server, resumes: bool) -> None:
    shards()
    server.resumes, server.breaks["train-001.tar"] = resumes, [700, 900, 0, -503, 2000]
    by_url, local = load(server.url + PATTERN), load()
    assert same_bits(fetched(by_url.train), fetched(local.train))
    assert contents(by_url) == contents(local)
    spans = [span for name, span, _ in server.asked if name == "train-001.tar"]
    starts = [0, 700, 1600, 1600, 1600, 3600] if resumes else [0, 700, 900, 0, 0, 2000]
    assert spans == [f"bytes={start}-" if start else None for start in starts]
    # From then on they are there.
    num_asked = len(server.asked)
    assert same_bits(fetched(load(server.url + PATTERN).train), fetched(local.train))
    assert len(server.asked) == num_asked


@pytest.mark.parametrize("obeys", [True, False])
def test_a_shard_that_changes_between_two_parts_is_started_anew(server: Server, obeys: bool) -> None:
    """Also where the server takes no notice of If-Range."""
    shards()
    server.obeys, server.breaks["train-000.tar"] = obeys, [1000]
    ask = remote_shards._ask

    def changing(url: str, start: int, version: str | None) -> Any:
        if start:
            shard(Path("shards/train-000.tar"), sample(7))
        return ask(url, start, version)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote_shards, "_ask", changing)
        by_url = load(server.url + "train-000.tar")
    assert same_bits(fetched(by_url.train), fetched(load("shards/train-000.tar").train))
    assert len(by_url.train) == 1


def test_another_part_than_asked_for_is_not_taken(server: Server) -> None:
    shards()
    server.shift, server.breaks["train-000.tar"] = 512, [1024]
    by_url, local = load(server.url + "train-000.tar"), load("shards/train-000.tar")
    assert same_bits(fetched(by_url.train), fetched(local.train))


def test_a_shard_damaged_in_the_cache_is_fetched_anew(server: Server) -> None:
    shards()
    url = server.url + "train-001.tar"
    load(url)
    [cached] = Path("cache/urls").rglob("train-001.tar")
    cached.write_bytes(cached.read_bytes()[:3000])
    assert same_bits(fetched(load(url).train), fetched(load("shards/train-001.tar").train))


def test_a_query_names_the_file_and_a_user_does_not(server: Server) -> None:
    shards()
    for user, query in (("a", "key=1"), ("b", "key=1"), ("a", "key=2")):
        load(f"{server.url.replace('//', f'//{user}:hush@')}train-000.tar?{query}")
    assert server.count("train-000.tar") == 2


def test_names_may_hold_any_letters(server: Server) -> None:
    shards()
    Path("shards/train-001.tar").rename("shards/k\u00e4fer 1.tar")
    assert len(load(server.url + "k\u00e4fer 1.tar").train) == 9


def test_who_waits_for_another_that_fails_is_told_the_same(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first removes the folder that it leaves empty, for whose lock the second waits."""
    shards()
    pause, ask, waits = remote_shards._pause, remote_shards._ask, Event()

    def noted(stop: Any, seconds: float = 0.0) -> None:
        waits.set()
        pause(stop, seconds)

    def late(*given: Any) -> Any:
        assert waits.wait(20)
        return ask(*given)

    monkeypatch.setattr(remote_shards, "_pause", noted)
    monkeypatch.setattr(remote_shards, "_ask", late)
    with ThreadPoolExecutor(2) as pool:
        tries = [pool.submit(load, server.url + "none.tar") for _ in range(2)]
        errors = [each.exception() for each in tries]
    assert [getattr(error, "code", error) for error in errors] == ["D001", "D001"]


def test_several_that_want_the_same_fetch_it_once(server: Server) -> None:
    shards()
    server.breaks = {f"train-00{number}.tar": [700] for number in range(4)}
    found: list[Any] = []
    threads = [Thread(target=lambda: found.append(load(server.url + PATTERN))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert [server.count(f"train-00{number}.tar") for number in range(4)] == [2] * 4


@pytest.mark.parametrize(
    ("name", "breaks", "code", "says", "num_asked"),
    [
        (
            "train-000.tar",
            [700, 0, 0, 0, 0],
            "D007",
            "cannot be downloaded after 5 attempts: the connection broke off after 700",
            5,
        ),
        ("train-004.tar", [], "D001", "cannot be fetched: the server answers 404", 1),
        ("cut.tar", [], "D005", "is truncated: the mark at its end is missing", 1),
    ],
)
def test_what_does_not_come_whole_is_named_without_credentials(
    server: Server, name: str, breaks: list[int], code: str, says: str, num_asked: int
) -> None:
    shards()
    whole = Path("shards/train-001.tar").read_bytes()
    Path("shards/cut.tar").write_bytes(whole.rstrip(b"\0"))
    server.breaks[name] = breaks
    url = server.url.replace("//", "//me:p%40ss@") + f"{name}?signature=abc"
    with pytest.raises(DataError) as caught:
        load(url)
    error = caught.value
    assert (error.code, error.exit_code) == (code, 3)
    assert str(error).startswith(
        f"{server.url.replace('//', '//<secret>@')}{name}?signature=<secret>: {says}"
    )
    assert server.count(name) == num_asked
    authorization = server.asked[0][2] or ""
    assert base64.b64decode(authorization.removeprefix("Basic ")) == b"me:p@ss"
    # Once it is mended it is fetched anew.
    Path("shards", name).write_bytes(whole)
    assert len(load(url).train) == 9


def test_another_host_is_not_told_the_password(server: Server) -> None:
    shards()
    assert len(load(server.url.replace("//", "//me:hush@") + "moved/train-000.tar").train) == 5
    assert [bool(authorization) for _, _, authorization in server.asked] == [True, False]


def test_a_server_that_is_not_there_is_tried_for_a_while(server: Server) -> None:
    with pytest.raises(
        DataError, match=r"http://127.0.0.1:1/a.tar: cannot .* after 5 attempts: Conn"
    ) as caught:
        load("http://127.0.0.1:1/a.tar")
    assert caught.value.code == "D007"


def test_shards_that_the_disk_cannot_hold_are_refused_before_it_is_full(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards()
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=30_000))
    with pytest.raises(MachineError, match=r"4 x 20 KiB of shards do not fit: 29 KiB are free. Set PTFAST"):
        load(server.url + PATTERN)


def test_other_protocols_are_those_of_fsspec(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    shards()
    for file in Path("shards").iterdir():
        fsspec.filesystem("memory").pipe(f"/shards/{file.name}", file.read_bytes())
    assert same_bits(fetched(load(f"memory://shards/{PATTERN}").train), fetched(load().train))
    monkeypatch.setitem(sys.modules, "s3fs", None)
    refused = {
        "memory://shards/train-004.tar": ("D001", "FileNotFoundError"),
        "s3://bucket/a.tar": ("E004", "Install it with pip install 'ptfast[s3]'"),
        "ghost://a.tar": ("D001", "Protocol not known: ghost"),
    }
    for url, (code, says) in refused.items():
        with pytest.raises(PtfastError, match=f"{url}: ") as caught:
            load(url)
        assert caught.value.code == code
        assert says in str(caught.value)
