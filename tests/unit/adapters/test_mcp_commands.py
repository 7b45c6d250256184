"""Output with its middle left out, and lines of files, as a model reads them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.adapters import mcp_commands
from exec_server.adapters.mcp_commands import (
    CommandOutput,
    diff_texts,
    found_path,
    join_found,
    select_lines,
)
from exec_server.client.environment import Environment
from exec_server.client.process import Process
from exec_server.patching import unified_diff
from exec_server.patching.hunks import apply_hunks
from exec_server.protocol.sandbox import Denial


def test_short_output_is_shown_once() -> None:
    output = CommandOutput(1)
    output.append(b"one\n")
    output.append(b"two\n")
    assert output.take(100) == "one\ntwo\n"
    assert output.take(100) == ""
    output.append("größer \udcff".encode("utf-8", "surrogateescape"))
    assert output.take(100) == "größer �"


def test_the_middle_of_long_output_is_left_out_and_can_be_read() -> None:
    output = CommandOutput(7)
    output.append(b"seen")
    output.take(100)
    output.append(b"".join(b"%03d " % number for number in range(100)))
    shown = output.take(5)
    note = "[380 bytes left out: read_output with session_id=7 and offset=14 shows them]"
    assert shown == f"000 001 00\n{note}\n7 098 099 "
    assert output.read(14, 2) == "[bytes 14 to 22 of 404; continue with offset=22]\n2 003 00"
    assert output.read(400, 2) == "[bytes 400 to 404 of 404]\n099 "
    assert output.read(500, 2) == "[bytes 404 to 404 of 404]\n"


def test_old_output_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_commands, "KEPT_BYTES", 100)
    output = CommandOutput(1)
    for number in range(100):
        output.append(b"%03d " % number)
    assert output.size == 400
    shown = output.take(5)
    assert shown.startswith("000 001 00\n[380 bytes left out: ")
    assert "offset=300 shows them" in shown
    first = "[bytes 300 to 308 of 400; the 300 bytes before are gone; continue with offset=308]\n"
    assert output.read(0, 2) == f"{first}075 076 "


def test_the_head_and_the_answer_are_bounded() -> None:
    output = CommandOutput(1)
    for _ in range(20):
        output.append(b"x" * 65_536)
    assert len(output._head) == mcp_commands.HEAD_BYTES
    assert len(output._kept) == mcp_commands.KEPT_BYTES
    assert len(output.take(10**9)) < mcp_commands.MAX_TOKENS * mcp_commands.BYTES_PER_TOKEN + 200
    assert len(output.read(0, 10**9)) < mcp_commands.MAX_TOKENS * mcp_commands.BYTES_PER_TOKEN + 200


@pytest.mark.parametrize(
    ("text", "offset", "limit", "expected"),
    [
        ("", 1, 10, ""),
        ("a\nb", 1, 10, "a\nb"),
        ("a\nb\n", 0, 10, "a\nb\n"),
        ("a\x0cb\nc\n", 1, 1, "a\x0cb\n[lines 1 to 1 of 2; continue with offset=2]"),
        ("a\nb", 2, 10, "b\n[lines 2 to 2 of 2]"),
        ("a\nb\n", 3, 10, "[the file has 2 lines]"),
        ("a\nb\n", 1, 0, "a\n[lines 1 to 1 of 2; continue with offset=2]"),
    ],
)
def test_lines_of_a_file(text: str, offset: int, limit: int, expected: str) -> None:
    assert select_lines(text, offset, limit) == expected


def test_long_lines_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_commands, "FILE_CHARACTERS", 4)
    assert select_lines("a\nbcd\n", 1, 9) == "a\n[lines 1 to 1 of 2; continue with offset=2]"
    assert select_lines("abcdef\ng\n", 1, 9) == (
        "abcd [7 characters, cut]\n[lines 1 to 1 of 2; continue with offset=2]"
    )


def test_a_file_of_line_ends_makes_no_list_of_lines() -> None:
    text = "\n" * 1_000_000 + "last"
    assert select_lines(text, 1_000_001, 5) == "last\n[lines 1000001 to 1000001 of 1000001]"
    assert select_lines(text, 10**40, 10**40) == "[the file has 1000001 lines]"


def test_results_of_a_search_fit_into_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    more = "[there are more: narrow the search]"
    assert join_found([], is_cut=False) == "[nothing found]"
    assert join_found(["a", "b"], is_cut=False) == "a\nb"
    assert join_found(["a", "b"], is_cut=True) == f"a\nb\n{more}"
    monkeypatch.setattr(mcp_commands, "FILE_CHARACTERS", 6)
    assert join_found(["abc", "def"], is_cut=False) == f"abc\n{more}"
    assert join_found(["abcdefghi"], is_cut=False) == f"abcdef\n{more}"


def numbered(*replaced: tuple[int, str]) -> str:
    lines = [f"line {number}" for number in range(1, 5001)]
    for number, text in replaced:
        lines[number - 1] = text
    return "\n".join(lines) + "\n"


def test_a_diff_has_the_numbers_of_the_file() -> None:
    assert diff_texts("a\n", "a\n", "p") == "nothing has changed"
    assert diff_texts("a\nb\n", "a\nc\n", "p") == "--- p\n+++ p\n@@ -1,2 +1,2 @@\n a\n-b\n+c"
    diff = diff_texts(numbered(), numbered((3000, "@@ -1 +1 @@"), (3500, "new")), "p")
    assert diff == (
        "--- p\n+++ p\n"
        "@@ -2997,7 +2997,7 @@\n line 2997\n line 2998\n line 2999\n-line 3000\n+@@ -1 +1 @@\n"
        " line 3001\n line 3002\n line 3003\n"
        "@@ -3497,7 +3497,7 @@\n line 3497\n line 3498\n line 3499\n-line 3500\n+new\n"
        " line 3501\n line 3502\n line 3503"
    )


_TEXTS = st.lists(st.sampled_from(["a\n", "b\n", "\n", " c\r\n"]), max_size=12).flatmap(
    lambda lines: st.sampled_from(["", "end"]).map(lambda end: "".join(lines) + end)
)


@given(_TEXTS, _TEXTS)
def test_a_diff_can_be_applied(old: str, new: str) -> None:
    if old == new:
        return
    (file,) = unified_diff.parse(diff_texts(old, new, "p"))
    assert not any(hunk.is_loose for hunk in file.hunks)  # the counts are right
    if "\r" not in old + new:
        assert apply_hunks(old, file.hunks, "p") == new


def test_changes_that_are_far_apart_have_no_diff() -> None:
    # A diff of these would take minutes.
    diff = diff_texts(numbered(), numbered((1, "x"), (5000, "y")), "p")
    assert diff == "changed: 5000 lines from the first to the last change, too many for a diff"
    assert diff_texts("", "x\n" * 2000, "p").startswith("changed: 2000 lines")


def test_found_paths_are_those_of_the_other_tools() -> None:
    assert [found_path(folder, "a/b") for folder in (".", "./", "")] == ["a/b"] * 3
    assert found_path("src/", "a/b") == "src/a/b"
    assert found_path("/srv", "a") == "/srv/a"
    assert found_path("~", "a") == "~/a"


@pytest.mark.parametrize(
    ("is_denied", "denial", "text"),
    [
        (False, None, "Exited with code 1"),
        (True, None, "Exited with code 1; the sandbox has denied something"),
        (
            False,
            Denial(None, None, "network", "network access is restricted"),
            "Exited with code 1; the sandbox has denied something (network access is restricted)",
        ),
        (
            True,
            Denial("touch: …", "/etc/x", "write", "a rule"),
            "Exited with code 1; the sandbox has denied something (write /etc/x: a rule)",
        ),
    ],
)
def test_a_model_is_told_what_the_sandbox_has_denied(
    is_denied: bool, denial: Denial | None, text: str
) -> None:
    ended = SimpleNamespace(exit_code=1, sandbox_denied=is_denied, sandbox_denial=denial)
    session = mcp_commands._Session(1, cast(Process, ended), "make", tty=False)
    session._read_all.set()
    assert session.reply(10).startswith(f"{text}\n")


def test_children_are_named_only_after_the_time_for_the_rest_of_the_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mcp_commands, "QUIET_SECONDS", 0.001)

    async def wait() -> int:
        return 0

    ended = SimpleNamespace(exit_code=0, sandbox_denied=False, sandbox_denial=None, wait=wait)

    async def scene() -> None:
        commands = mcp_commands.CommandSessions(cast(Environment, None), None)
        session = mcp_commands._Session(1, cast(Process, ended), "make", tty=False)
        session.is_background = True
        commands._sessions[1] = session
        assert commands.notes() == ""
        assert session.line().startswith("session_id=1: Exited with code 0; 0 bytes")
        await session.run_to_end()
        assert "; its children still run; 0 bytes" in commands.notes()

    asyncio.run(scene())
