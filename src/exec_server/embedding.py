"""serve(): a server for as long as a program wants one.

It is a process of its own: a server reaps every child of the process it is in, and a program may
have children of its own. It cannot outlive the program, because it ends when its stdin does.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from exec_server.errors import StartupError

# For the server to say where it listens, and to end all its processes when it is not needed.
READY_SECONDS: Final = 20.0
END_SECONDS: Final = 10.0
# Of the line with the URL, and of what is kept of its complaints.
LINE_BYTES: Final = 4096

DEFAULT_LISTEN: Final = "ws://127.0.0.1:0"


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that runs: where it listens, and its process id."""

    url: str
    pid: int


@asynccontextmanager
async def serve(
    listen: str = DEFAULT_LISTEN,
    *arguments: str,
    token: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> AsyncIterator[RunningServer]:
    """Run a server while the `async with` lasts; raises StartupError if it does not start.

    `arguments` are further flags of `exec-server`. With a `token` only clients that have it are
    let in. Without `env` and `cwd` the server has those of this program. Its log goes to stderr.
    """
    words = [sys.executable, "-m", "exec_server", "--listen", listen, "--exit-on-stdin-close"]
    if token is not None:
        # The digest of it: arguments can be read by every user of the machine.
        digest = hashlib.sha256(token.encode()).hexdigest()
        words += ["--ws-auth", "capability-token", "--ws-token-sha256", digest]
    process = await asyncio.create_subprocess_exec(
        *words,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=None if env is None else dict(env),
        cwd=cwd,
        limit=LINE_BYTES,
    )
    try:
        yield RunningServer(await _url(process), process.pid)
    finally:
        await _end(process)


async def _url(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    try:
        async with asyncio.timeout(READY_SECONDS):
            line = await process.stdout.readline()
    except (TimeoutError, ValueError):
        raise StartupError("the server did not say where it listens") from None
    if not line:
        raise StartupError("the server did not start; it says why on stderr")
    return line.decode().strip()


async def _end(process: asyncio.subprocess.Process) -> None:
    """End it and all of its processes: by its stdin, else by force."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(END_SECONDS):
            await process.communicate()  # which also waits for the end of its stdout
    except TimeoutError:
        pass
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
            await process.wait()
