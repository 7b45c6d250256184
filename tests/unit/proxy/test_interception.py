"""Interception: the requests in a tunnel over memory, and TLS with both sides over socket pairs."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
from tests.support.certificates import Pair, make_pair
from tests.support.clock import run_in_virtual_time
from tests.support.memory_transport import stream_pair

from exec_server.host.event_loop import GuardedTasks
from exec_server.host.threads import ThreadPool
from exec_server.proxy import interception as module
from exec_server.proxy.authority import CertificateAuthority
from exec_server.proxy.credentials import CredentialMask, SearchTime
from exec_server.proxy.interception import Interceptor, _InterceptedHttp, _Origin
from exec_server.proxy.resources import ProxyResources
from exec_server.proxy.stream import SocketStream, Stream, TransportStream
from exec_server.proxy.upstream import Upstream

_HOST = "api.github.com"
_TOKEN = "ghp_" + "b" * 36
_ENV = {"GITHUB_TOKEN": _TOKEN}
_MASK = CredentialMask(_ENV, b"key", SearchTime(time.monotonic))
_DUMMY = _MASK.masked(_ENV)["GITHUB_TOKEN"]
_NO_THREADS = cast(ThreadPool, None)


class World(Interceptor):
    """An interceptor whose origins are in memory."""

    def __init__(self) -> None:
        self.mask = _MASK
        self.is_limited = False
        self.origins: asyncio.Queue[TransportStream] = asyncio.Queue()
        self.is_verified = True
        self.process, self.served = stream_pair()
        self._ends: list[Stream] = [self.process, self.served]

    async def open(self, origin: _Origin) -> Stream:
        assert origin == _Origin(_HOST, 443, ("8.8.8.8",))
        if not self.is_verified:
            raise OSError("certificate has expired")
        inner, outer = stream_pair()
        self._ends += (inner, outer)
        self.origins.put_nowait(outer)
        return inner

    def send(self, text: str) -> None:
        self.process.writer.write(text.replace("\n", "\r\n").encode())

    async def head(self, stream: TransportStream | None = None) -> str:
        return (await (stream or self.process).reader.readuntil(b"\r\n\r\n")).decode()

    def close(self) -> None:
        for end in self._ends:
            end.close()


def _run(scenario: Callable[[World], Awaitable[None]]) -> None:
    async def run() -> None:
        world = World()
        http = _InterceptedHttp(world.served, world, _Origin(_HOST, 443, ("8.8.8.8",)))
        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            served = tasks.create_task(http.serve())
            await scenario(world)
            world.process.writer.close()
            await served
        world.close()

    asyncio.run(run())


def _get(path: str = "/user", host: str = _HOST, more: str = "") -> str:
    return f"GET {path} HTTP/1.1\nHost: {host}\n{more}\n"


def test_requests_get_the_secret_one_by_one() -> None:
    async def scenario(world: World) -> None:
        # Both are sent at once; the second is read after the answer to the first.
        world.send(
            _get(more=f"Authorization: Bearer {_DUMMY}\n")
            + _get("/next", more=f"X-Other: {_DUMMY}\nAuthorization: token {_DUMMY}\n")
        )
        for path, scheme in (("/user", "Bearer"), ("/next", "token")):
            origin = await world.origins.get()
            head = await world.head(origin)
            assert head.startswith(f"GET {path} HTTP/1.1\r\nHost: {_HOST}\r\n")
            assert f"Authorization: {scheme} {_TOKEN}\r\n" in head
            assert head.count(_TOKEN) == 1
            assert world.origins.empty()
            origin.writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            assert (await world.head()).startswith("HTTP/1.1 200 OK\r\n")
            assert await world.process.reader.readexactly(2) == b"ok"

    _run(scenario)


@pytest.mark.parametrize(
    "sent",
    [
        _get(host="other.test"),
        _get(host=f"{_HOST}:444"),
        _get(host=f"{_HOST}\n other.test"),  # a folded header is one value
        _get(host=f"{_HOST}.other.test"),
        _get(host=f"x@{_HOST}"),
        _get(more="Host: other.test\n"),
        _get("http://other.test/"),
        _get(f"https://{_HOST}/"),
        _get("http://other.test/", host="other.test"),
        f"CONNECT {_HOST}:443 HTTP/1.1\nHost: {_HOST}:443\n\n",
        "GET /user HTTP/1.1\nHost:\n\n",
        _get(more="Content-Length: 1\nTransfer-Encoding: chunked\n"),
        "PRI * HTTP/2.0\n\nSM\n\n",
        "\x16\x03\x01nonsense\n\n",
    ],
)
def test_requests_that_reach_no_origin(sent: str) -> None:
    async def scenario(world: World) -> None:
        world.send(sent)
        head = await world.head()
        assert head.startswith("HTTP/1.1 400 Bad Request\r\n")
        assert "connection: close\r\n" in head
        assert world.origins.empty()

    _run(scenario)


def test_limited_tunnels_pass_safe_methods_only() -> None:
    async def scenario(world: World) -> None:
        world.is_limited = True
        assert world.wants("any.test", 8443)
        world.send(_get())
        origin = await world.origins.get()
        await world.head(origin)
        origin.writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        assert (await world.head()).startswith("HTTP/1.1 204 ")
        world.send(f"POST /user HTTP/1.1\nHost: {_HOST}\nContent-Length: 0\n\n")
        head = await world.head()
        assert head.startswith("HTTP/1.1 403 Forbidden\r\ncontent-type: text/plain\r\n")
        assert "x-proxy-error: blocked-by-method-policy\r\n" in head
        assert "connection: close\r\n" in head
        assert world.origins.empty()

    _run(scenario)


def test_a_pipelined_request_to_another_host_reaches_none() -> None:
    async def scenario(world: World) -> None:
        world.send(_get() + _get("/steal", host="other.test"))
        origin = await world.origins.get()
        await world.head(origin)
        origin.writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        assert (await world.head()).startswith("HTTP/1.1 204 ")
        assert (await world.head()).startswith("HTTP/1.1 400 ")
        assert world.origins.empty()

    _run(scenario)


def test_a_folded_header_gets_the_secret_in_one_line() -> None:
    async def scenario(world: World) -> None:
        world.send(_get(more=f"Authorization: Bearer\n {_DUMMY}\n"))
        origin = await world.origins.get()
        assert f"Authorization: Bearer {_TOKEN}\r\n" in await world.head(origin)
        origin.writer.close()
        assert (await world.head()).startswith("HTTP/1.1 502 Bad Gateway\r\n")

    _run(scenario)


@pytest.mark.parametrize("method", ["TRACE", "TRACK", "trace"])
def test_no_secret_where_the_answer_repeats_the_headers(method: str) -> None:
    async def scenario(world: World) -> None:
        world.send(f"{method} /user HTTP/1.1\nHost: {_HOST}\nAuthorization: Bearer {_DUMMY}\n\n")
        origin = await world.origins.get()
        head = await world.head(origin)
        assert head.startswith(f"{method} /user HTTP/1.1\r\n")
        assert f"Authorization: Bearer {_DUMMY}\r\n" in head
        origin.writer.close()

    _run(scenario)


def test_upgrades_go_no_further() -> None:
    async def scenario(world: World) -> None:
        world.send(_get(more="Connection: Upgrade\nUpgrade: websocket\nSec-WebSocket-Key: x\n"))
        origin = await world.origins.get()
        head = await world.head(origin)
        assert "Upgrade" not in head
        assert "Connection: close\r\n" in head
        # An origin that upgrades nevertheless gets no tunnel.
        origin.writer.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n")
        assert (await world.head()).startswith("HTTP/1.1 502 Bad Gateway\r\n")
        assert await world.process.reader.readexactly(16) == b"upstream failure"

    _run(scenario)


def test_bodies_in_chunks_after_continue() -> None:
    async def scenario(world: World) -> None:
        more = "Transfer-Encoding: chunked\nExpect: 100-continue\n"
        world.send(_get(more=more).replace("GET", "POST"))
        assert (await world.head()) == "HTTP/1.1 100 Continue\r\n\r\n"
        world.send("3\nabc\n0\n\n")
        origin = await world.origins.get()
        assert "expect" not in (await world.head(origin)).lower()
        assert await origin.reader.readuntil(b"0\r\n\r\n") == b"3\r\nabc\r\n0\r\n\r\n"
        origin.writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n")
        assert "transfer-encoding: chunked\r\n" in await world.head()
        assert await world.process.reader.readexactly(7) == b"2\r\nok\r\n"
        origin.writer.write(b"0\r\n\r\n")
        assert await world.process.reader.readexactly(5) == b"0\r\n\r\n"

    _run(scenario)


def test_an_origin_that_is_not_verified() -> None:
    async def scenario(world: World) -> None:
        world.is_verified = False
        world.send(_get())
        assert (await world.head()).startswith("HTTP/1.1 502 Bad Gateway\r\n")
        assert await world.process.reader.readexactly(19) == b"mitm upstream error"

    _run(scenario)


# ---- TLS ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority() -> Iterator[CertificateAuthority]:
    made = CertificateAuthority({})
    yield made
    made.close()


def _pair() -> tuple[SocketStream, socket.socket]:
    inner, outer = socket.socketpair()
    for each in (inner, outer):
        each.setblocking(False)
    return SocketStream(inner), outer


class _Threads:
    """Runs at once what a thread would do."""

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)


class _FixedUpstream(Upstream):
    """Every tunnel is the same connection."""

    def __init__(self, stream: Stream) -> None:
        super().__init__(None)
        self._stream = stream

    async def tunnel(self, host: str, port: int, addresses: Sequence[str]) -> Stream:
        return self._stream


def _resources(tasks: asyncio.TaskGroup, authority: CertificateAuthority) -> ProxyResources:
    resources = ProxyResources(GuardedTasks(tasks), cast(ThreadPool, _Threads()), {})
    resources._authority = authority
    resources._client_context = ssl.create_default_context()
    return resources


@pytest.mark.parametrize("protocols", [None, ["http/1.1"], ["h2", "http/1.1"]])
@pytest.mark.parametrize("name", [_HOST, "other.test"])
def test_the_process_meets_the_host_that_it_asked_for(
    authority: CertificateAuthority, protocols: list[str] | None, name: str
) -> None:
    """The name in the TLS handshake has no effect; HTTP/2 is not spoken."""

    async def run() -> None:
        stream, outer = _pair()
        context = ssl.create_default_context(cafile=authority.file.verified().path)
        context.check_hostname = False
        if protocols is not None:
            context.set_alpn_protocols(protocols)
        accepted: list[str] = []

        async def accept() -> None:
            accepted.append("yes")

        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            upstream = _FixedUpstream(stream)
            interceptor = Interceptor(_MASK, _resources(tasks, authority), upstream)
            assert interceptor.wants(_HOST, 443)
            tasks.create_task(interceptor.serve(stream, (_HOST, 443), ("8.8.8.8",), accept))
            reader, writer = await asyncio.open_connection(
                sock=outer, ssl=context, server_hostname=name
            )
            secure = writer.get_extra_info("ssl_object")
            names = {each[1] for each in secure.getpeercert()["subjectAltName"]}
            assert names == {_HOST}
            assert secure.selected_alpn_protocol() == ("http/1.1" if protocols else None)
            writer.write(b"GET / HTTP/1.1\r\nHost: other.test\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 400 Bad Request\r\n")
            writer.close()
        assert accepted == ["yes"]

    asyncio.run(run())


def _serve_origin(pair: Pair, outer: socket.socket) -> Awaitable[object]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    loop = asyncio.get_running_loop()
    return loop.connect_accepted_socket(asyncio.Protocol, outer, ssl=context)


class _Case(NamedTuple):
    """The certificate of an origin, and why it is refused."""

    host: str
    days: int
    issuer: str
    problem: str | None


@pytest.mark.parametrize(
    "case",
    [
        _Case(_HOST, 1, "trusted", None),
        _Case(_HOST, -1, "trusted", "expired"),
        _Case("other.test", 1, "trusted", "Hostname mismatch"),
        _Case(_HOST, 1, "unknown", "unable to get local issuer"),
    ],
)
def test_the_origin_has_to_prove_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: _Case
) -> None:
    issuers = {name: make_pair(tmp_path, name) for name in ("trusted", "unknown")}
    pair = make_pair(tmp_path, "origin", case.host, issuer=issuers[case.issuer], days=case.days)
    monkeypatch.setenv("SSL_CERT_FILE", str(issuers["trusted"].certificate))

    async def run() -> None:
        stream, outer = _pair()
        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            resources = ProxyResources(GuardedTasks(tasks), _NO_THREADS, {})
            resources.authority()
            interceptor = Interceptor(_MASK, resources, _FixedUpstream(stream))

            async def serve() -> None:
                with contextlib.suppress(OSError):
                    await _serve_origin(pair, outer)

            tasks.create_task(serve())
            opening = interceptor.open(_Origin(_HOST, 443, ("8.8.8.8",)))
            if case.problem is None:
                (await opening).abort()
            else:
                with pytest.raises(OSError, match=case.problem):
                    await opening
            resources.close()
        assert stream.is_closed

    asyncio.run(run())


@pytest.mark.parametrize("host", ["a..b", ".a", "x" * 64 + ".test"])
def test_a_name_that_no_certificate_can_have(authority: CertificateAuthority, host: str) -> None:
    async def run() -> None:
        stream, outer = _pair()
        with outer:
            async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
                resources = _resources(tasks, authority)
                interceptor = Interceptor(_MASK, resources, _FixedUpstream(stream))
                with pytest.raises(OSError, match="no name of a TLS server"):
                    await interceptor.open(_Origin(host, 443, ("8.8.8.8",)))
        stream.close()

    asyncio.run(run())


def test_handshakes_are_limited_in_time(authority: CertificateAuthority) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            resources = _resources(tasks, authority)
            for side in ("process", "origin"):
                stream, outer = _pair()
                interceptor = Interceptor(_MASK, resources, _FixedUpstream(stream))
                began = loop.time()
                work: Awaitable[object] = (
                    interceptor.serve(stream, (_HOST, 443), (), _accept)
                    if side == "process"
                    else interceptor.open(_Origin(_HOST, 443, ()))
                )
                with outer, pytest.raises(OSError):
                    await work
                assert loop.time() == began + module.HANDSHAKE_SECONDS == began + 30

    async def _accept() -> None:
        pass

    run_in_virtual_time(run())


def test_the_authority_is_made_once() -> None:
    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            resources = ProxyResources(GuardedTasks(tasks), _NO_THREADS, {})
            assert resources.certificate_path is None
            made = resources.authority()
            path = made.file.verified().path
            assert resources.certificate_path == path
            assert resources.authority() is made
            assert resources.client_context().verify_mode is ssl.CERT_REQUIRED
            resources.close()
            assert not Path(path).exists()
            ProxyResources(GuardedTasks(tasks), _NO_THREADS, {}).close()

    asyncio.run(run())
