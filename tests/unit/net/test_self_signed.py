"""Self-signed certificates: names, dates, use, and the facts that are read back."""

from __future__ import annotations

import datetime
import hashlib
import ssl

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from exec_server.net.self_signed import CLOCK_SKEW, SelfSigned, make_self_signed, read_facts

_NOW = datetime.datetime(2030, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)


def test_the_facts_are_those_that_were_asked_for() -> None:
    made = make_self_signed(["Build.example", "192.0.2.1", "::1", "::1"], _NOW, 10)
    facts = read_facts(made.certificate)
    assert facts.names == ("build.example", "192.0.2.1", "::1")
    assert facts.valid_until == _NOW + datetime.timedelta(days=10)
    der = ssl.PEM_cert_to_DER_cert(made.certificate.decode())
    assert facts.fingerprint == f"sha256:{hashlib.sha256(der).hexdigest()}"


def test_the_certificate_is_that_of_a_server_and_of_its_key() -> None:
    made = make_self_signed(["x" * 63 + ".example"], _NOW, 1)
    certificate = x509.load_pem_x509_certificate(made.certificate)
    key = serialization.load_pem_private_key(made.key, None)
    assert certificate.public_key() == key.public_key()
    assert certificate.not_valid_before_utc == _NOW - CLOCK_SKEW
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    assert not constraints.value.ca
    assert certificate.subject.rfc4514_string() == "CN=exec-server"


@pytest.mark.parametrize(
    "name", ["", "a b", "-.-/", "a..b", "x" * 64, "a." * 127 + "a", "http://h"]
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="neither a host name nor an address"):
        make_self_signed(["localhost", name], _NOW, 1)


def test_international_names_and_wildcards() -> None:
    made = make_self_signed(["bücher.example", "*.lab.example"], _NOW, 1)
    assert read_facts(made.certificate).names == ("xn--bcher-kva.example", "*.lab.example")


def test_a_certificate_may_have_no_names() -> None:
    made = make_self_signed(["localhost"], _NOW, 1)
    parsed = x509.load_pem_x509_certificate(made.certificate)
    key = serialization.load_pem_private_key(made.key, None)
    plain = (
        x509.CertificateBuilder()
        .subject_name(parsed.subject)
        .issuer_name(parsed.issuer)
        .public_key(parsed.public_key())
        .serial_number(1)
        .not_valid_before(_NOW)
        .not_valid_after(_NOW + CLOCK_SKEW)
        .sign(key, parsed.signature_hash_algorithm)  # type: ignore[arg-type]
    )
    assert read_facts(plain.public_bytes(serialization.Encoding.PEM)).names == ()
    with pytest.raises(ValueError):
        read_facts(b"no certificate")


def test_the_key_is_not_printed() -> None:
    assert repr(SelfSigned(b"c", b"secret")) == "SelfSigned(…)"
