"""ExecServerTools: the tools of Claude Managed Agents, carried out on a machine.

The `EnvironmentWorker` of the package `anthropic` calls it for each session, which gets a directory
and a connection of its own. Tools, names, descriptions and schemas are the package's.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import posixpath
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from inspect import signature
from pathlib import Path
from typing import Any, Final, Unpack

from exec_server.adapters.target import (
    UNREACHABLE,
    configured_files,
    framework_missing,
    make_environment,
)
from exec_server.client.arguments import AnySandbox, environment_dict, path_text
from exec_server.client.commands import OutputLimit
from exec_server.client.connect import ConnectOptions
from exec_server.client.engine.stdio import inherited_variables
from exec_server.client.environment import Environment
from exec_server.client.exceptions import FileError, NotEmpty, NotFound, Timeout
from exec_server.client.files import Files
from exec_server.client.results import Result, ShellResult
from exec_server.client.shell_session import ShellSession, shell_words
from exec_server.errors import ExecServerError
from exec_server.protocol.sandbox import PRESETS

try:
    import anthropic
    import anyio
    from anthropic.lib.tools import BetaAsyncFunctionTool, ToolError, beta_async_tool
    from anthropic.lib.tools import agent_toolset as package
    from anthropic.lib.tools.agent_toolset import AgentToolContext, beta_agent_toolset_20260401

    from exec_server.adapters.claude_managed_agents_files import SessionFiles
except ImportError as error:
    raise framework_missing("anthropic", "claude-managed-agents", error) from error

# The package gives a tool call 150 s and then drops its output. A command with a longer timeout is
# killed before that, so that its output and the reason reach the model.
LONGEST_SECONDS: Final = 140.0
# Until a session is removed, or found to go on, after its last call.
END_SECONDS: Final = 30.0
# Attempts to remove the directory of a session, in which a command that is just being killed can
# create a file.
REMOVALS: Final = 20
# Between two looks at whether the worker has given up the session. A model does not notice it.
TICK_SECONDS: Final = 0.2

_SECRETS: Final = "ANTHROPIC_"
_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,100}")
_COLOURS: Final = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
# The names of variables with a prefix are known to bash alone. A second bash replaces the first,
# because /proc/PID/environ keeps the variables that a program has started with. -p: without
# BASH_ENV and functions of the environment.
_WITHOUT_SECRETS: Final = f'unset "${{!{_SECRETS}@}}"; exec "$0" "$@"'
_BASH: Final = ["/bin/bash", "--noprofile", "--norc", "-p", "-c", _WITHOUT_SECRETS]
log = logging.getLogger(__name__)


class ExecServerTools:
    """The factory that `EnvironmentWorker(tools=…)` calls for each session; it may be shared.

    Without `target` and `registry` commands run on this machine, through a server of its own.
    """

    def __init__(
        self,
        target: str | None = None,
        *,
        root: str = "~/claude-sessions",
        env: Mapping[str, str] | None = None,
        keep_files: bool = True,
        sandbox: AnySandbox | None = None,
        user: str | None = None,
        **options: Unpack[ConnectOptions],
    ) -> None:
        """`root` is the directory of the target in which each session gets one of its own.

        `keep_files` keeps it until the session is terminated or deleted; without it, until the
        worker has finished with the session, which may come back. `env` has variables for commands;
        `sandbox` confines commands and files to the session's directory. `user` is the user of
        commands and files, for a server with the rights of root. Raises NotImplementedError if the
        package has a tool that is unknown here.
        """
        self.env = environment_dict(env)
        refused = [name for name in self.env if name.startswith(_SECRETS)]
        if refused:
            raise ValueError(f"env: commands never get {refused[0]}, nor other {_SECRETS}*")
        if not path_text(root, "root"):
            raise ValueError("root is empty")
        if isinstance(sandbox, str) and sandbox not in PRESETS:
            raise ValueError(f"unknown sandbox {sandbox!r}: use one of {', '.join(PRESETS)}")
        if user is not None and sandbox is not None:
            raise ValueError("user and sandbox exclude each other")
        self.root = root
        self.keep_files = keep_files
        self.sandbox = sandbox
        self.user = user
        self._target = target
        self._options: ConnectOptions = {"reconnect": True, **options}
        self.make_environment()  # invalid options are an error now, not of each session
        _check_tools(beta_agent_toolset_20260401(AgentToolContext()))

    def make_environment(self) -> Environment:
        """An environment to open; a local server does not get the worker's credentials."""
        variables = inherited_variables()
        env = {name: value for name, value in variables.items() if not name.startswith(_SECRETS)}
        return make_environment(self._target, self._options, env)

    def __call__(self, ctx: AgentToolContext) -> list[BetaAsyncFunctionTool[Any]]:
        """The tools of one session; raises ValueError for one that cannot be served."""
        if ctx.allowed_roots:
            raise ValueError(
                "the session has memory stores, which are not copied to the target: "
                "EnvironmentWorker(memory_sync_interval=None) runs it without them"
            )
        session = ManagedSession(self, ctx)
        return [_tool(each, session) for each in beta_agent_toolset_20260401(ctx)]


class ManagedSession:
    """One session: its connection, its directory and its shell, all made at the first call."""

    def __init__(self, tools: ExecServerTools, ctx: AgentToolContext) -> None:
        session_id = ctx.session_id if ctx.session is None else ctx.session.id
        if not session_id:
            raise ValueError("the context names no session")
        self._tools = tools
        self._ctx = ctx
        self._id = session_id
        self.files = SessionFiles(self._opened_files, ctx)
        self._is_closed = False
        self._environment: Environment | None = None
        self._directory: str | None = None
        self._shell: ShellSession | None = None
        self._shell_lock = asyncio.Lock()  # held by a command, and by the start of a shell
        self._open_lock = asyncio.Lock()  # held while the connection and the directory are made
        # The runner shields its tools from cancellation; the worker's own task is cancelled when
        # the lease is lost, the work item is stopped, or the worker ends.
        self._worker = _current_task()
        self._cancellations = 0 if self._worker is None else self._worker.cancelling()

    @property
    def _is_cancelled(self) -> bool:
        return self._worker is not None and self._worker.cancelling() > self._cancellations

    def _check_cancelled(self) -> None:
        if self._is_cancelled:
            raise asyncio.CancelledError("the worker has given up the session")

    async def bash(
        self, command: str | None = None, restart: bool | None = None, timeout_ms: int | None = None
    ) -> str:
        if not restart and not command:
            raise ToolError("bash: there is no command")
        if timeout_ms is not None and timeout_ms < 0:
            raise ToolError(f"bash: timeout_ms must not be negative: {timeout_ms}")
        async with self._shell_lock:
            if restart:
                await self._end_shell()
                await self._start_shell()
                return "the shell was restarted"
            assert command
            if "\0" in command:
                raise ToolError("bash: a command cannot contain a null character")
            command.encode()  # a ValueError now, before a shell could be lost by it
            shell = self._shell or await self._start_shell()
            seconds = timeout_ms / 1000 if timeout_ms else package.BASH_DEFAULT_TIMEOUT
            seconds = min(seconds, LONGEST_SECONDS)
            try:
                return _bash_text(await self._run(shell, command, seconds))
            except Timeout as late:
                if not late.was_sent:
                    raise ToolError(f"bash: {late}") from None
                return _bash_text(late.result, seconds)
            except BaseException as error:
                if not isinstance(error, ToolError):
                    self._shell = None
                    await _close_shielded(shell)
                raise

    async def _run(self, shell: ShellSession, command: str, seconds: float) -> ShellResult:
        """Run a command, unless the worker gives up the session."""
        limit = OutputLimit(tail=package.BASH_OUTPUT_LIMIT)
        assert self._environment is not None
        running = self._environment.session.spawn(
            shell.run(command, timeout=seconds, output_limit=limit)
        )
        try:
            while not running.done():
                await asyncio.wait([running], timeout=TICK_SECONDS)
                self._check_cancelled()
            return running.result()
        finally:
            running.cancel()

    # ---- the connection, the directory and the shell ------------------------------------------

    async def _opened(self) -> tuple[Environment, str]:
        self._check_cancelled()
        async with self._open_lock:
            if self._is_closed:
                raise ToolError("the session has ended")
            if self._environment is None:
                self._environment = await self._tools.make_environment()
            if self._directory is None:
                self._directory = await self._make_directory(self._environment)
            return self._environment, self._directory

    async def _make_directory(self, environment: Environment) -> str:
        """Make the directory, unless an earlier run has, and copy the skills into it."""
        files = configured_files(environment.files, self._tools.user, None)
        path = posixpath.join(self._tools.root, directory_name(self._id))
        await files.mkdir(path, parents=True, exist_ok=True)
        parent = await files.realpath(posixpath.dirname(path))
        path = await files.realpath(path)
        if path != posixpath.join(parent, directory_name(self._id)):
            raise ToolError(f"the directory of the session leads to {path}: it is not used")
        await files.chmod(path, 0o700)
        await self._copy_skills(environment, path)
        return path

    async def _copy_skills(self, environment: Environment, directory: str) -> None:
        """Copy the skills in place of those of an earlier run, whose commands may have put links.

        So this is confined as commands are, unless these can write nothing.
        """
        skills = _downloaded_skills(self._ctx)
        if not skills:
            return
        sandbox = None if self._tools.sandbox == "read-only" else self._tools.sandbox
        files = configured_files(environment.files, self._tools.user, sandbox, directory)
        folder = f"{directory}/skills"
        try:
            metadata = await files.stat(folder, follow_links=False)
        except NotFound:
            pass
        else:
            if metadata.is_symlink or not metadata.is_directory:
                await files.remove(folder)
        for skill in skills:
            copy = f"{folder}/{skill.name}"
            await files.remove(copy, recursive=True, missing_ok=True)
            await files.upload(skill, copy)

    async def _opened_files(self) -> tuple[Files, str]:
        environment, directory = await self._opened()
        tools = self._tools
        files = configured_files(environment.files, tools.user, tools.sandbox, directory)
        return files, directory

    async def _start_shell(self) -> ShellSession:
        environment, directory = await self._opened()
        tools, ctx = self._tools, self._ctx
        start = partial(
            environment.start,
            cwd=directory,
            env={**(ctx.env or {}), **tools.env, "TERM": "dumb"},
            clean_env=ctx.env is not None,
            stdin=True,
            merge_stderr=True,
            sandbox=tools.sandbox,
            user=tools.user,
        )
        shell = ShellSession(
            start,
            [*_BASH, *shell_words("/bin/bash")],
            is_merged=True,
            wait_connected=environment.session.wait_connected,
        )
        self._shell = await shell
        return shell

    async def _end_shell(self) -> None:
        shell, self._shell = self._shell, None
        if shell is not None:
            await shell.aclose()

    # ---- the end ------------------------------------------------------------------------------

    async def close(self) -> None:
        """Kill all processes, remove the directory if the session is over, end the connection.

        The runner calls it for each tool; only the first call does something.
        """
        if self._is_closed:
            return
        self._is_closed = True
        async with self._open_lock:
            environment, self._environment = self._environment, None
        if environment is None:
            return
        is_kept = True
        try:
            async with asyncio.timeout(END_SECONDS):
                await self._end_shell()
                is_kept = await self._keeps_files()
        except TimeoutError:
            log.warning("session %s: the end takes too long; its files stay", self._id)
        finally:
            await environment.aclose()
        if not is_kept and self._directory is not None:
            await self._remove(self._directory)

    async def _keeps_files(self) -> bool:
        """Whether the session can come back: to this worker, or to the one that has it now."""
        if self._is_cancelled:
            return True
        if not self._tools.keep_files:
            return False
        if self._ctx.client is None:
            return True
        try:
            found = await self._ctx.client.beta.sessions.retrieve(self._id)
        except anthropic.NotFoundError:
            return False
        except anthropic.AnthropicError as error:
            log.warning("session %s: its files stay, its state is unknown: %s", self._id, error)
            return True
        status: str = found.status
        return status != "terminated"

    async def _remove(self, directory: str) -> None:
        """Remove the directory, by a connection of its own: the other one has killed everything."""
        try:
            async with asyncio.timeout(END_SECONDS), self._tools.make_environment() as environment:
                files = configured_files(environment.files, self._tools.user, None)
                for _ in range(REMOVALS):
                    try:
                        await files.remove(directory, recursive=True, missing_ok=True)
                    except NotEmpty:
                        continue
                    return
        except (ExecServerError, TimeoutError) as error:
            log.warning("session %s: its files stay in %s: %s", self._id, directory, error)


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop runs: the tools are only looked at
        return None


async def _close_shielded(shell: ShellSession) -> None:
    """Close the shell in a call that is cancelled; anyio would cancel each wait in it again."""
    with anyio.CancelScope(shield=True):
        await shell.aclose()


def directory_name(session_id: str) -> str:
    """The name of a session's directory: its id, or for an odd id a name that no other id has."""
    if _PLAIN_NAME.fullmatch(session_id):
        return session_id
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", session_id)[:50]
    return f"{plain}.{hashlib.sha256(session_id.encode('utf-8', 'backslashreplace')).hexdigest()}"


def _downloaded_skills(ctx: AgentToolContext) -> list[Path]:
    """The directories in which the worker has put the skills of the session's agent."""
    folder = Path(ctx.workdir) / "skills"
    if ctx.session is None or not ctx.session.agent.skills or not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir())


_METHODS: Final[dict[str, Callable[..., Awaitable[Any]]]] = {
    "bash": ManagedSession.bash,
    "read": SessionFiles.read,
    "write": SessionFiles.write,
    "edit": SessionFiles.edit,
    "glob": SessionFiles.glob,
    "grep": SessionFiles.grep,
}


def _check_tools(tools: list[BetaAsyncFunctionTool[Any]]) -> None:
    """Raise NotImplementedError for a tool or parameter that could not be carried out here.

    The package's own tool would run on the machine of the worker.
    """
    for tool in tools:
        method = _METHODS.get(tool.name)
        known = set() if method is None else set(signature(method).parameters)
        unknown = sorted(set(tool.input_schema.get("properties") or ()) - known)
        if method is None or unknown:
            part = "" if method is None else f" with the parameter {unknown[0]!r}"
            raise NotImplementedError(
                f"anthropic {anthropic.__version__} has the tool {tool.name!r}{part}, which this "
                "adapter does not know: install an older anthropic or a newer exec-server"
            )


def _tool(tool: BetaAsyncFunctionTool[Any], session: ManagedSession) -> BetaAsyncFunctionTool[Any]:
    """The package's tool, carried out by a method of the session."""
    owner = session if tool.name == "bash" else session.files
    method = getattr(owner, tool.name)

    @wraps(method)
    async def call(*arguments: Any, **named: Any) -> Any:
        with _reported(tool.name):
            return await method(*arguments, **named)

    made = beta_async_tool(
        call, name=tool.name, description=tool.description, input_schema=tool.input_schema
    )
    made.close = session.close
    return made


@contextmanager
def _reported(name: str) -> Iterator[None]:
    """Let an error be a sentence for the model."""
    try:
        yield
    except UNREACHABLE as error:
        raise ToolError(f"{name}: the machine is out of reach: {error}") from error
    except FileError as error:
        reason = (error.strerror or error.message).lower()
        raise ToolError(f"{name}: {error.filename}: {reason}") from error
    except (ExecServerError, OSError, ValueError) as error:
        raise ToolError(f"{name}: {error}") from error


def _bash_text(result: Result, late: float | None = None) -> str:
    """The output for the model; ToolError with it, and the reason, if the command has failed.

    `late` are the seconds after which it was interrupted.
    """
    text = _COLOURS.sub("", result.stdout.decode(errors="replace")).rstrip("\n")
    if result.lost_bytes:
        text = f"[{result.lost_bytes} bytes of output before this are left out]\n{text}"
    has_shell = not (isinstance(result, ShellResult) and result.shell_ended)
    if has_shell and not result.exit_code and late is None:
        return text
    if late is not None:
        reason = f"the command was {'interrupted' if has_shell else 'killed'} after {late:g} s"
        reason += "" if has_shell else ", and the shell with it"
    elif not has_shell:
        reason = f"the command has ended the shell with exit code {result.exit_code}"
    else:
        reason = f"exit code {result.exit_code}"
    if not has_shell:
        reason += ": the next command gets a new one in the session's directory"
    raise ToolError("\n".join(part for part in (text, f"[{reason}]") if part))
