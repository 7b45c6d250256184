"""The event loop: uvloop where it is installed, else that of asyncio."""

from __future__ import annotations

import asyncio
import sys

import pytest
import uvloop

from exec_server.host import event_loop

pytestmark = pytest.mark.quick


async def _running() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def test_it_is_uvloop_where_that_is_installed() -> None:
    assert isinstance(event_loop.run(_running()), uvloop.Loop)


def test_without_uvloop_it_is_that_of_asyncio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert isinstance(event_loop.run(_running()), asyncio.SelectorEventLoop)
