"""Raw sockets as the two ends of a relay service: requests and messages."""

from __future__ import annotations

import base64
import json
from typing import Any

from tests.relay_service import Kind, ThreadedRelayService, build
from tests.support import relay
from tests.support.client import (
    CLOSE,
    DEFAULT_TIMEOUT,
    PING,
    PONG,
    Disconnected,
    Frame,
    HttpReply,
    WebSocketLink,
    scaled,
)
from tests.support.relay import ENVIRONMENT, SUITE, post

REASON_HEADER = "x-codex-rendezvous-rejection-reason"
ENVIRONMENT_PATH = f"/cloud/environment/{ENVIRONMENT}"


def key(fill: int = 1) -> dict[str, str]:
    """A key object; the relay never computes with it."""
    return {
        "suite": SUITE,
        "x25519_public_key": base64.b64encode(bytes([fill]) * 32).decode(),
        "mlkem768_public_key": base64.b64encode(bytes([fill]) * 1184).decode(),
    }


def data(stream_id: str, seq: int, payload: bytes = b"ciphertext") -> bytes:
    """A data frame with few bytes in it, so that every length fits into one byte."""
    body = bytes([0x08, seq, 0x18, 1, 0x22, len(payload)]) + payload
    return build(stream_id.encode(), Kind.DATA, body)


def granted(reply: HttpReply) -> Any:
    """The body of an answer of the registry that must be a success."""
    assert reply.status == 200, reply
    return json.loads(reply.body)


def code(reply: HttpReply) -> tuple[int, str]:
    """Status and error code of a refusal by the registry."""
    return reply.status, json.loads(reply.body)["error"]["code"]


_links: list[WebSocketLink] = []


def dial(url: str) -> WebSocketLink:
    """Open a WebSocket; the fixture `closed_links` closes it at the end of the test."""
    _links.append(relay.dial(url))
    return _links[-1]


def close_links() -> None:
    """Close every WebSocket that `dial` has opened."""
    while _links:
        _links.pop().close()


def register(service: ThreadedRelayService, fill: int = 1) -> Any:
    """Register an executor with the key of this fill."""
    body = {"security_profile": "noise_hybrid_ik_v1", "executor_public_key": key(fill)}
    return granted(post(service, f"{ENVIRONMENT_PATH}/register", body))


def connect(service: ThreadedRelayService, fill: int = 2) -> Any:
    """Ask for the way to the executor, for a client with the key of this fill."""
    body = {"harness_public_key": key(fill)}
    return granted(post(service, f"{ENVIRONMENT_PATH}/connect", body))


def validate(service: ThreadedRelayService, registration: str, text: str, fill: int = 2) -> bool:
    """The answer of the registry to an executor that validates the key of a client."""
    body = {
        "executor_registration_id": registration,
        "harness_public_key": key(fill),
        "harness_key_authorization": text,
    }
    return bool(granted(post(service, f"{ENVIRONMENT_PATH}/validate", body))["valid"])


def message(link: WebSocketLink) -> bytes:
    """The next message, which must be binary and in one frame."""
    frame = link.receive_frame(scaled(DEFAULT_TIMEOUT))
    assert (frame.opcode, frame.fin) == (0x2, True), frame
    return frame.payload


def ending(link: WebSocketLink) -> int | None:
    """The code with which the service ends this connection; None without a close frame."""
    try:
        while (frame := link.receive_frame(scaled(DEFAULT_TIMEOUT))).opcode != CLOSE:
            pass
    except Disconnected:
        return None
    return int.from_bytes(frame.payload[:2], "big")


def is_silent(link: WebSocketLink) -> bool:
    """Whether nothing has been sent before the answer to a ping, which follows in order."""
    link.send_frame(PING, b"anything?")
    return link.receive_frame(scaled(DEFAULT_TIMEOUT)) == Frame(PONG, b"anything?")


class Ends:
    """An attached executor, and clients."""

    def __init__(self, service: ThreadedRelayService) -> None:
        self.service = service
        self.registered = register(service)
        self.executor = dial(self.registered["url"])
        service.wait_for_executor("env-1")

    def client(self) -> WebSocketLink:
        return dial(connect(self.service)["url"])

    def stream(self, name: str) -> WebSocketLink:
        """A client that has opened a stream, of which the executor has heard."""
        client = self.client()
        first = build(name.encode(), Kind.RESUME)
        client.send_binary(first)
        assert message(self.executor) == first
        return client
