"""ExecServerRuntime and ExecServerDeployment: a machine for SWE-ReX and SWE-agent."""

from __future__ import annotations

import asyncio
import logging
import re
import shlex
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Unpack

from exec_server.adapters.target import (
    UNREACHABLE,
    configured_files,
    framework_missing,
    make_environment,
    unreachable_as,
)
from exec_server.client.arguments import AnySandbox
from exec_server.client.connect import ConnectOptions
from exec_server.client.environment import Environment
from exec_server.client.exceptions import PatternNotFound, Timeout
from exec_server.client.files import Files
from exec_server.client.process import Process
from exec_server.errors import ExecServerError

# Until bash has read its start-up files.
START_SECONDS: Final = 30.0
# Until bash has stopped or killed a job that ignores Ctrl-C. A program can ignore Ctrl-Z as well.
STOP_SECONDS: Final = 10.0

_CONTROL: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|[\x00-\x08\x0b-\x1f\x7f]")

log = logging.getLogger(__name__)

# Sessions of a runtime: agents use one or two. Further ones are refused.
MAX_SESSIONS: Final = 64


class Observation(NamedTuple):
    """The output of a command; the text that ended it, and the exit code if it was the prompt."""

    output: str
    exit_code: int | None
    ended_by: str


class BashSession:
    """A bash in a terminal that runs one command after the other, and keeps its state.

    It prints a prompt with a random word and the exit code of the last command, which
    PROMPT_COMMAND sets anew each time, so that programs that change the prompt do no harm. A
    command is one word for `eval`, so there is one prompt for it however many lines it has.
    """

    def __init__(
        self, environment: Environment, *, sandbox: AnySandbox | None, user: str | None
    ) -> None:
        self._word = uuid.uuid4().hex
        self._process: Process = environment.start(
            ["bash"], tty=True, env={"TERM": "dumb"}, sandbox=sandbox, user=user
        )

    async def start(self, files: Sequence[str] = ()) -> str:
        """Start bash and let it source some files; returns what it has printed."""
        await self._process
        lines = [f"source {shlex.quote(file)}" for file in files]
        prompt = f"PROMPT_COMMAND='PS1=\"{self._word}:$?:\"'"
        lines += ["bind 'set enable-bracketed-paste off' 2>/dev/null", "PS2=", "PS0=", prompt]
        # Without an echo, which stty stops for readline too.
        await self._process.write(f"stty -echo; {'; '.join(lines)}\n".encode())
        return (await self._read((), START_SECONDS)).output

    async def run(self, command: str, timeout: float | None, expect: Sequence[str]) -> Observation:  # noqa: ASYNC109 - the output stays unread
        """Run a command until the prompt or an expected text; it goes on after TimeoutError."""
        await self._process.write(f" eval {shlex.quote(command)}\n".encode())
        return await self._read(expect, timeout)

    async def send(self, line: str, timeout: float | None, expect: Sequence[str]) -> Observation:  # noqa: ASYNC109 - the output stays unread
        """Send a line to the running program; otherwise like `run`."""
        await self._process.write(f"{line}\n".encode())
        return await self._read(expect, timeout)

    async def interrupt(
        self,
        timeout: float,  # noqa: ASYNC109 - of one attempt
        attempts: int,
        expect: Sequence[str],
    ) -> Observation:
        """Interrupt or kill the running command; TimeoutError if it ignores all terminal keys."""
        for _ in range(attempts):
            await self._process.write(b"\x03")
            try:
                return await self._read(expect, timeout)
            except TimeoutError:
                await asyncio.sleep(0)
        await self._process.write(b"\x1a")  # Ctrl-Z: the job is killed in the background
        await self._read((), STOP_SECONDS)
        await self._process.write(b"kill -9 %% 2>/dev/null\n")
        return await self._read(expect, STOP_SECONDS)

    async def _read(self, expect: Sequence[str], timeout: float | None) -> Observation:  # noqa: ASYNC109 - nothing is lost by it
        prompt = re.compile(rb"%b:(\d+):" % self._word.encode())
        found = await self._process.expect([prompt, *expect], timeout)
        output = _CONTROL.sub("", found.before.decode(errors="backslashreplace"))
        code = found.groups[0] if found.groups else None
        ended_by = "" if code is not None else found.matched.decode()
        return Observation(output, None if code is None else int(code), ended_by)

    async def close(self) -> None:
        """Kill bash with all that it has started."""
        await self._process.aclose()


try:
    from swerex.deployment.abstract import AbstractDeployment
    from swerex.deployment.hooks.abstract import CombinedDeploymentHook, DeploymentHook
    from swerex.exceptions import (
        BashIncorrectSyntaxError,
        CommandTimeoutError,
        DeploymentNotStartedError,
        DeploymentStartupError,
        NoExitCodeError,
        NonZeroExitCodeError,
        SessionDoesNotExistError,
        SessionExistsError,
        SwerexException,
    )
    from swerex.runtime.abstract import (
        AbstractRuntime,
        BashAction,
        BashInterruptAction,
        BashObservation,
        CloseBashSessionRequest,
        CloseBashSessionResponse,
        CloseResponse,
        Command,
        CommandResponse,
        CreateBashSessionRequest,
        CreateBashSessionResponse,
        IsAliveResponse,
        ReadFileRequest,
        ReadFileResponse,
        UploadRequest,
        UploadResponse,
        WriteFileRequest,
        WriteFileResponse,
    )
except ImportError as error:
    raise framework_missing("swe-rex", "swe-rex", error) from error


_reaching = partial(unreachable_as, SwerexException, "the machine is out of reach: ")


class ExecServerRuntime(AbstractRuntime):
    """A machine; it connects at first use, and `close` kills its processes.

    Without `target` and `registry` it is this machine, through a server of its own.
    """

    def __init__(
        self,
        target: str | None = None,
        *,
        sandbox: AnySandbox | None = None,
        user: str | None = None,
        **options: Unpack[ConnectOptions],
    ) -> None:
        """`sandbox` confines commands and files; `user` is theirs, on a server of root."""
        self.logger = log
        self._target = target
        self._options: ConnectOptions = {"reconnect": True, **options}
        self._sandbox = sandbox
        self._user = user
        self._environment: Environment | None = None
        self._lock = asyncio.Lock()  # held while the connection is made
        self._sessions: dict[str, BashSession] = {}

    async def _opened(self) -> Environment:
        async with self._lock:
            if self._environment is None:
                environment = make_environment(self._target, self._options)
                await environment
                self._environment = environment
            return self._environment

    async def _files(self) -> Files:
        return configured_files((await self._opened()).files, self._user, self._sandbox)

    async def is_alive(self, *, timeout: float | None = None) -> IsAliveResponse:  # noqa: ASYNC109 - of the framework
        try:
            await (await self._opened()).run(["true"], timeout=timeout, user=self._user, cwd="/")
        except ExecServerError as error:
            return IsAliveResponse(is_alive=False, message=str(error))
        return IsAliveResponse(is_alive=True)

    async def close(self) -> CloseResponse:
        self._sessions.clear()
        async with self._lock:
            environment, self._environment = self._environment, None
        if environment is not None:
            await environment.aclose()
        return CloseResponse()

    async def create_session(self, request: CreateBashSessionRequest) -> CreateBashSessionResponse:
        if request.session in self._sessions:
            raise SessionExistsError(f"session {request.session} already exists")
        if len(self._sessions) >= MAX_SESSIONS:
            raise SessionExistsError(f"there are {MAX_SESSIONS} sessions already: close one")
        with _reaching():
            session = BashSession(await self._opened(), sandbox=self._sandbox, user=self._user)
        self._sessions[request.session] = session
        try:
            with _reaching():
                return CreateBashSessionResponse(output=await session.start(request.startup_source))
        except BaseException:
            del self._sessions[request.session]
            raise

    async def run_in_session(self, action: BashAction | BashInterruptAction) -> BashObservation:
        session = self._session(action.session)
        if isinstance(action, BashInterruptAction):
            return await self._interrupt(session, action)
        is_interactive = action.is_interactive_command or action.is_interactive_quit
        if not is_interactive:
            await self._check_syntax(action.command)
        try:
            send = session.send if is_interactive else session.run
            ended = await send(action.command, action.timeout, action.expect)
        except UNREACHABLE as error:
            self._sessions.pop(action.session, None)  # its processes are gone
            raise SwerexException(f"the machine is out of reach: {error}") from error
        except TimeoutError:
            text = f"timeout after {action.timeout} seconds while running {action.command!r}"
            raise CommandTimeoutError(text) from None
        except PatternNotFound as error:
            self._sessions.pop(action.session, None)  # bash has exited
            raise NoExitCodeError(f"the session has ended: {error}") from None
        return _observation(action, ended, is_interactive=is_interactive)

    async def _interrupt(
        self, session: BashSession, action: BashInterruptAction
    ) -> BashObservation:
        try:
            with _reaching():
                ended = await session.interrupt(action.timeout, action.n_retry, action.expect)
        except TimeoutError:
            text = f"the command in session {action.session!r} cannot be interrupted: close it"
            raise CommandTimeoutError(text) from None
        except PatternNotFound as error:
            self._sessions.pop(action.session, None)  # bash has exited
            raise NoExitCodeError(f"the session has ended: {error}") from None
        output = ended.output.strip()
        return BashObservation(output=output, exit_code=0, expect_string=ended.ended_by)

    async def close_session(self, request: CloseBashSessionRequest) -> CloseBashSessionResponse:
        session = self._session(request.session)
        del self._sessions[request.session]
        await session.close()
        return CloseBashSessionResponse()

    def _session(self, name: str) -> BashSession:
        if name not in self._sessions:
            raise SessionDoesNotExistError(f"session {name!r} does not exist")
        return self._sessions[name]

    async def _check_syntax(self, command: str) -> None:
        with _reaching():
            environment = await self._opened()
            result = await environment.run(["bash", "-n"], input=command.encode(), cwd="/")
        if result.exit_code:
            text = f"bash cannot parse {command!r}: {result.error_text}"
            output = {"bash_stdout": result.text, "bash_stderr": result.error_text}
            raise BashIncorrectSyntaxError(text, extra_info=output)

    async def execute(self, command: Command) -> CommandResponse:
        argv = command.command
        if command.shell or isinstance(argv, str):
            argv = ["/bin/sh", "-c", argv] if isinstance(argv, str) else ["/bin/sh", "-c", *argv]
        try:
            with _reaching():
                result = await (await self._opened()).run(
                    argv,
                    cwd=command.cwd,
                    env=command.env,
                    timeout=command.timeout,
                    merge_stderr=command.merge_output_streams,
                    sandbox=self._sandbox,
                    user=self._user,
                )
        except Timeout as late:
            raise CommandTimeoutError(f"{late}: {command.command!r}") from None
        if command.check and result.exit_code:
            text = (
                f"{command.command!r} failed with exit code {result.exit_code}: {result.error_text}"
            )
            raise NonZeroExitCodeError(
                f"{command.error_msg}: {text}" if command.error_msg else text
            )
        return CommandResponse(
            stdout=result.text, stderr=result.error_text, exit_code=result.exit_code
        )

    async def read_file(self, request: ReadFileRequest) -> ReadFileResponse:
        with _reaching():
            data = await (await self._files()).read(request.path)
        text = data.decode(request.encoding or "utf-8", request.errors or "strict")
        return ReadFileResponse(content=text)

    async def write_file(self, request: WriteFileRequest) -> WriteFileResponse:
        with _reaching():
            await (await self._files()).write_text(request.path, request.content, parents=True)
        return WriteFileResponse()

    async def upload(self, request: UploadRequest) -> UploadResponse:
        with _reaching():
            await (await self._files()).upload(request.source_path, request.target_path)
        return UploadResponse()


class ExecServerDeployment(AbstractDeployment):
    """The machine of a runtime, which `start` connects to; options are those of the runtime."""

    def __init__(self, target: str | None = None, **options: Any) -> None:
        self.logger = log
        self._runtime = ExecServerRuntime(target, **options)
        self._is_started = False
        self._hooks = CombinedDeploymentHook()

    def add_hook(self, hook: DeploymentHook) -> None:
        self._hooks.add_hook(hook)

    async def is_alive(self, *, timeout: float | None = None) -> IsAliveResponse:  # noqa: ASYNC109 - of the framework
        if not self._is_started:
            return IsAliveResponse(is_alive=False, message="the deployment is not started")
        return await self._runtime.is_alive(timeout=timeout)

    async def start(self) -> None:
        self._hooks.on_custom_step("Connecting to exec-server")
        try:
            await self._runtime._opened()
        except UNREACHABLE as error:
            raise DeploymentStartupError(str(error)) from error
        self._is_started = True

    async def stop(self) -> None:
        self._is_started = False
        await self._runtime.close()

    @property
    def runtime(self) -> ExecServerRuntime:
        if not self._is_started:
            raise DeploymentNotStartedError()
        return self._runtime


def _observation(
    action: BashAction, ended: Observation, *, is_interactive: bool
) -> BashObservation:
    if is_interactive:
        output = ended.output.lstrip().removeprefix(action.command).strip()
        return BashObservation(output=output, exit_code=0, expect_string=ended.ended_by)
    code = None if action.check == "ignore" else ended.exit_code
    if action.check == "raise" and code != 0 and not ended.ended_by:
        text = f"{action.command!r} failed with exit code {code}: {ended.output!r}"
        raise NonZeroExitCodeError(f"{action.error_msg}: {text}" if action.error_msg else text)
    return BashObservation(output=ended.output, exit_code=code, expect_string=ended.ended_by)
