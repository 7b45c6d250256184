"""Certificates for servers under test: an authority, certificates of it, and fingerprints."""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Pair:
    """The files of a certificate and of its key."""

    certificate: Path
    key: Path

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags of a server with this certificate."""
        return ("--tls-cert", str(self.certificate), "--tls-key", str(self.key))

    @property
    def fingerprint(self) -> str:
        der = ssl.PEM_cert_to_DER_cert(self.certificate.read_text())
        return f"sha256:{hashlib.sha256(der).hexdigest()}"


def make_pair(
    directory: Path, name: str, *hosts: str, issuer: Pair | None = None, days: int = 1
) -> Pair:
    """A certificate for these hosts, self-signed without an `issuer`; negative days: expired."""
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    signer, issuer_name = key, subject
    own_id = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    if issuer is not None:
        loaded = serialization.load_pem_private_key(issuer.key.read_bytes(), None)
        assert isinstance(loaded, ec.EllipticCurvePrivateKey)
        signer = loaded
        issuer_name = x509.load_pem_x509_certificate(issuer.certificate.read_bytes()).subject
    signer_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer_name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=10))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(own_id, critical=False)
        .add_extension(signer_id, critical=False)
    )
    if hosts:
        names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
        builder = builder.add_extension(names, critical=False)
    pair = Pair(directory / f"{name}.pem", directory / f"{name}.key")
    certificate = builder.sign(signer, hashes.SHA256())
    pair.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    pair.key.touch(0o600)
    pair.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return pair


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
