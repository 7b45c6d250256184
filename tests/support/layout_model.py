"""A slow model of the sandbox's rules: the access of a policy at one path.

`Tree` is a disk in memory. `Model` computes the access from the rules alone, from the root down
and name by name. `Simulation` computes it from the mounts of a `View` alone. The two share no
code with each other or with the tested modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from exec_server.sandbox.policy.model import Dependency, View
from exec_server.sandbox.policy.resolver import PathNode

PROTECTED = (".git", ".agents", ".codex", ".aws")
Content = bytes | str | None  # a file, the target of a link, a directory


def parent(path: str) -> str:
    return path.rpartition("/")[0] or "/"


def child(directory: str, name: str) -> str:
    return directory.rstrip("/") + "/" + name


def prefixes(path: str) -> list[str]:
    """`/`, `/a`, `/a/b` for `/a/b`."""
    found = ["/"]
    for name in path.split("/"):
        if name:
            found.append(child(found[-1], name))
    return found


class Tree:
    """A disk in memory; parents of the given entries are created."""

    user = 0

    def __init__(self, entries: Iterable[tuple[str, Content]] = ()) -> None:
        self.entries: dict[str, Content] = {"/": None}
        self.owners: dict[str, int] = {}  # of entries that do not belong to the user
        self.sticky: set[str] = set()
        self._inodes = {"/": 1}
        self._next = 2
        for path, content in entries:
            self.put(path, content)

    def put(self, path: str, content: Content = None) -> bool:
        """Create an entry, unless its path exists or one of its parents is no directory."""
        for place in prefixes(path)[:-1]:
            if place not in self.entries:
                self._add(place, None)
            if self.entries[place] is not None:
                return False
        if path in self.entries:
            return False
        self._add(path, content)
        return True

    def remove(self, path: str) -> None:
        for place in [p for p in self.entries if p == path or p.startswith(path + "/")]:
            del self.entries[place], self._inodes[place]

    def copy(self) -> Tree:
        other = Tree()
        other.entries, other._inodes = dict(self.entries), dict(self._inodes)
        other.owners, other.sticky = dict(self.owners), set(self.sticky)
        other._next = self._next + 1000
        return other

    def _add(self, path: str, content: Content) -> None:
        self.entries[path] = content
        self._inodes[path] = self._next
        self._next += 1

    def status(self, path: str) -> PathNode | None:
        if path not in self.entries:
            return None
        content = self.entries[path]
        inode = self._inodes[path]
        owner = self.owners.get(path, self.user)
        if content is None:
            return PathNode("directory", 1, inode, owner, path in self.sticky)
        return PathNode("link" if isinstance(content, str) else "file", 1, inode, owner)

    def link_target(self, path: str) -> str:
        target = self.entries[path]
        assert isinstance(target, str)
        return target

    def head(self, path: str, limit: int) -> bytes:
        content = self.entries[path]
        assert isinstance(content, bytes)
        return content[:limit]

    def follow(self, path: str, base: str = "/") -> tuple[str, list[str], list[str]]:
        """Resolve as the kernel does: the path reached, the names missing there, the links."""
        place = "/" if path.startswith("/") else base
        names = [name for name in path.split("/") if name]
        links: list[str] = []
        while names:
            name, *names = names
            if name == ".":
                continue
            if name == "..":
                place = parent(place)
                continue
            if child(place, name) not in self.entries:
                return place, [name, *names], links
            content = self.entries[child(place, name)]
            if not isinstance(content, str):
                place = child(place, name)
                continue
            links.append(child(place, name))
            if len(links) > 40:
                return place, [name, *names], links
            names = [each for each in content.split("/") if each] + names
            if content.startswith("/"):
                place = "/"
        return place, [], links

    def holds(self, dependency: Dependency) -> bool:
        """Whether `lstat` would return the same entry."""
        place, absent, _ = self.follow(parent(dependency.path))
        path = child(place, dependency.path.rpartition("/")[2]) if dependency.path != "/" else "/"
        node = None if absent else self.status(path)
        return (dependency.device, dependency.inode) == (
            (node.device, node.inode) if node else (None, None)
        )


class Refused(Exception):
    """The policy cannot be enforced on this tree."""


class Model:
    """The access of a policy at paths without links."""

    def __init__(
        self, claims: Sequence[tuple[str, str]], tree: Tree, *, protects: bool = True
    ) -> None:
        self._tree = tree
        self._real: list[tuple[str, str]] = []  # the rules of existing paths
        self._limits: list[tuple[str, str]] = []  # existing protected paths
        self._dead_ends: list[tuple[str, list[str]]] = []
        claims = self._in_force(claims)
        walked = [(path, access, *tree.follow(path)) for path, access in claims]
        self._real = [(place, access) for _, access, place, absent, _ in walked if not absent]
        trusted = [
            claim
            for claim in walked
            if claim[1] != "write" or not any(self._replaceable(link) for link in claim[4])
        ]
        self._real = [(place, access) for _, access, place, absent, _ in trusted if not absent]
        crossed = [links for _, access, _, _, links in trusted if access != "write"]
        self._dead_ends = [
            (place, absent)
            for _, access, place, absent, _ in trusted
            if absent and access != "write"
        ]
        if not protects:
            return
        exempt = {self._resolve_parent(path) for path, access in claims if access == "write"}
        for root in self._roots():
            crossed += self._protect(root, exempt)
        if any(self._replaceable(link) for links in crossed for link in links):
            raise Refused

    def _in_force(self, claims: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """Without claims that are overridden: at the same path, or a read below a deny."""
        self._real = list(claims)
        said = {(path, self.verdict(path)) for path, _ in claims}
        return [claim for claim in dict.fromkeys(claims) if claim in said]

    def _resolve_parent(self, path: str) -> str:
        place, absent, _ = self._tree.follow(parent(path))
        return child(child(place, "/".join(absent)), path.rpartition("/")[2])

    def _roots(self) -> list[str]:
        roots = {place for place, access in self._real if access == "write"}
        return [place for place in roots if self.verdict(place) == "write"]

    def _protect(self, root: str, exempt: set[str]) -> list[list[str]]:
        tree, crossed = self._tree, []
        if tree.entries[root] is not None:
            return []
        paths = [(child(root, name), "/") for name in PROTECTED if child(root, name) not in exempt]
        pointer = tree.entries.get(child(root, ".git"))
        if isinstance(pointer, bytes) and pointer.startswith(b"gitdir: "):
            paths.append((pointer[8:].strip().decode(), root))
        for path, base in paths:
            place, absent, links = tree.follow(path, base)
            crossed.append(links)
            if absent:
                self._dead_ends.append((place, absent))
            else:
                self._limits.append((place, "protected"))
        return crossed

    def _replaceable(self, link: str) -> bool:
        return self.verdict(parent(link)) == "write"

    def verdict(self, path: str) -> str | None:
        """read, write, deny, or None without a rule: from the root down, name by name."""
        state: str | None = None
        for place in prefixes(path):
            said = {access for where, access in self._real + self._limits if where == place}
            if "deny" in said:
                state = "deny" if place != "/" else None
            elif "write" in said:
                state = "write"
            elif (state == "write" and said) or (state != "deny" and "read" in said):
                state = "read"
        return state

    def may_read(self, path: str) -> bool:
        return self.verdict(path) in ("read", "write")

    def may_write(self, path: str) -> bool:
        return self.verdict(path) == "write"

    def may_create(self, path: str) -> bool:
        """Whether an entry may be created at a path whose directory exists."""
        blocked = {child(place, absent[0]) for place, absent in self._dead_ends}
        return self.may_write(parent(path)) and path not in blocked

    def may_rename(self, path: str) -> bool:
        """Whether an entry may be renamed: no rule about it or below it may lose its effect."""
        if path == "/" or not self.may_write(parent(path)):
            return False
        below = [p for p in self._tree.entries if p == path or p.startswith(path + "/")]
        held = {place for place, _ in self._dead_ends} | {
            place for place, access in self._real if access == "write"
        }
        return all(self.may_write(place) and place not in held for place in below)

    def reads_root(self) -> bool:
        return self.may_read("/")


class Simulation:
    """The access that the mounts of a view allow at paths without links."""

    def __init__(self, view: View, tree: Tree) -> None:
        self._view = view
        self._tree = tree
        self._mounts = {step.path for step in view.steps}

    def state(self, path: str) -> str | None:
        state = None if self._view.is_empty else "read"
        for step in self._view.steps:
            if step.path in prefixes(path) and step.kind != "pin":
                state = step.kind
        return state

    def may_read(self, path: str) -> bool:
        return self.state(path) in ("read", "write")

    def may_write(self, path: str) -> bool:
        return self.state(path) == "write"

    def may_create(self, path: str) -> bool:
        missing = {child(name.path, name.name) for name in self._view.missing}
        return self.may_write(parent(path)) and path not in missing

    def may_rename(self, path: str) -> bool:
        # The kernel requires a writable directory and an entry that is no mount point.
        return path != "/" and self.may_write(parent(path)) and path not in self._mounts

    def reaches(self, path: str) -> str | None:
        """The path that a confined process reaches, None if there is none."""
        links = {link.path: link.target for link in self._view.links}
        scaffold = {place for known in (*self._mounts, *links) for place in prefixes(known)}
        place, names, met = "/", [name for name in path.split("/") if name], 0
        while names:
            name, *names = names
            following = child(place, name)
            if name == "..":
                place = parent(place)
                continue
            content: bytes | str | None = links.get(following)
            if content is None and self.may_read(following):
                content = self._tree.entries.get(following, b"")
            elif content is None and following not in scaffold:
                return None
            if isinstance(content, str):
                met += 1
                if met > 40:
                    return None
                names = [each for each in content.split("/") if each] + names
                following = "/" if content.startswith("/") else place
            place = following
        return place
