"""Process over real pipes, without a child or a server: the test writes its output and exits it."""

from __future__ import annotations

import asyncio
import functools
import os
import weakref
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from exec_server.errors import InternalError
from exec_server.host.pipes import PIPE_BYTES
from exec_server.process import descendants, process
from exec_server.process.command import Command
from exec_server.process.orphans import Owner
from exec_server.process.process import READ_BYTES, DenialCheck, Process
from exec_server.process.spawn import Child
from exec_server.protocol.decoding import Notice
from exec_server.protocol.process import (
    CHUNK_BYTES,
    ClosedParams,
    ExitedParams,
    OutputChunk,
    OutputParams,
    OutputRun,
    ProcessId,
    ProcessInfo,
    Signal,
    Stream,
)
from exec_server.protocol.sandbox import Denial

_ID = ProcessId("p")
_PID = 2**22 + 1  # above the largest pid of Linux


@dataclass
class World:
    """A process whose child is the test: `stdout` and `stderr` are the child's ends."""

    stdout: int
    stderr: int
    stdin: int
    process: Process
    events: list[msgspec.Struct] = field(default_factory=list)

    def close(self, *descriptors: int) -> None:
        """Close ends of the child, all of them if none is named."""
        for descriptor in descriptors or (self.stdout, self.stderr, self.stdin):
            with suppress(OSError):
                os.close(descriptor)

    async def finish(self, code: int = 0) -> None:
        """Exit the child and wait for the close."""
        self.close()
        self.process.on_exit(code)
        while not self.process.closed:
            await self.process.next_event()

    async def until(self, count: int) -> list[msgspec.Struct]:
        """Wait for this many events."""
        while len(self.events) < count:
            await self.process.next_event()
        return self.events

    @property
    def output(self) -> bytes:
        return b"".join(each.chunk for each in self.events if isinstance(each, OutputParams))


def _world(
    *, argv: list[str] | None = None, reading: bool = True, check: DenialCheck | None = None
) -> World:
    stdin_read, stdin_write = os.pipe()
    stdout_read, stdout_write = os.pipe()
    stderr_read, stderr_write = os.pipe()
    for descriptor in (stdin_write, stdout_read, stderr_read):
        os.set_blocking(descriptor, False)
    events: list[msgspec.Struct] = []

    def emit(notice: Notice[msgspec.Struct], params: msgspec.Struct) -> None:
        assert isinstance(params, notice.params)
        events.append(params)

    outputs: tuple[tuple[Stream, int], ...] = (("stdout", stdout_read), ("stderr", stderr_read))
    child = Child(_PID, stdin_write, outputs)
    command = Command(argv or ["cmd"], "/", {}, pipe_stdin=True)
    tested = Process(_ID, command, child, Owner(None), emit, check_denial=check)
    if reading:
        tested.resume_reading()
    return World(stdout_write, stderr_write, stdin_read, tested, events)


def _run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        before = os.listdir("/proc/self/fd")
        async with asyncio.timeout(10):
            await test()
        assert os.listdir("/proc/self/fd") == before  # the process has closed its ends

    asyncio.run(limited())


@pytest.fixture(autouse=True)
def killed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The leaders that `terminate` has killed."""
    pids: list[int] = []
    monkeypatch.setattr(descendants, "kill_tree", pids.append)
    return pids


# ---- output ---------------------------------------------------------------------------


def test_output_is_numbered_across_both_streams() -> None:
    async def test() -> None:
        world = _world()
        os.write(world.stdout, b"one")
        await world.until(1)
        os.write(world.stderr, b"two")
        await world.until(2)
        world.close()
        world.process.on_exit(3)
        assert await world.until(4) == [
            OutputParams(_ID, 1, "stdout", b"one"),
            OutputParams(_ID, 2, "stderr", b"two"),
            ExitedParams(_ID, 3, 3, False, None),
            ClosedParams(_ID, 4),
        ]

    _run(test)


def test_a_large_read_becomes_several_chunks() -> None:
    async def test() -> None:
        world = _world(reading=False)
        data = os.urandom(2 * CHUNK_BYTES + 1)
        os.write(world.stdout, data)
        world.process.resume_reading()
        assert await world.until(1) == [OutputRun(_ID, 1, "stdout", data)]
        sizes = [len(each.chunk) for each in world.process.read(0, None).chunks]
        assert sizes == [CHUNK_BYTES, CHUNK_BYTES, 1]
        await world.finish()

    _run(test)


def test_paused_output_stays_in_the_pipe() -> None:
    async def test() -> None:
        world = _world()
        world.process.pause_reading()
        world.process.pause_reading()
        os.write(world.stdout, b"kept")
        for _ in range(3):
            await asyncio.sleep(0)
        assert world.events == []
        world.process.resume_reading()
        world.process.resume_reading()
        assert await world.until(1) == [OutputParams(_ID, 1, "stdout", b"kept")]
        await world.finish()

    _run(test)


def test_a_process_is_read_if_both_its_client_and_the_link_allow_it() -> None:
    async def test() -> None:
        world = _world()
        world.process.set_flow("pause")
        os.write(world.stdout, b"kept")
        world.process.pause_reading()
        world.process.set_flow("send")
        world.process.set_flow("pause")
        world.process.resume_reading()
        for _ in range(3):
            await asyncio.sleep(0)
        assert (world.events, world.process.log.next_seq) == ([], 1)
        world.process.set_flow("send")
        assert await world.until(1) == [OutputParams(_ID, 1, "stdout", b"kept")]
        await world.finish()

    _run(test)


def test_output_that_is_only_retained_is_numbered_and_can_be_read() -> None:
    async def test() -> None:
        world = _world()
        world.process.set_flow("retain")
        os.write(world.stdout, b"quiet")
        await world.process.next_event()
        assert world.events == []
        assert world.process.read(0, None).chunks == [OutputChunk(1, "stdout", b"quiet")]
        world.process.set_flow("send")
        os.write(world.stdout, b"loud")
        assert await world.until(1) == [OutputParams(_ID, 2, "stdout", b"loud")]
        world.process.set_flow("retain")
        await world.finish(4)
        assert world.events[1:] == [ExitedParams(_ID, 3, 4, False, None), ClosedParams(_ID, 4)]

    _run(test)


def test_a_full_pipe_blocks_the_child_and_is_enlarged_when_it_is_read() -> None:
    async def test() -> None:
        world = _world(reading=False)
        os.set_blocking(world.stdout, False)
        assert os.write(world.stdout, bytes(2 * PIPE_BYTES)) == PIPE_BYTES
        with pytest.raises(BlockingIOError):
            os.write(world.stdout, b"x")
        world.process.resume_reading()
        await world.until(1)
        world.process.pause_reading()
        # An unprivileged user may have used up the pipe memory that the kernel allows.
        assert os.write(world.stdout, bytes(READ_BYTES)) in (PIPE_BYTES, READ_BYTES)
        world.process.resume_reading()
        await world.finish()

    _run(test)


def test_output_of_a_closed_stream_ends_without_the_other() -> None:
    async def test() -> None:
        world = _world()
        world.close(world.stdout)
        os.write(world.stderr, b"still here")
        await world.until(1)
        world.process.on_exit(0)
        assert await world.until(2) == [
            OutputParams(_ID, 1, "stderr", b"still here"),
            ExitedParams(_ID, 2, 0, False, None),
        ]
        assert not world.process.closed
        world.close()
        await world.until(3)
        assert world.process.closed

    _run(test)


# ---- exit and close -------------------------------------------------------------------


def test_output_in_the_pipe_precedes_the_exit() -> None:
    async def test() -> None:
        world = _world()
        os.write(world.stdout, b"last words")
        world.process.on_exit(0)  # before the loop has read anything
        assert world.events == [
            OutputParams(_ID, 1, "stdout", b"last words"),
            ExitedParams(_ID, 2, 0, False, None),
        ]
        world.close()
        await world.until(3)

    _run(test)


def test_output_after_the_exit_precedes_the_close() -> None:
    async def test() -> None:
        world = _world()
        world.process.on_exit(0)
        os.write(world.stdout, b"of a descendant")
        await world.until(2)
        world.close()
        assert await world.until(3) == [
            ExitedParams(_ID, 1, 0, False, None),
            OutputParams(_ID, 2, "stdout", b"of a descendant"),
            ClosedParams(_ID, 3),
        ]

    _run(test)


def test_the_output_that_precedes_the_exit_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "DRAINED_BYTES", 10)
    monkeypatch.setattr(process, "READ_BYTES", 4)

    async def test() -> None:
        world = _world()
        os.write(world.stdout, bytes(100))
        world.process.on_exit(0)
        assert isinstance(world.events[-1], ExitedParams)
        assert len(world.output) == 12
        world.close()
        while not world.process.closed:
            await world.process.next_event()
        assert len(world.output) == 100

    _run(test)


def test_a_paused_process_publishes_its_exit_but_keeps_its_output() -> None:
    async def test() -> None:
        world = _world(reading=False)
        os.write(world.stdout, b"unread")
        world.close()
        world.process.on_exit(0)
        assert world.events == [ExitedParams(_ID, 1, 0, False, None)]
        world.process.resume_reading()
        assert await world.until(3) == [
            ExitedParams(_ID, 1, 0, False, None),
            OutputParams(_ID, 2, "stdout", b"unread"),
            ClosedParams(_ID, 3),
        ]

    _run(test)


def test_the_close_is_reported_to_the_table_once() -> None:
    async def test() -> None:
        world = _world()
        closed: list[Process] = []
        world.process.on_closed = closed.append
        world.close()
        world.process.on_exit(0)
        await world.until(2)
        world.process.abandon_output()
        assert closed == [world.process]

    _run(test)


def test_terminate_abandons_output_that_a_descendant_holds_open(killed: list[int]) -> None:
    async def test() -> None:
        world = _world()
        assert world.process.terminate()
        assert killed == [_PID]
        world.process.on_exit(137)  # the ends of the child are still open
        assert world.events == [ExitedParams(_ID, 1, 137, False, None), ClosedParams(_ID, 2)]
        assert not world.process.terminate()
        assert killed == [_PID]
        world.close()

    _run(test)


# ---- the denial check -----------------------------------------------------------------


def test_the_denial_check_sees_all_output() -> None:
    denial = Denial("refused", "/x", "write", None)
    checked: list[tuple[int, bytes]] = []

    async def test() -> None:
        def check(code: int, output: list[OutputChunk]) -> tuple[bool, Denial | None]:
            checked.append((code, b"".join(each.chunk for each in output)))
            return True, denial

        world = _world(check=check)
        os.write(world.stdout, b"refused")
        world.process.on_exit(1)
        assert world.process.exit_code is None  # waits for the end of the output
        world.close()
        assert await world.until(3) == [
            OutputParams(_ID, 1, "stdout", b"refused"),
            ExitedParams(_ID, 2, 1, True, denial),
            ClosedParams(_ID, 3),
        ]
        assert checked == [(1, b"refused")]
        result = world.process.read(0, None)
        assert (result.sandbox_denied, result.sandbox_denial) == (True, denial)

    _run(test)


def test_an_exit_with_a_denial_check_waits_only_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "DENIAL_CHECK_SECONDS", 0.001)

    async def test() -> None:
        world = _world(check=lambda code, output: (False, None))
        world.process.on_exit(1)
        assert await world.until(1) == [ExitedParams(_ID, 1, 1, False, None)]
        world.close()
        await world.until(2)

    _run(test)


# ---- stdin ----------------------------------------------------------------------------


def test_input_reaches_the_child_and_ends() -> None:
    async def test() -> None:
        world = _world()
        assert world.process.has_stdin
        assert world.process.accepts_write("w")
        assert world.process.write(b"line\n", "w") is None
        assert world.process.write_eof() is None
        assert os.read(world.stdin, 100) == b"line\n"
        assert os.read(world.stdin, 100) == b""
        assert not world.process.accepts_write("other")
        assert world.process.accepts_write("w")  # the client may repeat the request
        assert world.process.write(b"line\n", "w") is None
        await world.finish()

    _run(test)


def test_a_write_that_waits_is_remembered_until_it_is_accepted() -> None:
    async def test() -> None:
        world = _world()
        while world.process.write(bytes(PIPE_BYTES), None) is None:
            pass
        waiting = world.process.write(b"x", "w")
        assert waiting is not None
        assert world.process.write(b"x", "w") is waiting  # a repeated request
        other = world.process.write(b"y", "v")
        assert other is not None
        other.cancel()
        await asyncio.sleep(0)
        again = world.process.write(b"y", "v")
        assert again is not None
        assert again is not other
        world.process.terminate()
        assert waiting.done()
        assert again.done()
        await asyncio.sleep(0)
        assert world.process.write(b"x", "w") is None  # accepted, as the first time
        with pytest.raises(InternalError, match="failed to write to process stdin"):
            world.process.write(b"z", "new")
        await world.finish(137)

    _run(test)


def test_only_the_last_write_ids_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "WRITE_IDS", 2)

    async def test() -> None:
        world = _world()
        for write_id in ("a", "b", "c"):
            world.process.write(write_id.encode(), write_id)
        world.process.write(b"b", "b")
        world.process.write(b"a", "a")
        assert os.read(world.stdin, 100) == b"abca"
        ids = 2 * (process.WRITE_ID_COST + 1)
        assert world.process.memory_bytes() == process.CLOSED_COST + len(_ID) + len("cmd") + ids
        await world.finish()

    _run(test)


def test_a_closed_process_answers_writes_as_before_its_close() -> None:
    async def test() -> None:
        world = _world()
        world.process.write(b"x", "w")
        await world.finish()
        assert world.process.has_stdin
        assert world.process.accepts_write("other")
        assert world.process.write(b"y", "other") is None  # dropped
        assert world.process.write_eof() is None
        assert not world.process.accepts_write("other")
        assert world.process.accepts_write("w")
        assert world.process.write(b"x", "w") is None

    _run(test)


def test_the_end_of_input_is_remembered_after_the_close() -> None:
    async def test() -> None:
        world = _world()
        world.process.write_eof()
        await world.finish()
        assert not world.process.accepts_write("w")

    _run(test)


def test_a_closed_process_keeps_nothing_of_its_launch() -> None:
    async def test() -> None:
        policy = type("Policy", (), {})()
        released = weakref.ref(policy)

        def check(code: int, output: list[OutputChunk], policy: object = policy) -> Any:
            return False, None

        world = _world(check=check)
        world.process.on_closed = functools.partial(lambda policy, process: None, policy)
        await world.finish()
        del policy, check
        assert released() is None

    _run(test)


def test_the_memory_of_a_closed_process_counts_its_texts() -> None:
    async def test() -> None:
        denial = Denial("a" * 10, "ü" * 10, None, "b" * 5)
        world = _world(argv=["ü", "", "c"], check=lambda code, output: (True, denial))
        world.process.write(b"", "d" * 9)
        world.process.write(b"", "€" * 2)
        await world.finish()
        wide = process.WIDE_CHARACTER_COST
        texts = len(_ID) + len("ü\0\0c".encode()) + 15 + 10 * wide
        ids = 2 * process.WRITE_ID_COST + 9 + 2 * wide
        assert world.process.memory_bytes() == process.CLOSED_COST + texts + ids
        assert world.process.summary().argv == ["ü", "", "c"]

    _run(test)


# ---- requests -------------------------------------------------------------------------


def test_read_and_summary_follow_the_process() -> None:
    async def test() -> None:
        world = _world(argv=["echo", "a" * process.LISTED_ARGV, "cut off"])
        argv = ["echo", "a" * (process.LISTED_ARGV - 5)]
        pid = world.process.pid
        assert world.process.summary() == ProcessInfo(_ID, argv, False, True, None, False, 1, pid)
        os.write(world.stdout, b"out")
        await world.until(1)
        result = world.process.read(0, None)
        assert [chunk.chunk for chunk in result.chunks] == [b"out"]
        assert (result.next_seq, result.exited, result.closed) == (2, False, False)
        world.close()
        world.process.on_exit(4)
        await world.until(3)
        result = world.process.read(1, None)
        assert (result.chunks, result.next_seq, result.exit_code) == ([], 4, 4)
        assert world.process.summary() == ProcessInfo(_ID, argv, False, False, 4, True, 4, pid)

    _run(test)


def test_a_cancelled_waiter_does_not_keep_others_waiting() -> None:
    async def test() -> None:
        world = _world()
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(world.process.next_event())
            second = tasks.create_task(world.process.next_event())
            await asyncio.sleep(0)
            first.cancel()
            os.write(world.stdout, b"x")
            await second
        assert first.cancelled()
        assert world.process._waiters == []
        await world.finish()

    _run(test)


@pytest.mark.parametrize(("name", "number"), [("interrupt", 2), ("SIGTERM", 15)])
def test_a_signal_goes_to_the_group_until_the_leader_is_reaped(
    monkeypatch: pytest.MonkeyPatch, name: Signal, number: int
) -> None:
    signalled: list[tuple[int, int]] = []

    def killpg(pid: int, sent: int) -> None:
        signalled.append((pid, sent))
        raise ProcessLookupError

    monkeypatch.setattr(os, "killpg", killpg)

    async def test() -> None:
        world = _world()
        world.process.signal(name)
        world.close()
        world.process.on_exit(0)
        world.process.signal(name)
        assert signalled == [(_PID, number)]

    _run(test)


def test_a_terminal_is_read_until_its_last_user_closes_it() -> None:
    async def test() -> None:
        master, slave = os.openpty()
        os.set_blocking(master, False)
        events: list[msgspec.Struct] = []
        tested = Process(
            _ID,
            Command(["cmd"], "/", {}, tty=True),
            Child(_PID, master, (("pty", master),)),
            Owner(None),
            lambda _, params: events.append(params),
        )
        tested.resume_reading()
        os.write(slave, b"o" * 3000)
        while not events:
            await tested.next_event()
        tested.resize(10, 20)
        assert os.get_terminal_size(slave) == (20, 10)
        os.close(slave)  # read reports EIO from here on
        while tested._outputs:
            await asyncio.sleep(0)
        tested.resize(11, 21)  # the leader lives, so the terminal stays open
        tested.on_exit(0)
        assert [type(each) for each in events[-2:]] == [ExitedParams, ClosedParams]
        tested.resize(12, 22)  # closed: no effect

    _run(test)
