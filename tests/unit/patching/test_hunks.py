"""Where hunks are found in a file, and the text after them."""

from __future__ import annotations

import difflib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.errors import InvalidRequest, PatchDoesNotApply
from exec_server.patching import hunks as patching_hunks
from exec_server.patching import patch, unified_diff
from exec_server.patching.hunks import Effort, Hunk, HunkLine, apply_hunks

pytestmark = pytest.mark.quick

_LINES = st.lists(st.sampled_from(["a", "b", " a", "c ", "", "é", "x\ty"]), max_size=12)


def codex_hunks(body: str) -> tuple[Hunk, ...]:
    (file,) = patch.parse(f"*** Begin Patch\n*** Update File: f\n{body}\n*** End Patch")
    return file.hunks


def diff_hunks(old: str, new: str) -> tuple[Hunk, ...]:
    lines = list(
        difflib.unified_diff(
            old.splitlines(keepends=True), new.splitlines(keepends=True), "a/f", "b/f"
        )
    )
    marked = [
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    ]
    if not marked:
        return ()
    (file,) = unified_diff.parse("".join(marked))
    return file.hunks


@given(_LINES, _LINES, st.booleans(), st.booleans())
def test_a_diff_of_two_texts_makes_one_of_the_other(
    old: list[str], new: list[str], old_end: bool, new_end: bool
) -> None:
    before = "\n".join(old) + ("\n" if old and old_end else "")
    after = "\n".join(new) + ("\n" if new and new_end else "")
    assert apply_hunks(before, diff_hunks(before, after), "f") == after


def test_a_diff_fits_a_file_with_other_changes_above() -> None:
    old = "".join(f"{number}\n" for number in range(40))
    hunks = diff_hunks(old, old.replace("30\n", "thirty\n"))
    assert apply_hunks("new\n" * 7 + old, hunks, "f") == "new\n" * 7 + old.replace(
        "30\n", "thirty\n"
    )


_LAST = (HunkLine(" ", "a"), HunkLine("-", "b", False), HunkLine("+", "c"))
_NEW_LAST = (HunkLine(" ", "a"), HunkLine("-", "b"), HunkLine("+", "c", False))


@pytest.mark.parametrize("first", [1, None])
@pytest.mark.parametrize(("lines", "end"), [(_LAST, "\n"), (_NEW_LAST, "")])
def test_lines_without_a_newline_are_the_last_ones(
    lines: tuple[HunkLine, ...], end: str, first: int | None
) -> None:
    hunk = Hunk(lines, first_line=first, is_loose=first is None)
    assert apply_hunks("a\nb\nx\na\nb", [hunk], "f") == f"a\nb\nx\na\nc{end}"
    with pytest.raises(
        PatchDoesNotApply, match="lines were not found at the end of the file\na\nb"
    ):
        apply_hunks("a\nb\nc\n", [hunk], "f")
    with pytest.raises(PatchDoesNotApply, match="hunk 2 does not fit"):
        apply_hunks("a\nb\n", [hunk, hunk], "f")


def test_a_kept_last_line_keeps_its_newline() -> None:
    hunk = Hunk((HunkLine("-", "a"), HunkLine("+", "b"), HunkLine(" ", "c", False)), first_line=1)
    assert apply_hunks("a\nc", [hunk], "f") == "b\nc"
    assert apply_hunks("a\nc\n", [hunk], "f") == "b\nc\n"


def test_a_line_without_a_newline_is_added_at_the_end() -> None:
    def add(text: str, first: int | None) -> str:
        hunk = Hunk((HunkLine("+", "x", False),), first_line=first, is_loose=first is None)
        return apply_hunks(text, [hunk], "f")

    assert [add("", 1), add("", None), add("a\nb\n", 3), add("a\nb\n", None)] == [
        "x",
        "x",
        "a\nb\nx",
        "a\nb\nx",
    ]
    with pytest.raises(PatchDoesNotApply, match="not found at the end"):
        add("a\nb\n", 1)


def test_the_nearest_of_several_places_is_changed() -> None:
    old = "begin\nsame\nend\n" * 5
    lines = old.splitlines(keepends=True)
    lines[10] = "other\n"
    hunk = Hunk(
        (HunkLine(" ", "begin"), HunkLine("-", "same"), HunkLine("+", "other")), first_line=10
    )
    assert apply_hunks(old, [hunk], "f") == "".join(lines)


def test_hunks_of_codex_are_found_below_their_anchor_and_each_other() -> None:
    text = "class A:\n  x = 1\nclass B:\n  x = 1\n  y = 1\n"
    hunks = codex_hunks("@@ class B:\n-  x = 1\n+  x = 2\n@@\n-  y = 1\n+  y = 2")
    assert apply_hunks(text, hunks, "f") == "class A:\n  x = 1\nclass B:\n  x = 2\n  y = 2\n"


def test_nested_anchors_narrow_the_search() -> None:
    text = "class A:\n def f():\n  pass\nclass B:\n def f():\n  pass\n"
    hunks = codex_hunks("@@ class B:\n@@  def f():\n-  pass\n+  return 1")
    assert apply_hunks(text, hunks, "f") == text[: -len("  pass\n")] + "  return 1\n"


def test_a_hunk_at_the_end_of_the_file_prefers_the_end() -> None:
    hunks = codex_hunks("@@\n-x\n+y\n*** End of File")
    assert apply_hunks("x\nx\n", hunks, "f") == "x\ny\n"


def test_lines_without_context_are_appended() -> None:
    assert apply_hunks("a\n", codex_hunks("+b"), "f") == "a\nb\n"


@pytest.mark.parametrize(
    ("line", "wanted"),
    [("x  ", "x"), ("  x", "x"), ("\u2018x\u2019 \u2014 y", "'x' - y"), ("x\u00a0y", "x y")],
)
def test_lines_that_differ_in_spaces_or_punctuation_match_and_stay(line: str, wanted: str) -> None:
    hunks = codex_hunks(f"@@\n {wanted}\n-old\n+new")
    assert apply_hunks(f"{line}\nold\n", hunks, "f") == f"{line}\nnew\n"


@pytest.mark.parametrize("first", [None, 1, 2])
@pytest.mark.parametrize("is_loose", [True, False])
def test_a_unified_diff_matches_other_blanks_at_line_ends_only(
    first: int | None, is_loose: bool
) -> None:
    hunk = Hunk(
        (HunkLine(" ", "if a:"), HunkLine("-", "    b \t"), HunkLine("+", "    c")),
        first_line=first,
        is_loose=is_loose or first is None,
    )
    assert apply_hunks("x\nif a:  \n    b\n", [hunk], "f") == "x\nif a:  \n    c\n"
    for text in ("x\nif a:\n        b\n", "x\nif a:\nb\n", "x\n if a:\n    b\n"):
        with pytest.raises(PatchDoesNotApply, match="hunk 1 does not fit f"):
            apply_hunks(text, [hunk], "f")


def test_an_exact_match_is_preferred_to_an_earlier_similar_one() -> None:
    assert apply_hunks(" x\nx\n", codex_hunks("@@\n-x\n+y"), "f") == " x\ny\n"


def test_a_patch_with_lf_fits_a_file_with_crlf() -> None:
    assert apply_hunks("a\r\nb\r\n", codex_hunks("@@\n a\n-b\n+c"), "f") == "a\r\nc\r\n"


def changed(text: str, body: str) -> str:
    (file,) = unified_diff.parse(f"--- a/f\n+++ b/f\n@@ -1 +1 @@\n{body}")
    return apply_hunks(text, file.hunks, "f")


@pytest.mark.parametrize(
    ("text", "body", "after"),
    [
        # The diff states line ends, and the file has those of its old lines.
        ("a\r\nb\r\n", "-a\r\n-b\r\n+a\n+b\n", "a\nb\n"),
        ("a\nb\n", "-a\n-b\n+a\r\n+b\r\n", "a\r\nb\r\n"),
        ("a\nb\n", " a\n-b\n+b\r\n", "a\nb\r\n"),
        ("a\r\nb\n", " a\r\n-b\n+b\r\n", "a\r\nb\r\n"),
        ("a \r\nb\r\n", " a\r\n-b\r\n+b\n", "a \r\nb\n"),
        ("a\r\nb", "-a\r\n-b\n\\ No newline\n+a\n+b\r\n", "a\nb\r\n"),
        ("", "+a\r\n+b\r\n", "a\r\nb\r\n"),
        # It states none, or others than the file, whose line ends stay.
        ("a\r\nb\r\n", " a\n-b\n+c\n", "a\r\nc\r\n"),
        ("a\r\nb", "-a\n+c\n b\n", "c\r\nb"),
        ("a\nb\n", " a\r\n-b\r\n+c\r\n", "a\nc\n"),
        ("a\r\nb\r\n", " a\n-b\n+c\r\n", "a\r\nc\r\n"),
        ("a\r\nb\nx\n", " a\n-b\r\n+c\r\n", "a\r\nc\r\nx\n"),
    ],
)
def test_line_ends_are_changed_by_a_diff_that_states_them(text: str, body: str, after: str) -> None:
    assert changed(text, body) == after


def test_a_hunk_that_does_not_fit_is_named_with_its_lines() -> None:
    hunks = codex_hunks("@@\n-missing\n+y")
    with pytest.raises(PatchDoesNotApply, match=r"hunk 1 does not fit some/file: .*\nmissing"):
        apply_hunks("x\n", hunks, "some/file")


@pytest.mark.parametrize("first", [None, 1])
@pytest.mark.parametrize("is_loose", [True, False])
def test_hunks_in_the_wrong_order_are_named(first: int | None, is_loose: bool) -> None:
    hunks = [
        Hunk((HunkLine("-", text), HunkLine("+", "x")), first_line=first, is_loose=is_loose)
        for text in ("three", "two")
    ]
    reason = "hunk 2 does not fit f: its lines are at line 2, but not below hunk 1: put the hunks"
    with pytest.raises(PatchDoesNotApply, match=reason):
        apply_hunks("one\ntwo\nthree\n", hunks, "f")


def test_a_missing_anchor_is_named() -> None:
    with pytest.raises(PatchDoesNotApply, match="f has no line 'class C:' below line 0"):
        apply_hunks("x\n", codex_hunks("@@ class C:\n-x\n+y"), "f")


def test_a_long_hunk_is_shown_in_part() -> None:
    body = "@@\n" + "\n".join(f"-line {number}" for number in range(50))
    with pytest.raises(PatchDoesNotApply, match="line 4\n… and 45 more lines"):
        apply_hunks("x\n", codex_hunks(body), "f")


def test_repetitive_files_are_searched_in_one_pass() -> None:
    """Equal lines make a candidate of every line: comparing the hunk at each takes minutes."""
    text = "same\n" * 200_000
    hunks = codex_hunks("@@\n" + " same\n" * 50_000 + "-other\n+x")
    with pytest.raises(PatchDoesNotApply):
        apply_hunks(text, hunks, "f")


@pytest.mark.parametrize(
    ("wanted", "found"), [(1, 2), (5, 5), (6, 5), (7, 9), (8, 9), (9, 9), (20, 9)]
)
def test_the_nearest_place_before_or_after(wanted: int, found: int) -> None:
    lines = ["1", "a", "3", "4", "a", "6", "7", "8", "a"]
    hunk = Hunk((HunkLine("-", "a"), HunkLine("+", "b")), first_line=wanted)
    changed = apply_hunks("\n".join(lines), [hunk], "f").split("\n")
    assert [number for number, line in enumerate(changed, 1) if line == "b"] == [found]


def test_a_long_hunk_that_fits_nowhere_is_refused_soon() -> None:
    """A search backwards must not take the product of both lengths."""
    hunk = Hunk((HunkLine(" ", "b"), *[HunkLine(" ", "a")] * 50_000), first_line=100_000)
    with pytest.raises(PatchDoesNotApply, match="does not fit f"):
        apply_hunks("a\n" * 200_000, [hunk], "f")


def test_the_lines_and_the_time_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    hunks = codex_hunks("@@\n-a\n+b")
    with monkeypatch.context() as patched:
        patched.setattr(patching_hunks, "MAX_LINES", 1)
        with pytest.raises(PatchDoesNotApply, match="f has more than 1 lines"):
            apply_hunks("a\nb\n", hunks, "f")
    times = iter([0.0, 1.0, 6.0])
    with pytest.raises(InvalidRequest, match="processor time"):
        apply_hunks("b\n", hunks, "f", Effort(lambda: next(times)))


def loose_hunk(*anchors: str, first: int | None = None) -> Hunk:
    lines = (HunkLine(" ", "f"), HunkLine("-", "x"), HunkLine("+", "y"))
    return Hunk(lines, anchors, first_line=first, is_loose=True)


@pytest.mark.parametrize("first", [None, 1, 9])
def test_a_loose_hunk_fits_one_place(first: int | None) -> None:
    assert apply_hunks("a\nb\nf\nx\n", [loose_hunk(first=first)], "f") == "a\nb\nf\ny\n"
    with pytest.raises(PatchDoesNotApply, match="does not fit f"):
        apply_hunks("f\nz\n", [loose_hunk(first=first)], "f")


def test_a_loose_hunk_that_fits_several_places_needs_its_line_or_a_line_above() -> None:
    text = "f\nx\nclass A:\nf\nx\nf\nx\n"
    with pytest.raises(PatchDoesNotApply, match=r"hunk 1 for p fits several .*lines 1, 4, 6\)"):
        apply_hunks(text, [loose_hunk(first=2)], "p")
    changed = "f\nx\nclass A:\nf\ny\nf\nx\n"
    assert apply_hunks(text, [loose_hunk(first=4)], "p") == changed
    assert apply_hunks(text, [loose_hunk("class A:")], "p") == changed
    indented = text.replace("class", "  class")
    assert apply_hunks(indented, [loose_hunk("class A:")], "p") == changed.replace("cla", "  cla")
    with pytest.raises(PatchDoesNotApply, match="several places"):
        apply_hunks(text, [loose_hunk("class B:")], "p")
    with pytest.raises(PatchDoesNotApply, match=r"lines 1, 3, 5, 7, 9\)"):
        apply_hunks("f\nx\n" * 9, [loose_hunk()], "p")


def test_loose_hunks_are_below_each_other() -> None:
    text = "f\nx\nf\nx\n"
    hunks = [loose_hunk(first=1), loose_hunk(first=1)]
    assert apply_hunks(text, hunks, "p") == "f\ny\nf\ny\n"


def test_a_loose_insertion_needs_a_line_of_the_file() -> None:
    hunk = Hunk((HunkLine("+", "a"),), is_loose=True)
    assert apply_hunks("", [hunk], "p") == "a\n"
    with pytest.raises(PatchDoesNotApply, match="hunk 1 for p adds lines without a line number"):
        apply_hunks("b\n", [hunk], "p")
