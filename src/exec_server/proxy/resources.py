"""ProxyResources: what all proxies of a server share; most servers import no other proxy module."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from exec_server.host.event_loop import GuardedTasks
from exec_server.host.threads import ThreadPool

if TYPE_CHECKING:
    from exec_server.proxy.authority import CertificateAuthority


class ProxyResources(msgspec.Struct):
    """The resources that the proxies of all processes of a server share."""

    tasks: GuardedTasks
    lookup_threads: ThreadPool
    variables: Mapping[str, str]  # the server's own, for `allowUpstreamProxy`
    private_via_upstream: bool = False  # private addresses, too, are reached through its proxy
    loop: asyncio.AbstractEventLoop = msgspec.field(default_factory=asyncio.get_running_loop)
    connections: int = 0
    # Dummies for secrets are made with it: the same value has the same dummy.
    mask_key: bytes = msgspec.field(default_factory=lambda: os.urandom(32))
    _lock: threading.Lock = msgspec.field(default_factory=threading.Lock)  # guards the two below
    _authority: CertificateAuthority | None = None
    _client_context: ssl.SSLContext | None = None

    def authority(self) -> CertificateAuthority:
        """The authority of this server, made at its first use. Blocking."""
        with self._lock:
            if self._authority is None:
                # Imported here: most servers mask nothing.
                from exec_server.proxy.authority import CertificateAuthority

                self._authority = CertificateAuthority(self.variables)
                self._client_context = ssl.create_default_context()
                self._client_context.set_alpn_protocols(["http/1.1"])
                # Authorities of companies often lack extensions that strict checks ask for.
                self._client_context.verify_flags &= ~ssl.VERIFY_X509_STRICT
            return self._authority

    def client_context(self) -> ssl.SSLContext:
        """The context of TLS connections to origins; only after `authority`."""
        assert self._client_context is not None
        return self._client_context

    @property
    def certificate_path(self) -> str | None:
        """The file that masked processes trust; None if there was none yet."""
        return None if self._authority is None else self._authority.file.path

    def close(self) -> None:
        if self._authority is not None:
            self._authority.close()

    async def resolve(self, host: str) -> Sequence[str]:
        """The addresses of a name, each once; raises OSError."""
        found = await self.lookup_threads.run(socket.getaddrinfo, host, None, 0, socket.SOCK_STREAM)
        return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))
