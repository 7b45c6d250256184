"""The real service in a thread, with a journal of its requests and faults in its answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import uvloop

from exec_server.host.event_loop import GuardedTasks
from exec_server.hosting import http_messages
from exec_server.hosting.http_connection import HttpConnection, SocketAdmission, TakeOver
from exec_server.hosting.http_messages import Networks
from exec_server.hosting.metrics import Metrics
from exec_server.hosting.node import ServiceOptions
from exec_server.hosting.rules import Refusal, secret_hash
from exec_server.hosting.service import Service, Signals
from exec_server.hosting.sqlite_database import SqliteDatabase
from exec_server.hosting.store import NewToken, Store
from tests.relay_service.faults import (
    GARBAGE,
    Answer,
    Endpoint,
    Faults,
    FrameFaults,
    HttpFault,
    HttpFaultKind,
    HttpFaults,
)
from tests.relay_service.journal import Journal, Message, Request
from tests.relay_service.plain import Form, PlainForms
from tests.relay_service.sockets import Socket, Sockets, WatchedUpgrade
from tests.support.raw_links import DEFAULT_TIMEOUT, scaled

# For peers to read the close frame, then for aborted sockets to close.
CLOSE_SECONDS = 0.5
# Above every test: the limits of the real service have tests of their own.
_LIMITS = (10_000, 10_000, 10_000_000_000, 10_000)
_SCOPES = ("executor:*", "connect:*")
_TENANT_ID, _TENANT = "00112233445566ff", "tests"
_ENDPOINTS = re.compile(
    r"/cloud/(?:environment|executor)/[^/]+/(register|connect|validate|direct/register)"
)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Settings:
    """How a service behaves without faults."""

    host: str = "127.0.0.1"
    # Accepted values of Authorization; None accepts any.
    authorizations: Iterable[str] | None = None
    # Whether a second executor may register for an environment that is online.
    takeover: bool = True
    # Whether registrations are told that handshakes name the client's token; only a registry of
    # ours does so, and executors then limit each token.
    names_tokens: bool = True
    # Whether the forms without encryption are served, and which one /cloud/executor/ means.
    plaintext: bool = False
    executor_form: Form = Form.TEXT
    # Record forwarded messages; slows forwarding down.
    record: bool = True
    # For https and wss.
    tls: ssl.SSLContext | None = None
    seed: int = 0


class RelayService:
    """A registry and rendezvous in the running event loop. A front.RequestHandler."""

    trusted: Networks = ()

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.token = "executor-token"
        self.journal = Journal(record=settings.record)
        self.faults = Faults(settings.seed)
        self.sockets = Sockets(self.journal, self.faults)
        self._plain = PlainForms(
            self.sockets, settings.executor_form, is_allowed=settings.plaintext
        )
        self._tokens: dict[str, str] = {}  # the token of each Authorization header
        self._fronts: set[HttpConnection] = set()
        self._spoilt: set[asyncio.Transport] = set()
        self._port = 0
        self._server: asyncio.Server | None = None
        self._store: Store
        self.hosting: Service
        self._start_task: Callable[[Coroutine[Any, Any, None]], object]

    async def run(self, opened: Callable[[], None], stop: asyncio.Event) -> None:
        """Serve until `stop` is set."""
        metrics = Metrics()
        with tempfile.TemporaryDirectory() as folder:
            self._store = Store(SqliteDatabase(Path(folder) / "registry.db"), metrics)
            try:
                await self._store.open()
                await self._store.tenant(_TENANT, _TENANT_ID)
                await self._store.limit_tenant(_TENANT, _LIMITS)
                async with asyncio.TaskGroup() as tasks:
                    self._start_task = GuardedTasks(tasks).create_task
                    await self.listen()
                    options = ServiceOptions(
                        self.url, self.url, stall_seconds=30.0, takeover=self.settings.takeover
                    )
                    self.hosting = Service(self._store, metrics, options, self._start_task)
                    node = self.hosting.node
                    await node.start()
                    background = [tasks.create_task(node.run()), tasks.create_task(node.tick())]
                    opened()
                    await stop.wait()
                    self.deafen()
                    ended = Signals(asyncio.Event(), stop, asyncio.Event())
                    await self.hosting.run(ended)
                    for task in background:
                        task.cancel()
                    await self._end_connections()
            finally:
                await self._store.close()

    async def listen(self) -> None:
        """Accept connections, at the same port as before if there was one."""
        self._server = await asyncio.get_running_loop().create_server(
            lambda: HttpConnection(self, self._start_task, self._fronts),
            self.settings.host,
            self._port,
            ssl=self.settings.tls,
        )
        self._port = self._server.sockets[0].getsockname()[1]
        self._plain.listen_at(f"ws{self.url.removeprefix('http')}")

    def deafen(self) -> None:
        """Refuse new connections until `listen`; those that are open stay."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _end_connections(self) -> None:
        transports = {socket.transport for socket in self.sockets} | self._spoilt
        for transport in transports:
            transport.close()
        with contextlib.suppress(TimeoutError):
            await self.journal.until(lambda: not self.sockets, CLOSE_SECONDS)
        for transport in transports:
            transport.abort()
        await asyncio.sleep(0)

    # ---- for connections --------------------------------------------------------------------

    def admission(self) -> SocketAdmission:
        return self.hosting.admission()

    def overloaded(self, path: str) -> http_messages.ServiceAnswer:
        return self.hosting.overloaded(path)

    def refuse(self, refusal: Refusal, peer: str) -> http_messages.ServiceAnswer:
        return self.hosting.refuse(refusal, peer)

    async def answer(
        self, request: http_messages.ServiceRequest
    ) -> http_messages.ServiceAnswer | TakeOver:
        recorded = _recorded(request)
        self.journal.requests.append(recorded)
        is_upgrade = recorded.header("upgrade") is not None
        fault = self.faults.http.take(self.endpoint(recorded), upgrade=is_upgrade)
        self.journal.changed()
        if fault is None:
            right = await self._answer(recorded, request)
            return _Spoilt(self._spoilt, right) if isinstance(right, Answer) else right
        answer = fault.answer
        if answer is None and not fault.preempts and not is_upgrade:
            granted = await self._answer(recorded, request)
            answer = granted if isinstance(granted, Answer) else _as_answer(granted)
        if fault.rewrite is not None and answer is not None and answer.status == 200:
            body = answer.body if isinstance(answer.body, dict) else json.loads(answer.body)
            answer = Answer(200, fault.rewrite(body), answer.headers)
        return _Spoilt(self._spoilt, answer, fault)

    async def _answer(
        self, recorded: Request, request: http_messages.ServiceRequest
    ) -> Answer | http_messages.ServiceAnswer | TakeOver:
        """The answer without a fault."""
        plain = self._plain.answer(recorded)
        if plain is not None:
            return plain
        token = await self._token(recorded.header("authorization"))
        headers = request.headers | ({"authorization": f"Bearer {token}"} if token else {})
        answer = await self.hosting.answer(
            http_messages.ServiceRequest(
                *(request.method, request.path, request.query, headers),
                *(request.body, request.peer, request.head),
            )
        )
        if isinstance(answer, http_messages.ServiceAnswer):
            return answer if self.settings.names_tokens else _without_tokens(answer)
        role = "environment" if "role=environment" in request.query else "harness"
        name = request.path.rpartition("/")[2].partition(".")[2]
        return WatchedUpgrade(answer, lambda wire: Socket(self.sockets, wire, role, name))

    async def _token(self, authorization: str | None) -> str:
        """A token of the real registry for each accepted header; empty without a header."""
        if not authorization:
            return ""
        accepted = self.settings.authorizations
        token = secret_hash(authorization)
        if authorization not in self._tokens and (accepted is None or authorization in accepted):
            self._tokens[authorization] = token
            name = f"tok-{token[:12]}"
            await self._store.add_token(
                NewToken(name, secret_hash(token), name, _TENANT_ID, _SCOPES)
            )
        return token

    # ---- for tests --------------------------------------------------------------------------

    def endpoint(self, request: Request) -> Endpoint | None:
        if request.header("upgrade") is not None:
            is_executor = "role=environment" in request.query.split("&")
            return Endpoint.EXECUTOR_SOCKET if is_executor else Endpoint.HARNESS_SOCKET
        found = _ENDPOINTS.fullmatch(request.path)
        return None if found is None else Endpoint(found[1])

    @property
    def url(self) -> str:
        """The base URL of the registry."""
        scheme = "http" if self.settings.tls is None else "https"
        return f"{scheme}://{self.settings.host}:{self._port}"

    @property
    def requests(self) -> list[Request]:
        """All requests so far, upgrades included, the oldest first."""
        return list(self.journal.requests)

    def requests_to(self, endpoint: Endpoint) -> list[Request]:
        return [request for request in self.requests if self.endpoint(request) is endpoint]

    @property
    def frames(self) -> list[Message]:
        """Forwarded messages, the oldest first."""
        return list(self.journal.traffic.messages)

    async def until(self, predicate: Callable[[], T], seconds: float = DEFAULT_TIMEOUT) -> T:
        """Wait until the predicate is true, asked anew whenever something happened here."""
        value: T = await self.journal.until(predicate, scaled(seconds))
        return value

    async def wait_for_executor(
        self, environment_id: str, seconds: float = DEFAULT_TIMEOUT
    ) -> Socket:
        """Wait until an executor is attached."""
        socket = await self.until(lambda: self.executor(environment_id), seconds)
        assert socket is not None
        return socket

    def executor(self, environment_id: str) -> Socket | None:
        """The executor's socket, with its faults."""
        return self.sockets.executor(environment_id)

    def harness(self, stream_id: str) -> Socket | None:
        """The socket of the client that owns a stream, with its faults."""
        return self.sockets.harness(stream_id)

    def harnesses(self, environment_id: str) -> list[Socket]:
        """The sockets of all clients of an environment."""
        return self.sockets.harnesses(environment_id)

    def plain_url(self, environment_id: str) -> str:
        """Where clients of an executor without encryption connect, again and again."""
        return self._plain.client_url(environment_id)


@dataclass(frozen=True, slots=True)
class _Spoilt:
    """An answer that the real service could not give. A front.TakeOver."""

    transports: set[asyncio.Transport]
    answer: Answer | None
    fault: HttpFault = field(default_factory=HttpFault)

    def open(self, transport: asyncio.Transport, request: object, first: bytes) -> None:
        manner = self.fault.manner
        if manner is HttpFaultKind.HANG:
            self.transports.add(transport)
            transport.resume_reading()
        elif manner is HttpFaultKind.GARBAGE:
            transport.write(GARBAGE)
            transport.close()
        elif self.answer is None:  # a cut upgrade
            transport.abort()
        else:
            data = self.answer.encode()
            if manner is HttpFaultKind.CUT:
                data = data[: len(data) - (len(self.answer.content()) + 1) // 2]
            if manner is HttpFaultKind.DRIP:
                self.transports.add(transport)
                self._drip(transport, data)
            else:
                transport.write(data)
                transport.close()

    def _drip(self, transport: asyncio.Transport, data: bytes) -> None:
        if not data or transport.is_closing():
            transport.close()
            return
        transport.write(data[: self.fault.piece])
        rest = data[self.fault.piece :]
        asyncio.get_running_loop().call_later(self.fault.pause, self._drip, transport, rest)

    def cancel(self) -> None:
        """The peer has left."""


def _recorded(request: http_messages.ServiceRequest) -> Request:
    lines = request.head.decode("latin-1").split("\r\n")
    headers = [line.partition(":") for line in lines[1:] if line]
    target = request.path + (f"?{request.query}" if request.query else "")
    return Request(
        request.method,
        target,
        tuple((name.lower(), value.strip()) for name, _, value in headers),
        request.body,
        time.time(),
    )


def _as_answer(answer: object) -> Answer:
    assert isinstance(answer, http_messages.ServiceAnswer)
    return Answer(answer.status, answer.body, tuple(answer.headers.items()))


def _without_tokens(answer: http_messages.ServiceAnswer) -> Answer | http_messages.ServiceAnswer:
    body = json.loads(answer.body) if answer.status == 200 else {}
    return Answer(200, body) if body.pop("names_tokens", None) else answer


class _LoopThread:
    """One event loop for all services of the process: links of the real one share a buffer."""

    def __init__(self) -> None:
        self._users = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def enter(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = uvloop.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="relay services")
            self._thread.start()
        self._users += 1
        return self._loop

    def leave(self) -> None:
        self._users -= 1
        if self._users == 0 and self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._loop = self._thread = None


_loop_thread = _LoopThread()
_PARTS = (HttpFaults, FrameFaults)


class _OnLoop:
    """An object of the service's thread: methods called here run there."""

    def __init__(self, call: Callable[..., Any], target: Any) -> None:
        self._call = call
        self._target = target

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if callable(value):
            return lambda *args, **kwargs: self._call(value, *args, **kwargs)
        return _OnLoop(self._call, value) if isinstance(value, _PARTS) else value


class ThreadedRelayService:
    """A `RelayService` on a loop of another thread, for tests that block."""

    def __init__(self, **settings: Any) -> None:
        self._settings = Settings(**settings)
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self._running: Any = None
        self.service: RelayService  # to be used with `call` only

    def __enter__(self) -> Self:
        self._loop = _loop_thread.enter()
        opened = threading.Event()

        async def run() -> None:
            self._stop = asyncio.Event()
            self.service = RelayService(self._settings)
            try:
                await self.service.run(opened.set, self._stop)
            finally:
                opened.set()

        self._running = asyncio.run_coroutine_threadsafe(run(), self._loop)
        opened.wait()
        if self._running.done():
            self._leave()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._leave()

    def _leave(self) -> None:
        try:
            self._running.result(scaled(DEFAULT_TIMEOUT))
        finally:
            _loop_thread.leave()

    def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a function in the service's thread and give its result."""

        async def run() -> T:
            return function(*args, **kwargs)

        return self._await(run())

    def _await(self, waiting: Coroutine[Any, Any, T], seconds: float = DEFAULT_TIMEOUT) -> T:
        future = asyncio.run_coroutine_threadsafe(waiting, self._loop)
        # Later than the limit within, so that that one is reported.
        return future.result(scaled(seconds) + scaled(DEFAULT_TIMEOUT))

    @property
    def url(self) -> str:
        return self.service.url

    @property
    def token(self) -> str:
        return self.service.token

    @property
    def requests(self) -> list[Request]:
        return self.call(lambda: self.service.requests)

    @property
    def frames(self) -> list[Message]:
        return self.call(lambda: self.service.frames)

    @property
    def faults(self) -> Any:
        """`faults.Faults`, to be used from any thread."""
        return _OnLoop(self.call, self.service.faults)

    def requests_to(self, endpoint: Endpoint) -> list[Request]:
        return self.call(self.service.requests_to, endpoint)

    def until(self, predicate: Callable[[], T], seconds: float = DEFAULT_TIMEOUT) -> T:
        """Wait until the predicate, run in the service's thread, is true."""
        return self._await(self.service.until(predicate, seconds), seconds)

    def wait_for_executor(self, environment_id: str, seconds: float = DEFAULT_TIMEOUT) -> Any:
        """Wait for the executor and give its `Socket`, to be used from any thread."""
        found = self._await(self.service.wait_for_executor(environment_id, seconds), seconds)
        return _OnLoop(self.call, found)

    def executor(self, environment_id: str) -> Any:
        """The executor's `Socket`, to be used from any thread, or None."""
        return self._handle(self.call(self.service.executor, environment_id))

    def harness(self, stream_id: str) -> Any:
        """The client's `Socket`, to be used from any thread, or None."""
        return self._handle(self.call(self.service.harness, stream_id))

    def harnesses(self, environment_id: str) -> list[Any]:
        found = self.call(self.service.harnesses, environment_id)
        return [_OnLoop(self.call, socket) for socket in found]

    def _handle(self, socket: Socket | None) -> Any:
        return None if socket is None else _OnLoop(self.call, socket)

    def plain_url(self, environment_id: str) -> str:
        return self.call(self.service.plain_url, environment_id)

    def listen(self) -> None:
        self._await(self.service.listen())

    def deafen(self) -> None:
        self.call(self.service.deafen)
