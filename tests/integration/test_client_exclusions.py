"""Copies without excluded entries; the patterns beside those of git itself."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tests.support.client_targets import ClientTarget
from tests.support.trees import tree, write_files

from exec_server import Entry, Environment
from exec_server.client.transfer.exclusion import TreeFilter
from exec_server.client.transfer.remote_tree import RemoteTree
from exec_server.errors import Unsupported

NEEDS_GIT = pytest.mark.skipif(shutil.which("git") is None, reason="no git to compare with")
# Parts of random patterns, and names that they match or nearly match.
PARTS = [
    *("a", "b", "c", "é", ".", "#", "!", "-", " ", "\\", "[", "]", "?", "*", "**", "***"),
    *("/", "/", "**/", "/**", "\\/", "[ab]", "[!a]", "[^b]", "[a-c]", "[[:alpha:]]", "\\*", "\r"),
]
NAMES = [
    *("a", "b", "c", "ab", "abc", "ba", "a b", "!a", "#a", "é", "a]", "[a", "a-", "*", "b ", "-"),
    *(".a", "\\a", "a*", "a\n", os.fsdecode(b"a\xff")),
]
CHOSEN = [
    "[[:punct:]]\n[!a]/**\nab**/c\n/a*\n!a\n",
    "[[:space:]]\n[[:cntrl:]x]\n[[:graph:]-b]\n!b/\n",
    "\ufeffa/\r\n!a/b\r\nb \r\n",
    *(f"[[:{name}:]]\n" for name in ("alnum", "digit", "lower", "print", "upper", "xdigit")),
    *(f"x[[:{name}:]]\n" for name in ("blank", "space", "cntrl", "punct", "graph", "print")),
    "x[!a-z]\n",
    "x[\\\\-a]\n",
    "x[--0]\n",
]


def _make_entries(top: Path, chosen: random.Random) -> dict[str, bool]:
    """Random files and directories: whether each path is a directory."""
    found: dict[str, bool] = {}
    for _ in range(150):
        names = [chosen.choice(NAMES) for _ in range(chosen.randint(1, 4))]
        above = ["/".join(names[:depth]) for depth in range(1, len(names))]
        path = "/".join(names)
        if path in found or not all(found.get(each, True) for each in above):
            continue
        found |= dict.fromkeys(above, True) | {path: chosen.random() < 0.5}
    for byte in range(1, 256):
        if byte != ord("/"):
            found[os.fsdecode(b"x%c" % byte)] = False
    for path, is_directory in found.items():
        (top / path if is_directory else (top / path).parent).mkdir(parents=True, exist_ok=True)
        if not is_directory:
            (top / path).touch()
    return found


def _git_ignores(top: Path, entries: dict[str, bool]) -> set[str]:
    words = ["git", "-C", str(top), "check-ignore", "--no-index", "-z", "--stdin", "-v", "-n"]
    data = b"".join(os.fsencode(path) + b"\0" for path in entries)
    fields = subprocess.run(words, input=data, capture_output=True, check=False).stdout.split(b"\0")
    assert len(fields) == 4 * len(entries) + 1
    return {
        os.fsdecode(path)
        for pattern, path in zip(fields[2::4], fields[3::4], strict=True)
        if pattern and not pattern.startswith(b"!")
    }


def _we_ignore(ignore_file: bytes, entries: dict[str, bool]) -> set[str]:
    tree = TreeFilter((), gitignore=True)
    tree.enter("", ignore_file)
    excluded: set[str] = set()
    for path, is_directory in sorted(entries.items(), key=lambda entry: entry[0].split("/")):
        if os.path.dirname(path) in excluded or tree.excludes(path, is_directory=is_directory):
            excluded.add(path)
        elif is_directory:
            tree.enter(path)
    return excluded


@NEEDS_GIT
def test_patterns_match_as_those_of_git(tmp_path: Path) -> None:
    chosen = random.Random(20)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    entries = _make_entries(tmp_path, chosen)
    rounds = [
        "".join(chosen.choice(PARTS) for _ in range(chosen.randint(1, 7))) + "\n"
        for _ in range(150)
    ]
    for text in [*CHOSEN, *rounds, *map("".join, pairwise(rounds))]:
        (tmp_path / ".gitignore").write_bytes(text.encode())
        assert _we_ignore(text.encode(), entries) == _git_ignores(tmp_path, entries), repr(text)


def make_project(top: Path) -> None:
    """A project with things that are not to be copied."""
    write_files(
        top,
        {
            ".gitignore": "*.log\n/build/\n!keep.log\n",
            "src/a.py": "a",
            "src/a.pyc": "a",
            "src/.gitignore": "*.pyc\n",
            "src/debug.log": "x",
            "src/build/kept": "x",
            "build/.gitignore": "!*",
            "build/out": "x",
            "keep.log": "x",
            "node_modules/x/index.js": "x",
            ".git/HEAD": "x",
            "b\n.log": "x",
            "b\n": "x",
        },
    )
    (top / os.fsdecode(b"\xff")).mkdir()
    (top / os.fsdecode(b"\xff/\xfe")).write_text("x")
    (top / os.fsdecode(b"\xff/x.log")).write_text("x")
    (top / "empty").mkdir()
    (top / "link.log").symlink_to("keep.log")
    (top / "link").symlink_to("src")


KEPT = {
    *(".gitignore", "src", "src/a.py", "src/.gitignore", "src/build", "src/build/kept"),
    *("keep.log", "b\n", os.fsdecode(b"\xff"), os.fsdecode(b"\xff/\xfe"), "empty", "link"),
}


def paths_below(top: Path) -> set[str]:
    return {str(path.relative_to(top)) for path in top.rglob("*")}


@pytest.mark.quick
def test_excluded_entries_are_not_copied(there: ClientTarget, tmp_path: Path) -> None:
    make_project(tmp_path / "a")

    async def scene(env: Environment) -> None:
        names: dict[str, Any] = {
            "exclude": ["node_modules/"],
            "exclude_vcs": True,
            "gitignore": True,
        }
        sent = await env.files.upload(tmp_path / "a", tmp_path / "b", **names)
        got = await env.files.download(tmp_path / "a", tmp_path / "c", **names)
        assert (got.files, got.directories, got.links) == (sent.files, sent.directories, sent.links)
        await env.files.download(tmp_path / "a", tmp_path / "d", exclude=["*", "!src", "!*.py"])
        (tmp_path / "link").symlink_to("a")
        await env.files.download(tmp_path / "link", tmp_path / "e", exclude=["*", "!empty"])
        # The top itself is never excluded.
        await env.files.upload(tmp_path / "a/keep.log", tmp_path / "f", exclude=["*"])
        await env.files.download(tmp_path / "a/keep.log", tmp_path / "g", exclude=["*"])
        for name in ("upload", "download"):
            with pytest.raises(TypeError, match="exclude must be a list of patterns"):
                await getattr(env.files, name)(tmp_path / "a", tmp_path / "x", exclude="*.py")

    there.play(scene)
    assert paths_below(tmp_path / "b") == paths_below(tmp_path / "c") == KEPT
    assert tree(tmp_path / "b") == tree(tmp_path / "c")
    assert paths_below(tmp_path / "d") == {"src", "src/a.py"}
    assert paths_below(tmp_path / "e") == {"empty"}
    assert (tmp_path / "f").exists()
    assert (tmp_path / "g").exists()


def test_an_ignore_file_that_is_a_link_or_unreadable(there: ClientTarget, tmp_path: Path) -> None:
    """A link is not followed, as in git; what cannot be judged is not copied."""
    top = tmp_path / "a"
    write_files(top, {"huge/.gitignore": "x\n" * 200_000, "huge/x": "", "ok/x": "", "rules": "x\n"})
    (top / ".gitignore").symlink_to("rules")

    async def scene(env: Environment) -> None:
        sent = await env.files.upload(top, tmp_path / "b", gitignore=True, check=False)
        got = await env.files.download(top, tmp_path / "c", gitignore=True, check=False)
        assert [each.path for each in (*sent.failed, *got.failed)] == ["huge", "huge"]

    there.play(scene)
    for name in ("b", "c"):
        assert paths_below(tmp_path / name) - {"huge"} == {"ok", "ok/x", "rules", ".gitignore"}


def test_exclusions_without_find(ours: ClientTarget, tmp_path: Path) -> None:
    """Without find, directories are listed one by one, and excluded ones are not."""
    make_project(tmp_path / "a")
    (tmp_path / "a" / os.fsdecode(b"\xff/\xfe")).unlink()
    (tmp_path / "a" / os.fsdecode(b"\xff/x.log")).unlink()
    (tmp_path / "a" / os.fsdecode(b"\xff")).rmdir()
    closed = tmp_path / "a/node_modules/x"
    listed: list[str] = []

    async def scene(env: Environment) -> None:
        async def no_find(self: RemoteTree, *_: object) -> None:
            raise Unsupported("find", "none")

        walk = env.files.walk

        def noted(path: str, **options: Any) -> AsyncIterator[Entry]:
            listed.append(path)
            return walk(path, **options)

        with (
            mock.patch.object(RemoteTree, "_scan_with_find", no_find),
            mock.patch.object(env.files, "walk", noted),
        ):
            await env.files.download(
                *(tmp_path / "a", tmp_path / "b"), exclude=["node_modules/", ".git"], gitignore=True
            )

    ours.play(scene)
    links = {"link", os.fsdecode(b"\xff"), os.fsdecode(b"\xff/\xfe")}
    assert paths_below(tmp_path / "b") == KEPT - links
    assert str(closed.parent) not in listed
    assert str(tmp_path / "a/src") in listed
