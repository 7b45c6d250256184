"""TLS of the server: authorities and pins, replaced certificates, and peers that speak no TLS."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.certificates import Pair, make_pair
from tests.support.cli import run_client, stderr_text
from tests.support.client import Server, run_command, scaled, start_server
from tests.support.raw_links import upgrade_request
from tests.support.server_internals import eventually, open_descriptors, start_patched

from exec_server import CertificateRejected, ConnectFailed, StartupError, sync
from exec_server.net.client_tls import tls_context
from exec_server.sync import connect

_LISTEN = ("--listen", "wss://127.0.0.1:0")


@dataclass(frozen=True)
class Secure:
    """A server whose certificate is of an authority of its own."""

    server: Server
    authority: Pair
    pair: Pair

    @property
    def by_name(self) -> str:
        return self.server.url.replace("127.0.0.1", "localhost")


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    directory = tmp_path_factory.mktemp("tls")
    authority = make_pair(directory, "authority")
    pair = make_pair(directory, "server", "localhost", issuer=authority)
    with start_server("ours", *_LISTEN, *pair.flags, "--log-level", "info") as server:
        yield Secure(server, authority, pair)


def _works(environment: sync.Environment) -> None:
    with environment:
        assert environment.run(["echo", "hi"]).stdout == b"hi\n"


# ---- trust ----------------------------------------------------------------------------


@pytest.mark.quick
def test_an_authority_or_a_pin_is_trusted(secure: Secure) -> None:
    _works(connect(secure.by_name, ca_file=str(secure.authority.certificate)))
    _works(connect(secure.server.url, pin=secure.pair.fingerprint))
    _works(connect(secure.server.url, pin=["00" * 32, secure.pair.fingerprint.upper()]))
    context = tls_context(str(secure.authority.certificate))
    _works(connect(secure.by_name, tls=context))


def test_other_certificates_are_rejected_with_the_reason(secure: Secure) -> None:
    with pytest.raises(CertificateRejected, match="unable to get local issuer certificate"):
        connect(secure.by_name)
    with pytest.raises(CertificateRejected, match=r"not valid for '127\.0\.0\.1'"):
        connect(secure.server.url, ca_file=str(secure.authority.certificate))
    with pytest.raises(
        CertificateRejected, match=f"{secure.pair.fingerprint}, which is not pinned"
    ):
        connect(secure.by_name, pin="00" * 32)
    with pytest.raises(StartupError, match="a pin replaces"):
        connect(secure.by_name, pin="00" * 32, ca_file=str(secure.authority.certificate))
    with pytest.raises(StartupError, match="a pin is for wss://"):
        connect("ws://127.0.0.1:1", pin="00" * 32)


def test_commands_explain_a_rejected_certificate(secure: Secure, tmp_path: Path) -> None:
    unknown = run_client("info", secure.by_name)
    assert unknown.returncode == 1
    assert "certificate verify failed: unable to get local issuer" in stderr_text(unknown)
    assert "pass its fingerprint with --pin" in stderr_text(unknown)
    wrong = run_client("exec", "--pin", "00" * 32, secure.by_name, "--", "true")
    assert wrong.returncode == 255
    assert f"has the fingerprint {secure.pair.fingerprint}" in stderr_text(wrong)
    config = tmp_path / "exec-server"
    config.mkdir()
    (config / "targets.toml").write_text(
        f'[pinned]\nurl = "{secure.server.url}"\npin = "{secure.pair.fingerprint}"\n'
        f'[named]\nurl = "{secure.by_name}"\nca_file = "{secure.authority.certificate}"\n'
    )
    for name in ("pinned", "named"):
        ended = run_client("exec", name, "--", "echo", "hi", config=config)
        assert (ended.returncode, ended.stdout) == (0, b"hi\n"), stderr_text(ended)


def test_an_expired_certificate_is_rejected_unless_it_is_pinned(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, "old", "127.0.0.1", days=-1)
    with start_server("ours", *_LISTEN, *pair.flags) as server:
        with pytest.raises(CertificateRejected, match="certificate has expired"):
            connect(server.url, ca_file=str(pair.certificate))
        _works(connect(server.url, pin=pair.fingerprint))


def test_a_certificate_of_our_own_making(tmp_path: Path) -> None:
    made = run_client("tls-init", str(tmp_path))
    assert made.returncode == 0, stderr_text(made)
    found = re.search(rb"^fingerprint  (sha256:[0-9a-f]{64})$", made.stdout, re.MULTILINE)
    assert found is not None
    pair = Pair(tmp_path / "cert.pem", tmp_path / "key.pem")
    with start_server("ours", *_LISTEN, *pair.flags) as server:
        assert server.stderr() == ""
        _works(connect(server.url, pin=found[1].decode()))
        _works(connect(server.url, ca_file=str(pair.certificate)))
        with pytest.raises(CertificateRejected, match="self-signed certificate"):
            connect(server.url)


# ---- the certificate ------------------------------------------------------------------


def test_a_hangup_reads_the_certificate_again(tmp_path: Path) -> None:
    first, second = make_pair(tmp_path, "first"), make_pair(tmp_path, "second")
    live = Pair(tmp_path / "live.pem", tmp_path / "live.key")

    def install(pair: Pair) -> None:
        shutil.copy(pair.certificate, live.certificate)
        shutil.copy(pair.key, live.key)

    install(first)
    with start_server("ours", *_LISTEN, *live.flags, "--log-level", "info") as server:
        with connect(server.url, pin=first.fingerprint) as env:
            install(second)
            server.process.send_signal(signal.SIGHUP)
            eventually("reloaded", lambda: "was read again" in server.stderr())
            assert env.run(["true"]).exit_code == 0
            _works(connect(server.url, pin=second.fingerprint))
            with pytest.raises(CertificateRejected):
                connect(server.url, pin=first.fingerprint)
            live.key.write_text("")
            server.process.send_signal(signal.SIGHUP)
            eventually("refused", lambda: "the former certificate stays" in server.stderr())
            _works(connect(server.url, pin=second.fingerprint))
        assert "PRIVATE" not in server.stderr()


def test_unusable_files_are_start_up_errors(tmp_path: Path) -> None:
    pair, other = make_pair(tmp_path, "server"), make_pair(tmp_path, "other")
    mixed = run_command("ours", *_LISTEN, *Pair(pair.certificate, other.key).flags)
    assert mixed.returncode == 1
    assert "the key is not that of the certificate" in mixed.stderr
    useless = run_command("ours", "--listen", "ws://127.0.0.1:0", *pair.flags)
    assert useless.returncode == 1
    assert "--tls-cert and --tls-key require --listen wss://IP:PORT" in useless.stderr


def test_a_key_that_others_can_read_is_a_warning(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, "server")
    pair.key.chmod(0o644)
    with start_server("ours", *_LISTEN, *pair.flags) as server:
        warning = (
            f"Warning: other users can read --tls-key {pair.key}: run `chmod 600 {pair.key}`\n"
        )
        assert server.stderr() == warning


# ---- peers ----------------------------------------------------------------------------


def _is_closed(connection: socket.socket) -> bool:
    connection.settimeout(scaled(10))
    try:
        while connection.recv(4096):
            pass
    except ConnectionError:
        pass
    return True


def test_peers_without_tls_are_cut_off(secure: Secure) -> None:
    plain = secure.server.url.replace("wss:", "ws:")
    with pytest.raises(ConnectFailed, match=r"if the server has TLS, use wss://|reset"):
        connect(plain)
    for data in (b"\x16\x03\x01\xff\xff" + b"\0" * 70_000, b"\x80" * 100, b"{}\n" * 9):
        with secure.server.dial() as connection:
            with contextlib.suppress(ConnectionError):
                connection.sendall(data)
            assert _is_closed(connection)
    _works(connect(secure.server.url, pin=secure.pair.fingerprint))
    assert "TLS handshake failed: " in secure.server.stderr()


def test_a_server_without_tls_is_named(secure: Secure) -> None:
    with start_server("ours") as server:
        url = server.url.replace("ws:", "wss:")
        with pytest.raises(ConnectFailed, match="the server does not speak TLS at this port"):
            connect(url)
        ended = run_client("info", url)
    assert "ws:// is for servers without TLS" in stderr_text(ended)


def test_stalled_handshakes_are_bounded_in_time_and_number(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, "server")
    limits = {"net.tls_acceptor.HANDSHAKE_SECONDS": scaled(1.0), "net.admission.MAX_HANDSHAKES": 3}
    with start_patched(limits, *_LISTEN, *pair.flags) as server, contextlib.ExitStack() as stack:
        _works(connect(server.url, pin=pair.fingerprint))
        before = open_descriptors(server)
        stalled = [stack.enter_context(server.dial()) for _ in range(6)]
        for oldest in stalled[:3]:
            assert _is_closed(oldest)
        _works(connect(server.url, pin=pair.fingerprint))
        for rest in stalled[3:]:
            assert _is_closed(rest)
        eventually("no descriptor is left", lambda: open_descriptors(server) <= before)


def test_http_works_over_tls(secure: Secure) -> None:
    context = tls_context(str(secure.authority.certificate))

    def ask(request: bytes) -> bytes:
        raw = secure.server.dial()
        with context.wrap_socket(raw, server_hostname="localhost") as connection:
            connection.settimeout(scaled(10))
            connection.sendall(request)
            answer = b""
            while data := connection.recv(4096):  # the server says properly that TLS ends
                answer += data
            return answer

    ready = ask(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert ready.startswith(b"HTTP/1.1 200 OK\r\n")
    page = upgrade_request(headers=[("Origin", "https://example.com")], host="localhost")
    refused = ask(page.replace(b"Connection: Upgrade", b"Connection: Upgrade, close"))
    assert refused.startswith(b"HTTP/1.1 403 ")


def test_long_output_and_large_files_arrive_whole(secure: Secure, tmp_path: Path) -> None:
    path = tmp_path / "file"
    with connect(secure.server.url, pin=secure.pair.fingerprint) as env:
        size = 40_000_000
        result = env.run(["head", "-c", str(size), "/dev/zero"], output_limit=size)
        assert len(result.stdout) == size
        data = bytes(range(256)) * 40_000
        env.files.write(path, data)
        assert path.read_bytes() == data
        assert env.files.read(path) == data
