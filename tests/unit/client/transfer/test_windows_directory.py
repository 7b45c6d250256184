"""Local directories of Windows; test_local_directory has the tests for both systems."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from exec_server.client.transfer import windows_directory

pytestmark = pytest.mark.quick


def test_windows_has_no_modes_and_other_slashes(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    windows_directory.Directory.open(str(tmp_path)).set_mode("d", 0o700)
    assert (tmp_path / "d").stat().st_mode & 0o777 == 0o755
    assert windows_directory.file_mode((tmp_path / "d").stat()) is None
    (tmp_path / "link").symlink_to("\\\\?\\C:\\a\\b")
    assert windows_directory.link_target(str(tmp_path / "link")) == "C:/a/b"


@pytest.mark.parametrize(
    "name",
    [
        *("a:b", "a\\b", "c:", "..", "a.", "a ", "a\n", "a?", '"', "<", "|", "*"),
        *("con", "NUL", "nul.txt", "Com1", "lpt9.tar.gz", "com\xb9", "aux .c", "conin$"),
    ],
)
def test_names_with_another_meaning_on_windows_are_refused(name: str, tmp_path: Path) -> None:
    top = windows_directory.Directory.open(str(tmp_path))
    with pytest.raises(OSError, match=windows_directory.NOT_A_NAME):
        top.open_part(name, None)
    with pytest.raises(OSError, match=windows_directory.NOT_A_NAME):
        top.make_directory(name)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["console", "a.b", ".hidden", "com", "nullable.py", "é ü", "."])
def test_other_names_are_those_of_files(name: str, tmp_path: Path) -> None:
    top = windows_directory.Directory.open(str(tmp_path))
    assert top.lstat(".") == tmp_path.lstat()
    if name != ".":
        os.close(top.open_part(name, None))
        assert os.listdir(tmp_path) == [name]
