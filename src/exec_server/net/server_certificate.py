"""ServerCertificate: the TLS context of a listener, from a certificate and a key on the disk."""

from __future__ import annotations

import os
import ssl
import stat
from typing import Final

from exec_server.errors import StartupError, os_error_text

# A key takes a few kilobytes. More of a file is not examined here.
MAX_FILE_BYTES: Final = 65_536

_MISMATCH: Final = "KEY_VALUES_MISMATCH"  # OpenSSL's reason
_ENCRYPTED: Final = b"ENCRYPTED"  # in the header of a key with a passphrase


class ServerCertificate:
    """The certificate chain and the private key of a server; `reload` reads them again."""

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
