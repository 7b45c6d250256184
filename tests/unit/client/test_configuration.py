"""Configuration files that only the user can read."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from exec_server.cli import main, named_targets
from exec_server.client import configuration, logins
from exec_server.client.configuration import changing, write_private_file
from exec_server.errors import StartupError


def test_a_file_and_its_directory_are_for_the_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "a" / "file"
    umask = os.umask(0)
    try:
        write_private_file(path, b"one")
        write_private_file(path, b"two")
    finally:
        os.umask(umask)
    assert path.read_bytes() == b"two"
    assert [stat.S_IMODE(each.stat().st_mode) for each in (path.parent, path)] == [0o700, 0o600]


def test_the_umask_does_not_narrow_a_mode_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    umask = os.umask(0o077)
    try:
        write_private_file(tmp_path / "with modes", b"x", 0o644)
        monkeypatch.setattr(configuration, "_HAS_MODES", False)
        write_private_file(tmp_path / "without", b"x", 0o644)
    finally:
        os.umask(umask)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("with modes", "without")]
    assert modes == [0o644, 0o600]


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").mkdir()
    with pytest.raises(OSError):
        write_private_file(tmp_path / "cert.pem", b"x", 0o644)
    assert [path.name for path in tmp_path.iterdir()] == ["cert.pem"]


def _is_locked(directory: Path) -> bool:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def test_one_program_changes_a_file_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new" / "file"
    monkeypatch.setattr(configuration, "LOCK_SECONDS", 0.0)
    with changing(path):
        assert _is_locked(path.parent)
        text = f"another program is changing {path}"
        with pytest.raises(StartupError, match=text), changing(path):
            pass
    assert not _is_locked(path.parent)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_without_locks_files_are_changed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", refuse)
        with changing(tmp_path / "file"):
            pass
    monkeypatch.setattr(configuration, "_HAS_MODES", False)
    with changing(tmp_path / "file"):
        assert not _is_locked(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(StartupError, match="cannot write"), changing(tmp_path / "file" / "x"):
        pass


@pytest.mark.parametrize("change", ["add", "remove", "login", "logout"])
def test_files_are_locked_while_they_are_changed(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From before the reading on, and so that none of several changes is lost."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    directory = tmp_path / "exec-server"
    login = logins.Login("https://r.net", {"client": "t"}, None, ())
    changes: dict[str, Callable[[], object]] = {
        "add": lambda: main.run_client("targets", ["add", "b", "ws://h"]),
        "remove": lambda: main.run_client("targets", ["remove", "a"]),
        "login": lambda: logins.save_login(login, "file"),
        "logout": lambda: logins.remove_login("https://r.net"),
    }
    main.run_client("targets", ["add", "a", "ws://h"])
    logins.save_login(login, "file")
    locked = []
    module = named_targets if change in ("add", "remove") else logins

    for name in ("read_configuration", "write_private_file"):
        function = getattr(module, name)

        def watched(*arguments: object, function: Callable[..., object] = function) -> object:
            locked.append(_is_locked(directory))
            return function(*arguments)

        monkeypatch.setattr(module, name, watched)
    changes[change]()
    assert locked == [True, True]
