"""Snapshots of shells: which starts have one, and how often the state is captured."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec
import pytest
from tests.support.network import network_proxy

from exec_server.errors import InternalError, InvalidParams, InvalidRequest
from exec_server.host.event_loop import GuardedTasks
from exec_server.process.command import Command
from exec_server.process.shell_state import ShellState
from exec_server.process.table import LaunchMode
from exec_server.protocol.decoding import decode
from exec_server.protocol.process import EXITED, OUTPUT, ExitedParams, OutputParams, StartParams
from exec_server.server import shell_snapshots
from exec_server.server.shell_snapshots import ShellSnapshots

_CANCELLED = "process p start was cancelled"
_SHELL = {"name": "bash", "path": "/bin/bash"}


def _params(scope: str = "s", **members: Any) -> StartParams:
    value = {
        "processId": "p",
        "argv": ["/bin/bash", "-lc", "echo"],
        "cwd": "file:///",
        "env": {},
        "tty": False,
        "shellSnapshot": {"scopeId": scope, "shell": _SHELL},
    }
    return decode(StartParams, value | members)


@pytest.mark.parametrize("scope", ["", "x" * 257, "é" * 129])
def test_scopes_are_short(scope: str) -> None:
    text = "shell snapshot scope must be non-empty and at most 256 bytes"
    with pytest.raises(InvalidParams, match=text):
        shell_snapshots.check(_params(scope, argv=["/bin/echo"]))


def test_which_starts_have_a_snapshot() -> None:
    assert shell_snapshots.check(_params("é" * 128)) is not None
    others: list[dict[str, Any]] = [
        {"shellSnapshot": None},
        {"argv": ["/bin/bash", "-c", "echo"]},
        {"argv": ["bash", "-lc", "echo"]},
        {"argv": ["/bin/bash", "-lc"]},
        {"detach": {}},
        {"networkProxy": network_proxy(credentialMasking=True)},
    ]
    for members in others:
        assert shell_snapshots.check(_params(**members)) is None
    fish = {"scopeId": "s", "shell": {"name": "fish", "path": "/bin/bash"}}
    with pytest.raises(InvalidParams, match="shell snapshots are unsupported for shell `fish`"):
        shell_snapshots.check(_params(shellSnapshot=fish))
    assert shell_snapshots.check(_params(shellSnapshot=fish, argv=["/bin/true"])) is None


def test_a_restored_command_keeps_the_rest() -> None:
    command = Command(["/bin/bash", "-lc", "echo"], "/", {}, tty=True)
    found = shell_snapshots.restored(command, "bash", ShellState(b"state", {}))
    assert (found.argv[1], found.shell_state, found.tty) == ("-pc", b"state", True)


class Table:
    """The captures of a session; the test lets them print and exit."""

    def __init__(self, emit: Any) -> None:
        self.emit = emit
        self.started: list[tuple[str, str]] = []  # ids and marks
        self.terminated: list[str] = []
        self.fault: Exception | None = None
        self.params: list[StartParams] = []

    def reserve(self, process_id: str) -> None: ...

    async def start(self, process_id: str, command: Command, mode: LaunchMode) -> None:
        if self.fault is not None:
            raise self.fault
        script = command.argv[2]
        start = script.index("exec-server-")
        self.started.append((process_id, script[start : start + 44]))

    def terminate(self, process_id: str) -> bool:
        self.terminated.append(process_id)
        return True

    def print(self, text: bytes, stream: Any = "stdout") -> None:
        process_id: Any = self.started[-1][0]
        self.emit(OUTPUT, OutputParams(process_id, 1, stream, text))

    def print_state(self, name: str = "A=1") -> None:
        mark = f"\0{self.started[-1][1]}\0"
        self.print(f"noise{mark * 5}{name}\0{mark}".encode())

    def exit(self) -> None:
        process_id: Any = self.started[-1][0]
        self.emit(EXITED, ExitedParams(process_id, 2, 0, False))


class Stage:
    """A session with its snapshots."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self.snapshots = ShellSnapshots()
        self.tasks = tasks
        self.table: Any = None

    def make_captures(self, emit: Any) -> Any:
        self.table = Table(emit)
        return self.table

    def ask(self, params: StartParams) -> asyncio.Task[ShellState | None]:
        return self.tasks.create_task(self._state(params, asyncio.Future()))

    def ask_cancelled(self, cancellation: asyncio.Future[None]) -> asyncio.Task[str]:
        """A start that fails; returns its error."""
        return self.tasks.create_task(_text(self._state(_params(), cancellation)))

    def _state(
        self, params: StartParams, cancellation: asyncio.Future[None]
    ) -> Coroutine[Any, Any, ShellState | None]:
        def launch(capture: StartParams) -> LaunchMode:
            self.table.params.append(capture)
            return LaunchMode()

        session: Any = self
        tasks = GuardedTasks(self.tasks)
        return self.snapshots.state(session, params, tasks, launch, cancellation)

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)


def play(scene: Callable[[Stage], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            await scene(Stage(tasks))

    asyncio.run(run())


def test_simultaneous_starts_share_a_capture() -> None:
    async def scene(stage: Stage) -> None:
        first, second = stage.ask(_params()), stage.ask(_params(env={"X": "1"}, tty=True))
        await stage.settle()
        assert len(stage.table.started) == 1
        stage.table.print(b"ignored", "stderr")
        stage.table.print_state()
        one, two = await first, await second
        assert one is two
        assert one is not None
        assert one.variables == {"A": "1"}
        stage.table.print(b"of a child that goes on")
        assert await stage.ask(_params()) is one
        assert stage.table.terminated == []

    play(scene)


@pytest.mark.parametrize(
    "members",
    [
        {"scope": "other"},
        {"cwd": "file:///tmp"},
        {"sandbox": {"permissions": {"type": "disabled"}, "windowsSandboxLevel": "disabled"}},
        {
            "envPolicy": {
                "inherit": "all",
                "ignoreDefaultExcludes": True,
                "exclude": [],
                "set": {},
                "includeOnly": [],
            }
        },
    ],
)
def test_other_starts_have_states_of_their_own(members: Any) -> None:
    async def scene(stage: Stage) -> None:
        for params in (_params(), _params(**members)):
            task = stage.ask(params)
            await stage.settle()
            stage.table.print_state()
            assert await task is not None
        assert len({process_id for process_id, _ in stage.table.started}) == 2

    play(scene)


def test_a_capture_that_fails_is_tried_again_twice_and_not_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene(stage: Stage) -> None:
        now = 100.0
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)
        task = stage.ask(_params())
        await stage.settle()
        stage.table.exit()
        assert await task is None
        assert len(stage.table.terminated) == 1
        now += 0.99
        assert await stage.ask(_params()) is None
        assert len(stage.table.started) == 1
        now += 0.01
        stage.table.fault = InternalError("no such shell")
        assert await stage.ask(_params()) is None
        stage.table.fault = None
        assert await stage.ask(_params()) is None
        assert len(stage.table.started) == 1
        now += 1.0
        task = stage.ask(_params())
        await stage.settle()
        stage.table.exit()
        assert await task is None
        assert len(stage.table.started) == 2
        # From here on the start-up files are left alone; another scope has captures of its own.
        now += 1_000_000.0
        assert await stage.ask(_params()) is None
        assert len(stage.table.started) == 2
        task = stage.ask(_params("other"))
        await stage.settle()
        stage.table.print_state()
        assert await task is not None

    play(scene)


def test_a_state_may_be_captured_by_a_later_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell_snapshots, "RETRY_SECONDS", 0.0)

    async def scene(stage: Stage) -> None:
        for _ in range(2):
            task = stage.ask(_params())
            await stage.settle()
            stage.table.exit()
            assert await task is None
        first, second = stage.ask(_params()), stage.ask(_params())
        await stage.settle()
        stage.table.print_state()
        assert await first is not None
        assert await second is await first
        assert await stage.ask(_params()) is await first
        assert len(stage.table.started) == 3

    play(scene)


async def _text(task: Awaitable[object]) -> str:
    """The error of a start that is cancelled."""
    try:
        await task
    except InvalidRequest as error:
        return error.message
    return ""


def test_a_cancelled_start_ends_the_capture_that_it_alone_waits_for() -> None:
    async def scene(stage: Stage) -> None:
        cancellation = asyncio.get_running_loop().create_future()
        waiting = stage.ask_cancelled(cancellation)
        await stage.settle()
        cancellation.set_result(None)
        assert await waiting == _CANCELLED
        again = stage.ask(_params())
        await stage.settle()
        assert stage.table.terminated == [stage.table.started[0][0]]
        stage.table.print_state()  # of the second capture
        assert await again is not None
        assert len(stage.table.started) == 2

    play(scene)


def test_a_cancelled_start_leaves_the_capture_to_others() -> None:
    async def scene(stage: Stage) -> None:
        cancellation = asyncio.get_running_loop().create_future()
        waiting, other = stage.ask_cancelled(cancellation), stage.ask(_params())
        await stage.settle()
        cancellation.set_result(None)
        assert await waiting == _CANCELLED
        stage.table.print_state()
        assert await other is not None
        assert stage.table.terminated == []

    play(scene)


def test_a_start_that_is_cancelled_as_its_state_arrives() -> None:
    async def scene(stage: Stage) -> None:
        cancellation = asyncio.get_running_loop().create_future()
        waiting = stage.ask_cancelled(cancellation)
        await stage.settle()
        stage.table.print_state()
        cancellation.set_result(None)
        assert await waiting == _CANCELLED
        await stage.settle()
        assert await stage.ask(_params()) is not None

    play(scene)


def test_slow_start_up_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell_snapshots, "CAPTURE_SECONDS", 0.0)
    monkeypatch.setattr(shell_snapshots, "RETRY_SECONDS", 0.0)

    async def scene(stage: Stage) -> None:
        assert await stage.ask(_params()) is None
        assert len(stage.table.terminated) == 1
        assert await stage.ask(_params()) is None
        assert len(stage.table.started) == 2

    play(scene)


def test_a_state_that_is_too_large_is_not_captured_again() -> None:
    async def scene(stage: Stage) -> None:
        task = stage.ask(_params())
        await stage.settle()
        for _ in range(5):
            stage.table.print(b"x" * 1_000_000)
        assert await task is None
        assert await stage.ask(_params()) is None
        assert len(stage.table.started) == 1

    play(scene)


def test_defects_end_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(stage: Stage) -> None:
        task = stage.ask(_params())
        await stage.settle()
        stage.table.exit()
        await task
        stage.table.fault = ValueError("a defect")
        assert await stage.ask(_params("other")) is None

    play(scene)
    assert "a capture failed" in caplog.text


def test_the_states_of_a_session_are_few() -> None:
    async def scene(stage: Stage) -> None:
        async def captured(scope: str) -> None:
            task = stage.ask(_params(scope))
            await stage.settle()
            stage.table.print_state()
            assert await task is not None

        for number in range(shell_snapshots.MAX_STATES):
            await captured(str(number))
        await stage.ask(_params("0"))
        await captured("further")
        count = len(stage.table.started)
        await stage.ask(_params("0"))
        assert len(stage.table.started) == count
        await captured("1")
        assert len(stage.table.started) == count + 1

    play(scene)


def test_the_states_of_all_sessions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(stage: Stage) -> None:
        monkeypatch.setattr(shell_snapshots, "TOTAL_BYTES", 200)
        for expected in (True, False):
            task = stage.ask(_params(str(expected)))
            await stage.settle()
            stage.table.print_state(f"A={'x' * 150}")
            assert (await task is not None) is expected

    play(scene)


@pytest.mark.parametrize(
    "permissions",
    [
        {"type": "external", "network": "enabled"},
        {"type": "disabled"},
        {"type": "managed", "file_system": {"type": "unrestricted"}, "network": "enabled"},
    ],
)
def test_a_capture_has_no_terminal_and_no_managed_network(permissions: dict[str, Any]) -> None:
    async def scene(stage: Stage) -> None:
        sandbox = {"permissions": permissions, "windowsSandboxLevel": "disabled"}
        params = _params(tty=True, pipeStdin=True, sandbox=sandbox, enforceManagedNetwork=True)
        task = stage.ask(params)
        await stage.settle()
        stage.table.print_state()
        await task
        (capture,) = stage.table.params
        assert capture.sandbox.permissions.network == "restricted"
        assert not any((capture.tty, capture.pipe_stdin, capture.enforce_managed_network))
        assert msgspec.structs.asdict(capture)["argv"][1] == "-lc"

    play(scene)
