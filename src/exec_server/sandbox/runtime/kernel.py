"""System calls that confine a process without threads, one function each; all raise OSError."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
from collections.abc import Callable
from functools import cache
from typing import Final, NamedTuple

from exec_server.filesystem.syscalls import RESOLVE_NO_SYMLINKS, OpenHow
from exec_server.host.libc import LIBC

CLONE_NEWNS: Final = 0x0002_0000
CLONE_NEWIPC: Final = 0x0800_0000
CLONE_NEWUSER: Final = 0x1000_0000
CLONE_NEWPID: Final = 0x2000_0000
CLONE_NEWNET: Final = 0x4000_0000
_CLONE_PARENT: Final = 0x8000

# The flags of mount(2) have the same values.
MOUNT_ATTR_RDONLY: Final = 0x01
MOUNT_ATTR_NOSUID: Final = 0x02
MOUNT_ATTR_NODEV: Final = 0x04
MOUNT_ATTR_NOEXEC: Final = 0x08

_AT_FDCWD: Final = -100
_AT_EMPTY_PATH: Final = 0x1000
_AT_RECURSIVE: Final = 0x8000
_OPEN_TREE_CLONE: Final = 1
_OPEN_TREE_CLOEXEC: Final = os.O_CLOEXEC
_MOVE_MOUNT_BOTH_EMPTY: Final = 0x04 | 0x40  # both ends are descriptors, not paths
_MS_PRIVATE: Final = 1 << 18
_MNT_DETACH: Final = 2

_PR_SET_PDEATHSIG: Final = 1
_PR_GET_SECCOMP: Final = 21
_PR_SET_SECCOMP: Final = 22
_PR_CAPBSET_DROP: Final = 24
_PR_SET_SECUREBITS: Final = 28
_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_GET_NO_NEW_PRIVS: Final = 39
_PR_CAP_AMBIENT: Final = 47
_PR_CAP_AMBIENT_CLEAR_ALL: Final = 4
# No capabilities for uid 0, none kept across a change of user, none ambient; all bits locked.
_SECUREBITS: Final = 0xEF
_CAPABILITY_VERSION: Final = 0x2008_0522
_SECCOMP_MODE_FILTER: Final = 2
_SECCOMP_SET_MODE_FILTER: Final = 1
_SECCOMP_NEW_LISTENER: Final = 1 << 3
# A signal does not interrupt a call that the listener has received; since Linux 5.19.
_SECCOMP_WAIT_KILLABLE: Final = 1 << 5
_KEYCTL_JOIN_SESSION_KEYRING: Final = 1

_LANDLOCK_CREATE_RULESET_VERSION: Final = 1
_LANDLOCK_RULE_PATH_BENEATH: Final = 1


class _Numbers(NamedTuple):
    clone: int
    pivot_root: int
    keyctl: int
    seccomp: int


_NUMBERS: Final = {"x86_64": _Numbers(56, 155, 250, 317), "aarch64": _Numbers(220, 41, 219, 277)}
MACHINE: Final = os.uname().machine

_ENTRY = OpenHow(os.O_PATH | os.O_NOFOLLOW, RESOLVE_NO_SYMLINKS)


class _MountAttributes(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "user_namespace")
    )


class _RulesetAttributes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("files", "network", "scoped"))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _system_call(number: int, *kinds: type) -> Callable[..., int]:
    """A function for one system call; declaring the types once makes each call cheaper."""
    function = LIBC["syscall"]  # a new object each time, unlike the attribute
    function.restype = ctypes.c_long
    function.argtypes = (ctypes.c_long, *kinds)

    def call(*arguments: object) -> int:
        return _checked(function(number, *arguments))

    return call


def _prctl(option: int, *values: int) -> int:
    padded = (*values, 0, 0, 0, 0)[:4]
    return _checked(LIBC.prctl(option, *padded))


def is_supported_machine() -> bool:
    """Whether the system call numbers of this architecture are known."""
    return MACHINE in _NUMBERS


_int, _word, _text, _address = ctypes.c_int, ctypes.c_long, ctypes.c_char_p, ctypes.c_void_p
# On an unsupported machine these are never called.
_own = _NUMBERS.get(MACHINE, _Numbers(-1, -1, -1, -1))
_clone = _system_call(_own.clone, _word, _word, _word, _word, _word)
_sys_pivot_root = _system_call(_own.pivot_root, _text, _text)
_keyctl = _system_call(_own.keyctl, _int, _text)
_seccomp = _system_call(_own.seccomp, _int, _word, _address)
# Newer calls have the same number on every architecture.
_open_tree = _system_call(428, _int, _text, _int)
_move_mount = _system_call(429, _int, _text, _int, _text, _int)
_mount_setattr = _system_call(442, _int, _text, _int, _address, _word)
_landlock_create_ruleset = _system_call(444, _address, _word, _int)
_landlock_add_rule = _system_call(445, _int, _int, _address, _int)
_landlock_restrict_self = _system_call(446, _int, _int)


def fork_as_sibling(namespaces: int) -> int:
    """Fork into new namespaces, as a child of this process's parent; returns like os.fork."""
    flags = namespaces | _CLONE_PARENT | signal.SIGCHLD
    return _clone(flags, 0, 0, 0, 0)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def leave_keyring() -> None:
    """Replace the inherited session keyring with a new one."""
    _keyctl(_KEYCTL_JOIN_SESSION_KEYRING, None)


def open_entry(path: str) -> int:
    """A descriptor of the entry at the path; no component may be a link."""
    descriptor = _ENTRY.open(os.fsencode(path))
    if descriptor < 0:
        raise OSError(-descriptor, os.strerror(-descriptor), path)
    return descriptor


def clone_tree(descriptor: int) -> int:
    """A detached copy of the mount tree at an open file or directory."""
    flags = _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC | _AT_EMPTY_PATH | _AT_RECURSIVE
    return _open_tree(descriptor, b"", flags)


def set_mount_attributes(descriptor: int, attributes: int, *, recursive: bool) -> None:
    """Add attributes to a mount and make its propagation private."""
    value = _MountAttributes(attributes, 0, _MS_PRIVATE, 0)
    flags = _AT_EMPTY_PATH | (_AT_RECURSIVE if recursive else 0)
    _mount_setattr(descriptor, b"", flags, ctypes.byref(value), ctypes.sizeof(value))


def clear_read_only(descriptor: int) -> None:
    """Clear MOUNT_ATTR_RDONLY of a mount that this process has created."""
    value = _MountAttributes(0, MOUNT_ATTR_RDONLY, 0, 0)
    _mount_setattr(descriptor, b"", _AT_EMPTY_PATH, ctypes.byref(value), ctypes.sizeof(value))


def attach(tree: int, target: int) -> None:
    """Mount a detached tree onto an open file or directory, or move a mount there."""
    _move_mount(tree, b"", target, b"", _MOVE_MOUNT_BOTH_EMPTY)


def mount_new(kind: str, path: str, options: str, attributes: int) -> None:
    """Mount a new file system without a device: tmpfs, proc, devpts."""
    name = kind.encode()
    _checked(
        LIBC.mount(name, os.fsencode(path), name, ctypes.c_ulong(attributes), options.encode())
    )


def unmount(path: str) -> None:
    """Detach the uppermost mount at the path, with all mounts below it."""
    _checked(LIBC.umount2(os.fsencode(path), _MNT_DETACH))


def replace_root(path: str) -> bool:
    """Make a mount the root of this process; returns whether the old root is detached.

    The kernel refuses to detach the initial ramfs. The mount is then moved over the old root, as
    switch_root does. No path leads below it, because `..` of the root is the root; but the old
    mounts stay in the mount namespace.
    """
    os.chdir(path)
    try:
        _sys_pivot_root(b".", b".")
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        mount, target = os.open(".", os.O_PATH | os.O_CLOEXEC), open_entry("/")
        attach(mount, target)
        for descriptor in (mount, target):
            os.close(descriptor)
        os.chroot(".")
        is_detached = False
    else:
        unmount(".")
        is_detached = True
    os.chdir("/")
    return is_detached


def lower_root(path: str, name: str) -> int:
    """Move the root into the directory `name` of the mount at the path, and chroot into it.

    Returns a descriptor of the directory above the new root, which no path leads to.
    """
    os.chdir(path)
    try:
        _sys_pivot_root(b".", os.fsencode(name))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # The root is the initramfs, which cannot be moved.
        root, target = open_entry("/"), open_entry(f"{path}/{name}")
        tree = clone_tree(root)
        attach(tree, target)
        for descriptor in (root, target, tree):
            os.close(descriptor)
    else:
        os.chdir("/")
    top = os.open(".", os.O_PATH | os.O_CLOEXEC)
    os.chroot(name)
    os.chdir("/")
    return top


def drop_bounding_set() -> None:
    """Drop the bounding and ambient sets, but keep the capabilities of this process."""
    # The call fails for the first number beyond the capabilities of this kernel.
    number = 0
    while LIBC.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) == 0:
        number += 1
    if number == 0:
        raise OSError(errno.EPERM, "capabilities cannot be dropped")
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)


def drop_capabilities() -> None:
    """Drop all capabilities; needs `drop_bounding_set` first."""
    _prctl(_PR_SET_SECUREBITS, _SECUREBITS)
    header = _CapabilityHeader(_CAPABILITY_VERSION, 0)
    _checked(LIBC.capset(ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)())))


def capabilities() -> tuple[int, ...]:
    """Effective, permitted and inheritable capabilities; all zero when there are none."""
    header = _CapabilityHeader(_CAPABILITY_VERSION, 0)
    data = (ctypes.c_uint32 * 6)()
    _checked(LIBC.capget(ctypes.byref(header), ctypes.byref(data)))
    return tuple(data)


def set_no_new_privileges() -> None:
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def has_no_new_privileges() -> bool:
    return _prctl(_PR_GET_NO_NEW_PRIVS) == 1


def install_filter(program: bytes, *, with_listener: bool = False) -> int | None:
    """Apply a seccomp filter, needs `set_no_new_privileges` first; returns its listener if any."""
    buffer = ctypes.create_string_buffer(program, len(program))
    value = _FilterProgram(len(program) // 8, ctypes.addressof(buffer))
    if not with_listener:
        _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(value))
        return None
    flags = _SECCOMP_NEW_LISTENER
    try:
        return _seccomp(
            _SECCOMP_SET_MODE_FILTER, flags | _SECCOMP_WAIT_KILLABLE, ctypes.byref(value)
        )
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return _seccomp(_SECCOMP_SET_MODE_FILTER, flags, ctypes.byref(value))


def has_filter() -> bool:
    return _prctl(_PR_GET_SECCOMP) == _SECCOMP_MODE_FILTER


@cache
def landlock_version() -> int:
    """The version of Landlock in this kernel; 0 if there is none."""
    try:
        return _landlock_create_ruleset(None, 0, _LANDLOCK_CREATE_RULESET_VERSION)
    except OSError:
        return 0


def create_ruleset(files: int, scoped: int, version: int) -> int:
    """A ruleset that handles these file rights and scopes."""
    value = _RulesetAttributes(files, 0, scoped)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    return _landlock_create_ruleset(ctypes.byref(value), size, 0)


def allow_beneath(ruleset: int, descriptor: int, rights: int) -> None:
    """Grant rights on an open file, or on a directory and everything below it."""
    value = _PathBeneath(rights, descriptor)
    _landlock_add_rule(ruleset, _LANDLOCK_RULE_PATH_BENEATH, ctypes.byref(value), 0)


def enter_ruleset(ruleset: int) -> None:
    """Apply a ruleset; needs `forbid_new_privileges` first."""
    _landlock_restrict_self(ruleset, 0)
