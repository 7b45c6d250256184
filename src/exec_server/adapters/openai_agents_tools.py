"""Light tools of the OpenAI Agents SDK: an executor for ShellTool, an editor for ApplyPatchTool."""

from __future__ import annotations

import posixpath
from typing import Final

from exec_server.adapters.target import configured_files, framework_missing
from exec_server.client.arguments import AnySandbox
from exec_server.client.commands import OutputLimit
from exec_server.client.environment import Environment
from exec_server.client.exceptions import Timeout
from exec_server.client.results import Result

try:
    from agents import apply_diff
    from agents.editor import ApplyPatchOperation, ApplyPatchResult
    from agents.tool import ShellCallOutcome, ShellCommandOutput, ShellCommandRequest, ShellResult
except ImportError as error:
    raise framework_missing("openai-agents", "openai-agents", error) from error

# Of each stream of a command; the model gets far less.
OUTPUT: Final = OutputLimit(head=1_048_576, tail=1_048_576)


class ExecServerShell:
    """`ShellTool(executor=ExecServerShell(env))`: runs the commands of the model on a machine."""

    def __init__(
        self,
        environment: Environment,
        *,
        cwd: str | None = None,
        sandbox: AnySandbox | None = None,
        user: str | None = None,
    ) -> None:
        self._environment = environment
        self._cwd = cwd
        self._sandbox = sandbox
        self._user = user

    async def __call__(self, request: ShellCommandRequest) -> ShellResult:
        action = request.data.action
        seconds = None if action.timeout_ms is None else action.timeout_ms / 1000
        outputs = []
        for command in action.commands:
            output = await self._run(command, seconds)
            outputs.append(output)
            if output.outcome.type == "timeout":
                break
        return ShellResult(output=outputs, max_output_length=action.max_output_length)

    async def _run(self, command: str, seconds: float | None) -> ShellCommandOutput:
        try:
            done = await self._environment.shell(
                command,
                cwd=self._cwd,
                sandbox=self._sandbox,
                user=self._user,
                timeout=seconds,
                output_limit=OUTPUT,
            )
        except Timeout as late:
            return _output(command, late.result, ShellCallOutcome(type="timeout"))
        outcome = ShellCallOutcome(type="exit", exit_code=done.exit_code)
        return _output(command, done, outcome)


class ExecServerEditor:
    """`ApplyPatchTool(editor=ExecServerEditor(env, root))`: edits files below a directory."""

    def __init__(
        self,
        environment: Environment,
        root: str,
        *,
        sandbox: AnySandbox | None = None,
        user: str | None = None,
    ) -> None:
        self._files = configured_files(environment.files, user, sandbox, root)
        self._root = root

    async def create_file(self, operation: ApplyPatchOperation) -> ApplyPatchResult:
        text = apply_diff("", operation.diff or "", mode="create")
        path = await self._file(operation.path)
        await self._files.write(path, text.encode(), parents=True, exclusive=True)
        return ApplyPatchResult(status="completed", output=f"created {operation.path}")

    async def update_file(self, operation: ApplyPatchOperation) -> ApplyPatchResult:
        path = await self._file(operation.path)
        text = apply_diff(await self._files.read_text(path), operation.diff or "")
        target = path
        if operation.move_to is not None:
            target = await self._file(operation.move_to)
        await self._files.write_text(target, text, parents=True)
        if target != path:
            await self._files.remove(await self._entry(operation.path))
        return ApplyPatchResult(status="completed", output=f"updated {operation.path}")

    async def delete_file(self, operation: ApplyPatchOperation) -> ApplyPatchResult:
        await self._files.remove(await self._entry(operation.path))
        return ApplyPatchResult(status="completed", output=f"deleted {operation.path}")

    async def _file(self, path: str) -> str:
        """The file below the root that a path leads to, links included."""
        root = await self._files.realpath(self._root)
        real = await self._files.realpath(posixpath.join(root, path), strict=False)
        return self._below(root, real, path)

    async def _entry(self, path: str) -> str:
        """The entry of a directory below the root that a path names: a link is the link itself."""
        root = await self._files.realpath(self._root)
        directory, name = posixpath.split(posixpath.join(root, path))
        if name in ("", ".", ".."):
            raise ValueError(f"{path} is not the name of a file")
        real = await self._files.realpath(directory, strict=False)
        return self._below(root, posixpath.join(real, name), path)

    def _below(self, root: str, real: str, path: str) -> str:
        if not real.startswith(f"{root.rstrip('/')}/"):
            raise ValueError(f"{path} is not below {self._root}")
        return real


def _output(command: str, done: Result, outcome: ShellCallOutcome) -> ShellCommandOutput:
    return ShellCommandOutput(
        stdout=done.text, stderr=done.error_text, outcome=outcome, command=command
    )
