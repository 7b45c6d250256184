"""Programs that the server runs for itself, bounded in time and output. Blocking.

The reaper reaps them like every child, so their exit codes are unknown here.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from exec_server.process import tags
from exec_server.process.command import Command
from exec_server.process.spawn import Streams, encode, spawn_first

# One read of a pipe: its capacity.
_READ_BYTES = 65_536


def run_helper(
    argv: Sequence[str],
    data: bytes,
    seconds: float,
    feed: Callable[[bytes], bool],
    env: Mapping[str, str],
) -> bool:
    """Run a program with this input and pass its output to `feed` until that returns False.

    Returns whether the output has ended by itself. The program is killed otherwise, and also after
    this time. Raises OSError if it cannot be started.
    """
    streams = Streams.open(Command([], "/", {}, pipe_stdin=True))
    tag = tags.NO_TAG
    try:
        with tags.TaggedAsHelper() as tag:
            pid = _start(argv, env, streams)
        tags.tag_running(pid, tag)
        pidfd = _open_process(pid)
        try:
            return _exchange(streams, data, time.monotonic() + seconds, feed)
        finally:
            _kill(pidfd)
    finally:
        for descriptor in streams.server_ends:
            os.close(descriptor)
        tags.forget_helper(tag)


def _start(argv: Sequence[str], env: Mapping[str, str], streams: Streams) -> int:
    """Start the program; returns its pid."""
    try:
        words, variables = encode(Command(list(argv), "/", dict(env)))
        return spawn_first([argv[0]], words, variables, "/", streams)
    finally:
        for descriptor in streams.child_ends:
            os.close(descriptor)


def _exchange(
    streams: Streams, data: bytes, deadline: float, feed: Callable[[bytes], bool]
) -> bool:
    assert streams.stdin is not None
    outputs = {descriptor: stream for stream, descriptor in streams.outputs}
    poll = select.poll()
    for descriptor in outputs:
        poll.register(descriptor, select.POLLIN)
    poll.register(streams.stdin, select.POLLOUT)
    unwritten = memoryview(data)
    while outputs:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return False
        for descriptor, _ in poll.poll(remaining * 1000):
            if descriptor == streams.stdin:
                unwritten = _write(descriptor, unwritten)
                if not unwritten:
                    poll.unregister(descriptor)
                    streams.server_ends.remove(descriptor)
                    os.close(descriptor)
                continue
            piece = os.read(descriptor, _READ_BYTES)
            if not piece:
                poll.unregister(descriptor)
                del outputs[descriptor]
            elif outputs[descriptor] == "stdout" and not feed(piece):
                return False
    return True


def _write(descriptor: int, data: memoryview) -> memoryview:
    """Write what fits; returns the rest, nothing if the program has closed its input."""
    try:
        return data[os.write(descriptor, data) :] if data else data
    except BrokenPipeError:
        return data[:0]


def _open_process(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None  # it has ended


def _kill(pidfd: int | None) -> None:
    if pidfd is not None:
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has ended
        os.close(pidfd)
