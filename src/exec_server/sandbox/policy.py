"""From the `sandbox` object of a request to a `Policy`: chapter and verse, no disk.

A policy speaks of paths as the client spelt them. Which of them are links, or missing, is
found out by `layout`, which applies the same rules to what the disk holds.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from exec_server.errors import InternalError, InvalidParams, InvalidRequest, RpcError
from exec_server.protocol import sandbox as wire
from exec_server.protocol.paths import PathUri
from exec_server.sandbox import globs
from exec_server.sandbox.plan import Access, Glob, Policy, Rule

# What `minimal` stands for: enough to run the programs of a distribution.
MINIMAL_PATHS: Final = (
    "/bin",
    "/sbin",
    "/usr",
    "/etc",
    "/lib",
    "/lib64",
    "/nix/store",
    "/run/current-system/sw",
)
# Directly below a writable root these stay as they are: they make other programs run code.
PROTECTED_NAMES: Final = (".git", ".agents", ".codex", ".aws")

_PROJECT_ROOTS_PREFIX: Final = "codex-project-roots://"
_STRENGTH: Final[dict[Access, int]] = {"read": 0, "write": 1, "deny": 2}


@dataclass(frozen=True)
class Surroundings:
    """What the special paths of a policy mean where, and for whom, it is compiled."""

    tmpdir: str | None  # TMPDIR of the server, or of the request for a process
    minimal: tuple[str, ...]  # those of MINIMAL_PATHS that exist
    slash_tmp: bool  # whether /tmp is a directory
    cwd: str | None  # of the process; None for a file operation


@dataclass(frozen=True)
class _Context:
    """What relative things are relative to."""

    cwd: str | None
    roots: tuple[str, ...]


def compile_policy(
    sandbox: wire.Sandbox,
    surroundings: Surroundings,
    *,
    for_process: bool,
    reading: bool = False,
) -> Policy | None:
    """What the object asks for, None if it asks for no limits at all.

    `reading` is for file operations that are answered directly when the policy lets them
    read everything: for those the reference ignores a cwd or workspace root of another
    platform, and so does this. Raises InvalidParams or InvalidRequest for what the client
    got wrong, InternalError for a glob that cannot be enforced.
    """
    permissions = sandbox.permissions
    if isinstance(permissions, wire.Managed) and isinstance(
        permissions.file_system, wire.Restricted
    ):
        file_system = permissions.file_system
        if not for_process:
            _check_cwd_given(sandbox, file_system.entries)
        _check_paths(file_system.entries, for_process=for_process)
        lenient = not for_process and _needs_no_context(file_system.entries, reading=reading)
        context = _context(sandbox, surroundings, for_process=for_process, lenient=lenient)
        return _restricted(file_system, permissions.network, context, surroundings)
    if for_process:
        # Checked by the reference even where nothing depends on it.
        _context(sandbox, surroundings, for_process=True, lenient=False)
    if isinstance(permissions, wire.Disabled):
        return None
    return Policy(rules=None, globs=(), network=permissions.network)


def reads_everything(policy: Policy) -> bool:
    """Whether no read is denied, so that reads need no confined process."""
    if policy.globs:
        return False
    if policy.rules is None:
        return True
    return access(policy, "/") is not None and all(r.access != "deny" for r in policy.rules)


def access(policy: Policy, path: str) -> Access | None:
    """What the deepest rule above a path grants; protected names and globs not considered."""
    return "write" if policy.rules is None else access_by(policy.rules, path)


def access_by(rules: Sequence[Rule], path: str) -> Access | None:
    """What the deepest of the rules, sorted as in a policy, grants at a path."""
    rule = _deepest(rules, path)
    return None if rule is None else rule.access


def explain(policy: Policy, path: str, operation: Literal["read", "write"]) -> str | None:
    """Which rule denies an operation on a path without links, None if it is allowed."""
    for glob in policy.globs:
        if globs.matches(glob, path):
            return f"deny glob {join(glob.root, glob.pattern)}"
    if policy.rules is None:
        return None
    rule = _deepest(policy.rules, path)
    if rule is None:
        return "no entry covers it"
    if rule.access == "deny":
        return f"deny entry {rule.path}"
    if operation == "read":
        return None
    if rule.access == "read":
        return f"no entry grants writing; the deepest entry is read {rule.path}"
    name = path[len(rule.path) :].lstrip("/").partition("/")[0]
    if name in PROTECTED_NAMES:
        return f"`{name}` below the writable root {rule.path} is protected"
    return None


def settled(claims: Iterable[tuple[str, Access]]) -> tuple[Rule, ...]:
    """The rules that hold, of all that were stated: sorted parents first, one per path.

    At one path the strictest wins, except that reading gives way to writing. A read below a
    deny is void. A deny of `/` itself is as good as saying nothing, and reads below it hold.
    """
    strongest: dict[str, Access] = {}
    for path, wanted in claims:
        known = strongest.get(path)
        if known is None or _STRENGTH[wanted] > _STRENGTH[known]:
            strongest[path] = wanted
    if strongest.get("/") == "deny":
        del strongest["/"]
    rules: list[Rule] = []
    for path in sorted(strongest, key=components):
        if strongest[path] == "read" and access_by(rules, path) == "deny":
            continue
        rules.append(Rule(path, strongest[path]))
    return tuple(rules)


def covers(parent: str, path: str) -> bool:
    """Whether a path is `parent` or lies below it."""
    return parent in ("/", path) or path.startswith(parent + "/")


def components(path: str) -> list[str]:
    """The names in an absolute path; sorting by them puts parents first."""
    return [name for name in path.split("/") if name]


def join(directory: str, name: str) -> str:
    """The path of a name in a directory."""
    return f"{directory.rstrip('/')}/{name}"


def _deepest(rules: Sequence[Rule], path: str) -> Rule | None:
    # Of rules that cover one path each covers the next, so the last one is the deepest.
    for rule in reversed(rules):
        if covers(rule.path, path):
            return rule
    return None


# --- what has to be in order before anything is resolved ---


def _check_cwd_given(sandbox: wire.Sandbox, entries: Sequence[wire.Entry]) -> None:
    cwd = (sandbox.policy_context or sandbox).cwd
    if cwd is None and any(map(_is_dynamic, entries)):
        raise InvalidParams("file system sandbox context with dynamic permissions requires cwd")


def _is_dynamic(entry: wire.Entry) -> bool:
    path = entry.path
    if isinstance(path, wire.GlobPattern):
        return path.pattern[:1] != "/"
    return isinstance(path, wire.SpecialPath) and isinstance(path.value, wire.ProjectRoots)


def _check_paths(entries: Sequence[wire.Entry], *, for_process: bool) -> None:
    error = InvalidParams if for_process else InvalidRequest
    for entry in entries:
        if isinstance(entry.path, wire.ExactPath):
            _native(entry.path.path, "invalid sandbox permission path URI: ", error)


def _native(uri: PathUri, prefix: str, error: type[RpcError]) -> str:
    try:
        return uri.native(error)
    except RpcError as reason:
        raise error(prefix + reason.message) from None


def _needs_no_context(entries: Sequence[wire.Entry], *, reading: bool) -> bool:
    """Whether the operation is direct, whatever cwd and workspace roots may be."""
    effective = [
        entry
        for entry in entries
        if not (isinstance(entry.path, wire.SpecialPath))
        or not isinstance(entry.path.value, wire.UnknownSpecial)
    ]
    if any(_access(entry) == "deny" for entry in effective):
        return False
    effective = [entry for entry in effective if not isinstance(entry.path, wire.GlobPattern)]
    at_root = {_access(entry) for entry in effective if _is_root(entry.path)}
    if reading:
        return bool(at_root)
    return "write" in at_root and all(
        _access(entry) == "write" or _is_root(entry.path) for entry in effective
    )


def _is_root(path: wire.ExactPath | wire.GlobPattern | wire.SpecialPath) -> bool:
    if isinstance(path, wire.ExactPath):
        return path.path.native() == "/"
    return isinstance(path, wire.SpecialPath) and isinstance(path.value, wire.Root)


def _context(
    sandbox: wire.Sandbox, surroundings: Surroundings, *, for_process: bool, lenient: bool
) -> _Context:
    """The native cwd and workspace roots; those of another platform are left out if lenient."""
    stated = sandbox.policy_context or sandbox
    error = InvalidParams if for_process else InvalidRequest
    try:
        cwd = surroundings.cwd
        if stated.cwd is not None:
            prefix = f"sandbox cwd URI `{stated.cwd}` is not valid on this exec-server host: "
            cwd = _native(stated.cwd, prefix if for_process else "", error)
        roots = []
        for root in stated.workspace_roots:
            prefix = (
                f"sandbox workspace root URI `{root}` is not valid on this exec-server host: "
                if for_process
                else "file system sandbox workspace root is not native to this exec-server host: "
            )
            roots.append(_native(root, prefix, error))
    except RpcError:
        if lenient:
            return _Context(None, ())
        raise
    return _Context(cwd, tuple(roots))


# --- resolving ---


def _restricted(
    file_system: wire.Restricted,
    network: Literal["restricted", "enabled"],
    context: _Context,
    surroundings: Surroundings,
) -> Policy:
    claims: list[tuple[str, Access]] = []
    denied: list[Glob] = []
    for entry in file_system.entries:
        if not isinstance(entry.path, wire.GlobPattern):
            claims.extend(_resolved(entry, context, surroundings))
        elif _access(entry) == "deny":
            for stated in _glob_patterns(entry.path.pattern, context):
                if isinstance(stated, str):
                    denied.append(_glob(stated, file_system.glob_scan_max_depth))
                else:
                    claims.append(stated)
    rules = settled(claims)
    distinct = tuple(dict.fromkeys(denied))
    if (
        not distinct
        and access_by(rules, "/") == "write"
        and all(r.access == "write" for r in rules)
    ):
        return Policy(rules=None, globs=(), network=network)
    return Policy(rules=rules, globs=distinct, network=network)


def _access(entry: wire.Entry) -> Access:
    return "deny" if entry.access == "none" else entry.access


def _resolved(
    entry: wire.Entry, context: _Context, surroundings: Surroundings
) -> Iterator[tuple[str, Access]]:
    wanted = _access(entry)
    path = entry.path
    if isinstance(path, wire.ExactPath):
        yield path.path.native(), wanted
        return
    assert isinstance(path, wire.SpecialPath)
    match path.value:
        case wire.Root():
            yield "/", wanted
        case wire.Minimal():
            for each in surroundings.minimal:
                yield each, wanted
        case wire.ProjectRoots(subpath=subpath):
            for root in context.roots:
                yield from _below_root(root, subpath, wanted)
        case wire.TmpDir():
            tmpdir = surroundings.tmpdir
            if tmpdir and tmpdir[0] != "/":
                # Of the process's own cwd, whatever the cwd of the policy is.
                tmpdir = surroundings.cwd and posixpath.join(surroundings.cwd, tmpdir)
            if tmpdir and "\0" not in tmpdir:
                yield _normal(tmpdir), wanted
        case wire.SlashTmp():
            if surroundings.slash_tmp:
                yield "/tmp", wanted
        case wire.UnknownSpecial():
            pass  # of a newer client; the reference ignores it whatever the access


def _below_root(root: str, subpath: str | None, wanted: Access) -> Iterator[tuple[str, Access]]:
    if not subpath:
        yield root, wanted
    elif _is_plain(subpath):
        yield _normal(join(root, subpath)), wanted
    elif wanted != "write":
        # Not a place below the root. The reference then denies all of it rather than leave
        # out a restriction it cannot place; a grant it cannot place grants nothing.
        yield root, "deny"


def _is_plain(subpath: str) -> bool:
    return (
        subpath[0] != "/"
        and "\0" not in subpath
        and not any(name in (".", "..") for name in subpath.split("/"))
    )


def _normal(path: str) -> str:
    """The path without `.`, `..`, double and final slashes; lexically."""
    return posixpath.normpath("/" + path.lstrip("/"))


# --- globs ---


def _glob_patterns(pattern: str, context: _Context) -> Iterator[str | tuple[str, Access]]:
    """The absolute patterns meant, or the claim that takes the place of one."""
    if pattern.startswith(_PROJECT_ROOTS_PREFIX):
        rest = pattern.removeprefix(_PROJECT_ROOTS_PREFIX)
        for root in context.roots:
            if not rest or _is_plain(rest):
                yield _normal(join(root, rest))
            else:
                yield root, "deny"  # as for a subpath that is not below the root
    elif pattern[:1] == "/":
        yield _normal(pattern)
    elif context.cwd is not None:
        yield _normal(join(context.cwd, pattern))


def _glob(pattern: str, max_depth: int | None) -> Glob:
    """The glob of an absolute pattern, split before the first name with a wildcard."""
    first = min((i for i in map(pattern.find, "*?[") if i >= 0), default=-1)
    root = pattern[: pattern.rfind("/", 0, first)] if first >= 0 else ""
    if not root:
        raise InternalError(
            f"unreadable glob `{pattern}` cannot be safely expanded; "
            "use a pattern with a non-root directory prefix"
        )
    if any(character in root for character in "{}\\"):
        # The reference takes these literally here and as a pattern behind the first wildcard,
        # so that what was meant to be denied is not searched for at all.
        raise InternalError(
            f"unreadable glob `{pattern}` cannot be safely expanded; "
            "use a directory prefix without braces and backslashes"
        )
    glob = Glob(root, pattern[len(root) + 1 :], max_depth)
    globs.check(glob)
    return glob
