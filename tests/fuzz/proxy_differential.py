"""Sends requests through the real proxy to origins with different parsers.

Each connection to an origin has exactly the request that the proxy has decided about: its method
and host, nothing before it and nothing after it. All origins understand the same request.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final
from urllib.parse import urlsplit

import h11
from tests.fuzz.engine import Finding
from tests.fuzz.live import LiveRun
from tests.fuzz.proxy_origins import Origin, SeenConnection, SeenRequest, start_origins
from tests.fuzz.proxy_requests import random_requests
from tests.support.client import scaled
from tests.support.network import launch

from exec_server.protocol.network import DecisionParams, PolicyParams
from exec_server.proxy.credentials import CredentialMask, SearchTime
from exec_server.proxy.decider import Decider
from exec_server.proxy.interception import Interceptor, _InterceptedHttp, _Origin
from exec_server.proxy.policy import SAFE_METHODS, NetworkPolicy
from exec_server.proxy.process_proxy import HttpProxy, linger
from exec_server.proxy.stream import SocketStream, Stream
from exec_server.proxy.upstream import Route, Upstream

NAME: Final = "network-proxy"
_SERVE_SECONDS = 30.0
_DOMAINS = {"a.test": "allow", "bad.test": "deny"}


@dataclass(frozen=True)
class Mode:
    """How requests reach the origin; `is_tunnel`: as in a tunnel that is intercepted."""

    is_limited: bool = False
    has_upstream: bool = False
    is_tunnel: bool = False


MODES: Final = tuple(
    Mode(is_limited, has_upstream, is_tunnel)
    for is_limited in (True, False)
    for has_upstream, is_tunnel in ((False, False), (True, False), (False, True))
)


@dataclass(frozen=True)
class _Decided:
    method: str | None
    host: str
    port: int


class _World(Upstream):
    """An upstream that dials one origin, whatever the address is; also a Controller."""

    def __init__(self, mode: Mode, port: int) -> None:
        super().__init__({"HTTP_PROXY": "http://127.0.0.1:9"} if mode.has_upstream else None)
        self.mode = mode
        self.last: _Decided | None = None  # None: the last request was refused
        self.dialled: list[_Decided] = []
        self._port = port

    def report(self, decision: DecisionParams) -> None:
        is_allowed = decision.decision == "allow"
        decided = _Decided(decision.method, decision.host, decision.port)
        self.last = decided if is_allowed else None

    async def ask(self, question: PolicyParams) -> object:
        raise AssertionError("the client is not asked")

    async def resolve(self, host: str) -> Sequence[str]:
        return ("8.8.8.8",)

    async def connect(self, route: Route) -> Stream:
        assert self.last is not None, "a request that was not allowed reaches the origin"
        assert route.is_proxy == self.mode.has_upstream
        stream = await SocketStream.connect("127.0.0.1", self._port)
        self.dialled.append(self.last)
        return stream

    async def tunnel(self, host: str, port: int, addresses: Sequence[str]) -> Stream:
        raise OSError("the bytes in a tunnel are not those of the proxy")

    def serve(self, stream: Stream) -> HttpProxy | _Tunnel:
        if self.mode.is_tunnel:
            return _Tunnel(stream, self)
        mode = "limited" if self.mode.is_limited else "full"
        policy = NetworkPolicy(launch(domains=_DOMAINS, mode=mode))
        return HttpProxy(
            stream, "127.0.0.1:5", Decider("p", policy, self, self.resolve, self.forwards), self
        )


class _PlainInterceptor(Interceptor):
    """Interception without TLS: the requests in it matter here."""

    def __init__(self, world: _World) -> None:
        self.mask = CredentialMask({}, b"key", SearchTime(time.monotonic))
        self.is_limited = world.mode.is_limited
        self._world = world

    async def open(self, origin: _Origin) -> Stream:
        return await self._world.connect(Route(origin.addresses, origin.port))


class _Tunnel(_InterceptedHttp):
    """The requests in an intercepted tunnel to a.test."""

    def __init__(self, stream: Stream, world: _World) -> None:
        origin = _Origin("a.test", 80, ("8.8.8.8",))
        super().__init__(stream, _PlainInterceptor(world), origin)
        self._world = world

    async def handle(self, request: h11.Request) -> bool:
        method = request.method.decode()
        is_allowed = not self._world.mode.is_limited or method in SAFE_METHODS
        self._world.last = _Decided(method, "a.test", 80) if is_allowed else None
        return await super().handle(request)


class Differential:
    """The origins, and the loop in which proxies run."""

    def __init__(self) -> None:
        self.origins = start_origins()
        self._runner = asyncio.Runner()
        self.arrived = 0  # connections to origins

    def close(self) -> None:
        self._runner.close()
        for origin in self.origins:
            origin.close()

    def check(self, data: bytes) -> str | None:
        """What is wrong with the effect of an input: the number of a mode, then bytes."""
        mode, sent = MODES[(data[:1] or b"\0")[0] % len(MODES)], data[1:]
        all_seen = []
        for origin in self.origins:
            try:
                decided = self._runner.run(_exchange(_World(mode, origin.port), sent))
            except AssertionError as error:
                return str(error)
            seen = origin.take(len(decided))
            self.arrived += len(seen)
            for each, connection in zip(decided, seen, strict=True):
                fault = _fault(mode, each, connection)
                if fault is not None:
                    return f"{origin.name}: {fault}: {each} became {connection}"
            all_seen.append([next(iter(each.requests), None) for each in seen])
        return _disagreement(self.origins, all_seen)


async def _exchange(world: _World, sent: bytes) -> list[_Decided]:
    """Send bytes through a proxy; returns what was decided about for each connection."""
    process, served = socket.socketpair()
    for each in (process, served):
        each.setblocking(False)
    loop = asyncio.get_running_loop()
    stream = SocketStream(served)

    async def serve() -> None:
        try:
            await world.serve(stream).serve()
            await linger(stream)
        except OSError:
            pass
        finally:
            stream.close()

    async def send() -> None:
        try:
            await loop.sock_sendall(process, sent)
            process.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # refused before its end

    async def drain() -> None:
        try:
            while await loop.sock_recv(process, 65_536):
                pass
        except ConnectionResetError:
            pass

    with process:
        async with asyncio.timeout(scaled(_SERVE_SECONDS)), asyncio.TaskGroup() as tasks:
            for work in (serve(), send(), drain()):
                tasks.create_task(work)
    return world.dialled


def _fault(mode: Mode, decided: _Decided, seen: SeenConnection) -> str | None:
    """Why a connection is not the request that was decided about."""
    if len(seen.requests) > 1:
        return "a second request"
    if seen.rest or seen.refusal == "HPE_CLOSED_CONNECTION":
        return "bytes after the request"
    if not seen.requests:
        return None if seen.refusal or seen.is_reset else "nothing has arrived"
    request = seen.requests[0]
    if request.method != decided.method:
        return "another method"
    if mode.is_limited and request.method not in SAFE_METHODS:
        return "a method that limited mode refuses"
    if [_place(value) for value in request.values("host")] != [(decided.host, decided.port)]:
        return "another host"
    if request.values("connection") != ["close"]:
        return "a connection for further requests"
    return _target_fault(mode, decided, request)


def _target_fault(mode: Mode, decided: _Decided, request: SeenRequest) -> str | None:
    if not mode.has_upstream:
        return None if request.target.startswith("/") or request.target == "*" else "a target"
    url = urlsplit(request.target)
    if url.scheme != "http" or _place(url.netloc) != (decided.host, decided.port):
        return "another host in the target"
    return None


def _place(authority: str) -> tuple[str, int]:
    name, _, port = authority.partition(":")
    return name.lower().rstrip("."), int(port or "80")


def _disagreement(
    origins: Sequence[Origin], all_seen: Sequence[Sequence[SeenRequest | None]]
) -> str | None:
    """Where origins have understood different requests; a body may be unread."""
    for requests in zip(*all_seen, strict=False):
        known = [each for each in requests if each is not None]
        forms: set[Any] = {(each.method, each.target) for each in known}
        bodies = {each.body for each in known if each.body is not None}
        if len(forms) > 1 or len(bodies) > 1:
            names = ", ".join(origin.name for origin in origins)
            return f"{names} disagree: {requests}"
    return None


def fuzz_proxy(random: Random, seconds: float) -> LiveRun:
    """Send random requests until the time is over."""
    run = LiveRun(NAME)
    differential = Differential()
    if len(differential.origins) < 3:
        print(f"{NAME}: node is not installed, so there are two parsers only", flush=True)
    try:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not run.findings:
            data = random.randbytes(1) + random_requests(random)
            text = differential.check(data)
            run.requests += 1
            run.results = differential.arrived
            if text is not None:
                run.findings.append(Finding(NAME, data, text))
    finally:
        differential.close()
    return run
