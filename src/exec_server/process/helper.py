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
    argv: Sequence[str], seconds: float, feed: Callable[[bytes], None], env: Mapping[str, str]
) -> None:
    """Run a program without input and pass its output to `feed`.

    The program is killed after this time, and if `feed` raises an exception. Raises OSError if it
    cannot be started.
    """
    streams = Streams.open(Command([], "/", {}))
    tag = tags.NO_TAG
    try:
        with tags.TaggedAsHelper() as tag:
            pid = _start(argv, env, streams)
        tags.tag_running(pid, tag)
        pidfd = _open_process(pid)
        try:
            _read(streams, time.monotonic() + seconds, feed)
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


def _read(streams: Streams, deadline: float, feed: Callable[[bytes], None]) -> None:
    outputs = {descriptor: stream for stream, descriptor in streams.outputs}
    poll = select.poll()
    for descriptor in outputs:
        poll.register(descriptor, select.POLLIN)
    while outputs and (remaining := deadline - time.monotonic()) > 0:
        for descriptor, _ in poll.poll(remaining * 1000):
            piece = os.read(descriptor, _READ_BYTES)
            if not piece:
                poll.unregister(descriptor)
                del outputs[descriptor]
            elif outputs[descriptor] == "stdout":
                feed(piece)


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
