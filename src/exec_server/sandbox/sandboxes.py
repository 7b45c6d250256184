"""Sandboxes: the confinement of file operations and commands of one server.

The first request that needs it, or `load`, imports the modules and starts the launcher.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from exec_server.errors import InternalError

if TYPE_CHECKING:
    from exec_server.sandbox.builder import SandboxBuilder
    from exec_server.sandbox.commands import CommandSandbox, UserCommands
    from exec_server.sandbox.files import FileSandbox
    from exec_server.sandbox.runtime.placeholders import RegisterCleanup


class _Parts(NamedTuple):
    builder: SandboxBuilder
    files: FileSandbox
    commands: CommandSandbox


class Sandboxes:
    """Both kinds of sandboxes and the launcher that they share. Every method is thread-safe."""

    def __init__(self, variables: Mapping[str, str], register_cleanup: RegisterCleanup) -> None:
        self._variables = variables
        self._register_cleanup = register_cleanup
        self._lock = threading.Lock()  # held while the parts are made
        self._parts: _Parts | None = None
        self._is_closed = False

    @property
    def is_loaded(self) -> bool:
        """Whether `files` and `commands` are at hand."""
        return self._parts is not None

    @property
    def files(self) -> FileSandbox:
        """Blocking, unless loaded."""
        return self.load().files

    @property
    def commands(self) -> CommandSandbox:
        """Blocking, unless loaded."""
        return self.load().commands

    @property
    def user_commands(self) -> UserCommands:
        """Blocking, unless loaded."""
        from exec_server.sandbox.commands import UserCommands

        return UserCommands(self.load().builder)

    def load(self) -> _Parts:
        """Import the modules and start the launcher, once. Blocking."""
        if self._parts is None:
            with self._lock:
                if self._is_closed:
                    raise InternalError("the server is shutting down")
                if self._parts is None:
                    self._parts = self._make_parts()
        return self._parts

    def _make_parts(self) -> _Parts:
        from exec_server.host.threads import BackgroundCloser
        from exec_server.sandbox.builder import SandboxBuilder
        from exec_server.sandbox.commands import CommandSandbox
        from exec_server.sandbox.files import FileSandbox
        from exec_server.sandbox.runtime.placeholders import Placeholders

        builder = SandboxBuilder(self._variables)
        files = FileSandbox(builder, self._variables.get("TMPDIR"))
        placeholders = Placeholders(self._register_cleanup, BackgroundCloser().close)
        commands = CommandSandbox(builder, placeholders)
        return _Parts(builder, files, commands)

    def close(self) -> None:
        """End the workers, the prebuilt sandboxes and the launcher; commands run on."""
        with self._lock:
            self._is_closed = True
        if self._parts is not None:
            self._parts.commands.close()
            self._parts.files.close()
            self._parts.builder.close()

    def drop_idle(self) -> None:
        """End the workers and prebuilt sandboxes that have not been used for a while."""
        if self._parts is not None:
            self._parts.files.drop_idle()
            self._parts.commands.drop_idle()
