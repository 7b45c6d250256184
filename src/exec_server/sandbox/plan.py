"""The values that the parts of the sandbox exchange. No behaviour, no I/O.

A `Sandbox` object of the wire becomes a `Policy` (what is asked for, see `policy`), which on
the disk of this moment becomes a `View` (which mounts make it true, see `layout`), which a
confined process builds for itself (see `view`).
"""

from __future__ import annotations

from typing import Literal

import msgspec

Access = Literal["read", "write", "deny"]
Network = Literal["restricted", "enabled"]


class Rule(msgspec.Struct, frozen=True):
    """One entry of a policy with its path resolved; the deepest rule above a path decides."""

    path: str  # absolute and normal: no `.`, `..`, double or final slash; `/` for the root
    access: Access


class Glob(msgspec.Struct, frozen=True):
    """Files that nobody may touch: those below `root` whose path from there matches."""

    root: str
    pattern: str  # what a client wrote, after the search root
    max_depth: int | None  # 1: only direct children of `root`


class Policy(msgspec.Struct, frozen=True):
    """What one `sandbox` object asks for; equal objects make equal policies."""

    rules: tuple[Rule, ...] | None  # parents first, one per path; None: no limit on files
    globs: tuple[Glob, ...]
    network: Network


class Step(msgspec.Struct, frozen=True):
    """One mount. `device` and `inode` say what has to be at `path` on the host.

    write: the host's subtree, writable. read: the same, read-only. pin: the same as around
    it, only so that it can be neither renamed nor removed. mask: nothing of the host's; an
    empty file, or an empty directory that may be passed through if `passable`.
    """

    kind: Literal["write", "read", "pin", "mask"]
    path: str
    is_directory: bool
    device: int
    inode: int
    passable: bool = False


class Missing(msgspec.Struct, frozen=True):
    """A name that must not come into being in the directory `path`, which is writable."""

    path: str
    device: int
    inode: int
    name: str


class Link(msgspec.Struct, frozen=True):
    """A symbolic link to make in an empty root, so that a granted path can be spelt."""

    path: str
    target: str


class Fact(msgspec.Struct, frozen=True):
    """Something the view was derived from; when it is no longer so, the view is stale.

    The entry itself, not what a link leads to. `device` is None if nothing was there.
    """

    path: str
    device: int | None
    inode: int | None


class View(msgspec.Struct, frozen=True):
    """What a confined process sees of the file system."""

    is_empty: bool  # begin with an empty root, instead of the host's tree made read-only
    steps: tuple[Step, ...]  # parents first
    links: tuple[Link, ...]
    missing: tuple[Missing, ...]
    facts: tuple[Fact, ...]
    denied: tuple[str, ...] = ()  # paths that may not be read, whether they exist or not
