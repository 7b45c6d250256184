"""The systemd service of `exec-server up`: its unit file, and the calls of systemctl."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from exec_server.cli.serve import up
from exec_server.errors import StartupError
from exec_server.host import interpreter


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with the words of each call of a systemctl that always succeeds."""
    record = tmp_path / "calls"
    script = tmp_path / "bin" / "systemctl"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\necho "$@" >> {record}\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent))
    monkeypatch.setattr(interpreter, "SYSTEM_DIRECTORIES", ())
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return record


def test_a_service_is_installed_and_removed(calls: Path) -> None:
    text = up.install_service("https://r", "box", ["--ca-file", "/my ca.pem"])
    assert "journalctl --user -u exec-server-up.service" in text
    unit = up.unit_path()
    assert (
        '"up" "https://r" "--environment-id" "box" "--ca-file" "/my ca.pem"\n' in unit.read_text()
    )
    assert "is stopped and removed" in up.uninstall_service()
    assert not unit.exists()
    assert calls.read_text().splitlines() == [
        "--user daemon-reload",
        "--user enable --now exec-server-up.service",
        "--user disable --now exec-server-up.service",
        "--user daemon-reload",
    ]
    with pytest.raises(StartupError, match="the service is not installed"):
        up.uninstall_service()


def test_words_of_the_command_are_quoted_for_systemd() -> None:
    text = up.unit_text("https://r/%41", "b", [], ["/opt/my $dir/python", 'a"b\\'])
    assert 'ExecStart="/opt/my $$dir/python" "a\\"b\\\\" "up" "https://r/%%41"' in text


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / up.UNIT
    unit.write_text(up.unit_text("https://r", "box", [], interpreter.server_words(os.environ)))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--user", "--man=no", str(unit)],
        capture_output=True,
        check=False,
    )
    assert b"exec-server-up" not in done.stderr, done.stderr


def test_failures_name_the_call(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = calls.parent / "bin" / "systemctl"
    script.write_text("#!/bin/sh\necho Failed to connect to bus >&2\nexit 1\n")
    with pytest.raises(StartupError, match="daemon-reload` failed: Failed to connect to bus\nSer"):
        up.install_service("https://r", "box")
    assert not up.unit_path().exists()
    script.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(StartupError, match="exit code 3"):
        up.install_service("https://r", "box")
    script.write_text("#!/no/such/shell\n")
    with pytest.raises(StartupError, match="daemon-reload` failed: "):
        up.install_service("https://r", "box")
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(StartupError, match="systemctl is not installed"):
        up.install_service("https://r", "box")


def test_a_failure_keeps_what_was_installed(calls: Path) -> None:
    up.install_service("https://r", "box")
    script = calls.parent / "bin" / "systemctl"
    script.write_text("#!/bin/sh\necho Failed to connect to bus >&2\nexit 1\n")
    with pytest.raises(StartupError, match="need a session of systemd"):
        up.install_service("https://r", "box")
    with pytest.raises(StartupError, match="need a session of systemd"):
        up.uninstall_service()
    assert up.unit_path().exists()


def test_a_unit_that_cannot_be_written_is_reported(calls: Path) -> None:
    (calls.parent / "config").write_text("in the way")
    with pytest.raises(StartupError, match="cannot write"):
        up.install_service("https://r", "box")


def test_a_systemctl_of_a_project_is_not_called(
    calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpreter, "find_system_program", lambda name: f"/nonexistent/{name}")
    with pytest.raises(StartupError, match="/nonexistent/systemctl"):
        up.install_service("https://r", "box")
    assert not calls.exists()
