"""The variables that `exec` and `shell` set for a command. Light to import."""

from __future__ import annotations

import os
from collections.abc import Iterable

from exec_server.cli.commands.errors import UsageError


def command_variables(words: Iterable[str], *, tty: bool) -> dict[str, str]:
    """The variables of `--env K=V` and of a terminal; raises UsageError."""
    variables = {}
    if tty:
        variables["TERM"] = os.environ.get("TERM", "dumb")
        if "COLORTERM" in os.environ:
            variables["COLORTERM"] = os.environ["COLORTERM"]
    for word in words:
        name, equals, value = word.partition("=")
        if not name:
            raise UsageError(f"--env {word}: the variable has no name; write --env NAME=VALUE")
        if not equals and name not in os.environ:
            raise UsageError(
                f"--env {word}: {name} is not set in this environment; write --env {name}=VALUE"
            )
        variables[name] = value if equals else os.environ[name]
    return variables
