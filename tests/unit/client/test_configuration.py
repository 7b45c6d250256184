"""Configuration files that only the user can read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

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


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").mkdir()
    with pytest.raises(OSError):
        write_private_file(tmp_path / "cert.pem", b"x", 0o644)
    assert [path.name for path in tmp_path.iterdir()] == ["cert.pem"]
