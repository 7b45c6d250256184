"""ClientSession against real servers: behind WebSockets that are cut, programs, relays."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shlex
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvloop

from exec_server.client import program, relay_dialers
from exec_server.client import session as session_module
from exec_server.client.dialers import (
    Dialer,
    WebSocketDialer,
)
from exec_server.client.program import StdioDialer
from exec_server.client.relay_dialers import PlainRelayDialer, RelayDialer
from exec_server.client.session import ClientSession
from exec_server.errors import (
    ConnectFailed,
    ConnectionLost,
    NotFound,
    RegistryBusy,
    RegistryError,
    SessionLost,
)
from exec_server.protocol import files, process
from exec_server.protocol.base64text import Base64
from exec_server.protocol.method import Notice
from exec_server.protocol.paths import PathUri
from exec_server.protocol.process import ProcessId
from exec_server.protocol.session import STATUS
from exec_server.relay.noise import PublicKey
from relay_service import Endpoint, ThreadedRelayService
from relaying import ENVIRONMENT, KINDS, start_executor, wait_attached
from wire import (
    PATIENCE,
    descendants,
    scaled,
    server_command,
    server_environment,
    start_server,
    survivors,
)

LOOPS = [asyncio.run, uvloop.run]
Run = Callable[[Coroutine[Any, Any, None]], None]

# Waits for a line, then prints numbered lines, little by little.
COUNTER = """
import sys, time
sys.stdin.readline()
for number in range(3000):
    print(number, flush=number % 10 == 0)
    if number % 10 == 0: time.sleep(0.001)
"""
COUNTED = "".join(f"{number}\n" for number in range(3000)).encode()
# Answers `initialize`, then neither answers nor goes.
DEAF = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sys.stdin.readline()
print('{"id":1,"result":{"sessionId":"s","environmentInfo":{"shell":{"name":"","path":""}}}}')
sys.stdout.flush()
while True: time.sleep(100)
"""


class Recorder:
    """Collects the output of one process, and after a loss asks for what it missed."""

    def __init__(self, session: ClientSession, tasks: asyncio.TaskGroup) -> None:
        self._session = session
        self._tasks = tasks
        self._chunks: dict[int, bytes] = {}
        self._last = 0  # up to here nothing is missing
        self._seen: set[int] = set()
        self._end: int | None = None
        self.resumed = 0
        self.on_output: Callable[[], None] = lambda: None
        self.complete = asyncio.Event()
        session.subscribe(self)

    async def start(self, *argv: str, pipe_stdin: bool = False) -> None:
        params = process.StartParams(
            process_id=ProcessId("p"),
            argv=list(argv),
            cwd=PathUri.from_wire("/"),
            env={"PATH": "/usr/bin:/bin"},
            tty=False,
            pipe_stdin=pipe_stdin,
        )
        assert (await self._session.call(process.START, params)).process_id == "p"

    async def count(self) -> None:
        """Start the counter and let it count; the word to do so is sent once, whatever happens."""
        await self.start(sys.executable, "-S", "-c", COUNTER, pipe_stdin=True)
        params = process.WriteParams(ProcessId("p"), Base64(b"go\n"), "1")
        answer = await self._session.call(process.WRITE, params, is_retryable=True)
        assert answer.status == "accepted"

    @property
    def output(self) -> bytes:
        return b"".join(self._chunks[seq] for seq in sorted(self._chunks))

    def on_notice(self, notice: Notice[Any], params: Any) -> None:
        self._take(params.seq, getattr(params, "chunk", None))
        if notice is process.CLOSED:
            self._end = params.seq
        self._check()
        if notice is process.OUTPUT:
            self.on_output()

    def _take(self, seq: int, chunk: bytes | None) -> None:
        self._seen.add(seq)
        if chunk is not None:
            self._chunks[seq] = chunk
        while self._last + 1 in self._seen:
            self._last += 1

    def _check(self) -> None:
        if self._end is not None and self._last >= self._end:
            self.complete.set()

    def on_disconnected(self) -> None:
        pass

    def on_resumed(self) -> None:
        self.resumed += 1
        self._tasks.create_task(self._catch_up())

    async def _catch_up(self) -> None:
        params = process.ReadParams(ProcessId("p"), self._last, None, 0)
        missed = await self._session.call(process.READ, params, is_retryable=True)
        for chunk in missed.chunks:
            self._take(chunk.seq, chunk.chunk)
        # What is no output is the exit and the end.
        for seq in range(self._last + 1, missed.next_seq):
            self._take(seq, None)
        if missed.closed:
            self._end = missed.next_seq - 1
        self._check()

    def on_lost(self, error: SessionLost) -> None:
        pass


class Proxy:
    """A TCP proxy in front of a server, whose connections can be cut."""

    def __init__(self, url: str) -> None:
        self.target = url
        self.url = ""
        self.accepted = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Proxy]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            self.cut()
            if self._tasks:
                await asyncio.wait(self._tasks)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.accepted += 1
        self._writers.add(writer)
        parts = urlsplit(self.target)
        try:
            far = await asyncio.open_connection(parts.hostname, parts.port)
        except OSError:
            writer.transport.abort()
            return
        self._writers.add(far[1])
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._copy(reader, far[1]))
            tasks.create_task(self._copy(far[0], writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        writer.close()
        self._writers.discard(writer)

    def cut(self) -> None:
        """Reset every connection."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()


async def ready(session: ClientSession) -> bool:
    return (await session.call(STATUS, None, is_retryable=True)).status == "ready"


async def until_lost(session: ClientSession) -> None:
    """Call until a call finds the session lost: the loss is noticed a moment after its cause."""
    while True:
        await ready(session)


async def exercise(dialer: Dialer) -> None:
    """A session that does a little of everything."""
    async with asyncio.timeout(scaled(PATIENCE)), ClientSession(dialer) as session:
        assert session.environment_info.platform_os == "linux"
        async with asyncio.TaskGroup() as tasks:
            recorder = Recorder(session, tasks)
            await recorder.start("/bin/sh", "-c", "echo out; exit 3")
            await recorder.complete.wait()
        assert recorder.output == b"out\n"
        read = await session.call(process.READ, process.ReadParams(ProcessId("p")))
        assert (read.exit_code, read.closed) == (3, True)
        with pytest.raises(NotFound, match="No such file or directory"):
            await session.call(files.READ_FILE, files.ReadFileParams(PathUri.from_wire("/none")))


def bounded(scene: Coroutine[Any, Any, None], run: Run = asyncio.run) -> None:
    """Run a scene in a loop of its own, within a test's patience."""

    async def limited() -> None:
        async with asyncio.timeout(scaled(3 * PATIENCE)):
            await scene

    run(limited())


# ---- WebSockets -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("run", LOOPS)
def test_a_session_over_a_websocket(kind: str, run: Run) -> None:
    with start_server(kind) as server:
        bounded(exercise(WebSocketDialer(server.url)), run)


def test_a_token_opens_the_door(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("correct-horse-battery-staple")
    flags = ("--ws-auth", "capability-token", "--ws-token-file", "token")

    async def scene(url: str) -> None:
        await exercise(WebSocketDialer(url, token="correct-horse-battery-staple"))
        with pytest.raises(ConnectFailed) as refused:
            await exercise(WebSocketDialer(url, token="wrong-horse"))
        assert refused.value.status == 401
        assert "wrong-horse" not in str(refused.value)

    with start_server("ours", *flags, cwd=tmp_path) as server:
        bounded(scene(server.url))


def test_nobody_there() -> None:
    with start_server("ours") as server:
        url = server.url
    with pytest.raises(ConnectFailed, match="Connection refused"):
        bounded(exercise(WebSocketDialer(url)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("run", LOOPS)
def test_no_output_is_lost_when_the_connection_is_cut(kind: str, run: Run) -> None:
    cuts = 5

    async def scene(url: str) -> None:
        async with Proxy(url).running() as proxy:
            async with (
                ClientSession(WebSocketDialer(proxy.url)) as session,
                asyncio.TaskGroup() as tasks,
            ):
                first = session.session_id
                recorder = Recorder(session, tasks)

                def cut() -> None:
                    # Once for each connection, as soon as it has brought output.
                    if proxy.accepted == recorder.resumed + 1 <= cuts:
                        proxy.cut()

                recorder.on_output = cut
                await recorder.count()
                await recorder.complete.wait()
                assert session.session_id == first
            assert recorder.output == COUNTED
            assert recorder.resumed == cuts

    with start_server(kind) as server:
        bounded(scene(server.url), run)


def test_calls_at_the_moment_of_a_cut() -> None:
    async def scene(url: str) -> None:
        async with (
            Proxy(url).running() as proxy,
            ClientSession(WebSocketDialer(proxy.url)) as session,
            asyncio.TaskGroup() as tasks,
        ):
            await Recorder(session, tasks).start("/bin/sleep", "1000")
            poll = process.ReadParams(ProcessId("p"), 0, None, 300)
            once = tasks.create_task(outcome(session.call(process.READ, poll)))
            again = tasks.create_task(session.call(process.READ, poll, is_retryable=True))
            await ready(session)  # so the server has them
            proxy.cut()
            assert isinstance(await once, ConnectionLost)
            assert await ready(session)  # made during recovery
            assert not (await again).exited

    with start_server("ours") as server:
        bounded(scene(server.url))


async def outcome(waiting: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await waiting
    except Exception as error:
        return error


def test_a_server_that_does_not_know_the_session_ends_it() -> None:
    async def scene(url: str, other: str) -> None:
        async with (
            Proxy(url).running() as proxy,
            ClientSession(WebSocketDialer(proxy.url)) as session,
        ):
            proxy.target = other
            proxy.cut()
            with pytest.raises(SessionLost, match=f"unknown session id {session.session_id}"):
                await until_lost(session)

    with start_server("ours") as server, start_server("ours") as other:
        bounded(scene(server.url, other.url))


def test_a_server_that_stays_away_ends_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "RECOVERY_SECONDS", 0.3)

    async def scene(url: str) -> None:
        async with (
            Proxy(url).running() as proxy,
            ClientSession(WebSocketDialer(proxy.url)) as session,
        ):
            proxy.target = "ws://127.0.0.1:1"
            proxy.cut()
            with pytest.raises(SessionLost, match=r"no connection within 0\.3 s"):
                await until_lost(session)
            assert proxy.accepted > 2

    with start_server("ours") as server:
        bounded(scene(server.url))


# ---- programs -------------------------------------------------------------------------


def stdio_dialer(kind: str, **options: Any) -> StdioDialer:
    argv = [*server_command(kind), "--listen", "stdio"]
    return StdioDialer(argv, server_environment(kind), **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("run", LOOPS)
def test_a_session_with_a_program(kind: str, run: Run) -> None:
    before = descendants(os.getpid())
    bounded(exercise(stdio_dialer(kind)), run)
    started = {p: s for p, s in descendants(os.getpid()).items() if p not in before}
    assert not survivors(started)


@pytest.mark.parametrize("run", LOOPS)
def test_a_program_that_dies_takes_the_session_with_it(run: Run) -> None:
    async def scene() -> None:
        async with ClientSession(stdio_dialer("ours")) as session, asyncio.TaskGroup() as tasks:
            await Recorder(session, tasks).start("/bin/sleep", "1000")
            poll = process.ReadParams(ProcessId("p"), 0, None, 60_000)
            call = session.call(process.READ, poll, is_retryable=True)
            waiting = tasks.create_task(outcome(call))
            await ready(session)
            for pid in descendants(os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
            assert isinstance(await waiting, SessionLost)
            with pytest.raises(SessionLost):
                await ready(session)

    bounded(scene(), run)


@pytest.mark.parametrize("run", LOOPS)
def test_a_program_that_does_not_go_is_killed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "TERMINATE_SECONDS", 0.1)
    family: dict[int, str] = {}

    async def scene() -> None:
        # With a child that would keep the pipes open.
        command = (
            f"trap '' TERM; sleep 1000 & exec {shlex.quote(sys.executable)} -c {shlex.quote(DEAF)}"
        )
        async with ClientSession(StdioDialer(["/bin/sh", "-c", command])) as session:
            assert session.session_id == "s"
            family.update(descendants(os.getpid()))
            assert len(family) >= 2

    before = descendants(os.getpid())
    bounded(scene(), run)
    assert not survivors({p: s for p, s in family.items() if p not in before})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("run", LOOPS)
def test_reading_can_be_held(kind: str, run: Run) -> None:
    async def scene(dialer: Dialer) -> None:
        async with ClientSession(dialer) as session, asyncio.TaskGroup() as tasks:
            recorder = Recorder(session, tasks)
            held = asyncio.Event()

            def hold() -> None:
                assert not held.is_set()
                session.hold()
                held.set()

            recorder.on_output = hold
            await recorder.start("/bin/sh", "-c", "seq 1 100000")
            await held.wait()
            for _ in range(10):
                recorder.on_output = lambda: pytest.fail("output while held")
                await asyncio.sleep(0)
            recorder.on_output = lambda: None
            session.release()
            await recorder.complete.wait()
            assert recorder.output == b"".join(b"%d\n" % n for n in range(1, 100_001))
            session.hold()  # closing does not need to be let

    with start_server(kind) as server:
        bounded(scene(WebSocketDialer(server.url)), run)
    bounded(scene(stdio_dialer(kind)), run)


@pytest.mark.parametrize("run", LOOPS)
def test_a_program_that_is_cancelled_is_gone(run: Run) -> None:
    async def scene() -> None:
        connected = asyncio.Event()

        async def use() -> None:
            async with ClientSession(stdio_dialer("ours")):
                connected.set()
                await asyncio.Event().wait()

        async with asyncio.TaskGroup() as tasks:
            user = tasks.create_task(use())
            await connected.wait()
            user.cancel()

    before = descendants(os.getpid())
    bounded(scene(), run)
    left = {p: s for p, s in descendants(os.getpid()).items() if p not in before}
    assert not survivors(left)


@pytest.mark.parametrize("run", LOOPS)
def test_what_a_program_says_on_stderr(run: Run) -> None:
    lines: list[str] = []
    long = "x" * (program.STDERR_BYTES + 10)
    words = [*server_command("ours"), "--listen", "stdio"]
    script = f'printf "one\\ntwo\\n{long}\\nrest" >&2; exec "$@"'
    argv = ["/bin/sh", "-c", script, "sh", *words]
    bounded(exercise(StdioDialer(argv, server_environment("ours"), on_stderr=lines.append)), run)
    assert lines[:4] == ["one", "two", long[: program.STDERR_BYTES], "x" * 10]
    assert lines[4].startswith("rest")


def test_a_program_that_is_not_there() -> None:
    with pytest.raises(ConnectFailed, match=r"cannot start /none: No such file or directory"):
        bounded(exercise(StdioDialer(["/none"])))


def test_a_program_that_speaks_another_language() -> None:
    with pytest.raises(ConnectFailed, match="connection ended during initialize: malformed"):
        bounded(exercise(StdioDialer(["/bin/echo", "hello"])))


def test_a_program_inherits_no_secret_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXEC_SERVER_API_KEY", "secret-1")
    monkeypatch.setenv("CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN", "secret-2")
    monkeypatch.setenv("EXEC_SERVER_TEST_CANARY", "canary")
    lines: list[str] = []
    dialer = StdioDialer(["/bin/sh", "-c", "env >&2"], on_stderr=lines.append)
    with pytest.raises(ConnectFailed):
        bounded(exercise(dialer))
    assert "EXEC_SERVER_TEST_CANARY=canary" in lines
    assert not [line for line in lines if "secret-" in line]


# ---- relays ---------------------------------------------------------------------------


def relay_dialer(service: ThreadedRelayService, **options: Any) -> RelayDialer:
    return RelayDialer(service.url, ENVIRONMENT, token="client", **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("run", LOOPS)
def test_a_session_through_a_relay(kind: str, run: Run) -> None:
    with ThreadedRelayService() as service, start_executor(service, kind=kind):
        bounded(exercise(relay_dialer(service, account_id="account-1")), run)
        [request] = service.requests_to(Endpoint.CONNECT)
        assert request.header("authorization") == "Bearer client"
        assert request.header("chatgpt-account-id") == "account-1"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("end", ["harness", "executor"])
def test_no_output_is_lost_when_an_end_of_the_relay_is_cut(kind: str, end: str) -> None:
    async def scene(service: ThreadedRelayService) -> None:
        async with ClientSession(relay_dialer(service)) as session, asyncio.TaskGroup() as tasks:
            recorder = Recorder(session, tasks)

            def cut() -> None:
                recorder.on_output = lambda: None
                if end == "harness":
                    service.harnesses(ENVIRONMENT)[0].abort()
                else:
                    service.executor(ENVIRONMENT).abort()

            recorder.on_output = cut
            await recorder.count()
            await recorder.complete.wait()
        assert recorder.output == COUNTED
        assert recorder.resumed == 1

    with ThreadedRelayService() as service, start_executor(service, kind=kind):
        bounded(scene(service), uvloop.run)
        # A fresh bundle for each attempt, and more than one of them while the executor was away.
        assert len(service.requests_to(Endpoint.CONNECT)) >= 2


@pytest.mark.parametrize("kind", KINDS)
def test_an_executor_may_come_later_than_its_client(kind: str) -> None:
    failures: list[BaseException] = []

    def use() -> None:
        try:
            bounded(exercise(relay_dialer(service)))
        except BaseException as error:
            failures.append(error)

    with ThreadedRelayService() as service:
        client = threading.Thread(target=use)
        client.start()
        try:
            service.until(lambda: service.service.requests_to(Endpoint.CONNECT))
            with start_executor(service, kind=kind):
                client.join(scaled(3 * PATIENCE))
                assert not client.is_alive()
        finally:
            client.join(scaled(3 * PATIENCE))
        assert not failures
        assert len(service.requests_to(Endpoint.CONNECT)) >= 2


def test_an_executor_that_was_replaced_ends_the_session() -> None:
    async def scene(service: ThreadedRelayService, first: Any) -> None:
        async with ClientSession(relay_dialer(service)) as session:
            with start_executor(service, attached=False) as second:
                first.kill()
                await asyncio.to_thread(wait_attached, service, second)
                with pytest.raises(SessionLost, match="unknown session id"):
                    await until_lost(session)

    with ThreadedRelayService() as service, start_executor(service) as executor:
        bounded(scene(service, executor))


def no_delay(attempt: int) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("status", "code", "requests", "kind"),
    [
        (503, "busy", 5, RegistryBusy),
        (429, "slow_down", 5, RegistryBusy),
        (409, "environment_offline", 5, RegistryBusy),
        (409, "another", 1, RegistryError),
        (401, "invalid_token", 1, RegistryError),
        (404, "environment_not_found", 1, RegistryError),
    ],
)
def test_a_registry_that_refuses(
    status: int, code: str, requests: int, kind: type[Exception]
) -> None:
    with ThreadedRelayService() as service:
        service.faults.http.answer(Endpoint.CONNECT, status, code=code, times=None)
        dialer = relay_dialer(service)
        dialer.retry_delay = no_delay  # type: ignore[method-assign]
        with pytest.raises(kind) as raised:
            bounded(exercise(dialer))
        assert type(raised.value) is kind
        assert len(service.requests_to(Endpoint.CONNECT)) == requests


def test_a_registry_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_dialers, "REQUEST_SECONDS", 0.1)
    monkeypatch.setattr(relay_dialers, "FIRST_SECONDS", 0.25)
    with ThreadedRelayService() as service:
        service.faults.http.hang(Endpoint.CONNECT, times=None)
        dialer = relay_dialer(service)
        dialer.retry_delay = no_delay  # type: ignore[method-assign]
        with pytest.raises(RegistryBusy, match="timed out"):
            bounded(exercise(dialer))
        assert len(service.requests_to(Endpoint.CONNECT)) == 3


def test_an_expired_address_is_fetched_anew_once() -> None:
    with ThreadedRelayService() as service, start_executor(service):
        service.faults.http.reject(Endpoint.HARNESS_SOCKET, 401, "expired")
        bounded(exercise(relay_dialer(service)))
        assert len(service.requests_to(Endpoint.CONNECT)) == 2
        service.faults.http.reject(Endpoint.HARNESS_SOCKET, 401, "expired", times=None)
        with pytest.raises(ConnectFailed, match="relay: HTTP error: 401"):
            bounded(exercise(relay_dialer(service)))
        assert len(service.requests_to(Endpoint.CONNECT)) == 4


def test_a_relay_that_refuses_is_not_asked_twice() -> None:
    with ThreadedRelayService() as service, start_executor(service):
        service.faults.http.reject(Endpoint.HARNESS_SOCKET, 503, "pod_draining")
        with pytest.raises(ConnectFailed, match="relay: HTTP error: 503"):
            bounded(exercise(relay_dialer(service)))
        assert len(service.requests_to(Endpoint.CONNECT)) == 1


def test_a_refused_handshake_is_no_connection() -> None:
    with ThreadedRelayService() as service, start_executor(service):
        service.faults.http.answer(Endpoint.VALIDATE, 200, {"valid": False})
        with pytest.raises(
            ConnectFailed, match="relay: relay handshake failed: relay stream reset"
        ):
            bounded(exercise(relay_dialer(service)))


def test_an_executor_can_be_pinned() -> None:
    with ThreadedRelayService() as service, start_executor(service):
        [request] = service.requests_to(Endpoint.REGISTER)
        written = json.loads(request.body)["executor_public_key"]
        halves = [written[f"{name}_public_key"] for name in ("x25519", "mlkem768")]
        pin = PublicKey(*map(base64.b64decode, halves)).fingerprint
        bounded(exercise(relay_dialer(service, executor_key_fingerprint=pin.upper())))
        wrong = f"{pin[:-1]}{int(pin[-1], 16) ^ 1:x}"
        with pytest.raises(RegistryError, match=f"not the expected one: its fingerprint is {pin}"):
            bounded(exercise(relay_dialer(service, executor_key_fingerprint=wrong)))
        assert len(service.requests_to(Endpoint.HARNESS_SOCKET)) == 1


@pytest.mark.parametrize("run", LOOPS)
def test_the_older_relay_without_encryption(run: Run) -> None:
    flags = ("--relay-security", "plain")
    with ThreadedRelayService(plaintext=True) as service, start_executor(service, *flags):
        bounded(exercise(PlainRelayDialer(service.plain_url(ENVIRONMENT))), run)
