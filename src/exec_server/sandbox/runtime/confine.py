"""Drops the privileges of this process permanently, and verifies that they are gone.

The layers after the view are independent: dropped capabilities keep root from changing the view,
Landlock repeats its limits without mounts, and the filter refuses other system calls.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterable
from functools import partial
from itertools import product
from typing import Final

from exec_server.errors import ExecServerError
from exec_server.sandbox.policy.model import Network, Restrictions, View
from exec_server.sandbox.policy.seccomp import build_filter
from exec_server.sandbox.runtime import kernel

# The file rights of Landlock.
_WRITE_FILE: Final = 1 << 1
_READ_FILE: Final = 1 << 2
_READ_DIRECTORY: Final = 1 << 3
_READ: Final = _READ_FILE | _READ_DIRECTORY
_REMOVE: Final = 1 << 4 | 1 << 5
# Write, remove and create directories, files and links; no devices, sockets or pipes.
_CHANGE: Final = _WRITE_FILE | _REMOVE | 1 << 7 | 1 << 8 | 1 << 12
_REFER: Final = 1 << 13  # since version 2
_TRUNCATE: Final = 1 << 14  # since version 3
_IOCTL_DEVICE: Final = 1 << 15  # since version 5
_READ_OR_EXECUTE: Final = _READ | 1 << 0
# The number of file rights in each version of Landlock.
_RIGHTS_BY_VERSION: Final = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
# The rights that a rule for a file, not a directory, can have.
_FILE_ONLY: Final = _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEVICE
_WRITABLE: Final = ("write", "pin")
_SCOPE_VERSION: Final = 6
_SCOPE_ABSTRACT_SOCKETS: Final = 1
_SCOPE_SIGNALS: Final = 2


class NotConfined(ExecServerError):
    """A restriction did not take effect, so the process must not run."""


def prepare_filters() -> None:
    """Build all filters once, for the processes that are forked from this one."""
    if kernel.is_supported_machine():
        for flag, locks in product((False, True), repeat=2):
            offline = partial(
                _command_filter,
                "restricted",
                allow_nesting=flag,
                unix_sockets=True,
                exclusive_locks=locks,
            )
            offline()
            offline(with_listener=True)
            for network in ("enabled", "proxied"):
                _command_filter(
                    network, allow_nesting=False, unix_sockets=flag, exclusive_locks=locks
                )
        _worker_filter()


def _command_filter(
    network: Network,
    *,
    allow_nesting: bool,
    unix_sockets: bool,
    exclusive_locks: bool,
    with_listener: bool = False,
) -> bytes:
    return build_filter(
        network,
        machine=kernel.MACHINE,
        allow_nesting=allow_nesting,
        unix_sockets=unix_sockets,
        exclusive_locks=exclusive_locks,
        with_listener=with_listener,
    )


def _worker_filter() -> bytes:
    return build_filter("restricted", machine=kernel.MACHINE, for_worker=True)


def command_ruleset(network: Network, view: View, top: int) -> int:
    """A descriptor of the Landlock ruleset with file rights for a command in its built view.

    A descriptor that another command has sent leads to mounts of another view. Rules apply to a
    directory and everything below it, in every mount namespace. So the right to remove names,
    which renaming needs too, is granted only on `top`, which is above the mounts of this view
    alone; and the right to write only where the view is writable, because a read-only mount does
    not prevent writing to a named pipe. Reading is left to the mounts.
    """
    version = kernel.landlock_version()
    changes = _file_rights(version) & ~_READ_OR_EXECUTE
    ruleset = kernel.create_ruleset(changes, _command_scopes(network, version), version)
    kernel.allow_beneath(ruleset, top, (_REMOVE | _REFER) & changes)
    writable = [step.path for step in view.steps if step.kind == "write"]
    _grant(ruleset, ["/dev", "/proc", *writable], changes & ~_REMOVE)
    return ruleset


def check_streams(descriptors: Iterable[int], *, has_file_rights: bool) -> None:
    """Raise NotConfined for open files that lead to more of the host, by mounts of the host.

    A directory contains other files, and a file that is open for reading can be opened again for
    writing, through /proc/self/fd, unless Landlock prevents it.
    """
    for descriptor in descriptors:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise NotConfined(f"standard stream {descriptor} is a directory")
        if stat.S_ISREG(mode) and _is_read_only(descriptor) and not has_file_rights:
            raise NotConfined(f"standard stream {descriptor} is a file that is only open to read")


def _is_read_only(descriptor: int) -> bool:
    return fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY


def allow_open_files(ruleset: int, descriptors: Iterable[int]) -> None:
    """Allow a command to reopen, by /proc/self/fd, the files that it has open for writing."""
    rights = (_WRITE_FILE | _TRUNCATE | _IOCTL_DEVICE) & _file_rights(kernel.landlock_version())
    for descriptor in descriptors:
        if _is_read_only(descriptor):
            continue
        try:
            kernel.allow_beneath(ruleset, descriptor, rights)
        except OSError as error:
            if error.errno != errno.EBADFD:  # a pipe or socket without a path: never refused
                raise


def confine_command(
    network: Network, view: View | None, restrictions: Restrictions, ruleset: int | None
) -> int | None:
    """Confine a command; `ruleset` is its `command_ruleset`, None without file rights.

    Without a view files are not limited, and a command of root keeps its capabilities. Returns
    the listener for refused calls (see `child`), if there is one.
    """
    if not restrictions.is_separate:
        raise NotConfined("other commands could be reached through /proc")
    if view is not None or network == "proxied":
        kernel.drop_capabilities()
    kernel.set_no_new_privileges()
    version = kernel.landlock_version()
    if ruleset is not None:
        _enter(ruleset)
    elif version >= _SCOPE_VERSION:
        scopes = _command_scopes(network, version)
        if view is None:
            scopes &= ~_SCOPE_SIGNALS
        if scopes:
            _enter(kernel.create_ruleset(0, scopes, version))
    listener = _filter_command(network, view, restrictions)
    _verify(view, without_capabilities=view is not None or network == "proxied")
    return listener


def _filter_command(network: Network, view: View | None, restrictions: Restrictions) -> int | None:
    """Install the filter of a command; returns its listener if there is one."""
    make = partial(
        _command_filter,
        network,
        allow_nesting=restrictions.allow_nesting,
        unix_sockets=restrictions.unix_sockets,
        exclusive_locks=restrictions.exclusive_locks,
    )
    if network == "restricted" and view is not None:
        try:
            return kernel.install_filter(make(with_listener=True), with_listener=True)
        except OSError:
            pass  # an old kernel, or a filter around this server has a listener already
    return kernel.install_filter(make())


def _command_scopes(network: Network, version: int) -> int:
    if version < _SCOPE_VERSION:
        return 0
    # Abstract sockets of the host are part of an enabled network.
    return _SCOPE_SIGNALS | (_SCOPE_ABSTRACT_SOCKETS if network != "enabled" else 0)


def confine_worker(view: View) -> None:
    """Confine a file worker, which starts no processes and needs only its files."""
    kernel.drop_bounding_set()
    kernel.drop_capabilities()
    kernel.set_no_new_privileges()
    version = kernel.landlock_version()
    if version > 0:
        _enter(_file_ruleset(view, version))
    kernel.install_filter(_worker_filter())
    _verify(view)


def _file_ruleset(view: View, version: int) -> int:
    handled = _file_rights(version)
    scopes = _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS if version >= _SCOPE_VERSION else 0
    ruleset = kernel.create_ruleset(handled, scopes, version)
    # In an empty root the parents of granted paths can be listed.
    _grant(ruleset, ["/"], _READ_DIRECTORY if view.is_empty else _READ)
    readable = [step.path for step in view.steps if step.kind == "read"]
    _grant(ruleset, ["/proc", "/dev", *readable], _READ & handled)
    _grant(ruleset, ["/dev"], (_READ | _WRITE_FILE) & handled)
    writable = [step.path for step in view.steps if step.kind == "write"]
    _grant(ruleset, writable, (_READ | _CHANGE | _REFER | _TRUNCATE) & handled)
    return ruleset


def _file_rights(version: int) -> int:
    return (1 << _RIGHTS_BY_VERSION.get(version, 16)) - 1


def _grant(ruleset: int, paths: Iterable[str], rights: int) -> None:
    for path in paths:
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # replaced by a private /dev or /proc
        applicable = rights if os.path.isdir(path) else rights & _FILE_ONLY
        kernel.allow_beneath(ruleset, descriptor, applicable)
        os.close(descriptor)


def _enter(ruleset: int) -> None:
    kernel.enter_ruleset(ruleset)
    os.close(ruleset)


def _verify(view: View | None, *, without_capabilities: bool = True) -> None:
    """Query the kernel for each restriction, and raise NotConfined if one is missing."""
    if without_capabilities and any(kernel.capabilities()):
        raise NotConfined("capabilities are left")
    if not kernel.has_no_new_privileges():
        raise NotConfined("new privileges are not forbidden")
    if not kernel.has_filter():
        raise NotConfined("the system call filter is not in force")
    if view is None or any(step.path == "/" and step.kind in _WRITABLE for step in view.steps):
        return
    if not os.statvfs("/").f_flag & os.ST_RDONLY:
        raise NotConfined("the root is not read-only")
