"""Resolution of paths on an abstract disk, name by name. Pure; `runtime.disk` is the real disk."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from exec_server.errors import InternalError
from exec_server.sandbox.policy.access import components, join
from exec_server.sandbox.policy.model import Dependency

# The kernel follows the same number of links in one path.
MAX_LINKS: Final = 40

Kind = Literal["directory", "file", "link", "other"]


@dataclass(frozen=True, slots=True)
class PathNode:
    """The kind, identity and owner of a directory entry; only directories are sticky."""

    kind: Kind
    device: int
    inode: int
    owner: int = 0
    is_sticky: bool = False
    changed_ns: int = 0


class Disk(Protocol):
    """Access to the disk; the paths given have no links before their last name.

    Every method raises Unexaminable where the disk gives no answer: a confined command can
    reopen a directory that an earlier one closed to the server.
    """

    user: int  # the uid of the server and of confined processes

    def status(self, path: str) -> PathNode | None:
        """The entry at the path, None if there is none."""
        ...

    def link_target(self, path: str) -> str:
        """The target of a link; empty if the path is no longer a link."""
        ...

    def head(self, path: str, limit: int) -> bytes:
        """The beginning of a file."""
        ...


class Unexaminable(InternalError):
    """A path cannot be examined; without knowing its entry nothing can be confined."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"cannot lay out the sandbox: {path} cannot be examined: {reason}")


@dataclass(frozen=True, slots=True)
class CrossedLink:
    """A link on the way of a path; `path` itself is free of links."""

    path: str
    target: str
    owner: int = 0


@dataclass(frozen=True, slots=True)
class ResolvedPath:
    """The existing part of a path, free of links, and the names in `absent` that follow it."""

    path: str
    node: PathNode
    absent: tuple[str, ...]
    links: tuple[CrossedLink, ...]


class DiskResolver:
    """Resolves paths, examines each entry once, and records what the result depends on."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._seen: dict[str, PathNode | None] = {}
        self._depended_on: dict[str, None] = {}
        self._read: set[str] = set()
        self.user = disk.user

    def status(self, path: str) -> PathNode | None:
        """The entry at the path, None if there is none."""
        if path not in self._seen:
            self._seen[path] = self._disk.status(path)
        return self._seen[path]

    def head(self, path: str, limit: int) -> bytes:
        """The beginning of a file, on whose content the result then depends."""
        self._read.add(path)
        return self._disk.head(path, limit)

    def depend_on(self, path: str) -> PathNode | None:
        """The entry at the path, which the result then depends on."""
        self._depended_on[path] = None
        return self.status(path)

    def node(self, path: str) -> PathNode:
        """The entry at a path that exists."""
        node = self.status(path)
        if node is None:
            raise InternalError(f"cannot lay out the sandbox: {path} cannot be examined")
        return node

    def resolve(self, path: str, base: str = "/") -> ResolvedPath:
        """Follow a path; a relative one from `base`, which has no links."""
        reached = "/" if path[:1] == "/" else base
        pending = components(path)[::-1]
        links: list[CrossedLink] = []
        while pending:
            name = pending.pop()
            if name in (".", ".."):
                self._depended_on[reached] = None
                reached = posixpath.dirname(reached) if name == ".." else reached
                continue
            entry = join(reached, name)
            node = self.status(entry)
            if node is None or self.node(reached).kind != "directory":
                return self._end(reached, (name, *reversed(pending)), links)
            if node.kind != "link":
                reached = entry
                continue
            self._depended_on[entry] = None
            target = self._disk.link_target(entry)
            links.append(CrossedLink(entry, target, node.owner))
            if not target or len(links) > MAX_LINKS:
                absent = (name, *reversed(pending))
                return ResolvedPath(reached, self.node(reached), absent, tuple(links))
            reached = "/" if target[0] == "/" else reached
            pending.extend(components(target)[::-1])
        return self._end(reached, (), links)

    def dependencies(self, also: Iterable[str]) -> tuple[Dependency, ...]:
        """The entries that must stay unchanged for the results to hold, and those in `also`."""
        dependencies = []
        for path in sorted({*self._depended_on, *also}, key=components):
            node = self.status(path)
            if node is None:
                dependencies.append(Dependency(path, None, None))
            else:
                content_matters = node.kind == "link" or path in self._read
                changed_ns = node.changed_ns if content_matters else None
                dependencies.append(Dependency(path, node.device, node.inode, changed_ns))
        return tuple(dependencies)

    def _end(self, reached: str, absent: tuple[str, ...], links: list[CrossedLink]) -> ResolvedPath:
        node = self.node(reached)
        in_directory = absent and node.kind == "directory"
        self._depended_on[join(reached, absent[0]) if in_directory else reached] = None
        return ResolvedPath(reached, node, absent, tuple(links))
