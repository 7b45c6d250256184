"""CertificateAuthority: certificates that only processes with masked credentials trust.

The authority's key exists in server memory alone.
"""

from __future__ import annotations

import datetime
import os
import ssl
import threading
from collections.abc import Mapping
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from exec_server.protocol.urls import parse_address
from exec_server.proxy.certificate_file import CertificateFile

# Longer than a server runs; the certificates are made anew by each server.
_DAYS: Final = 365
# Hosts with a certificate: those of the providers, and one that a user may name in each start.
MAX_HOSTS: Final = 64

_SIGNING: Final = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=False,
    encipher_only=False,
    decipher_only=False,
)


class CertificateAuthority:
    """Makes certificates for hosts. Every method is thread-safe, and blocking."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        """`variables` are the server's own."""
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name(
            [x509.NameAttribute(NameOID.COMMON_NAME, "exec-server credential masking")]
        )
        self._lock = threading.Lock()
        self._contexts: dict[str, ssl.SSLContext] = {}
        basic = x509.BasicConstraints(ca=True, path_length=0)
        builder = _builder(self._name, self._name, self._key.public_key())
        self._certificate = (
            builder.add_extension(basic, critical=True)
            .add_extension(_SIGNING, critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.file = CertificateFile(_system_certificates() + _pem(self._certificate), variables)

    def context(self, host: str) -> ssl.SSLContext:
        """The TLS context of a server that is this host."""
        with self._lock:
            context = self._contexts.get(host)
            if context is None:
                if len(self._contexts) >= MAX_HOSTS:
                    self._contexts.pop(next(iter(self._contexts)))
                context = self._contexts[host] = self._make_context(host)
            return context

    def _make_context(self, host: str) -> ssl.SSLContext:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host[:64])])
        certificate = (
            _builder(subject, self._name, key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([_general_name(host)]), critical=False)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        # The ssl module reads keys from files only; this one has no name.
        descriptor = os.memfd_create("certificate")
        with open(descriptor, "w+b") as file:
            file.write(private + _pem(certificate))
            file.flush()
            context.load_cert_chain(f"/proc/self/fd/{descriptor}")
        return context

    def close(self) -> None:
        """Remove the file."""
        self.file.close()


def _system_certificates() -> bytes:
    paths = ssl.get_default_verify_paths()
    if paths.cafile is None:
        return b""
    with open(paths.cafile, "rb") as file:
        return file.read().rstrip() + b"\n"


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=_DAYS))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _general_name(host: str) -> x509.GeneralName:
    address = parse_address(host)
    return x509.DNSName(host) if address is None else x509.IPAddress(address)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
