"""HttpProxy: one connection of a process to its HTTP proxy."""

from __future__ import annotations

from typing import Any, Final

import h11

from exec_server.proxy import http_messages as messages
from exec_server.proxy.decider import Decider
from exec_server.proxy.http_exchange import HttpExchange, date
from exec_server.proxy.http_messages import BadRequest, RequestTarget
from exec_server.proxy.interception import Interceptor
from exec_server.proxy.policy import Decision, NetworkAccess
from exec_server.proxy.stream import Stream, carry
from exec_server.proxy.upstream import Upstream

_UNIX_SOCKET: Final = b"x-unix-socket"


class HttpProxy(HttpExchange):
    """Decides about each request, and forwards it or opens a tunnel."""

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
        place = target[:2]
        if self._interceptor is not None and self._interceptor.wants(*place):
            if self.early:
                raise BadRequest(400, "the tunnel is not open yet")
            addresses = decision.addresses
            await self._interceptor.serve(self.stream, place, addresses, self._accept_tunnel)
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
            self._report_unix_socket(request)
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

    def _report_unix_socket(self, request: h11.Request) -> None:
        asked = NetworkAccess(
            "http", "unix-socket", 0, self._client, request.method.decode("ascii")
        )
        reason = "unix_socket_unsupported"
        self._decider.report(asked, Decision("deny", "proxy_state", reason, scope="non_domain"))
