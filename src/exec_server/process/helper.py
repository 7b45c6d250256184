"""Programs that the server runs for itself, bounded in time and output; the reaper reaps them."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from exec_server.process import tags
from exec_server.process.command import Command
from exec_server.process.spawn import Streams, encode, spawn_first

# One read of a pipe: its capacity.
_READ_BYTES = 65_536


def run_helper(
    argv: Sequence[str], seconds: float, feed: Callable[[bytes], None], env: Mapping[str, str]
) -> None:
    """Run a program without input and pass its output to `feed`; raises OSError.

    It is killed after this time, and if `feed` raises an exception.
    """
    command = Command(list(argv), "/", dict(env))
    words, variables = encode(command)
    streams = Streams.open(command)
    tag = tags.NO_TAG
    try:
        try:
            with tags.TaggedAsHelper() as tag:
                pid = spawn_first([argv[0]], words, variables, "/", streams)
        finally:
            streams.release(started=True)  # the ends of the server are closed below
        tags.tag_running(pid, tag)
        with _killed_at_end(pid):
            _read(streams, time.monotonic() + seconds, feed)
    finally:
        for descriptor in streams.server_ends:
            os.close(descriptor)
        tags.forget_helper(tag)


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


@contextmanager
def _killed_at_end(pid: int) -> Iterator[None]:
    pidfd = None
    with suppress(OSError):  # it has ended
        pidfd = os.pidfd_open(pid)
    try:
        yield
    finally:
        if pidfd is not None:
            with suppress(ProcessLookupError):  # it has ended
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
