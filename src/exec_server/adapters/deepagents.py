"""ExecServerSandbox: a machine as a deepagents backend; `BaseSandbox` tools need its `python3`."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, Final, Unpack

from exec_server.adapters.target import configured_files, framework_missing, open_environment
from exec_server.client.arguments import AnySandbox
from exec_server.client.commands import OutputLimit
from exec_server.client.connect import ConnectOptions
from exec_server.client.environment import Environment
from exec_server.client.exceptions import NameTooLong, Timeout
from exec_server.client.results import FileContent, Result, Transfer
from exec_server.errors import ExecServerError, InvalidParams
from exec_server.sync.files import Files

try:
    from deepagents.backends.protocol import (
        ExecuteResponse,
        FileDownloadResponse,
        FileUploadResponse,
    )
    from deepagents.backends.sandbox import BaseSandbox
except ImportError as error:
    raise framework_missing("deepagents", "deepagents", error) from error

# The time of a command without one of its own; other backends take the same.
TIMEOUT_SECONDS: Final = 30 * 60
# Both ends of longer output are kept: the tools of BaseSandbox print less than a megabyte.
OUTPUT: Final = OutputLimit(head=8 * 1_048_576, tail=8 * 1_048_576)
_TIMED_OUT: Final = 124
_INVALID: Final = "invalid_path"


class ExecServerSandbox(BaseSandbox):
    """A machine, connected when this is made; `close`, or leaving its `with`, kills its processes.

    Without `target` and `registry` it is this machine, through a server of its own.
    """

    def __init__(
        self,
        target: str | None = None,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = TIMEOUT_SECONDS,
        sandbox: AnySandbox | None = None,
        user: str | None = None,
        **options: Unpack[ConnectOptions],
    ) -> None:
        """`cwd`, `env` and `timeout` are those of commands; `sandbox` confines them and files.

        `user` is the user of commands and files, for a server with the rights of root.
        """
        self._id = f"exec-server-{uuid.uuid4().hex}"
        self._cwd = cwd
        self._env = env
        self._timeout = timeout
        self._sandbox = sandbox
        self._user = user
        self._environment = open_environment(target, {"reconnect": True, **options})

    def close(self) -> None:
        """Kill all processes and end the connection."""
        self._environment.close()

    def __enter__(self) -> ExecServerSandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def id(self) -> str:
        return self._id

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """Run a text of shell commands; 0 is no time limit, None the one of this sandbox."""
        try:
            done = self._environment.shell(command, **self._shell_options(timeout))
        except Timeout as late:
            return _timed_out(late)
        return _response(done)

    async def aexecute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:  # noqa: ASYNC109 - of the framework
        """The same; a cancelled call kills the command, which one in a thread would not."""
        options = self._shell_options(timeout)
        try:
            done = await self._environment.awaited(Environment.shell, command, **options)
        except Timeout as late:
            return _timed_out(late)
        return _response(done)

    def _shell_options(self, timeout: int | None) -> dict[str, Any]:
        return {
            "cwd": self._cwd,
            "env": self._env,
            "timeout": self._timeout if timeout is None else timeout or None,
            "sandbox": self._sandbox,
            "user": self._user,
            "merge_stderr": True,
            "output_limit": OUTPUT,
        }

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        """Write files and missing directories; an error is a code in its response."""
        errors = {path: _INVALID for path, _ in files if not path.startswith("/")}
        named = [(path, content) for path, content in files if path not in errors]
        try:
            done: Transfer = self._files.write_many(named, parents=True, check=False)
            errors |= {each.path: _code(each.error) for each in done.failed}
        except ExecServerError as failure:
            errors |= {path: _code(failure) for path, _ in named}
        return [FileUploadResponse(path=path, error=errors.get(path)) for path, _ in files]

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        """Read files; an error is a code in its response."""
        errors = {path: _INVALID for path in paths if not path.startswith("/")}
        named = [path for path in paths if path not in errors]
        contents: dict[str, bytes] = {}
        try:
            found: list[FileContent] = self._files.read_many(named, check=False)
            errors |= {each.path: _code(each.error) for each in found if each.error is not None}
            contents = {each.path: each.data for each in found if each.error is None}
        except ExecServerError as failure:
            errors |= {path: _code(failure) for path in named}
        return [
            FileDownloadResponse(path=path, content=contents.get(path), error=errors.get(path))
            for path in paths
        ]

    @property
    def _files(self) -> Files:
        return configured_files(self._environment.files, self._user, self._sandbox, self._cwd)


def _response(done: Result) -> ExecuteResponse:
    return ExecuteResponse(
        output=_text(done), exit_code=done.exit_code, truncated=done.lost_bytes > 0
    )


def _timed_out(late: Timeout) -> ExecuteResponse:
    is_over = late.was_sent and late.is_killed
    reason = f"the command was killed after {late.seconds:g} s" if is_over else str(late)
    text = f"{_text(late.result)}\n{reason}"
    is_cut = late.result.lost_bytes > 0
    return ExecuteResponse(output=text, exit_code=_TIMED_OUT, truncated=is_cut)


def _text(done: Result) -> str:
    """The output, with a line where its middle is left out."""
    if not done.lost_stdout:
        return done.text
    head = done.stdout[: OUTPUT.head].decode(errors="replace")
    tail = done.stdout[OUTPUT.head :].decode(errors="replace")
    return f"{head}\n[… {done.lost_stdout} bytes left out …]\n{tail}"


def _code(failure: Exception) -> str:
    """The code of an error, or its text if it has none."""
    match failure:
        case FileNotFoundError():
            return "file_not_found"
        case PermissionError():
            return "permission_denied"
        case IsADirectoryError():
            return "is_directory"
        case NotADirectoryError() | NameTooLong() | InvalidParams():
            return _INVALID
    return str(failure)
