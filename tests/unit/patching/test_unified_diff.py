"""Unified diffs: headers of diff and git, hunks, and the errors of malformed ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.patching.hunks import FilePatch, Hunk, HunkLine, PatchFailed
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
        ("--- a/x\n+++ b/x\n@@ here @@\n", "line 3 of the diff: a hunk begins with"),
        ("--- a/x\n+++ b/x\n@@ -1,3 +1 @@\n a\n", "in the middle of a hunk"),
        ("--- a/x\n+++ b/x\n@@ -1 +1,2 @@\n-a\n-b\n", "more lines than its header says"),
        ("--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n a\n?b\n", "line 5 of the diff: each line of a hunk"),
        ("diff --git a/x b/x\nBinary files a/x and b/x differ\n", "only text changes can"),
        ("diff --git a/x b/x\nnew file mode 120000\n", "not that of a regular file"),
        ("diff --git a/x b/x\nnew file mode abc\n", "'abc' is not a mode"),
        (f"--- a/x\n+++ b/x\n@@ -{'9' * 5000} +1 @@\n", "has no hunk|a hunk begins with"),
    ],
)
def test_errors_name_the_line(text: str, reason: str) -> None:
    with pytest.raises(PatchFailed, match=reason):
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
    except PatchFailed:
        pass
