"""The policy of a `sandbox` object; test names state the behaviour of the reference."""

from __future__ import annotations

from typing import Any

import pytest

from exec_server.errors import InternalError, InvalidParams, InvalidRequest
from exec_server.protocol import sandbox as wire
from exec_server.protocol.paths import PathUri
from exec_server.sandbox.policy.access import allows_all_reads
from exec_server.sandbox.policy.compiler import HostPaths, compile_policy
from exec_server.sandbox.policy.model import Glob, Policy

FOREIGN = wire.FileUri.from_wire("file:///C:/x")
INVALID = "'file:///C:/x' is invalid on 'linux'"
NEEDS_CWD = "file system sandbox context with dynamic permissions requires cwd"
HERE = HostPaths(tmpdir="/var/tmp", minimal=("/usr", "/etc"), slash_tmp=True, cwd=None)
PROCESS = HostPaths(tmpdir=None, minimal=("/usr", "/etc"), slash_tmp=True, cwd="/cwd")


def path(text: str, wanted: wire.Access) -> wire.PolicyEntry:
    return wire.PolicyEntry(wire.ExactPath(wire.FileUri.from_wire("file://" + text)), wanted)


def special(value: wire.SpecialKind, wanted: wire.Access) -> wire.PolicyEntry:
    return wire.PolicyEntry(wire.SpecialPath(value), wanted)


def glob(pattern: str, wanted: wire.Access = "deny") -> wire.PolicyEntry:
    return wire.PolicyEntry(wire.GlobPattern(pattern), wanted)


def project(wanted: wire.Access, subpath: str | None = None) -> wire.PolicyEntry:
    return special(wire.ProjectRoots(subpath), wanted)


READ_ALL = special(wire.Root(), "read")
WRITE_ALL = special(wire.Root(), "write")


def sandbox(*entries: wire.PolicyEntry, depth: int | None = None, **context: Any) -> wire.Sandbox:
    file_system = wire.Restricted(list(entries), depth)
    if "cwd" in context:
        context["cwd"] = _uri(context["cwd"])
    if "workspace_roots" in context:
        context["workspace_roots"] = [_uri(root) for root in context["workspace_roots"]]
    return wire.Sandbox(
        permissions=wire.Managed(file_system, "restricted"),
        windows_sandbox_level="disabled",
        **context,
    )


def _uri(value: str | PathUri) -> PathUri:
    return wire.FileUri.from_wire("file://" + value) if isinstance(value, str) else value


def compiled(
    *entries: wire.PolicyEntry,
    host_paths: HostPaths = HERE,
    for_process: bool = False,
    **context: Any,
) -> Policy:
    policy = compile_policy(sandbox(*entries, **context), host_paths, for_process=for_process)
    assert policy is not None
    return policy


def rules(*entries: wire.PolicyEntry, **context: Any) -> list[tuple[str, str]]:
    found = compiled(*entries, **context).rules
    assert found is not None
    return [(rule.path, rule.access) for rule in found]


def test_disabled_means_no_limits_at_all() -> None:
    wanted = wire.Sandbox(permissions=wire.Disabled(), windows_sandbox_level="disabled")
    assert compile_policy(wanted, HERE, for_process=True) is None


@pytest.mark.parametrize(
    "permissions", [wire.External("restricted"), wire.Managed(wire.Unrestricted(), "restricted")]
)
def test_external_and_unrestricted_limit_the_network_only(
    permissions: wire.External | wire.Managed,
) -> None:
    wanted = wire.Sandbox(permissions=permissions, windows_sandbox_level="disabled")
    policy = compile_policy(wanted, HERE, for_process=True)
    assert policy == Policy(rules=None, globs=(), network="restricted")


@pytest.mark.parametrize(
    "entries",
    [
        [WRITE_ALL],
        [WRITE_ALL, READ_ALL],
        [WRITE_ALL, path("/ws", "write")],
        [path("/", "write"), glob("/ws/*.key", "read")],
        [WRITE_ALL, special(wire.UnknownSpecial("x"), "deny")],
    ],
)
def test_writing_everywhere_with_nothing_narrowing_is_no_limit(
    entries: list[wire.PolicyEntry],
) -> None:
    assert compiled(*entries).rules is None


@pytest.mark.parametrize("entry", [path("/out", "read"), path("/out", "deny"), glob("/ws/*.key")])
def test_anything_narrower_than_writing_everywhere_is_a_limit(entry: wire.PolicyEntry) -> None:
    assert compiled(WRITE_ALL, entry).rules is not None


def test_rules_are_sorted_parents_first_and_one_per_path() -> None:
    assert rules(path("/b/c", "read"), path("/b-", "read"), path("/b", "read"), READ_ALL) == [
        ("/", "read"),
        ("/b", "read"),
        ("/b/c", "read"),
        ("/b-", "read"),
    ]


@pytest.mark.parametrize(
    ("wanted", "wins"),
    [
        (["read", "write"], "write"),
        (["write", "read"], "write"),
        (["write", "read", "deny"], "deny"),
        (["none", "write"], "deny"),
    ],
)
def test_at_one_path_deny_beats_write_beats_read(wanted: list[wire.Access], wins: str) -> None:
    assert rules(*(path("/ws", each) for each in wanted)) == [("/ws", wins)]


def test_read_below_deny_is_void_but_not_below_a_write_below_it() -> None:
    entries = [path("/a", "deny"), path("/a/b", "read"), path("/a/b/c", "write")]
    assert rules(*entries, path("/a/b/c/d", "read")) == [
        ("/a", "deny"),
        ("/a/b/c", "write"),
        ("/a/b/c/d", "read"),
    ]


def test_denying_the_root_takes_away_the_root_only() -> None:
    assert rules(READ_ALL, special(wire.Root(), "deny"), path("/ws", "read")) == [("/ws", "read")]


def test_no_entries_grant_nothing() -> None:
    assert compiled() == Policy(rules=(), globs=(), network="restricted")


def test_special_paths_are_what_the_host_paths_say() -> None:
    entries = [special(kind, "read") for kind in (wire.Minimal(), wire.TmpDir(), wire.SlashTmp())]
    unknown = special(wire.UnknownSpecial("x"), "write")
    assert rules(*entries, unknown) == [
        ("/etc", "read"),
        ("/tmp", "read"),
        ("/usr", "read"),
        ("/var/tmp", "read"),
    ]
    nowhere = HostPaths(tmpdir=None, minimal=(), slash_tmp=False, cwd=None)
    assert rules(*entries, host_paths=nowhere) == []


@pytest.mark.parametrize(
    ("tmpdir", "cwd", "expected"),
    [
        ("sub", "/cwd", "/cwd/sub"),
        ("../out/.", "/cwd", "/out"),
        ("/t//x/", "/cwd", "/t/x"),
        ("sub", None, None),
        ("", "/cwd", None),
    ],
)
def test_tmpdir_is_relative_to_the_cwd_of_the_process(
    tmpdir: str, cwd: str | None, expected: str | None
) -> None:
    host_paths = HostPaths(tmpdir=tmpdir, minimal=(), slash_tmp=False, cwd=cwd)
    found = rules(special(wire.TmpDir(), "write"), host_paths=host_paths, cwd="/other")
    assert found == ([] if expected is None else [(expected, "write")])


@pytest.mark.parametrize(
    ("subpath", "expected"),
    [
        (None, [("/r1", "write"), ("/r2", "write")]),
        ("", [("/r1", "write"), ("/r2", "write")]),
        ("a//b/", [("/r1/a/b", "write"), ("/r2/a/b", "write")]),
    ],
)
def test_project_roots_are_all_workspace_roots(
    subpath: str | None, expected: list[tuple[str, str]]
) -> None:
    found = rules(project("write", subpath), cwd="/r1", workspace_roots=["/r1", "/r2", "/r1"])
    assert found == expected


@pytest.mark.parametrize("subpath", ["..", "../x", "a/../b", "/x", ".", "./a", "a\0"])
def test_a_subpath_that_is_not_below_the_root_grants_no_writing(subpath: str) -> None:
    assert rules(project("write", subpath), cwd="/r", workspace_roots=["/r"]) == []


@pytest.mark.parametrize("wanted", ["read", "deny"])
def test_a_limit_whose_subpath_is_not_below_the_root_denies_the_root(wanted: wire.Access) -> None:
    context = {"cwd": "/r", "workspace_roots": ["/r"]}
    found = rules(project("write"), project(wanted, "../x"), **context)
    assert found == [("/r", "deny")]


def test_a_policy_context_replaces_the_outer_roots_and_its_cwd_the_outer_cwd() -> None:
    inner = wire.PolicyContext(workspace_roots=[wire.FileUri.from_wire("file:///inner")])
    found = rules(project("write"), policy_context=inner, cwd="/a", workspace_roots=[FOREIGN])
    assert found == [("/inner", "write")]
    pattern = glob("*.key")
    outer = compiled(READ_ALL, pattern, policy_context=inner, cwd="/outer")
    assert outer.globs == compiled(READ_ALL, pattern, cwd="/outer").globs
    both = wire.PolicyContext(cwd=wire.FileUri.from_wire("file:///inner"))
    replaced = compiled(READ_ALL, pattern, policy_context=both, cwd="/outer")
    assert replaced.globs == compiled(READ_ALL, pattern, cwd="/inner").globs


def test_an_empty_policy_context_means_no_workspace_roots() -> None:
    context: dict[str, Any] = {"cwd": "/ws", "workspace_roots": ["/ws"]}
    assert rules(project("write"), policy_context=wire.PolicyContext(), **context) == []


@pytest.mark.parametrize(
    "entry",
    [project("read"), glob("*.key"), glob("*.key", "read"), glob("codex-project-roots://*.key")],
)
def test_file_operations_need_a_cwd_for_what_depends_on_it(entry: wire.PolicyEntry) -> None:
    # Even before the paths are checked.
    with pytest.raises(InvalidParams, match=NEEDS_CWD):
        compiled(READ_ALL, entry, wire.PolicyEntry(wire.ExactPath(FOREIGN), "read"))
    compiled(READ_ALL, entry, host_paths=PROCESS, for_process=True)


def test_a_foreign_entry_path_is_refused_before_cwd_and_roots() -> None:
    entry = wire.PolicyEntry(wire.ExactPath(FOREIGN), "read")
    with pytest.raises(InvalidRequest) as refusal:
        compiled(entry, cwd=FOREIGN)
    assert refusal.value.message == f"invalid sandbox permission path URI: {INVALID}"


def test_a_foreign_cwd_is_refused_before_a_foreign_root() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        compiled(READ_ALL, cwd=FOREIGN, workspace_roots=[FOREIGN])
    assert refusal.value.message == INVALID


def test_a_foreign_workspace_root_is_refused() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        compiled(READ_ALL, workspace_roots=[FOREIGN])
    assert refusal.value.message == (
        f"file system sandbox workspace root is not native to this exec-server host: {INVALID}"
    )


@pytest.mark.parametrize(
    ("entries", "reading", "is_direct"),
    [
        ([READ_ALL], True, True),
        ([READ_ALL], False, False),
        ([READ_ALL, project("read")], True, True),
        ([READ_ALL, project("deny")], True, False),
        ([READ_ALL, glob("/ws/*.key")], True, False),
        ([path("/ws", "read")], True, False),
        ([WRITE_ALL], False, True),
        ([WRITE_ALL, project("write")], False, True),
        ([WRITE_ALL, project("read")], False, False),
        ([READ_ALL, special(wire.UnknownSpecial("x"), "deny")], True, True),
    ],
)
def test_direct_operations_ignore_a_foreign_cwd_and_root(
    entries: list[wire.PolicyEntry], reading: bool, is_direct: bool
) -> None:
    wanted = sandbox(*entries, cwd=FOREIGN, workspace_roots=[FOREIGN])
    if is_direct:
        policy = compile_policy(wanted, HERE, for_process=False, reading=reading)
        assert policy is not None
        assert allows_all_reads(policy)
    else:
        with pytest.raises(InvalidRequest):
            compile_policy(wanted, HERE, for_process=False, reading=reading)


@pytest.mark.parametrize(
    ("pattern", "root", "rest"),
    [
        ("/ws/**/*.key", "/ws", "**/*.key"),
        ("/ws/sub/a.k?y", "/ws/sub", "a.k?y"),
        ("/ws/s*/a", "/ws", "s*/a"),
        ("/ws/[ab]/", "/ws", "[ab]"),
        ("/ws/./sub/d/..//*.key", "/ws/sub", "*.key"),
        ("*.key", "/cwd", "*.key"),
        ("../x/*.key", "/x", "*.key"),
        ("codex-project-roots://d/*.key", "/r/d", "*.key"),
    ],
)
def test_a_glob_is_split_before_the_first_name_with_a_wildcard(
    pattern: str, root: str, rest: str
) -> None:
    policy = compiled(glob(pattern), cwd="/cwd", workspace_roots=["/r"], depth=3)
    assert policy.globs == (Glob(root, rest, 3),)


@pytest.mark.parametrize("pattern", ["/*.txt", "/**/x", "/ws/a.key", "/ws", "/ws/*/../a"])
def test_a_glob_without_a_directory_to_search_is_refused(pattern: str) -> None:
    with pytest.raises(InternalError, match="cannot be safely expanded; use a pattern with a non-"):
        compiled(glob(pattern))
    assert compiled(glob(pattern, "read")).globs == ()


@pytest.mark.parametrize("pattern", ["/ws/{a,b}/*.key", "/ws/a\\b/*.key"])
def test_a_glob_whose_directory_looks_like_a_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(InternalError, match="without braces and backslashes"):
        compiled(glob(pattern))


def test_a_malformed_glob_is_refused() -> None:
    with pytest.raises(InternalError, match="unreadable glob pattern is invalid for /ws: error"):
        compiled(glob("/ws/*{a"))


@pytest.mark.parametrize("rest", ["/*.key", "../*.key"])
def test_a_project_glob_that_is_not_below_the_root_denies_the_root(rest: str) -> None:
    found = rules(glob(f"codex-project-roots://{rest}"), cwd="/r", workspace_roots=["/r"])
    assert found == [("/r", "deny")]
