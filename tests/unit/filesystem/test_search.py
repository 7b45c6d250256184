"""Globs and the space of a file system."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from tests.support.trees import do, uri

from exec_server.errors import InvalidParams, NotFound, RpcError
from exec_server.filesystem import search
from exec_server.protocol import files as wire

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for path in ["a.py", "b.ts", ".hidden/c.py", "src/d.py", "src/deep/e.tsx", "src/deep/f.py"]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    (tmp_path / "loop").symlink_to(".")
    return tmp_path


def glob(pattern: str, limit: int = 1000) -> wire.GlobResult:
    result = do(wire.GlobParams(uri("."), pattern, limit))
    assert isinstance(result, wire.GlobResult)
    return result


@pytest.mark.parametrize(
    ("pattern", "paths"),
    [
        ("*.py", ["a.py"]),
        ("**/*.py", [".hidden/c.py", "a.py", "src/d.py", "src/deep/f.py"]),
        ("src/**", ["src", "src/d.py", "src/deep", "src/deep/e.tsx", "src/deep/f.py"]),
        ("src/**/f.py", ["src/deep/f.py"]),
        ("**/deep/*", ["src/deep/e.tsx", "src/deep/f.py"]),
        ("**/*.{ts,tsx}", ["b.ts", "src/deep/e.tsx"]),
        ("{a,b}.{py,ts}", ["a.py", "b.ts"]),
        ("[ab].??", ["a.py", "b.ts"]),
        ("./src//d.py", ["src/d.py"]),
        ("loop/*", []),
        ("l*", ["loop"]),
        ("missing", []),
    ],
)
def test_patterns(pattern: str, paths: list[str]) -> None:
    assert glob(pattern) == wire.GlobResult(paths, False)


def test_the_same_as_pathlib(folder: Path) -> None:
    for pattern in ("*", "*/*", "**/*.py", "s*/d*", "**/deep"):
        found = (str(path.relative_to(folder)) for path in folder.glob(pattern))
        expected = sorted(path for path in found if not path.startswith("loop/"))
        assert glob(pattern).paths == expected


def test_results_and_entries_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    found = glob("**/*", 2)
    assert (len(found.paths), found.truncated) == (2, True)
    monkeypatch.setattr(search, "MAX_ENTRIES", 3)
    assert glob("**/*.py").truncated


def test_the_root_must_be_a_directory() -> None:
    with pytest.raises(NotFound):
        do(wire.GlobParams(uri("missing"), "*"))
    with pytest.raises(RpcError, match="Not a directory"):
        do(wire.GlobParams(uri("a.py"), "*"))
    with pytest.raises(InvalidParams, match="limit"):
        glob("*", 0)


def test_a_name_that_is_not_utf8_is_shown(folder: Path) -> None:
    with open(os.fsencode(folder) + b"/x\xff", "wb"):
        pass
    assert glob("x*").paths == ["x\ufffd"]


def test_disk_usage(folder: Path) -> None:
    found = do(wire.DiskUsageParams(uri(".")))
    assert isinstance(found, wire.DiskUsageResult)
    assert found.total == shutil.disk_usage(folder).total
    assert 0 <= found.available <= found.free <= found.total


def test_a_search_ends_after_its_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(300):
        (folder / f"n{number}").touch()
    monkeypatch.setattr(search, "MAX_SECONDS", -1.0)
    assert glob("**/*").truncated
