"""The two other ways to be remote: passing clients on to another server, and signed connections."""

from __future__ import annotations

import hashlib
import hmac
import select
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit

import pytest

from tests.relay_service import Endpoint, Request, ThreadedRelayService
from tests.support.client import (
    BINARY,
    CLOSE,
    CONTINUATION,
    DEFAULT_TIMEOUT,
    TEXT,
    Client,
    Disconnected,
    Frame,
    b64,
    frame_bytes,
    run_command,
    scaled,
)
from tests.support.raw_links import Inbox
from tests.support.relay import (
    ENVIRONMENT,
    RESET_REASON,
    RelayLink,
    dial,
    exit_code,
    start_executor,
)

_KEY = "sk-0123456789abcdef"
_MIB = 1_048_576


@pytest.fixture
def service() -> Iterator[ThreadedRelayService]:
    with ThreadedRelayService() as running:
        yield running


# ---- forward ---------------------------------------------------------------------------


class _Accepted:
    """The server's end of a WebSocket, frame by frame."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._inbox = Inbox(lambda: sock.recv(262_144), sock.fileno())
        head = self._inbox.until(b"\r\n\r\n", self._deadline()).decode()
        self.line, *lines = head.rstrip().split("\r\n")
        self.headers = dict(line.lower().split(": ", 1) for line in lines)
        # Its value must not lose its case.
        self.key = next(line.split(": ")[1] for line in lines if "-key:" in line.lower())

    def _deadline(self) -> float:
        return time.monotonic() + scaled(DEFAULT_TIMEOUT)

    def accept(self) -> None:
        digest = hashlib.sha1(f"{self.key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11".encode()).digest()
        lines = [
            "HTTP/1.1 101 Switching Protocols",
            "connection: upgrade",
            "upgrade: websocket",
            f"sec-websocket-accept: {b64(digest)}",
        ]
        self.sock.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())

    def send(self, opcode: int, payload: bytes = b"") -> None:
        self.sock.sendall(frame_bytes(opcode, payload, mask=False))

    def receive(self) -> Frame:
        """The next frame; raises Disconnected."""
        deadline = self._deadline()
        first, second = self._inbox.exactly(2, deadline)
        assert second & 0x80, "a client must mask its frames"
        size = second & 0x7F
        if size == 126:
            (size,) = struct.unpack("!H", self._inbox.exactly(2, deadline))
        elif size == 127:
            (size,) = struct.unpack("!Q", self._inbox.exactly(8, deadline))
        mask = self._inbox.exactly(4, deadline)
        data = self._inbox.exactly(size, deadline)
        stream = (mask * (size // 4 + 1))[:size]
        mixed = int.from_bytes(data, "little") ^ int.from_bytes(stream, "little")
        return Frame(first & 0x0F, mixed.to_bytes(size, "little"), bool(first & 0x80))

    def receive_message(self) -> tuple[int, bytes]:
        """A message with its opcode, put together from its fragments."""
        frame = self.receive()
        parts, last = [frame.payload], frame
        while not last.fin:
            last = self.receive()
            assert last.opcode == CONTINUATION
            parts.append(last.payload)
        return frame.opcode, b"".join(parts)


class _Destination:
    """A server to which clients are passed on."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(scaled(DEFAULT_TIMEOUT))
        self.url = f"ws://127.0.0.1:{self.listener.getsockname()[1]}/some/path?a=b%20c&d"
        self._accepted: list[_Accepted] = []

    def next(self, *, accept: bool = True) -> _Accepted:
        """The next connection."""
        accepted = _Accepted(self.listener.accept()[0])
        self._accepted.append(accepted)
        if accept:
            accepted.accept()
        return accepted

    @property
    def is_wanted(self) -> bool:
        """Whether somebody has connected."""
        return bool(select.select([self.listener], [], [], 0)[0])

    def close(self) -> None:
        self.listener.close()
        for accepted in self._accepted:
            accepted.sock.close()


@pytest.fixture
def destination() -> Iterator[_Destination]:
    made = _Destination()
    yield made
    made.close()


@pytest.fixture
def forwarded(
    service: ThreadedRelayService, kind: str, destination: _Destination
) -> Iterator[ThreadedRelayService]:
    """A relay with an executor that only passes on."""
    # The reference takes the other flags only behind this word.
    with start_executor(service, "forward", "--connect", destination.url, kind=kind):
        yield service


@pytest.mark.quick
def test_dials_when_a_client_is_there(
    forwarded: ThreadedRelayService, destination: _Destination
) -> None:
    assert not destination.is_wanted
    with RelayLink(forwarded), RelayLink(forwarded):
        for _ in range(2):
            accepted = destination.next()
            assert accepted.line == "GET /some/path?a=b%20c&d HTTP/1.1"
            accepted.headers.pop("sec-websocket-key")
            assert accepted.headers == {
                "host": urlsplit(destination.url).netloc,
                "connection": "upgrade",
                "upgrade": "websocket",
                "sec-websocket-version": "13",
            }
        assert not destination.is_wanted


def test_messages_pass_as_they_are(
    forwarded: ThreadedRelayService, destination: _Destination
) -> None:
    with RelayLink(forwarded) as link:
        # What comes before there is a connection waits for it.
        link.send_text(b"first")
        accepted = destination.next()
        for message in (b'{"id": 1 }', b"not JSON", b"\xff\x00"):
            link.send_text(message)
        sent = [accepted.receive() for _ in range(4)]
        expected = [b"first", b'{"id": 1 }', b"not JSON", b"\xff\x00"]
        assert sent == [Frame(BINARY, message) for message in expected]
        accepted.send(TEXT, b'{"text": true }')
        accepted.send(BINARY, b"\xff\x00")
        assert link.receive(scaled(DEFAULT_TIMEOUT)) == b'{"text": true }'
        assert link.receive(scaled(DEFAULT_TIMEOUT)) == b"\xff\x00"


def test_large_messages_pass(forwarded: ThreadedRelayService, destination: _Destination) -> None:
    message = bytes(range(256)) * (10 * _MIB // 256)
    with RelayLink(forwarded) as link:
        accepted = destination.next()
        link.send_text(message)
        assert accepted.receive_message() == (BINARY, message)
        accepted.send(BINARY, message)
        assert link.receive(scaled(DEFAULT_TIMEOUT)) == message


def test_an_empty_message_ends_the_stream(
    forwarded: ThreadedRelayService, destination: _Destination
) -> None:
    with RelayLink(forwarded) as link:
        accepted = destination.next()
        accepted.send(TEXT, b"before")
        accepted.send(TEXT)
        assert link.receive(scaled(DEFAULT_TIMEOUT)) == b"before"
        assert link.wait_reset() == RESET_REASON


def test_a_destination_that_closes_ends_the_stream(
    forwarded: ThreadedRelayService, destination: _Destination
) -> None:
    with RelayLink(forwarded) as link:
        accepted = destination.next()
        accepted.send(TEXT, b"before")
        accepted.send(CLOSE, struct.pack("!H", 1000))
        assert accepted.receive().opcode == CLOSE
        assert link.receive(scaled(DEFAULT_TIMEOUT)) == b"before"
        assert link.wait_reset() == RESET_REASON


def test_a_destination_that_refuses_ends_the_stream(
    forwarded: ThreadedRelayService, destination: _Destination
) -> None:
    with RelayLink(forwarded) as link:
        accepted = destination.next(accept=False)
        accepted.sock.sendall(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n")
        assert link.wait_reset() == RESET_REASON


def test_a_client_that_leaves_takes_its_connection_along(
    forwarded: ThreadedRelayService, destination: _Destination
) -> None:
    with RelayLink(forwarded), RelayLink(forwarded) as other:
        accepted = [destination.next(), destination.next()]
        other.send_text(b"other")
        # Which of both dialled first is not known.
        ready = select.select([one.sock for one in accepted], [], [], scaled(DEFAULT_TIMEOUT))[0]
        others = next(one for one in accepted if one.sock in ready)
        assert others.receive() == Frame(BINARY, b"other")
        other.close()
        with pytest.raises(Disconnected):
            others.receive()  # without a farewell
        (left,) = (one for one in accepted if one is not others)
        left.send(TEXT, b"still here")


_CONFIGURATION = "failed to configure exec-server websocket: "


@pytest.mark.parametrize(
    ("flags", "code", "text"),
    [
        pytest.param(
            ["--connect", "http://127.0.0.1:9"],
            1,
            f"{_CONFIGURATION}forward destination must be a ws:// or wss:// URL",
            id="http",
        ),
        pytest.param(
            ["--connect", "nowhere"],
            1,
            f"{_CONFIGURATION}relative URL without a base",
            id="relative",
        ),
        pytest.param(
            [
                *("--connect", "ws://127.0.0.1:9", "--remote-transport", "direct"),
                *("--aws-sigv4", "--aws-region", "r"),
            ],
            1,
            "direct exec-server transport does not support forwarding",
            id="direct",
        ),
        pytest.param([], 2, "", id="no destination"),
    ],
)
def test_refused_destination(
    service: ThreadedRelayService, kind: str, flags: list[str], code: int, text: str
) -> None:
    words = ["forward", "--remote", service.url, "--environment-id", ENVIRONMENT, *flags]
    ended = run_command(kind, *words, env={"CODEX_API_KEY": _KEY})
    assert ended.returncode == code
    # Usage errors are worded by the argument parser.
    assert code == 2 or ended.stderr == f"Error: {text}\n"
    assert service.requests == []


# ---- direct ----------------------------------------------------------------------------

_DIRECT = ("--remote-transport", "direct", "--aws-sigv4", "--aws-region", "eu-west-1")
_SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
_AWS: dict[str, str | None] = {
    "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE",
    "AWS_SECRET_ACCESS_KEY": _SECRET,
    "AWS_EC2_METADATA_DISABLED": "true",
    "HOME": "/nonexistent",
}


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _signature(request: Request, signed: str, scope: str) -> str:
    """What Signature Version 4 gives for a request, from its definition."""
    query = sorted(parse_qsl(request.query, keep_blank_values=True))
    canonical = [
        request.method,
        quote(request.path, safe="/-_.~"),
        "&".join(f"{quote(n, safe='-_.~')}={quote(v, safe='-_.~')}" for n, v in query),
        *(f"{name}:{request.header(name)}" for name in signed.split(";")),
        "",
        signed,
        _sha256(request.body),
    ]
    digest = _sha256("\n".join(canonical).encode())
    text = "\n".join(["AWS4-HMAC-SHA256", request.header("x-amz-date") or "", scope, digest])
    key = f"AWS4{_SECRET}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    return hmac.digest(key, text.encode(), "sha256").hex()


def _check_signature(request: Request, signed: str, name: str = "execute-api") -> None:
    date = request.header("x-amz-date") or ""
    time.strptime(date, "%Y%m%dT%H%M%SZ")
    scope = f"{date[:8]}/eu-west-1/{name}/aws4_request"
    assert request.header("authorization") == (
        f"AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/{scope}, SignedHeaders={signed}, "
        f"Signature={_signature(request, signed, scope)}"
    )


@pytest.mark.parametrize("is_session", [False, True])
def test_signed_requests(service: ThreadedRelayService, kind: str, is_session: bool) -> None:
    flags = ("--aws-service", "other") if is_session else ()
    env = _AWS | ({"AWS_SESSION_TOKEN": "session/token+x="} if is_session else {})
    with start_executor(service, *_DIRECT, *flags, kind=kind, env=env):
        (register,) = service.requests_to(Endpoint.DIRECT_REGISTER)
        (upgrade,) = service.requests_to(Endpoint.EXECUTOR_SOCKET)
    name = "other" if is_session else "execute-api"
    token = ";x-amz-security-token" if is_session else ""
    assert register.target == "/cloud/environment/env-1/direct/register"
    assert register.body == b'{"transport":"direct_jsonrpc_v1"}'
    _check_signature(register, f"content-type;host;x-amz-date{token}", name)
    _check_signature(upgrade, f"host;x-amz-date{token}", name)
    signing = {"authorization", *f"content-type;host;x-amz-date{token}".split(";")}
    assert {header for header, _ in register.headers} == signing | {"content-length", "accept"}


def test_a_direct_executor_is_a_server(service: ThreadedRelayService, kind: str) -> None:
    with start_executor(service, *_DIRECT, kind=kind, env=_AWS):
        with Client(dial(service.plain_url(ENVIRONMENT))) as client:
            client.initialize()
            # The link refuses anything but text; what it sends may be either.
            client.websocket.send_binary(b'{"id": 99, "method": "environment/status"}')
            assert client.result(99) == {"status": "ready"}
            process = client.start(["sh", "-c", "read x; echo got $x"], pipeStdin=True)
        # When one client has gone, it comes back for the next: same address, signed anew.
        service.until(lambda: len(service.service.requests_to(Endpoint.EXECUTOR_SOCKET)) == 2)
        service.wait_for_executor(ENVIRONMENT)
        with Client(dial(service.plain_url(ENVIRONMENT))) as again:
            again.initialize(resume=client.session_id)
            assert again.write(process, b"this\n", "w") == "accepted"
            assert again.collect(process).stdout == b"got this\n"
    assert len(service.requests_to(Endpoint.DIRECT_REGISTER)) == 1
    first, second = service.requests_to(Endpoint.EXECUTOR_SOCKET)
    assert first.target == second.target
    _check_signature(second, "host;x-amz-date")


@pytest.mark.parametrize(("status", "registrations"), [(503, 1), (429, 1), (409, 2)])
def test_a_direct_connection_is_tried_again(
    service: ThreadedRelayService, kind: str, status: int, registrations: int
) -> None:
    service.faults.http.reject(Endpoint.EXECUTOR_SOCKET, status)
    with start_executor(service, *_DIRECT, kind=kind, env=_AWS) as executor:
        assert executor.stderr() == ""
    assert len(service.requests_to(Endpoint.DIRECT_REGISTER)) == registrations
    first, second = service.requests_to(Endpoint.EXECUTOR_SOCKET)
    assert (first.target == second.target) == (registrations == 1)
    assert second.time - first.time >= 0.49


@pytest.mark.parametrize(("status", "words"), [(400, "Bad Request"), (401, "Unauthorized")])
def test_a_refused_direct_connection_ends_the_executor(
    service: ThreadedRelayService, kind: str, status: int, words: str
) -> None:
    service.faults.http.reject(Endpoint.EXECUTOR_SOCKET, status)
    with start_executor(service, *_DIRECT, kind=kind, env=_AWS, attached=False) as executor:
        assert exit_code(executor) == 1
        url = service.url.replace("http", "ws")
        # Without the query, which is as good as a password.
        assert executor.stderr() == (
            f"Error: failed to connect to exec-server websocket `{url}/direct/env-1`: "
            f"HTTP error: {status} {words}\n\nCaused by:\n    HTTP error: {status} {words}\n"
        )


_DIRECT_ANSWER = {
    "environment_id": ENVIRONMENT,
    "registration_id": "reg",
    "url": "ws://127.0.0.1:9/",
    "transport": "direct_jsonrpc_v1",
}
_INCOMPLETE = (
    "exec-server protocol error: environment registry returned incomplete direct connection data"
)
_NOT_WSS = (
    "environment registry configuration error: remote transport requires wss for non-loopback "
    "endpoints"
)


@pytest.mark.parametrize(
    ("status", "answer", "text"),
    [
        (
            200,
            _DIRECT_ANSWER | {"environment_id": "env-2"},
            "exec-server protocol error: environment registry returned a different environment id",
        ),
        (
            200,
            _DIRECT_ANSWER | {"transport": "x"},
            "exec-server protocol error: environment registry returned unsupported direct "
            "transport `x`",
        ),
        (200, _DIRECT_ANSWER | {"url": " "}, _INCOMPLETE),
        (200, _DIRECT_ANSWER | {"registration_id": ""}, _INCOMPLETE),
        (200, _DIRECT_ANSWER | {"url": "ws://relay.example/"}, _NOT_WSS),
        (200, _DIRECT_ANSWER | {"url": "http://127.0.0.1/"}, _NOT_WSS),
        (
            503,
            {"error": {"code": "registration_conflict", "message": "m"}},
            "environment registry request failed (503 Service Unavailable, "
            "registration_conflict): m",
        ),
    ],
)
def test_refused_direct_registration(
    service: ThreadedRelayService, kind: str, status: int, answer: Any, text: str
) -> None:
    service.faults.http.answer(Endpoint.DIRECT_REGISTER, status, answer)
    with start_executor(service, *_DIRECT, kind=kind, env=_AWS, attached=False) as executor:
        assert exit_code(executor) == 1
        assert executor.stderr() == f"Error: {text}\n"


@pytest.mark.parametrize(
    ("remote", "flags", "text"),
    [
        ("{}", _DIRECT[:3], "AWS SDK config did not resolve a region"),
        (
            "http://registry.example",
            _DIRECT,
            "environment registry configuration error: remote transport requires https for "
            "non-loopback endpoints",
        ),
    ],
)
def test_refused_direct_configuration(
    service: ThreadedRelayService, kind: str, remote: str, flags: tuple[str, ...], text: str
) -> None:
    words = ["--remote", remote.format(service.url), "--environment-id", ENVIRONMENT, *flags]
    ended = run_command(kind, *words, env=_AWS)
    assert (ended.returncode, ended.stderr) == (1, f"Error: {text}\n")
    assert service.requests == []
