"""The values that the parts of the sandbox exchange. No behaviour, no I/O.

A `Sandbox` object of the wire becomes a `Policy` (see `compiler`). A policy and the current
state of the disk become a `View` (see `layout`), which a confined process builds for itself
(see `runtime.view`).
"""

from __future__ import annotations

from typing import Literal

import msgspec

Access = Literal["read", "write", "deny"]
# `proxied`: a network namespace of its own, where only the loopback interface works.
Network = Literal["restricted", "enabled", "proxied"]


class Rule(msgspec.Struct, frozen=True):
    """One entry of a policy with its path resolved; the deepest rule above a path decides."""

    path: str  # absolute and normal: no `.`, `..`, double or final slash; `/` for the root
    access: Access


class Glob(msgspec.Struct, frozen=True):
    """Denied paths: those below `root` whose relative path matches `pattern`.

    A directory that matches is denied with everything in it.
    """

    root: str
    pattern: str  # as the client wrote it, after the search root
    max_depth: int | None  # 1: only direct children of `root`


class Policy(msgspec.Struct, frozen=True):
    """The limits that one `sandbox` object states; equal objects make equal policies."""

    rules: tuple[Rule, ...] | None  # parents first, one per path; None: no limit on files
    globs: tuple[Glob, ...]
    network: Network


class Step(msgspec.Struct, frozen=True):
    """One mount; `device` and `inode` identify the entry that has to be at `path` on the host.

    write: the host's subtree, writable. read: the host's subtree, read-only. pin: the same
    access as the surrounding mount; the mount only prevents renaming and removing. mask:
    nothing of the host; an empty file, or an empty directory, which can be traversed if
    `passable`.
    """

    kind: Literal["write", "read", "pin", "mask"]
    path: str
    is_directory: bool
    device: int
    inode: int
    passable: bool = False


class MissingName(msgspec.Struct, frozen=True):
    """A name that must not be created in the directory `path`, which is writable."""

    path: str
    device: int
    inode: int
    name: str


class SymbolicLink(msgspec.Struct, frozen=True):
    """A link to create in an empty root, so that a granted path works as the client wrote it."""

    path: str
    target: str


class Dependency(msgspec.Struct, frozen=True):
    """A directory entry that the view was derived from; the view is stale once it differs.

    The entry itself is meant, not the target of a link. `device` is None if it did not exist.
    """

    path: str
    device: int | None
    inode: int | None
    changed_ns: int | None = None  # for links and `.git` files, whose content matters


class View(msgspec.Struct, frozen=True):
    """The file system as a confined process sees it."""

    is_empty: bool  # start from an empty root instead of the host's tree made read-only
    steps: tuple[Step, ...]  # parents first
    links: tuple[SymbolicLink, ...]
    missing: tuple[MissingName, ...]
    dependencies: tuple[Dependency, ...]
    denied: tuple[str, ...] = ()  # unreadable paths, whether they exist or not
