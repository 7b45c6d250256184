"""TlsAcceptor: accepts connections and performs their TLS handshakes, a bounded number at a time.

The server of the event loop does not tell when a handshake fails, so it could not be bounded. A
handshake is a task of its own here; the protocol of a connection gets it when TLS is established.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Final

from exec_server.host.event_loop import GuardedTasks
from exec_server.net.admission import Admission, PendingConnections, peer_network
from exec_server.net.server_certificate import ServerCertificate

log = logging.getLogger(__name__)

# From accept to established TLS. The upgrade request has its own time after that.
HANDSHAKE_SECONDS: Final = 10.0
# How long a peer may take to answer the end of TLS.
SHUTDOWN_SECONDS: Final = 2.0
# Connections that are accepted before others get their turn.
ACCEPT_BURST: Final = 64
# The pause after a failure of accept, which usually means that no descriptor is free.
ACCEPT_RETRY_SECONDS: Final = 1.0


class TlsAcceptor:
    """The TLS side of one listening socket."""

    def __init__(
        self,
        bound: socket.socket,
        certificate: ServerCertificate,
        make_protocol: Callable[[], asyncio.Protocol],
        tasks: GuardedTasks,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = bound
        self._certificate = certificate
        self._make_protocol = make_protocol
        self._tasks = tasks
        self._handshakes = PendingConnections(Admission().max_handshakes)
        self._retry: asyncio.TimerHandle | None = None

    def open(self) -> None:
        self._socket.setblocking(False)
        self._start_accepting()

    def close(self) -> None:
        """Stop accepting and abort all handshakes; established connections stay."""
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._socket)
        self._socket.close()
        self._handshakes.cut_off_all()

    def _start_accepting(self) -> None:
        self._retry = None
        self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPT_BURST):
            try:
                accepted, peer = self._socket.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                # The socket stays readable, so the loop would call this again at once.
                log.error("cannot accept connections: %s", error.strerror)
                self._loop.remove_reader(self._socket)
                self._retry = self._loop.call_later(ACCEPT_RETRY_SECONDS, self._start_accepting)
                return
            self._start_handshake(accepted, peer)

    def _start_handshake(self, accepted: socket.socket, peer: tuple[str, int]) -> None:
        task = self._tasks.create_task(self._shake_hands(accepted, peer))
        task.add_done_callback(self._handshakes.remove)
        # An honest handshake takes a few round trips, so stalled ones cannot keep clients out.
        self._handshakes.add(task, peer_network(peer[0]), task.cancel)

    async def _shake_hands(self, accepted: socket.socket, peer: tuple[str, int]) -> None:
        try:
            accepted.setblocking(False)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(
                self._make_protocol,
                accepted,
                ssl=self._certificate.context,
                ssl_handshake_timeout=HANDSHAKE_SECONDS,
                ssl_shutdown_timeout=SHUTDOWN_SECONDS,
            )
        except asyncio.CancelledError:
            accepted.close()  # without effect if the transport has it already
            raise
        except OSError as error:
            accepted.close()
            log.info("%s:%d: TLS handshake failed: %s", *peer[:2], _reason(error))
        except Exception:  # an edge: one peer must not end the server
            accepted.close()
            log.exception("TLS handshake failed")


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return error.reason or "invalid data"
    return str(error) or type(error).__name__
