"""Forwarded ports without async, with objects in the place of sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

from exec_server.client import port_forwarding
from exec_server.client.handle import Handle
from exec_server.sync.environment import PortForward, ReversePort
from exec_server.sync.thread import LoopThread


class _Port(Handle):
    """Has the members of both kinds of ports."""

    port = 1
    url = "http://127.0.0.1:1"
    remote_port = 2
    local_port = 3
    host = "db"

    async def _open(self) -> None: ...

    async def _close(self) -> None: ...


@asynccontextmanager
async def _nothing() -> AsyncIterator[None]:
    yield


def test_ports_are_open_at_once_and_have_the_same_members() -> None:
    thread = LoopThread[Any](_nothing)
    try:
        forward = PortForward(thread, cast(port_forwarding.PortForward, _Port()))
        assert (forward.port, forward.url) == (1, "http://127.0.0.1:1")
        assert (forward.remote_port, forward.host) == (2, "db")
        with ReversePort(thread, cast(port_forwarding.ReversePort, _Port())) as reverse:
            assert (reverse.port, reverse.url) == (1, "http://127.0.0.1:1")
            assert (reverse.local_port, reverse.is_open) == (3, True)
        assert not reverse.is_open
        forward.close()
        assert not forward.is_open
    finally:
        thread.close()
