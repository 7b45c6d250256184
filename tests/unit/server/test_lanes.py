"""Lanes: order, slots, parked requests and limits, without a connection."""

from __future__ import annotations

import pytest

from exec_server.protocol import process
from exec_server.protocol.decoding import Call, Result
from exec_server.server import lanes
from exec_server.server.context import ConnectionContext
from exec_server.server.lanes import Lanes, PendingRequest, named_process
from exec_server.server.methods import Method


def _handler(context: ConnectionContext, params: object) -> Result:
    raise AssertionError("lanes invoke no method")


def _method(
    name: str, family: str = "exec", *, control: bool = False, yields_slot: bool = False
) -> Method:
    call: Call[None, Result] = Call(name, None, Result)
    return Method(call, _handler, family, control=control, yields_slot=yields_slot)


PLAIN = _method("plain")
CONTROL = _method("control", control=True)
CLOSE = _method("close", "filesystem", control=True)
POLL = _method("poll", yields_slot=True)
START = _method(process.START.name)


def _request(method: Method, process_id: object = "p", size: int = 10) -> PendingRequest:
    return PendingRequest(1, method, {"processId": process_id}, size)


# ---- the choice of a lane -------------------------------------------------------------


def test_control_requests_have_a_lane_of_their_own() -> None:
    all_lanes = Lanes(1)
    assert all_lanes.lane_for(_request(PLAIN)) is all_lanes.main
    assert all_lanes.lane_for(_request(POLL)) is all_lanes.main
    assert all_lanes.lane_for(_request(CONTROL)) is all_lanes.control


def test_a_request_overtakes_the_one_start_that_it_cancels() -> None:
    all_lanes = Lanes(1)
    all_lanes.occupy(all_lanes.main, _request(START, "p"))
    assert all_lanes.lane_for(_request(CONTROL, "p"), can_cancel=True) is all_lanes.control
    assert all_lanes.lane_for(_request(CONTROL, "p")) is all_lanes.main
    # A second start of the id would begin, and not be terminated.
    all_lanes.enqueue(all_lanes.main, _request(START, "p"))
    assert all_lanes.lane_for(_request(CONTROL, "p"), can_cancel=True) is all_lanes.main


@pytest.mark.parametrize("is_queued", [True, False])
def test_a_control_request_stays_behind_the_start_of_its_process(is_queued: bool) -> None:
    all_lanes = Lanes(1)
    starts = [_request(START, "p"), _request(START, "p")]
    for start in starts:
        if is_queued:
            all_lanes.enqueue(all_lanes.main, start)
        else:
            all_lanes.occupy(all_lanes.main, start)
    for start in starts:
        assert all_lanes.lane_for(_request(CONTROL, "p")) is all_lanes.main
        assert all_lanes.lane_for(_request(CONTROL, "other")) is all_lanes.control
        if is_queued:
            assert all_lanes.dequeue(all_lanes.main) is start
        else:
            all_lanes.release(all_lanes.main, start)
    assert all_lanes.lane_for(_request(CONTROL, "p")) is all_lanes.control


def test_closing_a_file_stays_behind_its_reads() -> None:
    all_lanes = Lanes(1)
    assert all_lanes.lane_for(_request(CLOSE)) is all_lanes.main


def test_with_concurrent_requests_every_control_request_overtakes() -> None:
    all_lanes = Lanes(2)
    all_lanes.occupy(all_lanes.main, _request(START, "p"))
    assert all_lanes.lane_for(_request(CONTROL, "p")) is all_lanes.control
    assert all_lanes.lane_for(_request(CLOSE)) is all_lanes.control


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"processId": "p"}, "p"),
        ({"processId": 5}, None),
        ({}, None),
        (["p", 1], "p"),
        ([["p"]], None),
        ([], None),
        (None, None),
        ("p", None),
    ],
)
def test_the_process_that_a_request_names(params: object, expected: str | None) -> None:
    assert named_process(PendingRequest(1, PLAIN, params, 1)) == expected


# ---- queues and slots -----------------------------------------------------------------


def test_requests_leave_a_lane_in_their_order_of_arrival() -> None:
    all_lanes = Lanes(1)
    first, second = _request(PLAIN, "a"), _request(PLAIN, "b")
    assert not all_lanes.has_queued
    all_lanes.enqueue(all_lanes.main, first)
    all_lanes.enqueue(all_lanes.main, second)
    assert all_lanes.has_queued
    assert [all_lanes.dequeue(all_lanes.main) for _ in range(2)] == [first, second]
    assert not all_lanes.has_queued
    all_lanes.enqueue(all_lanes.control, first)
    assert all_lanes.has_queued


def test_a_request_that_waits_occupies_a_slot_of_its_lane() -> None:
    all_lanes = Lanes(2)
    request = _request(PLAIN)
    occupied = all_lanes.occupy(all_lanes.main, request)
    assert occupied is all_lanes.main
    assert (all_lanes.main.running, all_lanes.main.slots, all_lanes.control.running) == (1, 2, 0)
    all_lanes.release(occupied, request)
    assert all_lanes.main.running == 0


def test_a_parked_request_occupies_no_slot_of_its_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "PARKED_REQUESTS", 1)
    all_lanes = Lanes(1)
    parked, other = _request(POLL), _request(POLL)
    place = all_lanes.occupy(all_lanes.main, parked)
    assert (place is all_lanes.main, all_lanes.main.running) == (False, 0)
    # Beyond the limit of parked requests a request keeps its slot.
    assert all_lanes.occupy(all_lanes.main, other) is all_lanes.main
    assert all_lanes.main.running == 1
    all_lanes.release(all_lanes.main, other)
    all_lanes.release(place, parked)
    assert all_lanes.occupy(all_lanes.main, other) is place
    assert all_lanes.main.running == 0


def test_lanes_are_idle_when_no_request_is_queued_running_or_parked() -> None:
    all_lanes = Lanes(1)
    assert all_lanes.is_idle
    for method in (PLAIN, POLL):
        request = _request(method)
        all_lanes.enqueue(all_lanes.main, request)
        assert not all_lanes.is_idle
        occupied = all_lanes.occupy(all_lanes.main, all_lanes.dequeue(all_lanes.main))
        assert not all_lanes.is_idle
        all_lanes.release(occupied, request)
        assert all_lanes.is_idle


def test_only_parked_requests_are_told_from_others() -> None:
    all_lanes = Lanes(1)
    poll, plain = _request(POLL), _request(PLAIN)
    parked = all_lanes.occupy(all_lanes.main, poll)
    assert all_lanes.has_only_parked
    running = all_lanes.occupy(all_lanes.main, plain)
    assert not all_lanes.has_only_parked
    all_lanes.release(running, plain)
    all_lanes.enqueue(all_lanes.control, plain)
    assert not all_lanes.has_only_parked
    all_lanes.dequeue(all_lanes.control)
    all_lanes.release(parked, poll)
    assert all_lanes.has_only_parked


# ---- limits ---------------------------------------------------------------------------


def test_lanes_are_full_of_queued_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "QUEUED_REQUESTS", 2)
    all_lanes = Lanes(1)
    all_lanes.occupy(all_lanes.main, _request(PLAIN))
    all_lanes.enqueue(all_lanes.main, _request(PLAIN))
    assert not all_lanes.is_full
    all_lanes.enqueue(all_lanes.control, _request(CONTROL))
    assert all_lanes.is_full
    all_lanes.dequeue(all_lanes.main)
    assert not all_lanes.is_full


def test_lanes_are_full_of_bytes_queued_running_and_parked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "PENDING_BYTES", 30)
    all_lanes = Lanes(1)
    queued, running, parked = _request(PLAIN), _request(PLAIN), _request(POLL)
    all_lanes.enqueue(all_lanes.main, queued)
    occupied = all_lanes.occupy(all_lanes.main, running)
    assert not all_lanes.is_full
    parked_lane = all_lanes.occupy(all_lanes.main, parked)
    assert all_lanes.is_full
    all_lanes.release(parked_lane, parked)
    assert not all_lanes.is_full
    all_lanes.enqueue(all_lanes.control, _request(CONTROL))
    assert all_lanes.is_full
    all_lanes.release(occupied, running)
    assert not all_lanes.is_full


def test_dropped_requests_are_not_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "PENDING_BYTES", 20)
    all_lanes = Lanes(1)
    all_lanes.enqueue(all_lanes.main, _request(START, "p"))
    all_lanes.enqueue(all_lanes.control, _request(CONTROL))
    assert all_lanes.is_full
    all_lanes.clear()
    assert (all_lanes.has_queued, all_lanes.is_full) == (False, False)
    assert all_lanes.lane_for(_request(CONTROL, "p")) is all_lanes.control
