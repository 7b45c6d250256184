"""Finds the file of a program name on the PATH of the child, not on that of the server."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

from exec_server.errors import InternalError
from exec_server.process.command import Command

_DEFAULT_PATH = "/usr/local/bin:/bin:/usr/bin"


def candidates(command: Command) -> list[str]:
    """Paths to try in order; relative paths are relative to the child's directory.

    Raises InternalError when the program of a terminal is not found: like the reference, that
    mode explains the failure itself.
    """
    program = command.argv[0]
    if command.tty:
        return _terminal_candidates(program, command.cwd, command.env)
    if not program:
        raise InternalError("missing program for pipe spawn")
    if "/" in program:
        return [program]
    return [
        os.path.join(directory, program)
        for directory in command.env.get("PATH", _DEFAULT_PATH).split(":")
    ]


def _terminal_candidates(program: str, cwd: str, env: Mapping[str, str]) -> list[str]:
    if not program:
        raise InternalError("missing program for PTY spawn")
    if program.startswith("/"):
        return [program]
    if program.startswith(("./", "../")):
        path = os.path.join(cwd, program)
        reason = _reason_against(path, missing="it does not exist")
        if reason is not None:
            raise InternalError(f"Unable to spawn {path} because {reason}")
        return [path]
    return [_find_on_path(program, cwd, env)]


def _find_on_path(program: str, cwd: str, env: Mapping[str, str]) -> str:
    lines = [f"Unable to spawn {program} because:"]
    if "PATH" not in env:
        lines.append("Unable to resolve the PATH")
        raise InternalError("\n".join(lines))
    for directory in env["PATH"].split(":"):
        path = os.path.join(cwd, directory, program)
        reason = _reason_against(path, missing="")
        if reason is None:
            return path
        if reason:
            lines.append(f"{path} exists but {reason.removeprefix('it ')}.")
    lines.append(f'No viable candidates found in PATH "{env["PATH"]}"')
    raise InternalError("\n".join(lines))


def _reason_against(path: str, *, missing: str) -> str | None:
    """Why a path cannot be executed, None if it can."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return missing
    if stat.S_ISDIR(mode):
        return "it is a directory"
    if not os.access(path, os.X_OK):
        return "it is not executable"
    return None
