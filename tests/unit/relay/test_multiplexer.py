"""The executor's streams: every event of their lives, every limit, and refused handshakes.

The link and the registry are fakes that keep what they are told; the harnesses are real ones.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PublicKey
from tests.support.relay_link import (
    CLIENT,
    EXECUTOR,
    FakeLink,
    FakeReceiver,
    check_alive,
    data_frame_of,
    handshake_frame,
    initiator_of,
    reset_frame,
)

from exec_server.errors import CredentialRejected, RelayError
from exec_server.relay.frames import Frame, Kind, encode
from exec_server.relay.multiplexer import (
    AUTHORIZATION_BYTES,
    BURST_FAILURES,
    FAILURES_A_SECOND,
    MAX_PENDING,
    MAX_PENDING_OF_TOKEN,
    MAX_STREAMS,
    REVOKED_REASON,
    Verdict,
)
from exec_server.relay.noise import (
    FIRST_BYTES,
    REJECTION,
    SECOND_BYTES,
    Identity,
    Initiator,
    Responder,
    prologue,
)
from exec_server.relay.records import Channel, RelayChannel

_FILE = json.loads((Path(__file__).parents[2] / "vectors" / "relay_frames.json").read_text())

_SEGMENTS: list[dict[str, Any]] = [{"segment_count": 0}, {"segment_count": 2}, {"segment_index": 1}]


@pytest.fixture
def link() -> FakeLink:
    return FakeLink()


# ---- from nothing to a stream ---------------------------------------------------------


def test_handshake_asks_the_registry_and_opens_a_stream(link: FakeLink) -> None:
    initiator, handshake = link.begin("stream-1")
    assert handshake.stream_id == "stream-1"
    assert handshake.key == CLIENT.public
    assert handshake.authorization == "authorization"
    assert (link.asked, link.opened, len(link.streams)) == ([handshake], [], 0)
    (answer,) = link.finish_handshake(handshake, Verdict.VALID)
    assert answer == handshake_frame("stream-1", answer.payload)
    assert len(link.streams) == 1
    (receiver,) = link.opened
    assert receiver.channel.stream_id == "stream-1"
    check_alive(link, RelayChannel("stream-1", initiator.read_second(answer.payload)), receiver)
    assert link.failures() == 0


def test_answer_is_sent_before_the_stream_can_say_anything() -> None:
    class Talker(FakeLink):
        def stream_opened(self, channel: Channel) -> FakeReceiver:
            self.send_frame(channel.seal(b"hello"))
            return super().stream_opened(channel)

    link = Talker()
    _, handshake = link.begin("stream-1")
    link.finish_handshake(handshake, Verdict.VALID)
    assert [frame.kind for frame in link.sent] == [Kind.HANDSHAKE, Kind.DATA]


def test_a_stream_that_cannot_be_opened_is_reset() -> None:
    class Full(FakeLink):
        def stream_opened(self, channel: Channel) -> FakeReceiver:
            raise MemoryError

    link = Full()
    _, handshake = link.begin("stream-1")
    _, reset = link.finish_handshake(handshake, Verdict.VALID)
    assert reset == reset_frame("stream-1")
    assert (len(link.streams), link.failures()) == (0, 0)


def test_rejected_credential_is_told_in_the_response_and_opens_nothing(link: FakeLink) -> None:
    initiator, handshake = link.begin("s")
    handshake.prepare()
    (answer,) = link.finish_handshake(handshake, Verdict.REJECTED)  # no reset follows
    assert len(answer.payload) == SECOND_BYTES + len(REJECTION)
    with pytest.raises(CredentialRejected):
        initiator.read_second(answer.payload)
    assert (link.opened, len(link.streams)) == ([], 0)
    assert link.deliver(Frame("s", Kind.DATA, b"x" * 20)) == [reset_frame("s")]
    check_alive(link, link.open("s"), link.opened[0])  # a new handshake under the same id
    assert link.failures() == 1


class _Refusing:
    """A responder that cannot answer the key of its client."""

    def prepare_second(self) -> NoReturn:
        raise RelayError("no")

    def write_second(self, payload: bytes) -> NoReturn:
        raise RelayError("no")


def test_a_response_that_cannot_be_prepared_fails_when_it_is_sent(link: FakeLink) -> None:
    _, handshake = link.begin("stream-1")
    handshake.responder = cast(Responder, _Refusing())
    handshake.prepare()
    assert link.sent == []
    assert link.finish_handshake(handshake, Verdict.VALID) == [reset_frame("stream-1")]


def test_empty_authorization_is_for_the_registry_to_judge(link: FakeLink) -> None:
    assert link.deliver(handshake_frame("s", initiator_of("s").write_first(b""))) == []
    assert link.asked[0].authorization == ""
    assert link.failures() == 0


def test_longest_authorization(link: FakeLink) -> None:
    text = "ü" * (AUTHORIZATION_BYTES // 2)
    assert link.deliver(handshake_frame("s", initiator_of("s").write_first(text.encode()))) == []
    assert link.asked[0].authorization == text


@pytest.mark.parametrize("kind", [Kind.RESUME, Kind.ACK, Kind.HEARTBEAT])
def test_frames_that_mean_nothing_change_nothing(link: FakeLink, kind: Kind) -> None:
    harness = link.open("active")
    _, handshake = link.begin("pending")
    for stream_id in ("unknown", "pending", "active"):
        assert link.deliver(Frame(stream_id, kind)) == []
    check_alive(link, harness, link.opened[0])
    assert not handshake.is_cancelled
    assert link.failures() == 0


@pytest.mark.parametrize("case", _FILE["invalid"], ids=lambda case: case["name"])
def test_recorded_verdicts(link: FakeLink, case: dict[str, Any]) -> None:
    link.streams.frame_received(bytes.fromhex(case["encoded"]))
    sent = [encode(frame).hex() for frame in link.sent]
    if case["executor_verdict"] == "dropped":
        assert sent == []
    else:
        named = {entry["name"]: entry for entry in _FILE["from_reference_binary_0_166_0"]}
        assert sent == [named["reset_frame_from_reference"]["encoded"]]
    assert (link.asked, link.opened) == ([], [])
    assert link.failures() == 0


# ---- handshakes that fail -------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        bytes(FIRST_BYTES),
        initiator_of("s", "another registration").write_first(b""),
        initiator_of("another stream").write_first(b""),
        initiator_of("s").write_first(b"x" * (AUTHORIZATION_BYTES + 1)),
        initiator_of("s").write_first(b"\xff"),
    ],
    ids=[
        "zeros",
        "other registration",
        "other stream",
        "long authorization",
        "authorization not UTF-8",
    ],
)
def test_unreadable_handshake_is_reset_and_charged(link: FakeLink, message: bytes) -> None:
    assert link.deliver(handshake_frame("s", message)) == [reset_frame("s")]
    assert link.asked == []
    assert link.failures() == 1


def test_refused_key_is_reset_and_charged(link: FakeLink) -> None:
    _, handshake = link.begin("s")
    assert link.finish_handshake(handshake, Verdict.INVALID) == [reset_frame("s")]
    assert (link.opened, len(link.streams)) == ([], 0)
    assert link.failures() == 1


def test_key_that_cannot_be_used_is_reset_and_charged(link: FakeLink) -> None:
    """It is authentic, and the registry may even like it, but nothing can be sent to it."""
    odd = Identity.generate()
    odd.public = odd.public._replace(mlkem768=b"\xff" * 1184)
    initiator = Initiator(odd, EXECUTOR.public, prologue("env-1", "reg-1", "s"))
    assert link.deliver(handshake_frame("s", initiator.write_first(b""))) == []
    assert link.finish_handshake(link.asked[0], Verdict.VALID) == [reset_frame("s")]
    assert (link.opened, len(link.streams)) == ([], 0)
    assert link.failures() == 1


def test_second_handshake_of_a_pending_stream_cancels_it(link: FakeLink) -> None:
    initiator, handshake = link.begin("s")
    assert link.deliver(handshake_frame("s", initiator.write_first(b""))) == [reset_frame("s")]
    assert handshake.is_cancelled
    assert link.finish_handshake(handshake, Verdict.VALID) == []
    assert (link.opened, len(link.asked)) == ([], 1)
    assert link.failures() == 1


def test_handshake_on_an_active_stream_leaves_it_alone(link: FakeLink) -> None:
    harness = link.open("s")
    assert link.deliver(handshake_frame("s", initiator_of("s").write_first(b""))) == [
        reset_frame("s")
    ]
    assert len(link.asked) == 1
    check_alive(link, harness, link.opened[0])
    assert link.failures() == 0


def test_data_of_a_pending_stream_cancels_it(link: FakeLink) -> None:
    _, handshake = link.begin("s")
    assert link.deliver(Frame("s", Kind.DATA, b"early")) == [reset_frame("s")]
    assert handshake.is_cancelled
    assert link.finish_handshake(handshake, Verdict.VALID) == []
    assert link.opened == []
    assert link.failures() == 1


def test_segments_are_dropped_whatever_the_state(link: FakeLink) -> None:
    harness = link.open("active")
    _, handshake = link.begin("pending")
    for stream_id in ("unknown", "pending", "active"):
        for odd in _SEGMENTS:
            assert link.deliver(Frame(stream_id, Kind.DATA, b"part", **odd)) == []
    assert not handshake.is_cancelled
    check_alive(link, harness, link.opened[0])
    assert link.failures() == 0


def test_reset_of_a_pending_stream_cancels_it_without_a_charge(link: FakeLink) -> None:
    _, handshake = link.begin("s")
    assert link.deliver(reset_frame("s")) == []
    assert handshake.is_cancelled
    assert link.finish_handshake(handshake, Verdict.VALID) == []
    assert link.finish_handshake(handshake, Verdict.INVALID) == []
    assert link.opened == []
    assert link.failures() == 0


def test_a_relay_that_names_no_tokens_revokes_none(link: FakeLink) -> None:
    link.open("s")
    link.deliver(Frame("s", Kind.RESET, reason=REVOKED_REASON))
    assert (link.opened[0].losses, link.revoked, len(link.streams)) == (1, [], 0)


def test_a_revoked_stream_is_told_to_the_link_after_its_loss() -> None:
    link = FakeLink(names_tokens=True)
    link.open("s")
    for name in ("s", "gone"):
        assert link.deliver(Frame(name, Kind.RESET, reason=REVOKED_REASON)) == []
    assert (link.opened[0].losses, link.revoked, len(link.streams)) == (1, ["s", "gone"], 0)
    link.deliver(reset_frame("s"))
    assert link.revoked == ["s", "gone"]


def test_stream_id_used_again_while_the_old_attempt_is_judged(link: FakeLink) -> None:
    _, old = link.begin("s")
    link.deliver(reset_frame("s"))
    initiator, new = link.begin("s")
    assert old is not new
    # The late answer to the old question says nothing about the new one.
    assert link.finish_handshake(old, Verdict.VALID) == []
    assert link.finish_handshake(old, Verdict.INVALID) == []
    assert (link.opened, new.is_cancelled) == ([], False)
    (answer,) = link.finish_handshake(new, Verdict.VALID)
    harness = RelayChannel("s", initiator.read_second(answer.payload))
    assert link.finish_handshake(old, Verdict.INVALID) == []
    check_alive(link, harness, link.opened[0])


def test_failed_stream_id_can_be_used_again(link: FakeLink) -> None:
    _, handshake = link.begin("s")
    link.finish_handshake(handshake, Verdict.INVALID)
    check_alive(link, link.open("s"), link.opened[0])


# ---- limits ---------------------------------------------------------------------------


def test_streams_are_limited(link: FakeLink) -> None:
    harnesses = [link.open(f"s{number}") for number in range(MAX_STREAMS)]
    assert len(link.streams) == 128
    assert link.deliver(handshake_frame("more", initiator_of("more").write_first(b""))) == [
        reset_frame("more")
    ]
    assert len(link.asked) == 128
    check_alive(link, harnesses[0], link.opened[0])
    link.deliver(reset_frame("s1"))
    check_alive(link, link.open("more"), link.opened[128])
    link.deliver(reset_frame("s2"))
    assert link.failures() == 0


def test_stream_that_was_validated_too_late_is_not_charged(link: FakeLink) -> None:
    for number in range(MAX_STREAMS - 1):
        link.open(f"s{number}")
    attempts = [link.begin(f"late{number}")[1] for number in range(10)]
    (answer,) = link.finish_handshake(attempts[0], Verdict.VALID)
    assert answer.kind is Kind.HANDSHAKE
    for handshake in attempts[1:-1]:
        assert link.finish_handshake(handshake, Verdict.VALID) == [reset_frame(handshake.stream_id)]
    assert link.finish_handshake(attempts[-1], Verdict.INVALID) == [
        reset_frame(attempts[-1].stream_id)
    ]
    assert len(link.streams) == len(link.opened) == MAX_STREAMS
    link.deliver(reset_frame("s0"))
    assert link.failures() == 1  # the one whose key was not valid


def test_pending_handshakes_are_limited(link: FakeLink) -> None:
    attempts = [link.begin(f"p{number}")[1] for number in range(MAX_PENDING)]
    assert len(attempts) == 32
    assert link.deliver(handshake_frame("more", initiator_of("more").write_first(b""))) == [
        reset_frame("more")
    ]
    assert len(link.asked) == 32
    # Only an answer makes room for another. A reset or a mistake does not: the registry goes on
    # thinking, and whoever resets could make it think about any number of keys.
    link.deliver(reset_frame("p0"))
    link.deliver(Frame("p1", Kind.DATA, b"early"))
    assert link.deliver(handshake_frame("more", initiator_of("more").write_first(b""))) == [
        reset_frame("more")
    ]
    for number, handshake in enumerate(attempts[:3]):
        link.finish_handshake(handshake, Verdict.VALID)
        link.begin(f"more {number}")
    assert link.deliver(handshake_frame("last", initiator_of("last").write_first(b""))) == [
        reset_frame("last")
    ]
    for handshake in link.asked[3:]:
        link.streams.finish_handshake(handshake, Verdict.VALID)
    assert len(link.streams) == 33


def test_limits_are_judged_before_any_cryptography(
    link: FakeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(MAX_PENDING):
        link.begin(f"p{number}")

    def never(_: Responder, message: bytes) -> None:
        raise AssertionError("read a handshake beyond the limit")

    monkeypatch.setattr(Responder, "read_first", never)
    assert link.deliver(handshake_frame("more", bytes(FIRST_BYTES))) == [reset_frame("more")]


# ---- failures -------------------------------------------------------------------------


def test_too_many_failures_refuse_handshakes_until_the_allowance_grows_back(link: FakeLink) -> None:
    harness = link.open("active")
    _, pending = link.begin("pending")
    link.fail(BURST_FAILURES - 1)
    assert not link.is_refused()
    link.fail(1)
    assert link.is_refused()
    # What was there before goes on.
    check_alive(link, harness, link.opened[0])
    (answer,) = link.finish_handshake(pending, Verdict.VALID)
    assert answer.kind is Kind.HANDSHAKE
    link.now += 1 / FAILURES_A_SECOND
    assert not link.is_refused()
    link.fail(1)
    assert link.is_refused()


def test_refused_handshakes_are_not_charged(link: FakeLink) -> None:
    link.fail(10 * BURST_FAILURES)
    link.now += 1 / FAILURES_A_SECOND
    assert not link.is_refused()


def test_handshakes_that_cost_nothing_are_not_charged(link: FakeLink) -> None:
    for size in (1, FIRST_BYTES - 1, 65_536):
        for _ in range(BURST_FAILURES):
            assert link.deliver(handshake_frame("bad", bytes(size))) == [reset_frame("bad")]
    assert link.asked == []
    assert link.failures() == 0


def test_failures_of_one_token_refuse_no_other() -> None:
    link = FakeLink(names_tokens=True)
    link.fail(BURST_FAILURES, "tok-a")
    assert link.is_refused("tok-a")
    assert not link.is_refused("tok-b")
    assert not link.is_refused("")
    # Those that fail later are charged to their own token, too.
    _, invalid = link.begin("i", "tok-b")
    link.finish_handshake(invalid, Verdict.INVALID)
    link.begin("h", "tok-b")
    link.deliver(handshake_frame("h", b"again", "tok-c"))
    link.begin("d", "tok-b")
    link.deliver(Frame("d", Kind.DATA, b"early", token_id="tok-c"))
    link.fail(BURST_FAILURES - 3, "tok-b")
    assert link.is_refused("tok-b")
    assert link.failures() == 0


def test_tokens_that_clients_name_themselves_do_not_count(link: FakeLink) -> None:
    for number in range(BURST_FAILURES):
        link.fail(1, f"tok-{number}")
    assert link.is_refused("tok-new")


def test_pending_handshakes_of_one_token_leave_room_for_others() -> None:
    link = FakeLink(names_tokens=True)
    attempts = [link.begin(f"a{number}", "tok-a")[1] for number in range(MAX_PENDING_OF_TOKEN)]
    assert link.is_refused("tok-a")
    attempts += [link.begin(f"b{number}", "tok-b")[1] for number in range(MAX_PENDING - 24)]
    assert link.is_refused("tok-b")
    link.finish_handshake(attempts[0], Verdict.VALID)
    assert not link.is_refused("tok-a")


def test_all_kinds_of_failures_count_together(link: FakeLink) -> None:
    _, first = link.begin("a")
    _, second = link.begin("b")
    link.begin("c")
    link.finish_handshake(first, Verdict.INVALID)
    link.deliver(handshake_frame("b", b"again"))
    link.deliver(Frame("c", Kind.DATA, b"early"))
    assert second.is_cancelled
    assert link.failures() == 3


# ---- the log --------------------------------------------------------------------------


def test_log_tells_no_secrets(link: FakeLink, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secret = b"secret authorization"
    link.deliver(handshake_frame("a", initiator_of("a").write_first(secret)))
    link.finish_handshake(link.asked[0], Verdict.INVALID)
    link.deliver(handshake_frame("a", initiator_of("a").write_first(secret + b"\xff")))
    harness = link.open("b")
    link.deliver(data_frame_of(harness, b"refuse"))
    link.streams.frame_received(b"garbage")
    link.fail(BURST_FAILURES)
    texts = [record.getMessage() for record in caplog.records]
    assert texts[:4] == [
        "handshake failed: key is not valid",
        "handshake failed: authorization is not UTF-8",
        "relay stream b ends: refused",
        "dropped a relay frame: field of a wrong type",
    ]
    assert texts[-2:] == [
        "handshake failed: invalid public key",
        "too many failed handshakes on this link: some are refused",
    ]
    assert "secret" not in caplog.text
    assert "secret" not in repr(link.asked)


def test_prepared_response_is_sent_when_the_key_is_valid(
    link: FakeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(_: MLKEM768PublicKey) -> NoReturn:
        raise AssertionError("computed a response again")

    initiator, handshake = link.begin("s")
    handshake.prepare()
    assert link.sent == []
    monkeypatch.setattr(handshake.responder, "_encapsulate", never)
    (answer,) = link.finish_handshake(handshake, Verdict.VALID)
    check_alive(link, RelayChannel("s", initiator.read_second(answer.payload)), link.opened[0])


def test_cancelled_handshake_is_not_prepared(
    link: FakeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(_: Responder) -> None:
        raise AssertionError("computed a response")

    _, handshake = link.begin("s")
    link.deliver(reset_frame("s"))
    monkeypatch.setattr(Responder, "prepare_second", never)
    handshake.prepare()


def test_error_of_a_prepared_response_is_reported_at_the_end(
    link: FakeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Responder) -> None:
        raise RelayError("invalid public key")

    _, handshake = link.begin("s")
    monkeypatch.setattr(Responder, "prepare_second", fail)
    handshake.prepare()
    assert link.sent == []
    assert link.finish_handshake(handshake, Verdict.VALID) == [reset_frame("s")]
