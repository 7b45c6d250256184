"""Unified diffs: headers of diff and git, hunks, and the errors of malformed ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.errors import PatchDoesNotApply
from exec_server.patching.hunks import FilePatch, Hunk, HunkLine
from exec_server.patching.unified_diff import parse

pytestmark = pytest.mark.quick

_HUNK = "@@ -1,2 +1,2 @@ def f():\n a\n-b\n+c\n"
_PARSED = Hunk((HunkLine(" ", "a"), HunkLine("-", "b"), HunkLine("+", "c")), first_line=1)


@pytest.mark.parametrize(
    ("header", "file"),
    [
        ("--- a/x\n+++ b/x\n", FilePatch("update", "x", (_PARSED,))),
        (
            "--- x.orig\t2026-01-01 10:00\n+++ x\t2026-01-02 10:00\n",
            FilePatch("update", "x", (_PARSED,)),
        ),
        (
            "diff --git a/x b/x\nindex 1..2 100644\n--- a/x\n+++ b/x\n",
            FilePatch("update", "x", (_PARSED,)),
        ),
        (
            "diff --git a/x b/y\nrename from x\nrename to y\n--- a/x\n+++ b/y\n",
            FilePatch("update", "x", (_PARSED,), "y"),
        ),
        (
            "diff --git a/x b/x\nold mode 100644\nnew mode 100755\n--- a/x\n+++ b/x\n",
            FilePatch("update", "x", (_PARSED,), None, 0o755),
        ),
        (
            '--- "a/\\303\\244 \\"q\\""\n+++ "b/\\303\\244 \\"q\\""\n',
            FilePatch("update", 'ä "q"', (_PARSED,)),
        ),
        (
            "From: someone\n\nA message\n---\n f | 2 +-\n\n--- a/x\n+++ b/x\n",
            FilePatch("update", "x", (_PARSED,)),
        ),
    ],
)
def test_headers(header: str, file: FilePatch) -> None:
    assert parse(header + _HUNK) == [file]


def test_files_are_added_deleted_and_renamed_without_hunks() -> None:
    text = (
        "diff --git a/new b/new\nnew file mode 100755\nindex 0..1\n--- /dev/null\n+++ b/new\n"
        "@@ -0,0 +1 @@\n+x\n"
        "diff --git a/gone b/gone\ndeleted file mode 100644\n--- a/gone\n+++ /dev/null\n"
        "@@ -1 +0,0 @@\n-x\n"
        "diff --git a/empty b/empty\nnew file mode 100644\nindex 0..e\n"
        "diff --git a/old b/moved\nsimilarity index 100%\nrename from old\nrename to moved\n"
        "diff --git a/script b/script\nold mode 100644\nnew mode 100755\n"
    )
    added = Hunk((HunkLine("+", "x"),), first_line=1)
    removed = Hunk((HunkLine("-", "x"),), first_line=1)
    assert parse(text) == [
        FilePatch("add", "new", (added,), mode=0o755),
        FilePatch("delete", "gone", (removed,)),
        FilePatch("add", "empty", mode=0o644),
        FilePatch("update", "old", new_path="moved"),
        FilePatch("update", "script", mode=0o755),
    ]


def test_a_missing_final_newline_is_marked() -> None:
    text = "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n\\ No newline at end of file\n+a\n"
    assert parse(text)[0].hunks[0].lines == (
        HunkLine("-", "a", has_newline=False),
        HunkLine("+", "a"),
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "neither a unified diff"),
        ("hello\nworld\n", "neither a unified diff"),
        (_HUNK, "line 1 of the diff: a hunk without"),
        ("--- a/x\n+++ b/x\n", "the diff of x has no hunk"),
        ("--- a/x\n+++ b/x\n@@ here @@\n", "line 4 of the diff: the hunk .* nothing"),
        ("--- a/x\n+++ b/x\n@@ -1,3 +1 @@\n a\n", "line 5 of the diff: the hunk .* nothing"),
        ("--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n a\n?b\n", "line 5 of the diff: each line of a hunk"),
        ("diff --git a/x b/x\nBinary files a/x and b/x differ\n", "only text changes can"),
        ("diff --git a/x b/x\nnew file mode 120000\n", "not that of a regular file"),
        ("diff --git a/x b/x\nnew file mode abc\n", "'abc' is not a mode"),
        (f"--- a/x\n+++ b/x\n@@ -{'9' * 5000} +1 @@\n", "changes nothing"),
    ],
)
def test_errors_name_the_line(text: str, reason: str) -> None:
    with pytest.raises(PatchDoesNotApply, match=reason):
        parse(text)


@given(
    st.lists(
        st.sampled_from(
            [
                "--- a/x",
                "+++ b/x",
                "+++ /dev/null",
                "@@ -1 +1 @@",
                "@@ -0,0 +1,3 @@",
                " a",
                "-a",
                "+a",
                "",
                "\\ No newline",
                "diff --git a/x b/x",
                "diff --git x",
                "rename from y",
                "new mode 100644",
            ]
        ),
        max_size=12,
    )
)
def test_any_text_is_parsed_or_refused(lines: list[str]) -> None:
    try:
        parse("\n".join(lines))
    except PatchDoesNotApply:
        pass


def test_lines_keep_their_crlf_unless_the_whole_diff_has_it() -> None:
    header, body = "--- a/x\n+++ b/x\n@@ -1,3 +1,3 @@\n", " a\r\n\r\n-b\r\n+c\n"
    (hunk,) = parse(header + body)[0].hunks
    assert [line.text for line in hunk.lines] == ["a\r", "\r", "b\r", "c"]
    header, body = header.replace("\n", "\r\n"), body.replace("+c\n", "+c\r\n")
    for message in ("", "A message\n\n"):
        (hunk,) = parse(message + header + body)[0].hunks
        assert [line.text for line in hunk.lines] == ["a", "", "b", "c"]


def loose(text: str) -> list[Hunk]:
    (file,) = parse(f"--- a/x\n+++ b/x\n{text}")
    return list(file.hunks)


_CHANGE = (HunkLine("-", "a"), HunkLine("+", "b"), HunkLine(" ", "c"))


@pytest.mark.parametrize("counts", ["-3,9 +3,9", "-3 +3", "-3,2 +3,1", "-3,1 +3,2", "-3,0 +3,0"])
def test_wrong_counts_end_with_the_next_hunk_or_file(counts: str) -> None:
    first = 4 if ",0 +" in counts else 3
    for end in ("", "\n\n", "-- \n2.40.1\n", "diff --git a/y b/y\nnew mode 100755\n"):
        text = f"--- a/x\n+++ b/x\n@@ {counts} @@\n-a\n+b\n c\n{end}"
        assert parse(text)[0].hunks == (Hunk(_CHANGE, first_line=first, is_loose=True),)
    second = "@@ -9 +9 @@\n-x\n+y\n"
    hunks = loose(f"@@ {counts} @@\n-a\n+b\n c\n{second}")
    change = (HunkLine("-", "x"), HunkLine("+", "y"))
    assert hunks == [Hunk(_CHANGE, first_line=first, is_loose=True), Hunk(change, first_line=9)]


def test_counts_that_would_take_the_next_header_for_changed_lines_are_wrong() -> None:
    text = f"--- a/x\n+++ b/x\n@@ -3,3 +3,3 @@\n-a\n+b\n c\n--- a/y\n+++ b/y\n{_HUNK}"
    assert parse(text) == [
        FilePatch("update", "x", (Hunk(_CHANGE, first_line=3, is_loose=True),)),
        FilePatch("update", "y", (_PARSED,)),
    ]


def test_right_counts_allow_changed_lines_that_look_like_a_header() -> None:
    hunks = loose("@@ -1,2 +1,2 @@\n a\n--- x\n+++ y\n@@ -5 +5 @@\n-c\n+d\n")
    assert [hunk.is_loose for hunk in hunks] == [False, False]
    assert hunks[0].lines[1:] == (HunkLine("-", "-- x"), HunkLine("+", "++ y"))


@pytest.mark.parametrize(
    ("header", "anchors"),
    [("@@", ()), ("@@ @@", ()), ("@@\r", ()), ("@@ def f():", ("def f():",)), ("@@ f @@", ("f",))],
)
def test_a_bare_header_may_name_a_line_above(header: str, anchors: tuple[str, ...]) -> None:
    hunks = loose(f"{header}\n-a\n+b\n c\n")
    assert hunks == [Hunk(_CHANGE, anchors, is_loose=True)]


def test_insertions_with_wrong_counts_need_a_certain_line() -> None:
    lines = (HunkLine("+", "a"), HunkLine("+", "b"))
    assert loose("@@ -3,0 +4,9 @@\n+a\n+b\n") == [Hunk(lines, first_line=4)]
    assert loose("@@ -3,1 +4,9 @@\n+a\n+b\n") == [Hunk(lines, is_loose=True)]


def test_missing_newlines_are_marked_in_loose_hunks() -> None:
    (hunk,) = loose("@@\n-a\n\\ No newline at end of file\n+a\n")
    assert hunk.lines[0] == HunkLine("-", "a", has_newline=False)
