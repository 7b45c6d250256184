"""Environment: commands, files and HTTP requests on the machine of one server."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, Unpack

import msgspec

from exec_server.client.arguments import (
    AnyNetworkProxy,
    AnyPath,
    AnySandbox,
    PathResolver,
    argv_list,
    check_callable,
    check_seconds,
    input_bytes,
    path_text,
    retention_seconds,
)
from exec_server.client.engine.recovery import RemoteProcesses
from exec_server.client.engine.server_features import ServerFeatures, StartParamsBuilder
from exec_server.client.engine.session import CLIENT_NAME, ClientSession, Dialer
from exec_server.client.handle import ContextTask, Handle
from exec_server.client.process import (
    OUTPUT_BYTES,
    DetachedProcess,
    Process,
    check_support,
    detached_params,
)
from exec_server.client.results import ConnectionStatus, Response, Result, RunProgress
from exec_server.errors import ConnectFailed, InvalidParams, NotFound, Unsupported
from exec_server.protocol.decoding import Call
from exec_server.protocol.network import POLICY_REQUEST, Answer, PolicyParams, PolicyResult
from exec_server.protocol.process import (
    LIST,
    LIST_DETACHED,
    DetachedProcessInfo,
    ProcessInfo,
    StartParams,
)
from exec_server.protocol.session import Capabilities, EnvironmentInfo

if TYPE_CHECKING:
    from exec_server.client.commands import (
        Command,
        OnOutput,
        OutputLimit,
        OutputTarget,
        ResultStream,
        RunOptions,
    )
    from exec_server.client.files import Files
    from exec_server.client.http import Headers, HttpStream
    from exec_server.client.polyfills import Polyfills
    from exec_server.client.port_forwarding import PortForward, PortStreams, ReversePort
    from exec_server.client.shell_session import ShellSession


# The server refuses longer reasons, and control characters in them.
_REASON_CHARACTERS: Final = 200
_NOT_ASKED: Final = "the client allows no further hosts"

# Interval of the questions: at first a start that is quick is noticed at once.
FIRST_SECONDS: Final = 0.02
MAX_SECONDS: Final = 0.25

# The sockets of the server's network namespace, see proc(5).
_TABLES: Final = ("/proc/net/tcp", "/proc/net/tcp6")
_LISTEN: Final = b"0A"
_HIGHEST_PORT: Final = 65_535

# Words of the operating system, of resolvers and of OpenSSL, and what to try after them.
_HINTS: Final = (
    ("refused", "check that the server is running and that the port is right: it prints its URL"),
    ("lookup", "check the spelling of the host name"),
    ("not speak tls", "use ws:// for a server without TLS"),
    ("not pinned", "if the certificate was replaced, pass its new fingerprint as pin="),
    ("expired", "renew the certificate of the server, and check the clocks of both machines"),
    ("mismatch", "use a name of the certificate in the URL, or pin the certificate with pin="),
    ("certificate", "pass the root certificate as ca_file=, or the fingerprint as pin="),
    ("timed out", "check the address, and whether a firewall is in between"),
    ("no such file", "check the path, and that the server is running"),
)

P = TypeVar("P")
R = TypeVar("R")
C = TypeVar("C", bound=Process)

# For the removal of temporary files before the session is closed: it takes milliseconds, unless the
# server is unreachable, and then they remain.
CLEAN_UP_SECONDS: Final = 1.0

# Enough to hide the latency of a connection, without starting more than a small machine bears.
CONCURRENCY: Final = 8

# The attributes that are set when an environment is opened.
_SET_ON_OPENING = frozenset(
    {"_connected", "_files", "_paths", "_port_streams", "_processes", "_start_params"}
)
_LEAVE_RUNNING = "it cannot kill the children of a command that has exited: leave them running"


# Requests of processes for hosts that their rules do not list: the program's answer.
class NetworkRequest(msgspec.Struct, frozen=True):
    """A host that a process wants to reach."""

    process_id: str
    protocol: str  # http, https_connect or socks5_tcp
    host: str
    port: int


# True allows the request; False, or a reason, denies it.
Decision = bool | str
OnNetworkRequest = Callable[[NetworkRequest], Decision | Awaitable[Decision]]


class NetworkRequests:
    """Answers network/policyRequest by a function of the program; without one, denies all."""

    def __init__(self, on_request: OnNetworkRequest | None) -> None:
        self._on_request = on_request

    async def answer(self, params: PolicyParams) -> PolicyResult:
        """The handler of the request; an exception of the function denies it, too."""
        if self._on_request is None:
            return _denial(_NOT_ASKED)
        asked = params.request
        request = NetworkRequest(params.process_id, asked.protocol, asked.host, asked.port)
        decided = self._on_request(request)
        decision = await decided if inspect.isawaitable(decided) else decided
        if decision is True:
            return PolicyResult(Answer("allow"))
        return _denial(decision if isinstance(decision, str) else "denied by the client")


def _denial(reason: str) -> PolicyResult:
    printable = "".join(each if each.isprintable() else " " for each in reason)
    return PolicyResult(Answer("deny", printable[:_REASON_CHARACTERS]))


# The kernel's tables, because a program that accepts one connection, or logs each, would notice.
def is_listening(table: bytes, port: int) -> bool:
    """Whether a table has a socket that listens at the port, whatever its address."""
    suffix = b":%04X" % port
    for line in table.splitlines()[1:]:
        words = line.split()
        if len(words) > 3 and words[3] == _LISTEN and words[1].endswith(suffix):
            return True
    return False


async def wait_for_port(
    read: Callable[[str], Awaitable[bytes]], port: int, seconds: float | None
) -> None:
    """Return when a program listens; `read` reads a file. See Environment.wait_for_port."""
    if not isinstance(port, int):
        raise TypeError(f"port must be an int, not {type(port).__name__}")
    check_seconds(seconds)
    if not 0 < port <= _HIGHEST_PORT:
        raise ValueError(f"port must be from 1 to {_HIGHEST_PORT}, not {port}")
    scope = asyncio.timeout(seconds)
    delay = FIRST_SECONDS
    try:
        async with scope:
            while not await _is_open(read, port):
                await asyncio.sleep(delay)
                delay = min(2 * delay, MAX_SECONDS)
    except TimeoutError:
        if not scope.expired():
            raise
        raise TimeoutError(f"no program listens at port {port} after {seconds:g} s") from None


async def _is_open(read: Callable[[str], Awaitable[bytes]], port: int) -> bool:
    has_table = False
    for path in _TABLES:
        try:
            table = await read(path)
        except NotFound:
            continue  # such as IPv6 on a kernel without it
        has_table = True
        if is_listening(table, port):
            return True
    if not has_table:
        raise Unsupported(_TABLES[0], "wait for the output of the program instead")
    return False


# The address and the hint in the text of a failed connection. Pure.
def explain(error: ConnectFailed, address: str | None) -> None:
    """Add the address and a hint to an error."""
    error.url = address
    scheme = (address or "").partition(":")[0]
    reason = error.reason.lower()
    if scheme == "unix" and (error.status == 403 or "permission denied" in reason):
        error.hint = "only the user of the server and root may use its unix socket"
    elif scheme == "unix" and "refused" in reason:
        error.hint = "check that the server is running and that the path is right"
    elif scheme == "ws" and reason.endswith("connection ended"):
        error.hint = "if the server has TLS, use wss://"  # it hangs up on a plain request
    else:
        error.hint = _hint(error)


def _hint(error: ConnectFailed) -> str:
    if error.status in (401, 403):
        return "pass the token that the server expects: connect(..., token=...)"
    if error.status is not None:
        return "another kind of server answers there: check host, port and path"
    return next((hint for word, hint in _HINTS if word in error.reason.lower()), "")


class Environment(Handle):
    """A machine with an exec-server; `connect` and `local` make one.

    `await` or `async with` connects; it raises ConnectFailed, RegistryError or RpcError. `aclose`,
    or leaving the block, kills all running processes and closes the connection. A connection that
    is lost meanwhile is opened again and the session is resumed, which callers notice only by the
    time it takes; calls that may not be repeated raise ConnectionLost. If the session cannot be
    resumed, because the server was restarted for example, everything raises SessionLost, until
    `reconnect` opens a new one.

    Commands: `run` waits for the end, `shell` and `python` take a text, `run_many` a list;
    `start` gives a Process to talk to, detached if it is to outlive the connection; `attach`,
    `processes` and `detached_processes` find those that run.
    Files: `files`, such as `await env.files.read_text("README.md")`.
    Network: `forward_port`, `reverse_port`, `wait_for_port`, `http`, `http_stream`.
    About the machine: `info`, `cwd`, `home`, `temp_dir`, and `capabilities` of its server.
    """

    def __init__(
        self,
        dialer: Dialer,
        *,
        client_name: str = CLIENT_NAME,
        reconnect: bool = False,
        retention: float | str | None = None,
        address: str | None = None,
        stderr: Collection[str] = (),
        on_network_request: OnNetworkRequest | None = None,
    ) -> None:
        """With `reconnect`, the first call after the loss of a session opens a new one.

        `retention` is that of `connect`; raises StartupError if it is none. `address` is the place
        of the server in error texts, which end with the lines of `stderr`, those of a program that
        serves. `on_network_request` answers network/policyRequest; without it all such requests are
        denied.
        """
        super().__init__()
        self._address = address
        self._stderr = stderr
        self.session = ClientSession(
            dialer,
            client_name=client_name,
            reconnect=reconnect,
            retention=retention_seconds(retention),
        )
        """The layer below: subscribe to notifications, answer requests of the server."""
        self.session.polyfill = self._polyfill
        self._polyfills: Polyfills | None = None
        self.session.answer(POLICY_REQUEST, NetworkRequests(on_network_request).answer)

    @classmethod
    def local(cls, *arguments: str, env: Mapping[str, str] | None = None) -> Environment:
        """This machine, through a server on pipes that ends with the environment.

        `arguments` are flags of the server, `env` is its environment (default: that of this
        process). The server is a process of its own, because it reaps every child of its process.
        Raises StartupError on other systems than Linux.
        """
        from exec_server.client.engine.stdio import StdioDialer
        from exec_server.client.local_server import check_platform
        from exec_server.host.interpreter import server_words

        check_platform()
        variables = os.environ if env is None else env
        argv = [*server_words(variables), "--listen", "stdio", *arguments]
        dialer = StdioDialer(argv, env)
        return cls(dialer, stderr=dialer.last_lines)

    def __repr__(self) -> str:
        state = "open" if self.is_open else "not open"
        return f"<Environment {self._address or 'of a program'}, {state}>"

    async def _open(self) -> None:
        self._life = ContextTask(self._connect())
        try:
            await self._life.open()
        except ConnectFailed as error:
            self._explain(error)
            raise

    def _explain(self, error: ConnectFailed) -> None:
        error.stderr_lines = tuple(self._stderr)
        if self._address is not None:
            explain(error, self._address)

    async def _close(self) -> None:
        await self._life.close()

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[None]:
        async with self.session as self._connected:
            self._processes = processes = RemoteProcesses(self.session)
            self._paths = paths = PathResolver(self.info)
            self._files: Files | None = None
            self._port_streams: PortStreams | None = None
            self._adapt(self.session.features)

            def update() -> None:
                """The new session may be one of another server, with other features."""
                paths.update(self.info)
                self._adapt(self.session.features)
                if self._port_streams is not None:
                    self._port_streams.listen_again()

            self.session.on_renewed = update
            try:
                yield
            finally:
                if self._port_streams is not None:
                    self._port_streams.close()
                try:
                    await self._clean_up()
                finally:
                    await processes.close()

    async def _clean_up(self) -> None:
        """Remove the temporary files of files that are still being written."""
        works = [self.session.spawn(clean_up()) for clean_up in self.session.clean_ups]
        if works:
            _, unanswered = await asyncio.wait(works, timeout=CLEAN_UP_SECONDS)
            self.session.is_silent = bool(unanswered)

    def _adapt(self, features: ServerFeatures) -> None:
        """Use what this server has, and polyfills for the rest."""
        self._start_params = StartParamsBuilder(self._paths, features)
        self._polyfills = None
        self.session.missing_methods = features.missing_methods

    async def _polyfill(self, method: str, params: Any) -> Any:
        if self._polyfills is None:
            # Slow to import, and seldom needed.
            from exec_server.client.commands import SystemCommands
            from exec_server.client.polyfills import Polyfills

            self._polyfills = Polyfills(
                self.session, self._paths, SystemCommands(self.run, self.start)
            )
        return await self._polyfills.table[method](params)

    if not TYPE_CHECKING:  # a type checker would accept every name

        def __getattr__(self, name: str) -> object:
            """Explain a missing attribute, so that no method checks whether it was opened."""
            if name in _SET_ON_OPENING:
                raise RuntimeError(
                    "the environment is not connected: await it, or use it with `async with`"
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def files(self) -> Files:
        """Reads, writes and transfers files."""
        if self._files is None:
            # Slow to import, and not always needed.
            from exec_server.client.commands import SystemCommands
            from exec_server.client.files import Files

            self._files = Files(self.session, self._paths, SystemCommands(self.run, self.start))
        return self._files

    @property
    def info(self) -> EnvironmentInfo:
        """The server's description of its machine: shell, directories as URIs, version."""
        return self._connected.environment_info

    @property
    def cwd(self) -> str:
        """The path of the server's directory, where relative paths start."""
        return self._paths.cwd

    @property
    def home(self) -> str | None:
        """The path of the home of the server's user; None if the server does not tell it."""
        return self._paths.home

    @property
    def temp_dir(self) -> str:
        """The path of the directory for temporary files."""
        return self._paths.temporary

    @property
    def capabilities(self) -> Capabilities:
        """The optional features of the server."""
        return self._connected.features.capabilities

    @property
    def status(self) -> ConnectionStatus:
        """Whether it is connected, reconnecting, lost or closed, since when, and why."""
        return self.session.status

    async def reconnect(self) -> None:
        """Open a new session if the server has lost this one; otherwise do nothing.

        If the connection is just being opened again, wait for that. Processes of the old session
        stay lost. Raises ConnectFailed, RegistryError or RpcError if the server cannot be reached
        within 45 s.
        """
        try:
            await self._connected.reconnect()
        except ConnectFailed as error:
            self._explain(error)
            raise

    async def call(self, call: Call[P, R], params: P, *, is_retryable: bool = False) -> R:
        """Call any method of the protocol, with its structs from `exec_server.protocol`.

        If the answer was lost with a connection, a request that `is_retryable` is sent again;
        for others ConnectionLost is raised.
        """
        return await self._connected.call(call, params, is_retryable=is_retryable)

    async def run(
        self,
        argv: Iterable[AnyPath],
        *,
        cwd: AnyPath | None = None,
        env: Mapping[str, AnyPath] | None = None,
        clean_env: bool = False,
        timeout: float | None = None,  # noqa: ASYNC109 - Timeout carries the output
        input: bytes | str | None = None,  # noqa: A002 - the name in subprocess
        sandbox: AnySandbox | None = None,
        tty: bool = False,
        merge_stderr: bool = False,
        user: str | int | None = None,
        network_proxy: AnyNetworkProxy | None = None,
        check: bool = False,
        output_limit: int | OutputLimit = OUTPUT_BYTES,
        leave_running: bool = True,
        on_output: OnOutput | None = None,
        stdout: OutputTarget | None = None,
        stderr: OutputTarget | None = None,
    ) -> Result:
        """Run a command until it exits, and return its output and exit code.

        The command runs in `cwd` (default: the server's directory) with the server's environment
        updated by `env`, or with `env` alone if `clean_env` is set. Its stdin is `input` (a text in
        UTF-8) or empty. A `sandbox` is "read-only", "workspace-write" (in `cwd`) or an object
        of the protocol, as is `network_proxy`, the only way out of a sandbox. `on_output` is called
        with each Chunk; `stdout` and `stderr` are local paths, open files or loggers;
        `merge_stderr` makes both `stdout`, in the order of writing. A `user`, by name or number,
        gets its own rights and directories. `output_limit` is a number of bytes to keep, or an
        OutputLimit for each stream. Raises RpcError if the command cannot be started
        (ProgramNotFound, WorkingDirectoryNotFound), Unsupported if the server has no proxies or
        cannot act as the `user`, Timeout with the output after `timeout` seconds, CommandFailed if
        `check` is set and the exit code is not 0. Children in the background are left without
        output until the environment is closed, or killed without `leave_running`. A cancelled or
        failed call kills the command with all descendants.
        """
        from exec_server.client.commands import CommandRun, Delivery, checked_result

        data = input_bytes(input)
        check_seconds(timeout)
        if not leave_running and not self.capabilities.process_terminate_exited:
            raise Unsupported("processTerminateExited", _LEAVE_RUNNING)
        words = argv_list(argv)
        params = self._start_params.build(
            words,
            cwd=cwd,
            env=env,
            clean_env=clean_env,
            tty=tty,
            sandbox=sandbox,
            data=None if tty else data,
            merge_stderr=merge_stderr,
            user=user,
            network_proxy=network_proxy,
        )
        run = self._command(CommandRun, words, cwd, params)
        async with Delivery(on_output, stdout, stderr) as delivery:
            result = await run.to_exit(data, timeout, output_limit, leave_running, delivery)
        return checked_result(result) if check else result

    async def shell(
        self, text: str, *, program: AnyPath = "/bin/sh", **options: Unpack[RunOptions]
    ) -> Result:
        """Run a text of shell commands, such as `make | tail`; the options are those of `run`."""
        if not isinstance(text, str):
            kind = type(text).__name__
            raise TypeError(f"text must be str, not {kind}: use run() for a list of words")
        return await self.run([program, "-c", text], **options)

    async def python(
        self, code: str, *args: AnyPath, program: AnyPath = "python3", **options: Unpack[RunOptions]
    ) -> Result:
        """Run Python code on the server's machine, with `args` as its `sys.argv[1:]`.

        Common indentation is removed. `program` is the interpreter; the options are those of `run`.
        """
        if not isinstance(code, str):
            raise TypeError(f"code must be str, not {type(code).__name__}")
        import textwrap

        return await self.run([program, "-c", textwrap.dedent(code), *args], **options)

    async def run_many(
        self,
        commands: Iterable[Command | Iterable[AnyPath]],
        *,
        concurrency: int = CONCURRENCY,
        progress: Callable[[RunProgress], None] | None = None,
        **options: Unpack[RunOptions],
    ) -> list[Result]:
        """Run commands, at most `concurrency` at a time; the results are in their order.

        A Command has options of its own before those of the call, which are those of `run`.
        `progress` is called after each command. If a command raises an exception, or the call is
        cancelled, the running ones are killed and no further one is started.
        """
        check_callable(progress, "progress")
        results: dict[int, Result] = {}
        async with self._results(list(commands), concurrency, options, stops=True) as ended:
            async for each in ended:
                results[each.index] = each.result
                if progress is not None:
                    progress(each)
        return [results[index] for index in range(len(results))]

    def run_each(
        self,
        commands: Iterable[Command | Iterable[AnyPath]],
        *,
        concurrency: int = CONCURRENCY,
        **options: Unpack[RunOptions],
    ) -> ResultStream:
        """Run commands as `run_many` does, and give each result as soon as it is there.

        For `async with` and `async for`, which gives a RunProgress. A command that raises an
        exception does not stop the others; the `result` of its RunProgress raises it. Leaving the
        block, or `aclose` in any task, kills the running commands.
        """
        return self._results(list(commands), concurrency, options, stops=False)

    def _results(
        self,
        commands: list[Command | Iterable[AnyPath]],
        concurrency: int,
        options: RunOptions,
        *,
        stops: bool,
    ) -> ResultStream:
        from exec_server.client.commands import Command, ResultStream

        async def run(number: int) -> Result:
            command = commands[number]
            if isinstance(command, Command):
                own: RunOptions = {**options, **command.options}
                return await self.run(command.argv, **own)
            return await self.run(command, **options)

        spawn = self._connected.spawn
        return ResultStream(run, spawn, len(commands), concurrency=concurrency, stops=stops)

    def start(
        self,
        argv: Iterable[AnyPath],
        *,
        cwd: AnyPath | None = None,
        env: Mapping[str, AnyPath] | None = None,
        clean_env: bool = False,
        tty: bool = False,
        size: tuple[int, int] | None = None,
        stdin: bool = False,
        merge_stderr: bool = False,
        user: str | int | None = None,
        sandbox: AnySandbox | None = None,
        network_proxy: AnyNetworkProxy | None = None,
        detach: bool = False,
        name: str | None = None,
        max_lifetime: float | None = None,
        idle_timeout: float | None = None,
    ) -> Process:
        """A command that `await` or `async with` starts; see Process.

        `size` is the rows and columns of its terminal, `stdin` opens a pipe for writing to a
        command without a terminal; the other arguments are those of `run`.

        With `detach` it is a DetachedProcess, which outlives the session and is found by its
        `name` (default: one that is unused). It ends with the server, `max_lifetime` seconds after
        its start, or when it has had no output and no client for `idle_timeout` seconds. Raises
        Unsupported if the server cannot.
        """
        words = argv_list(argv)
        params = self._start_params.build(
            words,
            cwd=cwd,
            env=env,
            clean_env=clean_env,
            tty=tty,
            size=size,
            stdin=stdin,
            sandbox=sandbox,
            merge_stderr=merge_stderr,
            user=user,
            network_proxy=network_proxy,
        )
        if not detach:
            if name is not None or max_lifetime is not None or idle_timeout is not None:
                raise TypeError("name, max_lifetime and idle_timeout need detach=True")
            return self._command(Process, words, cwd, params, size)
        check_support(self._connected)
        params, name = detached_params(
            params, words[0], name=name, max_lifetime=max_lifetime, idle_timeout=idle_timeout
        )
        return DetachedProcess(
            self.session,
            self._processes,
            params,
            argv=tuple(words),
            name=name,
            label=_label(words, cwd),
            size=size,
        )

    def shell_session(
        self,
        *,
        program: AnyPath = "/bin/sh",
        cwd: AnyPath | None = None,
        env: Mapping[str, AnyPath] | None = None,
        clean_env: bool = False,
        merge_stderr: bool = False,
        user: str | int | None = None,
        sandbox: AnySandbox | None = None,
        network_proxy: AnyNetworkProxy | None = None,
    ) -> ShellSession:
        """A shell that keeps its state between commands; see ShellSession.

        `await` or `async with` starts it. `program` is a POSIX shell, such as bash or dash; the
        other arguments are those of `run`, for all commands.
        """
        from exec_server.client.shell_session import ShellSession, shell_words

        start = partial(
            self.start,
            cwd=cwd,
            env=env,
            clean_env=clean_env,
            stdin=True,
            merge_stderr=merge_stderr,
            user=user,
            sandbox=sandbox,
            network_proxy=network_proxy,
        )
        return ShellSession(
            start,
            shell_words(program),
            is_merged=merge_stderr,
            wait_connected=self.session.wait_connected,
        )

    def attach(self, name: str, *, after: int = 0) -> DetachedProcess:
        """A detached process of the server, to which `await` or `async with` attaches.

        Its output begins with the oldest that the server retains, or follows the event with the
        number `after` (`next_seq - 1` of `detached_processes` for new output only). Raises
        RpcError if there is no process of this name, Unsupported if the server has none at all.
        """
        check_support(self._connected)
        if after < 0:
            raise InvalidParams(f"after must not be negative: {after}")
        return DetachedProcess(
            self.session, self._processes, None, argv=(), name=name, label=name, after=after
        )

    async def detached_processes(self) -> list[DetachedProcessInfo]:
        """List the detached processes of the server, of all its clients; raises Unsupported."""
        check_support(self._connected)
        return (await self._connected.call(LIST_DETACHED, None, is_retryable=True)).processes

    def _command(
        self,
        kind: type[C],
        argv: list[str],
        cwd: AnyPath | None,
        params: StartParams,
        size: tuple[int, int] | None = None,
    ) -> C:
        label, words = _label(argv, cwd), tuple(argv)
        return kind(self.session, self._processes, params, argv=words, name=label, size=size)

    async def wait_for_port(
        self,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - the error names the port
    ) -> None:
        """Wait until a program on the server's machine listens at a TCP port.

        Raises TimeoutError after `timeout` seconds, Unsupported if the machine has no procfs.
        """
        await wait_for_port(self.files.read, port, timeout)

    async def processes(self, *, running: bool | None = None) -> list[ProcessInfo]:
        """List the processes of this session, or only those that run, or that have exited.

        Raises Unsupported if the server cannot.
        """
        if not self.capabilities.process_list:
            raise Unsupported("processList", "keep the processes that start() returns instead")
        listed = (await self._connected.call(LIST, None, is_retryable=True)).processes
        return [each for each in listed if running is None or each.running is running]

    async def http(
        self,
        method: str,
        url: str,
        *,
        headers: Headers = (),
        body: bytes | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - the server enforces it
        follow_redirects: bool = True,
    ) -> Response:
        """Make an HTTP request from the server's machine; returns a response of any status.

        Raises RpcError if there is no response, Unsupported if the server makes no requests.
        """
        from exec_server.client.http import fetch

        return await fetch(
            self.http_stream(
                method,
                url,
                headers=headers,
                body=body,
                timeout=timeout,
                follow_redirects=follow_redirects,
            )
        )

    def http_stream(
        self,
        method: str,
        url: str,
        *,
        headers: Headers = (),
        body: bytes | None = None,
        timeout: float | None = None,
        follow_redirects: bool = True,
    ) -> HttpStream:
        """An HTTP request, made by `await` or `async with`; its body comes in pieces."""
        from exec_server.client.http import HttpStream

        return HttpStream(
            self._connected,
            method,
            url,
            headers=headers,
            body=body,
            timeout=timeout,
            follow_redirects=follow_redirects,
        )

    def forward_port(
        self, remote_port: int, *, local_port: int = 0, host: str | None = None
    ) -> PortForward:
        """A local port that leads to a port of the server's machine; see PortForward.

        `local_port` 0 is any free port. `host` is another host that the server reaches, if the
        server allows that (`--allow-port-hosts`).
        """
        from exec_server.client.port_forwarding import PortForward

        return PortForward(self._ports, remote_port, local_port=local_port, host=host)

    def reverse_port(self, local_port: int, *, remote_port: int = 0) -> ReversePort:
        """A port of the server's machine that leads to a local port; see ReversePort.

        `remote_port` 0 is any free port.
        """
        from exec_server.client.port_forwarding import ReversePort

        return ReversePort(self._ports, local_port, remote_port=remote_port)

    @property
    def _ports(self) -> PortStreams:
        if self._port_streams is None:
            from exec_server.client.port_forwarding import PortStreams

            self._port_streams = PortStreams(self.session)
        return self._port_streams


def _label(argv: list[str], cwd: AnyPath | None) -> str:
    """The command in the error of a failed start: program or directory may be missing."""
    return argv[0] if cwd is None else f"{argv[0]} in {path_text(cwd)}"
