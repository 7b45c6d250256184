"""process/start between a connection and its session, and requests that a process refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest

from exec_server.errors import InternalError, InvalidParams, InvalidRequest
from exec_server.process.command import Command
from exec_server.process.orphans import Owner
from exec_server.process.spawn import Child
from exec_server.process.table import LaunchMode
from exec_server.protocol import sandbox as wire
from exec_server.protocol.decoding import EmptyResult, decode
from exec_server.protocol.process import (
    CloseStdinParams,
    ProcessId,
    ReadParams,
    ReadResult,
    ResizeParams,
    SignalParams,
    StartParams,
    StartResult,
)
from exec_server.protocol.session import Capabilities
from exec_server.server import process_launch
from exec_server.server.context import ConnectionContext
from exec_server.server.handlers import process

_CHILD = Child(1, None, ())
_OWNER = Owner(None)
_DISABLED = {"permissions": {"type": "disabled"}, "windowsSandboxLevel": "disabled"}


class Table:
    """A ProcessTable that records starts; the test calls their spawn functions."""

    def __init__(self) -> None:
        self.reserved: list[ProcessId] = []
        self.started: list[tuple[Command, LaunchMode]] = []

    def reserve(self, process_id: ProcessId) -> None:
        self.reserved.append(process_id)

    def release(self, process_id: ProcessId) -> None:
        self.reserved.remove(process_id)

    def cancellation(self, process_id: ProcessId) -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()

    async def start(self, process_id: ProcessId, command: Command, launch_mode: LaunchMode) -> None:
        self.started.append((command, launch_mode))


class Commands:
    """A CommandSandbox that confines nothing."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.spawned: list[Command] = []

    def launch_mode(
        self,
        sandbox: wire.Sandbox,
        cwd: str,
        env: dict[str, str],
        *,
        is_proxied: bool = False,
        read_only: Sequence[str] = (),
        refused: Callable[[], str | None],
    ) -> LaunchMode:
        assert refused() is None
        self.asked.append((cwd, dict(env)))
        return LaunchMode(self._spawn, lambda code, output: (code == 7, None))

    def _spawn(self, command: Command, owner: Owner) -> Child:
        self.spawned.append(command)
        return _CHILD


class World:
    """The parts of a server that a start needs."""

    def __init__(self) -> None:
        self.variables = {"PATH": "/bin", "HOME": "/h"}
        self.login_shell = "/bin/login"
        self.processes = Table()
        self.commands = Commands()
        self.server = self.session = self.sandboxes = self
        self.proxies = None
        self.environment = SimpleNamespace(capabilities=Capabilities())
        self.tasks = None
        self.shell_snapshots = lambda: self

    async def state(self, *_: object) -> NoReturn:
        """The state of a shell that could not be captured."""
        raise InvalidRequest("cancelled")

    def check_unused(self, process_id: ProcessId) -> None:
        assert process_id == "p"

    def start(self, **members: Any) -> tuple[Command, LaunchMode]:
        """Handle a request; returns the arguments of the start."""
        params = {"processId": "p", "argv": ["x"], "cwd": "/w", "env": {"A": "1"}, "tty": False}
        decoded = decode(StartParams, params | members)
        outcome = process.start(cast(ConnectionContext, self), decoded)
        assert isinstance(asyncio.run(cast(Any, outcome)), StartResult)
        return self.processes.started.pop()


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch) -> list[Command]:
    """The commands that are started without a sandbox."""
    commands: list[Command] = []

    def spawn(command: Command, owner: Owner) -> Child:
        assert owner is _OWNER
        commands.append(command)
        return _CHILD

    monkeypatch.setattr(process_launch, "spawn", spawn)
    return commands


def _spawn(mode: LaunchMode) -> Callable[[Command, Owner], Child]:
    assert mode.spawn is not None
    return mode.spawn


def test_the_environment_is_computed_where_the_command_is_started(spawned: list[Command]) -> None:
    world = World()
    policy = {"inherit": "all", "ignoreDefaultExcludes": True, "exclude": ["HO*"], "set": {}}
    command, mode = world.start(tty=True, envPolicy=policy | {"includeOnly": []})
    assert (command.argv, command.cwd, command.env, command.tty) == (["x"], "/w", {}, True)
    assert (world.processes.reserved, mode.check_denial, spawned) == (["p"], None, [])
    assert _spawn(mode)(command, _OWNER) is _CHILD
    assert spawned[0].env == {"PATH": "/bin", "A": "1", "SHELL": "/bin/login"}


def test_the_policy_is_compiled_where_the_command_is_started() -> None:
    world = World()
    command, mode = world.start(sandbox=_DISABLED)
    assert world.commands.asked == []
    assert _spawn(mode)(command, _OWNER) is _CHILD
    assert world.commands.asked == [("/w", {"A": "1"})]
    assert world.commands.spawned[0].env == {"A": "1"}
    assert mode.check_denial is not None
    assert mode.check_denial(7, []) == (True, None)


def test_an_invalid_policy_is_refused_where_the_command_is_started() -> None:
    world = World()
    policy = {"inherit": "all", "ignoreDefaultExcludes": True, "exclude": ["x" * 2000], "set": {}}
    command, mode = world.start(envPolicy=policy | {"includeOnly": []})
    with pytest.raises(InvalidParams, match="must not exceed 1024 characters"):
        _spawn(mode)(command, _OWNER)


@pytest.mark.parametrize(
    "permissions",
    [
        {"type": "disabled"},
        {"type": "external", "network": "restricted"},
        {"type": "managed", "file_system": {"type": "unrestricted"}, "network": "enabled"},
        {"type": "managed", "file_system": {"type": "unrestricted"}, "network": "restricted"},
    ],
)
def test_enforced_managed_network_without_a_proxy_is_refused(permissions: dict[str, Any]) -> None:
    world = World()
    sandbox = _DISABLED | {"permissions": permissions}
    command, mode = world.start(sandbox=sandbox, enforceManagedNetwork=True)
    with pytest.raises(InvalidRequest, match="enforceManagedNetwork"):
        _spawn(mode)(command, _OWNER)
    assert world.commands.asked == []


def test_managed_network_means_nothing_without_a_sandbox(spawned: list[Command]) -> None:
    command, mode = World().start(enforceManagedNetwork=True)
    assert _spawn(mode)(command, _OWNER) is _CHILD


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ({"argv": []}, "argv must not be empty"),
        ({"argv": [], "cwd": "file:///C:/x"}, "cwd URI `file:///C:/x` is not valid"),
        ({"argv": [], "cwd": "file:///C:/x", "sandbox": _DISABLED}, "argv must not be empty"),
        ({"cwd": "file:///C:/x", "sandbox": _DISABLED}, "invalid sandbox policy cwd: "),
        (
            {"argv": [], "sandbox": _DISABLED | {"windowsSandboxLevel": "mxc"}},
            "native MXC is unavailable on this executor",
        ),
        ({"ttySize": {"rows": 2, "columns": 3}}, "ttySize requires tty: true"),
        ({"processId": "p" * 4097}, "processId must not exceed 4096 bytes"),
    ],
)
def test_invalid_starts_reserve_nothing(members: dict[str, Any], text: str) -> None:
    world = World()
    with pytest.raises(InvalidParams, match=text):
        world.start(**members)
    assert world.processes.reserved == []


def test_another_user_needs_the_rights_of_root() -> None:
    world = World()
    with pytest.raises(InvalidParams, match="does not have the rights of root"):
        world.start(user="ann")
    assert world.processes.reserved == []


def test_an_id_is_free_again_after_a_failed_capture() -> None:
    async def scenario() -> None:
        world = World()
        params = {
            "processId": "p",
            "argv": ["/bin/bash", "-lc", "x"],
            "cwd": "/w",
            "env": {},
            "tty": False,
            "shellSnapshot": {"scopeId": "s", "shell": {"name": "bash", "path": "/bin/bash"}},
        }
        outcome = process.start(cast(ConnectionContext, world), decode(StartParams, params))
        assert world.processes.reserved == ["p"]
        with pytest.raises(InvalidRequest, match="cancelled"):
            await cast(Any, outcome)
        assert world.processes.reserved == []

    asyncio.run(scenario())


# ---- processes ------------------------------------------------------------------------

_ID = ProcessId("p")


class FakeProcess:
    """A process without output; its terminal is gone, and it belongs to another user."""

    id = _ID

    def __init__(self, *, tty: bool = False, has_stdin: bool = True) -> None:
        self.tty = tty
        self.has_stdin = has_stdin
        self.ends = 0
        self.eof: asyncio.Future[None] | None = None
        self.reads: list[int] = []
        self.size: tuple[int, int] | None = None
        self.failure: OSError | None = None

    def write_eof(self) -> asyncio.Future[None] | None:
        self.ends += 1
        return self.eof

    def resize(self, rows: int, columns: int) -> None:
        if self.failure is not None:
            raise self.failure
        self.size = (rows, columns)

    def signal(self, name: str) -> None:
        raise PermissionError(1, "not yours")

    def read(self, after_seq: int, max_bytes: int | None) -> ReadResult:
        self.reads.append(after_seq)
        return ReadResult([], 1, False, None, False, None, False)

    async def next_event(self) -> None:
        await asyncio.get_running_loop().create_future()

    @property
    def context(self) -> ConnectionContext:
        session = SimpleNamespace(process=lambda process_id: self)
        return cast(ConnectionContext, SimpleNamespace(session=session))


@pytest.mark.parametrize(
    ("is_starting", "text"), [(True, "process id p is starting"), (False, "unknown process id p")]
)
def test_a_process_that_does_not_run(is_starting: bool, text: str) -> None:
    session = SimpleNamespace(process=lambda _: None, is_starting=lambda _: is_starting)
    context = cast(ConnectionContext, SimpleNamespace(session=session))
    with pytest.raises(InvalidRequest, match=text):
        process.read(context, ReadParams(_ID))


def test_only_a_pipe_is_closed() -> None:
    piped = FakeProcess()
    assert process.close_stdin(piped.context, CloseStdinParams(_ID)) == EmptyResult()
    assert piped.ends == 1
    for refused, text in (
        (FakeProcess(tty=True), "has a terminal: write Ctrl-D"),
        (FakeProcess(has_stdin=False), "was started without pipeStdin"),
    ):
        with pytest.raises(InvalidRequest, match=text):
            process.close_stdin(refused.context, CloseStdinParams(_ID))
        assert refused.ends == 0


def test_an_end_of_input_waits_for_space() -> None:
    async def scenario() -> None:
        piped = FakeProcess()
        piped.eof = asyncio.get_running_loop().create_future()
        waiting = process.close_stdin(piped.context, CloseStdinParams(_ID))
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(cast(Any, waiting))
            await asyncio.sleep(0)
            assert not task.done()
            piped.eof.set_result(None)
        assert task.result() == EmptyResult()

    asyncio.run(scenario())


def test_only_a_terminal_is_resized() -> None:
    terminal = FakeProcess(tty=True)
    assert process.resize(terminal.context, ResizeParams(_ID, 5, 7)) == EmptyResult()
    assert terminal.size == (5, 7)
    terminal.failure = OSError(5, "gone")
    with pytest.raises(InternalError, match="failed to resize terminal: I/O error"):
        process.resize(terminal.context, ResizeParams(_ID, 6, 8))
    with pytest.raises(InvalidRequest, match="process p has no terminal"):
        process.resize(FakeProcess().context, ResizeParams(_ID, 6, 8))


def test_a_signal_that_is_not_permitted() -> None:
    with pytest.raises(InternalError, match="failed to signal process: not yours"):
        process.signal(FakeProcess().context, SignalParams(_ID, "SIGHUP"))


def test_a_long_poll_reads_from_the_place_of_the_request() -> None:
    async def scenario() -> None:
        for after_seq, place in ((None, 0), (3, 3)):
            silent = FakeProcess()
            params = ReadParams(_ID, after_seq, None, 1)
            result = await cast(Any, process.read(silent.context, params))
            assert result.chunks == []
            assert silent.reads == [place] * 3  # at once, before the wait and after it

    asyncio.run(scenario())
