"""Root certificates and pins of clients; tests/unit/net/test_dial.py connects with them."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.raw_servers import make_certificate

from exec_server.errors import StartupError
from exec_server.net.client_tls import (
    MAX_PINS,
    PinnedContext,
    certificate_fingerprint,
    client_context,
    normalise_pin,
    roots_for_http,
    roots_for_websockets,
    tls_context,
)

_PIN = "ab" * 32


@pytest.fixture(autouse=True)
def _no_cached_contexts() -> Iterator[None]:
    tls_context.cache_clear()
    yield
    tls_context.cache_clear()


def test_roots_by_environment() -> None:
    both = {"CODEX_CA_CERTIFICATE": "codex.pem", "SSL_CERT_FILE": "ssl.pem"}
    assert (roots_for_http(both), roots_for_websockets(both)) == ("codex.pem", "ssl.pem")
    codex = {"CODEX_CA_CERTIFICATE": "codex.pem"}
    assert (roots_for_http(codex), roots_for_websockets(codex)) == ("codex.pem", None)
    plain = {"SSL_CERT_FILE": "ssl.pem", "CODEX_CA_CERTIFICATE": ""}
    assert (roots_for_http(plain), roots_for_websockets(plain)) == ("ssl.pem", "ssl.pem")
    assert (roots_for_http({}), roots_for_websockets({"SSL_CERT_FILE": ""})) == (None, None)


def test_contexts_verify_and_are_kept(tmp_path: Path) -> None:
    roots, _ = make_certificate(tmp_path, "relay.test")
    context = tls_context(roots)
    assert context is tls_context(roots)
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert len(context.get_ca_certs()) == 1
    with pytest.raises(OSError):
        tls_context(str(tmp_path / "missing.pem"))


def test_a_ca_file_gives_a_context_of_its_own(tmp_path: Path) -> None:
    roots, _ = make_certificate(tmp_path, "relay.test")
    assert client_context() is None
    assert client_context(roots) is tls_context(roots)
    (tmp_path / "empty").write_text("")
    with pytest.raises(StartupError, match=f"no certificates in the CA file {tmp_path}/empty"):
        client_context(str(tmp_path / "empty"))
    with pytest.raises(StartupError, match=f"cannot read the CA file {tmp_path}/none: No such"):
        client_context(str(tmp_path / "none"))


# ---- pins -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pin",
    [
        _PIN,
        f"sha256:{_PIN}",
        f" SHA256:{_PIN.upper()}\n",
        ":".join(["AB"] * 32),
        f"sha256 Fingerprint={':'.join(['AB'] * 32)}\n",  # openssl 3
        f"SHA256 Fingerprint={':'.join(['AB'] * 32)}",  # openssl 1.1
    ],
)
def test_a_pin_has_several_spellings(pin: str) -> None:
    assert normalise_pin(pin) == f"sha256:{_PIN}"


@pytest.mark.parametrize(
    "pin",
    ["", "sha256:", "ab" * 31, "xy" * 32, f"sha1:{_PIN}", "é" * 64, f"SHA1 Fingerprint={_PIN}"],
)
def test_other_texts_are_no_pins(pin: str) -> None:
    with pytest.raises(StartupError, match="is not sha256: and 64 hexadecimal digits"):
        normalise_pin(pin)


def test_a_fingerprint_is_the_digest_of_the_whole_certificate() -> None:
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert certificate_fingerprint(b"") == f"sha256:{empty}"


def test_pins_give_a_context_that_leaves_the_check_to_them() -> None:
    context = client_context(pins=[_PIN, _PIN.upper()])
    assert isinstance(context, PinnedContext)
    assert context.pins == {f"sha256:{_PIN}"}
    assert context.verify_mode is ssl.CERT_NONE
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2


def test_pins_exclude_root_certificates_and_are_bounded() -> None:
    with pytest.raises(StartupError, match="give only one"):
        client_context("roots.pem", [_PIN])
    with pytest.raises(StartupError, match=f"at most {MAX_PINS}"):
        client_context(pins=[_PIN] * (MAX_PINS + 1))
