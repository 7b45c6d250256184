"""Dialers without a network: what they refuse, what is worth another attempt."""

from __future__ import annotations

import pytest

from exec_server.client.engine.dialers import WebSocketDialer
from exec_server.client.engine.session import is_transient
from exec_server.client.engine.stdio import StdioDialer
from exec_server.errors import (
    CertificateRejected,
    ConnectFailed,
    ExecServerError,
    InvalidRequest,
    RegistryError,
    RegistryUnavailable,
    SessionAttached,
    StartupError,
)


@pytest.mark.parametrize(
    ("error", "is_worth_it"),
    [
        (ConnectFailed("refused"), True),
        (ConnectFailed("busy", 503), True),
        (CertificateRejected("expired"), False),
        (ConnectFailed("slow down", 429), True),
        (ConnectFailed("who are you", 401), False),
        (ConnectFailed("not you", 403), False),
        (ConnectFailed("not here", 404), False),
        (RegistryUnavailable("offline"), True),
        (RegistryError("no"), False),
        (SessionAttached("to another connection"), True),
        (InvalidRequest("unknown session id"), False),
    ],
)
def test_what_is_worth_another_attempt(error: ExecServerError, is_worth_it: bool) -> None:
    assert is_transient(error) is is_worth_it


@pytest.mark.parametrize("url", ["ws://example.net", "ws://10.0.0.1:80", "ws://127.0.0.1.net"])
def test_a_token_is_not_sent_where_it_could_be_read(url: str) -> None:
    with pytest.raises(StartupError, match="a token is sent only to wss:// URLs") as raised:
        WebSocketDialer(url, token="secret")
    assert "secret" not in str(raised.value)
    WebSocketDialer(url)
    WebSocketDialer(url, token="secret", allow_insecure_token=True)


@pytest.mark.parametrize(
    "url", ["wss://example.net", "ws://127.0.0.1:1", "ws://[::1]/", "ws://localhost", "unix:/run/s"]
)
def test_a_token_is_sent_where_it_is_safe(url: str) -> None:
    WebSocketDialer(url, token="secret")


@pytest.mark.parametrize("url", ["http://example.net", "example.net", "ws://", "ws://user:pw@host"])
def test_a_useless_url_is_refused(url: str) -> None:
    with pytest.raises(StartupError, match="invalid exec-server URL: ") as raised:
        WebSocketDialer(url)
    assert "pw" not in str(raised.value)


def test_a_program_has_a_name() -> None:
    with pytest.raises(StartupError, match="no program"):
        StdioDialer([])
