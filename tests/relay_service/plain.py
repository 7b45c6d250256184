"""The forms without encryption, which the real registry refuses: executors of older versions.

In the text and direct forms one client is joined to the executor; the executor dials in again for
the next one. In the relay form frames are routed by their stream.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple
from urllib.parse import parse_qs

from exec_server.hosting import http_messages
from exec_server.net.websocket.frames import Opcode
from exec_server.net.websocket.handshake import upgrade_answer
from exec_server.relay.frames import Frame, Kind, encode
from tests.relay_service.faults import Answer, error_answer, relay_frame
from tests.relay_service.journal import Request
from tests.relay_service.sockets import Socket, Sockets, WireFrame

DIRECT_TRANSPORT = "direct_jsonrpc_v1"
_PATH = "/direct/"
_GOING_AWAY, _REPLACED = 1001, 4001
_ENDPOINTS = re.compile(
    r"/cloud/(?P<family>environment|executor)/(?P<id>[A-Za-z0-9._-]+)"
    r"/(?P<verb>register|connect|direct/register)"
)


class Form(StrEnum):
    """How an executor without encryption speaks on its socket."""

    RELAY = "relay"  # relay frames with plain payloads
    TEXT = "text"  # one message per WebSocket message
    DIRECT = "direct"  # the same with signed requests


@dataclass(eq=False)
class Route:
    """A registered executor, its socket and its clients."""

    form: Form
    executor: Socket | None = None
    clients: set[Socket] = field(default_factory=set)

    def others(self, socket: Socket) -> list[Socket]:
        if not socket.is_executor:
            return [] if self.executor is None else [self.executor]
        return list(self.clients)


class PlainForms:
    """Registrations and sockets without encryption."""

    def __init__(self, sockets: Sockets, executor_form: Form, *, is_allowed: bool) -> None:
        self._sockets = sockets
        self._executor_form = executor_form
        self._is_allowed = is_allowed
        self._routes: dict[str, Route] = {}
        self._url = ""

    def listen_at(self, url: str) -> None:
        self._url = url + _PATH

    def client_url(self, environment_id: str) -> str:
        """Where clients connect, again and again."""
        form = self._routes[environment_id].form
        # The reference takes `role=harness` for relay frames.
        role = "harness" if form is Form.RELAY else "client"
        return f"{self._url}{environment_id}?role={role}"

    def answer(self, request: Request) -> Answer | Upgrade | None:
        """None for a request that the real registry answers."""
        if request.path.startswith(_PATH):
            return self._upgrade(request)
        found = _ENDPOINTS.fullmatch(request.path)
        if found is None:
            return None
        name, verb = found["id"], found["verb"]
        if verb == "direct/register":
            if json.loads(request.body).get("transport") != DIRECT_TRANSPORT:
                return error_answer(400, "unsupported_transport")
            extra = {"registration_id": "reg-direct", "transport": DIRECT_TRANSPORT}
            return self._register(Form.DIRECT, name, environment_id=name, **extra)
        if not self._is_allowed or (found["family"] == "environment" and request.body):
            return None
        if verb == "connect":
            return Answer(200, {"environment_id": name, "url": self.client_url(name)})
        form = self._executor_form if found["family"] == "executor" else Form.RELAY
        # The first executors send a body and need the id of their registration.
        extra = {"id": "reg-plain"} if request.body else {}
        return self._register(form, name, **{f"{found['family']}_id": name}, **extra)

    def _register(self, form: Form, name: str, **members: str) -> Answer:
        self._routes[name] = Route(form)
        url = f"{self._url}{name}?role=environment&nonce={secrets.token_hex(8)}"
        return Answer(200, {**members, "url": url})

    def _upgrade(self, request: Request) -> Answer | Upgrade:
        name = request.path.removeprefix(_PATH)
        route = self._routes.get(name)
        role = parse_qs(request.query)["role"][0]
        is_client = role != "environment"
        if route is None or (
            is_client
            and (route.executor is None or (route.clients and route.form is not Form.RELAY))
        ):
            return error_answer(503, "route_unavailable")
        return Upgrade(self._sockets, route, role, name)


class Upgrade(NamedTuple):
    """A granted upgrade. A front.TakeOver."""

    sockets: Sockets
    route: Route
    role: str
    environment_id: str

    def open(
        self, transport: asyncio.Transport, request: http_messages.ServiceRequest, first: bytes
    ) -> None:
        transport.write(upgrade_answer(request.headers))
        socket = Socket(self.sockets, transport, self.role, self.environment_id)
        is_relay = self.route.form is Form.RELAY
        socket.far = PlainEnd(self.route, socket, is_relay=is_relay)
        if socket.is_executor:
            old, self.route.executor = self.route.executor, socket
            if old is not None:
                old.close(_REPLACED, "replaced by a new connection")
        else:
            self.route.clients.add(socket)
        socket.start(first)

    def cancel(self) -> None:
        """Nothing was taken."""


class PlainEnd:
    """The other side of a socket without encryption."""

    def __init__(self, route: Route, socket: Socket, *, is_relay: bool) -> None:
        self._route = route
        self._socket = socket
        self._is_relay = is_relay
        self._message = b""

    def frame_received(self, frame: WireFrame) -> None:
        payload = frame.payload()
        if frame.opcode == Opcode.PING:
            self._socket.send(payload, Opcode.PONG)
        elif frame.opcode == Opcode.CLOSE:
            self._socket.send(payload, Opcode.CLOSE)
            self._socket.transport.close()
            self._socket.ends()
        elif frame.opcode != Opcode.PONG:
            self._pass_on(frame.opcode, payload, is_final=bool(frame.first & 0x80))

    def _pass_on(self, opcode: int, payload: bytes, *, is_final: bool) -> None:
        if not self._is_relay:
            for other in self._route.others(self._socket):
                other.deliver(payload, opcode, final=is_final)
            return
        self._message += payload
        if is_final:
            message, self._message = self._message, b""
            named = relay_frame(message)
            for other in self._route.others(self._socket):
                if other.is_executor or (named and other.stream_id == named.stream_id):
                    other.deliver(message)

    def pause_writing(self) -> None:
        for other in self._route.others(self._socket):
            other.hold_reading(self)

    def resume_writing(self) -> None:
        for other in self._route.others(self._socket):
            other.release_reading(self)

    def lost(self) -> None:
        self.resume_writing()
        socket, route = self._socket, self._route
        others = route.others(socket)
        route.clients.discard(socket)
        if route.executor is socket:
            route.executor = None
        for other in others:
            if not self._is_relay:
                other.close(_GOING_AWAY, "the other side has left")
            elif stream := socket.stream_id or other.stream_id:
                other.send(encode(Frame(stream, Kind.RESET, reason="peer_disconnected")))
