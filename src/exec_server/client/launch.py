"""From what a caller wants to run to the request for it, also where a server lacks something.

What a server cannot do is done by a shell on its machine if that comes to the same:

- the end of a pipe's input: `head` passes on exactly as many bytes as there are, then the command
  reads the end of a pipe, as it should;
- the size of a terminal at its start: `stty` sets it before the command begins.

One thing differs then: a program that does not exist is no error of the start, it is the shell's
exit code 127.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, Final, cast

import msgspec

from exec_server.client.places import AnyPath, Places
from exec_server.errors import InvalidParams
from exec_server.protocol.presets import PRESETS, PresetName, preset
from exec_server.protocol.process import EnvPolicy, ProcessId, StartParams, TtySize
from exec_server.protocol.sandbox import Sandbox
from exec_server.protocol.session import Capabilities

# A policy by its name, or a `sandbox` object of the protocol.
AnySandbox = PresetName | Sandbox | Mapping[str, Any]

# Of the server's own environment: everything.
INHERIT_ALL: Final = EnvPolicy(
    inherit="all", ignore_default_excludes=True, exclude=[], set={}, include_only=[]
)
# What a terminal is taken for unless the caller says; servers set none, and without one many
# programs refuse to run.
TERMINAL: Final = "xterm-256color"
# Of a terminal's rows and columns: the kernel keeps them in 16 bits.
MAX_SIZE: Final = 65_535

_WITH_INPUT: Final = 'n=$1; shift; head -c "$n" | exec "$@"'
_WITH_SIZE: Final = 'stty rows "$1" columns "$2"; shift 2; exec "$@"'


class Launcher:
    """Makes requests for one server."""

    def __init__(self, places: Places, capabilities: Capabilities) -> None:
        self._places = places
        self._capabilities = capabilities

    def params(
        self,
        words: list[str],
        *,
        cwd: AnyPath | None,
        env: Mapping[str, AnyPath] | None,
        clean_env: bool,
        tty: bool,
        size: tuple[int, int] | None,
        stdin: bool,
        sandbox: AnySandbox | None,
    ) -> StartParams:
        """The params of a start, except for its id."""
        tty_size = _tty_size(size) if tty and size is not None else None
        if tty_size is not None and not self._capabilities.process_resize:
            rows, columns = str(tty_size.rows), str(tty_size.columns)
            words = ["/bin/sh", "-c", _WITH_SIZE, "sh", rows, columns, *words]
            tty_size = None
        return StartParams(
            process_id=ProcessId(""),
            argv=words,
            cwd=self._places.uri(self._places.cwd if cwd is None else cwd),
            env_policy=None if clean_env else INHERIT_ALL,
            env=({"TERM": TERMINAL} if tty else {}) | _variables(env or {}),
            tty=tty,
            pipe_stdin=stdin and not tty,
            sandbox=sandbox_object(sandbox, self._places, cwd),
            tty_size=tty_size,
        )

    def with_input(self, params: StartParams, size: int) -> StartParams:
        """The same for a command that gets exactly so many bytes of input."""
        words = params.argv
        if not self._capabilities.process_close_stdin:
            words = ["/bin/sh", "-c", _WITH_INPUT, "sh", str(size), *words]
        return msgspec.structs.replace(params, argv=words, pipe_stdin=True)


def sandbox_object(
    sandbox: AnySandbox | None, places: Places, cwd: AnyPath | None = None
) -> Sandbox | None:
    """What is sent for a sandbox; one with a name has `cwd` for its workspace."""
    if isinstance(sandbox, str):
        if sandbox not in PRESETS:
            raise InvalidParams(f"there is no sandbox {sandbox!r}; there are {', '.join(PRESETS)}")
        here = str(places.uri(places.cwd if cwd is None else cwd))
        sandbox = preset(sandbox, cwd=here, roots=[here])
    # msgspec writes an object that is already one as it is.
    return cast(Sandbox | None, sandbox)


def words_of(argv: Iterable[AnyPath]) -> list[str]:
    """A command as words; raises TypeError for what is none, and InvalidParams if it is empty."""
    if isinstance(argv, str | bytes | os.PathLike):
        raise TypeError('argv is a list of words; for a shell use ["sh", "-c", text]')
    words = [_text(word, f"argv[{number}]") for number, word in enumerate(argv)]
    if not words:
        raise InvalidParams("argv must not be empty")
    return words


def _variables(env: Mapping[str, AnyPath]) -> dict[str, str]:
    return {
        _text(name, "a name in env"): _text(value, f"env[{name!r}]") for name, value in env.items()
    }


def _text(value: AnyPath, what: str) -> str:
    """Text or a path as text. Bytes would be sent as base64, which nobody means."""
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str):
        raise TypeError(f"{what} must be text or a path, not {type(value).__name__}")
    return text


def _tty_size(size: tuple[int, int]) -> TtySize:
    match size:
        case (int(rows), int(columns)) if 0 < rows <= MAX_SIZE and 0 < columns <= MAX_SIZE:
            return TtySize(rows, columns)
    raise InvalidParams(f"size is rows and columns, each from 1 to {MAX_SIZE}, not {size!r}")
