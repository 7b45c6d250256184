"""Bounded looks at files: limits and warnings."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.trees import DiskFiles, write_files

from exec_server.codex import bundle
from exec_server.codex.bundle import CapabilityFiles, ResponseBudget
from exec_server.errors import InvalidRequest, NotFound
from exec_server.protocol.codex import CapabilityFile
from exec_server.protocol.paths import PathUri, path_to_uri


def _read(path: Path, files: DiskFiles | None = None) -> tuple[CapabilityFile | None, list[str]]:
    looks = CapabilityFiles(files or DiskFiles(), ResponseBudget())
    return looks.read(path_to_uri(str(path))), looks.warnings


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"\xff", "invalid utf-8 sequence of 1 bytes from index 0"),
        (b"ab\xe2\x82", "incomplete utf-8 byte sequence from index 2"),
        (b"\xf0\x90\x28\xbc", "invalid utf-8 sequence of 2 bytes from index 0"),
        (b"\xed\xa0\x80", "invalid utf-8 sequence of 1 bytes from index 0"),
    ],
)
def test_bytes_that_are_no_text(data: bytes, fault: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(data)
    text = f"capability file {path_to_uri(str(tmp_path / 'f'))} is not UTF-8: {fault}"
    assert _read(tmp_path / "f") == (None, [text])


def test_what_is_no_file_is_left_out_silently(tmp_path: Path) -> None:
    assert _read(tmp_path) == (None, [])
    assert _read(tmp_path / "none") == (None, [])


def test_faults_are_warnings(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    uri = path_to_uri(str(tmp_path / "f"))
    below = f"failed to inspect capability file {uri}/g: Not a directory (os error 20)"
    assert _read(tmp_path / "f/g") == (None, [below])
    denied = f"failed to read capability file {uri}: Permission denied (os error 13)"
    assert _read(tmp_path / "f", DiskFiles(str(tmp_path / "f"))) == (None, [denied])


def test_sizes_of_files(tmp_path: Path) -> None:
    limit = bundle.FILE_BYTES
    write_files(tmp_path, {"fits": b"x" * limit, "large": b"x" * (limit + 1)})
    assert _read(tmp_path / "fits")[1] == []
    uri = path_to_uri(str(tmp_path / "large"))
    text = f"capability file {uri} exceeds the {limit}-byte limit"
    assert _read(tmp_path / "large") == (None, [text])


def test_sizes_of_roots_and_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "ROOT_BYTES", 10)
    write_files(tmp_path, {"seven": "x" * 7, "three": "x" * 3, "escaped": "\x01" * 2})
    uris = {name: path_to_uri(str(tmp_path / name)) for name in ("seven", "three", "escaped")}
    warning = "capability root bundle exceeds the 10-byte limit"
    size = sum(len(each) + 2 for each in ("x" * 7, uris["seven"], warning, "xxx", uris["three"]))
    monkeypatch.setattr(bundle, "RESPONSE_BYTES", size)
    budget = ResponseBudget()
    looks = CapabilityFiles(DiskFiles(), budget)
    assert looks.read(uris["seven"]) is not None
    assert looks.read(uris["seven"]) is None
    assert looks.warnings == [warning]
    assert looks.read(uris["three"]) is not None
    other = CapabilityFiles(DiskFiles(), budget)
    assert other.read(uris["escaped"]) is None
    full = [f"capability discovery exceeds the {size}-byte limit of a response"]
    assert other.warnings == full
    # There is one such warning for all that follows, and nothing more is read.
    assert other.read(uris["three"]) is None
    other.warn("x")
    assert other.warnings == full


def test_scans(tmp_path: Path) -> None:
    write_files(tmp_path, {"a/f": "", "g": ""})
    root = PathUri.from_text(str(tmp_path))
    looks = CapabilityFiles(DiskFiles(), ResponseBudget())
    assert looks.scan(root) == [f"{root}/g", f"{root}/a/f"]
    assert looks.warnings == []
    denied = CapabilityFiles(DiskFiles(str(tmp_path)), ResponseBudget())
    assert denied.scan(root) == []
    text = f"failed to scan capability path {root}: Permission denied (os error 13)"
    assert denied.warnings == [text]


def test_a_scan_that_is_cut_off(tmp_path: Path) -> None:
    for number in range(bundle.WALK.max_directories + 1):
        (tmp_path / str(number)).mkdir()
    (tmp_path / "bad\udcff").mkdir()
    root = PathUri.from_text(str(tmp_path))
    looks = CapabilityFiles(DiskFiles(), ResponseBudget())
    looks.scan(root)
    fault = f"{root}/bad%EF%BF%BD: No such file or directory (os error 2)"
    assert looks.warnings == [
        f"failed to scan capability path {fault}",
        f"capability scan reached its traversal limit (root: {root})",
    ]


def test_errors_of_the_sandbox_count_like_others() -> None:
    assert bundle.is_missing(NotFound("x"))
    assert not bundle.is_missing(InvalidRequest("x"))
    assert bundle.is_missing(FileNotFoundError(2, "x"))
    assert bundle.is_denied(InvalidRequest("x"))
    assert bundle.is_denied(PermissionError(13, "x"))
    assert not bundle.is_denied(FileNotFoundError(2, "x"))
    assert bundle.error_text(InvalidRequest("x")) == "x"
