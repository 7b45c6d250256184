"""The values that the parts of the sandbox exchange. No behaviour, no I/O.

A wire `Sandbox` becomes a `Policy` (`compiler`), which becomes a `View` (`layout`, `runtime.view`).
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

import msgspec

Access = Literal["read", "write", "deny"]
# `proxied`: a network namespace of its own, where only the loopback interface works.
Network = Literal["restricted", "enabled", "proxied"]


# Version 1 of Landlock refuses to move and link files into another directory in any case.
_LANDLOCK_WITH_MOVES: Final = 2


class Rule(msgspec.Struct, frozen=True):
    """One entry of a policy with its path resolved; the deepest rule above a path decides."""

    path: str  # absolute and normal: no `.`, `..`, double or final slash; `/` for the root
    access: Access


class Glob(msgspec.Struct, frozen=True):
    """Denied paths below `root` that match `pattern`; a directory with everything in it."""

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
    """An entry, not its target, that the view was derived from; `device` is None if missing."""

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


# Why a command has restrictions beside its view and its network.
#
# Nesting: a mount point cannot be renamed or removed, but only in a mount namespace that contains
# the mount. The owner of a nested user namespace can pivot to another root, detach the tree of the
# sandbox, and rename all mount points below a directory it has kept open. If the view only covers
# the mounts of the host, the owner could mount a new /proc with the parts that the view hides.
#
# Unix sockets: a command can receive a descriptor of a directory that another command may write,
# and rename the other view's mount points in it. Landlock's file rights prevent it. They also
# prevent mounts, so that a command has either file rights or nested namespaces.
#
# Exclusive locks: flock locks a file that is only open for reading, and programs of the host wait.
# A command that may write nothing needs no such lock.
#
# Other commands: a process can open /proc/PID/root of the processes in its /proc, trace them and
# copy their descriptors, unless user, user namespace or Landlock domain differ.
class Restrictions(NamedTuple):
    """Restrictions that depend on each other and on the kernel."""

    allow_nesting: bool  # user and mount namespaces can be created
    file_rights: bool  # Landlock limits where files can be changed
    unix_sockets: bool  # a command with network can connect to a path
    is_separate: bool  # processes outside of the sandbox cannot be read or traced
    exclusive_locks: bool = True  # files can be locked against all other programs


_UNLIMITED_FILES: Final = Restrictions(
    allow_nesting=True, file_rights=False, unix_sockets=True, is_separate=True
)


def choose_restrictions(
    view: View | None,
    network: Network,
    *,
    user_namespace: bool,
    private_proc: bool,
    landlock: int,
    covers_host: bool = False,
) -> Restrictions:
    """The restrictions of a command, from its namespaces and the version of Landlock, 0 if none.

    `covers_host`: mounts of the host are below the root of the view, known once it is built.
    """
    if view is None:
        return _UNLIMITED_FILES._replace(allow_nesting=network != "proxied")
    is_closed = network == "restricted" and not covers_host
    allow_nesting = user_namespace and is_closed and not _has_covers(view)
    sees_others = not (user_namespace or private_proc)
    is_usable = landlock >= _LANDLOCK_WITH_MOVES or (landlock > 0 and sees_others)
    file_rights = is_usable and not allow_nesting
    return Restrictions(
        allow_nesting=allow_nesting,
        file_rights=file_rights,
        unix_sockets=file_rights or network == "restricted",
        is_separate=file_rights or not sees_others,
        exclusive_locks=any(step.kind == "write" for step in view.steps),
    )


def _has_covers(view: View) -> bool:
    """Whether there are mounts, or names that must stay missing, below a writable directory."""
    writable = [step.path for step in view.steps if step.kind == "write"]
    return bool(
        view.missing
        or "/" in writable  # the private /proc and /dev are below it
        or any(step.path.startswith(f"{root}/") for root in writable for step in view.steps)
    )
