"""ExecServerWorkspace: a directory of a machine as a workspace backend of Pydantic AI.

It is a new temporary directory or that of a `WorkspaceRef`, and stays until `destroy`.
"""

from __future__ import annotations

import asyncio
import errno
import posixpath
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final, Unpack

from exec_server.adapters.target import (
    configured_files,
    framework_missing,
    make_environment,
    unreachable_as,
)
from exec_server.client.arguments import AnySandbox, PathResolver, native
from exec_server.client.connect import ConnectOptions
from exec_server.client.environment import Environment
from exec_server.client.exceptions import ProgramNotFound, Timeout, WorkingDirectoryNotFound
from exec_server.client.files import Files
from exec_server.client.results import Result
from exec_server.errors import InvalidRequest

try:
    from pydantic_ai.workspaces import (
        CommandResult,
        FileEntry,
        WorkspaceCommand,
        WorkspaceRef,
        WorkspaceTimeoutError,
        WorkspaceUnavailableError,
    )
    from pydantic_ai.workspaces.protocol import validate_timeout
except ImportError as error:
    raise framework_missing("pydantic-ai-slim", "pydantic-ai", error) from error

PROVIDER: Final = "exec-server"
_NOT_FOUND: Final = 127


class ExecServerWorkspace:
    """A workspace on a machine; it connects at first use, and `close` ends the connection.

    Without `target` and `registry` it is on this machine, through a server of its own.
    """

    def __init__(
        self,
        target: str | None = None,
        *,
        ref: WorkspaceRef | None = None,
        sandbox: AnySandbox | None = None,
        user: str | None = None,
        **options: Unpack[ConnectOptions],
    ) -> None:
        """`ref` names an existing directory; `sandbox` confines commands and files to it.

        `user` is the user of commands and files, for a server with the rights of root.
        """
        self._user = user
        self._target = target
        self._options: ConnectOptions = {"reconnect": True, **options}
        self._sandbox = sandbox
        self._ref = ref
        self._is_attached = ref is not None
        self._environment: Environment | None = None
        self._directory: str | None = None
        self._lock = asyncio.Lock()  # held while the connection and the directory are made

    @property
    def ref(self) -> WorkspaceRef | None:
        """The directory, once there is one."""
        return self._ref

    async def working_dir(self) -> str:
        async with self._opened() as (_, directory):
            return directory

    async def close(self) -> None:
        """End the connection; the directory stays."""
        async with self._lock:
            environment, self._environment = self._environment, None
            self._directory = None
        if environment is not None:
            await environment.aclose()

    async def destroy(self) -> None:
        """Delete the directory, and end the connection."""
        async with self._opened() as (environment, directory):
            files = self._own_files(environment)
            await files.remove(directory, recursive=True, missing_ok=True)
        await self.close()

    async def run(
        self,
        command: WorkspaceCommand,
        *,
        shell: bool = False,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - of the protocol
    ) -> CommandResult:
        if isinstance(command, str) != shell:
            raise TypeError("a text needs shell=True, a list of words shell=False")
        validate_timeout(timeout)
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        async with self._opened() as (environment, directory):
            try:
                done = await environment.run(
                    argv,
                    cwd=directory,
                    env=env,
                    timeout=timeout,
                    sandbox=self._sandbox,
                    user=self._user,
                )
            except ProgramNotFound as error:
                return CommandResult(exit_code=_NOT_FOUND, stdout="", stderr=f"{error}\n")
            except WorkingDirectoryNotFound:
                raise _gone(directory) from None
            except Timeout as late:
                await self._check_directory()
                raise WorkspaceTimeoutError(
                    str(late), stdout=late.result.text, stderr=late.result.error_text
                ) from None
            # A deleted directory leaves its commands running.
            await self._check_directory()
        return _command_result(done)

    # Paths of the framework are absolute; a relative one starts where commands start.

    async def read_bytes(self, path: str) -> bytes:
        async with self._files(path) as (files, whole):
            try:
                return await files.read(whole)
            except InvalidRequest as error:
                if isinstance(error, OSError):
                    raise
                raise OSError(errno.EINVAL, error.message, path) from None  # such as a FIFO

    async def write_bytes(self, path: str, data: bytes) -> None:
        async with self._files(path) as (files, whole):
            try:
                await files.write(whole, data)
            except FileNotFoundError:
                await self._check_directory()
                await files.write(whole, data, parents=True)

    async def stat(self, path: str) -> FileEntry:
        async with self._files(path) as (files, whole):
            found = await files.stat(whole)
        size = found.size if found.is_file else None
        name = posixpath.basename(whole.rstrip("/"))
        return FileEntry(name=name, path=whole, is_dir=found.is_directory, size=size)

    async def list_dir(self, path: str) -> Sequence[FileEntry]:
        async with self._files(path) as (files, whole):
            entries = await files.list(whole)
        return [
            FileEntry(
                name=entry.name,
                path=entry.path,
                is_dir=entry.is_directory,
                size=entry.size if entry.is_file else None,
            )
            for entry in entries
        ]

    async def make_dir(self, path: str) -> None:
        async with self._files(path) as (files, whole):
            await self._check_directory()
            await files.mkdir(whole, parents=True, exist_ok=True)

    async def remove(self, path: str) -> None:
        directory = await self.working_dir()
        async with self._files(path) as (files, whole):
            parent, name = posixpath.split(whole.rstrip("/"))
            above = await files.realpath(parent or "/", strict=False)
            removed = posixpath.normpath(posixpath.join(above, name))
            if f"{directory}/".startswith(f"{removed.rstrip('/')}/"):
                raise ValueError(f"{path} is the working directory, or above it")
            await files.remove(removed, recursive=True)

    async def exists(self, path: str) -> bool:
        async with self._files(path) as (files, whole):
            if await files.exists(whole):
                return True
            await self._check_directory()
            return False

    async def realpath(self, path: str) -> str:
        async with self._files(path) as (files, whole):
            return await files.realpath(whole, strict=False)

    @asynccontextmanager
    async def _files(self, path: str) -> AsyncIterator[tuple[Files, str]]:
        """The files of the machine, and the absolute path without `..`."""
        async with self._opened() as (environment, directory):
            files = configured_files(environment.files, self._user, self._sandbox, directory)
            paths = PathResolver(environment.info)
            paths.cwd = directory
            whole = await _without_dotdot(files, paths.absolute(path))
            try:
                yield files, whole
            except FileNotFoundError:
                await self._check_directory()
                raise

    async def _check_directory(self) -> None:
        """Raise WorkspaceUnavailableError if the directory was deleted: none is made instead."""
        async with self._opened() as (environment, directory):
            if not await environment.files.exists(directory):
                raise _gone(directory)

    def _own_files(self, environment: Environment) -> Files:
        return configured_files(environment.files, self._user, None)

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[tuple[Environment, str]]:
        """The environment and the directory; an unreachable machine is an unavailable one."""
        with unreachable_as(WorkspaceUnavailableError):
            async with self._lock:
                if self._environment is None:
                    self._environment = await make_environment(self._target, self._options)
                if self._directory is None:
                    self._directory = await self._find_directory(self._environment)
                opened = self._environment, self._directory
            yield opened

    async def _find_directory(self, environment: Environment) -> str:
        if self._ref is None:
            # Its name is chosen here, so it is known even if this is cancelled.
            parent = await environment.files.realpath(native(environment.info.temp_dir))
            path = f"{parent.rstrip('/')}/exec-server-{uuid.uuid4().hex}"
            self._ref = WorkspaceRef(provider=PROVIDER, id=path)
        path = self._ref.id
        if not self._is_attached:
            await self._own_files(environment).mkdir(path, exist_ok=True)
            self._is_attached = True
        try:
            return await environment.files.realpath(path)
        except FileNotFoundError:
            raise _gone(path) from None


async def _without_dotdot(files: Files, path: str) -> str:
    """The path with each `..` resolved as the kernel does: behind a link, from its target.

    The client would remove it as text, and so change another file than the one that was checked.
    """
    before, dotdot, after = f"{path}/".rpartition("/../")
    if not dotdot:
        return path
    real = await files.realpath(f"{before}/..", strict=False)
    return posixpath.join(real, after).rstrip("/") or "/"


def _gone(directory: str) -> WorkspaceUnavailableError:
    return WorkspaceUnavailableError(f"the workspace {directory} does not exist any more")


def _command_result(done: Result) -> CommandResult:
    if done.lost_bytes:
        raise WorkspaceUnavailableError(f"{done.lost_bytes} bytes of output were lost")
    return CommandResult(exit_code=done.exit_code, stdout=done.text, stderr=done.error_text)
