"""serve(): a server for this program, from `await` or `async with` to its close.

It is a process of its own, because it reaps every child of its process; it exits when its stdin is
closed, and so does not outlive the program.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Final

from exec_server.client.handle import Handle
from exec_server.errors import StartupError
from exec_server.host import interpreter
from exec_server.host.interpreter import server_words

# Until the server prints its URL, and for its shutdown with all processes.
READY_SECONDS: Final = 20.0
SHUTDOWN_SECONDS: Final = 10.0
# Longest line with the URL.
LINE_BYTES: Final = 4096

DEFAULT_LISTEN: Final = "ws://127.0.0.1:0"


class RunningServer(Handle):
    """A server that `await` or `async with` starts, with its URL and its process id."""

    url: str
    pid: int

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None,
        cwd: str | os.PathLike[str] | None,
    ) -> None:
        super().__init__()
        self._argv = argv
        self._env = None if env is None else dict(env)
        self._cwd = cwd

    def _target(self) -> str:
        return f"{self.url}, pid {self.pid}" if hasattr(self, "pid") else ""

    async def _open(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *self._argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=self._env,
            cwd=self._cwd,
            limit=LINE_BYTES,
        )
        try:
            self.url = await _url(self._process)
        except BaseException:
            await self._close()
            raise
        self.pid = self._process.pid

    async def _close(self) -> None:
        await _stop(self._process)


def serve(
    listen: str = DEFAULT_LISTEN,
    *arguments: str,
    token: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> RunningServer:
    """A server, started by `await` or `async with`; StartupError if it does not start.

    `arguments` are further flags of `exec-server`. With a `token`, only clients that present it
    are accepted. The defaults of `env` and `cwd` are those of this program. The server logs to
    stderr.
    """
    check_platform()
    variables = os.environ if env is None else env
    argv = [*server_words(variables), "--listen", listen, "--exit-on-stdin-close"]
    if token is not None:
        # Only its digest: every user of the machine can read the arguments of a process.
        import hashlib

        digest = hashlib.sha256(token.encode()).hexdigest()
        argv += ["--ws-auth", "capability-token", "--ws-token-sha256", digest]
    return RunningServer([*argv, *arguments], env=env, cwd=cwd)


def check_platform() -> None:
    """Raise StartupError if no server can run on this machine."""
    if not interpreter.has_server():
        raise StartupError(interpreter.SERVER_NEEDS_LINUX)


async def _url(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    try:
        async with asyncio.timeout(READY_SECONDS):
            line = await process.stdout.readline()
    except (TimeoutError, ValueError):
        raise StartupError("the server did not print its URL") from None
    if not line:
        raise StartupError("the server did not start: see its log on stderr")
    return line.decode().strip()


async def _stop(process: asyncio.subprocess.Process) -> None:
    """End the server with all its processes: close its stdin, then kill it."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(SHUTDOWN_SECONDS):
            await process.communicate()  # also waits for the end of its stdout
    except TimeoutError:
        pass
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
