"""From the `sandbox` object of a request to a `Policy`, with the client's own paths. Pure."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from exec_server.errors import InternalError, InvalidParams, InvalidRequest, RpcError
from exec_server.protocol import sandbox as wire
from exec_server.protocol.paths import PathUri
from exec_server.sandbox.policy import access
from exec_server.sandbox.policy.access import join, merge_rules, rule_access
from exec_server.sandbox.policy.model import Access, Glob, Policy

# The paths of the special path `minimal`: enough to run the programs of a distribution.
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

_PROJECT_ROOTS_PREFIX: Final = "codex-project-roots://"


@dataclass(frozen=True)
class HostPaths:
    """The paths of this machine that the special paths of a policy stand for."""

    tmpdir: str | None  # TMPDIR of the server, or of the request to start a process
    minimal: tuple[str, ...]  # the existing paths of MINIMAL_PATHS
    slash_tmp: bool  # whether /tmp is a directory
    cwd: str | None  # of the process; None for a file operation


@dataclass(frozen=True)
class _Context:
    """The native cwd and workspace roots that entries are relative to."""

    cwd: str | None
    roots: tuple[str, ...]


def compile_policy(
    sandbox: wire.Sandbox, host_paths: HostPaths, *, for_process: bool, reading: bool = False
) -> Policy | None:
    """The policy of a `sandbox` object, None if the object sets no limits at all.

    `reading` is for file operations that the server performs itself if the policy allows all
    reads: for these the reference ignores a cwd or workspace root of another platform, and so
    does this function. The paths of a process have passed `check_process_paths`. Raises
    InvalidParams or InvalidRequest for errors of the client, InternalError for a glob that cannot
    be enforced.
    """
    permissions = sandbox.permissions
    if isinstance(permissions, wire.Managed) and isinstance(
        permissions.file_system, wire.Restricted
    ):
        file_system = permissions.file_system
        if not for_process:
            _check_cwd_given(sandbox, file_system.entries)
            _check_paths(file_system.entries)
        lenient = not for_process and _needs_no_context(file_system.entries, reading=reading)
        context = _context(sandbox, host_paths, lenient=lenient)
        return _compile_restricted(file_system, permissions.network, context, host_paths)
    if isinstance(permissions, wire.Disabled):
        return None
    return Policy(rules=None, globs=(), network=permissions.network)


# --- checks that come before resolving ---


def _check_cwd_given(sandbox: wire.Sandbox, entries: Sequence[wire.PolicyEntry]) -> None:
    if sandbox.policy_cwd is None and any(map(_is_dynamic, entries)):
        raise InvalidParams("file system sandbox context with dynamic permissions requires cwd")


def _is_dynamic(entry: wire.PolicyEntry) -> bool:
    path = entry.path
    if isinstance(path, wire.GlobPattern):
        return path.pattern[:1] != "/"
    return isinstance(path, wire.SpecialPath) and isinstance(path.value, wire.ProjectRoots)


def _check_paths(entries: Sequence[wire.PolicyEntry]) -> None:
    for entry in entries:
        if isinstance(entry.path, wire.ExactPath):
            _native(entry.path.path, "invalid sandbox permission path URI: ")


def _native(uri: PathUri, prefix: str) -> str:
    try:
        return uri.native()
    except RpcError as reason:
        raise InvalidRequest(prefix + reason.message) from None


def _needs_no_context(entries: Sequence[wire.PolicyEntry], *, reading: bool) -> bool:
    """Whether the server performs the operation itself for any cwd and workspace roots."""
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


def _context(sandbox: wire.Sandbox, host_paths: HostPaths, *, lenient: bool) -> _Context:
    """The native cwd and workspace roots; none at all if lenient and one of them is foreign."""
    cwd = sandbox.policy_cwd
    prefix = "file system sandbox workspace root is not native to this exec-server host: "
    try:
        return _Context(
            host_paths.cwd if cwd is None else cwd.native(),
            tuple(_native(root, prefix) for root in sandbox.policy_roots),
        )
    except RpcError:
        if lenient:
            return _Context(None, ())
        raise


# --- resolving ---


def _compile_restricted(
    file_system: wire.Restricted,
    network: Literal["restricted", "enabled"],
    context: _Context,
    host_paths: HostPaths,
) -> Policy:
    stated: list[tuple[str, Access]] = []
    globs_denied: list[Glob] = []
    for entry in file_system.entries:
        if not isinstance(entry.path, wire.GlobPattern):
            stated.extend(_resolve_entry(entry, context, host_paths))
        elif _access(entry) == "deny":
            for meant in _resolve_pattern(entry.path.pattern, context):
                if isinstance(meant, str):
                    globs_denied.append(_split_glob(meant, file_system.glob_scan_max_depth))
                else:
                    stated.append(meant)
    rules = merge_rules(stated)
    distinct = tuple(dict.fromkeys(globs_denied))
    if (
        not distinct
        and rule_access(rules, "/") == "write"
        and all(r.access == "write" for r in rules)
    ):
        return Policy(rules=None, globs=(), network=network)
    return Policy(rules=rules, globs=distinct, network=network)


def _access(entry: wire.PolicyEntry) -> Access:
    return "deny" if entry.access == "none" else entry.access


def _resolve_entry(
    entry: wire.PolicyEntry, context: _Context, host_paths: HostPaths
) -> Iterator[tuple[str, Access]]:
    access = _access(entry)
    path = entry.path
    if isinstance(path, wire.ExactPath):
        yield path.path.native(), access
        return
    assert isinstance(path, wire.SpecialPath)
    match path.value:
        case wire.Root():
            yield "/", access
        case wire.Minimal():
            for each in host_paths.minimal:
                yield each, access
        case wire.ProjectRoots(subpath=subpath):
            for root in context.roots:
                yield from _resolve_subpath(root, subpath, access)
        case wire.TmpDir():
            tmpdir = host_paths.tmpdir
            if tmpdir and tmpdir[0] != "/":
                # Relative to the cwd of the process, not to the cwd of the policy.
                tmpdir = host_paths.cwd and posixpath.join(host_paths.cwd, tmpdir)
            if tmpdir and "\0" not in tmpdir:
                yield _normal(tmpdir), access
        case wire.SlashTmp():
            if host_paths.slash_tmp:
                yield "/tmp", access
        case wire.UnknownSpecial():
            pass  # from a newer client; the reference ignores it for any access


def _resolve_subpath(
    root: str, subpath: str | None, access: Access
) -> Iterator[tuple[str, Access]]:
    if not subpath:
        yield root, access
    elif _is_plain(subpath):
        yield _normal(join(root, subpath)), access
    elif access != "write":
        # The subpath leads out of the root. The reference then denies the whole root instead of
        # dropping a restriction; a grant with such a subpath grants nothing.
        yield root, "deny"


def _is_plain(subpath: str) -> bool:
    return (
        subpath[0] != "/"
        and "\0" not in subpath
        and not any(name in (".", "..") for name in subpath.split("/"))
    )


def _normal(path: str) -> str:
    """The path without `.`, `..`, double and final slashes, normalised as text."""
    return posixpath.normpath("/" + path.lstrip("/"))


# --- globs ---


def _resolve_pattern(pattern: str, context: _Context) -> Iterator[str | tuple[str, Access]]:
    """The absolute patterns of an entry; a rule in place of a pattern outside of its root."""
    if pattern.startswith(_PROJECT_ROOTS_PREFIX):
        below = pattern.removeprefix(_PROJECT_ROOTS_PREFIX)
        for root in context.roots:
            if not below or _is_plain(below):
                yield _normal(join(root, below))
            else:
                yield root, "deny"  # as for a subpath that leads out of the root
    elif pattern[:1] == "/":
        yield _normal(pattern)
    elif context.cwd is not None:
        yield _normal(join(context.cwd, pattern))


def _split_glob(pattern: str, max_depth: int | None) -> Glob:
    """The glob of an absolute pattern, split before the first name with a wildcard."""
    first = min((i for i in map(pattern.find, "*?[") if i >= 0), default=-1)
    root = pattern[: pattern.rfind("/", 0, first)] if first >= 0 else ""
    if not root:
        raise InternalError(
            f"unreadable glob `{pattern}` cannot be safely expanded; "
            "use a pattern with a non-root directory prefix"
        )
    if any(character in root for character in "{}\\"):
        # The reference takes these characters literally here and as a pattern after the first
        # wildcard, so it would not search the directory that was meant.
        raise InternalError(
            f"unreadable glob `{pattern}` cannot be safely expanded; "
            "use a directory prefix without braces and backslashes"
        )
    glob = Glob(root, pattern[len(root) + 1 :], max_depth)
    access.check(glob)
    return glob
