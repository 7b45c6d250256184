"""The mounts that enforce a policy on a given tree; names state the reference's behaviour."""

from __future__ import annotations

import errno

import pytest
from tests.support.layout_model import Content, Tree

from exec_server.errors import InternalError
from exec_server.sandbox.policy.access import PROTECTED_NAMES, merge_rules
from exec_server.sandbox.policy.layout import (
    MAX_GIT_FILE_BYTES,
    Unenforceable,
    access_errno,
    is_visible,
    lay_out,
    resolve_globs,
    resolve_writable,
    writable_paths,
)
from exec_server.sandbox.policy.model import Access, Dependency, Glob, Policy, SymbolicLink, View
from exec_server.sandbox.policy.resolver import MAX_LINKS, Unexaminable

READ_ALL: tuple[str, Access] = ("/", "read")
WS: tuple[str, Access] = ("/ws", "write")


def view(
    tree: Tree, *claims: tuple[str, Access], globs: tuple[Glob, ...] = (), denied: str = ""
) -> View:
    return lay_out(Policy(merge_rules(claims), globs, "restricted"), tree, denied.split())


def steps(found: View) -> list[str]:
    """Kind and path of each mount, a passable mask with a star."""
    return [f"{step.kind}{'*' * step.passable} {step.path}" for step in found.steps]


def missing(found: View, *, protected: bool = False) -> list[str]:
    paths = [f"{name.path.rstrip('/')}/{name.name}" for name in found.missing]
    return [p for p in paths if protected or p.rpartition("/")[2] not in PROTECTED_NAMES]


def workspace(*entries: tuple[str, Content]) -> Tree:
    return Tree([("/ws/a.txt", b""), ("/ws/sub/deep", None), ("/out/dir", None), *entries])


def test_a_writable_root_on_a_readable_disk() -> None:
    found = view(workspace(("/ws/.git", None)), READ_ALL, WS)
    assert not found.is_empty
    assert steps(found) == ["write /ws", "read /ws/.git"]
    assert missing(found, protected=True) == ["/ws/.agents", "/ws/.aws", "/ws/.codex"]
    assert found.links == ()


def test_an_empty_root_holds_only_what_is_granted() -> None:
    found = view(workspace(), ("/ws", "read"), ("/out", "deny"), ("/nowhere", "read"))
    assert found.is_empty
    assert steps(found) == ["read /ws"]


def test_no_rules_give_an_empty_root_without_anything() -> None:
    found = view(workspace())
    assert found == View(is_empty=True, steps=(), links=(), missing=(), dependencies=())


def test_a_single_file_may_be_a_writable_root() -> None:
    found = view(workspace(), READ_ALL, ("/ws/a.txt", "write"))
    assert steps(found) == ["write /ws/a.txt"]
    assert not found.steps[0].is_directory
    assert found.missing == ()


def test_a_missing_writable_root_is_skipped_and_noticed_when_it_appears() -> None:
    found = view(workspace(), READ_ALL, ("/no/pe", "write"))
    assert steps(found) == []
    assert Dependency("/no", None, None) in found.dependencies


def test_a_writable_root_that_is_a_link_is_its_target() -> None:
    tree = workspace(("/lnk", "ws"), ("/ws/.git", None))
    found = view(tree, READ_ALL, ("/lnk", "write"), ("/lnk/sub", "read"))
    assert steps(found) == ["write /ws", "read /ws/.git", "read /ws/sub"]
    assert not found.links
    assert "/lnk" in [fact.path for fact in found.dependencies]


def test_a_writable_root_behind_a_link_that_may_be_replaced_grants_nothing() -> None:
    tree = workspace(("/ws/esc", "/out"))
    assert steps(view(tree, READ_ALL, WS, ("/ws/esc", "write"))) == ["write /ws"]
    assert steps(view(tree, READ_ALL, WS, ("/ws/esc/dir", "write"))) == ["write /ws"]


def test_a_writable_root_that_contains_the_link_to_itself_grants_nothing() -> None:
    tree = workspace(("/out/self", "."))
    assert steps(view(tree, READ_ALL, ("/out/self", "write"))) == []


def test_a_read_entry_in_a_writable_root_is_read_only_and_its_parents_are_pinned() -> None:
    found = view(workspace(), READ_ALL, WS, ("/ws/sub/deep", "read"))
    assert steps(found) == ["write /ws", "pin /ws/sub", "read /ws/sub/deep"]


def test_a_writable_root_in_another_one_is_pinned_and_protected_itself() -> None:
    tree = workspace(("/ws/x/y/.git", None))
    found = view(tree, READ_ALL, WS, ("/ws/x/y", "write"))
    assert steps(found) == ["write /ws", "pin /ws/x", "write /ws/x/y", "read /ws/x/y/.git"]
    assert "/ws/x/y/.codex" in missing(found, protected=True)


def test_what_is_in_read_only_places_needs_no_pin() -> None:
    tree = workspace(("/ws/sub/deep/x", None))
    found = view(tree, READ_ALL, WS, ("/ws/sub", "read"), ("/ws/sub/deep/x", "write"))
    assert steps(found) == ["write /ws", "read /ws/sub", "write /ws/sub/deep/x"]


def test_writing_everywhere_but_somewhere_pins_all_parents() -> None:
    found = view(workspace(), ("/", "write"), ("/ws/sub/deep", "read"))
    assert steps(found) == ["write /", "pin /ws", "pin /ws/sub", "read /ws/sub/deep"]
    assert missing(found, protected=True) == ["/.agents", "/.aws", "/.codex", "/.git"]


def test_a_denied_path_is_masked_and_passable_if_something_below_is_writable() -> None:
    tree = workspace(("/ws/a/b/c", None), ("/ws/a/z", None))
    assert steps(view(tree, READ_ALL, WS, ("/ws/a", "deny"))) == ["write /ws", "mask /ws/a"]
    found = view(tree, READ_ALL, WS, ("/ws/a", "deny"), ("/ws/a/b", "write"), ("/ws/a/b/c", "read"))
    assert steps(found) == ["write /ws", "mask* /ws/a", "write /ws/a/b", "read /ws/a/b/c"]


def test_a_deny_below_a_deny_needs_no_mask_of_its_own() -> None:
    found = view(workspace(), READ_ALL, ("/ws", "deny"), ("/ws/sub", "deny"))
    assert steps(found) == ["mask /ws"]


def test_a_limit_behind_a_link_that_nobody_inside_can_replace_holds_for_its_target() -> None:
    tree = workspace(("/lo", "/out"), ("/out/o", b""))
    found = view(tree, READ_ALL, WS, ("/lo/o", "deny"))
    assert steps(found) == ["mask /out/o", "write /ws"]


def test_a_read_that_leads_below_a_deny_is_void() -> None:
    tree = workspace(("/lo", "/out/dir"))
    assert steps(view(tree, ("/ws", "read"), ("/ws/sub", "deny"), ("/lo", "read"))) == [
        "read /out/dir",
        "read /ws",
        "mask /ws/sub",
    ]
    assert steps(view(tree, ("/", "read"), ("/out", "deny"), ("/lo", "read"))) == ["mask /out"]


@pytest.mark.parametrize(
    ("link", "claim", "text"),
    [
        ("/ws/l", ("/ws/l", "deny"), "deny-read path /ws/l because it crosses"),
        ("/ws/l", ("/ws/l/x", "deny"), "deny-read path /ws/l/x because it crosses"),
        ("/ws/l", ("/ws/l/x", "read"), "read-only path /ws/l/x because it crosses"),
        ("/ws/.git", READ_ALL, "read-only path /ws/.git because it crosses"),
    ],
)
@pytest.mark.parametrize("target", ["/out", "sub", "nowhere", "l", ".git"])
def test_a_limit_behind_a_link_that_may_be_replaced_is_refused(
    link: str, claim: tuple[str, Access], text: str, target: str
) -> None:
    with pytest.raises(Unenforceable) as refused:
        view(workspace((link, target)), READ_ALL, WS, claim)
    assert refused.value.message == f"cannot enforce sandbox {text} writable symlink {link}"
    assert refused.value.code == -32603


def test_a_link_in_a_read_only_part_of_a_writable_root_may_be_followed() -> None:
    tree = workspace(("/ws/sub/l", "/out"))
    found = view(tree, READ_ALL, WS, ("/ws/sub", "read"), ("/ws/sub/l/dir", "deny"))
    assert steps(found) == ["mask /out/dir", "write /ws", "read /ws/sub"]


@pytest.mark.parametrize("access", ["read", "deny"])
def test_the_first_missing_name_of_a_limit_is_blocked(access: Access) -> None:
    found = view(workspace(), READ_ALL, WS, ("/ws/sub/m1/m2/m3", access))
    assert missing(found) == ["/ws/sub/m1"]
    assert steps(found) == ["write /ws", "pin /ws/sub"]


def test_what_is_missing_where_nobody_can_write_is_only_noticed() -> None:
    found = view(workspace(), READ_ALL, WS, ("/out/m1/m2", "deny"))
    assert missing(found) == []
    assert Dependency("/out/m1", None, None) in found.dependencies


def test_a_file_in_the_way_of_a_limit_cannot_be_replaced_with_a_directory() -> None:
    found = view(workspace(), READ_ALL, WS, ("/ws/a.txt/x", "deny"))
    assert steps(found) == ["write /ws", "pin /ws/a.txt"]


def test_granting_a_protected_name_unprotects_it_whether_it_exists_or_not() -> None:
    tree = workspace(("/ws/.git", None))
    found = view(tree, READ_ALL, WS, ("/ws/.git", "write"), ("/ws/.codex", "write"))
    assert steps(found) == ["write /ws", "write /ws/.git"]
    assert "/ws/.codex" not in missing(found, protected=True)
    assert "/ws/.aws" in missing(found, protected=True)


def test_granting_something_below_a_protected_name_leaves_the_rest_protected() -> None:
    tree = workspace(("/ws/.git/hooks", None))
    found = view(tree, READ_ALL, WS, ("/ws/.git/hooks", "write"), ("/ws/.codex/hooks", "write"))
    assert steps(found) == ["write /ws", "read /ws/.git", "write /ws/.git/hooks"]
    assert "/ws/.codex" in missing(found, protected=True)


def test_a_protected_name_granted_through_a_link_is_unprotected() -> None:
    tree = workspace(("/ws/.git", None), ("/lnk", "/ws"))
    found = view(tree, READ_ALL, ("/lnk", "write"), ("/lnk/.git", "write"))
    assert steps(found) == ["write /ws", "write /ws/.git"]


def test_a_granted_protected_name_that_is_a_link_is_not_followed() -> None:
    tree = workspace(("/ws/.git", "/out"))
    assert steps(view(tree, READ_ALL, WS, ("/ws/.git", "write"))) == ["write /ws"]


@pytest.mark.parametrize("access", ["read", "deny"])
def test_a_limit_on_a_protected_name_wins_over_its_protection(access: Access) -> None:
    tree = workspace(("/ws/.git", None))
    kind = {"read": "read", "deny": "mask"}[access]
    found = view(tree, READ_ALL, WS, ("/ws/.git", access), ("/ws/.codex", access))
    assert steps(found) == ["write /ws", f"{kind} /ws/.git"]
    assert missing(found, protected=True).count("/ws/.codex") == 1


def test_deeper_names_and_other_spellings_are_ordinary() -> None:
    tree = workspace(("/ws/sub/.git", None), ("/ws/.Git", None))
    assert steps(view(tree, READ_ALL, WS)) == ["write /ws"]


@pytest.mark.parametrize(
    "content", [b"gitdir: sub/deep\n", b"gitdir:  /ws/sub/deep ", b"gitdir: ../ws/sub/deep"]
)
def test_the_repository_that_a_git_file_points_at_is_read_only(content: bytes) -> None:
    found = view(workspace(("/ws/.git", content)), READ_ALL, WS)
    expected = ["write /ws", "read /ws/.git", "pin /ws/sub", "read /ws/sub/deep"]
    assert steps(found) == expected
    # Even if the file itself is writable.
    found = view(workspace(("/ws/.git", content)), READ_ALL, WS, ("/ws/.git", "write"))
    assert "read /ws/sub/deep" in steps(found)


@pytest.mark.parametrize(
    "content", [b"x\ngitdir: sub", b"", b"gitdir:", b"gitdir", b"gitdir: \n", b"\0gitdir: sub"]
)
def test_a_git_file_that_points_nowhere_protects_itself_only(content: bytes) -> None:
    found = view(workspace(("/ws/.git", content)), READ_ALL, WS)
    assert steps(found) == ["write /ws", "read /ws/.git"]
    assert missing(found) == []


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (b"gitdir: sub \n\r\n", ["/ws/sub "]),
        (b"gitdir:  sub", ["/ws/ sub"]),
        (b"gitdir:\tsub", ["/ws/\tsub"]),
        (b"gitdir: \xff", ["/ws/\udcff"]),
    ],
)
def test_a_repository_is_protected_as_git_spells_it(content: bytes, names: list[str]) -> None:
    """Git keeps blanks around the path; without them it is another one."""
    found = view(workspace(("/ws/.git", content)), READ_ALL, WS)
    assert missing(found) == names
    if b"sub" in content:
        assert "read /ws/sub" in steps(found)


_LONG = b"gitdir: " + b"x" * (MAX_GIT_FILE_BYTES - len(b"gitdir: "))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"gitdir: sub\0", "a null byte"),  # where the path ends for Git
        (b"gitdir: s\0b", "a null byte"),
        (_LONG + b"x", "longer than a path can be"),
        (b"gitdir: sub" + b"\n" * MAX_GIT_FILE_BYTES, "longer than a path can be"),
    ],
    ids=["null at the end", "null", "long", "long by newlines"],
)
def test_a_git_file_that_is_not_understood_is_refused(content: bytes, reason: str) -> None:
    with pytest.raises(Unexaminable, match=f"/ws/.git cannot be examined: .*{reason}"):
        view(workspace(("/ws/.git", content)), READ_ALL, WS)


def test_the_longest_git_file_is_read() -> None:
    assert missing(view(workspace(("/ws/.git", _LONG)), READ_ALL, WS)) == ["/ws/" + "x" * 4096]


_OTHER_USER = 1234


def _with_foreign(name: str, content: Content, *, sticky: bool, owner: int = 1) -> Tree:
    """A workspace of another user, where a third user has put an entry."""
    tree = workspace((f"/ws/{name}", content))
    tree.owners |= {"/ws": owner, f"/ws/{name}": _OTHER_USER}
    if sticky:
        tree.sticky.add("/ws")
    return tree


def test_a_link_of_another_user_at_a_protected_name_is_left_alone() -> None:
    """Only its owner can replace it, and its target must not become read-only."""
    for target in ("sub", "/out", "nowhere"):
        found = view(_with_foreign(".codex", target, sticky=True), READ_ALL, WS)
        assert steps(found) == ["write /ws"]
        assert missing(found, protected=True) == ["/ws/.agents", "/ws/.aws", "/ws/.git"]
        assert "/ws/.codex" in [dependency.path for dependency in found.dependencies]


def test_a_git_file_of_another_user_does_not_make_its_target_read_only() -> None:
    tree = _with_foreign(".git", b"gitdir: sub", sticky=True)
    assert steps(view(tree, READ_ALL, WS)) == ["write /ws", "read /ws/.git"]


@pytest.mark.parametrize("kind", [None, b""])
def test_other_entries_of_another_user_are_covered(kind: Content) -> None:
    found = view(_with_foreign(".codex", kind, sticky=True), READ_ALL, WS)
    assert steps(found) == ["write /ws", "read /ws/.codex"]


@pytest.mark.parametrize(("sticky", "owner"), [(False, 1), (True, 0)], ids=["shared", "own"])
def test_a_link_of_another_user_that_a_command_could_replace_is_refused(
    sticky: bool, owner: int
) -> None:
    tree = _with_foreign(".codex", "sub", sticky=sticky, owner=owner)
    with pytest.raises(Unenforceable, match=r"symlink /ws/.codex, which belongs to uid 1234$"):
        view(tree, READ_ALL, WS)


def test_a_link_of_another_user_on_the_way_of_a_stated_path_is_refused() -> None:
    tree = _with_foreign("link", "/out", sticky=True)
    with pytest.raises(Unenforceable, match=r"symlink /ws/link, which belongs to uid 1234$"):
        view(tree, READ_ALL, WS, ("/ws/link/dir", "deny"))
    assert steps(view(tree, READ_ALL, WS, ("/ws/link", "write"))) == ["write /ws"]


def test_a_denied_file_that_was_removed_is_noticed_when_it_appears() -> None:
    found = view(workspace(), READ_ALL, WS, denied="/ws/gone.key")
    assert Dependency("/ws/gone.key", None, None) in found.dependencies


def test_a_missing_repository_must_stay_missing() -> None:
    found = view(workspace(("/ws/.git", b"gitdir: nope/q")), READ_ALL, WS)
    assert missing(found) == ["/ws/nope"]


def test_a_repository_in_another_writable_root_is_read_only_unless_granted() -> None:
    tree = workspace(("/ws/.git", b"gitdir: ../out/dir"))
    assert "read /out/dir" in steps(view(tree, READ_ALL, WS, ("/out", "write")))
    found = view(tree, READ_ALL, WS, ("/out", "write"), ("/out/dir", "write"))
    assert "write /out/dir" in steps(found)


def test_a_git_file_does_not_make_its_repository_readable() -> None:
    tree = workspace(("/ws/.git", b"gitdir: ../out/dir"))
    assert steps(view(tree, WS)) == ["write /ws", "read /ws/.git"]


def test_a_repository_behind_a_link_that_may_be_replaced_is_refused() -> None:
    tree = workspace(("/ws/l", "sub"), ("/ws/.git", b"gitdir: l/deep"))
    with pytest.raises(Unenforceable, match=r"read-only path /ws/l/deep because .* /ws/l$"):
        view(tree, READ_ALL, WS)


def test_links_to_granted_places_are_made_in_an_empty_root() -> None:
    tree = Tree([("/usr/bin/sh", b""), ("/bin", "usr/bin"), ("/x/sh", "../bin/sh")])
    found = view(tree, ("/bin", "read"), ("/x/sh", "read"))
    assert steps(found) == ["read /usr/bin"]
    assert found.links == (SymbolicLink("/bin", "usr/bin"), SymbolicLink("/x/sh", "/usr/bin/sh"))


def test_links_inside_granted_places_are_there_already() -> None:
    tree = workspace(("/ws/sub/l", "/out/dir"))
    found = view(tree, ("/ws", "read"), ("/ws/sub/l", "read"))
    assert steps(found) == ["read /out/dir", "read /ws"]
    assert found.links == ()


def test_no_link_is_made_for_a_granted_path_that_does_not_exist() -> None:
    tree = workspace(("/x/l", "/ws"))
    assert view(tree, ("/ws", "read"), ("/x/l/none", "read")).links == ()


def test_a_file_in_the_way_of_a_denied_path_stays_a_file() -> None:
    found = view(workspace(), READ_ALL, WS, ("/ws/a.txt/x", "deny"))
    assert missing(found) == []
    assert "pin /ws/a.txt" in steps(found)


def test_existing_writable_paths_are_found_where_their_links_lead() -> None:
    tree = workspace(("/lnk", "/ws"))
    claims: list[tuple[str, Access]] = [("/lnk/sub", "write"), ("/lnk/none", "write"), READ_ALL]
    policy = Policy(merge_rules(claims), (), "restricted")
    assert resolve_writable(policy, tree) == ["/ws/sub"]
    assert resolve_writable(Policy(None, (), "restricted"), tree) == []


def test_a_loop_of_links_is_nothing() -> None:
    tree = workspace(("/l1", "l2"), ("/l2", "l1"))
    found = view(tree, READ_ALL, ("/l1", "deny"), ("/l2/x", "write"))
    assert steps(found) == []
    assert {fact.path for fact in found.dependencies} == {"/", "/l1", "/l2"}


def test_as_many_links_are_followed_as_the_kernel_follows() -> None:
    tree = workspace(*((f"/l{n}", f"l{n + 1}") for n in range(MAX_LINKS)), (f"/l{MAX_LINKS}", None))
    assert steps(view(tree, READ_ALL, ("/l0", "deny"))) == [f"mask /l{MAX_LINKS}"]
    tree.put("/l", "l0")
    assert steps(view(tree, READ_ALL, ("/l", "deny"))) == []


def test_matches_of_globs_are_masked_even_where_writing_was_granted() -> None:
    tree = workspace(("/ws/sub/a.key", b""))
    denied = "/ws/sub/a.key /ws/a.txt /ws/gone /out/dir"
    found = view(tree, READ_ALL, WS, ("/ws/a.txt", "write"), denied=denied)
    masks = ["mask /ws/a.txt", "pin /ws/sub", "mask /ws/sub/a.key"]
    assert steps(found) == ["mask /out/dir", "write /ws", *masks]


def test_a_directory_that_matches_a_glob_is_reopened_by_a_grant_below_it() -> None:
    found = view(workspace(), READ_ALL, WS, ("/ws/sub/deep", "write"), denied="/ws/sub")
    assert steps(found) == ["write /ws", "mask* /ws/sub", "write /ws/sub/deep"]
    found = view(workspace(), READ_ALL, WS, ("/ws/sub", "write"), denied="/ws/sub")
    assert steps(found) == ["write /ws", "mask /ws/sub"]


def test_denied_files_that_are_not_visible_need_no_mask() -> None:
    assert steps(view(workspace(), ("/out", "read"), denied="/ws/a.txt")) == ["read /out"]


def test_facts_are_all_that_the_view_depends_on() -> None:
    tree = workspace(("/lnk", "ws"), ("/ws/.git", b"gitdir: sub/deep"))
    found = view(tree, READ_ALL, ("/lnk", "write"), ("/ws/sub/m", "deny"), ("/none", "write"))
    nodes = {fact.path: fact.inode for fact in found.dependencies}
    absent = [path for path, inode in nodes.items() if inode is None]
    assert absent == ["/none", "/ws/.agents", "/ws/.aws", "/ws/.codex", "/ws/sub/m"]
    there = [path for path, inode in nodes.items() if inode is not None]
    assert there == ["/", "/lnk", "/ws", "/ws/.git", "/ws/sub", "/ws/sub/deep"]
    assert all(tree.holds(fact) for fact in found.dependencies)


def test_the_roots_of_globs_are_searched_where_their_links_lead() -> None:
    tree = workspace(("/lnk", "/ws"))
    globs = (Glob("/lnk/sub", "*.key", 2), Glob("/ws/sub", "*.key", 2), Glob("/lnk/no/pe", "*", 1))
    policy = Policy(merge_rules([READ_ALL, WS]), globs, "restricted")
    assert resolve_globs(policy, tree) == (Glob("/ws/sub", "*.key", 2), Glob("/ws/no/pe", "*", 1))
    dependencies = {fact.path for fact in lay_out(policy, tree).dependencies}
    assert {"/lnk", "/ws/no"} <= dependencies
    # A glob root denies nothing itself, missing or not.
    assert missing(lay_out(policy, tree)) == []


def test_a_glob_behind_a_link_that_may_be_replaced_is_refused() -> None:
    tree = workspace(("/ws/l", "/out"))
    with pytest.raises(Unenforceable, match="deny-read path /ws/l/dir"):
        view(tree, READ_ALL, WS, globs=(Glob("/ws/l/dir", "*", None),))


def test_a_link_that_is_gone_when_it_is_read_is_nothing() -> None:
    class Changing(Tree):
        def link_target(self, path: str) -> str:
            return ""

    tree = Changing([("/lnk", "/ws"), ("/ws", None)])
    assert steps(view(tree, READ_ALL, ("/lnk", "write"))) == []


def test_a_disk_without_a_root_cannot_be_laid_out() -> None:
    tree = Tree()
    tree.remove("/")
    with pytest.raises(InternalError, match="/ cannot be examined"):
        view(tree, READ_ALL)


# ---- access to a resolved path ---------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "reading", "writing"),
    [
        ("/etc/x", 0, errno.EROFS),
        ("/ws/a.txt", 0, 0),
        ("/ws/a/b/x", 0, 0),
        ("/ws/ab", 0, 0),
        ("/ws/sub/deep", 0, errno.EROFS),
        ("/ws/.git", 0, errno.EROFS),
        ("/ws/.git/x", 0, errno.EROFS),
        ("/dev/null", 0, 0),
        # A mask with something writable below is an empty directory otherwise.
        ("/ws/a", errno.EACCES, errno.EACCES),
        ("/ws/a/z", errno.ENOENT, errno.ENOENT),
        ("/out/dir", errno.EACCES, errno.EACCES),
        ("/out/dir/x", errno.EACCES, errno.EACCES),
        # Nothing is there that could be masked.
        ("/ws/later", errno.EACCES, errno.EACCES),
        ("/ws/later/x", errno.EACCES, errno.EACCES),
        ("/ws/later.txt", 0, 0),
    ],
)
def test_the_access_to_a_path_in_a_view(path: str, reading: int, writing: int) -> None:
    found = view(
        workspace(("/ws/a/b", None), ("/ws/a/z", None)),
        READ_ALL,
        WS,
        ("/ws/a", "deny"),
        ("/ws/a/b", "write"),
        ("/ws/sub", "read"),
        ("/ws/later", "deny"),
        ("/out/dir", "deny"),
    )
    assert access_errno(found, path, writing=False) == reading
    assert access_errno(found, path, writing=True) == writing
    assert is_visible(found, path) is (reading == 0)
    assert writable_paths(found) == ["/ws", "/ws/a/b"]


def test_what_is_writable_below_a_deny_is_reached() -> None:
    found = view(workspace(), READ_ALL, ("/ws/sub", "deny"), ("/ws/sub/deep", "write"))
    assert access_errno(found, "/ws/sub/deep/x", writing=True) == 0


def test_an_empty_root_shows_only_what_is_granted() -> None:
    found = view(workspace(), ("/ws", "read"))
    assert is_visible(found, "/ws/a.txt")
    assert not is_visible(found, "/out")
