"""Clients before 0.143 fetch the output of a command with process/read, and come late.

The notifications of the output only wake them up. They lose nothing of a burst. A thread drains the
connection as fast as the real client does, without looking into the messages: a client that decodes
each notification first would slow the server down to its own speed.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import queue
import socket
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import msgspec
from tests.support.client import Server
from tests.support.raw_links import DEFAULT_TIMEOUT, TEXT, frame_bytes, scaled, upgrade_request


class PollingClient:
    """One initialized connection, drained by a thread."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self._socket = socket.create_connection((address.hostname or "", address.port or 0))
        self._socket.sendall(upgrade_request())
        stream = self._socket.makefile("rb", buffering=1 << 20)
        while stream.readline().strip():
            pass  # the answer to the upgrade
        self._ids = itertools.count(1)
        self._answers: queue.Queue[bytes] = queue.Queue()
        self._news = threading.Event()
        self._thread = threading.Thread(target=self._drain, args=(stream,))
        self._thread.start()
        self.call("initialize", {"clientName": "polling", "resumeSessionId": None})
        self._send({"method": "initialized", "params": {}})

    def __enter__(self) -> PollingClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def call(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """A request and its result."""
        self._send({"id": next(self._ids), "method": method, "params": params})
        answer = msgspec.json.decode(self._answers.get(timeout=scaled(DEFAULT_TIMEOUT)))
        assert "result" in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def output(self, start: dict[str, Any], *, delay: float) -> bytes:
        """Start a command and return its output, asked for so many seconds after each wake-up."""
        self._news.clear()
        self.call("process/start", start)
        pieces = []
        after = 0
        closed = False
        while not closed:
            assert self._news.wait(scaled(DEFAULT_TIMEOUT)), "no event arrived"
            self._news.clear()
            time.sleep(delay)  # the lateness of the client is the subject of the test
            read = self.call(
                "process/read",
                {"processId": start["processId"], "afterSeq": after, "maxBytes": None, "waitMs": 0},
            )
            pieces += [base64.b64decode(chunk["chunk"]) for chunk in read["chunks"]]
            after = read["nextSeq"] - 1
            closed = read["closed"]
        return b"".join(pieces)

    def _send(self, message: dict[str, Any]) -> None:
        self._socket.sendall(frame_bytes(TEXT, json.dumps(message).encode()))

    def _drain(self, stream: BinaryIO) -> None:
        parts: list[bytes] = []
        with stream:
            while head := stream.read(2):
                size = head[1]
                if size > 125:
                    size = int.from_bytes(stream.read(2 if size == 126 else 8))
                parts.append(stream.read(size))
                if head[0] & 0x80:
                    self._take(b"".join(parts))
                    parts.clear()

    def _take(self, message: bytes) -> None:
        if message.startswith(b'{"method"'):
            self._news.set()
        else:
            self._answers.put(message)


_BURST = 8_000_000
_BURSTS = 100
_LATE_SECONDS = 0.02


def test_bursts_are_read_whole_by_a_client_that_polls(server: Server, tmp_path: Path) -> None:
    burst = os.urandom(_BURST)
    (tmp_path / "burst").write_bytes(burst)
    with PollingClient(server.url) as client:
        for number in range(_BURSTS):
            start = {
                "processId": f"burst-{number}",
                "argv": ["cat", str(tmp_path / "burst")],
                "cwd": str(tmp_path),
                "env": {"PATH": os.environ["PATH"]},
                "tty": False,
                "pipeStdin": False,
                "arg0": None,
            }
            output = client.output(start, delay=_LATE_SECONDS)
            assert output == burst, f"{len(output)} bytes of burst {number}"
