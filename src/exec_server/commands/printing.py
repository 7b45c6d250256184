"""Our own words on stdout and stderr: at once, all of it, names as their bytes."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Iterator
from typing import Final

from exec_server.commands.failures import Failure

_CLEAR_LINE: Final = "\r\x1b[K"


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of it. Blocking; raises OSError."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:  # somebody who shares it has made it so
            select.select([], [descriptor], [])


def print_text(text: str) -> None:
    """To stdout. Blocking; raises Failure, or BrokenPipeError if nobody reads it any more."""
    with explained_output():
        write_all(1, text.encode(errors="surrogateescape"))


@contextlib.contextmanager
def explained_output() -> Iterator[None]:
    """Say which file it is that cannot be written, as the kernel does not."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise Failure(f"cannot write to stdout: {error.strerror}") from None


def say(text: str, *, is_raw: bool = False) -> None:
    """A line of ours on stderr among what others write; nobody may be listening any more."""
    complain(f"exec-server: {text}", is_raw=is_raw)


def interject(text: str) -> None:
    """The same where a line that is redrawn may stand: it is taken away first."""
    complain(f"{_CLEAR_LINE if os.isatty(2) else ''}exec-server: {text}")


def complain(text: str, *, is_raw: bool = False) -> None:
    """The same without saying who speaks."""
    line = f"{text}\n"
    if is_raw:
        line = line.replace("\n", "\r\n")
    with contextlib.suppress(OSError):
        write_all(2, line.encode(errors="backslashreplace"))
