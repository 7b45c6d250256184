"""The patch format of Codex: what is accepted, and the errors of the rest."""

from __future__ import annotations

import pytest

from exec_server.errors import PatchDoesNotApply
from exec_server.patching.hunks import FilePatch, Hunk, HunkLine
from exec_server.patching.patch import parse

pytestmark = pytest.mark.quick


def patch(*lines: str) -> str:
    return "\n".join(["*** Begin Patch", *lines, "*** End Patch"])


def test_all_kinds_of_changes() -> None:
    text = patch(
        "*** Add File: new",
        "+one",
        "+",
        "*** Add File: empty",
        "*** Delete File: gone",
        "*** Update File: old",
        "*** Move to: renamed",
        "@@ def f():",
        " kept",
        "",
        "-removed",
        "+added",
        "*** End of File",
    )
    lines = (
        HunkLine(" ", "kept"),
        HunkLine(" ", ""),
        HunkLine("-", "removed"),
        HunkLine("+", "added"),
    )
    assert parse(text) == [
        FilePatch("add", "new", (Hunk((HunkLine("+", "one"), HunkLine("+", ""))),), is_forced=True),
        FilePatch("add", "empty", is_forced=True),
        FilePatch("delete", "gone", is_forced=True),
        FilePatch(
            "update",
            "old",
            (Hunk(lines, ("def f():",), is_at_end=True),),
            "renamed",
            is_forced=True,
        ),
    ]


def test_a_file_can_only_be_renamed() -> None:
    assert parse(patch("*** Update File: a", "*** Move to: b")) == [
        FilePatch("update", "a", new_path="b", is_forced=True)
    ]


def test_space_around_the_patch_and_carriage_returns_are_ignored() -> None:
    text = "\n\n" + patch("*** Add File: a", "+x").replace("\n", "\r\n") + "\n\n"
    assert parse(text) == parse(patch("*** Add File: a", "+x"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "first line"),
        ("*** Begin Patch\n*** Delete File: a", "last line"),
        (patch(), "changes no file"),
        (patch("text"), "line 2 of the patch: 'text' is not a header"),
        (patch("*** Add File: "), "is not a header"),
        (patch("*** Add File: a", "x"), "line 3 of the patch: each line of an added file"),
        (patch("*** Update File: a"), "the update of a has no lines"),
        (patch("*** Update File: a", "@@"), "a hunk needs at least one line"),
        (patch("*** Update File: a", "@@", "x"), "line 4 of the patch: each line of a hunk"),
        (patch("*** Update File: a", "@@", "*** Rename File: b"), "a hunk needs at least one"),
    ],
)
def test_errors_name_the_line(text: str, reason: str) -> None:
    with pytest.raises(PatchDoesNotApply, match=reason):
        parse(text)
