"""Error texts with hints, reports of interruptions, and signals; no connection is opened."""

from __future__ import annotations

import asyncio
import datetime
import os
import signal
from pathlib import Path
from typing import Any, cast

import pytest
from tests.support.clock import run_in_virtual_time
from tests.support.memory_session import GREETING, MemoryDialer, MemoryStream, Message

from exec_server.cli import connection
from exec_server.cli.connection import (
    describe_error,
    error_text,
    open_environment,
    run_until_signal,
)
from exec_server.cli.errors import UsageError
from exec_server.client.environment import Environment
from exec_server.client.results import ConnectionStatus
from exec_server.client.targets import AccessOptions, Target
from exec_server.errors import (
    CertificateRejected,
    ConnectFailed,
    ConnectionLost,
    ExecServerError,
    InternalError,
    InvalidParams,
    RegistryError,
    RegistryUnavailable,
    SessionLost,
)

_WEBSOCKET = Target(label="build", url="ws://h:1")
_WITH_TOKEN = Target(label="build", url="wss://h", access=AccessOptions(token="t"))
_PINNED = Target(label="build", url="wss://h", access=AccessOptions(pin=("ab" * 32,)))
_UNIX = Target(label="unix:/s", url="unix:/s")
_RELAY = Target(label="build", registry="https://r", environment_id="e")
_STDIO = Target(label="stdio:x", argv=("x",))


@pytest.mark.parametrize(
    ("error", "target", "start", "hint"),
    [
        (ConnectFailed("HTTP error: 401", 401), _WEBSOCKET, "HTTP error: 401\n", "--token-file"),
        (ConnectFailed("HTTP error: 403", 403), _WITH_TOKEN, "HTTP error: 403\n", "the token is"),
        (ConnectFailed("HTTP error: 404", 404), _WEBSOCKET, "HTTP error: 404\n", "host and port"),
        (ConnectFailed("ended"), _STDIO, "ended\n", "must speak the protocol"),
        (ConnectFailed("refused (os error 111)"), _WEBSOCKET, "refused\n", "is running"),
        (ConnectFailed("failed to lookup x"), _WEBSOCKET, "failed to lookup x\n", "spelling"),
        (CertificateRejected("self-signed"), _WEBSOCKET, "self-signed\n", "--ca-file"),
        (CertificateRejected("has expired"), _WEBSOCKET, "has expired\n", "clocks"),
        (CertificateRejected("IP mismatch"), _WEBSOCKET, "IP mismatch\n", "a name of the cert"),
        (CertificateRejected("not pinned"), _PINNED, "not pinned\n", "new fingerprint"),
        (ConnectFailed("connection ended"), _WEBSOCKET, "connection ended\n", "wss:// for"),
        (ConnectFailed("connection ended during x"), _RELAY, "connection ended d", "the executor"),
        (
            ConnectFailed("relay stream reset"),
            _RELAY,
            "relay stream reset\n",
            "log of the executor",
        ),
        (ConnectFailed("does not speak TLS"), _WEBSOCKET, "does not speak TLS\n", "ws:// is for"),
        (ConnectFailed("No such file (os error 2)"), _UNIX, "No such file\n", "is running"),
        (ConnectFailed("Permission denied"), _UNIX, "Permission denied\n", "user of the server"),
        (ConnectFailed("HTTP error: 403", 403), _UNIX, "HTTP error: 403\n", "user of the server"),
        (ConnectFailed("timed out"), _WEBSOCKET, "timed out", ""),
    ],
)
def test_connection_errors_come_with_a_hint(
    error: ConnectFailed, target: Target, start: str, hint: str
) -> None:
    text = describe_error(error, target)
    assert text.startswith(f"cannot connect to {target.label}: {start}")
    assert hint in text.partition("\n")[2]
    assert bool(hint) == ("\n" in text)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (RegistryError("unknown environment"), "cannot reach build: unknown environment"),
        (
            RegistryError(
                "request failed: error for url (u)\n\nCaused by:\n    0: error for url (u)\n"
                "    1: tcp connect error\n    2: Connection refused (os error 111)"
            ),
            "cannot reach build: request failed: error for url (u): Connection refused",
        ),
        (SessionLost("it expired"), "connection lost: build: it expired"),
        (InvalidParams("bad params"), "build: bad params"),
    ],
)
def test_other_errors_name_the_target(error: ExecServerError, text: str) -> None:
    assert describe_error(error, _WEBSOCKET) == text


def test_error_texts_have_neither_errno_nor_a_path_that_is_printed_anyway() -> None:
    error = OSError("/a: No such file (os error 2)")
    assert error_text(error) == "/a: No such file"
    assert error_text(error, "/a") == "No such file"
    assert error_text(error, "/b") == "/a: No such file"


def test_error_texts_are_one_harmless_line() -> None:
    error = InternalError("/a\nb: it is \x1b[2J\nTrust me (os error 2)")
    assert error_text(error, "/a\nb") == "it is \\x1b[2J\\nTrust me"
    assert describe_error(error, _WEBSOCKET) == "build: /a\\nb: it is \\x1b[2J\\nTrust me"


@pytest.mark.parametrize(
    ("access", "text"),
    [
        (AccessOptions(ca_file="{}/none"), "x: cannot read the CA file {}/none: No such file"),
        (AccessOptions(ca_file="{}/empty"), "x: no certificates in the CA file {}/empty"),
        (AccessOptions(token_file="{}/none"), "x: cannot read the token file {}/none: No such"),
    ],
)
def test_unusable_files_are_named(tmp_path: Path, access: AccessOptions, text: str) -> None:
    (tmp_path / "empty").write_text("")
    place = str(tmp_path)
    access = AccessOptions(
        ca_file=access.ca_file and access.ca_file.format(place),
        token_file=access.token_file and access.token_file.format(place),
    )

    async def work() -> None:
        async with open_environment(Target(label="x", url="wss://h", access=access)):
            pass

    with pytest.raises(UsageError) as caught:
        asyncio.run(work())
    assert str(caught.value).startswith(text.format(place))


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (Target(label="x", url="ws://h", access=_PINNED.access), "x: a pin is for wss:// URLs"),
        (
            Target(label="x", url="wss://h", access=AccessOptions(pin=("12",))),
            "x: the pin `12` is not sha256: and 64 hexadecimal digits",
        ),
        (
            Target(
                label="x",
                registry="http://127.0.0.1:1",
                environment_id="e",
                access=_PINNED.access._replace(token="t"),
            ),
            "x: a pin is for https:// registries",
        ),
    ],
)
def test_pins_that_check_nothing_are_refused(target: Target, text: str) -> None:
    async def work() -> None:
        async with open_environment(target):
            pass

    with pytest.raises(UsageError, match=text):
        asyncio.run(work())


def test_a_token_in_the_clear_is_announced(capfd: pytest.CaptureFixture[str]) -> None:
    access = AccessOptions(token="secret-1", allow_insecure_token=True)
    for url in ("ws://192.0.2.1:7", "ws://127.0.0.1:7", "wss://192.0.2.1:7"):
        connection.make_dialer(Target(label=url, url=url, access=access), print)
    warning = "Warning: ws://192.0.2.1:7: the token is sent without encryption\n"
    assert capfd.readouterr().err == warning


def test_a_registry_requires_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))

    async def work() -> None:
        target = Target(label="x", registry="https://r", environment_id="e")
        async with open_environment(target):
            pass

    with pytest.raises(
        UsageError, match="requires a token: run `exec-server login https://r`, or pass"
    ):
        asyncio.run(work())


def test_only_long_interruptions_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[str] = []
    seen = asyncio.Event()

    def report(text: str) -> None:
        reported.append(text)
        seen.set()

    async def work() -> None:
        environment = Environment(MemoryDialer())
        monitor = connection._ConnectionMonitor("build", environment, report)
        error = ConnectionLost("x")
        assert not monitor.may_have_raised(error)
        monitor.on_disconnected()
        assert monitor.may_have_raised(error)
        monitor.on_resumed()
        assert reported == []
        monkeypatch.setattr(connection, "NOTICE_SECONDS", (0.0,))
        monitor.on_disconnected()
        await seen.wait()
        monitor.on_resumed()
        assert reported == ["connection to build lost 0 s ago", "build: reconnected"]
        monitor.on_disconnected()
        lost = SessionLost("y")
        assert not monitor.may_have_raised(lost)
        monitor.on_lost(lost)
        assert monitor.may_have_raised(lost)

    asyncio.run(work())


_LOST = "connection to build lost 0 s ago (connection lost); trying again for 45 s"


def test_what_is_told_while_the_connection_is_lost() -> None:
    now = datetime.datetime.now(datetime.UTC)
    cases = (
        (12, 28_740, "lost 12 s ago (refused); trying again for 7 h 59 min"),
        (75, 30, "lost 1 min 15 s ago (refused); trying again for 30 s"),
        (7200, -1, "lost 2 h 0 min ago (refused); trying again for 0 s"),
    )
    for since, remaining, text in cases:
        status = ConnectionStatus(
            "reconnecting",
            now - datetime.timedelta(seconds=since),
            "refused (os error 111)",
            3,
            now + datetime.timedelta(seconds=remaining + 0.4),
        )
        assert connection.reconnecting_text("build", status) == f"connection to build {text}"


def test_notices_become_rare() -> None:
    reported: list[float] = []

    async def work() -> None:
        loop = asyncio.get_running_loop()
        monitor = connection._ConnectionMonitor(
            "build", Environment(MemoryDialer()), lambda _: reported.append(loop.time())
        )
        monitor.on_disconnected()
        await asyncio.sleep(2000)
        monitor.stop()

    run_in_virtual_time(work())
    assert reported == [1, 10, 60, 300, 900, 1500]


@pytest.mark.parametrize(("seconds", "expected"), [(0.5, []), (1.5, [_LOST, "build: reconnected"])])
def test_a_session_that_is_resumed_late_is_reported(
    monkeypatch: pytest.MonkeyPatch, seconds: float, expected: list[str]
) -> None:
    def answer_late(stream: MemoryStream, request: Message) -> None:
        asyncio.get_running_loop().call_later(seconds, stream.answer, request, GREETING)

    reported: list[str] = []

    async def work() -> None:
        dialer = MemoryDialer()
        monkeypatch.setattr(connection, "make_dialer", lambda *_: dialer)
        async with open_environment(_WEBSOCKET, on_status=reported.append):
            dialer.greet = answer_late
            (await dialer.stream()).lose()
            await asyncio.sleep(seconds + 1)

    run_in_virtual_time(work())
    assert reported == expected


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_cancels_the_work(number: signal.Signals) -> None:
    cleaned_up: list[bool] = []

    async def work() -> int:
        try:
            os.kill(os.getpid(), number)
            await asyncio.Event().wait()
        finally:
            cleaned_up.append(True)
        return 0

    assert run_until_signal(work) == 128 + number
    assert cleaned_up == [True]


def test_the_exit_code_of_the_work_is_returned() -> None:
    async def work() -> int:
        return 3

    assert run_until_signal(work) == 3


def test_a_registry_that_is_not_there_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    target = Target(
        label="relay:http://127.0.0.1:9/box",
        registry="http://127.0.0.1:9",
        environment_id="box",
        access=AccessOptions(token="t"),
    )
    dialer = connection.make_dialer(target, print, told.append)
    on_retry = cast(Any, dialer)._on_retry
    on_retry(RegistryUnavailable("request failed\n\nCaused by:\n    0: Connection refused"), 14.0)
    assert told == [
        "relay:http://127.0.0.1:9/box: request failed: Connection refused; "
        "trying again for up to 14 s"
    ]


def test_a_server_that_is_waited_for_is_announced() -> None:
    told: list[str] = []
    target = Target(label="box", url="ws://127.0.0.1:9", access=AccessOptions(wait=30))
    dialer = connection.make_dialer(target, print, told.append)
    cast(Any, dialer)._on_retry(ConnectFailed("Connection refused (os error 111)"), 30)
    assert told == ["box: Connection refused; trying again for up to 30 s"]
