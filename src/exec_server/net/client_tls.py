"""The TLS contexts of clients: root certificates, and pins of single certificates."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final

from exec_server.errors import CertificateRejected, StartupError

# Cached contexts, each about a megabyte: one for HTTP, one for WebSockets, and some for callers
# with their own root certificates.
KEPT_CONTEXTS: Final = 4
# Pins of one server: the current certificate, the next one, and room for mistakes.
MAX_PINS: Final = 16

_HEX_DIGITS: Final = frozenset("0123456789abcdef")


def roots_for_http(environ: Mapping[str, str]) -> str | None:
    """The file of root certificates for HTTP requests, None for those of the system."""
    return environ.get("CODEX_CA_CERTIFICATE") or roots_for_websockets(environ)


def roots_for_websockets(environ: Mapping[str, str]) -> str | None:
    """The file of root certificates for WebSockets, None for those of the system."""
    return environ.get("SSL_CERT_FILE") or None


@lru_cache(KEPT_CONTEXTS)
def tls_context(ca_file: str | None) -> ssl.SSLContext:
    """A context that verifies against this file or the system; raises OSError or SSLError."""
    context = ssl.create_default_context(cafile=ca_file)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Python 3.13 and later refuse root certificates that lack extensions which other versions and
    # clients do not require. Private roots often lack them, and must work everywhere.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


class PinnedContext(ssl.SSLContext):
    """Accepts exactly the pinned certificates, whatever their issuer, names and dates are.

    `check_pin` compares them after the handshake, which has proved that the server has the key.
    """

    pins: frozenset[str]


def certificate_fingerprint(certificate: bytes) -> str:
    """The fingerprint of a certificate in DER form: `sha256:` and 64 hexadecimal digits."""
    import hashlib  # only for connections with TLS, as is hmac

    return f"sha256:{hashlib.sha256(certificate).hexdigest()}"


def normalise_pin(pin: str) -> str:
    """A pin as `certificate_fingerprint` writes it, also from `openssl x509 -fingerprint` lines."""
    text = pin.strip().lower().removeprefix("sha256 fingerprint=")
    digits = text.removeprefix("sha256:").replace(":", "")
    if len(digits) != 64 or not _HEX_DIGITS.issuperset(digits):
        raise StartupError(f"the pin `{pin}` is not sha256: and 64 hexadecimal digits")
    return f"sha256:{digits}"


def client_context(ca_file: str | None = None, pins: Sequence[str] = ()) -> ssl.SSLContext | None:
    """A context for root certificates or pins, None for the system's; raises StartupError."""
    if pins:
        if ca_file is not None:
            raise StartupError("a pin replaces the check by root certificates: give only one")
        if len(pins) > MAX_PINS:
            raise StartupError(f"there are {len(pins)} pins; at most {MAX_PINS} are possible")
        return _pinned_context(frozenset(map(normalise_pin, pins)))
    if ca_file is None:
        return None
    try:
        return tls_context(ca_file)
    except ssl.SSLError:
        raise StartupError(f"no certificates in the CA file {ca_file}") from None
    except OSError as error:
        raise StartupError(f"cannot read the CA file {ca_file}: {error.strerror}") from None


def _pinned_context(pins: frozenset[str]) -> PinnedContext:
    context = PinnedContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.pins = pins
    return context


def check_pin(transport: asyncio.BaseTransport, context: ssl.SSLContext) -> None:
    """Raise CertificateRejected unless the peer's certificate is pinned; call before sending."""
    if not isinstance(context, PinnedContext):
        return
    import hmac

    certificate = transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
    fingerprint = certificate_fingerprint(certificate or b"")
    if not any(hmac.compare_digest(fingerprint, pin) for pin in context.pins):
        raise CertificateRejected(
            f"TLS error: the certificate of the server has the fingerprint {fingerprint}, which is "
            "not pinned; compare it with the output of `exec-server tls-init --show` there"
        )
