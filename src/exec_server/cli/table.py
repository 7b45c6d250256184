"""The table of all commands: each is one row here, and functions of a module imported on demand.

The entry point, `--help`, completion scripts and suggestions are all made from this table, so a
new command is its functions and its row. docs/architecture.md describes them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

from exec_server.cli.errors import EXIT_CONNECTION, EXIT_FAILURE, EXIT_NOT_RUN

if TYPE_CHECKING:
    import argparse
    from typing import Any

    from exec_server.cli.parser import ArgumentParser

# What shell completion offers for the operands of a command.
NOTHING: Final = "nothing"
TARGETS: Final = "targets"
DETACHED: Final = "a target, then names of its detached commands"
REMOTE_PATHS: Final = "remote paths"
ALL_PATHS: Final = "remote and local paths"
COMMAND: Final = "a command"


class CommandRow:
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
        # MODULE or MODULE:PREFIX below exec_server.cli; it defines `build_parser` and `run`, or
        # `build_PREFIX_parser` and `run_PREFIX`. Only the commands of clients are run in this way.
        self._module, _, self._prefix = module.partition(":")
        self.operands = operands
        self.failure_code = failure_code  # the exit code for errors other than wrong arguments
        self.connection_code = connection_code  # the exit code if the target cannot be reached
        self.is_client = is_client  # False: it starts processes here, under the watchdog

    @property
    def is_visible(self) -> bool:
        """Whether help, completion and suggestions show it."""
        return self.group in GROUPS

    def build_parser(self) -> ArgumentParser:
        """Import the module of the command, and make its parser."""
        name = f"build_{self._prefix}_parser" if self._prefix else "build_parser"
        parser: ArgumentParser = self._function(name)()
        return parser

    def run(self, arguments: argparse.Namespace) -> int:
        """Run a client's command with the arguments of its parser; returns the exit code."""
        code: int = self._function(f"run_{self._prefix}" if self._prefix else "run")(arguments)
        return code

    def _function(self, name: str) -> Any:
        return getattr(import_module(f"exec_server.cli.{self._module}"), name)


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
        CommandRow(
            "exec",
            _RUN,
            "run a command on a target",
            "exec.command",
            TARGETS,
            failure_code=EXIT_NOT_RUN,
            connection_code=EXIT_CONNECTION,
        ),
        CommandRow(
            "shell",
            _RUN,
            "open a login shell on a target",
            "exec.command:shell",
            TARGETS,
            failure_code=EXIT_NOT_RUN,
            connection_code=EXIT_CONNECTION,
        ),
        CommandRow("ps", _RUN, "list detached commands", "exec.detached:ps", TARGETS),
        CommandRow(
            "logs",
            _RUN,
            "print the output of a detached command",
            "exec.detached:logs",
            DETACHED,
        ),
        CommandRow(
            "attach",
            _RUN,
            "use a detached command on this terminal",
            "exec.detached:attach",
            DETACHED,
            connection_code=EXIT_CONNECTION,
        ),
        CommandRow("kill", _RUN, "end detached commands", "exec.detached:kill", DETACHED),
        CommandRow(
            "port",
            _RUN,
            "forward ports between this machine and a target",
            "exec.port",
            TARGETS,
            connection_code=EXIT_CONNECTION,
        ),
        CommandRow(
            "mcp",
            _RUN,
            "give a model tools for a target (MCP)",
            "mcp",
            TARGETS,
            connection_code=EXIT_CONNECTION,
        ),
        CommandRow("cp", _FILES, "copy files and directories", "files.copy", ALL_PATHS),
        CommandRow("put", _FILES, "copy local files to a target", "files.copy:put", ALL_PATHS),
        CommandRow("get", _FILES, "copy files of a target here", "files.copy:get", ALL_PATHS),
        CommandRow("ls", _FILES, "list files of a target", "files.ls", REMOTE_PATHS),
        CommandRow("cat", _FILES, "print files of a target", "files.read:cat", REMOTE_PATHS),
        CommandRow(
            "tail",
            _FILES,
            "print or follow the end of a file",
            "files.read:tail",
            REMOTE_PATHS,
        ),
        CommandRow("grep", _FILES, "search the files of a target", "files.grep", ALL_PATHS),
        CommandRow(
            "watch",
            _FILES,
            "print changes of files as they happen",
            "files.read:watch",
            REMOTE_PATHS,
        ),
        CommandRow("mkdir", _FILES, "create directories", "files.change:mkdir", REMOTE_PATHS),
        CommandRow(
            "mv", _FILES, "rename or move files of a target", "files.change:mv", REMOTE_PATHS
        ),
        CommandRow("rm", _FILES, "remove files of a target", "files.change:rm", REMOTE_PATHS),
        CommandRow(
            "info",
            _TARGETS,
            "show version, directories and capabilities of a target",
            "info",
            TARGETS,
        ),
        CommandRow("targets", _TARGETS, "list the targets of targets.toml", "targets"),
        CommandRow(
            "login",
            _TARGETS,
            "store the token for a registry",
            "login",
        ),
        CommandRow(
            "logout",
            _TARGETS,
            "forget the token for a registry",
            "login:logout",
        ),
        CommandRow(
            "serve",
            _MACHINE,
            "listen for clients (the default without a command)",
            "serve.arguments",
            is_client=False,
        ),
        CommandRow(
            "tls-init",
            _MACHINE,
            "make a self-signed certificate for a server with TLS",
            "tls",
        ),
        CommandRow(
            "up",
            _MACHINE,
            "make this machine reachable through a registry",
            "serve.arguments:up",
            is_client=False,
        ),
        CommandRow(
            "forward",
            _MACHINE,
            "serve clients of a relay on behalf of another server",
            "serve.arguments:forward",
            is_client=False,
        ),
        CommandRow(
            "registry",
            _MACHINE,
            "run a registry, so that machines behind a NAT can be reached",
            "registry.command",
        ),
        CommandRow(
            "sandbox",
            _MACHINE,
            "test the sandbox of this machine",
            "sandbox.command",
            is_client=False,
        ),
        CommandRow("completion", _OTHER, "print a shell completion script", "completion"),
        CommandRow("help", _OTHER, "show the help of a command", "help", COMMAND),
        CommandRow("complete-path", "", "list remote paths", "completion:path"),
        CommandRow("complete-name", "", "list detached names", "completion:name"),
        CommandRow("version", _OTHER, "print the version", "help:version"),
    )
}


# ---- command lines ---------------------------------------------------------------------

_HELP_FLAGS = ("-h", "--help")
_VERSION_FLAGS = ("-V", "--version")


def route(words: list[str]) -> tuple[str, list[str]]:
    """The name of the command, which may be unknown, and the words after it.

    Commands that are not clients start a watchdog first, so their help is left to `help`.
    """
    if words[:1] and words[0] in _HELP_FLAGS:
        return "help", words[1:]
    if words[:1] and words[0] in _VERSION_FLAGS:
        return "version", []
    name, rest = (
        ("serve", words) if not words or words[0].startswith("-") else (words[0], words[1:])
    )
    if name in COMMANDS and not COMMANDS[name].is_client and _asks_for_help(rest):
        return "help", [name, *(word for word in rest if word not in _HELP_FLAGS)]
    return name, rest


def _asks_for_help(words: list[str]) -> bool:
    separator = words.index("--") if "--" in words else len(words)
    return any(flag in words[:separator] for flag in _HELP_FLAGS)


# Words of other programs for the same thing, which resemble none of ours.
_HABITS = {"ssh": "shell", "run": "exec", "scp": "cp", "copy": "cp", "list": "ls"}


def unknown_command(name: str) -> str:
    """The error text about a command that does not exist, with the nearest one."""
    import difflib

    known = [command.name for command in COMMANDS.values() if command.is_visible]
    near = [_HABITS[name]] if _HABITS.get(name) in known else difflib.get_close_matches(name, known)
    if not near:
        return f"unknown command `{name}`"
    return f"unknown command `{name}`; did you mean {' or '.join(f'`{each}`' for each in near)}?"
