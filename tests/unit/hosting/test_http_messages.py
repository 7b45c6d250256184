"""Requests and answers as values."""

from __future__ import annotations

from ipaddress import ip_network

import pytest

from exec_server.hosting.http_messages import (
    ServiceAnswer,
    ServiceRequest,
    json_answer,
    peer_address,
    refusal_answer,
)
from exec_server.hosting.rules import Refusal, Rejection

UPGRADE = {
    "connection": "keep-alive, Upgrade",
    "upgrade": "websocket",
    "sec-websocket-version": "13",
    "sec-websocket-key": "x",
}


def test_every_answer_ends_its_connection() -> None:
    assert json_answer({"valid": True}).encode() == (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 15\r\n"
        b'connection: close\r\n\r\n{"valid": true}'
    )
    assert ServiceAnswer(503).encode() == (
        b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
    )


def test_refusals_have_a_code_and_rejections_a_header() -> None:
    refused = refusal_answer(Refusal(429, "too_many_requests", "slow", **{"retry-after": "3"}))
    assert refused.headers == {"retry-after": "3"}
    assert refused.body == b'{"error": {"code": "too_many_requests", "message": "slow"}}'
    rejected = refusal_answer(Rejection(401, "expired"))
    assert rejected.headers == {"x-codex-rendezvous-rejection-reason": "expired"}
    assert rejected.status == 401


def test_an_upgrade_needs_all_its_headers() -> None:
    assert ServiceRequest("GET", "/", "", UPGRADE).is_complete_upgrade()
    assert not ServiceRequest("POST", "/", "", UPGRADE).is_complete_upgrade()
    for name in UPGRADE:
        headers = {key: value for key, value in UPGRADE.items() if key != name}
        request = ServiceRequest("GET", "/", "", headers)
        assert not request.is_complete_upgrade()


@pytest.mark.parametrize(
    ("direct", "forwarded", "expected"),
    [
        ("10.0.0.1", "1.2.3.4, 5.6.7.8", "5.6.7.8"),
        ("10.0.0.1", "", "10.0.0.1"),
        ("10.0.0.1", "no address", "10.0.0.1"),
        ("9.9.9.9", "5.6.7.8", "9.9.9.9"),
        ("unknown", "5.6.7.8", "unknown"),
    ],
)
def test_only_a_trusted_proxy_names_the_client(direct: str, forwarded: str, expected: str) -> None:
    assert peer_address(direct, forwarded, (ip_network("10.0.0.0/8"),)) == expected
    assert peer_address(direct, forwarded, ()) == direct
