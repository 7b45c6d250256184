"""Which command a command line names: its first word, or the server for flags alone."""

from __future__ import annotations

from exec_server.cli.commands.table import COMMANDS

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
