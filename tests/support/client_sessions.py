"""Client sessions under test: one with calls of every family, and the output of its process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from exec_server.client.engine.dialers import Dialer
from exec_server.client.engine.session import ClientSession
from exec_server.errors import NotFound, SessionLost
from exec_server.protocol import files, process
from exec_server.protocol.base64_text import Base64
from exec_server.protocol.method import Notice
from exec_server.protocol.paths import PathUri
from exec_server.protocol.process import ProcessId
from exec_server.protocol.session import STATUS
from tests.support.client import DEFAULT_TIMEOUT, scaled

# Waits for a line, then prints numbered lines, little by little.
COUNTER = """
import sys, time
sys.stdin.readline()
for number in range(3000):
    print(number, flush=number % 10 == 0)
    if number % 10 == 0: time.sleep(0.001)
"""
COUNTED = "".join(f"{number}\n" for number in range(3000)).encode()


class Recorder:
    """Collects the output of one process, and after a lost connection reads the missed part."""

    def __init__(self, session: ClientSession, tasks: asyncio.TaskGroup) -> None:
        self._session = session
        self._tasks = tasks
        self._chunks: dict[int, bytes] = {}
        self._last = 0  # up to here nothing is missing
        self._seen: set[int] = set()
        self._end: int | None = None
        self.resumed = 0
        self.on_output: Callable[[], None] = lambda: None
        self.complete = asyncio.Event()
        session.subscribe(self)

    async def start(self, *argv: str, pipe_stdin: bool = False) -> None:
        params = process.StartParams(
            process_id=ProcessId("p"),
            argv=list(argv),
            cwd=PathUri.from_wire("/"),
            env={"PATH": "/usr/bin:/bin"},
            tty=False,
            pipe_stdin=pipe_stdin,
        )
        assert (await self._session.call(process.START, params)).process_id == "p"

    async def count(self) -> None:
        """Start the counter; the line that sets it going is written once."""
        await self.start(sys.executable, "-S", "-c", COUNTER, pipe_stdin=True)
        params = process.WriteParams(ProcessId("p"), Base64(b"go\n"), "1")
        answer = await self._session.call(process.WRITE, params, is_retryable=True)
        assert answer.status == "accepted"

    @property
    def output(self) -> bytes:
        return b"".join(self._chunks[seq] for seq in sorted(self._chunks))

    def on_notice(self, notice: Notice[Any], params: Any) -> None:
        self._take(params.seq, getattr(params, "chunk", None))
        if notice is process.CLOSED:
            self._end = params.seq
        self._check()
        if notice is process.OUTPUT:
            self.on_output()

    def _take(self, seq: int, chunk: bytes | None) -> None:
        self._seen.add(seq)
        if chunk is not None:
            self._chunks[seq] = chunk
        while self._last + 1 in self._seen:
            self._last += 1

    def _check(self) -> None:
        if self._end is not None and self._last >= self._end:
            self.complete.set()

    def on_disconnected(self) -> None:
        pass

    def on_resumed(self) -> None:
        self.resumed += 1
        self._tasks.create_task(self._catch_up())

    async def _catch_up(self) -> None:
        params = process.ReadParams(ProcessId("p"), self._last, None, 0)
        missed = await self._session.call(process.READ, params, is_retryable=True)
        for chunk in missed.chunks:
            self._take(chunk.seq, chunk.chunk)
        # Events without output are the exit and the close.
        for seq in range(self._last + 1, missed.next_seq):
            self._take(seq, None)
        if missed.closed:
            self._end = missed.next_seq - 1
        self._check()

    def on_lost(self, error: SessionLost) -> None:
        pass


async def ready(session: ClientSession) -> bool:
    """Whether the server answers, at last."""
    return (await session.call(STATUS, None, is_retryable=True)).status == "ready"


async def until_lost(session: ClientSession) -> None:
    """Call until a call finds the session lost: the loss is noticed a moment after its cause."""
    while True:
        await ready(session)


async def outcome(waiting: Coroutine[Any, Any, Any]) -> Any:
    """The value that a call returns or the exception that it raises."""
    try:
        return await waiting
    except Exception as error:
        return error


async def exercise(dialer: Dialer) -> None:
    """A session that does a little of everything."""
    async with asyncio.timeout(scaled(DEFAULT_TIMEOUT)), ClientSession(dialer) as session:
        assert session.environment_info.platform_os == "linux"
        async with asyncio.TaskGroup() as tasks:
            recorder = Recorder(session, tasks)
            await recorder.start("/bin/sh", "-c", "echo out; exit 3")
            await recorder.complete.wait()
        assert recorder.output == b"out\n"
        read = await session.call(process.READ, process.ReadParams(ProcessId("p")))
        assert (read.exit_code, read.closed) == (3, True)
        with pytest.raises(NotFound, match="No such file or directory"):
            await session.call(files.READ_FILE, files.ReadFileParams(PathUri.from_wire("/none")))
