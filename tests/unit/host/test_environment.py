"""The description of the machine that clients get."""

from __future__ import annotations

import os
import pwd
from collections import namedtuple
from pathlib import Path

import pytest

from exec_server import __version__
from exec_server.host import environment
from exec_server.protocol.session import Shell

_Entry = namedtuple("_Entry", "pw_shell pw_dir")


def _set_shell(monkeypatch: pytest.MonkeyPatch, shell: str | None) -> None:
    def entry(uid: int) -> _Entry:
        if shell is None:
            raise KeyError(uid)
        return _Entry(shell, "/home/me")

    monkeypatch.setattr(pwd, "getpwuid", entry)


@pytest.mark.parametrize(
    ("found", "expected"), [("/usr/bin/zsh", "/usr/bin/zsh"), ("", "/bin/sh"), (None, "/bin/sh")]
)
def test_the_login_shell_is_that_of_the_user_database(
    monkeypatch: pytest.MonkeyPatch, found: str | None, expected: str
) -> None:
    monkeypatch.setenv("SHELL", "/bin/other")
    _set_shell(monkeypatch, found)
    assert environment.login_shell() == expected


@pytest.mark.parametrize(
    ("login_shell", "executable", "expected"),
    [
        ("/opt/zsh", (), Shell("zsh", "/opt/zsh")),
        ("/bin/fish", ("/usr/bin/bash", "/bin/zsh"), Shell("bash", "/usr/bin/bash")),
        ("/usr/sbin/nologin", ("/usr/bin/zsh",), Shell("zsh", "/usr/bin/zsh")),
        ("/usr/sbin/nologin", (), Shell("sh", "/bin/sh")),
    ],
)
def test_clients_get_a_shell_that_they_know(
    monkeypatch: pytest.MonkeyPatch, login_shell: str, executable: tuple[str, ...], expected: Shell
) -> None:
    _set_shell(monkeypatch, login_shell)
    monkeypatch.setattr(os, "access", lambda path, mode: path in executable)
    assert environment.describe({}).shell == expected


def test_directories_come_from_the_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    info = environment.describe({"HOME": "/home/me", "TMPDIR": "/my tmp"})
    assert info.executor_version == f"0.169.0+exec-server.{__version__}"
    assert info.cwd == f"file://{os.getcwd()}"
    assert info.user_home_dir == "file:///home/me"
    assert info.temporary_directories == ["file:///my%20tmp"]
    assert info.temp_dir == "file:///my%20tmp"


@pytest.mark.parametrize("variables", [{}, {"HOME": ""}])
def test_the_home_of_the_user_database(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    _set_shell(monkeypatch, "/bin/bash")
    assert environment.describe(variables).user_home_dir == "file:///home/me"
    _set_shell(monkeypatch, None)
    assert environment.describe(variables).user_home_dir is None


def test_a_relative_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    info = environment.describe({"TMPDIR": "a/../b"})
    assert info.temporary_directories == [info.temp_dir] == [f"file://{os.getcwd()}/b"]


def test_variables_without_a_usable_value_are_left_out() -> None:
    info = environment.describe({"HOME": "relative", "TMPDIR": ""})
    assert info.user_home_dir is None
    assert info.temporary_directories == []
    assert info.temp_dir == "file:///tmp"


def test_a_removed_working_directory_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    info = environment.describe({"TMPDIR": "relative"})
    assert info.cwd is None
    assert (info.temporary_directories, info.temp_dir) == ([], "file:///tmp")


def test_the_identity_of_an_installation_does_not_change() -> None:
    one, two = environment.describe({}), environment.describe({"HOME": "/x"})
    assert one.provider_id == two.provider_id
    assert one.provider_id.startswith("sha256:")
