"""A relay that spoils frames: every stream ends in results or an end, and nobody else notices.

There is no retransmission in this protocol. What is lost shows as a gap, and a gap ends the
stream as soon as enough has come behind it; so whoever waits goes on sending.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.relay_service import TO_EXECUTOR, TO_HARNESS, Endpoint, ThreadedRelayService
from tests.support.client import Client, Server, b64, uri
from tests.support.relay import (
    ENVIRONMENT,
    RESET_REASON,
    RelayLink,
    connect,
    is_served,
    relay_link,
    start_executor,
)

from exec_server.errors import RelayError
from exec_server.relay.frames import Kind, decode, encode

READY = {"status": "ready"}
NO_PAUSE = {"relay.multiplexer.BURST_FAILURES": 1_000_000}
# As many as make a gap before them end the stream.
ENOUGH = 70

Arm = Callable[..., Any]
_FAULTS: dict[str, Callable[[Any], Arm]] = {
    "drop": lambda frames: frames.drop,
    "duplicate": lambda frames: frames.duplicate,
    "swap": lambda frames: frames.swap,
    "truncate": lambda frames: frames.truncate,
    "corrupt payload": lambda frames: frames.corrupt_payload,
    "corrupt header": lambda frames: frames.corrupt_header,
}
_HARMLESS = ("duplicate", "swap")


@pytest.fixture(scope="module")
def executor() -> Iterator[tuple[ThreadedRelayService, Server]]:
    with ThreadedRelayService(seed=20_260_801) as service:
        with start_executor(service, "--log-level", "debug", constants=NO_PAUSE) as running:
            yield service, running
            assert "unexpectedly" not in running.stderr()
            assert "Traceback" not in running.stderr()
        assert len(service.requests_to(Endpoint.EXECUTOR_SOCKET)) == 1


@pytest.fixture
def service(executor: tuple[ThreadedRelayService, Server]) -> Iterator[ThreadedRelayService]:
    yield executor[0]
    executor[0].faults.clear()


@pytest.fixture
def other(service: ThreadedRelayService) -> Iterator[Client]:
    """A stream that must not notice anything."""
    with connect(service) as connected:
        yield connected
        assert connected.call("environment/status") == READY


class Victim:
    """A client whose frames are spoilt."""

    def __init__(self, service: ThreadedRelayService, other: Client) -> None:
        self.link = RelayLink(service)
        self._other = other
        self._sent = 0
        self.answered: list[str] = []
        self.ended = False

    def __enter__(self) -> Victim:
        return self

    def __exit__(self, *_: object) -> None:
        self.link.close()

    def ask(self, count: int) -> None:
        """Send so many requests, then take all that comes of it."""
        for _ in range(count):
            name = f"{self.link.stream_id}/{self._sent}"
            self.link.send_text(json.dumps({"id": name, "method": "environment/status"}))
            self._sent += 1
        for data in self.link.outcome(self._other):
            if not self.ended:
                self._take(data)

    def _take(self, data: bytes) -> None:
        assert self.link.channel is not None
        try:
            frame = decode(data)
            if frame.stream_id != self.link.stream_id:
                return  # a client is deaf to other streams
            if frame.kind is Kind.DATA:
                for message in self.link.channel.receive(frame):
                    self.answered.append(json.loads(message)["id"])
            else:
                self.ended = True
        except RelayError:
            self.ended = True  # as a client would end it

    @property
    def expected(self) -> list[str]:
        return [f"{self.link.stream_id}/{number}" for number in range(self._sent)]


@pytest.mark.quick
@pytest.mark.parametrize("direction", [TO_EXECUTOR, TO_HARNESS])
@pytest.mark.parametrize("fault", _FAULTS)
def test_a_spoilt_frame_ends_only_its_own_stream(
    service: ThreadedRelayService, other: Client, fault: str, direction: str
) -> None:
    for skip in (0, 3, 9):
        with Victim(service, other) as victim:
            arm = _FAULTS[fault](service.faults.frames)
            armed = arm(
                direction=direction, kind=Kind.DATA, stream_id=victim.link.stream_id, skip=skip
            )
            victim.ask(10)
            victim.ask(ENOUGH)
            assert armed.hits == 1
            # What was answered was answered in order, and is its own.
            assert victim.answered == victim.expected[: len(victim.answered)]
            if fault in _HARMLESS:
                assert not victim.ended
                assert victim.answered == victim.expected
            elif not victim.ended:
                # One bit may be in a field that nobody looks at.
                assert fault == "corrupt header"
                assert victim.answered == victim.expected
            else:
                assert len(victim.answered) <= skip + 1
        assert is_served(service)


def test_many_spoilt_frames_of_many_streams(service: ThreadedRelayService, other: Client) -> None:
    with contextlib.ExitStack() as stack:
        victims = [stack.enter_context(Victim(service, other)) for _ in range(12)]
        for number, victim in enumerate(victims):
            name = list(_FAULTS)[number % len(_FAULTS)]
            for direction in (TO_EXECUTOR, TO_HARNESS):
                _FAULTS[name](service.faults.frames)(
                    direction=direction,
                    kind=Kind.DATA,
                    stream_id=victim.link.stream_id,
                    skip=5 + number,
                    times=5,
                )
        for _ in range(3):
            for victim in victims:
                victim.ask(10)
        for number, victim in enumerate(victims):
            victim.ask(ENOUGH)
            assert victim.answered == victim.expected[: len(victim.answered)]
            harmless = list(_FAULTS)[number % len(_FAULTS)] in _HARMLESS
            assert victim.ended != harmless
    assert is_served(service)


def test_foreign_records_are_not_accepted(service: ThreadedRelayService, other: Client) -> None:
    """A relay that puts a record of one stream into another one gains nothing."""
    with Victim(service, other) as one, Victim(service, other) as two:
        stolen = decode(one.link.sealed(b'{"id": "stolen", "method": "environment/status"}')[0])
        service.executor(ENVIRONMENT).send(encode(stolen._replace(stream_id=two.link.stream_id)))
        two.ask(1)
        assert (two.ended, two.answered) == (True, [])
        one.link.send_frame(stolen)
        one.ask(1)
        assert one.answered == ["stolen", *one.expected]


def test_a_recorded_stream_cannot_be_played_again(
    service: ThreadedRelayService, other: Client
) -> None:
    with Victim(service, other) as victim:
        victim.ask(5)
        recorded = [
            frame.data
            for frame in service.frames
            if frame.stream_id == victim.link.stream_id and frame.direction == TO_EXECUTOR
        ]
        assert len(recorded) == 7  # resume, handshake, five requests
        for frame in recorded[2:]:
            service.executor(ENVIRONMENT).send(frame)  # copies: ignored
        victim.ask(1)
        assert victim.answered == victim.expected
        # As from the beginning: the handshake is refused, for there is such a stream.
        for frame in recorded:
            service.executor(ENVIRONMENT).send(frame)
        victim.ask(0)
        assert victim.ended


# ---- handshakes -------------------------------------------------------------------------

_FIRST_MESSAGES: dict[str, list[list[Kind]]] = {
    "drop": [[]],
    "duplicate": [[Kind.RESET]],
    "truncate": [[]],
    "corrupt payload": [[Kind.RESET]],
    # Another stream, another kind, another version, or nothing that matters.
    "corrupt header": [[], [Kind.RESET], [Kind.HANDSHAKE]],
}


@pytest.mark.parametrize("fault", _FIRST_MESSAGES)
def test_a_spoilt_first_message_leads_nowhere(
    service: ThreadedRelayService, other: Client, fault: str
) -> None:
    for _ in range(8):
        with RelayLink(service, handshake=False) as link:
            arm = _FAULTS[fault](service.faults.frames)
            armed = arm(direction=TO_EXECUTOR, kind=Kind.HANDSHAKE, stream_id=link.stream_id)
            link.begin()
            service.until(partial(getattr, armed, "hits"))
            assert is_served(service)  # after a whole handshake of another client ours is over too
            assert [decode(data).kind for data in link.drain()] in _FIRST_MESSAGES[fault]


def test_a_spoilt_second_message_costs_no_stream(
    service: ThreadedRelayService, other: Client
) -> None:
    """The executor takes the stream for opened; it is over when the client has left."""
    faults = ["drop", "truncate", "corrupt payload"]
    for number in range(135):
        arm = _FAULTS[faults[number % 3]](service.faults.frames)
        with RelayLink(service, handshake=False) as link:
            armed = arm(direction=TO_HARNESS, kind=Kind.HANDSHAKE, stream_id=link.stream_id)
            attempt = link.begin()
            service.until(partial(getattr, armed, "hits"))
            for data in link.drain():
                with contextlib.suppress(RelayError):
                    attempt.read_second(decode(data).payload)
                    pytest.fail("a spoilt message was taken")
    assert is_served(service)


# ---- time -------------------------------------------------------------------------------


def test_delays_change_nothing(service: ThreadedRelayService, other: Client) -> None:
    with Victim(service, other) as victim:
        for direction in (TO_EXECUTOR, TO_HARNESS):
            service.faults.frames.delay(
                0.02, direction=direction, stream_id=victim.link.stream_id, times=5
            )
        for _ in range(4):
            victim.ask(5)
        other.call("environment/status")
        while len(victim.answered) < 20:
            victim.ask(0)
        assert victim.answered == victim.expected


def test_a_stalled_relay_loses_nothing(service: ThreadedRelayService, other: Client) -> None:
    with connect(service) as client:
        relay = service.executor(ENVIRONMENT)
        relay.stall()
        requests = [client.request("environment/status") for _ in range(50)]
        theirs = [other.request("environment/status") for _ in range(50)]
        relay.release()
        assert [client.result(request) for request in requests] == [READY] * 50
        assert [other.result(request) for request in theirs] == [READY] * 50


def test_what_a_relay_loses_in_a_moment_of_silence_ends_those_who_spoke(
    service: ThreadedRelayService, other: Client
) -> None:
    with Victim(service, other) as victim:
        relay = service.executor(ENVIRONMENT)
        relay.freeze()
        count = len(service.frames)
        for _ in range(3):
            victim.link.send_text(b'{"id": 1, "method": "environment/status"}')
        service.until(lambda: len(service.service.frames) >= count + 3)
        relay.thaw()
        victim.ask(ENOUGH)
        assert (victim.ended, victim.answered) == (True, [])
    assert is_served(service)


# ---- what the relay sees ----------------------------------------------------------------


def test_the_relay_and_the_log_see_no_plaintext(
    executor: tuple[ThreadedRelayService, Server], tmp_path: Path
) -> None:
    service, running = executor
    canary = f"canary{secrets.token_hex(16)}"
    with connect(service) as client:
        path = tmp_path / f"{canary}-file"
        content = {"path": uri(path), "dataBase64": b64(canary * 5000)}
        assert client.call("fs/writeFile", content) == {}
        client.call("fs/readFile", {"path": uri(path)})
        name = client.start(
            ["sh", "-c", f"echo {canary}; echo $SECRET; cat"],
            env={"SECRET": canary, "PATH": "/usr/bin:/bin"},
            pipeStdin=True,
        )
        client.write(name, f"{canary}\n".encode(), "w1")
        client.notice("process/output", name)
        client.failure("fs/readFile", {"path": f"file:///{canary}"})
        client.failure(canary, {canary: canary})
        link = relay_link(client)
        link.send_frame(link.seal(len(canary).to_bytes(4, "big") + canary.encode()))  # no JSON
        assert link.wait_reset() == RESET_REASON
    hidden = [canary.encode(), b64(canary).encode().rstrip(b"=")[:-1]]
    frames = [frame.data for frame in service.frames]
    assert len(frames) > 10
    for text in hidden:
        assert not [data for data in frames if text in data]
        assert text.decode() not in running.stderr()
