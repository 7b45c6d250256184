"""`exec-server tls-init`: its files, their modes, and the commands that it prints."""

from __future__ import annotations

import os
import re
import shlex
import socket
import stat
from pathlib import Path

import pytest

from exec_server.cli import info, main, tls
from exec_server.cli.serve.arguments import parse
from exec_server.client.targets import load_targets
from exec_server.net.self_signed import read_facts
from exec_server.net.tls_acceptor import ServerCertificate


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default directory, which does not exist yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "exec-server" / "tls"


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_key_is_for_its_owner(directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    umask = os.umask(0)
    try:
        assert main.run_client("tls-init", []) == 0
    finally:
        os.umask(umask)
    key, certificate = directory / "key.pem", directory / "cert.pem"
    assert (_mode(directory), _mode(key), _mode(certificate)) == (0o700, 0o600, 0o644)
    ServerCertificate(str(certificate), str(key))
    facts = read_facts(certificate.read_bytes())
    assert {"localhost", "127.0.0.1", "::1"} < set(facts.names)
    out = capfd.readouterr().out
    assert f"fingerprint  {facts.fingerprint}\n" in out
    assert "PRIVATE" not in out
    assert sorted(path.name for path in directory.iterdir()) == ["cert.pem", "key.pem"]


def test_existing_files_are_replaced_only_by_force(
    directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main.run_client("tls-init", []) == 0
    first = read_facts((directory / "cert.pem").read_bytes()).fingerprint
    capfd.readouterr()
    assert main.run_client("tls-init", []) == 1
    assert "exist already; --show prints the fingerprint, --force" in capfd.readouterr().err
    assert main.run_client("tls-init", ["--show"]) == 0
    assert first in capfd.readouterr().out
    assert main.run_client("tls-init", ["--force"]) == 0
    assert first not in capfd.readouterr().out
    assert main.run_client("tls-init", ["--force", "--show"]) == 2


def test_the_printed_commands_can_be_pasted(
    directory: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "a b"
    assert main.run_client("tls-init", ["--name", "2001:db8::7", str(place)]) == 0
    out = capfd.readouterr().out.replace("\\\n", "")
    serve, client = re.findall(r"^  exec-server (.*)$", out, re.MULTILINE)
    arguments = parse(shlex.split(serve))
    assert arguments.tls_cert == str(place / "cert.pem")
    assert arguments.tls_key == str(place / "key.pem")
    asked = info.build_parser().parse_words(shlex.split(client.removeprefix("info ")))
    assert asked.target == "wss://[2001:db8::7]:7700"
    table = out[out.index("  [box]") :].replace("\n  ", "\n").strip()
    directory.parent.mkdir(exist_ok=True)
    (directory.parent / "targets.toml").write_text(table)
    assert load_targets()["box"].access.pin == tuple(asked.pin)


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--name", "a b"], 2, "--name: `a b` is neither a host name nor an address"),
        (["--days", "0"], 2, "number of days"),
        (["--days", "36501"], 2, "number of days"),
        (["--show"], 1, "cert.pem: No such file or directory"),
        (["/dev/null/x"], 1, "/dev/null/x"),
    ],
)
def test_errors_are_named(
    directory: Path, capfd: pytest.CaptureFixture[str], words: list[str], code: int, text: str
) -> None:
    assert main.run_client("tls-init", words) == code
    assert text in capfd.readouterr().err
    assert not directory.exists()


def test_a_file_that_is_no_certificate_is_named(
    directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    directory.mkdir(parents=True)
    (directory / "cert.pem").write_text("x")
    assert main.run_client("tls-init", ["--show"]) == 1
    assert "cert.pem is not a certificate in PEM format" in capfd.readouterr().err


def test_an_unusable_host_name_is_left_out(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "no_host name")
    assert main.run_client("tls-init", []) == 0
    assert "names        localhost, 127.0.0.1, ::1\n" in capfd.readouterr().out


def test_the_usage_names_the_directory() -> None:
    assert "[DIR]" in tls.build_parser().format_usage()
