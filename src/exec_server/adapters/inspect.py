"""ExecServerSandboxEnvironment: a machine as the sandbox `exec-server` of Inspect AI.

Each sample gets a directory of its own, and its processes end with it. Inspect has to run on
asyncio, its default, and not on trio.
"""

from __future__ import annotations

import posixpath
import shlex
import uuid
from functools import partial
from typing import Any, Final, Literal, overload

from exec_server.adapters.target import (
    UNREACHABLE,
    ServerUser,
    configured_files,
    exec_words,
    framework_missing,
    make_environment,
    stored_options,
    unreachable_as,
)
from exec_server.client.arguments import native
from exec_server.client.commands import OutputLimit
from exec_server.client.environment import Environment
from exec_server.client.exceptions import NotEmpty, ProgramNotFound, Timeout
from exec_server.client.files import Files
from exec_server.client.results import Result
from exec_server.errors import InvalidParams, InvalidRequest, Unsupported
from exec_server.protocol.process import TERMINATE, TerminateParams

try:
    from inspect_ai.util import (
        ExecResult,
        OutputLimitExceededError,
        SandboxConnection,
        SandboxEnvironment,
        SandboxEnvironmentLimits,
        SandboxUnavailableError,
        SandboxUserUnsupportedError,
        sandboxenv,
    )
    from pydantic import ConfigDict

    from exec_server.adapters.stored_machine import StoredMachine
except ImportError as error:
    raise framework_missing("inspect-ai", "inspect", error) from error

# Attempts to delete the directory of a sample. A child that is just being killed, or one of a
# command that the server has forgotten, can create a file meanwhile: the first attempt fails then.
DELETIONS: Final = 20

_NOT_FOUND = 127
_reaching = partial(unreachable_as, SandboxUnavailableError)


class ExecServerSandboxConfig(StoredMachine):
    """The machine of a sample, which Inspect logs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __hash__(self) -> int:
        """Inspect has configurations in sets; a `sandbox` object cannot be hashed by itself."""
        return hash(self.model_dump_json())


@sandboxenv(name="exec-server")
class ExecServerSandboxEnvironment(SandboxEnvironment):
    """The directory of one sample on a machine."""

    def __init__(
        self, environment: Environment, directory: str, config: ExecServerSandboxConfig
    ) -> None:
        super().__init__()
        self._environment = environment
        self._directory = directory
        self._config = config
        self._server_user = ServerUser()

    @classmethod
    async def sample_init(
        cls, task_name: str, config: Any, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        settings = _settings(config)
        with _reaching():
            environment = await make_environment(settings.target, stored_options(settings))
        try:
            settings = await _without_own_user(environment, settings)
            parent = await environment.files.realpath(native(environment.info.temp_dir))
            directory = f"{parent.rstrip('/')}/inspect-{uuid.uuid4().hex}"
            await configured_files(environment.files, settings.user, None).mkdir(directory)
        except BaseException:
            await environment.aclose()
            raise
        return {"default": cls(environment, directory, settings)}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: Any,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        for sandbox in environments.values():
            await sandbox.as_type(ExecServerSandboxEnvironment).close()

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> ExecServerSandboxConfig:
        return ExecServerSandboxConfig(**config)

    def default_polling_interval(self) -> float:
        return 0.2

    async def close(self) -> None:
        """Kill the processes, delete the directory, end the connection."""
        try:
            await self._kill_processes()
            await self._delete_directory()
        except UNREACHABLE:
            pass  # the machine is gone
        finally:
            await self._environment.aclose()

    async def _kill_processes(self) -> None:
        """Kill the commands and their children, which could create files in the directory."""
        environment = self._environment
        if environment.capabilities.process_list:  # otherwise they end with the connection
            for each in await environment.processes():
                params = TerminateParams(each.process_id)
                await environment.call(TERMINATE, params, is_retryable=True)

    async def _delete_directory(self) -> None:
        files, attempt = self._environment.files, 0
        while True:
            try:
                await files.remove(self._directory, recursive=True, missing_ok=True)
            except NotEmpty:
                attempt += 1
                if attempt == DELETIONS:
                    raise
            else:
                return

    async def connection(self, *, user: str | None = None) -> SandboxConnection:
        words = exec_words(self._config, await self._command_user(user))
        shell = f"cd {shlex.quote(self._directory)} && exec sh"
        return SandboxConnection(
            type="exec-server", command=shlex.join([*words, "sh", "-c", shell])
        )

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,  # noqa: A002 - of the framework
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,  # noqa: ASYNC109 - of the framework
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        limit = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
        name = await self._command_user(user)
        try:
            with _reaching():
                done = await self._environment.run(
                    cmd,
                    cwd=self._path(cwd or "."),
                    env=env,
                    input=input.encode() if isinstance(input, str) else input,
                    timeout=timeout,
                    user=name,
                    sandbox=self._config.sandbox,
                    output_limit=OutputLimit(head=limit),
                    leave_running=True,
                )
        except ProgramNotFound as error:
            return ExecResult(False, _NOT_FOUND, "", f"{error}\n")
        except Timeout as late:
            raise TimeoutError(str(late)) from None
        except Unsupported as error:
            if error.capability == "otherUsers":
                raise SandboxUserUnsupportedError(str(error)) from None
            raise
        except InvalidParams as error:
            if "unknown user" in error.message:
                return ExecResult(False, 1, "", f"{error}\n")
            raise
        return _exec_result(done)

    async def _command_user(self, user: str | None) -> str | None:
        """The user of a command, None for that of the server itself.

        Raises SandboxUserUnsupportedError if a sandbox, which has the server's user, excludes it.
        """
        name = user or self._config.user
        is_confined = self._config.sandbox is not None
        if name is None or (self._environment.capabilities.other_users and not is_confined):
            return name
        with _reaching():
            is_own = await self._server_user.has_name(self._environment, name)
        if not is_own and is_confined:
            raise SandboxUserUnsupportedError(f"the sandbox excludes commands as {name}")
        return None if is_own else name

    def _path(self, path: str) -> str:
        return posixpath.join(self._directory, path)

    @property
    def _own_files(self) -> Files:
        config = self._config
        return configured_files(
            self._environment.files, config.user, config.sandbox, self._directory
        )

    async def write_file(self, file: str, contents: str | bytes) -> None:
        data = contents.encode() if isinstance(contents, str) else contents
        with _reaching():
            await self._own_files.write(self._path(file), data, parents=True)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        files, path = self._own_files, self._path(file)
        try:
            with _reaching():
                data = await files.read(path, limit=limit)
        except InvalidRequest as error:
            if not isinstance(error, OSError) and (await files.stat(path)).size > limit:
                shown = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR
                raise OutputLimitExceededError(shown, None) from None
            raise
        return data.decode() if text else data


def _settings(config: Any) -> ExecServerSandboxConfig:
    if config is None:
        return ExecServerSandboxConfig()
    if isinstance(config, str):
        return ExecServerSandboxConfig(target=config)
    assert isinstance(config, ExecServerSandboxConfig)
    return config


async def _without_own_user(
    environment: Environment, settings: ExecServerSandboxConfig
) -> ExecServerSandboxConfig:
    """Remove the user if it is that of a server which knows no other one."""
    if settings.user is None or environment.capabilities.other_users:
        return settings
    if not await ServerUser().has_name(environment, settings.user):
        return settings
    changed: ExecServerSandboxConfig = settings.model_copy(update={"user": None})
    return changed


def _exec_result(done: Result) -> ExecResult[str]:
    if done.lost_stdout or done.lost_stderr:
        cut = done.text if done.lost_stdout else done.error_text
        raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, cut)
    return ExecResult(done.exit_code == 0, done.exit_code, done.text, done.error_text)
