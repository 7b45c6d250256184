"""One confined executor for each agent session, in a directory of its own.

An executor runs in a container of bubblewrap: it sees system programs, its Python environment and
the directories of its session, and no process of the machine. Inside, it can still make the
sandboxes that a harness asks for.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import posixpath
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import exec_server

log = logging.getLogger("cloud-agents")

# What an id of the API may be; longer ones and other characters are refused.
ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
# Programs and settings of the machine that a session sees, all of them read-only.
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/run/systemd/resolve")
HOME = "/home/agent"
# Directories that a workspace cannot be, hold or be in, beside those of SYSTEM.
RESERVED = ("/dev", "/proc", "/tmp", HOME)
# A uid inside the container. As root, an executor without capabilities could make no sandboxes.
USER = "1000"
# How long an executor may take to end its commands before it is killed.
STOP_SECONDS = 5.0
# The last bytes of stderr are enough for the reason of an exit.
ERROR_BYTES = 4096
# `CODEX_API_KEY` comes on stdin: in the environment of bubblewrap, which is process 1 of the
# container, every command of the agent could read it.
START = 'IFS= read -r CODEX_API_KEY && export CODEX_API_KEY && exec "$@"'


class Unusable(Exception):
    """The API asks for something that this machine does not do."""


@dataclass(frozen=True)
class Place:
    """Where a session keeps its files. The name is a hash: an id of the API is never a path."""

    folder: Path
    session_id: str

    @classmethod
    def create(cls, root: Path, session_id: str) -> Place:
        place = cls(root / hashlib.sha256(session_id.encode()).hexdigest()[:32], session_id)
        for directory in (place.folder, place.workspace, place.home):
            directory.mkdir(mode=0o700, exist_ok=True)
        record = place.folder / "session.json.new"
        record.write_text(json.dumps({"id": session_id}))
        record.rename(place.folder / "session.json")  # complete, or not there
        return place

    @classmethod
    def recorded(cls, root: Path) -> Iterator[Place]:
        """The sessions of earlier runs of the service."""
        for record in root.glob("*/session.json"):
            try:
                yield cls(record.parent, str(json.loads(record.read_text())["id"]))
            except (ValueError, LookupError, TypeError):  # such as an empty file, after a power cut
                log.error("%s is no record; remove its directory by hand", record)

    @property
    def workspace(self) -> Path:
        return self.folder / "workspace"

    @property
    def home(self) -> Path:
        return self.folder / "home"

    async def remove(self) -> None:
        """Remove all files, also deep trees and directories that the agent has closed."""
        # The record goes last: a removal that is interrupted is repeated at the next start.
        files = [str(self.workspace), str(self.home)]
        for argv in (
            ["chmod", "-R", "u+rwX", "--", *files],
            ["rm", "-rf", "--", *files],
            ["rm", "-rf", "--", str(self.folder)],
        ):
            process = await asyncio.create_subprocess_exec(*argv, stderr=asyncio.subprocess.DEVNULL)
            try:
                await process.wait()
            finally:
                if process.returncode is None:  # the service ends
                    process.kill()
                    await process.wait()
        if self.folder.exists():
            raise OSError(f"{self.folder} cannot be removed")


@dataclass(frozen=True)
class Connection:
    """What an executor needs to know, as the API says it."""

    environment_id: str
    remote_url: str
    workspace_directory: str

    def check(self) -> None:
        """Raises Unusable, with the reason."""
        if not all(isinstance(value, str) for value in vars(self).values()):
            raise Unusable("the environment has members that are no texts")
        if not ID.fullmatch(self.environment_id):
            raise Unusable(f"the environment id {self.environment_id!r} is not one")
        if not self.remote_url.isprintable():
            raise Unusable("the remote URL contains control characters")
        path = self.workspace_directory
        is_plain = posixpath.normpath(path) == path and path.isprintable() and path[:2] != "//"
        if not path.startswith("/") or path == "/" or not is_plain:
            raise Unusable(f"the workspace directory {path!r} is not an absolute, plain path")
        for taken in (*SYSTEM, *RESERVED, *_python_directories()):
            if path == taken or path.startswith(f"{taken}/") or taken.startswith(f"{path}/"):
                raise Unusable(f"the workspace directory {path} is or has a part of {taken}")


@dataclass(frozen=True)
class Launcher:
    """How executors are started: the container program, the key, and what all sessions may read."""

    bwrap: str
    key: str = field(repr=False)
    readable: Sequence[str] = ()

    def argv(self, place: Place, connection: Connection) -> list[str]:
        shown = [*SYSTEM, *_python_directories(), *self.readable]
        mounts = [word for path in shown for word in ("--ro-bind-try", path, path)]
        mounts += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
        mounts += ["--bind", str(place.home), HOME]
        mounts += ["--bind", str(place.workspace), connection.workspace_directory]
        limits = ["--unshare-user", "--uid", USER, "--gid", USER, "--cap-drop", "ALL"]
        limits += ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--new-session"]
        limits += ["--die-with-parent", "--remount-ro", "/"]
        # One word each, so that no value is taken for a flag.
        executor = [sys.executable, "-P", "-m", "exec_server", f"--remote={connection.remote_url}"]
        executor += [f"--environment-id={connection.environment_id}"]
        # A key file would be in reach of the agent's commands.
        executor += ["--key-file=none", "--exit-on-stdin-close"]
        inside = ["--chdir", connection.workspace_directory, "--", "sh", "-c", START, "sh"]
        return [self.bwrap, *mounts, *limits, *inside, *executor]

    async def start(self, place: Place, connection: Connection) -> Executor:
        """Raises Unusable, or OSError if there is no container program."""
        connection.check()
        process = await asyncio.create_subprocess_exec(
            *self.argv(place, connection),
            env=_variables(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdin is not None
        process.stdin.write(f"{self.key}\n".encode())
        return Executor(process)


class Executor:
    """A running executor. It ends when its stdin is closed, and so with the service."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._errors = b""

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    def reason(self) -> str:
        """The exit code and the last line that it printed."""
        lines = self._errors.decode(errors="replace").strip().splitlines() or [""]
        shown = "".join(c if c.isprintable() else "?" for c in lines[-1])
        return f"exit code {self._process.returncode}: {shown}"

    async def wait(self) -> None:
        assert self._process.stderr is not None
        while chunk := await self._process.stderr.read(ERROR_BYTES):
            self._errors = (self._errors + chunk)[-ERROR_BYTES:]
        await self._process.wait()

    async def stop(self) -> None:
        """End it with all commands of the agent; by force if it takes too long."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self._process.wait()
        except TimeoutError:
            pass
        finally:  # also when the service ends meanwhile
            if self._process.returncode is None:
                # The kernel ends everything in the container with its first process.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                await self._process.wait()


def _python_directories() -> list[str]:
    """The environment of this service, which has exec-server too."""
    package = Path(exec_server.__file__).resolve().parents[1]
    return sorted({sys.prefix, sys.base_prefix, str(package)})


def _variables() -> dict[str, str]:
    """Nothing of the service's environment, which has keys, but what TLS and proxies need."""
    passed = ("LANG", "SSL_CERT_FILE", "CODEX_CA_CERTIFICATE", "HTTPS_PROXY", "NO_PROXY", "TZ")
    kept = {name: os.environ[name] for name in passed if name in os.environ}
    return {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": HOME, "SHELL": "/bin/bash", **kept}
