"""TlsAcceptor: accepts connections and performs a bounded number of TLS handshakes at a time.

The event loop's own server does not tell when a handshake fails, so it could not be bounded.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
import stat
from collections.abc import Callable
from typing import Final

from exec_server.errors import StartupError, os_error_text
from exec_server.host.event_loop import GuardedTasks
from exec_server.net.admission import Admission, PendingConnections, peer_network

# A key takes a few kilobytes. More of a file is not examined here.
MAX_FILE_BYTES: Final = 65_536

_MISMATCH: Final = "KEY_VALUES_MISMATCH"  # OpenSSL's reason
_ENCRYPTED: Final = b"ENCRYPTED"  # in the header of a key with a passphrase

log = logging.getLogger(__name__)

# From accept to established TLS. The upgrade request has its own time after that.
HANDSHAKE_SECONDS: Final = 10.0
# How long a peer may take to answer the end of TLS.
SHUTDOWN_SECONDS: Final = 2.0
# Connections that are accepted before others get their turn.
ACCEPT_BURST: Final = 64
# The pause after a failure of accept, which usually means that no descriptor is free.
ACCEPT_RETRY_SECONDS: Final = 1.0


class ServerCertificate:
    """The TLS context of a listener, from files on the disk; `reload` reads them again."""

    def __init__(self, certificate_file: str, key_file: str) -> None:
        """Raises StartupError if the files cannot be used."""
        self._certificate_file = certificate_file
        self._key_file = key_file
        self.context = self._load()
        """The context for new connections."""

    def reload(self) -> None:
        """Read the files again; on StartupError the former certificate stays in use. Blocking."""
        self.context = self._load()

    def is_key_exposed(self) -> bool:
        """Whether other users can read the key."""
        return bool(stat.S_IMODE(os.stat(self._key_file).st_mode) & stat.S_IROTH)

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        # Clients resume no TLS session. One ticket is sent all the same: it acknowledges the end of
        # the handshake at once, without which a client with Nagle's algorithm waits for 40 ms.
        context.num_tickets = 1
        _read("--tls-cert", self._certificate_file)
        if _ENCRYPTED in _read("--tls-key", self._key_file):
            raise StartupError(
                f"--tls-key {self._key_file} is encrypted: remove its passphrase with "
                "`openssl pkey`, and protect the file by its mode"
            )
        try:
            # Without the password OpenSSL would ask for one on the terminal.
            context.load_cert_chain(self._certificate_file, self._key_file, password="")
        except OSError as error:  # SSLError is one
            is_mismatch = getattr(error, "reason", None) == _MISMATCH
            text = "the key is not that of the certificate" if is_mismatch else "not in PEM format"
            raise StartupError(
                f"cannot use --tls-cert {self._certificate_file} with --tls-key "
                f"{self._key_file}: {text}"
            ) from None
        return context


def _read(flag: str, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_FILE_BYTES)
    except OSError as error:
        raise StartupError(f"cannot read {flag} {path}: {os_error_text(error)}") from None


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
