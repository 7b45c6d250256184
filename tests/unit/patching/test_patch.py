"""Patches of both formats: the files after them, and the paths that they may name."""

from __future__ import annotations

import pytest

from exec_server.errors import PatchDoesNotApply
from exec_server.patching.patch import PatchedFile, named_paths, parse_patch, plan

pytestmark = pytest.mark.quick


def codex(*lines: str) -> str:
    return "\n".join(["*** Begin Patch", *lines, "*** End Patch", ""])


def planned(text: str, **files: bytes) -> list[PatchedFile]:
    return plan(
        parse_patch(text), "/root", {f"/root/{name}": data for name, data in files.items()}.get
    )


def test_both_formats_are_recognized() -> None:
    change = [PatchedFile("/root/f", b"a\n", b"b\n")]
    assert planned(codex("*** Update File: f", "@@", "-a", "+b"), f=b"a\n") == change
    assert planned("--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n", f=b"a\n") == change


def test_files_are_added_deleted_and_renamed() -> None:
    text = codex(
        "*** Add File: new",
        "+x",
        "*** Delete File: gone",
        "*** Update File: old",
        "*** Move to: moved",
    )
    assert planned(text, gone=b"1", old=b"2") == [
        PatchedFile("/root/new", None, b"x\n"),
        PatchedFile("/root/gone", b"1", None),
        PatchedFile("/root/old", b"2", None),
        PatchedFile("/root/moved", None, b"2", renamed_from="/root/old"),
    ]


def test_a_renamed_file_keeps_its_origin() -> None:
    twice = codex("*** Update File: a", "*** Move to: b", "*** Update File: b", "*** Move to: c")
    changes = planned(twice, a=b"1")
    assert changes[-1] == PatchedFile("/root/c", None, b"1", renamed_from="/root/a")
    added = codex("*** Add File: a", "+x", "*** Update File: a", "*** Move to: b")
    assert planned(added) == [PatchedFile("/root/b", None, b"x\n")]


def test_a_later_part_sees_the_changes_of_an_earlier_one() -> None:
    text = codex("*** Update File: f", "@@", "-a", "+b", "*** Update File: ./f", "@@", "-b", "+c")
    assert planned(text, f=b"a\n") == [PatchedFile("/root/f", b"a\n", b"c\n")]


def test_an_added_file_replaces_an_existing_one() -> None:
    assert planned(codex("*** Add File: f", "+x"), f=b"old") == [
        PatchedFile("/root/f", b"old", b"x\n")
    ]


_ADDED = "--- /dev/null\n+++ b/f\n@@ -0,0 +1 @@\n+x\n"
_RENAMED = "diff --git a/f b/g\nsimilarity index 100%\nrename from f\nrename to g\n"
_DELETED = "--- a/f\n+++ /dev/null\n@@ -1,2 +0,0 @@\n-a\n-b\n"


@pytest.mark.parametrize(
    ("diff", "name"),
    [
        (_ADDED, "f"),
        (f"diff --git a/f b/f\nnew file mode 100644\n{_ADDED}", "f"),
        ("diff --git a/f b/f\nnew file mode 100644\nindex 0..e\n", "f"),
        (_RENAMED, "g"),
        (f"{_RENAMED}--- a/f\n+++ b/g\n@@ -1 +1 @@\n-a\n+x\n", "g"),
        ("--- a/f\n+++ b/g\n@@ -1 +1 @@\n-a\n+x\n", "g"),
    ],
)
def test_a_unified_diff_replaces_no_file(diff: str, name: str) -> None:
    with pytest.raises(PatchDoesNotApply, match=f"^{name} already exists$"):
        planned(diff, f=b"a\n", g=b"precious\n")


def test_a_moved_file_of_codex_replaces_an_existing_one() -> None:
    text = codex("*** Update File: f", "*** Move to: g", "@@", "-a", "+b")
    assert planned(text, f=b"a\n", g=b"old\n") == [
        PatchedFile("/root/f", b"a\n", None),
        PatchedFile("/root/g", b"old\n", b"b\n", renamed_from="/root/f"),
    ]


def test_a_file_of_a_diff_may_take_the_place_of_a_deleted_one() -> None:
    assert planned(_DELETED + _ADDED, f=b"a\nb\n") == [PatchedFile("/root/f", b"a\nb\n", b"x\n")]


def test_a_unified_diff_deletes_a_file_of_its_lines_only() -> None:
    assert planned(_DELETED, f=b"a\nb\n") == [PatchedFile("/root/f", b"a\nb\n", None)]
    empty = "diff --git a/f b/f\ndeleted file mode 100644\nindex e..0\n"
    assert planned(empty, f=b"") == [PatchedFile("/root/f", b"", None)]
    with pytest.raises(PatchDoesNotApply, match="hunk 1 does not fit f"):
        planned(_DELETED, f=b"other\n")
    for diff in (_DELETED, empty):
        with pytest.raises(PatchDoesNotApply, match=r"^f has more lines than those"):
            planned(diff, f=b"a\nb\nmine\n")


def test_the_mode_of_git_is_kept() -> None:
    text = "diff --git a/f b/f\nold mode 100644\nnew mode 100755\n"
    assert planned(text, f=b"x") == [PatchedFile("/root/f", b"x", b"x", 0o755)]


def test_bytes_that_are_not_utf8_stay() -> None:
    text = codex("*** Update File: f", "@@", "-a", "+b")
    assert planned(text, f=b"\xff\na\n") == [PatchedFile("/root/f", b"\xff\na\n", b"\xff\nb\n")]


def test_a_missing_file_is_named() -> None:
    with pytest.raises(PatchDoesNotApply, match="f does not exist"):
        planned(codex("*** Update File: f", "@@", "-a", "+b"))


def test_an_absolute_path_below_the_root_is_accepted() -> None:
    assert planned(codex("*** Delete File: /root/f"), f=b"x") == [
        PatchedFile("/root/f", b"x", None)
    ]


def test_the_named_paths_are_those_that_are_read() -> None:
    text = codex("*** Update File: /root/f", "*** Move to: a//./g", "*** Delete File: b/../f")
    read = []

    def note(path: str) -> bytes | None:
        read.append(path)
        return b"x"

    with pytest.raises(PatchDoesNotApply, match="f does not exist"):
        plan(parse_patch(text), "/root/.", note)
    assert named_paths(parse_patch(text), "/root/.") == read == ["/root/f", "/root/a/g"]
    with pytest.raises(PatchDoesNotApply, match=r"outside of the root /root$"):
        named_paths(parse_patch(codex("*** Delete File: /etc/f")), "/root/")


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", "/rootless/x", "a/.", "..", "a/"])
def test_paths_outside_of_the_root_are_refused(path: str) -> None:
    with pytest.raises(PatchDoesNotApply, match=r"outside of the root|not the path of a file"):
        planned(codex(f"*** Add File: {path}", "+x"))
    with pytest.raises(PatchDoesNotApply, match=r"outside of the root|not the path of a file"):
        planned(codex("*** Update File: f", f"*** Move to: {path}"), f=b"x")
