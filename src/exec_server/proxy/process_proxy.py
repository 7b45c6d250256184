"""ProcessProxy: the listeners of one process's proxies, and the connections to them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import resource
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import h11

from exec_server.errors import printable
from exec_server.protocol.network import NetworkProxy, ProxySettings
from exec_server.proxy import http_messages as messages
from exec_server.proxy.certificate_file import VerifiedFile
from exec_server.proxy.credentials import (
    CERTIFICATE_VARIABLES,
    CredentialMask,
    SearchTime,
    custom_providers,
)
from exec_server.proxy.decider import Controller, Decider
from exec_server.proxy.http_exchange import HttpExchange, date
from exec_server.proxy.http_messages import BadRequest, RequestTarget
from exec_server.proxy.interception import Interceptor
from exec_server.proxy.policy import Decision, NetworkAccess, NetworkPolicy, check
from exec_server.proxy.resources import ProxyResources
from exec_server.proxy.socks_proxy import SocksProxy, UdpAssociation
from exec_server.proxy.stream import SocketStream, Stream, carry
from exec_server.proxy.upstream import Upstream

_UNIX_SOCKET: Final = b"x-unix-socket"

_HTTP: Final = (
    *("HTTP_PROXY", "HTTPS_PROXY", "WS_PROXY", "WSS_PROXY"),
    *("http_proxy", "https_proxy", "ws_proxy", "wss_proxy"),
    *("YARN_HTTP_PROXY", "YARN_HTTPS_PROXY", "PIP_PROXY"),
    *("BUNDLE_HTTP_PROXY", "BUNDLE_HTTPS_PROXY", "DOCKER_HTTP_PROXY", "DOCKER_HTTPS_PROXY"),
    *("npm_config_http_proxy", "npm_config_https_proxy", "npm_config_proxy"),
    *("NPM_CONFIG_HTTP_PROXY", "NPM_CONFIG_HTTPS_PROXY", "NPM_CONFIG_PROXY"),
)
_SOCKS: Final = ("ALL_PROXY", "all_proxy", "FTP_PROXY", "ftp_proxy")
_EXCEPTIONS: Final = (
    *("NO_PROXY", "no_proxy", "npm_config_noproxy", "NPM_CONFIG_NOPROXY", "BUNDLE_NO_PROXY"),
)
_LOCAL: Final = "localhost,127.0.0.1,::1,10.0.0.0/8,172.16.0.0/12,192.168.0.0/16"
_PROXY_URL: Final = re.compile(r"[a-z0-9]+://(?:[^/@]*@)?(?:127\.0\.0\.1|localhost):([0-9]{1,5})/?")

log = logging.getLogger(__name__)

LOOPBACK: Final = "127.0.0.1"
# The ports of the proxies in a network namespace of their own, where all ports are free.
NAMESPACE_HTTP_PORT: Final = 3128
NAMESPACE_SOCKS_PORT: Final = 1080
# Connections to the proxies of one process, each with two sockets: package managers open dozens.
# Further ones are closed at once.
MAX_CONNECTIONS: Final = 256
# Those of all processes of a server: so many, and no more than a quarter of the descriptors that
# the server may have, so that half of them is left for its clients and their commands.
MAX_SERVER_CONNECTIONS: Final = 1024
# Associations of one process for datagrams, each with three more sockets: programs that use UDP
# through SOCKS have one. Further ones are refused.
MAX_ASSOCIATIONS: Final = 16
# Connections that are not accepted yet; the kernel makes others wait.
BACKLOG: Final = 128
# The pause after a connection could not be accepted, as in asyncio.
ACCEPT_RETRY_SECONDS: Final = 1.0
# What is read and dropped after a refusal, so that the process can read the refusal: closing a
# socket with unread bytes resets the connection.
LINGER_BYTES: Final = 262_144
LINGER_SECONDS = 1.0
# Variables that one line of the log names; a client's providers may list a thousand.
LOGGED_NAMES: Final = 8

_Handler = Callable[[Stream, str], Awaitable[None]]


class HttpProxy(HttpExchange):
    """One connection of a process: decides about each request, forwards it or opens a tunnel."""

    def __init__(
        self,
        stream: Stream,
        client: str,
        decider: Decider,
        upstream: Upstream,
        interceptor: Interceptor | None = None,
    ) -> None:
        super().__init__(stream)
        self._client = client
        self._decider = decider
        self._upstream = upstream
        self._interceptor = interceptor

    async def handle(self, request: h11.Request) -> bool:
        if request.method == b"CONNECT":
            return await self._connect(request)
        await self._forward(request)
        return False

    async def _connect(self, request: h11.Request) -> bool:
        """Serve CONNECT; True if the connection has become a tunnel and has ended."""
        target = messages.find_target(request)
        asked = self._request("https_connect", request, target)
        await self.drop_body(request)
        decision = await self._decider.decide(asked)
        if not decision.is_allowed:
            await self.answer(request, messages.block_answer(asked, decision, date()))
            return False
        if self._interceptor is not None and self._interceptor.wants(target.host, target.port):
            if self.early:
                raise BadRequest(400, "the tunnel is not open yet")
            await self._interceptor.serve(
                self.stream, target[:2], decision.addresses, self._accept_tunnel
            )
            return True
        try:
            outer = await self._upstream.tunnel(target.host, target.port, decision.addresses)
        except OSError:
            await self.answer(request, messages.text_answer(502, "upstream failure", date()))
            return False
        try:
            await self._accept_tunnel()
        except BaseException:
            outer.abort()
            raise
        await carry(self.stream, outer, self.early)
        return True

    async def _accept_tunnel(self) -> None:
        await self.stream.send(b"HTTP/1.1 200 OK\r\ndate: %b\r\n\r\n" % date())

    async def _forward(self, request: h11.Request) -> None:
        if any(name == _UNIX_SOCKET for name, _ in request.headers):
            asked = self._request("http", request, RequestTarget("unix-socket", 0, b""))
            reason = "unix_socket_unsupported"
            self._decider.report(asked, Decision("deny", "proxy_state", reason, scope="non_domain"))
            raise BadRequest(501, "unix sockets unsupported")
        target = messages.find_target(request)
        asked = self._request("http", request, target)
        decision = await self._decider.decide(asked)
        if not decision.is_allowed:
            answer = messages.block_answer(asked, decision, date())
            await self.answer(request, answer, last=not messages.is_empty(request))
            return
        route = self._upstream.route(target.host, target.port, decision.addresses, tunnel=False)
        try:
            outer = await self._upstream.connect(route)
        except OSError:
            await self._answer_failure(request)
            return
        try:
            forwarded = messages.forwarded_request(request, target, absolute=route.is_proxy)
            if route.authorization is not None:
                forwarded.headers.append((b"Proxy-Authorization", route.authorization))
            if self._interceptor is not None and not route.is_proxy:
                # Only destinations on loopback may get secrets without TLS.
                forwarded = self._interceptor.restored(forwarded, target, "http")
            has_response = await self.exchange(request, forwarded, outer)
        finally:
            outer.close()
        if not has_response:
            await self._answer_failure(request)

    async def _answer_failure(self, request: h11.Request) -> None:
        answer = messages.text_answer(502, "upstream failure", date())
        await self.answer(request, answer, last=True)

    def _request(self, protocol: Any, request: h11.Request, target: RequestTarget) -> NetworkAccess:
        method = request.method.decode("ascii")
        return NetworkAccess(protocol, target.host, target.port, self._client, method)


def proxy_variables(
    settings: ProxySettings, http_port: int, socks_port: int | None
) -> dict[str, str]:
    """The environment variables that lead a process to proxies on these ports of 127.0.0.1."""
    http = f"http://127.0.0.1:{http_port}"
    socks = http if socks_port is None else f"socks5h://127.0.0.1:{socks_port}"
    exceptions = _LOCAL if settings.allow_local_binding else ""
    return {
        **dict.fromkeys(_HTTP, http),
        **dict.fromkeys(_SOCKS, socks),
        **dict.fromkeys(_EXCEPTIONS, exceptions),
        "CODEX_NETWORK_PROXY_ACTIVE": "1",
        "CODEX_NETWORK_ALLOW_LOCAL_BINDING": "1" if settings.allow_local_binding else "0",
        "NODE_USE_ENV_PROXY": "1",
        "ELECTRON_GET_USE_PROXY": "true",
    }


def named_ports(env: Mapping[str, str]) -> set[int]:
    """The ports of this machine that the proxy variables of an environment name."""
    matches = (_PROXY_URL.fullmatch(env.get(name, "").lower()) for name in (*_HTTP, *_SOCKS))
    return {int(match[1]) for match in matches if match is not None}


def server_connections() -> int:
    """How many connections the proxies of all processes may have."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return MAX_SERVER_CONNECTIONS
    return min(MAX_SERVER_CONNECTIONS, descriptors // 4)


class Listeners:
    """Listening sockets of one process, and the tasks that serve their connections."""

    def __init__(self, resources: ProxyResources) -> None:
        self._resources = resources
        self._bound: list[tuple[socket.socket, _Handler]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_open = False
        self._is_closed = False

    def listen_one(self, handler: _Handler) -> int:
        """Bind a free port of 127.0.0.1, which accepts from `open` on. For any thread."""
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.bind((LOOPBACK, 0))
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
        self._bound.append((listener, handler))
        return int(listener.getsockname()[1])

    def adopt_one(self, descriptor: int, handler: _Handler) -> None:
        """Own a listening socket of another network namespace. For any thread."""
        self._bound.append((socket.socket(fileno=descriptor), handler))

    def open_soon(self) -> None:
        """Begin to accept, from any thread."""
        self._resources.loop.call_soon_threadsafe(self.open)

    def open(self) -> None:
        """Begin to accept; in the event loop."""
        if self._is_closed:
            self._close_bound()
            return
        self._is_open = True
        for listener, handler in self._bound:
            listener.setblocking(False)
            self._watch(listener, handler)

    def _watch(self, listener: socket.socket, handler: _Handler) -> None:
        if not self._is_closed:
            self._resources.loop.add_reader(listener, self._accept, listener, handler)

    def _accept(self, listener: socket.socket, handler: _Handler) -> None:
        try:
            accepted, (address, port) = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # the process has given up
        except OSError as error:
            # No descriptor is left. The connection still waits, so the loop would not rest.
            log.warning("a network proxy cannot accept connections: %s", error)
            loop = self._resources.loop
            loop.remove_reader(listener)
            loop.call_later(ACCEPT_RETRY_SECONDS, self._watch, listener, handler)
            return
        is_full = len(self._tasks) >= MAX_CONNECTIONS
        if is_full or self._resources.connections >= server_connections():
            log.warning("a network proxy has too many connections; one is refused")
            accepted.close()
            return
        accepted.setblocking(False)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        serving = self._serve(SocketStream(accepted), f"{address}:{port}", handler)
        task = self._resources.tasks.create_task(serving)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, stream: Stream, client: str, handler: _Handler) -> None:
        self._resources.connections += 1
        try:
            await handler(stream, client)
            await linger(stream)
        except OSError:
            pass  # the process has closed its end
        finally:
            self._resources.connections -= 1
            stream.close()

    def close(self) -> None:
        """Accept no more connections, and end the open ones."""
        self._is_closed = True
        self._close_bound()
        for task in tuple(self._tasks):
            task.cancel()

    def _close_bound(self) -> None:
        while self._bound:
            listener, _ = self._bound.pop()
            if self._is_open:
                self._resources.loop.remove_reader(listener)
            listener.close()


async def linger(stream: Stream) -> None:
    """Let the process read what was sent to it, and drop what it still sends."""
    if stream.is_closed:
        return
    stream.write_eof()
    left = LINGER_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while left > 0 and (data := await stream.receive()):
                left -= len(data)


class ProcessProxy(Listeners):
    """The proxies of one process, from before its start until it has closed."""

    def __init__(
        self,
        launch: NetworkProxy,
        process_id: str,
        controller: Controller,
        resources: ProxyResources,
    ) -> None:
        """Raises InvalidParams for rules that cannot be understood."""
        super().__init__(resources)
        check(launch, process_id)
        policy = NetworkPolicy(launch)
        self._process_id = process_id
        self._settings = launch.proxy
        self._is_limited = policy.is_limited
        variables = resources.variables if launch.proxy.allow_upstream_proxy else None
        self._upstream = Upstream(variables, private=resources.private_via_upstream)
        forwards = self._upstream.forwards
        self._decider = Decider(process_id, policy, controller, resources.resolve, forwards)
        self._interceptor: Interceptor | None = None
        self._associations = 0
        self._has_datagrams = False
        self.certificates: VerifiedFile | None = None  # of a masked process

    @property
    def refusal(self) -> str | None:
        """The hosts that were refused, for people; None if there are none."""
        return self._decider.refusal

    def mask(self, env: Mapping[str, str]) -> dict[str, str]:
        """The process environment, masked if asked for; raises InvalidParams. In a thread."""
        if not self._settings.credential_masking:
            if self._settings.credential_providers:
                self._log_exposure("credentialProviders without credentialMasking mask nothing")
            return dict(env)
        providers = custom_providers(self._settings.credential_providers)
        search_time = SearchTime(time.thread_time)
        mask = CredentialMask(env, self._resources.mask_key, search_time, providers)
        if mask.unmasked:
            # The reference starts it silently: Codex may list variables that hold no secret now.
            names = ", ".join(mask.unmasked[:LOGGED_NAMES])
            self._log_exposure(
                f"no pattern of a credential provider matches {names}, so it is not masked"
            )
        self._interceptor = Interceptor(
            mask, self._resources, self._upstream, is_limited=self._is_limited
        )
        self.certificates = self._resources.authority().file.verified()
        return mask.masked(env) | dict.fromkeys(CERTIFICATE_VARIABLES, self.certificates.path)

    def _log_exposure(self, text: str) -> None:
        log.error("process %s: %s", printable(self._process_id), text)

    def listen(self) -> dict[str, str]:
        """Bind free ports of this machine; returns the variables of the process. In a thread."""
        http_port = self.listen_one(self._serve_http)
        socks_port = None
        if self._settings.enable_socks5:
            socks_port = self.listen_one(self._serve_socks)
            # Sockets of this machine cannot be reached from a network namespace.
            self._has_datagrams = self._settings.enable_socks5_udp
        return proxy_variables(self._settings, http_port, socks_port)

    @property
    def namespace_ports(self) -> tuple[int, ...]:
        """The ports of the proxies in a network namespace of the process."""
        if self._settings.enable_socks5:
            return NAMESPACE_HTTP_PORT, NAMESPACE_SOCKS_PORT
        return (NAMESPACE_HTTP_PORT,)

    def namespace_variables(self) -> dict[str, str]:
        """The variables of a process with the proxies on `namespace_ports`."""
        socks_port = NAMESPACE_SOCKS_PORT if self._settings.enable_socks5 else None
        return proxy_variables(self._settings, NAMESPACE_HTTP_PORT, socks_port)

    def adopt(self, descriptors: Sequence[int]) -> None:
        """Own the listening sockets on `namespace_ports`. In a thread."""
        handlers: tuple[_Handler, ...] = (self._serve_http, self._serve_socks)
        for descriptor, handler in zip(descriptors, handlers, strict=False):
            self.adopt_one(descriptor, handler)

    async def _serve_http(self, stream: Stream, client: str) -> None:
        await HttpProxy(stream, client, self._decider, self._upstream, self._interceptor).serve()

    async def _serve_socks(self, stream: Stream, client: str) -> None:
        await SocksProxy(
            *(stream, client, self._decider, self._upstream),
            interceptor=self._interceptor,
            associate=self._associate if self._has_datagrams else None,
        ).serve()

    @contextlib.contextmanager
    def _associate(self, client: str, port: int) -> Iterator[UdpAssociation]:
        """An association for datagrams; raises OSError beyond the limits."""
        is_full = self._associations >= MAX_ASSOCIATIONS
        if is_full or self._resources.connections >= server_connections():
            log.warning("a network proxy has too many associations; one is refused")
            raise OSError("too many associations")
        association = UdpAssociation(client, port, self._decider)
        self._associations += 1
        self._resources.connections += 1  # it has as many sockets as a connection
        try:
            yield association
        finally:
            association.close()
            self._associations -= 1
            self._resources.connections -= 1


class PortBridge(Listeners):
    """Ports of this machine's loopback that a process in a network namespace may reach."""

    refusal = None  # the proxies of the client know it

    def __init__(self, ports: Sequence[int], resources: ProxyResources) -> None:
        super().__init__(resources)
        self.namespace_ports = tuple(ports)

    def adopt(self, descriptors: Sequence[int]) -> None:
        """Own the listening sockets on `namespace_ports`. In a thread."""
        for descriptor, port in zip(descriptors, self.namespace_ports, strict=True):
            self.adopt_one(descriptor, partial(self._bridge, port))

    async def _bridge(self, port: int, stream: Stream, client: str) -> None:
        await carry(stream, await SocketStream.connect(LOOPBACK, port))
