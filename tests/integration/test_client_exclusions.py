"""Copies without excluded entries; the patterns beside those of git itself."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from exec_server.client.transfer.exclusion import TreeFilter

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
