"""process/start between a connection and its session: what is done when, and in which thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from exec_server.errors import InvalidParams, InvalidRequest
from exec_server.process.command import Command
from exec_server.process.orphans import Owner
from exec_server.process.spawn import Child
from exec_server.process.table import LaunchMode
from exec_server.protocol import sandbox as wire
from exec_server.protocol.decoding import decode
from exec_server.protocol.process import ProcessId, StartParams, StartResult
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
    ) -> LaunchMode:
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
