"""Executors and clients on links in memory: ownership, resets, back-pressure, limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from tests.support.memory_transport import MemoryTransport
from tests.support.raw_links import frame_bytes

from exec_server.hosting.metrics import Metrics
from exec_server.hosting.relay_hub import (
    EXECUTOR_STALL_SECONDS,
    STREAMS,
    STREAMS_OF_TOKEN,
    RelayedClient,
    RelayedExecutor,
    RelayHub,
)
from exec_server.hosting.relay_link import RelayLink, flush_links
from exec_server.hosting.store import ExecutorLease, Limits
from exec_server.relay.frames import (
    FRAME_BYTES,
    Frame,
    Kind,
    decode,
    encode,
    stream_prefix,
    token_field,
)


class Side:
    """One end of the exchange, and its peer."""

    def __init__(self, token_id: str = "tok") -> None:
        self.transport = MemoryTransport(asyncio.Protocol())
        self.link = RelayLink(self.transport, token_id)

    def send(self, frame: Frame | bytes) -> None:
        self.transport.receive(frame_bytes(2, frame if isinstance(frame, bytes) else encode(frame)))

    def frames(self) -> list[Frame]:
        """The relay frames that the peer was sent."""
        data, found = self.transport.take_written(), []
        while data and data[0] == 0x82:
            size, start = data[1], 2
            if size == 126:
                size, start = int.from_bytes(data[2:4], "big"), 4
            found.append(decode(data[start : start + size]))
            data = data[start + size :]
        self.closed = int.from_bytes(data[2:4], "big") if data[:1] == b"\x88" else None
        return found


class Hall:
    """A hub with one executor and any number of clients."""

    def __init__(self, *, stall_seconds: float = 60.0, limits: Limits | None = None) -> None:
        self.hub = RelayHub(Metrics(), stall_seconds)
        self.tenant = self.hub.tenant("t", limits or Limits())
        self.lost: list[ExecutorLease] = []
        self.side, self.executor = self.arrive(1)

    def arrive(self, epoch: int) -> tuple[Side, RelayedExecutor]:
        side = Side()
        lease = ExecutorLease("t", "env", "reg", epoch)
        executor = RelayedExecutor(self.hub, self.tenant, side.link, lease, self.lost.append)
        executor.open(b"")
        return side, executor

    def client(self, token_id: str = "tok") -> tuple[Side, RelayedClient]:
        side = Side(token_id)
        client = RelayedClient(self.hub, self.tenant, side.link, self.executor)
        client.open(b"")
        return side, client


def on_loop(scene: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(scene())

    run.__name__ = scene.__name__
    return run


def data(stream: str, payload: bytes = b"x") -> Frame:
    return Frame(stream, Kind.DATA, payload)


def reset(stream: str, reason: str) -> Frame:
    return Frame(stream, Kind.RESET, reason=reason)


@on_loop
async def test_frames_find_their_way() -> None:
    hall = Hall()
    (one, _), (two, _) = hall.client(), hall.client()
    one.send(data("1"))
    two.send(data("2"))
    assert hall.side.frames() == [data("1"), data("2")]
    assert hall.hub.streams() == 2
    traced = Frame("2", Kind.DATA, b"t", traceparent="00")
    for frame in (data("2", b"a"), data("none"), traced):
        hall.side.send(frame)
    hall.side.send(b"\x12\x012\x08\x01\x2a\x01x")  # another order of fields: not readable as usual
    assert two.frames()[:2] == [data("2", b"a"), traced]
    assert one.frames() == []
    assert hall.executor.bytes > 0


@on_loop
async def test_a_client_owns_one_stream() -> None:
    hall = Hall()
    (one, _), (two, _) = hall.client(), hall.client()
    one.send(data("1"))
    two.send(data("1", b"injected"))
    assert two.frames() == [reset("1", "stream_id_in_use")]
    one.send(data("2"))
    assert one.frames() == [reset("2", "stream_id_not_owned")]
    shake = Frame("1", Kind.HANDSHAKE, b"h")
    one.send(shake)
    one.send(shake)
    assert one.frames() == [reset("1", "second_handshake")]
    assert hall.side.frames() == [data("1"), shake._replace(token_id="tok")]


@on_loop
async def test_a_handshake_names_the_token_of_its_client_whatever_that_says() -> None:
    hall = Hall()
    side, _ = hall.client()
    shake = Frame("1", Kind.HANDSHAKE, b"h")
    side.send(encode(shake) + token_field("another"))
    assert hall.side.frames() == [shake._replace(token_id="tok")]


@on_loop
async def test_a_handshake_without_room_for_the_token_is_not_forwarded() -> None:
    hall = Hall()
    side, _ = hall.client()
    unknown = b"\xfa\x01"  # a field with bytes, to fill the frame
    shake = encode(Frame("1", Kind.HANDSHAKE, b"h")) + unknown
    size = FRAME_BYTES - len(shake) - 3
    side.send(
        shake + bytes((size & 0x7F | 0x80, size >> 7 & 0x7F | 0x80, size >> 14)) + bytes(size)
    )
    assert hall.side.frames() == [reset("1", "harness_disconnected")]
    side.frames()
    assert side.closed == 1007
    assert hall.executor.link.is_open


@on_loop
async def test_one_token_leaves_streams_to_others() -> None:
    hall = Hall()
    for _ in range(STREAMS_OF_TOKEN):
        assert hall.executor.has_room("tok")
        hall.client()
    assert not hall.executor.has_room("tok")
    for _ in range(STREAMS - STREAMS_OF_TOKEN):
        assert hall.executor.has_room("another")
        hall.client()[0].link.token_id = "another"
    assert not hall.executor.has_room("another")


@on_loop
async def test_an_executor_is_told_which_streams_a_revoked_token_had() -> None:
    hall = Hall()
    sides = {name: hall.client(token) for name, token in (("1", "bad"), ("2", "ok"), ("3", "bad"))}
    for name, (side, _) in sides.items():
        side.send(data(name))
    sides["3"][0].transport.lose()  # its session may be there for a while
    nameless, _ = hall.client("bad")
    hall.side.frames()
    for _ in range(2):  # nodes see a revocation several times
        hall.hub.end_streams_of(frozenset({"bad", "other"}))
        flush_links()
    assert hall.side.frames() == [reset("1", "token_revoked"), reset("3", "token_revoked")]
    assert list(hall.executor.streams) == [stream_prefix("2")]
    sides["1"][0].transport.lose()
    nameless.transport.lose()
    hall.hub.end_streams_of(frozenset({"bad"}))
    flush_links()
    assert hall.side.frames() == []


@on_loop
async def test_ended_streams_are_remembered_for_an_executor_that_comes_back() -> None:
    hall = Hall()
    for name in ("1", "2"):
        hall.client("bad")[0].send(data(name))
    hall.side.transport.lose()
    hall.hub.end_streams_of(frozenset({"none"}))
    hall.side, hall.executor = hall.arrive(2)
    hall.client("ok")[0].send(data("2"))  # the id is in use again
    hall.side.frames()
    hall.hub.end_streams_of(frozenset({"bad"}))
    flush_links()
    assert hall.side.frames() == [reset("1", "token_revoked")]
    hall.client("bad")[0].send(data("3"))
    hall.client("ok")[0].send(data("4"))
    hall.side.transport.lose()
    hall.hub.end_streams_of(frozenset({"bad"}))  # the executor is told when it is back
    for epoch, told in ((3, [reset("3", "token_revoked")]), (4, [])):
        hall.side, hall.executor = hall.arrive(epoch)
        flush_links()
        assert hall.side.frames() == told
        hall.side.transport.lose()


@on_loop
async def test_the_memory_of_ended_streams_is_bounded_in_number_and_time() -> None:
    hall = Hall()
    hub, loop = hall.hub, asyncio.get_running_loop()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("exec_server.hosting.relay_hub.ENDED_STREAMS", 2)
        patch.setattr(loop, "time", lambda: 100.0)
        for prefix in (b"1", b"2", b"1", b"3"):
            hub.stream_ended(("t", "env"), prefix, "tok")
        assert [prefix for _, prefix in hub._ended] == [b"1", b"3"]
        patch.setattr(loop, "time", lambda: 181.0)
        hub.stream_ended(("t", "env"), b"4", "tok")
        assert [prefix for _, prefix in hub._ended] == [b"4"]


@on_loop
async def test_a_client_cannot_say_that_a_token_is_revoked() -> None:
    hall = Hall()
    victim, _ = hall.client("victim")
    victim.send(data("1"))
    victim.transport.lose()
    hall.side.frames()
    attacker, _ = hall.client("attacker")
    attacker.send(reset("1", "token_revoked"))
    assert attacker.frames() == [reset("1", "reason_not_allowed")]
    assert hall.side.frames() == []
    # Nor does it hide the stream from a revocation.
    hall.hub.end_streams_of(frozenset({"victim"}))
    flush_links()
    assert hall.side.frames() == [reset("1", "token_revoked")]


@on_loop
async def test_a_client_that_leaves_or_breaks_the_rules_is_reported() -> None:
    hall = Hall()
    for end, code in (
        (lambda side: side.transport.lose(), None),
        (lambda side: side.send(b"garbage"), 1007),
        (lambda side: side.transport.receive(frame_bytes(1, b"{}")), 1003),
    ):
        side, client = hall.client()
        side.send(data("s"))
        end(side)  # type: ignore[no-untyped-call]
        assert hall.side.frames() == [data("s"), reset("s", "harness_disconnected")]
        side.frames()
        assert side.closed == code
        client.frame_received(encode(data("s")))  # what was read already is dropped
    side, _ = hall.client()
    side.transport.lose()
    assert hall.side.frames() == []  # it had no stream
    assert hall.tenant.sockets == 1


@on_loop
async def test_an_executor_that_leaves_ends_its_clients() -> None:
    hall = Hall()
    (one, _), (idle, _) = hall.client(), hall.client()
    one.send(data("s"))
    hall.side.transport.lose()
    assert one.frames() == [reset("s", "executor_disconnected")]
    assert one.closed == 1001
    assert idle.frames() == []
    assert idle.closed == 1001
    assert hall.lost == [hall.executor.lease]
    assert hall.hub.executors == {}
    assert hall.tenant.sockets == 0
    hall.hub.forget_idle_tenants()
    assert hall.hub.tenants == {}


@on_loop
async def test_the_highest_epoch_wins() -> None:
    hall = Hall()
    newer, executor = hall.arrive(3)
    hall.side.frames()
    assert hall.side.closed == 4001
    late, _ = hall.arrive(2)
    late.frames()
    assert late.closed == 4001
    assert hall.hub.executors == {("t", "env"): executor}
    newer.frames()
    assert newer.closed is None


@on_loop
async def test_an_executor_ignores_text_and_garbage() -> None:
    hall = Hall()
    hall.side.transport.receive(frame_bytes(1, b"{}"))
    hall.side.send(b"")
    hall.side.send(b"garbage")
    assert hall.executor.link.is_open


@on_loop
async def test_a_frame_of_an_executor_without_a_body_is_dropped() -> None:
    hall = Hall()
    side, _ = hall.client()
    side.send(data("s"))
    hall.side.frames()
    hall.side.send(stream_prefix("s"))
    hall.side.send(data("s", b"y"))
    assert side.frames() == [data("s", b"y")]


@on_loop
async def test_a_client_that_does_not_read_holds_up_its_executor_for_a_while() -> None:
    hall = Hall(stall_seconds=0.01)
    (slow, _), (quick, _) = hall.client(), hall.client()
    slow.send(data("slow"))
    quick.send(data("quick"))
    hall.side.frames()
    slow.link.pause_writing()
    assert hall.side.transport.is_reading_paused
    slow.link.resume_writing()
    assert not hall.side.transport.is_reading_paused
    slow.link.pause_writing()
    while not slow.transport.is_aborted:
        await asyncio.sleep(0.005)
    assert not hall.side.transport.is_reading_paused
    assert hall.side.frames() == [reset("slow", "harness_stalled")]
    hall.side.send(data("quick"))
    assert quick.frames() == [data("quick")]


@on_loop
async def test_a_stalled_client_whose_executor_leaves_is_not_reset_twice() -> None:
    hall = Hall(stall_seconds=0.01)
    side, client = hall.client()
    side.send(data("s"))
    side.link.pause_writing()
    hall.side.transport.lose()
    await asyncio.sleep(0.02)
    assert not side.transport.is_aborted
    client.writing_changed(is_paused=False)


@on_loop
async def test_an_executor_that_does_not_read_stops_its_clients_and_is_cut_off() -> None:
    hall = Hall()
    side, _ = hall.client()
    hall.side.link.pause_writing()
    assert side.transport.is_reading_paused
    late, _ = hall.client()
    assert late.transport.is_reading_paused
    hall.side.transport.buffered = 10
    hall.executor.check_progress(0.0)
    hall.executor.check_progress(1.0)
    hall.side.transport.buffered = 9
    hall.executor.check_progress(2.0)  # progress
    hall.side.link.resume_writing()
    assert not side.transport.is_reading_paused
    assert not late.transport.is_reading_paused
    hall.side.link.pause_writing()
    for now in (3.0, 4.0, 4.0 + EXECUTOR_STALL_SECONDS):
        hall.executor.check_progress(now)
    assert hall.side.transport.is_aborted


@on_loop
async def test_a_tiny_frame_counts_as_a_kibibyte_in_the_rate() -> None:
    hall = Hall(limits=Limits(bytes_per_second=10_000))
    side, _ = hall.client()
    for _ in range(2):
        side.send(data("s"))
    assert not side.transport.is_reading_paused
    side.send(data("s"))
    assert side.transport.is_reading_paused
    side.transport.lose()


@on_loop
async def test_a_tenant_beyond_its_rate_is_read_more_slowly() -> None:
    hall = Hall(limits=Limits(bytes_per_second=10_000))
    side, _ = hall.client()
    side.send(data("s", b"x" * 2600))
    assert side.transport.is_reading_paused
    while side.transport.is_reading_paused:
        await asyncio.sleep(0.005)
    side.send(data("s", b"x" * 5000))
    side.transport.lose()  # the timer ends with the link
    faster = hall.hub.tenant("t", Limits(bytes_per_second=20_000))
    assert faster is hall.tenant
    assert faster.rate.rate == 20_000
    assert hall.hub.unsent() == 0
