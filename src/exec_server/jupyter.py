"""The IPython extension: `%load_ext exec_server.jupyter` adds `%%remote`, for cells on a target."""

from __future__ import annotations

from typing import Any

from exec_server.adapters.target import framework_missing
from exec_server.cli.errors import UsageError
from exec_server.client.targets import without_secrets
from exec_server.notebook.magic_line import (
    HelpShown,
    parse_cell_line,
    parse_command_line,
    split_words,
    usage,
)
from exec_server.notebook.remote_cell import NotebookConnections, RemoteError, run_cell

try:
    from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class
except ImportError as error:
    raise framework_missing("IPython", "jupyter", error) from error


@magics_class
class RemoteMagics(Magics):
    """The magics of one shell, and its connections."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self.connections = NotebookConnections()

    @line_cell_magic
    def remote(self, line: str, cell: str | None = None) -> None:
        try:
            if cell is None:
                arguments = parse_command_line(line)
                text = arguments.text
            else:
                arguments, text = parse_cell_line(line), cell
        except HelpShown:
            return
        except UsageError as error:
            raise RemoteError(str(error)) from None
        run_cell(arguments, text, self.connections, self.shell.user_ns)

    remote.__doc__ = usage()

    @line_magic
    def remote_close(self, line: str) -> None:
        """Close the connections to the named targets, or all; their commands are killed.

        %remote_close [TARGET ...]
        """
        wanted = [without_secrets(word) for word in split_words(line)]
        missing = set(wanted) - set(self.connections.labels)
        if missing:
            raise RemoteError(f"not connected: {', '.join(sorted(missing))}")
        for label in self.connections.close(wanted):
            print(f"closed {label}")


def load_ipython_extension(shell: Any) -> None:
    """Called by `%load_ext`."""
    shell.register_magics(RemoteMagics(shell))


def unload_ipython_extension(shell: Any) -> None:
    """Called by `%unload_ext`, and before `%reload_ext` loads it again."""
    magics = shell.magics_manager.registry.pop(RemoteMagics.__name__, None)
    if magics is not None:
        magics.connections.close([])
    for kinds in shell.magics_manager.magics.values():
        for name in ("remote", "remote_close"):
            kinds.pop(name, None)
