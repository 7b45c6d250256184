"""Takes privileges away from this process for good, and checks that they are gone.

Called after the view is built. Each layer stands alone: the view limits files, dropped
capabilities limit what root could do to the view, Landlock repeats the limits without
mounts, and the filter refuses calls that none of these covers.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Final

from exec_server.errors import ExecServerError
from exec_server.sandbox import kernel
from exec_server.sandbox.filter import program
from exec_server.sandbox.plan import Network, View

_READ_DIRECTORY: Final = 1 << 3
_READ: Final = 1 << 2 | _READ_DIRECTORY
_WRITE_FILE: Final = 1 << 1
# Write, remove and make directories, files and links; no devices, sockets or pipes.
_CHANGE: Final = _WRITE_FILE | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 12
_REFER: Final = 1 << 13  # since version 2
_TRUNCATE: Final = 1 << 14  # since version 3
# The number of file rights that each version knows.
_RIGHTS_BY_VERSION: Final = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_FILE_ONLY: Final = _WRITE_FILE | 1 << 2 | _TRUNCATE
_WRITABLE: Final = ("write", "pin")
_SCOPE_VERSION: Final = 6
_SCOPE_ABSTRACT_SOCKETS: Final = 1
_SCOPE_SIGNALS: Final = 2


class NotConfined(ExecServerError):
    """A restriction did not take effect, so nothing may run."""


def prepare_filters() -> None:
    """Assemble all filters once, for the processes that are forked from this one."""
    if kernel.is_known_machine():
        program("restricted", machine=kernel.MACHINE)
        program("enabled", machine=kernel.MACHINE)
        program("restricted", machine=kernel.MACHINE, for_worker=True)


def confine_command(network: Network, view: View | None) -> None:
    """For a command: everything but Landlock's file rights, which would break nested mounts.

    Without a view the files are not limited, and a command of root's keeps its rights on them.
    """
    if view is not None:
        kernel.drop_capabilities()
    kernel.forbid_new_privileges()
    version = kernel.landlock_version()
    if version >= _SCOPE_VERSION:
        # With the network on, abstract sockets of the host belong to it.
        scopes = _SCOPE_SIGNALS if view is not None else 0
        if network == "restricted":
            scopes |= _SCOPE_ABSTRACT_SOCKETS
        if scopes:
            _enter(kernel.create_ruleset(0, scopes, version))
    kernel.install_filter(program(network, machine=kernel.MACHINE))
    _verify(view)


def confine_worker(view: View) -> None:
    """For a file worker: it never starts anything, so it keeps nothing but its files."""
    kernel.drop_bounding_set()
    kernel.drop_capabilities()
    kernel.forbid_new_privileges()
    version = kernel.landlock_version()
    if version > 0:
        _enter(_file_ruleset(view, version))
    kernel.install_filter(program("restricted", machine=kernel.MACHINE, for_worker=True))
    _verify(view)


def _file_ruleset(view: View, version: int) -> int:
    handled = (1 << _RIGHTS_BY_VERSION.get(version, 16)) - 1
    scopes = _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS if version >= _SCOPE_VERSION else 0
    ruleset = kernel.create_ruleset(handled, scopes, version)
    # The directories that lead to what is granted in an empty root can be listed.
    _grant(ruleset, ["/"], _READ_DIRECTORY if view.is_empty else _READ)
    readable = [step.path for step in view.steps if step.kind == "read"]
    _grant(ruleset, ["/proc", "/dev", *readable], _READ & handled)
    _grant(ruleset, ["/dev"], (_READ | _WRITE_FILE) & handled)
    writable = [step.path for step in view.steps if step.kind == "write"]
    _grant(ruleset, writable, (_READ | _CHANGE | _REFER | _TRUNCATE) & handled)
    return ruleset


def _grant(ruleset: int, paths: Iterable[str], rights: int) -> None:
    for path in paths:
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # covered by a private /dev or /proc
        applicable = rights if os.path.isdir(path) else rights & _FILE_ONLY
        kernel.allow_beneath(ruleset, descriptor, applicable)
        os.close(descriptor)


def _enter(ruleset: int) -> None:
    kernel.enter_ruleset(ruleset)
    os.close(ruleset)


def _verify(view: View | None) -> None:
    """Ask the kernel whether it is all true; what was only asked for does not count."""
    if view is not None and any(kernel.capabilities()):
        raise NotConfined("capabilities are left")
    if not kernel.has_no_new_privileges():
        raise NotConfined("new privileges are not forbidden")
    if not kernel.has_filter():
        raise NotConfined("the system call filter is not in force")
    if view is None or any(step.path == "/" and step.kind in _WRITABLE for step in view.steps):
        return
    if not os.statvfs("/").f_flag & os.ST_RDONLY:
        raise NotConfined("the root is not read-only")
