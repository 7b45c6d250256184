"""Our own words on stdout and stderr: at once, all of it, names as their bytes."""

from __future__ import annotations

import contextlib
import os
import select


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of it. Blocking; raises OSError."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:  # somebody who shares it has made it so
            select.select([], [descriptor], [])


def print_text(text: str) -> None:
    """To stdout. Blocking; raises OSError."""
    write_all(1, text.encode(errors="surrogateescape"))


def say(text: str, *, is_raw: bool = False) -> None:
    """A line of ours on stderr among what others write; nobody may be listening any more."""
    complain(f"exec-server: {text}", is_raw=is_raw)


def complain(text: str, *, is_raw: bool = False) -> None:
    """The same without saying who speaks."""
    line = f"{text}\n"
    if is_raw:
        line = line.replace("\n", "\r\n")
    with contextlib.suppress(OSError):
        write_all(2, line.encode(errors="backslashreplace"))
