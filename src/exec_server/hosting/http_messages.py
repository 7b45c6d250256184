"""Requests and answers of the registry as values; their bytes are made in one place. No I/O."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network, ip_address
from typing import Final

from exec_server.hosting.rules import Refusal
from exec_server.hosting.tickets import REASON_HEADER, Rejection
from exec_server.net.http1 import encode_response, upgrade_flaw

Networks = tuple[IPv4Network | IPv6Network, ...]

PASSED_ON: Final = "x-exec-server-passed-on"


@dataclass(frozen=True, slots=True)
class Request:
    """One request; of a repeated header the first one counts, of Authorization none."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes = b""
    peer: str = ""
    head: bytes = b""  # as it was received, with the empty line

    def is_complete_upgrade(self) -> bool:
        """Whether everything is there that RFC 6455 demands."""
        has_key = bool(self.headers.get("sec-websocket-key"))
        return self.method == "GET" and has_key and upgrade_flaw(self.headers) is None


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer; the connection ends after it."""

    status: int
    body: bytes = b""
    content_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)

    def encode(self) -> bytes:
        headers = list(self.headers.items())
        if self.body:
            headers.append(("content-type", self.content_type))
        headers += [("content-length", str(len(self.body))), ("connection", "close")]
        return encode_response(self.status, headers, self.body)


def json_answer(value: object) -> Answer:
    return Answer(200, json.dumps(value).encode())


def refusal_answer(refusal: Refusal) -> Answer:
    body = {"error": {"code": refusal.code, "message": refusal.message}}
    return Answer(refusal.status, json.dumps(body).encode(), headers=dict(refusal.headers))


def rejection_answer(rejection: Rejection) -> Answer:
    """Of an upgrade: the reason is in a header, and in the body for people."""
    body = {"error": {"code": rejection.reason, "message": "the upgrade is refused"}}
    headers = {REASON_HEADER: rejection.reason}
    return Answer(rejection.status, json.dumps(body).encode(), headers=headers)


def peer_address(direct: str, forwarded: str, trusted: Networks) -> str:
    """The address of a client, from X-Forwarded-For if the direct peer is a trusted proxy."""
    if not trusted or not forwarded:
        return direct
    try:
        if not any(ip_address(direct) in network for network in trusted):
            return direct
        return str(ip_address(forwarded.rpartition(",")[2].strip()))
    except ValueError:
        return direct
