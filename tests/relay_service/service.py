"""The whole service on one port: registry, rendezvous, journal and faults, made and unmade."""

from __future__ import annotations

import asyncio
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import aiofastnet
import uvloop

from tests.relay_service.faults import Faults, FrameFaults, HttpFault, HttpFaults
from tests.relay_service.front import Connections, Front
from tests.relay_service.journal import Journal, Message, Request
from tests.relay_service.registry import Answer, Endpoint, Registry
from tests.relay_service.rendezvous import Rendezvous
from tests.relay_service.sockets import Socket
from tests.relay_service.state import (
    AUTHORIZATION_SECONDS,
    Authorizations,
    Callers,
    Clock,
    Directory,
    Form,
)
from tests.relay_service.streams import Exchange
from tests.relay_service.tickets import EXECUTOR, Rejected, Tickets
from tests.support.raw_links import DEFAULT_TIMEOUT, scaled

# Time for peers to read the close frame, and again for the loop to close aborted sockets.
CLOSE_SECONDS = 0.5
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Settings:
    """How a service behaves when nothing is wrong with it."""

    host: str = "127.0.0.1"
    port: int = 0
    # Before every registry path.
    prefix: str = ""
    # Accepted values of Authorization, perhaps with whom they stand for; None accepts any.
    authorizations: Mapping[str, str] | Iterable[str] | None = None
    # Known environments; None lets any be registered.
    environments: Iterable[str] | None = None
    # Whether a second executor may register for an environment that is online.
    takeover: bool = True
    # Whether the historical forms without encryption are served, and which one
    # /cloud/executor/{id}/register asks for.
    plaintext: bool = False
    executor_form: Form = Form.TEXT
    authorization_seconds: float = AUTHORIZATION_SECONDS
    # Record forwarded messages; slows forwarding down.
    record: bool = True
    # For https and wss.
    tls: ssl.SSLContext | None = None
    # Put in place of scheme, host and port of handed out WebSocket addresses.
    socket_base: str | None = None
    ping_seconds: float = 30.0
    pong_seconds: float = 60.0
    seed: int = 0
    clock: Clock = time.time


class RelayService:
    """A registry and rendezvous in the running event loop, for `async with`."""

    def __init__(self, **settings: Any) -> None:
        self.settings = Settings(**settings)
        wishes = self.settings
        self.token = secrets.token_urlsafe(32)
        self.journal = Journal(record=wishes.record)
        self.faults = Faults(wishes.seed)
        self.directory = Directory(known=wishes.environments, takeover=wishes.takeover)
        self._tickets = Tickets(wishes.clock)
        self.registry = Registry(
            self.directory,
            Authorizations(wishes.clock, wishes.authorization_seconds),
            self._tickets,
            Callers(wishes.authorizations),
            plaintext=wishes.plaintext,
            executor_form=wishes.executor_form,
        )
        self.registry.prefix = wishes.prefix
        self._rendezvous = Rendezvous(
            self.directory,
            Exchange(self.journal, self.faults),
            ping_seconds=wishes.ping_seconds,
            pong_seconds=wishes.pong_seconds,
        )
        self._connections = Connections(self.journal.changed)
        self._server: Any = None
        self.port = wishes.port

    async def __aenter__(self) -> Self:
        await self.listen()
        self._rendezvous.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.deafen()
        self._rendezvous.stop()
        await self._connections.end(CLOSE_SECONDS)

    async def listen(self) -> None:
        """Accept connections, at the same port as before if there was one."""
        wishes = self.settings
        self._server = await aiofastnet.create_server(
            asyncio.get_running_loop(),
            lambda: Front(self, self._connections, wishes.clock),
            wishes.host,
            self.port,
            ssl=wishes.tls,
        )
        self.port = self._server.sockets[0].getsockname()[1]
        scheme = "ws" if wishes.tls is None else "wss"
        self.registry.socket_base = wishes.socket_base or f"{scheme}://{wishes.host}:{self.port}"

    def deafen(self) -> None:
        """Refuse new connections until `listen`; those that are open stay."""
        if self._server is not None:
            self._server.close()
            self._server = None

    # ---- for connections, as `front.ConnectionHandler` ------------------------------------------

    def arrived(self, request: Request) -> None:
        self.journal.requests.append(request)

    def endpoint(self, request: Request) -> Endpoint | None:
        if request.header("upgrade") is not None:
            role = f"role={EXECUTOR}"
            is_executor = role in request.query.split("&")
            return Endpoint.EXECUTOR_SOCKET if is_executor else Endpoint.HARNESS_SOCKET
        return self.registry.endpoint(request)

    def fault(self, endpoint: Endpoint | None, *, upgrade: bool) -> HttpFault | None:
        found = self.faults.http.take(endpoint, upgrade=upgrade)
        self.journal.changed()
        return found

    def answer(self, request: Request) -> Answer:
        return self.registry.answer(request)

    def accept(self, request: Request) -> Socket:
        return self._rendezvous.accept(self._tickets.check(request.target))

    # ---- for tests -----------------------------------------------------------------

    @property
    def url(self) -> str:
        """The base address of the registry."""
        scheme = "http" if self.settings.tls is None else "https"
        return f"{scheme}://{self.settings.host}:{self.port}{self.settings.prefix}"

    @property
    def requests(self) -> list[Request]:
        """All requests so far, upgrades included, the oldest first."""
        return list(self.journal.requests)

    def requests_to(self, endpoint: Endpoint) -> list[Request]:
        return [request for request in self.requests if self.endpoint(request) is endpoint]

    @property
    def frames(self) -> list[Message]:
        """Messages to forward, the oldest first."""
        return list(self.journal.traffic.messages)

    @property
    def connections(self) -> int:
        """How many connections of any kind are open."""
        return len(self._connections)

    async def until(self, predicate: Callable[[], T], seconds: float = DEFAULT_TIMEOUT) -> T:
        """Wait until the predicate is true, asked anew whenever something happened here."""
        found: T = await self.journal.until(predicate, scaled(seconds))
        return found

    async def wait_for_executor(
        self, environment_id: str, seconds: float = DEFAULT_TIMEOUT
    ) -> Socket:
        """Wait until an executor with the current registration is attached."""
        found = await self.until(lambda: self.executor(environment_id), seconds)
        assert found is not None
        return found

    def executor(self, environment_id: str) -> Socket | None:
        """The executor's socket, with its faults."""
        return self._rendezvous.executor(environment_id)

    def harness(self, stream_id: str) -> Socket | None:
        """The socket of the client that owns a stream, with its faults."""
        return self._rendezvous.harness(stream_id)

    def harnesses(self, environment_id: str) -> list[Socket]:
        """The sockets of all clients of an environment."""
        return self._rendezvous.harnesses(environment_id)

    def plain_url(self, environment_id: str) -> str:
        """Where clients of an executor without encryption connect, again and again."""
        registration = self.directory.current(environment_id)
        if registration is None or registration.form is Form.NOISE:
            raise Rejected(404, "unknown_route")
        return self.registry.socket_base + self._tickets.for_plain_client(registration)


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
    """A `RelayService` with a thread and a loop of its own, for tests that block."""

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._service: RelayService | None = None
        self._thread = threading.Thread(target=self._run, name="relay service")

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            self._thread.join()
            raise self._failure
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(scaled(DEFAULT_TIMEOUT))
        assert not self._thread.is_alive(), "the relay service does not end"
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve())
        except BaseException as error:
            self._failure = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with RelayService(**self._settings) as self._service:
            self._ready.set()
            await self._stop.wait()

    @property
    def service(self) -> RelayService:
        """The service itself; to be used with `call` only."""
        assert self._service is not None, "the service is not running"
        return self._service

    def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a function in the service's thread and give its result."""

        async def run() -> T:
            return function(*args, **kwargs)

        return self._await(run())

    def _await(self, waiting: Coroutine[Any, Any, T], seconds: float = DEFAULT_TIMEOUT) -> T:
        assert self._loop is not None
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
