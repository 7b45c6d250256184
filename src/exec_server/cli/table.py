"""The table of all commands: each is one row here, and functions of a module imported on demand."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final, NamedTuple

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


class CommandRow(NamedTuple):
    """One row of the table."""

    name: str
    group: str
    summary: str  # a few words in lower case
    # MODULE or MODULE:PREFIX below exec_server.cli; it defines `build_parser` and `run`, or
    # `build_PREFIX_parser` and `run_PREFIX`. Only the commands of clients are run in this way.
    module: str
    operands: str = NOTHING

    @property
    def is_visible(self) -> bool:
        """Whether help, completion and suggestions show it."""
        return self.group in GROUPS

    @property
    def is_client(self) -> bool:
        """False if it starts processes here, under the watchdog."""
        return self.name not in _SERVERS

    @property
    def is_about_targets(self) -> bool:
        """Whether an argument or a file of the user names the machine that it uses."""
        return self.group != _SERVING

    @property
    def failure_code(self) -> int:
        """The exit code for errors other than wrong arguments."""
        return EXIT_NOT_RUN if self.name in ("exec", "shell") else EXIT_FAILURE

    @property
    def connection_code(self) -> int:
        """The exit code if the target cannot be reached."""
        return EXIT_CONNECTION if self.name in _CONNECTED else EXIT_FAILURE

    def build_parser(self) -> ArgumentParser:
        """Import the module of the command, and make its parser."""
        parser: ArgumentParser = self._function("build_{}_parser", "build_parser")()
        return parser

    def run(self, arguments: argparse.Namespace) -> int:
        """Run a client's command with the arguments of its parser; returns the exit code."""
        code: int = self._function("run_{}", "run")(arguments)
        return code

    def _function(self, prefixed: str, plain: str) -> Any:
        module, _, prefix = self.module.partition(":")
        name = prefixed.format(prefix) if prefix else plain
        return getattr(import_module(f"exec_server.cli.{module}"), name)


_SERVERS: Final = frozenset({"serve", "up", "forward", "sandbox"})
# They are connected as long as they run, and so use the exit code of ssh.
_CONNECTED: Final = frozenset({"exec", "shell", "attach", "port", "mcp"})
_SERVING: Final = "serve this machine"
# In the order of `exec-server --help`.
_ROWS: Final[dict[str, tuple[tuple[str, ...], ...]]] = {
    "run commands on a target": (
        ("exec", "run a command on a target", "exec.command", TARGETS),
        ("shell", "open a login shell on a target", "exec.command:shell", TARGETS),
        ("ps", "list detached commands", "exec.detached:ps", TARGETS),
        ("logs", "print the output of a detached command", "exec.detached:logs", DETACHED),
        ("attach", "use a detached command on this terminal", "exec.detached:attach", DETACHED),
        ("kill", "end detached commands", "exec.detached:kill", DETACHED),
        ("port", "forward ports between this machine and a target", "exec.port", TARGETS),
        ("mcp", "give a model tools for a target (MCP)", "mcp", TARGETS),
    ),
    "files of a target": (
        ("cp", "copy files and directories", "files.copy", ALL_PATHS),
        ("put", "copy local files to a target", "files.copy:put", ALL_PATHS),
        ("get", "copy files of a target here", "files.copy:get", ALL_PATHS),
        ("ls", "list files of a target", "files.ls", REMOTE_PATHS),
        ("cat", "print files of a target", "files.read:cat", REMOTE_PATHS),
        ("tail", "print or follow the end of a file", "files.read:tail", REMOTE_PATHS),
        ("grep", "search the files of a target", "files.grep", ALL_PATHS),
        ("watch", "print changes of files as they happen", "files.read:watch", REMOTE_PATHS),
        ("mkdir", "create directories", "files.change:mkdir", REMOTE_PATHS),
        ("mv", "rename or move files of a target", "files.change:mv", REMOTE_PATHS),
        ("rm", "remove files of a target", "files.change:rm", REMOTE_PATHS),
    ),
    "about targets": (
        ("info", "show version, directories and capabilities of a target", "info", TARGETS),
        ("targets", "list, add or remove the targets of targets.toml", "named_targets"),
        ("login", "store the token for a registry", "login"),
        ("logout", "forget the token for a registry", "login:logout"),
    ),
    _SERVING: (
        ("serve", "listen for clients (the default without a command)", "serve.arguments"),
        ("tls-init", "make a self-signed certificate for a server with TLS", "tls"),
        ("up", "make this machine reachable through a registry", "serve.arguments:up"),
        (
            "forward",
            "serve clients of a relay on behalf of another server",
            "serve.arguments:forward",
        ),
        (
            "registry",
            "run a registry, so that machines behind a NAT can be reached",
            "registry.command",
        ),
        ("sandbox", "test the sandbox of this machine", "sandbox.command"),
    ),
    "other": (
        ("completion", "print a shell completion script", "completion"),
        ("help", "show the help of a command", "help", COMMAND),
        ("version", "print the version", "help:version"),
    ),
    "": (  # not shown
        ("complete-path", "list remote paths", "completion:path"),
        ("complete-name", "list detached names", "completion:name"),
    ),
}
GROUPS: Final = tuple(filter(None, _ROWS))
COMMANDS: Final = {
    row[0]: CommandRow(row[0], group, *row[1:]) for group, rows in _ROWS.items() for row in rows
}


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
    has_name = words and not words[0].startswith("-")
    name, options = (words[0], words[1:]) if has_name else ("serve", words)
    separator = options.index("--") if "--" in options else len(options)
    if name in _SERVERS and any(flag in options[:separator] for flag in _HELP_FLAGS):
        return "help", [name, *(word for word in options if word not in _HELP_FLAGS)]
    return name, options


# Words of other programs for the same thing, which resemble none of ours.
_HABITS = {
    "connect": "shell",
    "console": "shell",
    "ssh": "shell",
    "run": "exec",
    "inspect": "info",
    "copy": "cp",
    "scp": "cp",
    "list": "ls",
    "top": "ps",
    "stop": "kill",
    "terminate": "kill",
    "forward-port": "port",
    "port-forward": "port",
    "tunnel": "port",
}


def unknown_command(name: str) -> str:
    """The error text about a command that does not exist, with the nearest one."""
    import difflib

    known = [command.name for command in COMMANDS.values() if command.is_visible]
    near = [_HABITS[name]] if _HABITS.get(name) in known else difflib.get_close_matches(name, known)
    if not near:
        return f"unknown command `{name}`"
    return f"unknown command `{name}`; did you mean {' or '.join(f'`{each}`' for each in near)}?"
