"""Local directories of POSIX; test_local_directory has the tests for both systems."""

from __future__ import annotations

from pathlib import Path

import pytest

from exec_server.client.transfer import posix_directory

pytestmark = pytest.mark.quick


def test_modes_are_those_of_posix(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    top = posix_directory.Directory.open(str(tmp_path))
    top.set_mode("d", 0o700)
    top.close()
    assert posix_directory.file_mode((tmp_path / "d").stat()) == 0o700
    (tmp_path / "link").symlink_to("a\\b")
    assert posix_directory.link_target(str(tmp_path / "link")) == "a\\b"
