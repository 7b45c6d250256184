r"""Random patterns and texts: the same answers with ripgrep, without it, and line by line.

Python's `re` agrees for the patterns that it knows.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import regex
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exec_server.errors import InvalidParams
from exec_server.filesystem.line_patterns import LinePattern
from exec_server.filesystem.search import Ripgrep, grep
from exec_server.protocol import files as wire
from exec_server.protocol.paths import PathUri

_RIPGREP = shutil.which("rg")
_CHARACTERS = [*"aabckszi -_.1\t\r", "é", "\u212a", "ß", "\u017f", "İ", "\udcff", "\udcc3"]
_ESCAPES = [
    *(r"\w", r"\W", r"\s", r"\S", r"\d", r"\D", r"\b", r"\<", r"\>", r"\A", r"\Z", r"\z"),
    *(r"\t", r"\n", r"\x61", r"\u00e9", r"\x{6b}", r"\p{L}", r"\P{L}", ".", "^", "$"),
]
_ITEMS = [
    *("a", "b-c", "é", "k", "s", "^", "-", "[", r"\]", r"\-", r"\n", r"\x00-\x20"),
    *(r"\w", r"\s", r"\W", r"\p{L}", "[:alpha:]", "[:space:]", "[:^digit:]"),
]
_GROUPS = ["(", "(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>", "(?i:", "(?P<n>", "(?s:", "(?-i:"]
_REPEATS = ["", "", "", "*", "+", "?", "{2}", "{,2}", "{1,2}", "*?", "++", "?+", "{0}"]

_atoms = st.one_of(
    st.sampled_from(_CHARACTERS[:-2]).map(re.escape),
    st.sampled_from(_ESCAPES),
    st.builds(
        lambda start, items: f"{start}{''.join(items)}]",
        st.sampled_from(["[", "[^"]),
        st.lists(st.sampled_from(_ITEMS), min_size=1, max_size=3),
    ),
)


def _patterns(atoms: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    parts = st.builds(str.__add__, atoms, st.sampled_from(_REPEATS))
    branches = st.lists(parts, min_size=1, max_size=3).map("".join)
    return st.lists(branches, min_size=1, max_size=2).map("|".join)


def _groups(patterns: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    groups = st.builds(lambda start, text: f"{start}{text})", st.sampled_from(_GROUPS), patterns)
    return _patterns(groups | _atoms)


_PATTERNS = st.recursive(_patterns(_atoms), _groups, max_leaves=4)
_LINES = st.lists(st.text(st.sampled_from(_CHARACTERS), max_size=8), min_size=1, max_size=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lines")


def _run(argv: Sequence[str], seconds: float, feed: Callable[[bytes], None]) -> None:
    ended = subprocess.run(list(map(os.fsencode, argv)), capture_output=True, check=False)
    assert ended.stderr == b""  # ripgrep understands every wide pattern
    feed(ended.stdout)


def _line_by_line(
    search: Callable[[str], re.Match[str] | None], texts: list[list[str]]
) -> Iterator[tuple[str, int, int]]:
    for index, lines in enumerate(texts):
        for number, line in enumerate(lines, 1):
            match = search(line)
            if match is not None:
                yield str(index), number, match.start() + 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    _PATTERNS,
    st.lists(_LINES, min_size=3, max_size=3),
    st.booleans(),
    st.sampled_from([False, False, False, True]),
)
def test_every_way_finds_the_same_lines(
    folder: Path, pattern: str, texts: list[list[str]], ignore_case: bool, literal: bool
) -> None:
    decoded = []
    for index, lines in enumerate(texts):
        data = "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape")
        (folder / str(index)).write_bytes(data)
        # Bytes that are UTF-8 together are one character.
        decoded.append(data.decode("utf-8", "surrogateescape").split("\n")[:-1])
    params = wire.GrepParams(
        PathUri.from_text(str(folder)), pattern, literal=literal, ignore_case=ignore_case
    )
    try:
        result = grep(params)
    except InvalidParams:
        return
    if _RIPGREP is not None:
        assert grep(params, Ripgrep(_RIPGREP, _run)) == result
    _check_wide(LinePattern(pattern, literal=literal, ignore_case=ignore_case), folder, result)
    places = [(match.path, match.line, match.column) for match in result.matches]
    exact = LinePattern(pattern, literal=literal, ignore_case=ignore_case).exact
    flags = regex.V0 | regex.MULTILINE | (regex.IGNORECASE if ignore_case else 0)
    assert places == list(_line_by_line(regex.compile(exact, flags).search, decoded))
    python = _python_pattern(pattern, ignore_case=ignore_case)
    if python is not None and not literal:
        assert places == list(_line_by_line(python.search, decoded))


def _check_wide(pattern: LinePattern, folder: Path, result: wire.GrepResult) -> None:
    """`grep -P` finds every line, and perhaps more."""
    case = ["-i"] if pattern.wide_ignores_case else []
    argv = ["grep", *case, "-rnaP", "-e", pattern.wide, "."]
    ended = subprocess.run(argv, cwd=folder, env={"LC_ALL": "C"}, capture_output=True, check=False)
    assert ended.stderr == b""
    lines = {tuple(line.split(b":")[:2]) for line in ended.stdout.split(b"\n")}
    for match in result.matches:
        assert (f"./{match.path}".encode(), str(match.line).encode()) in lines


def _python_pattern(pattern: str, *, ignore_case: bool) -> re.Pattern[str] | None:
    """The same pattern for `re`; None if it means something else there."""
    if re.search(r"\[:|\\[<>zpPx]|\[\[|--", pattern):
        return None
    try:
        return re.compile(pattern, re.IGNORECASE if ignore_case else 0)
    except re.error:
        return None
