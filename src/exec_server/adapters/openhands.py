"""ExecServerWorkspace: a machine as a workspace of the OpenHands SDK.

It is a `LocalWorkspace`, because a conversation whose agent runs in this program accepts no other.
Tools have to use the workspace; those of `openhands-tools` work on this machine instead.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable
from pathlib import Path
from typing import Any

from exec_server.adapters.target import (
    UNREACHABLE,
    configured_files,
    framework_missing,
    open_environment,
    stored_options,
)
from exec_server.client.exceptions import Timeout
from exec_server.client.results import Result, Transfer
from exec_server.errors import ExecServerError
from exec_server.sync import Environment
from exec_server.sync.files import Files

try:
    from openhands.sdk.git.models import GitChange, GitChangeStatus, GitDiff
    from openhands.sdk.workspace.local import LocalWorkspace
    from openhands.sdk.workspace.models import CommandResult, FileOperationResult
    from pydantic import ConfigDict, PrivateAttr

    from exec_server.adapters.stored_machine import StoredMachine
except ImportError as error:
    raise framework_missing("openhands-sdk on Python 3.12 or later", "openhands", error) from error

_STATUS = {"A": "ADDED", "D": "DELETED", "R": "MOVED", "?": "ADDED"}


class ExecServerWorkspace(LocalWorkspace, StoredMachine):
    """A directory of a machine; it connects at first use, and leaving its `with` disconnects.

    Workspaces are stored, so the machine has its token in an environment variable.
    """

    model_config = ConfigDict(extra="forbid")

    _environment: Environment | None = PrivateAttr(default=None)

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self._send_completion_callback(kind, error)
        self.close()

    def close(self) -> None:
        """Kill all processes and end the connection; the next use makes a new one."""
        environment, self._environment = self._environment, None
        if environment is not None:
            environment.close()

    @property
    def environment(self) -> Environment:
        """The environment of the client; connects at first use."""
        if self._environment is None:
            self._environment = open_environment(self.target, stored_options(self))
        return self._environment

    @property
    def _files(self) -> Files:
        files = self.environment.files
        return configured_files(files, self.user, self.sandbox, self.working_dir)

    def execute_command(
        self, command: str, cwd: str | Path | None = None, timeout: float = 30.0
    ) -> CommandResult:
        """Run a text of bash; after `timeout` seconds it is killed, with exit code -1.

        A machine out of reach is that exit code too, as in the SDK's own remote workspace.
        """
        try:
            done = self._run(["bash", "-c", command], cwd, timeout)
        except Timeout as late:
            return _command_result(command, late.result, timed_out=True)
        except UNREACHABLE as error:
            return CommandResult(
                command=command,
                exit_code=-1,
                stdout="",
                stderr=f"Remote execution error: {error}",
                timeout_occurred=False,
            )
        return _command_result(command, done)

    def _run(self, argv: list[str], cwd: str | Path | None, timeout: float | None) -> Result:
        return self.environment.run(
            argv,
            cwd=posixpath.join(self.working_dir, str(cwd or "")),
            timeout=timeout,
            user=self.user,
            sandbox=self.sandbox,
        )

    def file_upload(
        self, source_path: str | Path, destination_path: str | Path
    ) -> FileOperationResult:
        target = self._path(destination_path)

        def upload() -> Transfer:
            self._files.mkdir(posixpath.dirname(target), parents=True, exist_ok=True)
            return self._files.upload(source_path, target)

        return _operation(source_path, target, upload)

    def file_download(
        self, source_path: str | Path, destination_path: str | Path
    ) -> FileOperationResult:
        source = self._path(source_path)

        def download() -> Transfer:
            Path(destination_path).parent.mkdir(parents=True, exist_ok=True)
            return self._files.download(source, destination_path)

        return _operation(source, destination_path, download)

    def git_changes(self, path: str | Path) -> list[GitChange]:
        """The changes below a directory since the last commit, by `git` on the machine.

        Paths are relative to the directory, as in the SDK's own workspace.
        """
        prefix = self._git(["git", "rev-parse", "--show-prefix"], path).text.removesuffix("\n")
        argv = ["git", "status", "--porcelain=v1", "-z", "--untracked-files=all", "--", "."]
        words = self._git(argv, path).text.split("\0")
        changes = []
        while words and words[0]:
            entry = words.pop(0)
            letter = entry[:2].strip()[:1]
            if not {"R", "C"}.isdisjoint(entry[:2]):
                words.pop(0)  # the old name of a renamed or copied file
            status = GitChangeStatus[_STATUS.get(letter, "UPDATED")]
            changes.append(GitChange(status=status, path=Path(entry[3:].removeprefix(prefix))))
        return changes

    def git_diff(self, path: str | Path) -> GitDiff:
        """The content of a file in the last commit, and now; what is not UTF-8 is replaced."""
        target = self._path(path)
        folder, name = posixpath.split(target)
        shown = self._run(["git", "show", f"HEAD:./{name}"], folder, None)
        try:
            modified: str | None = self._files.read_text(target, errors="replace")
        except FileNotFoundError:
            modified = None
        return GitDiff(original=shown.text if shown else None, modified=modified)

    def _git(self, argv: list[str], path: str | Path) -> Result:
        done = self._run(argv, path, None)
        if not done:
            raise RuntimeError(f"{' '.join(argv)} failed in {path}: {done.error_text.strip()}")
        return done

    def _path(self, path: str | Path) -> str:
        return posixpath.join(self.working_dir, str(path))

    def pause(self) -> None:
        """Do nothing: processes go on, and an idle machine needs no pause."""

    def resume(self) -> None:
        """Do nothing; see `pause`."""


def _command_result(command: str, done: Result, *, timed_out: bool = False) -> CommandResult:
    return CommandResult(
        command=command,
        exit_code=-1 if timed_out else done.exit_code,
        stdout=done.text,
        stderr=done.error_text,
        timeout_occurred=timed_out,
    )


def _operation(
    source: str | Path, target: str | Path, copy: Callable[[], Transfer]
) -> FileOperationResult:
    paths = {"source_path": str(source), "destination_path": str(target)}
    try:
        done = copy()
    except (ExecServerError, OSError) as error:
        return FileOperationResult(success=False, error=str(error), **paths)
    return FileOperationResult(success=True, file_size=done.copied_bytes, **paths)
