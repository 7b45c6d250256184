"""Exact edits: each old text must occur once."""

from __future__ import annotations

import pytest

from exec_server.patching import patch
from exec_server.patching.hunks import Effort, PatchFailed
from exec_server.patching.patch import Edit, apply_edits

pytestmark = pytest.mark.quick


def test_edits_are_applied_one_after_the_other() -> None:
    assert apply_edits("one two", [Edit("one", "three"), Edit("three", "four")]) == ("four two", 2)


def test_all_occurrences_on_request() -> None:
    assert apply_edits("a b a", [Edit("a", "c", all=True)]) == ("c b c", 2)


@pytest.mark.parametrize(
    ("text", "edit", "reason"),
    [
        ("a", Edit("", "x"), "must not be empty"),
        ("a", Edit("b", "x"), "does not occur$"),
        ("a a", Edit("a", "x"), "occurs 2 times"),
        ("a\r\nb", Edit("a\nb", "x"), "its lines end with CRLF"),
        ("if x:\n    y", Edit("if x:\n  y", "x"), "except with other spaces"),
    ],
)
def test_the_reason_of_a_failed_edit(text: str, edit: Edit, reason: str) -> None:
    with pytest.raises(PatchFailed, match=reason):
        apply_edits(text, [edit])


def test_the_failed_edit_of_several_is_named() -> None:
    with pytest.raises(PatchFailed, match="edit 2 of 2"):
        apply_edits("a", [Edit("a", "b"), Edit("a", "c")])


def test_the_new_text_is_bounded() -> None:
    with pytest.raises(PatchFailed, match="the new text would have more than"):
        apply_edits("a" * 1000, [Edit("a", "b" * 1_000_000, all=True)])


def test_the_number_of_edits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch, "MAX_EDITS", 2)
    assert apply_edits("a", [Edit("a", "b"), Edit("b", "c")]) == ("c", 2)
    with pytest.raises(PatchFailed, match="at most 2 edits"):
        apply_edits("a", [Edit("a", "b"), Edit("b", "c"), Edit("c", "d")])


def test_the_time_of_edits_is_bounded() -> None:
    times = iter([0.0, 1.0, 6.0])
    with pytest.raises(PatchFailed, match="processor time"):
        apply_edits("a", [Edit("a", "b"), Edit("b", "c")], Effort(lambda: next(times)))


def test_no_reason_is_looked_for_in_a_long_text() -> None:
    text = "if x:\n    y" + "\n" * 1_048_576
    with pytest.raises(PatchFailed, match=r"does not occur$"):
        apply_edits(text, [Edit("if x:\n  y", "x")])
