"""Users of the machine, and threads that act as one of them."""

from __future__ import annotations

import os
import pwd
import tempfile
import threading
from pathlib import Path

import pytest

from exec_server.errors import InvalidParams
from exec_server.host import libc

_NOBODY = pwd.getpwuid(65534)
_NEEDS_ROOT = pytest.mark.skipif(not libc.can_switch(), reason="needs root rights")


@pytest.mark.parametrize("text", [_NOBODY.pw_name, "65534"])
def test_a_user_is_found_by_name_or_number(text: str) -> None:
    found = libc.find_user(text)
    assert (found.name, found.uid, found.gid) == (_NOBODY.pw_name, 65534, _NOBODY.pw_gid)
    assert found.gid in found.groups
    assert found.home == _NOBODY.pw_dir
    assert found.shell


@pytest.mark.parametrize("text", ["", "no such user", "4294967294", "9" * 30, "a\0b", "x" * 300])
def test_an_unknown_user_is_named(text: str) -> None:
    with pytest.raises(InvalidParams) as caught:
        libc.find_user(text)
    assert caught.value.message == f"unknown user {text[:256]}"


def test_the_rights_of_root_are_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = tmp_path / "status"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    for text, expected in (
        ("CapEff:\t00000000000000c0\n", True),
        ("Name:\tx\nCapEff:\t0000000000000080\n", False),
        ("CapEff:\t0000000000000000\n", False),
        ("Name:\tx\n", False),
    ):
        status.write_text(text)
        assert libc.can_switch(str(status)) is expected
    assert not libc.can_switch(str(tmp_path / "missing"))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert not libc.can_switch(str(status))


@_NEEDS_ROOT
def test_a_thread_acts_as_a_user_and_others_do_not(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    secret = tmp_path / "secret"
    secret.write_bytes(b"x")
    secret.chmod(0o600)
    # pytest makes them for its own user; workers of pytest-xdist add one more.
    for above in tmp_path.parents[:3]:
        if above != Path(tempfile.gettempdir()):
            above.chmod(0o755)
    seen: list[bytes] = []
    switched = threading.Event()

    def read() -> None:
        switched.wait(60)
        seen.append(secret.read_bytes())

    other = threading.Thread(target=read)
    other.start()
    with libc.acting_as(libc.find_user("65534")):
        with pytest.raises(PermissionError):
            secret.read_bytes()
        with pytest.raises(PermissionError):
            secret.chmod(0o644)
        (tmp_path / "new").touch()
        switched.set()
        other.join()
    assert (tmp_path / "new").stat().st_uid == 65534
    assert seen == [b"x"]
    assert secret.read_bytes() == b"x"
    assert os.getgroups() == _groups()


def _groups() -> list[int]:
    return [int(word) for word in _status("Groups")]


def _status(name: str) -> list[str]:
    """A line of the kernel's description of this thread."""
    lines = Path("/proc/thread-self/status").read_text().splitlines()
    return next(line for line in lines if line.startswith(f"{name}:")).split()[1:]


@_NEEDS_ROOT
def test_no_right_of_root_is_left_in_proc() -> None:
    """/proc/sys asks for the effective id of a thread, /proc/PID for one of its capabilities."""
    setting = Path("/proc/sys/vm/stat_interval")
    os.close(os.open(setting, os.O_WRONLY))
    directory = f"/proc/{os.getppid()}/cwd"
    os.readlink(directory)
    with libc.acting_as(libc.find_user("65534")):
        with pytest.raises(PermissionError):
            os.close(os.open(setting, os.O_WRONLY))
        with pytest.raises(PermissionError):
            os.readlink(directory)
        words = _status("CapEff"), _status("Uid"), _status("Gid")
    assert words == (["0" * 16], ["0", "65534", "0", "65534"], ["0", "65534", "0", "65534"])
    assert libc.can_switch()
    os.close(os.open(setting, os.O_WRONLY))


@_NEEDS_ROOT
def test_a_thread_is_itself_again_after_an_error() -> None:
    before = _groups()
    user = libc.find_user("65534")
    with pytest.raises(ZeroDivisionError), libc.acting_as(user):
        raise ZeroDivisionError(_groups() == sorted(user.groups))
    assert _groups() == before
    os.close(os.open("/etc/shadow", os.O_RDONLY))
