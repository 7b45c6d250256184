"""HostDisk: existing, missing and unexaminable paths."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from exec_server.sandbox.policy.resolver import Unexaminable
from exec_server.sandbox.runtime.disk import HostDisk

_DISK = HostDisk(sees_placeholders=True)
_CALLS: dict[str, Callable[[str], object]] = {
    "status": _DISK.status,
    "link_target": _DISK.link_target,
    "head": lambda path: _DISK.head(path, 9),
}


@pytest.mark.parametrize("call", _CALLS.values(), ids=_CALLS)
def test_only_what_is_not_there_is_missing(call: Callable[[str], object], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert not call(str(tmp_path / "none"))
    assert not call(str(tmp_path / "none/none"))
    assert not call(str(tmp_path / "file/none"))
    path = str(tmp_path / ("x" * 300))
    with pytest.raises(Unexaminable) as refused:
        call(path)
    assert refused.value.message == (
        f"cannot lay out the sandbox: {path} cannot be examined: Filename too long (os error 36)"
    )


def test_what_was_replaced_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")
    (tmp_path / "link").symlink_to("file")
    assert _DISK.link_target(str(tmp_path / "file")) == ""
    assert _DISK.link_target(str(tmp_path / "link")) == "file"
    assert _DISK.head(str(tmp_path / "file"), 4) == b"cont"
    assert _DISK.head(str(tmp_path / "link"), 4) == b""
    assert _DISK.head(str(tmp_path), 4) == b""


@pytest.mark.skipif(os.geteuid() == 0, reason="root looks into everything")
@pytest.mark.parametrize("call", _CALLS.values(), ids=_CALLS)
def test_a_closed_directory_gives_no_answer(call: Callable[[str], object], tmp_path: Path) -> None:
    tmp_path.chmod(0)
    try:
        with pytest.raises(Unexaminable, match="Permission denied"):
            call(str(tmp_path / "none"))
    finally:
        tmp_path.chmod(0o755)


def test_owners_and_sticky_directories_are_reported(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    (tmp_path / "file").touch()
    (tmp_path / "file").chmod(0o1644)
    found = _DISK.status(str(tmp_path)), _DISK.status(str(tmp_path / "file"))
    assert [(node.owner, node.is_sticky) for node in found if node is not None] == [
        (os.geteuid(), True),
        (os.geteuid(), False),
    ]
    assert _DISK.user == os.geteuid()


def test_a_lease_on_a_file_gives_no_answer(tmp_path: Path) -> None:
    path = tmp_path / ".git"
    path.write_text("gitdir: repository")
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)  # ignored by default
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    try:
        with pytest.raises(Unexaminable, match="Resource temporarily unavailable"):
            _DISK.head(str(path), 100)
    finally:
        os.close(descriptor)
    assert _DISK.head(str(path), 6) == b"gitdir"


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO])
def test_a_failure_names_the_path_the_reason_and_another_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuse)
    disk = HostDisk(sees_placeholders=True)
    with pytest.raises(Unexaminable) as refused:
        disk.head(str(tmp_path), 9)
    assert refused.value.message.endswith(f"(os error {number})")
    disk.user = os.geteuid() + 1
    with pytest.raises(Unexaminable) as refused:
        disk.head(str(tmp_path), 9)
    assert refused.value.message.endswith(f"; it belongs to uid {os.geteuid()}")


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.EIO])
def test_a_new_placeholder_that_cannot_be_examined_is_no_ordinary_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path = tmp_path / ".git"
    path.mkdir(0o1700)
    disk = HostDisk(sees_placeholders=False)
    assert disk.status(str(path)) is None

    def refuse(path: str) -> list[str]:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, "listdir", refuse)
        with pytest.raises(Unexaminable, match=rf"\(os error {number}\)$"):
            disk.status(str(path))
