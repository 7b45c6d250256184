"""A blocking JSON-RPC test client, and servers to talk to: ours or the reference.

`Client` speaks over a websocket or a child's standard streams and sorts what arrives.
`start_server` and its neighbours run a server and see that nothing of it is left behind.
The links below it, with frames and close codes, are in `raw_links` and re-exported here.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import importlib.util
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import pytest

from tests.support.raw_links import (
    BINARY,
    CLOSE,
    CONTINUATION,
    DEFAULT_TIMEOUT,
    PING,
    PONG,
    TEXT,
    TIMEOUT_SCALE,
    Disconnected,
    Frame,
    HandshakeRefused,
    HttpReply,
    Inbox,
    NothingArrived,
    StdioLink,
    WebSocketLink,
    b64,
    frame_bytes,
    http,
    scaled,
    upgrade_request,
)

__all__ = [
    "BINARY",
    "CLOSE",
    "CONTINUATION",
    "DEFAULT_TIMEOUT",
    "KINDS",
    "PING",
    "PONG",
    "TEXT",
    "TIMEOUT_SCALE",
    "Client",
    "Disconnected",
    "Frame",
    "HandshakeRefused",
    "HttpReply",
    "NothingArrived",
    "ProcessRun",
    "RpcFailure",
    "Server",
    "StdioLink",
    "WebSocketLink",
    "assemble",
    "b64",
    "descendants",
    "frame_bytes",
    "http",
    "reference_binary",
    "run_command",
    "scaled",
    "server_command",
    "server_environment",
    "start_server",
    "start_stdio",
    "survivors",
    "upgrade_request",
    "uri",
]

SOURCE = Path(__file__).resolve().parents[2] / "src"
Message = dict[str, Any]

# Parameters of a test that holds for both servers. A case with the mark `reference` is not run on
# a machine without the reference; `tests/conftest.py` sees to that.
KINDS = ["ours", pytest.param("reference", marks=pytest.mark.reference)]


def uri(path: str | os.PathLike[str]) -> str:
    """The file: URI of a native path."""
    return "file://" + quote(os.fsencode(path), safe="/!$&'()*+,-.:;=@[]^_|~")


class RpcFailure(Exception):
    """The server answered a request with an error."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class Link(Protocol):
    """The transport of a `Client`."""

    def send_text(self, text: str | bytes) -> None: ...
    def receive(self, timeout: float) -> bytes: ...
    def close(self) -> None: ...


@dataclass
class ProcessRun:
    """All notifications of one process until it closed."""

    process_id: str
    output: dict[str, bytes] = field(default_factory=dict)
    exit_code: int | None = None
    sandbox_denied: bool | None = None
    sandbox_denial: dict[str, str | None] | None = None
    events: list[tuple[int, str]] = field(default_factory=list)

    @property
    def stdout(self) -> bytes:
        return self.output.get("stdout", b"")

    @property
    def stderr(self) -> bytes:
        return self.output.get("stderr", b"")

    @property
    def pty(self) -> bytes:
        return self.output.get("pty", b"")

    @property
    def seqs(self) -> list[int]:
        return [seq for seq, _ in self.events]


def assemble(process_id: str, notices: Sequence[Message]) -> ProcessRun:
    """Puts the notifications of one process together by `seq`, checking that rule too."""
    run = ProcessRun(process_id)
    chunks: dict[str, list[bytes]] = {}
    mine = [n for n in notices if n["params"].get("processId") == process_id]
    for notice in sorted(mine, key=lambda n: n["params"]["seq"]):
        kind, params = notice["method"].removeprefix("process/"), notice["params"]
        run.events.append((params["seq"], kind))
        if kind == "output":
            chunk = base64.b64decode(params["chunk"], validate=True)
            assert 1 <= len(chunk) <= 8192, f"a chunk of {len(chunk)} bytes"
            chunks.setdefault(params["stream"], []).append(chunk)
        elif kind == "exited":
            run.exit_code, run.sandbox_denied = params["exitCode"], params["sandboxDenied"]
            run.sandbox_denial = params.get("sandboxDenial")
    run.output = {stream: b"".join(parts) for stream, parts in chunks.items()}
    return run


class Client:
    """JSON-RPC over a link: sends, receives, and keeps messages in the order of arrival."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.messages: list[Message] = []
        self.raw: list[bytes] = []
        self.notifications: list[Message] = []
        self.malformed: list[Message] = []
        self.requests: list[Message] = []
        self.session_id = ""
        self.environment_info: Message = {}
        self._answers: dict[str, deque[Message]] = {}
        self._last_id = 0

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def websocket(self) -> WebSocketLink:
        assert isinstance(self.link, WebSocketLink)
        return self.link

    def close(self) -> None:
        self.link.close()

    def send(self, message: Any) -> None:
        self.link.send_text(json.dumps(message, separators=(",", ":"), ensure_ascii=False))

    def notify(self, method: str, params: Any = None) -> None:
        self.send({"method": method} | ({} if params is None else {"params": params}))

    def request(self, method: str, params: Any = None) -> int:
        """Sends a request and returns its id at once."""
        self._last_id += 1
        self.send({"id": self._last_id, "method": method, "params": params})
        return self._last_id

    def receive(self, timeout: float = DEFAULT_TIMEOUT) -> Message:
        """The next message, sorted into its list as well; the limit is scaled."""
        text = self.link.receive(scaled(timeout))
        message: Message = json.loads(text)
        self.raw.append(text)
        self.messages.append(message)
        if "method" in message:
            (self.requests if "id" in message else self.notifications).append(message)
            return message
        if message["id"] == -1:
            self.malformed.append(message)
        self._answers.setdefault(repr(message.get("id")), deque()).append(message)
        return message

    def _receive_until(self, found: Callable[[], Any], timeout: float, what: str) -> Any:
        deadline = time.monotonic() + scaled(timeout)
        while not (value := found()):
            remaining = (deadline - time.monotonic()) / TIMEOUT_SCALE
            try:
                self.receive(max(0.0, remaining))
            except NothingArrived:
                raise NothingArrived(f"{what} within {timeout} s") from None
        return value

    def answer(self, request_id: int | str, timeout: float = DEFAULT_TIMEOUT) -> Message:
        """The whole answer to a request, error or not; taken out, so ids may be used again."""
        waiting = self._answers.setdefault(repr(request_id), deque())
        self._receive_until(lambda: bool(waiting), timeout, f"no answer to {request_id!r}")
        return waiting.popleft()

    def result(self, request_id: int | str, timeout: float = DEFAULT_TIMEOUT) -> Any:
        """The result of a request sent before, or RpcFailure."""
        message = self.answer(request_id, timeout)
        if "error" in message:
            raise RpcFailure(message["error"]["code"], message["error"]["message"])
        return message["result"]

    def call(self, method: str, params: Any = None, timeout: float = DEFAULT_TIMEOUT) -> Any:
        """Sends a request and waits for its result; raises RpcFailure for an error."""
        return self.result(self.request(method, params), timeout)

    def failure(self, method: str, params: Any = None) -> tuple[int, str]:
        """Sends a request that must fail, and returns code and message."""
        try:
            result = self.call(method, params)
        except RpcFailure as failure:
            return failure.code, failure.message
        raise AssertionError(f"{method} succeeded with {result!r}")

    def initialize(self, resume: str | None = None, name: str = "test") -> Message:
        """The handshake, both halves."""
        params = {"clientName": name, "resumeSessionId": resume}
        result: Message = self.call("initialize", params)
        self.session_id = result["sessionId"]
        self.environment_info = result.get("environmentInfo", {})
        self.notify("initialized", {})
        return result

    def wait_for(
        self, predicate: Callable[[Message], Any], timeout: float = DEFAULT_TIMEOUT
    ) -> Message:
        """The first notification, received or future, for which the predicate is true."""
        seen = 0

        def found() -> Message | None:
            nonlocal seen
            while seen < len(self.notifications):
                seen += 1
                if predicate(self.notifications[seen - 1]):
                    return self.notifications[seen - 1]
            return None

        notice: Message = self._receive_until(found, timeout, "no such notification")
        return notice

    def notice(self, method: str, process_id: str, timeout: float = DEFAULT_TIMEOUT) -> Message:
        """The params of a process notification, by method and process."""
        params: Message = self.wait_for(
            lambda n: n["method"] == method and n["params"].get("processId") == process_id, timeout
        )["params"]
        return params

    def silence(self, seconds: float) -> None:
        """Asserts that nothing arrives for this long (not scaled)."""
        try:
            message = self.receive(seconds / TIMEOUT_SCALE)
        except NothingArrived:
            return
        raise AssertionError(f"unexpected message {message!r}")

    def start(self, argv: Sequence[str], **params: Any) -> str:
        """process/start with everything optional left at its plainest; returns the id."""
        process_id = params.pop("process_id", None) or f"p{self._last_id + 1}"
        defaults = {"cwd": "file:///", "env": {"PATH": "/usr/bin:/bin"}, "tty": False}
        request = {"processId": process_id, "argv": list(argv)} | defaults | params
        result = self.call("process/start", request)
        assert result["processId"] == process_id
        return process_id

    def collect(self, process_id: str, timeout: float = DEFAULT_TIMEOUT) -> ProcessRun:
        """Waits for process/closed and for every event before it."""
        closed = self.notice("process/closed", process_id, timeout)
        count = closed["seq"]

        def mine() -> list[Message] | None:
            notices = [
                notice
                for notice in self.notifications
                if notice["method"].startswith("process/")
                and notice["params"].get("processId") == process_id
            ]
            return notices if len(notices) >= count else None

        run = assemble(process_id, self._receive_until(mine, timeout, "events missing"))
        assert run.seqs == list(range(1, count + 1)), run.events
        assert run.events[-1] == (count, "closed"), run.events
        return run

    def run(
        self, argv: Sequence[str], timeout: float = DEFAULT_TIMEOUT, **params: Any
    ) -> ProcessRun:
        """Starts a process and collects all of it until it has closed."""
        return self.collect(self.start(argv, **params), timeout)

    def write(self, process_id: str, data: bytes, write_id: str) -> str:
        """process/write; returns the status."""
        params = {"processId": process_id, "chunk": b64(data), "writeId": write_id}
        status: str = self.call("process/write", params)["status"]
        return status

    def wait_closed(self, timeout: float = DEFAULT_TIMEOUT) -> int | None:
        """Waits until the server ends the connection; returns its close code, if it sent one."""
        deadline = time.monotonic() + scaled(timeout)
        while True:
            try:
                self.receive((deadline - time.monotonic()) / TIMEOUT_SCALE)
            except Disconnected as end:
                return end.close_code


def reference_binary() -> Path | None:
    """The reference server's program: EXEC_SERVER_REFERENCE, or the one in the cache."""
    if named := os.environ.get("EXEC_SERVER_REFERENCE"):
        return Path(named)
    pattern = "node_modules/@openai/codex-*/vendor/*/bin/codex"
    return next(iter(sorted(reference_cache().glob(pattern))), None)


@functools.cache
def reference_version() -> tuple[int, ...]:
    """The version of the reference; () without one."""
    binary = reference_binary()
    if binary is None:
        return ()
    told = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout
    return tuple(int(part) for part in told.split()[-1].partition("-")[0].split("."))


def reference_cache() -> Path:
    """The folder into which `make reference` installs."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "exec-server-reference"


def server_command(kind: str) -> list[str]:
    """The words that start a server, without its flags."""
    if kind == "reference":
        binary = reference_binary()
        assert binary is not None, "there is no reference binary"
        return [str(binary), "exec-server"]
    if command := os.environ.get("EXEC_SERVER_COMMAND"):
        return shlex.split(command)
    return [sys.executable, "-m", "exec_server"]


def server_environment(kind: str, extra: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """The little environment a server under test gets; None in `extra` removes a name."""
    kept = ("PATH", "HOME", "LANG", "COVERAGE_PROCESS_CONFIG")
    environment: dict[str, str | None] = {n: os.environ[n] for n in kept if n in os.environ}
    if kind == "reference":
        home = reference_cache() / "codex-home"
        home.mkdir(parents=True, exist_ok=True)
        environment["CODEX_HOME"] = str(home)
    elif importlib.util.find_spec("exec_server") is None or "PYTHONPATH" in os.environ:
        environment["PYTHONPATH"] = str(SOURCE)
    environment.update(extra or {})
    return {name: value for name, value in environment.items() if value is not None}


def _with_state(
    kind: str, words: Sequence[str], extra: Mapping[str, str | None] | None, state: str
) -> dict[str, str]:
    """The environment of a server; an executor of ours has a state directory of its own."""
    is_executor = kind == "ours" and ("--remote" in words or words[:1] == ["up"])
    own = {"XDG_STATE_HOME": state} if is_executor else {}
    return server_environment(kind, {**own, **(extra or {})})


def _process_table() -> dict[int, tuple[int, str]]:
    """Parent and start time of every process; the start time distinguishes reused pids."""
    table = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z":
                    table[int(entry.name)] = (int(fields[1]), fields[19])
    return table


def descendants(pid: int) -> dict[int, str]:
    """Every living process below one, with its start time."""
    table = _process_table()
    found: dict[int, str] = {}
    parents = {pid}
    while parents:
        children = {p: start for p, (parent, start) in table.items() if parent in parents}
        parents = set(children) - set(found)
        found |= children
    return found


def survivors(processes: Mapping[int, str], timeout: float = 5.0) -> list[int]:
    """Those of the processes that are still there when the time is over."""
    deadline = time.monotonic() + scaled(timeout)
    while True:
        table = _process_table()
        left = [p for p, start in processes.items() if p in table and table[p][1] == start]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.01)


class Server:
    """A running server process, over websocket or stdio."""

    def __init__(self, kind: str, flags: Sequence[str], **options: Any) -> None:
        self.kind = kind
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop()
        self._state = tempfile.TemporaryDirectory()  # an executor keeps its key there
        self.process = subprocess.Popen(
            [*server_command(kind), *flags],
            env=_with_state(kind, flags, options.get("env"), self._state.name),
            cwd=options.get("cwd"),
            stdin=options.get("stdin", subprocess.DEVNULL),
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            start_new_session=True,
        )
        self.url = ""
        self.urls: list[str] = []
        self._listeners = max(1, list(flags).count("--listen"))

    def stderr(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read().decode(errors="replace")

    def read_url(self, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Waits for the lines on stdout with the addresses of the server, usually one."""
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        inbox = Inbox(lambda: os.read(descriptor, 4096), descriptor)
        try:
            for _ in range(self._listeners):
                line = inbox.until(b"\n", time.monotonic() + scaled(timeout))
                self.urls.append(line.decode().rstrip("\n"))
        except Disconnected:
            code = self.process.wait(scaled(timeout))
            raise AssertionError(f"server ended with {code}: {self.stderr()}") from None
        self.url = self.urls[0]

    def dial(self) -> socket.socket:
        """A TCP connection on which nothing has been sent."""
        port = int(self.url.rpartition(":")[2])
        return socket.create_connection(("127.0.0.1", port), scaled(10))

    def link(self, **options: Any) -> WebSocketLink:
        return WebSocketLink(self.url, **options)

    def connect(self, *, initialize: bool = True, resume: str | None = None, **o: Any) -> Client:
        """A new connection, past its handshake unless `initialize` is false."""
        client = Client(self.link(**o))
        if initialize:
            client.initialize(resume)
        return client

    def http(self, request: bytes, timeout: float = DEFAULT_TIMEOUT) -> HttpReply:
        return http(self.url, request, timeout)

    def kill(self) -> None:
        """For the end of a failed test: the server and everything below it, by force."""
        for pid in [*descendants(self.process.pid), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """Ends the server with SIGTERM and asserts a clean end with nothing left."""
        family = descendants(self.process.pid)
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(scaled(DEFAULT_TIMEOUT))
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"SIGTERM did not end the server: {self.stderr()}") from None
        left = survivors(family)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left, f"processes left behind: {left}"
        assert code == 0, f"exit code {code}: {self.stderr()}"

    def release(self) -> None:
        """Lets go of the pipes."""
        for stream in (self.process.stdin, self.process.stdout, self._stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._state.cleanup()


@contextlib.contextmanager
def start_server(
    kind: str,
    *flags: str,
    env: Mapping[str, str | None] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> Iterator[Server]:
    """Runs a websocket server ("ours" or "reference"); by default on a free loopback port."""
    listen = () if "--listen" in flags else ("--listen", "ws://127.0.0.1:0")
    server = Server(kind, [*listen, *flags], env=env, cwd=cwd)
    try:
        server.read_url()
        yield server
    except BaseException:
        server.kill()
        raise
    else:
        if server.process.poll() is None:
            server.stop()
    finally:
        server.release()


@contextlib.contextmanager
def start_stdio(
    kind: str,
    *flags: str,
    env: Mapping[str, str | None] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> Iterator[tuple[Server, Client]]:
    """Runs a server on its standard streams; yields a client without handshake too."""
    server = Server(kind, ["--listen", "stdio", *flags], env=env, cwd=cwd, stdin=subprocess.PIPE)
    client = Client(StdioLink(server.process))
    try:
        yield server, client
        family = descendants(server.process.pid)
        client.close()
        code = server.process.wait(scaled(DEFAULT_TIMEOUT))
        assert not (left := survivors(family)), f"processes left behind: {left}"
        assert code == 0, f"exit code {code}: {server.stderr()}"
    except BaseException:
        server.kill()
        raise
    finally:
        server.release()


def run_command(
    kind: str, *arguments: str, env: Mapping[str, str | None] | None = None, timeout: float = 20.0
) -> subprocess.CompletedProcess[str]:
    """Runs the command line to its end, for start-up errors."""
    with tempfile.TemporaryDirectory() as state:
        return subprocess.run(
            [*server_command(kind), *arguments],
            env=_with_state(kind, arguments, env, state),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=scaled(timeout),
            check=False,
        )
