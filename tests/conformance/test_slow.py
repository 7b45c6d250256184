"""What takes half a minute of waiting, all at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conformance.test_transcripts import TRANSCRIPTS, replay
from tests.support.client import PING, descendants, scaled, start_server, survivors

pytestmark = pytest.mark.slow


def _ping_after_30_seconds(kind: str, _: Path) -> None:
    with start_server(kind) as server:
        link = server.link()
        began = time.monotonic()
        frame = link.receive_frame(scaled(40))
        assert (frame.opcode, frame.payload) == (PING, b"")
        # At the earliest after 30 s; a busy machine may be late by a few.
        assert 28 < time.monotonic() - began < 30 + scaled(3)
        link.close()


def _detached_processes_die_after_30_seconds(kind: str, _: Path) -> None:
    with start_server(kind) as server:
        client = server.connect()
        helpers = descendants(server.process.pid)
        client.start(["sleep", "120"])
        client.start(["bash", "-c", "trap '' HUP TERM; sleep 120 & wait"], tty=True)
        client.close()
        family = descendants(server.process.pid)
        family = {pid: start for pid, start in family.items() if pid not in helpers}
        assert len(family) >= 2
        began = time.monotonic()
        assert survivors(family, timeout=40) == []
        assert time.monotonic() - began > 28


def _session_expires(kind: str, folder: Path) -> None:
    if TRANSCRIPTS.is_dir():
        replay("20", kind, folder)


def _process_is_forgotten(kind: str, folder: Path) -> None:
    if TRANSCRIPTS.is_dir():
        replay("21", kind, folder)


_WAITS: list[Callable[[str, Path], None]] = [
    _ping_after_30_seconds,
    _detached_processes_die_after_30_seconds,
    _session_expires,
    _process_is_forgotten,
]


def test_everything_that_waits_30_seconds(kind: str, folder: Path) -> None:
    with ThreadPoolExecutor(len(_WAITS)) as pool:
        futures = []
        for number, wait in enumerate(_WAITS):
            own = folder / str(number)
            own.mkdir()
            futures.append(pool.submit(wait, kind, own))
        for future in futures:
            future.result()
