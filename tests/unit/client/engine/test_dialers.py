"""Dialers without a network: what they refuse, what is worth another attempt."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from exec_server.client.engine import dialers
from exec_server.client.engine.dialers import PatientDialer, WebSocketDialer, is_starting
from exec_server.client.engine.session import Closing, is_transient
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


@pytest.mark.parametrize(
    ("error", "may_come"),
    [
        (ConnectFailed("Connection refused (os error 111)"), True),
        (ConnectFailed("No such file or directory (os error 2)"), True),
        (ConnectFailed("connection ended"), True),
        (ConnectFailed("busy", 503), True),
        (ConnectFailed("another server", 400), False),
        (ConnectFailed("not you", 403), False),
        (ConnectFailed("Permission denied (os error 13)"), False),
        (ConnectFailed("the server does not speak TLS at this port"), False),
        (CertificateRejected("expired"), False),
        (RegistryUnavailable("offline"), True),
        (RegistryError("no"), False),
    ],
)
def test_what_is_worth_waiting_for(error: ExecServerError, may_come: bool) -> None:
    assert is_starting(error) is may_come


class _Opening:
    """A dialer whose attempts have these results."""

    can_reconnect = True
    calls_in_flight = 7

    def __init__(self, results: Iterable[Any]) -> None:
        self.results = list(results)
        self.is_closed = False

    async def open(self, make_receiver: Any) -> Any:
        result = self.results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    def retry_delay(self, attempt: int) -> float:
        return 0.001

    async def close(self, closing: Closing) -> None:
        self.is_closed = True


def _open(dialer: PatientDialer) -> Any:
    return asyncio.run(dialer.open(lambda stream: None))  # type: ignore[arg-type,return-value]


def test_a_server_that_is_just_starting_is_waited_for() -> None:
    told: list[tuple[str, float]] = []
    inner = _Opening([ConnectFailed("refused"), ConnectFailed("refused"), "stream", "later"])
    dialer = PatientDialer(inner, 9, lambda error, seconds: told.append((str(error), seconds)))
    assert _open(dialer) == "stream"
    assert told == [("refused", 9)]
    assert _open(dialer) == "later"
    assert (dialer.can_reconnect, dialer.calls_in_flight) == (True, 7)
    assert dialer.retry_delay(3) == 0.001
    asyncio.run(dialer.close(Closing.ORDERLY))
    assert inner.is_closed


def test_a_later_connection_is_tried_once() -> None:
    dialer = PatientDialer(_Opening(["stream", ConnectFailed("refused"), "never"]), 9)
    assert _open(dialer) == "stream"
    with pytest.raises(ConnectFailed, match=r"^refused$"):
        _open(dialer)


def test_after_the_wait_the_error_says_how_long_it_was() -> None:
    failures = [ConnectFailed("busy", 503, [("a", "b")]), RegistryUnavailable("offline")]
    for failure in failures:
        with pytest.raises(type(failure)) as caught:
            _open(PatientDialer(_Opening([failure]), 0.0001))
        assert str(caught.value) == f"no connection within 0.0001 s: {failure}"
        assert getattr(caught.value, "status", 503) == 503


def test_an_attempt_ends_with_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(_Opening):
        async def open(self, make_receiver: object) -> Any:
            await asyncio.Event().wait()

    monkeypatch.setattr(dialers, "LAST_OPEN_SECONDS", 0.001)
    with pytest.raises(ConnectFailed, match=r"^no connection within 0.01 s: timed out$"):
        _open(PatientDialer(Silent([]), 0.01))


def test_what_time_does_not_mend_is_not_waited_for() -> None:
    with pytest.raises(ConnectFailed, match=r"^not you$"):
        _open(PatientDialer(_Opening([ConnectFailed("not you", 403), "never"]), 9))
