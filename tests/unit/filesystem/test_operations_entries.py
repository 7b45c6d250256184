"""Entries with their details, new files, and paths that need not exist."""

from __future__ import annotations

import base64
import errno
import grp
import os
import pwd
from pathlib import Path

import pytest
from tests.support.trees import do, fails, os_error, uri

from exec_server.errors import InternalError
from exec_server.filesystem import operations
from exec_server.filesystem.safe_write import GUARD
from exec_server.protocol import files as wire
from exec_server.protocol.files import CanonicalizeResult, Done
from exec_server.protocol.paths import path_to_uri

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_bytes(b"abc")
    os.chmod("file", 0o640)
    os.utime("file", ns=(0, 1_700_000_000_123_999_999))
    (tmp_path / "directory").mkdir()
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "dangling").symlink_to("missing")
    (tmp_path / "loop").symlink_to("loop")
    return tmp_path


def listed() -> dict[str, wire.ListedEntry]:
    result = do(wire.ListParams(uri(".")))
    assert isinstance(result, wire.ListResult)
    return {entry.file_name: entry for entry in result.entries}


def test_entries_have_all_details() -> None:
    found = listed()
    time = 1_700_000_000_123
    assert found["file"] == wire.ListedEntry("file", False, True, 3, time, 0o640)
    assert found["link"] == wire.ListedEntry("link", False, True, 3, time, 0o640, "file")
    assert (found["directory"].is_directory, found["directory"].is_file) == (True, False)
    for name, target in (("dangling", "missing"), ("loop", "loop")):
        entry = found[name]
        assert (entry.is_directory, entry.is_file, entry.link_target) == (False, False, target)
        assert entry.size == len(target)


def test_owners_are_named_if_they_are_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert listed()["file"].owner is None
    result = operations.list_(wire.ListParams(uri("."), owners=True))
    owner, group = pwd.getpwuid(os.getuid()).pw_name, grp.getgrgid(os.getgid()).gr_name
    assert {(each.owner, each.group) for each in result.entries} == {(owner, group)}

    def nobody(number: int) -> None:
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.setattr(grp, "getgrgid", nobody)
    result = operations.list_(wire.ListParams(uri("."), owners=True))
    numbers = (str(os.getuid()), str(os.getgid()))
    assert {(each.owner, each.group) for each in result.entries} == {numbers}


def test_names_that_are_no_text_are_shown_with_replacement_characters() -> None:
    Path(os.fsdecode(b"bad\xff")).touch()
    assert "bad\N{REPLACEMENT CHARACTER}" in listed()


def test_a_directory_with_too_many_entries_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "READ_DIRECTORY_LIMIT", 5)
    assert len(listed()) == 5
    Path("one more").touch()
    fails(wire.ListParams(uri(".")), InternalError("fs/list: more than 5 entries"))


def test_an_entry_that_vanishes_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_link(path: str) -> str:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    monkeypatch.setattr(os, "readlink", read_link)
    assert sorted(listed()) == ["directory", "file"]


def test_a_hidden_target_is_not_described(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(path: str, writing: bool) -> int:
        return errno.EACCES if path == f"{folder}/file" else 0

    monkeypatch.setattr(GUARD, "_path_checks", [check])
    assert listed()["link"].size == len("file")


def test_a_file_is_no_directory() -> None:
    fails(wire.ListParams(uri("file")), os_error(errno.ENOTDIR))
    fails(wire.ListParams(uri("missing")), os_error(errno.ENOENT))


@pytest.mark.parametrize("size", [0, 3, 100_000])
def test_a_new_file_is_created(size: int) -> None:
    data = bytes(size)
    text = base64.b64encode(data).decode()
    assert do(wire.CreateParams(uri("new"), text)) == Done()
    assert Path("new").read_bytes() == data
    for name in ("new", "file", "directory", "dangling"):
        fails(wire.CreateParams(uri(name), text), os_error(errno.EEXIST))
    fails(wire.CreateParams(uri("missing/new"), text), os_error(errno.ENOENT))
    assert Path("file").read_bytes() == b"abc"


@pytest.mark.parametrize(
    ("path", "resolved"),
    [
        ("link", "file"),
        ("missing/x", "missing/x"),
        ("dangling/x", "missing/x"),
        ("loop/x", "loop/x"),
        ("directory/../link", "file"),
    ],
)
def test_paths_are_resolved_as_far_as_they_exist(folder: Path, path: str, resolved: str) -> None:
    real = os.path.realpath(folder)
    expected = CanonicalizeResult(path_to_uri(f"{real}/{resolved}"))
    assert do(wire.ResolveParams(uri(path))) == expected
