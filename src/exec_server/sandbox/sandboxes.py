"""Sandboxes: the confinement of file operations and commands of one server."""

from __future__ import annotations

from collections.abc import Mapping

from exec_server.sandbox.builder import SandboxBuilder
from exec_server.sandbox.command_sandbox import CommandSandbox
from exec_server.sandbox.file_sandbox import FileSandbox
from exec_server.sandbox.runtime.placeholders import Placeholders, RegisterCleanup


class Sandboxes:
    """Both kinds of sandboxes and the launcher that they share. Every method is thread-safe."""

    def __init__(self, variables: Mapping[str, str], register_cleanup: RegisterCleanup) -> None:
        self._builder = SandboxBuilder(variables)
        self.files = FileSandbox(self._builder, variables.get("TMPDIR"))
        self.commands = CommandSandbox(self._builder, Placeholders(register_cleanup))

    def close(self) -> None:
        """End the workers, the prebuilt sandboxes and the launcher; commands run on."""
        self.commands.close()
        self.files.close()
        self._builder.close()

    def drop_idle(self) -> None:
        """End the workers and prebuilt sandboxes that have not been used for a while."""
        self.files.drop_idle()
        self.commands.drop_idle()
