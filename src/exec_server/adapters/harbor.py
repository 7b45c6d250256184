"""ExecServerEnvironment: a machine as an environment of Harbor.

No image is built: the target has to suit the task. A job names it with `environment: {import_path:
"exec_server.adapters.harbor:ExecServerEnvironment", kwargs: {target: …}}`.
"""

from __future__ import annotations

import codecs
import os
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

from msgspec import structs

from exec_server.adapters.target import (
    ServerUser,
    configured_files,
    framework_missing,
    make_environment,
    take_options,
    unreachable_as,
)
from exec_server.client.arguments import AnySandbox
from exec_server.client.environment import Environment
from exec_server.client.exceptions import NotAllCopied, Timeout
from exec_server.client.files import Files
from exec_server.client.results import Chunk, Transfer
from exec_server.client.transfer.plan import SPECIAL

try:
    from harbor.environments.base import BaseEnvironment, ExecResult
    from harbor.environments.capabilities import EnvironmentCapabilities
except ImportError as error:
    raise framework_missing("harbor on Python 3.12 or later", "harbor", error) from error


class MachineUnavailableError(RuntimeError):
    """The machine is out of reach; `retry.include_exceptions` of a job may name this class.

    Harbor has no error of its own for that.
    """


_reaching = partial(unreachable_as, MachineUnavailableError)


class ExecServerEnvironment(BaseEnvironment):
    """A machine; connected from `start` to `stop`, which kills its processes."""

    def __init__(
        self,
        *arguments: Any,
        target: str | None = None,
        environment_id_at_registry: str | None = None,
        sandbox: AnySandbox | None = None,
        workdir: str | None = None,
        **options: Any,
    ) -> None:
        """`workdir` is the directory of commands without one; `token_env` names a variable.

        `options` are those of Harbor and the MachineOptions of `connect`. The token is not an
        argument, because Harbor stores the arguments.
        """
        self._target = target
        self._sandbox = sandbox
        self._workdir = workdir
        self._connecting = take_options(options)
        if environment_id_at_registry is not None:
            self._connecting["environment_id"] = environment_id_at_registry
        self._environment: Environment | None = None
        self._server_user = ServerUser()
        known = signature(BaseEnvironment.__init__).parameters
        if unknown := sorted(options.keys() - known.keys()):  # Harbor would ignore it
            raise TypeError(f"exec-server has no option {', '.join(unknown)}")
        super().__init__(*arguments, **options)

    @staticmethod
    def type() -> str:
        return "exec-server"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities()

    def _validate_definition(self) -> None:
        """A machine needs no definition."""

    async def start(self, force_build: bool) -> None:
        if self._environment is None:
            environment = make_environment(self._target, self._connecting)
            with _reaching():
                await environment
            self._environment = environment
        with _reaching():
            if self._workdir is not None:
                await self._files().mkdir(self._workdir, parents=True, exist_ok=True)
            await self._make_log_directories()
        await self._upload_environment_dir_after_start()

    async def _make_log_directories(self) -> None:
        """Make what containers get as mounts, such as /logs/agent; all users may write there."""
        if directories := self._mount_targets(writable_only=True):
            command = self._ensure_dirs_command(directories, chmod=True)
            await self._opened.run(["bash", "-c", command], cwd="/", check=True)

    async def stop(self, delete: bool) -> None:
        environment, self._environment = self._environment, None
        if environment is not None:
            await environment.aclose()

    @property
    def _opened(self) -> Environment:
        if self._environment is None:
            raise RuntimeError("the environment is not started")
        return self._environment

    def _files(self, user: str | None = None) -> Files:
        return configured_files(self._opened.files, user, self._sandbox, self._workdir)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        name = await self._user_name(user)
        output = _Output(self._output_callback())
        try:
            with _reaching():
                done = await self._opened.run(
                    ["bash", "-c", command],
                    cwd=cwd or self._workdir,
                    env=self._merge_env(env),
                    timeout=timeout_sec,
                    user=name,
                    sandbox=self._sandbox,
                    on_output=output.emit if output.has_receiver else None,
                )
        except Timeout as late:
            raise RuntimeError(f"{late}: {late.result.head_and_tail(4096)}") from None
        return ExecResult(stdout=done.text, stderr=done.error_text, return_code=done.exit_code)

    async def _user_name(self, user: str | int | None) -> str | None:
        """The user of a command; None for the server's own, which a server without users knows."""
        resolved = self._resolve_user(user)
        name = None if resolved is None else str(resolved)
        if name is None or self._opened.capabilities.other_users:
            return name
        with _reaching():
            is_own = await self._server_user.has_name(self._opened, name)
        return None if is_own else name

    async def is_dir(self, path: str, user: str | int | None = None) -> bool:
        return await self._is_kind(path, user, directory=True)

    async def is_file(self, path: str, user: str | int | None = None) -> bool:
        return await self._is_kind(path, user, directory=False)

    async def _is_kind(self, path: str, user: str | int | None, *, directory: bool) -> bool:
        name = await self._user_name(user)
        try:
            with _reaching():
                found = await self._files(name).stat(path)
        except OSError:
            return False
        return found.is_directory if directory else found.is_file

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        with _reaching():
            await self._make_parent(target_path)
            await self._files().upload(source_path, target_path)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Upload a directory into one that may exist; special files are left out."""
        with _reaching():
            await self._files().mkdir(target_dir, parents=True, exist_ok=True)
            _check_regular(await self._files().upload(source_dir, target_dir, check=False))

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        os.makedirs(os.path.dirname(target_path) or ".", exist_ok=True)
        with _reaching():
            await self._files().download(source_path, target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Download a directory over an existing one; special files are left out."""
        os.makedirs(target_dir, exist_ok=True)
        with _reaching():
            _check_regular(await self._files().download(source_dir, target_dir, check=False))

    async def _make_parent(self, path: str) -> None:
        await self._files().mkdir(os.path.dirname(path) or "/", parents=True, exist_ok=True)


def _check_regular(done: Transfer) -> None:
    """Raise NotAllCopied unless only FIFOs, sockets and devices were not copied."""
    failed = tuple(each for each in done.failed if SPECIAL not in str(each.error))
    if failed:
        raise NotAllCopied(structs.replace(done, failed=failed))


class _Output:
    """Passes output on as text, while the command runs."""

    def __init__(self, emit: Any) -> None:
        self.has_receiver = emit is not None
        self._emit = emit
        make = codecs.getincrementaldecoder("utf-8")
        self._decoders = {name: make("replace") for name in ("stdout", "stderr")}

    async def emit(self, chunk: Chunk) -> None:
        stream = "stderr" if chunk.stream == "stderr" else "stdout"
        if text := self._decoders[stream].decode(chunk.data):
            await self._emit(text, stream)
