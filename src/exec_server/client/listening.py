"""Whether a program listens at a TCP port of the server's machine.

The tables of the kernel tell it. A connection would tell it too, but a program that accepts a
single connection, or logs each one, would notice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from exec_server.client.arguments import check_number
from exec_server.errors import NotFound, Unsupported

# Interval of the questions: at first a start that is quick is noticed at once.
FIRST_SECONDS: Final = 0.02
MAX_SECONDS: Final = 0.25

# The sockets of the server's network namespace, see proc(5).
_TABLES: Final = ("/proc/net/tcp", "/proc/net/tcp6")
_LISTEN: Final = b"0A"
_HIGHEST_PORT: Final = 65_535


def is_listening(table: bytes, port: int) -> bool:
    """Whether a table has a socket that listens at the port, whatever its address."""
    suffix = b":%04X" % port
    for line in table.splitlines()[1:]:
        words = line.split()
        if len(words) > 3 and words[3] == _LISTEN and words[1].endswith(suffix):
            return True
    return False


async def wait_for_port(
    read: Callable[[str], Awaitable[bytes]], port: int, seconds: float | None
) -> None:
    """Return when a program listens; `read` reads a file. See Environment.wait_for_port."""
    if not isinstance(port, int):
        raise TypeError(f"port must be an int, not {type(port).__name__}")
    check_number(seconds)
    if not 0 < port <= _HIGHEST_PORT:
        raise ValueError(f"port must be from 1 to {_HIGHEST_PORT}, not {port}")
    scope = asyncio.timeout(seconds)
    delay = FIRST_SECONDS
    try:
        async with scope:
            while not await _is_open(read, port):
                await asyncio.sleep(delay)
                delay = min(2 * delay, MAX_SECONDS)
    except TimeoutError:
        if not scope.expired():
            raise
        raise TimeoutError(f"no program listens at port {port} after {seconds:g} s") from None


async def _is_open(read: Callable[[str], Awaitable[bytes]], port: int) -> bool:
    has_table = False
    for path in _TABLES:
        try:
            table = await read(path)
        except NotFound:
            continue  # such as IPv6 on a kernel without it
        has_table = True
        if is_listening(table, port):
            return True
    if not has_table:
        raise Unsupported(_TABLES[0], "wait for the output of the program instead")
    return False
