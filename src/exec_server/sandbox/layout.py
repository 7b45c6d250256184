"""From a `Policy` and the disk of this moment to the `View` that makes it true.

A policy speaks of names, mounts are of things, and the confined may rename and re-link
whatever they may write. So every path is walked here name by name. A link that the confined
could replace is never followed: a restriction that leads through one is refused, and a grant
that leads through one grants nothing, because the link's next target would be granted next
time. All other links are followed, and the rules apply to the places they lead to.

Each directory between a writable root and anything mounted below it is pinned: renaming it
would carry the mount away and leave its path free for a forgery.
"""

from __future__ import annotations

import errno
import posixpath
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from exec_server.errors import InternalError
from exec_server.sandbox.plan import Access, Fact, Glob, Link, Missing, Policy, Rule, Step, View
from exec_server.sandbox.policy import (
    PROTECTED_NAMES,
    access_by,
    components,
    covers,
    join,
    settled,
)

# The kernel follows as many links in one path.
MAX_LINKS: Final = 40
# A `.git` file holds one path; the kernel takes none that is longer.
MAX_POINTER_BYTES: Final = 4096 + len(b"gitdir: ")

Kind = Literal["directory", "file", "link", "other"]


@dataclass(frozen=True, slots=True)
class Node:
    """What is at a path."""

    kind: Kind
    device: int
    inode: int


class Disk(Protocol):
    """What has to be known of the disk; paths given have no links before their last name."""

    def status(self, path: str) -> Node | None:
        """What is there; None for nothing, and for what this user cannot get at."""
        ...

    def link_target(self, path: str) -> str:
        """What a link says; empty if it is none any more."""
        ...

    def head(self, path: str, limit: int) -> bytes:
        """The beginning of a file."""
        ...


class Unenforceable(InternalError):
    """A restriction that the confined could shake off by replacing a link."""

    def __init__(self, rule: Rule, link: str) -> None:
        restriction = "deny-read" if rule.access == "deny" else "read-only"
        super().__init__(
            f"cannot enforce sandbox {restriction} path {rule.path} "
            f"because it crosses writable symlink {link}"
        )


def lay_out(policy: Policy, disk: Disk, denied_files: Sequence[str] = ()) -> View:
    """The mounts that make a policy true now; raises Unenforceable if none can.

    `denied_files` are those that the policy's globs mean, free of links. A policy without
    rules has no layout.
    """
    assert policy.rules is not None
    survey = _Survey(disk)
    entries = _grounded(policy.rules, survey)
    entries += [*_protected(entries, policy.rules, survey), *_searched(policy.globs, survey)]
    rules = _rules(entries)
    _refuse_writable_links(entries, rules)
    rules = settled([*_claims(rules), *_files(denied_files, survey)])
    steps = _steps(rules, survey)
    limits = [entry for entry in entries if entry.limits]
    missing = _missing(limits, rules)
    steps += _pins(steps, missing, limits, rules, survey)
    steps.sort(key=lambda step: components(step.path))
    is_empty = access_by(rules, "/") is None
    return View(
        is_empty=is_empty,
        steps=tuple(steps),
        links=_links(entries, rules, survey) if is_empty else (),
        missing=missing,
        facts=survey.facts(step.path for step in steps),
        denied=tuple(
            posixpath.join(limit.walk.path, *limit.walk.absent)
            for limit in limits
            if limit.rule_there.access == "deny"
        ),
    )


def refusal(view: View, path: str, *, writing: bool) -> int:
    """The error number that a resolved path meets in a view; 0 if the view allows it.

    What mounts enforce anyway, unless somebody has replaced what they were mounted on.
    """
    deepest: Step | None = None
    for step in view.steps:  # parents first
        if covers(step.path, path):
            deepest = step
    if deepest is not None and deepest.kind == "mask":
        # One that can be passed through is an empty directory to look into.
        return errno.ENOENT if deepest.passable and path != deepest.path else errno.EACCES
    reached = "" if deepest is None else deepest.path
    if any(covers(denied, path) and not covers(denied, reached) for denied in view.denied):
        return errno.EACCES
    if not writing or path.startswith("/dev/"):
        return 0
    if any(covers(join(missing.path, missing.name), path) for missing in view.missing):
        return errno.EROFS
    is_writable = deepest is not None and deepest.kind in ("write", "pin")
    return 0 if is_writable else errno.EROFS


def real_globs(policy: Policy, disk: Disk) -> tuple[Glob, ...]:
    """The globs of a policy with the links in their search roots followed."""
    survey = _Survey(disk)
    real = []
    for glob in policy.globs:
        walk = survey.walk(glob.root)
        root = posixpath.join(walk.path, *walk.absent)
        real.append(Glob(root, glob.pattern, glob.max_depth))
    return tuple(dict.fromkeys(real))


# --- walking ---


@dataclass(frozen=True, slots=True)
class _Crossing:
    """A link on the way; no link leads to `path`."""

    path: str
    target: str


@dataclass(frozen=True, slots=True)
class _Walk:
    """How far a path leads: to `path`, free of links, where the names in `absent` are not."""

    path: str
    node: Node
    absent: tuple[str, ...]
    links: tuple[_Crossing, ...]


class _Survey:
    """Walks paths, looking at each place once, and remembers what the outcome depends on."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._seen: dict[str, Node | None] = {}
        self._decisive: dict[str, None] = {}
        self.head: Callable[[str, int], bytes] = disk.head

    def status(self, path: str) -> Node | None:
        if path not in self._seen:
            self._seen[path] = self._disk.status(path)
        return self._seen[path]

    def walk(self, path: str, base: str = "/") -> _Walk:
        """Follow a path; a relative one from `base`, which has no links."""
        place = "/" if path[:1] == "/" else base
        pending = components(path)[::-1]
        links: list[_Crossing] = []
        while pending:
            name = pending.pop()
            if name in (".", ".."):
                self._decisive[place] = None
                place = posixpath.dirname(place) if name == ".." else place
                continue
            following = join(place, name)
            node = self.status(following)
            if node is None or self.node(place).kind != "directory":
                return self._end(place, (name, *reversed(pending)), links)
            if node.kind != "link":
                place = following
                continue
            self._decisive[following] = None
            target = self._disk.link_target(following)
            links.append(_Crossing(following, target))
            if not target or len(links) > MAX_LINKS:
                return _Walk(place, self.node(place), (name, *reversed(pending)), tuple(links))
            place = "/" if target[0] == "/" else place
            pending.extend(components(target)[::-1])
        return self._end(place, (), links)

    def facts(self, also: Iterable[str]) -> tuple[Fact, ...]:
        """What has to stay as it was seen for the outcome to hold."""
        facts = []
        for path in sorted({*self._decisive, *also}, key=components):
            node = self.status(path)
            if node is None:
                facts.append(Fact(path, None, None))
            else:
                facts.append(Fact(path, node.device, node.inode))
        return tuple(facts)

    def _end(self, place: str, absent: tuple[str, ...], links: list[_Crossing]) -> _Walk:
        node = self.node(place)
        in_directory = absent and node.kind == "directory"
        self._decisive[join(place, absent[0]) if in_directory else place] = None
        return _Walk(place, node, absent, tuple(links))

    def node(self, path: str) -> Node:
        node = self.status(path)
        if node is None:
            raise InternalError(f"cannot lay out the sandbox: {path} cannot be looked at")
        return node


# --- which rules hold where ---


@dataclass(frozen=True, slots=True)
class _Entry:
    """A rule, and where its path leads.

    stated: of the policy. protected: only takes the right to write from what has it.
    searched: of a glob, which limits nothing itself.
    """

    rule: Rule
    walk: _Walk
    origin: Literal["stated", "protected", "searched"] = "stated"

    @property
    def is_there(self) -> bool:
        return not self.walk.absent

    @property
    def rule_there(self) -> Rule:
        return Rule(self.walk.path, self.rule.access)

    @property
    def limits(self) -> bool:
        return self.rule.access != "write" and self.origin != "searched"


def _grounded(rules: Sequence[Rule], survey: _Survey) -> list[_Entry]:
    """The rules where their paths lead, without grants that lead through writable links."""
    entries = [_Entry(rule, survey.walk(rule.path)) for rule in rules]
    # With all grants in force, so that none can hide behind another one.
    widest = _rules(entries)
    return [
        entry
        for entry in entries
        if entry.rule.access != "write" or _writable_link(entry.walk, widest) is None
    ]


def _protected(
    entries: Sequence[_Entry], rules: Sequence[Rule], survey: _Survey
) -> Iterator[_Entry]:
    """What stays as it is in writable directories, although nobody asked for it."""
    granted = [rule.path for rule in rules if rule.access == "write"]
    exempt = {
        _spelt(path, survey) for path in granted if posixpath.basename(path) in PROTECTED_NAMES
    }
    for root in [rule.path for rule in _rules(entries) if rule.access == "write"]:
        node = survey.status(root)
        if node is None or node.kind != "directory":
            continue
        for path in [join(root, name) for name in PROTECTED_NAMES]:
            if path not in exempt:
                yield _Entry(Rule(path, "read"), survey.walk(path), "protected")
        target = _pointed_at(join(root, ".git"), survey)
        if target:
            path = posixpath.normpath(posixpath.join(root, target))
            yield _Entry(Rule(path, "read"), survey.walk(target, root), "protected")


def _spelt(path: str, survey: _Survey) -> str:
    """A path with the links before its last name followed: the name that a rule is about."""
    parent, name = posixpath.split(path)
    walk = survey.walk(parent)
    return posixpath.join(walk.path, *walk.absent, name)


def _pointed_at(path: str, survey: _Survey) -> str | None:
    """What a `.git` file says: where the repository of a worktree or submodule is."""
    walk = survey.walk(path)
    if walk.links or walk.absent or walk.node.kind != "file":
        return None
    text = survey.head(path, MAX_POINTER_BYTES).strip()
    if not text.startswith(b"gitdir:") or b"\0" in text:
        return None
    return text.removeprefix(b"gitdir:").strip().decode("utf-8", "surrogateescape")


def _searched(globs: Sequence[Glob], survey: _Survey) -> Iterator[_Entry]:
    for glob in globs:
        yield _Entry(Rule(glob.root, "deny"), survey.walk(glob.root), "searched")


def _rules(entries: Sequence[_Entry]) -> tuple[Rule, ...]:
    """The rules that hold at real places; those of missing paths are not among them."""
    there = [entry for entry in entries if entry.is_there]
    rules = settled(_claims(entry.rule_there for entry in there if entry.origin == "stated"))
    protected = [entry.rule_there for entry in there if entry.origin == "protected"]
    narrowing = [rule for rule in protected if access_by(rules, rule.path) == "write"]
    return settled(_claims([*rules, *narrowing]))


def _claims(rules: Iterable[Rule]) -> Iterator[tuple[str, Access]]:
    for rule in rules:
        yield rule.path, rule.access


def _files(paths: Iterable[str], survey: _Survey) -> Iterator[tuple[str, Access]]:
    for path in paths:
        node = survey.status(path)
        if node is not None and node.kind in ("file", "other"):
            yield path, "deny"


def _refuse_writable_links(entries: Iterable[_Entry], rules: Sequence[Rule]) -> None:
    for entry in entries:
        if entry.rule.access == "write":
            continue
        link = _writable_link(entry.walk, rules)
        if link is not None:
            raise Unenforceable(entry.rule, link)


def _writable_link(walk: _Walk, rules: Sequence[Rule]) -> str | None:
    """The first link on the way that the confined could replace."""
    for link in walk.links:
        if access_by(rules, posixpath.dirname(link.path)) == "write":
            return link.path
    return None


# --- what to mount ---


def _steps(rules: Sequence[Rule], survey: _Survey) -> list[Step]:
    steps = []
    access_at = _accesses(rules)
    reopened = {
        above
        for rule in rules
        if rule.access == "write"
        for above in _upwards(posixpath.dirname(rule.path))
    }
    for rule in rules:
        around = None if rule.path == "/" else access_at(posixpath.dirname(rule.path))
        match rule.access:
            case "write":
                steps.append(_step("write", rule.path, survey))
            case "read" if rule.path != "/" and around in ("write", None):
                steps.append(_step("read", rule.path, survey))
            case "deny" if around in ("read", "write"):
                passable = rule.path in reopened
                steps.append(_step("mask", rule.path, survey, passable=passable))
    return steps


def _accesses(rules: Sequence[Rule]) -> Callable[[str], Access | None]:
    """`access_by` for many paths: patterns may mean thousands of rules."""
    stated = {rule.path: rule.access for rule in rules}

    def access_at(path: str) -> Access | None:
        return next((stated[above] for above in _upwards(path) if above in stated), None)

    return access_at


def _upwards(path: str) -> Iterator[str]:
    """The path, its parent, and so on up to the root."""
    yield path
    while path != "/":
        path = posixpath.dirname(path)
        yield path


def _step(
    kind: Literal["write", "read", "pin", "mask"],
    path: str,
    survey: _Survey,
    *,
    passable: bool = False,
) -> Step:
    node = survey.node(path)
    return Step(kind, path, node.kind == "directory", node.device, node.inode, passable)


def _missing(limits: Iterable[_Entry], rules: Sequence[Rule]) -> tuple[Missing, ...]:
    """The names that could come into being and must not."""
    found = {}
    for walk in [limit.walk for limit in limits if limit.walk.absent]:
        node, name = walk.node, walk.absent[0]
        if node.kind == "directory" and access_by(rules, walk.path) == "write":
            found[walk.path, name] = Missing(walk.path, node.device, node.inode, name)
    return tuple(found[key] for key in sorted(found))


def _pins(
    steps: Iterable[Step],
    missing: Iterable[Missing],
    limits: Iterable[_Entry],
    rules: Sequence[Rule],
    survey: _Survey,
) -> list[Step]:
    """Mounts for all that could otherwise be renamed together with what is below it."""
    taken = {step.path for step in steps}
    wanted = {posixpath.dirname(path) for path in taken} | {name.path for name in missing}
    # A file in the way of a path: who could replace it with a directory could make the path.
    wanted |= {limit.walk.path for limit in limits if limit.walk.absent}
    pins: dict[str, Step] = {}
    access_at = _accesses(rules)
    for path in wanted:
        for place in _upwards(path):
            if place in pins or access_at(place) != "write":
                break
            if place not in taken:
                pins[place] = _step("pin", place, survey)
    return list(pins.values())


def _links(entries: Iterable[_Entry], rules: Sequence[Rule], survey: _Survey) -> tuple[Link, ...]:
    """The links that lead to what is granted and are not themselves in anything granted."""
    links = {}
    for entry in entries:
        if entry.origin != "stated" or not entry.is_there:
            continue
        if access_by(rules, entry.walk.path) not in ("read", "write"):
            continue
        for link in entry.walk.links:
            if access_by(rules, posixpath.dirname(link.path)) is None:
                # What a `..` in it climbs out of need not be there in an empty root.
                climbs = ".." in components(link.target)
                target = survey.walk(link.path).path if climbs else link.target
                links[link.path] = Link(link.path, target)
    return tuple(links[path] for path in sorted(links, key=components))
