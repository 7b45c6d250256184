"""CertificateAuthority: one file, and certificates that only it makes valid."""

from __future__ import annotations

import os
import ssl
import stat

from exec_server.proxy import authority as module
from exec_server.proxy.authority import CertificateAuthority


def _handshake(server: ssl.SSLContext, trusted: str, host: str) -> None:
    """A TLS handshake in memory; raises ssl.SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context(cafile=trusted)
    ours = server.wrap_bio(to_server, to_client, server_side=True)
    theirs = client.wrap_bio(to_client, to_server, server_hostname=host)
    for _ in range(3):
        for end in (theirs, ours):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                pass


def test_certificates_are_trusted_with_the_bundle_only() -> None:
    authority, other = CertificateAuthority({}), CertificateAuthority({})
    try:
        trusted_file, other_file = authority.file.verified().path, other.file.verified().path
        context = authority.context("api.github.com")
        assert authority.context("api.github.com") is context
        _handshake(context, trusted_file, "api.github.com")
        for trusted, host in ((other_file, "api.github.com"), (trusted_file, "b.test")):
            try:
                _handshake(context, trusted, host)
            except ssl.SSLCertVerificationError:
                continue
            raise AssertionError("accepted")
        assert stat.S_IMODE(os.stat(trusted_file).st_mode) == 0o644
        with open(trusted_file) as file:
            assert "PRIVATE" not in file.read()
    finally:
        authority.close()
        other.close()
    assert not os.path.exists(trusted_file)


def test_certificates_are_limited(monkeypatch: object) -> None:
    authority = CertificateAuthority({})
    try:
        first = authority.context("h0.test")
        for number in range(1, module.MAX_HOSTS + 1):
            authority._contexts[f"h{number}.test"] = first
            if len(authority._contexts) >= module.MAX_HOSTS:
                break
        authority.context("new.test")
        assert len(authority._contexts) == module.MAX_HOSTS
        assert authority.context("h0.test") is not first
    finally:
        authority.close()
