"""Configuration files that only the user can read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from exec_server.client import configuration
from exec_server.client.configuration import write_private_file


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
