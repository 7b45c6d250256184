"""Unbuffered output of the client commands to stdout and stderr.

Every text that a command prints passes through this module, which escapes the control characters
in it: servers choose names and error texts. Only contents (the output of `exec`, the files of
`cat`) are written as they are, by `streams.OutputWriter`.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Iterator
from typing import Final

from exec_server.cli.commands.errors import CommandError
from exec_server.printable import printable

_CLEAR_LINE: Final = "\r\x1b[K"


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of `data`. Blocking; raises OSError."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:  # another process has set O_NONBLOCK on the shared description
            select.select([], [descriptor], [])


def print_text(text: str) -> None:
    """Print to stdout, control characters escaped on a terminal and file names as their bytes.

    Blocking. Raises CommandError, or BrokenPipeError if the reader has closed stdout.
    """
    shown = printable(text, keep="\n") if os.isatty(1) else text
    with describe_stdout_errors():
        write_all(1, shown.encode(errors="surrogateescape"))


def json_text(value: object) -> str:
    """The JSON text that a command prints; ASCII, so that a terminal can show it."""
    import json

    return json.dumps(value, indent=2) + "\n"


@contextlib.contextmanager
def describe_stdout_errors() -> Iterator[None]:
    """Turn an OSError, which does not name stdout, into a CommandError that does."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CommandError(f"cannot write to stdout: {error.strerror}") from None


def print_status(text: str, *, is_raw: bool = False) -> None:
    """Print a line to stderr with the prefix `exec-server:`, to tell it from remote output."""
    print_error(f"exec-server: {text}", is_raw=is_raw)


def print_notice(text: str) -> None:
    """Like `print_status`, and clear a progress bar that stands on the line."""
    if os.isatty(2):
        _write_error(_CLEAR_LINE)
    print_status(text)


def print_error(text: str, *, is_raw: bool = False) -> None:
    """Print a line to stderr; `is_raw` is for a terminal in raw mode. Ignores a closed stderr.

    Newlines in the text are kept; `printable` escapes those of a server.
    """
    line = printable(text, keep="\n") + "\n"
    _write_error(line.replace("\n", "\r\n") if is_raw else line)


def _write_error(text: str) -> None:
    with contextlib.suppress(OSError):
        write_all(2, text.encode(errors="backslashreplace"))


def print_log_records() -> None:
    """Print warnings of the library to stderr like all other texts."""
    import logging  # slow to import, and not needed for shell completion

    class _Printer(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            print_error(f"exec-server: {self.format(record)}")

    logging.basicConfig(handlers=[_Printer()], level=logging.WARNING, format="%(message)s")
