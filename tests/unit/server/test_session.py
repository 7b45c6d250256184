"""Session and SessionRegistry: create, attach, detach, resume, expire, end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgspec
import pytest

from exec_server.errors import InvalidRequest, SessionAttached
from exec_server.host.event_loop import GuardedTasks
from exec_server.process.output import OutputLog
from exec_server.process.process import Emit, Process
from exec_server.process.table import ProcessTable
from exec_server.protocol.decoding import Call, Notice
from exec_server.protocol.network import POLICY_REQUEST, Destination, PolicyParams
from exec_server.protocol.process import CLOSED, ClosedParams, ProcessId
from exec_server.server import session as sessions
from exec_server.server.detached import Broadcast
from exec_server.server.session import Retentions, SessionRegistry

EVENT = ClosedParams(ProcessId("p"), 1)


class FakeConnection:
    """Records notifications and probes."""

    def __init__(self) -> None:
        self.notified: list[msgspec.Struct] = []
        self.probes = 0
        self.is_ended = False

    def notify(self, notice: Notice[msgspec.Struct], params: msgspec.Struct) -> None:
        assert notice is CLOSED
        self.notified.append(params)

    def ask(self, call: Call[Any, Any], params: msgspec.Struct) -> asyncio.Future[object]:
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        future.set_result((call.name, params))
        return future

    def probe(self) -> None:
        self.probes += 1

    def session_closed(self) -> None:
        self.is_ended = True


class FakeTable:
    """A ProcessTable without processes, which ends when the test allows it."""

    def __init__(self, emit: Emit) -> None:
        self.emit = emit
        self.calls: list[str] = []
        self.is_empty = True
        self.live_count = 0
        self.is_connected = True
        self.keeps_closed = False
        self.may_end = asyncio.Event()
        self.may_end.set()

    def get(self, process_id: ProcessId) -> Process | None:
        return cast(Process, self) if process_id == "own" else None

    def is_starting(self, process_id: ProcessId) -> bool:
        return process_id == "starting"

    def connection_opened(self) -> None:
        self.is_connected = True

    def connection_lost(self, *, keeps_closed: bool) -> None:
        self.is_connected = False
        self.keeps_closed = keeps_closed

    def pause_reading(self) -> None:
        self.calls.append("pause_reading")

    def resume_reading(self) -> None:
        self.calls.append("resume_reading")

    def terminate_all(self) -> None:
        self.calls.append("terminate_all")

    async def end(self) -> None:
        self.calls.append("end")
        await self.may_end.wait()
        self.calls.append("ended")


class Bench:
    """A registry with fake tables."""

    def __init__(self, tasks: asyncio.TaskGroup, retention: float) -> None:
        self.tables: list[FakeTable] = []
        self.now = 0.0  # of the clock that runs during suspend
        self.registry = SessionRegistry(
            self._make_table, GuardedTasks(tasks), Retentions(retention, 86_400.0), lambda: self.now
        )

    def _make_table(self, emit: Emit) -> ProcessTable:
        self.tables.append(FakeTable(emit))
        return cast(ProcessTable, self.tables[-1])


def _run(scenario: Callable[[Bench], Awaitable[None]], *, retention: float = 1000.0) -> None:
    async def run() -> None:
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            bench = Bench(tasks, retention)
            await scenario(bench)
            await bench.registry.end_all()

    asyncio.run(run())


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_the_tables_learn_whether_the_client_is_there() -> None:
    async def scenario() -> None:
        tables: list[FakeTable] = []

        def make_table(emit: Emit) -> ProcessTable:
            tables.append(FakeTable(emit))
            return cast(ProcessTable, tables[-1])

        own = sessions.Session(make_table)
        own.connection_lost()
        assert [table.is_connected for table in tables] == [False]
        own.connection_opened(FakeConnection())
        assert [table.is_connected for table in tables] == [True]
        own.make_captures(lambda notice, params: None)
        own.connection_lost()
        assert [table.is_connected for table in tables] == [False, False]
        own.connection_opened(FakeConnection())
        assert [table.is_connected for table in tables] == [True, True]

    asyncio.run(scenario())


def test_a_client_closes_its_session() -> None:
    async def scenario(bench: Bench) -> None:
        connection = FakeConnection()
        session = bench.registry.create(connection)
        bench.tables[0].may_end.clear()
        closing = bench.registry.close(session)
        assert connection.is_ended
        with pytest.raises(InvalidRequest, match="unknown session id"):
            bench.registry.resume(session.id, FakeConnection())
        session.notify(CLOSED, EVENT)  # its processes are just dying
        bench.registry.detach(session)  # its connection ends before they are dead
        await _settle()
        assert not closing.done()
        bench.tables[0].may_end.set()
        await closing
        assert bench.tables[0].calls == ["end", "ended"]
        assert connection.notified == []

    _run(scenario)


def test_a_client_asks_for_a_retention() -> None:
    async def scenario(bench: Bench) -> None:
        registry = bench.registry
        loop = asyncio.get_running_loop()
        kept = {}
        for asked, granted in ((None, None), (5, 5), (28_800, 28_800), (10**9, 86_400)):
            session = registry.create(FakeConnection())
            assert registry.grant_retention(session, asked) == granted
            registry.detach(session)
            timer, until = registry._expiries[session.id]
            kept[asked] = (round(timer.when() - loop.time()), until)
            assert bench.tables[-1].keeps_closed is (asked is not None)
        assert kept == {
            None: (1000, 1000),
            5: (5, 5),
            28_800: (28_800, 28_800),
            10**9: (86_400, 86_400),
        }
        at_once = registry.create(FakeConnection())
        assert registry.grant_retention(at_once, 0) == 0
        registry.detach(at_once)
        await _settle()
        assert bench.tables[-1].calls[-2:] == ["end", "ended"]

    _run(scenario)


def test_long_retentions_cannot_fill_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_LONG_SESSIONS", 2)

    async def scenario(bench: Bench) -> None:
        registry = bench.registry
        first, second, third = (registry.create(FakeConnection()) for _ in range(3))
        assert registry.grant_retention(first, 5000) == 5000
        assert registry.grant_retention(second, 5000) == 5000
        assert registry.grant_retention(third, 5000) == 1000
        assert registry.grant_retention(third, 7) == 7
        assert registry.grant_retention(first, 6000) == 6000  # it has its place
        await registry.close(second)
        assert registry.grant_retention(third, 5000) == 5000

    _run(scenario)


def test_a_session_expires_while_the_machine_sleeps() -> None:
    async def scenario(bench: Bench) -> None:
        registry = bench.registry
        early, late, resumed = (registry.create(FakeConnection()) for _ in range(3))
        registry.grant_retention(late, 2000)
        for session in (early, late, resumed):
            registry.detach(session)
        bench.now = 999.0
        registry.expire_overdue()
        assert len(registry._sessions) == 3
        bench.now = 1001.0
        with pytest.raises(InvalidRequest, match="unknown session id"):
            registry.resume(resumed.id, FakeConnection())
        registry.expire_overdue()
        assert list(registry._sessions) == [late.id]
        registry.resume(late.id, FakeConnection())
        bench.now = 10_000.0
        registry.expire_overdue()
        assert list(registry._sessions) == [late.id]

    _run(scenario)


def test_the_session_of_a_revoked_stream_ends_attached_or_not() -> None:
    async def scenario(bench: Bench) -> None:
        registry = bench.registry
        attached, away, other = (registry.create(FakeConnection()) for _ in range(3))
        attached.stream_id, away.stream_id, other.stream_id = "a", "b", "c"
        registry.detach(away)
        for stream_id in ("a", "b", "unknown"):
            registry.end_of_stream(stream_id)
        await _settle()
        assert [table.calls[-1:] for table in bench.tables] == [["ended"], ["ended"], []]
        assert not registry._expiries
        registry.detach(attached)  # its connection notices later
        for session in (attached, away):
            with pytest.raises(InvalidRequest, match="unknown session id"):
                registry.resume(session.id, FakeConnection())

    _run(scenario)


def test_events_go_to_the_attached_connection() -> None:
    async def scenario(bench: Bench) -> None:
        connection = FakeConnection()
        session = bench.registry.create(connection)
        bench.tables[0].emit(cast(Any, CLOSED), EVENT)
        assert connection.notified == [EVENT]
        bench.registry.detach(session)
        bench.tables[0].emit(cast(Any, CLOSED), EVENT)
        assert connection.notified == [EVENT]

    _run(scenario)


def test_the_first_client_is_noticed() -> None:
    async def scenario(bench: Bench) -> None:
        assert not bench.registry.has_had_clients
        bench.registry.detach(bench.registry.create(FakeConnection()))
        assert bench.registry.has_had_clients

    _run(scenario)


def test_sessions_have_ids_of_their_own() -> None:
    async def scenario(bench: Bench) -> None:
        made = {bench.registry.create(FakeConnection()).id for _ in range(3)}
        assert len(made) == 3

    _run(scenario)


def test_a_detached_session_is_resumed() -> None:
    async def scenario(bench: Bench) -> None:
        session = bench.registry.create(FakeConnection())
        bench.registry.detach(session)
        # Without a connection the output is read on, into the log.
        assert bench.tables[0].calls == ["resume_reading"]
        connection = FakeConnection()
        assert bench.registry.resume(session.id, connection) is session
        assert session.connection is connection
        bench.tables[0].emit(cast(Any, CLOSED), EVENT)
        assert connection.notified == [EVENT]

    _run(scenario)


def test_an_attached_session_is_not_resumed_but_its_connection_is_probed() -> None:
    async def scenario(bench: Bench) -> None:
        first = FakeConnection()
        session = bench.registry.create(first)
        with pytest.raises(SessionAttached, match=f"session {session.id} is already attached"):
            bench.registry.resume(session.id, FakeConnection())
        assert (first.probes, session.connection) == (1, first)

    _run(scenario)


def test_unknown_sessions_are_not_resumed() -> None:
    async def scenario(bench: Bench) -> None:
        with pytest.raises(InvalidRequest, match="unknown session id x"):
            bench.registry.resume("x", FakeConnection())

    _run(scenario)


def test_a_detached_session_ends_after_the_retention() -> None:
    async def scenario(bench: Bench) -> None:
        session = bench.registry.create(FakeConnection())
        bench.registry.detach(session)
        while "ended" not in bench.tables[0].calls:
            await asyncio.sleep(0.001)
        with pytest.raises(InvalidRequest, match="unknown session"):
            bench.registry.resume(session.id, FakeConnection())

    _run(scenario, retention=0.005)


def test_a_resumed_session_does_not_end() -> None:
    async def scenario(bench: Bench) -> None:
        session, other = (bench.registry.create(FakeConnection()) for _ in range(2))
        bench.registry.detach(session)
        bench.registry.resume(session.id, FakeConnection())
        bench.registry.detach(other)
        while "ended" not in bench.tables[1].calls:  # its retention began later
            await asyncio.sleep(0.001)
        assert "end" not in bench.tables[0].calls

    _run(scenario, retention=0.005)


def test_without_retention_a_session_ends_with_its_connection() -> None:
    async def scenario(bench: Bench) -> None:
        session = bench.registry.create(FakeConnection())
        bench.registry.detach(session)
        with pytest.raises(InvalidRequest, match="unknown session"):
            bench.registry.resume(session.id, FakeConnection())
        await _settle()
        assert bench.tables[0].calls == ["resume_reading", "end", "ended"]

    _run(scenario, retention=0.0)


def test_the_number_of_sessions_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 2)

    async def scenario(bench: Bench) -> None:
        first = bench.registry.create(FakeConnection())
        bench.registry.create(FakeConnection())
        with pytest.raises(InvalidRequest, match="at most 2 sessions may exist"):
            bench.registry.create(FakeConnection())
        bench.registry.detach(first)
        bench.registry.create(FakeConnection())

    _run(scenario, retention=0.0)


def _evicted(bench: Bench) -> list[int]:
    """The numbers of the sessions that have ended."""
    return [number for number, table in enumerate(bench.tables) if "end" in table.calls]


def test_the_oldest_detached_session_gives_way_to_a_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 4)

    async def scenario(bench: Bench) -> None:
        made = [bench.registry.create(FakeConnection()) for _ in range(4)]
        for session in (made[2], made[1], made[3]):
            bench.registry.detach(session)
        bench.registry.resume(made[2].id, FakeConnection())
        bench.registry.detach(made[2])  # the youngest of all
        for expected in ([1], [1, 3], [1, 2, 3]):
            bench.registry.create(FakeConnection())
            await _settle()
            assert _evicted(bench) == expected
        with pytest.raises(InvalidRequest, match="at most 4 sessions may exist"):
            bench.registry.create(FakeConnection())
        with pytest.raises(InvalidRequest, match="unknown session id"):
            bench.registry.resume(made[1].id, FakeConnection())

    _run(scenario)


def test_sessions_without_processes_give_way_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 3)

    async def scenario(bench: Bench) -> None:
        made = [bench.registry.create(FakeConnection()) for _ in range(3)]
        bench.tables[0].is_empty = bench.tables[1].is_empty = False
        for session in made:
            bench.registry.detach(session)
        for expected in ([2], [0, 2], [0, 1, 2]):
            bench.registry.create(FakeConnection())
            await _settle()
            assert _evicted(bench) == expected

    _run(scenario)


_FULL = "at most 2 sessions may exist, and all have a connection or running processes"


def test_a_session_with_running_processes_never_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 2)
    monkeypatch.setattr(sessions, "SEARCH_SECONDS", 0.0)

    async def scenario(bench: Bench) -> None:
        made = [bench.registry.create(FakeConnection()) for _ in range(2)]
        for table, session in zip(bench.tables, made, strict=True):
            table.live_count, table.is_empty = 1, False
            bench.registry.detach(session)
        with pytest.raises(InvalidRequest, match=_FULL):
            bench.registry.create(FakeConnection())
        assert _evicted(bench) == []
        bench.tables[1].live_count = 0  # its process has ended
        bench.registry.create(FakeConnection())
        await _settle()
        assert _evicted(bench) == [1]
        assert bench.registry.resume(made[0].id, FakeConnection()) is made[0]

    _run(scenario)


def test_a_full_server_seldom_searches_for_ended_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 2)
    monkeypatch.setattr(sessions, "SEARCH_SECONDS", 1000.0)

    async def scenario(bench: Bench) -> None:
        made = [bench.registry.create(FakeConnection()) for _ in range(2)]
        bench.tables[0].live_count = 1
        bench.registry.detach(made[0])
        for _ in range(2):
            with pytest.raises(InvalidRequest, match=_FULL):
                bench.registry.create(FakeConnection())
            bench.tables[0].live_count = 0
        bench.registry.detach(made[1])  # this needs no search
        bench.registry.create(FakeConnection())
        await _settle()
        assert _evicted(bench) == [1]

    _run(scenario)


def test_a_session_with_finished_processes_gives_way_before_running_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 3)

    async def scenario(bench: Bench) -> None:
        made = [bench.registry.create(FakeConnection()) for _ in range(3)]
        for table in bench.tables[:2]:
            table.is_empty = False
        bench.tables[0].live_count = 1
        for session in made:
            bench.registry.detach(session)
        for expected in ([2], [1, 2]):
            bench.registry.create(FakeConnection())
            await _settle()
            assert _evicted(bench) == expected

    _run(scenario)


def test_no_session_gives_way_while_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 8)

    async def scenario(bench: Bench) -> None:
        for _ in range(8):
            bench.registry.detach(bench.registry.create(FakeConnection()))
        await _settle()
        assert _evicted(bench) == []

    _run(scenario)


def test_all_sessions_end_with_the_server() -> None:
    async def scenario(bench: Bench) -> None:
        attached = FakeConnection()
        session = bench.registry.create(attached)
        bench.registry.detach(bench.registry.create(FakeConnection()))
        await bench.registry.end_all()
        assert [table.calls[-1] for table in bench.tables] == ["ended", "ended"]
        bench.tables[0].emit(cast(Any, CLOSED), EVENT)
        assert attached.notified == []
        # The end of the connection comes later and changes nothing.
        bench.registry.detach(session)
        assert bench.tables[0].calls == ["end", "ended"]

    _run(scenario)


def test_processes_that_cannot_be_killed_are_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sessions, "END_SECONDS", 0.001)

    async def scenario(bench: Bench) -> None:
        bench.registry.create(FakeConnection())
        bench.tables[0].may_end.clear()

    with caplog.at_level(logging.ERROR):
        _run(scenario)
    assert "some processes could not be killed" in caplog.text


# ---- attachments ----------------------------------------------------------------------


class FakeProcess:
    """The log of a detached process."""

    def __init__(self) -> None:
        self.id = ProcessId("web")
        self.log = OutputLog()


def _close(broadcast: Broadcast, process: FakeProcess) -> None:
    """The only event that the fake connection takes."""
    broadcast.publish(ClosedParams(ProcessId("web"), process.log.number_event()))


def test_a_session_knows_its_own_processes_and_its_attachments() -> None:
    async def scenario(bench: Bench) -> None:
        session = bench.registry.create(FakeConnection())
        broadcast = Broadcast("web")
        mine = ProcessId("mine")
        session.check_unused(mine)
        session.attach(mine, broadcast)
        assert session.process(mine) is None
        assert session.is_starting(mine)
        process = broadcast.process = cast(Process, FakeProcess())
        assert session.process(mine) is process
        assert not session.is_starting(mine)
        assert session.process(ProcessId("own")) is not None
        assert session.is_starting(ProcessId("starting"))
        for used in ("mine", "own", "starting"):
            with pytest.raises(InvalidRequest, match=f"process {used} already exists"):
                session.attach(ProcessId(used), broadcast)
        session.attachment_ended(mine)
        session.check_unused(mine)

    _run(scenario)


def test_a_full_connection_pauses_own_processes_and_falls_behind_others() -> None:
    async def scenario(bench: Bench) -> None:
        connection = FakeConnection()
        session = bench.registry.create(connection)
        process = FakeProcess()
        broadcast = Broadcast("web")
        broadcast.process = cast(Process, process)
        session.attach(ProcessId("mine"), broadcast)
        session.pause_writing()
        assert not session.is_writable
        _close(broadcast, process)
        assert (connection.notified, bench.tables[0].calls) == ([], ["pause_reading"])
        session.resume_writing()
        assert connection.notified == [ClosedParams(ProcessId("mine"), 1)]
        assert bench.tables[0].calls == ["pause_reading", "resume_reading"]

    _run(scenario)


def test_a_resumed_session_stays_attached_and_an_ended_one_does_not() -> None:
    async def scenario(bench: Bench) -> None:
        session = bench.registry.create(FakeConnection())
        process = FakeProcess()
        broadcast = Broadcast("web")
        broadcast.process = cast(Process, process)
        session.attach(ProcessId("mine"), broadcast)
        session.pause_writing()
        bench.registry.detach(session)
        _close(broadcast, process)
        connection = FakeConnection()
        bench.registry.resume(session.id, connection)
        assert session.is_writable
        _close(broadcast, process)  # the client reads the first, which it has missed
        assert connection.notified == [ClosedParams(ProcessId("mine"), 2)]
        other = bench.registry.create(FakeConnection())
        other.attach(ProcessId("theirs"), broadcast)
        bench.registry.detach(session)
        bench.registry._expire(session)
        assert [each.process_id for each in broadcast.attachments] == ["theirs"]
        await bench.registry.end_all()
        assert not broadcast.attachments

    _run(scenario)


@pytest.mark.parametrize("has_captures", [False, True])
def test_captures_end_with_the_processes(has_captures: bool) -> None:
    async def scenario(bench: Bench) -> None:
        session = bench.registry.create(FakeConnection())
        if has_captures:
            assert session.make_captures(lambda *_: None) is cast(ProcessTable, bench.tables[1])
        session.terminate_all()
        await session.end()
        assert len(bench.tables) == 1 + has_captures
        for table in bench.tables:
            assert table.calls == ["terminate_all", "end", "ended"]

    _run(scenario)


def test_questions_reach_the_attached_connection() -> None:
    question = PolicyParams("p", Destination("http", "a.test", 80))

    async def scenario(bench: Bench) -> None:
        session = bench.registry.create(FakeConnection())
        assert await session.ask(POLICY_REQUEST, question) == (POLICY_REQUEST.name, question)
        bench.registry.detach(session)
        assert await session.ask(POLICY_REQUEST, question) is None
        bench.registry.resume(session.id, FakeConnection())
        assert await session.ask(POLICY_REQUEST, question) is not None
        await bench.registry.end_all()

    _run(scenario)
