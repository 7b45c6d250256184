"""From a `Policy` and the current state of the disk to the `View` that enforces it. Pure.

A confined process may rename and re-link all that it may write, so every path is resolved name by
name. A link that it could replace is never followed: a restriction that crosses one is refused, and
a grant grants nothing, because the next target of the link would be granted next time. Each
directory between a writable root and a mount is pinned, because renaming it would move the mount
away and leave its path free for a forgery.
"""

from __future__ import annotations

import errno
import posixpath
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from exec_server.errors import InternalError
from exec_server.sandbox.policy.access import (
    PROTECTED_NAMES,
    components,
    contains,
    join,
    merge_rules,
    rule_access,
)
from exec_server.sandbox.policy.model import (
    Access,
    Glob,
    MissingName,
    Policy,
    Rule,
    Step,
    SymbolicLink,
    View,
)
from exec_server.sandbox.policy.resolver import (
    CrossedLink,
    Disk,
    DiskResolver,
    PathNode,
    ResolvedPath,
    Unexaminable,
)

# A `.git` file holds one path; the kernel accepts no longer one. A longer file is refused.
MAX_GIT_FILE_BYTES: Final = 4096 + len(b"gitdir: ")


class Unenforceable(InternalError):
    """A confined process could escape a restriction by replacing a link."""

    def __init__(self, rule: Rule, link: CrossedLink, user: int) -> None:
        restriction = "deny-read" if rule.access == "deny" else "read-only"
        owner = f", which belongs to uid {link.owner}" if link.owner != user else ""
        super().__init__(
            f"cannot enforce sandbox {restriction} path {rule.path} "
            f"because it crosses writable symlink {link.path}{owner}"
        )


def lay_out(policy: Policy, disk: Disk, denied_paths: Sequence[str] = ()) -> View:
    """The mounts that enforce a policy now; raises Unenforceable or Unexaminable.

    `denied_paths` match globs of the policy, free of links.
    """
    assert policy.rules is not None
    resolver = DiskResolver(disk)
    entries = _resolve_rules(policy.rules, resolver)
    entries += [*_protected(entries, policy.rules, resolver), *_glob_roots(policy.globs, resolver)]
    rules = _effective_rules(entries)
    _refuse_writable_links(entries, rules, resolver.user)
    rules = merge_rules([*_pairs(rules), *_denied_paths(denied_paths, resolver)])
    steps = _steps(rules, resolver)
    restrictions = [entry for entry in entries if entry.is_restriction]
    missing = _missing_names(restrictions, rules)
    steps += _pins(steps, missing, restrictions, rules, resolver)
    steps.sort(key=lambda step: components(step.path))
    is_empty = rule_access(rules, "/") is None
    return View(
        is_empty=is_empty,
        steps=tuple(steps),
        links=_links(entries, rules, resolver) if is_empty else (),
        missing=missing,
        dependencies=resolver.dependencies(step.path for step in steps),
        denied=tuple(
            posixpath.join(restriction.resolved.path, *restriction.resolved.absent)
            for restriction in restrictions
            if restriction.resolved_rule.access == "deny"
        ),
    )


def access_errno(view: View, path: str, *, writing: bool) -> int:
    """The error number for an access to a resolved path in a view; 0 if the view allows it.

    Repeats the limits of the mounts for the case that a mounted directory was replaced on the
    host.
    """
    deepest: Step | None = None
    for step in view.steps:  # parents first
        if contains(step.path, path):
            deepest = step
    if deepest is not None and deepest.kind == "mask":
        # A passable mask appears as an empty directory.
        return errno.ENOENT if deepest.passable and path != deepest.path else errno.EACCES
    reached = "" if deepest is None else deepest.path
    if any(contains(denied, path) and not contains(denied, reached) for denied in view.denied):
        return errno.EACCES
    if not writing or path.startswith("/dev/"):
        return 0
    if any(contains(join(missing.path, missing.name), path) for missing in view.missing):
        return errno.EROFS
    is_writable = deepest is not None and deepest.kind in ("write", "pin")
    return 0 if is_writable else errno.EROFS


def is_visible(view: View, path: str) -> bool:
    """Whether a resolved path can be read in a view."""
    if access_errno(view, path, writing=False):
        return False
    return not view.is_empty or any(contains(step.path, path) for step in view.steps)


def writable_paths(view: View) -> list[str]:
    """The paths of a view that can be written, with what is below them."""
    return [step.path for step in view.steps if step.kind == "write"]


def resolve_writable(policy: Policy, disk: Disk) -> list[str]:
    """The paths that a policy grants to write, with their links resolved."""
    resolver = DiskResolver(disk)
    granted = [rule.path for rule in policy.rules or () if rule.access == "write"]
    resolved = [resolver.resolve(path) for path in granted]
    return [each.path for each in resolved if not each.absent]


def resolve_globs(policy: Policy, disk: Disk) -> tuple[Glob, ...]:
    """The globs of a policy with the links in their search roots resolved."""
    resolver = DiskResolver(disk)
    globs = []
    for glob in policy.globs:
        resolved = resolver.resolve(glob.root)
        root = posixpath.join(resolved.path, *resolved.absent)
        globs.append(Glob(root, glob.pattern, glob.max_depth))
    return tuple(dict.fromkeys(globs))


# --- the rules at resolved paths ---


@dataclass(frozen=True, slots=True)
class _Entry:
    """A rule and its resolved path.

    stated: from the policy. protected: only removes the right to write where it is granted.
    glob root: of a glob, which restricts nothing itself.
    """

    rule: Rule
    resolved: ResolvedPath
    origin: Literal["stated", "protected", "glob root"] = "stated"

    @property
    def exists(self) -> bool:
        return not self.resolved.absent

    @property
    def resolved_rule(self) -> Rule:
        return Rule(self.resolved.path, self.rule.access)

    @property
    def is_restriction(self) -> bool:
        return self.rule.access != "write" and self.origin != "glob root"


def _resolve_rules(rules: Sequence[Rule], resolver: DiskResolver) -> list[_Entry]:
    entries = [_Entry(rule, resolver.resolve(rule.path)) for rule in rules]
    # Links are checked against all grants, so that no grant depends on another one.
    widest = _effective_rules(entries)
    return [
        entry
        for entry in entries
        if entry.rule.access != "write" or _writable_link(entry.resolved, widest) is None
    ]


def _protected(
    entries: Sequence[_Entry], rules: Sequence[Rule], resolver: DiskResolver
) -> Iterator[_Entry]:
    """The names that are read-only in writable directories without an entry of the policy."""
    granted = [rule.path for rule in rules if rule.access == "write"]
    exempt = {
        _resolve_parent(path, resolver)
        for path in granted
        if posixpath.basename(path) in PROTECTED_NAMES
    }
    for root in [rule.path for rule in _effective_rules(entries) if rule.access == "write"]:
        node = resolver.status(root)
        if node is None or node.kind != "directory":
            continue
        for path in [join(root, name) for name in PROTECTED_NAMES]:
            entry = resolver.status(path)
            is_fixed = entry is not None and _is_fixed(entry, node, resolver.user)
            if is_fixed and entry is not None and entry.kind == "link":
                resolver.depend_on(path)
                continue
            if path not in exempt:
                yield _Entry(Rule(path, "read"), resolver.resolve(path), "protected")
            if posixpath.basename(path) == ".git" and not is_fixed:
                for target in _git_file_targets(path, resolver):
                    place = posixpath.normpath(posixpath.join(root, target))
                    yield _Entry(Rule(place, "read"), resolver.resolve(target, root), "protected")


def _is_fixed(entry: PathNode, directory: PathNode, user: int) -> bool:
    """Whether no confined process can remove or rename an entry of a writable directory.

    Such an entry belongs to another user, who can aim a link or a `.git` file at any path.
    Therefore neither of them is followed: each would make that path read-only.
    """
    return directory.is_sticky and user not in (entry.owner, directory.owner)


def _resolve_parent(path: str, resolver: DiskResolver) -> str:
    parent, name = posixpath.split(path)
    resolved = resolver.resolve(parent)
    return posixpath.join(resolved.path, *resolved.absent, name)


def _git_file_targets(path: str, resolver: DiskResolver) -> Iterator[str]:
    """The repository that a `.git` file names: literally, as Git reads it, and without blanks."""
    resolved = resolver.resolve(path)
    if resolved.links or resolved.absent or resolved.node.kind != "file":
        return
    text = resolver.head(path, MAX_GIT_FILE_BYTES + 1)
    label, _, target = text.partition(b":")
    if label.strip() != b"gitdir":
        return
    if len(text) > MAX_GIT_FILE_BYTES:
        raise Unexaminable(path, "the repository that it names is longer than a path can be")
    if b"\0" in text:
        raise Unexaminable(path, "the repository that it names contains a null byte")
    for name in sorted({_literal(target), target.strip()} - {b""}):
        yield name.decode("utf-8", "surrogateescape")


def _literal(target: bytes) -> bytes:
    """The path as Git reads it after `gitdir:`."""
    return target.removeprefix(b" ").rstrip(b"\r\n")


def _glob_roots(globs: Sequence[Glob], resolver: DiskResolver) -> Iterator[_Entry]:
    for glob in globs:
        yield _Entry(Rule(glob.root, "deny"), resolver.resolve(glob.root), "glob root")


def _effective_rules(entries: Sequence[_Entry]) -> tuple[Rule, ...]:
    existing = [entry for entry in entries if entry.exists]
    rules = merge_rules(_pairs(e.resolved_rule for e in existing if e.origin == "stated"))
    protected = [entry.resolved_rule for entry in existing if entry.origin == "protected"]
    narrowing = [rule for rule in protected if rule_access(rules, rule.path) == "write"]
    return merge_rules(_pairs([*rules, *narrowing]))


def _pairs(rules: Iterable[Rule]) -> Iterator[tuple[str, Access]]:
    for rule in rules:
        yield rule.path, rule.access


def _denied_paths(paths: Iterable[str], resolver: DiskResolver) -> Iterator[tuple[str, Access]]:
    for path in paths:
        node = resolver.depend_on(path)
        if node is not None and node.kind != "link":
            yield path, "deny"


def _refuse_writable_links(entries: Iterable[_Entry], rules: Sequence[Rule], user: int) -> None:
    for entry in entries:
        if entry.rule.access == "write":
            continue
        link = _writable_link(entry.resolved, rules)
        if link is not None:
            raise Unenforceable(entry.rule, link, user)


def _writable_link(resolved: ResolvedPath, rules: Sequence[Rule]) -> CrossedLink | None:
    """The first crossed link that a confined process could replace."""
    for link in resolved.links:
        if rule_access(rules, posixpath.dirname(link.path)) == "write":
            return link
    return None


# --- mounts ---


def _steps(rules: Sequence[Rule], resolver: DiskResolver) -> list[Step]:
    steps = []
    access_at = _access_lookup(rules)
    reopened = {
        above
        for rule in rules
        if rule.access == "write"
        for above in _self_and_parents(posixpath.dirname(rule.path))
    }
    for rule in rules:
        around = None if rule.path == "/" else access_at(posixpath.dirname(rule.path))
        match rule.access:
            case "write":
                steps.append(_step("write", rule.path, resolver))
            case "read" if rule.path != "/" and around in ("write", None):
                steps.append(_step("read", rule.path, resolver))
            case "deny" if around in ("read", "write"):
                passable = rule.path in reopened
                steps.append(_step("mask", rule.path, resolver, passable=passable))
    return steps


def _access_lookup(rules: Sequence[Rule]) -> Callable[[str], Access | None]:
    """`rule_access` for many paths: globs may match thousands of files."""
    stated = {rule.path: rule.access for rule in rules}

    def access_at(path: str) -> Access | None:
        return next((stated[above] for above in _self_and_parents(path) if above in stated), None)

    return access_at


def _self_and_parents(path: str) -> Iterator[str]:
    yield path
    while path != "/":
        path = posixpath.dirname(path)
        yield path


def _step(
    kind: Literal["write", "read", "pin", "mask"],
    path: str,
    resolver: DiskResolver,
    *,
    passable: bool = False,
) -> Step:
    node = resolver.node(path)
    return Step(kind, path, node.kind == "directory", node.device, node.inode, passable)


def _missing_names(
    restrictions: Iterable[_Entry], rules: Sequence[Rule]
) -> tuple[MissingName, ...]:
    """The restricted names that do not exist and that a confined process could create."""
    missing = {}
    for resolved in [restriction.resolved for restriction in restrictions]:
        if not resolved.absent:
            continue
        node, name = resolved.node, resolved.absent[0]
        if node.kind == "directory" and rule_access(rules, resolved.path) == "write":
            missing[resolved.path, name] = MissingName(resolved.path, node.device, node.inode, name)
    return tuple(missing[key] for key in sorted(missing))


def _pins(
    steps: Iterable[Step],
    missing: Iterable[MissingName],
    restrictions: Iterable[_Entry],
    rules: Sequence[Rule],
    resolver: DiskResolver,
) -> list[Step]:
    """Mounts for directories that could otherwise be renamed together with a mount in them."""
    mounted = {step.path for step in steps}
    pinned = {posixpath.dirname(path) for path in mounted} | {name.path for name in missing}
    # A file in the way of a restricted path: replacing it with a directory would allow to create
    # the path.
    pinned |= {r.resolved.path for r in restrictions if r.resolved.absent}
    pins: dict[str, Step] = {}
    access_at = _access_lookup(rules)
    for path in pinned:
        for above in _self_and_parents(path):
            if above in pins or access_at(above) != "write":
                break
            if above not in mounted:
                pins[above] = _step("pin", above, resolver)
    return list(pins.values())


def _links(
    entries: Iterable[_Entry], rules: Sequence[Rule], resolver: DiskResolver
) -> tuple[SymbolicLink, ...]:
    """The links that lead to granted paths and are not inside of granted paths themselves."""
    links = {}
    for entry in entries:
        if entry.origin != "stated" or not entry.exists:
            continue
        if rule_access(rules, entry.resolved.path) not in ("read", "write"):
            continue
        for link in entry.resolved.links:
            if rule_access(rules, posixpath.dirname(link.path)) is None:
                # The parents that a `..` refers to need not exist in an empty root.
                has_parent = ".." in components(link.target)
                target = resolver.resolve(link.path).path if has_parent else link.target
                links[link.path] = SymbolicLink(link.path, target)
    return tuple(links[path] for path in sorted(links, key=components))
