"""UserCommands: starts commands as other users of the machine, by the launcher."""

from __future__ import annotations

import os

from exec_server.errors import InternalError
from exec_server.host.users import User
from exec_server.process import tags
from exec_server.process.command import Command
from exec_server.process.orphans import Owner
from exec_server.process.spawn import Child, Streams, encode
from exec_server.sandbox.builder import SandboxBuilder
from exec_server.sandbox.command_sandbox import standard_streams
from exec_server.sandbox.runtime import messages
from exec_server.sandbox.runtime.control import launch
from exec_server.sandbox.runtime.messages import BuildRequest, ControlSocket, Status, UserRequest

_BUILD = BuildRequest("user", None, "enabled", "inherited")


class UserCommands:
    """Starts commands with the rights of their users. Every method is thread-safe."""

    def __init__(self, builder: SandboxBuilder) -> None:
        self._builder = builder

    def spawn(self, user: User, command: Command, owner: Owner) -> Child:
        """Start a command as a user; otherwise like process.spawn.spawn. Blocking."""
        encode(command)  # raises for arguments that no program can be given
        request = UserRequest(
            command.argv,
            command.arg0,
            command.cwd,
            command.env,
            user.uid,
            user.gid,
            user.groups,
            command.tty,
        )
        streams = Streams.open(command)
        started = False
        try:
            standard, _ = standard_streams(command, streams)
            pid, control = launch(self._builder.launcher, 0, _BUILD)
            with control:
                owner.tag = tags.allocate()
                tags.tag_running(pid, owner.tag)
                _execute(control, request, standard)
            started = True
        finally:
            streams.release(started=started)
        return Child(pid, streams.stdin, streams.outputs)


def _execute(control: ControlSocket, request: UserRequest, standard: list[int]) -> None:
    """Let the process execute the command; raises OSError if it cannot."""
    is_ready = False
    try:
        messages.send(control, request, standard)
        while True:
            status, _ = messages.receive(control, Status)
            if status.state != "ready":
                number = int(status.reason) if status.reason.isdecimal() else 0
                raise OSError(number, os.strerror(number))
            is_ready = True
    except (ConnectionError, messages.Disconnected) as error:
        if not is_ready:
            raise InternalError(f"the command could not be started: {error}") from error
