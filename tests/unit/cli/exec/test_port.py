"""The operands of `exec-server port`."""

from __future__ import annotations

import asyncio
import errno
import logging
from contextlib import AsyncExitStack
from typing import Any

import pytest

from exec_server.cli.errors import CommandError, UsageError
from exec_server.cli.exec import port
from exec_server.cli.exec.port import (
    MAX_FAILURES,
    PERIOD_SECONDS,
    FailureLimit,
    Forwarding,
    _Ending,
    build_parser,
    parse_forwarding,
)
from exec_server.client import port_forwarding
from exec_server.errors import InternalError, InvalidRequest, SessionLost


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3000", Forwarding(3000, None, 3000)),
        ("0:3000", Forwarding(0, None, 3000)),
        ("8080:80", Forwarding(8080, None, 80)),
        ("db:5432", Forwarding(5432, "db", 5432)),
        ("1:db.internal:5432", Forwarding(1, "db.internal", 5432)),
        ("10.0.0.7:80", Forwarding(80, "10.0.0.7", 80)),
        ("1:[::1]:80", Forwarding(1, "::1", 80)),
        ("[fe80::1%eth0]:80", Forwarding(80, "fe80::1%eth0", 80)),
    ],
)
def test_forwardings(text: str, expected: Forwarding) -> None:
    assert parse_forwarding(text, is_reverse=False) == expected


def test_reverse_forwardings() -> None:
    assert parse_forwarding("3000", is_reverse=True) == Forwarding(3000, None, 3000)
    assert parse_forwarding("3000:0", is_reverse=True) == Forwarding(3000, None, 0)


@pytest.mark.parametrize(
    ("text", "is_reverse", "reason"),
    [
        ("", False, "is not"),
        ("http", False, "is not"),
        ("::1:80", False, "is not"),
        ("1:2:3", False, "is not"),
        ("-1", False, "is not"),
        ("٣", False, "is not"),
        ("65536", False, "at most 65535"),
        ("70000:80", False, "at most 65535"),
        ("0", False, "port 0"),
        ("80:0", False, "port 0"),
        ("0:80", True, "port 0"),
        ("db:80", True, "without a host"),
    ],
)
def test_wrong_forwardings(text: str, is_reverse: bool, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        parse_forwarding(text, is_reverse=is_reverse)


def test_the_direction() -> None:
    parser = build_parser()
    assert not parser.parse_words(["build", "80"]).reverse
    assert not parser.parse_words(["-L", "build", "80"]).reverse
    assert parser.parse_words(["build", "-R", "80", "81"]).reverse
    with pytest.raises(SystemExit):
        parser.parse_words(["-L", "-R", "build", "80"])


class _Port:
    """A port of an environment; entering it may fail."""

    def __init__(self, port: int, failure: Exception | None) -> None:
        self.port = port
        self._failure = failure

    async def __aenter__(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def __aexit__(self, *_: object) -> None: ...


class _Environment:
    def __init__(self, failure: Exception | None = None) -> None:
        self._failure = failure

    def forward_port(self, remote: int, *, local_port: int, host: str | None) -> _Port:
        return _Port(local_port or 40_000, self._failure)

    def reverse_port(self, local: int, *, remote_port: int) -> _Port:
        return _Port(remote_port or 40_000, self._failure)


def _open(opener: Any, forwarding: Forwarding, failure: Exception | None = None) -> None:
    async def run() -> None:
        async with AsyncExitStack() as stack:
            await opener(stack, _Environment(failure), forwarding, "build")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("opener", "forwarding", "line"),
    [
        (port._forward, Forwarding(0, None, 80), "127.0.0.1:40000 -> build:80"),
        (port._forward, Forwarding(1, "db", 80), "127.0.0.1:1 -> db:80 by build"),
        (port._reverse, Forwarding(80, None, 9), "build:9 -> 127.0.0.1:80"),
    ],
)
def test_a_line_for_each_port(
    opener: Any, forwarding: Forwarding, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed: list[str] = []
    monkeypatch.setattr(port, "print_text", printed.append)
    _open(opener, forwarding)
    assert printed == [f"{line}\n"]


def test_ports_that_cannot_be_opened() -> None:
    in_use = OSError(errno.EADDRINUSE, "error while attempting to bind on address")
    with pytest.raises(CommandError, match=r"127\.0\.0\.1:80: Address already in use\n.* 0:80\."):
        _open(port._forward, Forwarding(80, None, 80), in_use)
    refused = InternalError("cannot listen on port 80: Address in use (os error 98)")
    with pytest.raises(CommandError, match=r"^build: cannot listen on port 80: Address in use$"):
        _open(port._reverse, Forwarding(80, None, 80), refused)


def test_a_host_that_the_server_refuses() -> None:
    refused = InvalidRequest("only with --allow-port-hosts")
    with pytest.raises(CommandError, match=r"^build: only with --allow-port-hosts$"):
        _open(port._forward, Forwarding(80, "example.com", 80), refused)


def test_failed_connections_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    log = logging.Logger("ports", logging.WARNING)
    monkeypatch.setattr(port_forwarding, "log", log)
    port._print_failures()
    assert log.isEnabledFor(logging.INFO)
    [limit] = log.filters
    assert isinstance(limit, FailureLimit)


def test_reports_of_failed_connections_are_limited() -> None:
    limit = FailureLimit()

    def passes(seconds: float, level: int = logging.INFO) -> bool:
        record = logging.LogRecord("ports", level, "", 0, "", None, None)
        record.created = 1000 + seconds
        return limit.filter(record)

    assert [passes(0) for _ in range(MAX_FAILURES)] == [True] * MAX_FAILURES
    assert not passes(PERIOD_SECONDS - 1)
    assert passes(PERIOD_SECONDS - 1, logging.WARNING)
    assert passes(PERIOD_SECONDS)


def test_the_loss_of_the_session_ends_the_command() -> None:
    async def run() -> None:
        ending = _Ending()
        ending.on_disconnected()
        ending.on_resumed()
        assert not ending.lost.done()
        ending.on_lost(SessionLost("gone"))
        ending.on_lost(SessionLost("again"))
        with pytest.raises(SessionLost, match="gone"):
            await ending.lost

    asyncio.run(run())
