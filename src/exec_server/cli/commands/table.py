"""The table of all commands; each command is one row here and one module, imported on demand.

The entry point, `--help`, completion scripts and suggestions are all made from this table, so a
new command is its module and its row. CONTRIBUTING.md describes the module.
"""

from __future__ import annotations

from importlib import import_module

from exec_server.cli.commands.errors import EXIT_CONNECTION, EXIT_FAILURE, EXIT_NOT_RUN

TYPE_CHECKING = False  # not that of typing: the watchdog is to stay small
if TYPE_CHECKING:
    import argparse
    from typing import Final, Protocol

    from exec_server.cli.argument_parser import ArgumentParser

    class CommandModule(Protocol):
        """What the module of a client command defines. Others define `build_parser` only."""

        def build_parser(self) -> ArgumentParser: ...

        def run(self, arguments: argparse.Namespace) -> int: ...


# What shell completion offers for the operands of a command.
NOTHING: Final = "nothing"
TARGETS: Final = "targets"
DETACHED: Final = "a target, then names of its detached commands"
REMOTE_PATHS: Final = "remote paths"
ALL_PATHS: Final = "remote and local paths"
COMMAND: Final = "a command"


class Command:
    """One row of the table."""

    # Not a dataclass, which is slow to import.
    def __init__(
        self,
        name: str,
        group: str,
        summary: str,
        module: str,
        operands: str = NOTHING,
        *,
        failure_code: int = EXIT_FAILURE,
        connection_code: int = EXIT_FAILURE,
        is_client: bool = True,
    ) -> None:
        self.name = name
        self.group = group
        self.summary = summary  # a few words in lower case
        self.module = module  # below exec_server.cli
        self.operands = operands
        self.failure_code = failure_code  # the exit code for errors other than wrong arguments
        self.connection_code = connection_code  # the exit code if the target cannot be reached
        self.is_client = is_client  # False: it starts processes here, under the watchdog

    @property
    def is_visible(self) -> bool:
        """Whether help, completion and suggestions show it."""
        return self.group in GROUPS


_RUN: Final = "run commands on a target"
_FILES: Final = "files of a target"
_TARGETS: Final = "about targets"
_MACHINE: Final = "serve this machine"
_OTHER: Final = "other"
# In the order of `exec-server --help`.
GROUPS: Final = (_RUN, _FILES, _TARGETS, _MACHINE, _OTHER)

COMMANDS: Final = {
    row.name: row
    for row in (
        Command(
            "exec",
            _RUN,
            "run a command on a target",
            "commands.exec_command",
            TARGETS,
            failure_code=EXIT_NOT_RUN,
            connection_code=EXIT_CONNECTION,
        ),
        Command(
            "shell",
            _RUN,
            "open a login shell on a target",
            "commands.shell_command",
            TARGETS,
            failure_code=EXIT_NOT_RUN,
            connection_code=EXIT_CONNECTION,
        ),
        Command("ps", _RUN, "list detached commands", "commands.ps_command", TARGETS),
        Command(
            "logs",
            _RUN,
            "print the output of a detached command",
            "commands.logs_command",
            DETACHED,
        ),
        Command(
            "attach",
            _RUN,
            "use a detached command on this terminal",
            "commands.attach_command",
            DETACHED,
            connection_code=EXIT_CONNECTION,
        ),
        Command("kill", _RUN, "end detached commands", "commands.kill_command", DETACHED),
        Command(
            "port",
            _RUN,
            "forward ports between this machine and a target",
            "commands.port_command",
            TARGETS,
            connection_code=EXIT_CONNECTION,
        ),
        Command(
            "mcp",
            _RUN,
            "give a model tools for a target (MCP)",
            "commands.mcp_command",
            TARGETS,
            connection_code=EXIT_CONNECTION,
        ),
        Command("cp", _FILES, "copy files and directories", "commands.copy_command", ALL_PATHS),
        Command("put", _FILES, "copy local files to a target", "commands.put_command", ALL_PATHS),
        Command("get", _FILES, "copy files of a target here", "commands.get_command", ALL_PATHS),
        Command("ls", _FILES, "list files of a target", "commands.ls_command", REMOTE_PATHS),
        Command("cat", _FILES, "print files of a target", "commands.cat_command", REMOTE_PATHS),
        Command(
            "tail",
            _FILES,
            "print or follow the end of a file",
            "commands.tail_command",
            REMOTE_PATHS,
        ),
        Command("grep", _FILES, "search the files of a target", "commands.grep_command", ALL_PATHS),
        Command(
            "watch",
            _FILES,
            "print changes of files as they happen",
            "commands.watch_command",
            REMOTE_PATHS,
        ),
        Command("mkdir", _FILES, "create directories", "commands.mkdir_command", REMOTE_PATHS),
        Command(
            "mv", _FILES, "rename or move files of a target", "commands.mv_command", REMOTE_PATHS
        ),
        Command("rm", _FILES, "remove files of a target", "commands.rm_command", REMOTE_PATHS),
        Command(
            "info",
            _TARGETS,
            "show version, directories and capabilities of a target",
            "commands.info_command",
            TARGETS,
        ),
        Command(
            "targets", _TARGETS, "list the targets of targets.toml", "commands.targets_command"
        ),
        Command(
            "login",
            _TARGETS,
            "store the token for a registry",
            "commands.login_command",
        ),
        Command(
            "logout",
            _TARGETS,
            "forget the token for a registry",
            "commands.logout_command",
        ),
        Command(
            "serve",
            _MACHINE,
            "listen for clients (the default without a command)",
            "server_arguments",
            is_client=False,
        ),
        Command(
            "tls-init",
            _MACHINE,
            "make a self-signed certificate for a server with TLS",
            "commands.tls_init_command",
        ),
        Command(
            "up",
            _MACHINE,
            "make this machine reachable through a registry",
            "up_arguments",
            is_client=False,
        ),
        Command(
            "forward",
            _MACHINE,
            "serve clients of a relay on behalf of another server",
            "forward_arguments",
            is_client=False,
        ),
        Command(
            "registry",
            _MACHINE,
            "run a registry, so that machines behind a NAT can be reached",
            "commands.registry_command",
        ),
        Command(
            "sandbox",
            _MACHINE,
            "test the sandbox of this machine",
            "sandbox_arguments",
            is_client=False,
        ),
        Command(
            "completion", _OTHER, "print a shell completion script", "commands.completion_command"
        ),
        Command("help", _OTHER, "show the help of a command", "commands.help_command", COMMAND),
        Command("complete-path", "", "list remote paths", "commands.complete_path_command"),
        Command("complete-name", "", "list detached names", "commands.complete_name_command"),
        Command("version", _OTHER, "print the version", "commands.version_command"),
    )
}


def load(command: Command) -> CommandModule:
    """Import the module of a command."""
    module: CommandModule = import_module(f"exec_server.cli.{command.module}")
    return module
