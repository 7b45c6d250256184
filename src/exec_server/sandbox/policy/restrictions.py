"""The restrictions of a command beside its view and its network, and why it has them. Pure.

Nesting: a mount point cannot be renamed or removed, but only in a mount namespace that contains
the mount. The owner of a nested user namespace can pivot to another root, detach the tree of the
sandbox and keep a descriptor of a writable directory. All mount points of the view in that
directory can then be renamed.

If the view covers the mounts of the host without detaching them, the owner could mount a new /proc
with the parts that the view hides: the kernel allows it while the /proc of the host is there.

Unix sockets: a command can receive a descriptor of a directory that another command may write.
The mount points of the other command's view are not in the mount namespace of the receiver, which
could rename them. Landlock's file rights prevent it. They also prevent mounts, so that a command
has either file rights or nested namespaces.

Exclusive locks: flock locks a file that is only open for reading, and programs of the host then
wait for it. A command that may write nothing needs no such lock.

Other commands: a process can open /proc/PID/root of the processes in its /proc, trace them and
copy their descriptors, if they have the same user and user namespace and are not in another
Landlock domain.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from exec_server.sandbox.policy.model import Network, View

# Version 1 of Landlock refuses to move and link files into another directory in any case.
_LANDLOCK_WITH_MOVES: Final = 2


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
