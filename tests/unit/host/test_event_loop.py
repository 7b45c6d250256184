"""The event loop: uvloop where it is installed, else that of asyncio."""

from __future__ import annotations

import asyncio
import socket
import sys
from unittest import mock

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


def test_a_loop_for_forks_looks_up_names_in_threads_of_python() -> None:
    async def scene() -> object:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, uvloop.Loop)
        with mock.patch("socket.getaddrinfo", return_value=["found"]) as lookup:
            found = await loop.getaddrinfo("host", 7, type=socket.SOCK_STREAM)
        lookup.assert_called_once_with("host", 7, 0, socket.SOCK_STREAM, 0, 0)
        failing = mock.patch("socket.getaddrinfo", side_effect=socket.gaierror("unknown"))
        with failing, pytest.raises(socket.gaierror):
            await loop.getaddrinfo("host", 7)
        return found

    with asyncio.Runner(loop_factory=event_loop.new_event_loop_for_forks) as runner:
        assert runner.run(scene()) == ["found"]


def test_without_uvloop_a_loop_for_forks_is_that_of_asyncio(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    event_loop._loop_for_forks.cache_clear()
    monkeypatch.setitem(sys.modules, "uvloop", None)
    with asyncio.Runner(loop_factory=event_loop.new_event_loop_for_forks) as runner:
        assert isinstance(runner.run(_running()), asyncio.SelectorEventLoop)
