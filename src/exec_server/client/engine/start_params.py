"""StartParamsBuilder: the params of `process/start` for a command.

Where a server lacks a capability, a shell on its machine replaces it:

- closing a pipe: `head` passes on exactly the bytes of the input, then the command reads the end
  of a pipe;
- the initial size of a terminal: `stty` sets it before the command starts.

With the shell, a program that does not exist is not an error of the start: the exit code is 127.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, Final, cast

from exec_server.client.paths import AnyPath, PathResolver, decoded
from exec_server.errors import InvalidParams
from exec_server.protocol.presets import PRESETS, PresetName, preset
from exec_server.protocol.process import EnvPolicy, ProcessId, StartParams, TtySize
from exec_server.protocol.sandbox import Sandbox
from exec_server.protocol.session import Capabilities

# The name of a preset policy, or a `sandbox` object of the protocol.
AnySandbox = PresetName | Sandbox | Mapping[str, Any]

# Inherit the whole environment of the server.
INHERIT_ALL: Final = EnvPolicy(
    inherit="all", ignore_default_excludes=True, exclude=[], set={}, include_only=[]
)
# The default TERM. Servers set none, and many programs refuse to run in a terminal without one.
DEFAULT_TERM: Final = "xterm-256color"
# Rows and columns of a terminal: the kernel keeps them in 16 bits.
MAX_TTY_SIZE: Final = 65_535

_WITH_INPUT: Final = 'n=$1; shift; head -c "$n" | exec "$@"'
_WITH_SIZE: Final = 'stty rows "$1" columns "$2"; shift 2; exec "$@"'


class StartParamsBuilder:
    """Builds the params of starts for one server."""

    def __init__(self, paths: PathResolver, capabilities: Capabilities) -> None:
        self._paths = paths
        self._capabilities = capabilities

    def build(
        self,
        argv: list[str],
        *,
        cwd: AnyPath | None,
        env: Mapping[str, AnyPath] | None,
        clean_env: bool,
        tty: bool,
        sandbox: AnySandbox | None,
        size: tuple[int, int] | None = None,
        stdin: bool = False,
        input_size: int | None = None,
    ) -> StartParams:
        """The params of a start, with an empty id; `input_size` is for a pipe of known length."""
        if not isinstance(stdin, bool):
            kind = type(stdin).__name__
            raise TypeError(f"stdin must be a bool, not {kind}: send data with write()")
        if size is not None and not tty:
            raise TypeError("size is the size of a terminal: it needs tty=True")
        if input_size is not None and not self._capabilities.process_close_stdin:
            argv = ["/bin/sh", "-c", _WITH_INPUT, "sh", str(input_size), *argv]
        tty_size = None if size is None else _tty_size(size)
        if tty_size is not None and not self._capabilities.process_resize:
            rows, columns = str(tty_size.rows), str(tty_size.columns)
            argv = ["/bin/sh", "-c", _WITH_SIZE, "sh", rows, columns, *argv]
            tty_size = None
        return StartParams(
            process_id=ProcessId(""),
            argv=argv,
            cwd=self._paths.uri(self._paths.cwd if cwd is None else cwd),
            env_policy=None if clean_env else INHERIT_ALL,
            env=({"TERM": DEFAULT_TERM} if tty else {}) | _environment(env or {}),
            tty=tty,
            pipe_stdin=(stdin and not tty) or input_size is not None,
            sandbox=sandbox_object(sandbox, self._paths, cwd),
            tty_size=tty_size,
            report_pid=self._capabilities.process_pid,
        )


def sandbox_object(
    sandbox: AnySandbox | None, paths: PathResolver, cwd: AnyPath | None = None
) -> Sandbox | None:
    """The `sandbox` object of a request; the workspace of a preset is `cwd`."""
    if isinstance(sandbox, str):
        if sandbox not in PRESETS:
            raise InvalidParams(f"unknown sandbox {sandbox!r}: use one of {', '.join(PRESETS)}")
        workspace = str(paths.uri(paths.cwd if cwd is None else cwd))
        sandbox = preset(sandbox, cwd=workspace, roots=[workspace])
    # msgspec encodes a mapping without looking at its members.
    return cast(Sandbox | None, sandbox)


def argv_list(argv: Iterable[AnyPath]) -> list[str]:
    """The words of a command as texts; raises TypeError, and InvalidParams if there are none."""
    if isinstance(argv, str | bytes | os.PathLike):
        raise TypeError("argv is a list of words; for a text of a shell use env.shell(text)")
    words = [_text(word, f"argv[{number}]") for number, word in enumerate(argv)]
    if not words:
        raise InvalidParams("argv must not be empty")
    return words


def input_bytes(data: bytes | None) -> bytes | None:
    """The input of a command, None if there is none; raises TypeError if it is no bytes."""
    if data is not None and not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"input must be bytes, not {type(data).__name__}")
    return bytes(data) if data else None


def check_seconds(seconds: float | None) -> None:
    """Raise TypeError for a timeout that is no number."""
    if seconds is not None and not isinstance(seconds, int | float):
        raise TypeError(f"timeout must be a number of seconds, not {type(seconds).__name__}")


def _environment(env: Mapping[str, AnyPath]) -> dict[str, str]:
    return {
        _text(name, "a name in env"): _text(value, f"env[{name!r}]") for name, value in env.items()
    }


def _text(value: AnyPath, name: str) -> str:
    """A text or path as text; raises TypeError for others."""
    try:
        return decoded(value)
    except TypeError:
        kind = type(value).__name__
        raise TypeError(f"{name} must be str, bytes or a path, not {kind}") from None


def _tty_size(size: tuple[int, int]) -> TtySize:
    match size:
        case (int(rows), int(columns)) if 0 < rows <= MAX_TTY_SIZE and 0 < columns <= MAX_TTY_SIZE:
            return TtySize(rows, columns)
    limits = f"each from 1 to {MAX_TTY_SIZE}"
    raise InvalidParams(f"size must be rows and columns, {limits}, not {size!r}")
