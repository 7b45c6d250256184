"""Self-signed certificates for servers without an authority, and the facts of a certificate."""

from __future__ import annotations

import datetime
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from exec_server.net.client_tls import certificate_fingerprint
from exec_server.protocol.urls import domain_to_ascii

# The clock of a client may be late by this time.
CLOCK_SKEW: Final = datetime.timedelta(hours=1)
# Of a common name (RFC 5280); clients look at the alternative names only.
_COMMON_NAME_CHARACTERS: Final = 64

_DOMAIN: Final = re.compile(r"(?:\*\.)?(?:[a-z0-9_-]{1,63}\.)*[a-z0-9_-]{1,63}")


@dataclass(frozen=True, slots=True)
class SelfSigned:
    """A certificate and its key, in PEM format."""

    certificate: bytes
    key: bytes

    def __repr__(self) -> str:
        return "SelfSigned(…)"  # keep the key out of tracebacks


@dataclass(frozen=True, slots=True)
class Facts:
    """What `exec-server tls-init` tells about a certificate."""

    names: tuple[str, ...]
    valid_until: datetime.datetime
    fingerprint: str


def make_self_signed(names: Sequence[str], now: datetime.datetime, days: int) -> SelfSigned:
    """Make a certificate for these host names and addresses; raises ValueError for another name."""
    alternatives = [_general_name(name) for name in dict.fromkeys(names)]
    key = ec.generate_private_key(ec.SECP256R1())
    common = names[0] if len(names[0]) <= _COMMON_NAME_CHARACTERS else "exec-server"
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        # Not an authority: some clients refuse the certificate of one as that of a server.
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(identifier, critical=False)
        .sign(key, hashes.SHA256())
    )
    return SelfSigned(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )


def read_facts(certificate: bytes) -> Facts:
    """The facts of the first certificate in a PEM file; raises ValueError if there is none."""
    parsed = x509.load_pem_x509_certificate(certificate)
    try:
        extension = parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        names: tuple[str, ...] = ()
    else:
        domains = extension.value.get_values_for_type(x509.DNSName)
        addresses = extension.value.get_values_for_type(x509.IPAddress)
        names = (*domains, *map(str, addresses))
    fingerprint = certificate_fingerprint(parsed.public_bytes(serialization.Encoding.DER))
    return Facts(names, parsed.not_valid_after_utc, fingerprint)


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    domain = name.lower()
    if not domain.isascii():
        domain = domain_to_ascii(domain)
    if len(domain) > 253 or _DOMAIN.fullmatch(domain) is None:
        raise ValueError(f"`{name}` is neither a host name nor an address")
    return x509.DNSName(domain)
