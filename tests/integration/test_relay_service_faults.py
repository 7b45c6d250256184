"""What the relay service can be made to do wrong: to answers, to frames and to sockets."""

from __future__ import annotations

import contextlib
import socket
from urllib.parse import urlsplit

import pytest
from tests.relay_service import TEXT, TO_HARNESS, Endpoint, Kind, ThreadedRelayService, build, reset
from tests.support.client import (
    DEFAULT_TIMEOUT,
    PING,
    PONG,
    Disconnected,
    Frame,
    HandshakeRefused,
    frame_bytes,
    scaled,
)
from tests.support.relay import post
from tests.support.relay_ends import (
    ENVIRONMENT_PATH,
    REASON_HEADER,
    Ends,
    code,
    data,
    dial,
    ending,
    key,
    message,
    register,
)

pytestmark = pytest.mark.usefixtures("closed_links")


# ---- answers --------------------------------------------------------------------------


@pytest.mark.quick
def test_an_answer_can_be_replaced_a_number_of_times(service: ThreadedRelayService) -> None:
    fault = service.faults.http.answer(
        Endpoint.REGISTER, 503, code="registration_conflict", skip=1, times=2
    )
    statuses = []
    for _ in range(4):
        body = {"security_profile": "noise_hybrid_ik_v1", "executor_public_key": key()}
        statuses.append(post(service, f"{ENVIRONMENT_PATH}/register", body).status)
    assert statuses == [200, 503, 503, 200]
    assert fault.hits == 2


def test_an_answer_can_be_rewritten(service: ThreadedRelayService) -> None:
    service.faults.http.rewrite(Endpoint.REGISTER, lambda body: {**body, "url": "ws://x"})
    assert register(service)["url"] == "ws://x"
    assert register(service)["url"] != "ws://x"


def test_an_answer_can_be_cut_spoilt_or_slow(service: ThreadedRelayService) -> None:
    path, body = f"{ENVIRONMENT_PATH}/connect", {"harness_public_key": key()}
    service.faults.http.cut(Endpoint.CONNECT)
    with pytest.raises(Disconnected):
        post(service, path, body)
    service.faults.http.garbage(Endpoint.CONNECT)
    with pytest.raises((ValueError, IndexError)):
        post(service, path, body)
    service.faults.http.drip(Endpoint.CONNECT, 0.0, piece=3)
    assert code(post(service, path, body)) == (409, "environment_offline")


def test_a_hanging_request_is_taken_but_not_answered(service: ThreadedRelayService) -> None:
    fault = service.faults.http.hang(Endpoint.VALIDATE)
    parts = urlsplit(service.url)
    head = f"POST {ENVIRONMENT_PATH}/validate HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n"
    with socket.create_connection((parts.hostname, parts.port)) as sock:
        sock.sendall(head.encode())
        service.until(lambda: fault.hits)
        # Another connection is served meanwhile, so the first one would have been answered.
        assert post(service, f"{ENVIRONMENT_PATH}/validate", {}).status == 400
        sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            sock.recv(1)


def test_an_upgrade_can_be_refused_with_a_reason(service: ThreadedRelayService) -> None:
    url = register(service)["url"]
    service.faults.http.reject(Endpoint.EXECUTOR_SOCKET, 503, "pod_draining")
    with pytest.raises(HandshakeRefused) as refused:
        dial(url)
    assert refused.value.status == 503
    assert refused.value.reply.header(REASON_HEADER) == "pod_draining"
    dial(url).sock.close()
    assert len(service.requests_to(Endpoint.EXECUTOR_SOCKET)) == 2


def test_the_service_can_stop_listening_for_a_while(service: ThreadedRelayService) -> None:
    service.deafen()
    with pytest.raises(ConnectionRefusedError):
        register(service)
    service.listen()
    assert register(service)["environment_id"] == "env-1"


# ---- frames and sockets ---------------------------------------------------------------


def test_frames_can_be_dropped_doubled_and_swapped(ends: Ends) -> None:
    one = ends.stream("one")
    frames = ends.service.faults.frames
    dropped = frames.drop(direction=TO_HARNESS, kind=Kind.DATA, stream_id="one", skip=1)
    doubled = frames.duplicate(where=lambda frame: frame == data("one", 2))
    swapped = frames.swap(direction=TO_HARNESS, skip=3)
    for seq in range(6):
        ends.executor.send_binary(data("one", seq))
    sequence = [message(one) for _ in range(6)]
    assert sequence == [data("one", seq) for seq in (0, 2, 2, 4, 3, 5)]
    assert [fault.hits for fault in (dropped, doubled, swapped)] == [1, 1, 1]


def test_frames_can_be_corrupted_where_wanted(ends: Ends) -> None:
    one = ends.stream("one")
    frames = ends.service.faults.frames
    sent = data("one", 0)
    head = len(sent) - len(b"ciphertext")
    frames.corrupt_payload()
    frames.corrupt_header(skip=1)
    frames.truncate(keep=5, skip=2)
    received = []
    for _ in range(3):
        one.send_binary(sent)
        received.append(message(ends.executor))
    assert received[0][:head] == sent[:head]
    assert received[1][head:] == sent[head:]
    assert received[2] == sent[:5]
    for changed in received[:2]:
        differences = [(a ^ b).bit_count() for a, b in zip(changed, sent, strict=True)]
        assert sum(differences) == 1


def test_a_delayed_frame_keeps_its_place(ends: Ends) -> None:
    one = ends.stream("one")
    ends.service.faults.frames.delay(0.05, direction=TO_HARNESS)
    for seq in range(3):
        ends.executor.send_binary(data("one", seq))
    assert [message(one) for _ in range(3)] == [data("one", seq) for seq in range(3)]


def test_anything_can_be_sent_to_either_side(ends: Ends) -> None:
    one = ends.stream("one")
    ends.service.executor("env-1").send(b"\xffgarbage")
    assert message(ends.executor) == b"\xffgarbage"
    ends.service.harness("one").send(b"text", TEXT)
    assert one.receive_frame(scaled(DEFAULT_TIMEOUT)) == Frame(0x1, b"text")


def test_a_socket_can_be_aborted_or_closed(ends: Ends) -> None:
    one, two = ends.stream("one"), ends.stream("two")
    ends.service.harness("one").abort()
    assert ending(one) is None
    assert message(ends.executor) == reset(b"one", "harness_disconnected")
    ends.service.harness("two").close(4321, "because")
    assert ending(two) == 4321


def test_a_frozen_socket_stays_open_and_silent(ends: Ends) -> None:
    one = ends.stream("one")
    frozen = ends.service.executor("env-1")
    frozen.freeze()
    ends.executor.send_frame(PING, b"1")
    one.send_binary(data("one", 0))
    ends.service.until(lambda: len(ends.service.service.frames) == 2)
    # What was sent meanwhile is lost; the ping is read and answered after the thaw.
    frozen.thaw()
    assert ends.executor.receive_frame(scaled(DEFAULT_TIMEOUT)) == Frame(PONG, b"1")


def test_pings_can_be_swallowed(ends: Ends) -> None:
    one = ends.stream("one")
    ends.service.executor("env-1").swallow_pings()
    ends.executor.send_frame(PING, b"1")
    ends.executor.send_binary(data("one", 0))
    assert message(one) == data("one", 0)
    one.send_binary(data("one", 1))
    assert message(ends.executor) == data("one", 1)


def test_a_stalled_client_holds_up_the_executor_and_nothing_is_lost() -> None:
    with ThreadedRelayService(record=False) as service:
        ends = Ends(service)
        one = ends.stream("one")
        service.harness("one").stall()
        body = bytes([0x18, 1]) + bytes(60_000)
        frame = frame_bytes(0x2, build(b"one", Kind.DATA, body))
        sock, sent = ends.executor.sock, 0
        # Held up once the service does not read any more: far below what is offered.
        sock.setblocking(False)
        while service.executor("env-1").is_read:
            assert sent < 64 * 1024 * 1024
            with contextlib.suppress(BlockingIOError):
                sent += sock.send(frame[sent % len(frame) :])
        service.harness("one").release()
        for _ in range(sent // len(frame)):
            assert message(one) == build(b"one", Kind.DATA, body)
