"""Handshakes with an executor: who is let in, who is not, and how many at a time."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import pytest
from tests.relay_service import Endpoint, ThreadedRelayService
from tests.support.client import KINDS, Client, scaled
from tests.support.relay import (
    ENVIRONMENT,
    RESET_REASON,
    RelayLink,
    StreamReset,
    connect,
    is_served,
    post,
    relay_link,
    start_executor,
)
from tests.support.server_internals import eventually

from exec_server.errors import CredentialRejected
from exec_server.hosting import relay_hub
from exec_server.relay.frames import Frame, Kind, encode
from exec_server.relay.noise import FIRST_BYTES, Identity

READY = {"status": "ready"}
# No test here is about the pause, except where it says so.
NO_PAUSE = {"relay.multiplexer.BURST_FAILURES": 1_000_000}


@pytest.fixture(scope="module")
def _shared() -> Iterator[ThreadedRelayService]:
    with ThreadedRelayService() as service, start_executor(service, constants=NO_PAUSE):
        yield service


@pytest.fixture(params=KINDS)
def service(
    request: pytest.FixtureRequest, _shared: ThreadedRelayService
) -> Iterator[ThreadedRelayService]:
    """An executor is attached: one of ours for all tests, of the reference one for each."""
    if request.param == "ours":
        yield _shared
        _shared.faults.clear()
        return
    with ThreadedRelayService() as own, start_executor(own, kind="reference"):
        yield own


@pytest.fixture
def other(service: ThreadedRelayService) -> Iterator[Client]:
    """A stream that must not notice anything."""
    with connect(service) as connected:
        yield connected
        assert connected.call("environment/status") == READY


def _validations(service: ThreadedRelayService) -> int:
    return len(service.requests_to(Endpoint.VALIDATE))


# ---- what the registry is asked ---------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("stream_id", ["4d2b3b0e-4f0a-4b8e-9d57-3a2f1c0d9e8f", "my stream"])
def test_the_registry_is_asked_about_the_key(service: ThreadedRelayService, stream_id: str) -> None:
    with RelayLink(service, stream_id=stream_id) as link:
        request = service.requests_to(Endpoint.VALIDATE)[-1]
        named = request.header("x-codex-noise-stream-id")
        assert named == (stream_id if "-" in stream_id else None)
        assert request.header("authorization") == f"Bearer {service.token}"
        key = link.identity.public
        assert json.loads(request.body) == {
            "executor_registration_id": link.bundle.registration_id,
            "harness_public_key": {
                "suite": "Noise_hybridIK_X25519+MLKEM768_AESGCM_SHA256",
                "x25519_public_key": base64.b64encode(key.x25519).decode(),
                "mlkem768_public_key": base64.b64encode(key.mlkem768).decode(),
            },
            "harness_key_authorization": link.bundle.authorization,
        }


@pytest.mark.parametrize("authorization", [b"", b"x" * 4096, "schön".encode()])
def test_the_registry_judges_any_text(
    service: ThreadedRelayService, other: Client, authorization: bytes
) -> None:
    before = _validations(service)
    with RelayLink(service, handshake=False) as link:
        link.begin(authorization)
        assert link.wait_reset() == RESET_REASON
    request = json.loads(service.requests_to(Endpoint.VALIDATE)[-1].body)
    assert request["harness_key_authorization"] == authorization.decode()
    assert _validations(service) == before + 1


@pytest.mark.parametrize("authorization", [b"x" * 4097, b"\xff\xfe"])
def test_what_is_no_short_text_is_refused_without_asking(
    service: ThreadedRelayService, other: Client, authorization: bytes
) -> None:
    before = _validations(service)
    with RelayLink(service, handshake=False) as link:
        link.begin(authorization)
        assert link.wait_reset() == RESET_REASON
    assert _validations(service) == before


def test_an_answer_may_have_more_members(service: ThreadedRelayService) -> None:
    service.faults.http.rewrite(Endpoint.VALIDATE, lambda answer: {**answer, "more": [1]})
    assert is_served(service)


Fault = Callable[[Any], Any]
_REFUSALS: dict[str, Fault] = {
    "false": lambda http: http.answer(Endpoint.VALIDATE, 200, {"valid": False}),
    "no verdict": lambda http: http.answer(Endpoint.VALIDATE, 200, {}),
    "another type": lambda http: http.answer(Endpoint.VALIDATE, 200, {"valid": "true"}),
    "no JSON": lambda http: http.answer(Endpoint.VALIDATE, 200, b"valid"),
    "204": lambda http: http.answer(Endpoint.VALIDATE, 204),
    "302": lambda http: http.answer(Endpoint.VALIDATE, 302, headers=[("location", "/valid")]),
    "403": lambda http: http.answer(Endpoint.VALIDATE, 403, code="forbidden"),
    "409": lambda http: http.answer(Endpoint.VALIDATE, 409),
    "429": lambda http: http.answer(Endpoint.VALIDATE, 429),
    "500": lambda http: http.answer(Endpoint.VALIDATE, 500, {"valid": True}),
    "503": lambda http: http.answer(Endpoint.VALIDATE, 503, code="registration_conflict"),
    "cut": lambda http: http.cut(Endpoint.VALIDATE),
    "garbage": lambda http: http.garbage(Endpoint.VALIDATE),
}


@pytest.mark.parametrize("answer", _REFUSALS)
def test_without_a_clear_yes_the_client_is_refused_once(
    service: ThreadedRelayService, other: Client, answer: str
) -> None:
    before = _validations(service)
    _REFUSALS[answer](service.faults.http)
    with RelayLink(service, handshake=False) as link:
        link.begin()
        assert link.wait_reset() == RESET_REASON
        assert _validations(service) == before + 1
    assert is_served(service)


@pytest.mark.parametrize("flags", [(), ("forward", "--connect", "ws://127.0.0.1:9")])
def test_a_rejected_executor_tells_so_and_goes_on(flags: tuple[str, ...]) -> None:
    with ThreadedRelayService() as service, start_executor(service, *flags) as executor:
        service.faults.http.answer(Endpoint.VALIDATE, 401, code="invalid_token")
        with RelayLink(service, handshake=False) as link:
            with pytest.raises(CredentialRejected):
                link.finish(link.begin())
            # No reset has followed, and the stream is not open: the next frame is for this data.
            link.send_kind(Kind.DATA, b"x" * 20)
            assert link.wait_reset() == RESET_REASON
        assert executor.process.poll() is None
        assert len(service.requests_to(Endpoint.REGISTER)) == 1
        RelayLink(service).close()  # the next client is asked about again, and accepted
        assert _validations(service) == 2


def test_an_answer_that_never_comes_refuses_the_client() -> None:
    constants = {"registry.http.REQUEST_SECONDS": scaled(0.5)}
    with ThreadedRelayService() as service, start_executor(service, constants=constants):
        with connect(service) as other, RelayLink(service, handshake=False) as link:
            service.faults.http.hang(Endpoint.VALIDATE)
            link.begin()
            assert other.call("environment/status") == READY
            assert link.wait_reset() == RESET_REASON
        service.faults.http.drip(Endpoint.VALIDATE, scaled(0.1))
        with RelayLink(service, handshake=False) as link:
            link.begin()
            assert link.wait_reset() == RESET_REASON
        assert is_served(service)


# ---- handshakes that cannot be read -----------------------------------------------------


def _unreadable(link: RelayLink) -> dict[str, Callable[[], bytes]]:
    def good(**mistakes: Any) -> bytes:
        return link.initiator(**mistakes).write_first(link.bundle.authorization.encode())

    def flipped(position: int) -> bytes:
        message = bytearray(good())
        message[position] ^= 1
        return bytes(message)

    return {
        "one byte": lambda: b"x",
        "short": lambda: good()[:3567],
        "without the end": lambda: good()[:-1],
        "with more": lambda: good() + b"x",
        "too long": lambda: good().ljust(65_536),
        "forged secret": lambda: flipped(0),
        "forged ephemeral key": lambda: flipped(1088),
        "forged static key": lambda: flipped(2304),
        "forged payload": lambda: flipped(-1),
        "other environment": lambda: good(environment_id="env-2"),
        "other registration": lambda: good(registration_id="reg-2"),
        "other stream": lambda: good(stream_id="stream-2"),
        "other executor": lambda: good(executor_key=Identity.generate().public),
        "nonsense": lambda: bytes(4000),
    }


@pytest.mark.parametrize("what", _unreadable(RelayLink.__new__(RelayLink)))
def test_an_unreadable_handshake_is_reset_without_asking(
    service: ThreadedRelayService, other: Client, what: str
) -> None:
    before = _validations(service)
    with RelayLink(service, handshake=False) as link:
        link.send_kind(Kind.HANDSHAKE, _unreadable(link)[what]())
        assert link.wait_reset() == RESET_REASON
        assert _validations(service) == before
        # The same stream may try again, properly.
        link.finish(link.begin(past=service))


def test_a_handshake_cannot_be_used_twice(service: ThreadedRelayService, other: Client) -> None:
    with RelayLink(service, stream_id="once", handshake=False) as link:
        initiator = link.initiator()
        first = initiator.write_first(link.bundle.authorization.encode())
        link.send_kind(Kind.HANDSHAKE, first)
        link.finish(initiator)
    service.until(lambda: service.service.harness("once") is None)
    with RelayLink(service, stream_id="once", handshake=False) as other_client:
        other_client.send_kind(Kind.HANDSHAKE, first)
        assert other_client.wait_reset() == RESET_REASON
    with RelayLink(service, handshake=False) as other_client:
        other_client.send_kind(Kind.HANDSHAKE, first)
        assert other_client.wait_reset() == RESET_REASON


def test_an_authorization_is_good_for_its_own_key_only(
    service: ThreadedRelayService, other: Client
) -> None:
    with (
        RelayLink(service, handshake=False) as owner,
        RelayLink(service, handshake=False) as other_client,
    ):
        other_client.begin(owner.bundle.authorization.encode())
        assert other_client.wait_reset() == RESET_REASON
        owner.finish(owner.begin())


# ---- while the registry thinks ----------------------------------------------------------


class Gate:
    """A registry before the registry, which holds validations back until they are let through."""

    def __init__(self, service: ThreadedRelayService) -> None:
        self.waiting: list[threading.Event] = []
        self.answered = 0
        self.is_open = False
        gate = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                if self.path.endswith("/validate") and not gate.is_open:
                    event = threading.Event()
                    gate.waiting.append(event)
                    event.wait(scaled(30))
                reply = post(service, self.path, body, self.headers["authorization"])
                self.send_response(reply.status)
                self.send_header("content-length", str(len(reply.body)))
                self.end_headers()
                with contextlib.suppress(OSError):
                    self.wfile.write(reply.body)
                gate.answered += 1

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for event in self.waiting:
            event.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def expect(self, count: int) -> None:
        """Wait until so many validations have arrived in all."""
        eventually(f"{count} validations", lambda: len(self.waiting) >= count)

    def let_through(self, index: int) -> None:
        before = self.answered
        self.waiting[index].set()
        eventually("the answer is sent", lambda: self.answered > before)


@pytest.fixture(params=KINDS)
def gated(request: pytest.FixtureRequest) -> Iterator[tuple[ThreadedRelayService, Gate]]:
    with ThreadedRelayService(names_tokens=False) as service, Gate(service) as gate:
        flags = ("--remote", gate.url, "--environment-id", ENVIRONMENT)
        with start_executor(service, *flags, kind=request.param):
            yield service, gate


def _fence(service: ThreadedRelayService, gate: Gate) -> None:
    """Let a whole handshake pass: what the executor was told before, it has dealt with."""
    gate.is_open = True
    assert is_served(service)
    gate.is_open = False


def test_data_of_a_pending_stream_cancels_it(gated: tuple[ThreadedRelayService, Gate]) -> None:
    service, gate = gated
    with RelayLink(service, handshake=False) as link:
        link.begin()
        gate.expect(1)
        link.send_kind(Kind.DATA, b"too early")
        assert link.wait_reset() == RESET_REASON
        _fence(service, gate)
        gate.let_through(0)
        _fence(service, gate)
        assert link.drain() == []


def test_a_second_handshake_cancels_the_first_and_a_late_yes_is_ignored(
    gated: tuple[ThreadedRelayService, Gate],
) -> None:
    service, gate = gated
    with RelayLink(service, stream_id="busy", handshake=False) as link:
        link.begin()
        gate.expect(1)
        link.begin(past=service)
        assert link.wait_reset() == RESET_REASON
    service.until(lambda: service.service.harness("busy") is None)
    # The same id once more; its validation waits beside the one of the cancelled attempt.
    with RelayLink(service, stream_id="busy", handshake=False) as link:
        attempt = link.begin()
        gate.expect(2)
        _fence(service, gate)
        gate.let_through(0)
        _fence(service, gate)
        assert link.drain() == []
        gate.let_through(1)
        link.finish(attempt)
        link.send_text(json.dumps({"id": 1, "method": "environment/status"}))
        assert json.loads(link.receive(scaled(10)))["id"] == 1


def test_a_reset_cancels_a_pending_handshake(gated: tuple[ThreadedRelayService, Gate]) -> None:
    service, gate = gated
    with RelayLink(service, handshake=False) as link:
        link.begin()
        gate.expect(1)
        link.send_kind(Kind.RESET, reason="changed my mind")
        assert link.drain() == []  # the relay has read it
        _fence(service, gate)
        gate.let_through(0)
        _fence(service, gate)
        assert link.drain() == []


def test_an_active_stream_works_while_others_wait(gated: tuple[ThreadedRelayService, Gate]) -> None:
    service, gate = gated
    gate.is_open = True
    with connect(service) as client:
        gate.is_open = False
        links = [RelayLink(service, handshake=False) for _ in range(4)]
        attempts = [link.begin() for link in links]
        gate.expect(4)
        assert client.run(["echo", "hello"]).stdout == b"hello\n"
        for index in range(4):
            gate.let_through(index)
        for link, attempt in zip(links, attempts, strict=True):
            link.finish(attempt)
            link.close()


# ---- how many ---------------------------------------------------------------------------


def test_at_most_32_handshakes_wait(gated: tuple[ThreadedRelayService, Gate]) -> None:
    service, gate = gated
    gate.is_open = True
    with connect(service) as other, contextlib.ExitStack() as stack:
        gate.is_open = False
        links = []
        for count in range(32):
            links.append(stack.enter_context(RelayLink(service, handshake=False)))
            attempt = links[-1].begin()
            gate.expect(count + 1)
        # Those who leave make no room: the registry still thinks about them.
        for link in links[:4]:
            link.send_kind(Kind.RESET, reason="given up")
        with RelayLink(service, handshake=False) as one_more:
            one_more.begin()
            assert one_more.wait_reset() == RESET_REASON
        assert len(gate.waiting) == 32
        assert other.call("environment/status") == READY
        gate.let_through(31)
        links[31].finish(attempt)
        _fence(service, gate)


def _pending(service: ThreadedRelayService) -> int:
    return len(service.service.requests_to(Endpoint.VALIDATE))


def _pending_above(service: ThreadedRelayService, count: int) -> bool:
    return _pending(service) > count


@pytest.mark.parametrize("kind", KINDS)
def test_at_most_128_streams_are_served(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A registry of ours has the same limit; here the executor's own is reached.
    monkeypatch.setattr(relay_hub, "STREAMS", 1000)
    monkeypatch.setattr(relay_hub, "STREAMS_OF_TOKEN", 1000)
    with (
        ThreadedRelayService(record=False, names_tokens=False) as service,
        start_executor(service, kind=kind),
    ):
        clients = [connect(service) for _ in range(128)]
        before = _validations(service)
        with RelayLink(service, handshake=False) as one_more:
            one_more.begin()
            assert one_more.wait_reset() == RESET_REASON
        assert _validations(service) == before
        asked = [client.request("environment/status") for client in clients]
        for client, request in zip(clients, asked, strict=True):
            assert client.result(request) == READY
        clients.pop().close()
        service.until(lambda: len(service.service.harnesses(ENVIRONMENT)) == 127)
        assert is_served(service)
        for client in clients:
            client.close()


# ---- too many failures ------------------------------------------------------------------


def _fail(service: ThreadedRelayService) -> None:
    with RelayLink(service, handshake=False) as link:
        link.send_kind(Kind.HANDSHAKE, bytes(FIRST_BYTES))
        assert link.wait_reset() == RESET_REASON


def test_after_too_many_failures_handshakes_are_refused_and_streams_go_on() -> None:
    few = {
        "relay.multiplexer.BURST_FAILURES": 8,
        "relay.multiplexer.FAILURES_A_SECOND": 1 / scaled(1.0),
    }
    with (
        ThreadedRelayService(names_tokens=False) as service,
        start_executor(service, "--log-level", "warning", constants=few) as executor,
        connect(service) as client,
    ):
        before = _validations(service)

        def is_refused() -> bool:
            _fail(service)
            return "too many failed handshakes on this link" in executor.stderr()

        eventually("failures are too many", is_refused)
        assert _validations(service) == before
        assert client.run(["echo", "hello"]).stdout == b"hello\n"
        eventually("the allowance has grown back", lambda: _gets_in(service))
        assert executor.stderr().count("too many failed handshakes") == 1
        assert len(service.requests_to(Endpoint.EXECUTOR_SOCKET)) == 1


def _gets_in(service: ThreadedRelayService) -> bool:
    try:
        return is_served(service)
    except StreamReset:
        return False


def _as_reference(kind: str) -> dict[str, float] | None:
    """Constants with which our executor refuses handshakes after eight failures, for 10 s."""
    if kind == "reference":
        return None
    return {"relay.multiplexer.BURST_FAILURES": 8, "relay.multiplexer.FAILURES_A_SECOND": 0.1}


def test_eight_failures_lock_no_client_out() -> None:
    with ThreadedRelayService() as service, start_executor(service):
        for _ in range(12):
            _fail(service)
            with RelayLink(service, handshake=False) as link:
                link.send_kind(Kind.HANDSHAKE, b"short")
                assert link.wait_reset() == RESET_REASON
        assert is_served(service)


@pytest.mark.parametrize("kind", KINDS)
def test_failures_of_any_kind_count_together(kind: str) -> None:
    with (
        ThreadedRelayService(names_tokens=False) as service,
        start_executor(service, kind=kind, constants=_as_reference(kind)),
        connect(service) as client,
    ):
        link = relay_link(client)
        for _ in range(3):
            _fail(service)
        for _ in range(2):
            service.faults.http.answer(Endpoint.VALIDATE, 200, {"valid": False})
            with RelayLink(service, handshake=False) as refused:
                refused.begin()
                refused.wait_reset()
        service.faults.http.hang(Endpoint.VALIDATE, times=None)
        for kind_of_frame in (Kind.HANDSHAKE, Kind.DATA, Kind.DATA):
            with RelayLink(service, handshake=False) as eager:
                before = _validations(service)
                eager.begin()
                service.until(partial(_pending_above, service, before))
                frame = Frame(eager.stream_id, kind_of_frame, b"x")
                service.executor(ENVIRONMENT).send(encode(frame))
                assert eager.wait_reset() == RESET_REASON
        service.faults.http.clear()
        # What is not a failed handshake was never counted.
        link.begin(past=service)
        with pytest.raises(StreamReset):
            client.receive()
        with pytest.raises(StreamReset):
            is_served(service)
        assert client.call("environment/status") == READY
        link.send_kind(Kind.RESET, reason="done")


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_link_is_not_paused(kind: str) -> None:
    constants = _as_reference(kind)
    with (
        ThreadedRelayService(names_tokens=False) as service,
        start_executor(service, kind=kind, constants=constants),
    ):
        for _ in range(8):
            _fail(service)
        with pytest.raises(StreamReset):
            is_served(service)
        service.executor(ENVIRONMENT).abort()
        service.wait_for_executor(ENVIRONMENT)
        assert is_served(service)
