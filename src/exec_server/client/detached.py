"""Detached processes of the client: started to outlive their session, or attached to by name."""

from __future__ import annotations

import asyncio
import os
import re
import uuid
from typing import Final

import msgspec

from exec_server.client.engine.recovery import KILL_SECONDS, RemoteProcess, RemoteProcesses
from exec_server.client.engine.session import ClientSession
from exec_server.client.process import Process
from exec_server.client.results import Chunk
from exec_server.errors import InvalidParams, Unsupported
from exec_server.protocol.detached import LIST_DETACHED, ListedDetached
from exec_server.protocol.process import READ, Detach, ReadParams, StartParams

# A name that this client chooses is the program and a random number, because the answer that names
# it could be lost. The server checks names that callers choose.
_NAME_DIGITS: Final = 6
_PROGRAM_CHARACTERS: Final = 32
_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9_-]+")

# Output requested at a time.
_READ_BYTES: Final = 262_144

_SESSIONS_ONLY: Final = "its processes end with the session of their client"


class DetachedProcess(Process):
    """A process of the server that `await` or `async with` starts or attaches to.

    `aclose`, or leaving the block, leaves it running, and so does closing its environment; `kill`
    and `terminate` end it. It is never paused: a reader that is too slow loses the oldest output,
    which `lost_bytes` and `lost_before` of the next chunk count.
    """

    def __init__(
        self,
        session: ClientSession,
        processes: RemoteProcesses,
        params: StartParams | None,
        *,
        argv: tuple[str, ...],
        name: str,
        label: str,
        after: int = 0,
    ) -> None:
        """Prepare a start with `params`, or without them an attachment that begins after an event.

        `label` names the command in the error of a failed start.
        """
        super().__init__(session, processes, params, argv=argv, name=label)
        self.name = name
        self._after = after
        self._is_attached = params is None  # and not started
        self.tty = params is not None and params.tty
        """Whether it runs on a terminal."""
        self.has_stdin = params is not None and (params.tty or params.pipe_stdin)
        """Whether it can be written to."""

    async def _start(self, remote: RemoteProcess) -> None:
        if not self._is_attached:
            await super()._start(remote)
            return
        assert self.name is not None
        answer = await self._processes.attach(remote, self.name, self._after)
        self.argv = tuple(answer.argv)
        self.tty = answer.tty
        self.has_stdin = answer.tty or answer.pipe_stdin
        self._open_input(remote, is_terminal=answer.tty, is_pipe=answer.pipe_stdin)

    async def _close(self) -> None:
        remote = self._started()
        self._discard_output()
        try:
            await asyncio.wait([self._processes.detach(remote)], timeout=KILL_SECONDS)
        finally:
            self._forget(remote)


def check_support(session: ClientSession) -> None:
    """Raise Unsupported if the server has no detached processes."""
    if not session.features.capabilities.process_detach:
        raise Unsupported("processDetach", _SESSIONS_ONLY)


def detached_params(
    params: StartParams,
    program: str,
    *,
    name: str | None,
    max_lifetime: float | None,
    idle_timeout: float | None,
) -> tuple[StartParams, str]:
    """The params of a start that detaches, and the name of the process."""
    if name is None:
        name = _unused_name(program)
    detach = Detach(
        name,
        _milliseconds("max_lifetime", max_lifetime),
        _milliseconds("idle_timeout", idle_timeout),
    )
    return msgspec.structs.replace(params, detach=detach), name


async def list_detached(session: ClientSession) -> list[ListedDetached]:
    """The detached processes of the server; raises Unsupported."""
    check_support(session)
    return (await session.call(LIST_DETACHED, None, is_retryable=True)).processes


async def read_retained(
    session: ClientSession, process: DetachedProcess, last: int
) -> tuple[list[Chunk], int, int]:
    """Read the output of a process up to the event `last`, as far as the server retains it.

    Returns also the number of bytes that it does not, and of the event with which the output ends.
    """
    chunks: list[Chunk] = []
    after = lost = 0
    while after < last:
        params = ReadParams(process.id, after, _READ_BYTES, 0)
        answer = await session.call(READ, params, is_retryable=True)
        lost += answer.lost_bytes or 0
        if not answer.chunks:
            break
        chunks += (Chunk(each.stream, each.chunk) for each in answer.chunks)
        after = answer.chunks[-1].seq
    return chunks, lost, after


def _unused_name(program: str) -> str:
    word = os.path.basename(program)[:_PROGRAM_CHARACTERS]
    word = _NOT_IN_NAMES.sub("-", word).strip("-_") or "process"
    return f"{word}-{uuid.uuid4().hex[:_NAME_DIGITS]}"


def _milliseconds(name: str, seconds: float | None) -> int | None:
    if seconds is None:
        return None
    if not seconds > 0:
        raise InvalidParams(f"{name} must be a positive number of seconds, not {seconds!r}")
    return max(1, round(seconds * 1000))
