"""Exact edits: each old text must occur once, perhaps with other line ends or blanks."""

from __future__ import annotations

import pytest

from exec_server.errors import EditAmbiguous, EditNotFound, InvalidRequest
from exec_server.patching import edits
from exec_server.patching.edits import Edit, apply_edits
from exec_server.patching.hunks import Effort

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
        ("a ", Edit(" \n", "x"), "does not occur"),
        ("if x:\n    y", Edit("if x:\n  y", "x"), "except with other spaces"),
    ],
)
def test_the_reason_of_a_failed_edit(text: str, edit: Edit, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        apply_edits(text, [edit])


def test_the_failed_edit_of_several_is_named() -> None:
    with pytest.raises(InvalidRequest, match="edit 2 of 2"):
        apply_edits("a", [Edit("a", "b"), Edit("a", "c")])


def test_the_new_text_is_bounded() -> None:
    with pytest.raises(InvalidRequest, match="the new text would have more than"):
        apply_edits("a" * 1000, [Edit("a", "b" * 1_000_000, all=True)])


def test_the_number_of_edits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edits, "MAX_EDITS", 2)
    assert apply_edits("a", [Edit("a", "b"), Edit("b", "c")]) == ("c", 2)
    with pytest.raises(InvalidRequest, match="at most 2 edits"):
        apply_edits("a", [Edit("a", "b"), Edit("b", "c"), Edit("c", "d")])


def test_the_time_of_edits_is_bounded() -> None:
    times = iter([0.0, 1.0, 6.0])
    with pytest.raises(InvalidRequest, match="processor time"):
        apply_edits("a", [Edit("a", "b"), Edit("b", "c")], Effort(lambda: next(times)))


def test_no_reason_is_looked_for_in_a_long_text() -> None:
    text = "if x:\n    y" + "\n" * 1_048_576
    with pytest.raises(InvalidRequest, match=r"does not occur$"):
        apply_edits(text, [Edit("if x:\n  y", "x")])


@pytest.mark.parametrize(
    ("text", "edit", "changed"),
    [
        # The file keeps its line ends, whatever those of the edit are.
        ("a\r\nb\r\n", Edit("a\nb\n", "c\nd\n"), "c\r\nd\r\n"),
        ("a\r\nb\r\n", Edit("b", "c\nd"), "a\r\nc\r\nd\r\n"),
        ("a\r\nb\r\nc", Edit("\nc", "\nd"), "a\r\nb\r\nd"),
        ("a\r\nb\r\nc", Edit("\nc", ""), "a\r\nb"),
        ("a\r\nb\r\nc", Edit("\nc", "d"), "a\r\nbd"),
        ("a\nb\n", Edit("a\r\nb\r\n", "c\r\nd\r\n"), "c\nd\n"),
        ("a\r\nb\nc\n", Edit("a\nb", "x\ny"), "x\r\ny\nc\n"),
        ("a\r\nb\nc\nd", Edit("b\nc", "x\ny"), "a\r\nx\ny\nd"),
        ("a\r\nb  \r\n", Edit("b \n", "c\nd\n"), "a\r\nc\r\nd\r\n"),
        ("a\r\nb", Edit("\r\n", "\n"), "a\nb"),
        # Blanks at the ends of lines.
        ("if x:  \n    y\t\nz\n", Edit("if x:\n    y\n", "z\n"), "z\nz\n"),
        ("a\nb\n", Edit("a \nb  ", "c"), "c\n"),
        ("a\nbar\nb \t\r\n", Edit("b  ", "c"), "a\nbar\nc\r\n"),
        ("a\n\n b\n", Edit("a\n  \n b", "c"), "c\n"),
        ("x\n\nfoo\n", Edit("   \nfoo", "bar"), "x\nbar\n"),
        ("x  \nfoo\n", Edit("\nfoo ", "\nbar"), "x  \nbar\n"),
        # Unchanged lines keep their form.
        ("a  \nb\nc\t\n", Edit("a\nb\nc\n", "a\nx\ny\nc\n"), "a  \nx\ny\nc\t\n"),
        ("a  \nb\n", Edit("a\nb", "a"), "a  \n"),
        ("a  \nb\n", Edit("a\nb", "a\nb\nc"), "a  \nb\nc\n"),
    ],
)
def test_line_ends_and_blanks_may_differ(text: str, edit: Edit, changed: str) -> None:
    assert apply_edits(text, [edit]) == (changed, 1)


def test_exact_occurrences_go_before_similar_ones() -> None:
    text = "a  \nb\n" + "a\r\nb\r\n" + "a\nb\n"
    assert apply_edits(text, [Edit("a\nb", "c")]) == ("a  \nb\na\r\nb\r\nc\n", 1)
    text = "a  \r\nb\r\na\r\nb\r\n"
    assert apply_edits(text, [Edit("a\nb", "c")]) == ("a  \r\nb\r\nc\r\n", 1)


def test_all_similar_occurrences() -> None:
    edit = Edit("a\nb\n", "c\n", all=True)
    assert apply_edits("a\r\nb\r\na\r\nb\r\n", [edit]) == ("c\r\nc\r\n", 2)
    with pytest.raises(InvalidRequest, match="the new text would have more than"):
        apply_edits("a \n" * 1000, [Edit("a\n", "b" * 1_000_000 + "\n", all=True)])


@pytest.mark.parametrize(
    ("text", "old"), [("foo", "foo\n"), ("foo", "\nfoo"), ("afoo", " \nfoo"), ("foob", "foo ")]
)
def test_a_line_end_must_be_there(text: str, old: str) -> None:
    with pytest.raises(EditNotFound):
        apply_edits(text, [Edit(old, "x")])


def test_an_ambiguous_edit_names_the_lines() -> None:
    with pytest.raises(EditAmbiguous, match=r"occurs 3 times \(lines 1, 2\): add") as raised:
        apply_edits("a a\nba\n", [Edit("a", "x")])
    assert (raised.value.count, raised.value.lines) == (3, (1, 1, 2))
    with pytest.raises(EditAmbiguous, match=r"\(lines 1, 3\)") as raised:
        apply_edits("a \nb\na\t\nb\n", [Edit("a\nb", "x")])
    assert (raised.value.count, raised.value.lines) == (2, (1, 3))
    with pytest.raises(EditAmbiguous, match=r"occurs 40 times .* 10, …\)") as raised:
        apply_edits("a\n" * 40, [Edit("a", "x")])
    assert raised.value.lines == tuple(range(1, edits.MAX_NAMED_LINES + 1))


def test_overlapping_occurrences_are_ambiguous() -> None:
    for text, old in (
        ("}\n}\n}\n", "}\n}\n"),
        ("}\r\n}\n}\r\n", "}\n}\n"),
        ("} \n}\n} \n", "}\n}\n"),
    ):
        with pytest.raises(EditAmbiguous, match=r"occurs 2 times \(lines 1, 2\)") as raised:
            apply_edits(text, [Edit(old, "x\n")])
        assert (raised.value.count, raised.value.lines) == (2, (1, 2))
    with pytest.raises(EditAmbiguous, match=r"occurs 3 times \(lines 1, 2, 3\)"):
        apply_edits("a\n" * 4, [Edit("a\na\n", "x")])
    assert apply_edits("aaaaa", [Edit("aa", "b", all=True)]) == ("bba", 2)
    assert apply_edits("a \n" * 5, [Edit("a\na\n", "b\n", all=True)]) == ("b\nb\na \n", 2)


def test_occurrences_in_one_line_name_it_once() -> None:
    with pytest.raises(EditAmbiguous, match=r"occurs 2 times \(line 2\): add"):
        apply_edits("x\na a\n", [Edit("a", "b")])


def test_a_text_of_too_many_lines_is_not_searched_for_similar_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(edits, "MAX_LINES", 1)
    with pytest.raises(EditNotFound):
        apply_edits("a\r\nb\r\n", [Edit("a\nb", "x")])
