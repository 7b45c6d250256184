"""Carries the bytes of a tunnel in both directions until both have ended."""

from __future__ import annotations

import asyncio

from exec_server.proxy.stream import Stream


async def carry(inner: Stream, outer: Stream, early: bytes = b"") -> None:
    """Join two connections and close them; `early` are bytes that the inner one has sent.

    An end of one direction is passed on, and the other direction stays open. An error resets both.
    """
    is_whole = False
    try:
        if early:
            await outer.send(early)
        async with asyncio.TaskGroup() as pumps:
            pumps.create_task(_pump(inner, outer))
            await _pump(outer, inner)
        is_whole = True
    except* OSError:
        pass
    finally:
        for stream in (inner, outer):
            if is_whole:
                stream.close()
            else:
                stream.abort()


async def _pump(source: Stream, target: Stream) -> None:
    while data := await source.receive():
        await target.send(data)
    target.write_eof()
