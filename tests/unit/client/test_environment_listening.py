"""The tables of listening sockets, and the wait for one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from tests.support.memory_session import play

from exec_server.client.environment import is_listening, wait_for_port
from exec_server.errors import NotFound, Unsupported

HEADER = b"  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt\n"
LISTENING = b"   0: 0100007F:0BB8 00000000:0000 0A 00000000:00000000 00:00000000 00000000\n"
CONNECTED = b"   1: 0100007F:0BB9 0100007F:A1B2 01 00000000:00000000 00:00000000 00000000\n"
SIX = b"   0: 00000000000000000000000000000000:0BBA 00000000000000000000000000000000:0000 0A x\n"


def test_tables() -> None:
    table = HEADER + LISTENING + CONNECTED
    assert [port for port in range(2999, 3003) if is_listening(table, port)] == [3000]
    assert is_listening(HEADER + SIX, 3002)
    assert not is_listening(b"", 3000)


def reader(*tables: dict[str, bytes]) -> Callable[[str], Awaitable[bytes]]:
    """Reads from the first dictionary, after each pass from the next one; the last one stays."""
    states = list(tables)

    async def read(path: str) -> bytes:
        state = states[0]
        if path.endswith("6") and len(states) > 1:
            states.pop(0)
        if path not in state:
            raise NotFound(path)
        return state[path]

    return read


def test_it_waits_for_either_table() -> None:
    async def run() -> None:
        empty = {"/proc/net/tcp": HEADER}
        await wait_for_port(reader(empty, {"/proc/net/tcp": HEADER + LISTENING}), 3000, 10)
        later = {"/proc/net/tcp": HEADER, "/proc/net/tcp6": HEADER + SIX}
        await wait_for_port(reader(empty, empty, later), 3002, None)
        with pytest.raises(TimeoutError, match=r"no program listens at port 3000 after 0\.01 s"):
            await wait_for_port(reader(empty), 3000, 0.01)

    play(run())


def test_it_may_be_impossible() -> None:
    async def fail(path: str) -> bytes:
        raise TimeoutError("mine")

    async def run() -> None:
        with pytest.raises(Unsupported, match="wait for the output"):
            await wait_for_port(reader({}), 3000, None)
        for port in (0, 65_536):
            with pytest.raises(ValueError, match="port must be from 1 to 65535"):
                await wait_for_port(reader({}), port, None)
        with pytest.raises(TimeoutError, match="mine"):
            await wait_for_port(fail, 3000, 10)

    asyncio.run(run())
