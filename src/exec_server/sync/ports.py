"""Forwarded ports without `async`."""

from __future__ import annotations

from exec_server.client import port_forwarding
from exec_server.sync.thread import BlockingHandle


class PortForward(BlockingHandle[port_forwarding.PortForward]):
    """A local port that leads to one of the server's machine."""

    @property
    def remote_port(self) -> int:
        return self._inner.remote_port

    @property
    def host(self) -> str | None:
        return self._inner.host

    @property
    def port(self) -> int:
        return self._inner.port

    @property
    def url(self) -> str:
        return self._inner.url


class ReversePort(BlockingHandle[port_forwarding.ReversePort]):
    """A port of the server's machine that leads to a local one."""

    @property
    def local_port(self) -> int:
        return self._inner.local_port

    @property
    def port(self) -> int:
        return self._inner.port

    @property
    def url(self) -> str:
        return self._inner.url
