"""The rendezvous: which WebSockets may be opened, and their keep-alive."""

from __future__ import annotations

import asyncio

from tests.relay_service.bridge import BridgedClient, BridgedExecutor
from tests.relay_service.sockets import BRIDGE_MESSAGE_BYTES, GOING_AWAY, Socket
from tests.relay_service.state import Directory, Form, Registration
from tests.relay_service.streams import Exchange, ExecutorSocket, HarnessSocket, Route
from tests.relay_service.tickets import EXECUTOR, Rejected, Ticket

# Client sockets of one environment; an executor has 128 streams, the rest are attempts.
HARNESSES_KEPT = 1024
_TICK_SECONDS = 1.0


class Rendezvous:
    """Accepts sockets that the registry has sent here."""

    def __init__(
        self,
        directory: Directory,
        exchange: Exchange,
        *,
        ping_seconds: float = 30.0,
        pong_seconds: float = 60.0,
    ) -> None:
        self._directory = directory
        self._exchange = exchange
        self._ping_seconds = ping_seconds
        self._pong_seconds = pong_seconds
        self._routes: dict[str, Route] = {}
        self._ticker: asyncio.TimerHandle | None = None

    def accept(self, ticket: Ticket) -> Socket:
        """A socket for an upgrade that will now be granted; raises Rejected."""
        registration = self._directory.current(ticket.environment_id)
        if registration is None:
            raise Rejected(404, "unknown_route")
        if ticket.registration_id not in (None, registration.id):
            raise Rejected(401, "unexpected_executor_registration_id")
        route = self._routes.setdefault(ticket.environment_id, Route(ticket.environment_id))
        if ticket.role == EXECUTOR:
            kind = BridgedExecutor if registration.form.is_bridged else ExecutorSocket
            return _sized(kind(self._exchange, route, registration), registration)
        if len(route.harnesses) >= HARNESSES_KEPT:
            raise Rejected(503, "route_unavailable")
        if not registration.form.is_bridged:
            return _sized(HarnessSocket(self._exchange, route), registration)
        if route.executor is None or route.harnesses:
            raise Rejected(503, "route_unavailable")
        return BridgedClient(self._exchange, route)

    def executor(self, environment_id: str) -> Socket | None:
        """The attached executor, once its registration is the current one."""
        registration = self._directory.current(environment_id)
        if registration is None or not registration.online:
            return None
        return self._routes[environment_id].executor

    def harness(self, stream_id: str) -> Socket | None:
        """The client that owns a stream."""
        wanted = stream_id.encode()
        found = (route.streams.get(wanted) for route in self._routes.values())
        return next((socket for socket in found if socket is not None), None)

    def harnesses(self, environment_id: str) -> list[Socket]:
        """All clients of an environment."""
        route = self._routes.get(environment_id)
        return [] if route is None else list(route.harnesses)

    def start(self) -> None:
        self._tick()

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        for socket in self._sockets():
            socket.tick(loop.time(), self._ping_seconds, self._pong_seconds)
        self._ticker = loop.call_later(min(_TICK_SECONDS, self._ping_seconds), self._tick)

    def _sockets(self) -> list[Socket]:
        routes = self._routes.values()
        executors = [route.executor for route in routes if route.executor is not None]
        return executors + [socket for route in routes for socket in route.harnesses]

    def stop(self) -> None:
        """Say goodbye to everybody."""
        if self._ticker is not None:
            self._ticker.cancel()
        for socket in self._sockets():
            socket.close(GOING_AWAY, "service is shutting down")


def _sized(socket: Socket, registration: Registration) -> Socket:
    """The socket with the limit of its form: without encryption a frame is a whole message."""
    if registration.form is Form.RELAY:
        socket.largest_message = BRIDGE_MESSAGE_BYTES
    return socket
