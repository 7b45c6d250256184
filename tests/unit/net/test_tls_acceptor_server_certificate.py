"""The certificate of a listener: unusable files, and reading it again."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from tests.support.raw_servers import make_certificate

from exec_server.errors import StartupError
from exec_server.net.tls_acceptor import ServerCertificate


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str]:
    """The files of a certificate and its key."""
    certificate, _ = make_certificate(tmp_path, "localhost")
    return certificate, str(tmp_path / "key.pem")


def test_reloading_replaces_the_context_unless_it_fails(pair: tuple[str, str]) -> None:
    certificate = ServerCertificate(*pair)
    first = certificate.context
    certificate.reload()
    second = certificate.context
    assert second is not first
    Path(pair[0]).write_text("")
    with pytest.raises(StartupError, match="not in PEM format"):
        certificate.reload()
    assert certificate.context is second


def test_unusable_files_are_named(pair: tuple[str, str], tmp_path: Path) -> None:
    certificate, key = pair
    with pytest.raises(StartupError, match=f"cannot read --tls-cert {tmp_path}/none: No such"):
        ServerCertificate(f"{tmp_path}/none", key)
    with pytest.raises(StartupError, match=f"cannot read --tls-key {tmp_path}: Is a directory"):
        ServerCertificate(certificate, str(tmp_path))
    (tmp_path / "other").mkdir()
    make_certificate(tmp_path / "other", "localhost")
    with pytest.raises(StartupError, match="the key is not that of the certificate"):
        ServerCertificate(certificate, f"{tmp_path}/other/key.pem")


def test_an_encrypted_key_asks_for_nothing(pair: tuple[str, str]) -> None:
    path = Path(pair[1])
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret-1"),
        )
    )
    with pytest.raises(StartupError, match=f"--tls-key {path} is encrypted"):
        ServerCertificate(*pair)


def test_a_key_for_all_is_noticed(pair: tuple[str, str]) -> None:
    certificate = ServerCertificate(*pair)
    Path(pair[1]).chmod(0o640)
    assert not certificate.is_key_exposed()
    Path(pair[1]).chmod(0o644)
    assert certificate.is_key_exposed()
