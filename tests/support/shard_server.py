"""A server of the files in `shards`, which breaks off, stalls and refuses as it is told."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote

STALL = -1


class ShardServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server_port}/"
        self.asked: list[tuple[str, str | None]] = []
        """File and authorization of each request."""
        self.faults: dict[str, list[int]] = {}
        """By file, what goes wrong with each answer: it ends after so many bytes, `STALL`, or -503, say."""

    def count(self, name: str) -> int:
        return [asked[0] for asked in self.asked].count(name)


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server: Any = self.server
        name = unquote(self.path.split("?")[0].rpartition("/")[2])
        server.asked.append((name, self.headers["Authorization"]))
        if self.path.startswith("/moved/"):
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{server.server_port}/{name}")
            return self.end_headers()
        file, faults = Path("shards", name), server.faults.get(name)
        fault = faults.pop(0) if faults else None
        if not file.is_file():
            return self.send_error(404)
        if fault is not None and fault < STALL:
            return self.send_error(-fault)
        content = file.read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if fault == STALL:
            self.wfile.write(content[:100])
            time.sleep(1.0)
        else:
            self.wfile.write(content[:fault])
        return None

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serving() -> Iterator[ShardServer]:
    with ShardServer() as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()
