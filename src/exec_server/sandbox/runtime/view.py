"""Builds a View: changes the mounts of a new mount namespace to enforce a policy.

The order matters. All parts of the host's tree are cloned, and checked to be the inodes of the
layout, before anything is attached. The whole tree becomes stricter after each round of clones:
devices, then nodev; writable paths, then read-only. Then clones are attached, parents first.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from typing import Final, Literal, NamedTuple

from exec_server.errors import InternalError, os_error_text
from exec_server.sandbox.policy.model import Step, View
from exec_server.sandbox.runtime import kernel

ProcMount = Literal["private", "inherited", "none"]

_NOSUID_NODEV: Final = kernel.MOUNT_ATTR_NOSUID | kernel.MOUNT_ATTR_NODEV
_DEVICES: Final = ("null", "zero", "full", "random", "urandom", "tty")
# The certificates that the command trusts, in its private /dev: every view has one, and no policy
# makes a part of it writable.
CERTIFICATES: Final = "/dev/exec-server-ca/certificates.pem"
_STAGING: Final = "/dev"
_ROOT: Final = "root"  # the directory of the staging area in which the root can be
# A tmpfs uses memory of the machine. The skeletons hold only names; programs can write only to
# /dev/shm.
_SKELETON_OPTIONS: Final = "mode=0755,size=1m,nr_inodes=4096"
_SHM_OPTIONS: Final = "mode=1777,size=50%"
_TERMINAL_OPTIONS: Final = "newinstance,ptmxmode=0666,mode=620"
_MASKED, _PASSABLE = 0o000, 0o111

# Kernel settings that root may write as their owner, without any capability.
_PROC_READ_ONLY: Final = ("sys", "sysrq-trigger", "irq", "bus", "fs")
# Hidden as by container runtimes: memory and keys of the kernel, and hardware. Other sensitive
# files of /proc require capabilities.
_PROC_HIDDEN: Final = (
    "acpi",
    "asound",
    "interrupts",
    "kcore",
    "keys",
    "kpagecgroup",
    "kpagecount",
    "kpageflags",
    "latency_stats",
    "sched_debug",
    "scsi",
    "timer_list",
    "timer_stats",
)
_SYS_HIDDEN: Final = ("firmware", "kernel/debug", "kernel/tracing", "kernel/security")

# Errors for a path of a step that was removed or replaced. Any other error is a failure.
_REPLACED: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
# Errors for a file of the kernel that does not exist here, or that no process of this user reaches.
_OUT_OF_REACH: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM})


class StaleView(InternalError):
    """The disk has changed since the view was laid out."""


class Built(NamedTuple):
    """Descriptors of a built view.

    terminals: the host's /dev/pts, for `add_terminal`; None for an empty root. top: a directory
    above all paths of this view and of no other view, for rules of Landlock. covers_host: the
    mounts of the host are still below the root (see `kernel.replace_root`).
    """

    terminals: int | None
    top: int | None
    covers_host: bool = False


def build(
    view: View, *, proc: ProcMount, terminal: str | None, with_scratch: bool, with_top: bool
) -> Built:
    """Change the mounts of this process, whose mount namespace must be new, into the view.

    `terminal` is the path of the command's terminal; `with_scratch` adds a private /dev/shm
    and /dev/pts. `with_top` is needed for `Built.top`; it prevents nested user namespaces, which
    the kernel refuses to a process in a chroot.
    """
    steps = [step for step in view.steps if not _is_replaced(step.path)]
    terminals = None if view.is_empty or not with_scratch else _open_terminals()
    root = kernel.open_entry("/")
    kernel.set_mount_attributes(root, kernel.MOUNT_ATTR_NOSUID, recursive=True)
    devices = {name: _clone_device(f"/dev/{name}") for name in _DEVICES}
    if terminal is not None:
        devices["console"] = _clone_device(terminal)
    kernel.set_mount_attributes(root, kernel.MOUNT_ATTR_NODEV, recursive=True)
    trees = {step.path: _clone(step) for step in steps if step.kind in ("write", "pin")}
    if "/" not in trees:  # otherwise only the clones made from here on are read-only
        kernel.set_mount_attributes(root, kernel.MOUNT_ATTR_RDONLY, recursive=True)
    os.close(root)
    trees |= {step.path: _clone_read_only(step) for step in steps if step.kind == "read"}
    inherited = _clone_path("/proc") if proc == "inherited" and view.is_empty else None
    staging = _StagingArea(view, steps)
    parents: list[str] = []  # the paths of the steps above this one
    for step in steps:
        while parents and not step.path.startswith(f"{parents[-1]}/"):
            parents.pop()
        # Globs may match thousands of files, so masks are cloned one at a time.
        tree = staging.mask(step) if step.kind == "mask" else trees[step.path]
        # Below another step the mount point exists, on the host or in a mask.
        _attach(tree, staging.prefix, step, make_mount_point=view.is_empty and not parents)
        parents.append(step.path)
    _mount_proc(staging, proc, inherited)
    if view.is_empty:
        _mount_devices(staging.prefix, devices, with_scratch=with_scratch)
        _set_attributes(staging.prefix, kernel.MOUNT_ATTR_RDONLY | _NOSUID_NODEV)
        is_detached = kernel.replace_root(staging.prefix)
        return Built(None, kernel.open_entry("/"), covers_host=not is_detached)
    _make_read_only("/", ("sys",))
    staging.hide("/sys", _SYS_HIDDEN)
    top = None
    if with_top:
        top = kernel.lower_root(_STAGING, _ROOT)
    else:
        kernel.unmount(_STAGING)
    _mount_devices("", devices, with_scratch=with_scratch)
    return Built(terminals, top)


def add_terminal(terminals: int, path: str) -> None:
    """Mount the command's terminal, one of the host's, as /dev/console."""
    descriptor = os.open(os.path.basename(path), os.O_PATH | os.O_NOFOLLOW, dir_fd=terminals)
    tree = kernel.clone_tree(descriptor)
    kernel.set_mount_attributes(tree, kernel.MOUNT_ATTR_RDONLY, recursive=False)
    os.close(descriptor)
    devices = kernel.open_entry("/dev")
    kernel.clear_read_only(devices)
    _make_mount_point("/dev/console", is_directory=False)
    kernel.set_mount_attributes(devices, kernel.MOUNT_ATTR_RDONLY, recursive=False)
    os.close(devices)
    _attach_to(tree, kernel.open_entry("/dev/console"))


def add_certificates(content: bytes) -> None:
    """Add the file CERTIFICATES to a built view, on a tmpfs that no other view has."""
    directory = os.path.dirname(CERTIFICATES)
    devices = kernel.open_entry("/dev")
    kernel.clear_read_only(devices)
    _make_mount_point(directory, is_directory=True)
    kernel.set_mount_attributes(devices, kernel.MOUNT_ATTR_RDONLY, recursive=False)
    os.close(devices)
    attributes = _NOSUID_NODEV | kernel.MOUNT_ATTR_NOEXEC
    # Whole pages, one for the names; an init has no other use of memory for the file.
    size = len(content) + 2 * os.sysconf("SC_PAGE_SIZE")
    kernel.mount_new("tmpfs", directory, f"mode=0755,size={size},nr_inodes=4", attributes)
    descriptor = os.open(CERTIFICATES, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC)
    with open(descriptor, "wb") as file:
        file.write(content)
        os.fchmod(descriptor, 0o444)
    _set_attributes(directory, kernel.MOUNT_ATTR_RDONLY | attributes)


def _open_terminals() -> int | None:
    try:
        return kernel.open_entry("/dev/pts")
    except OSError as error:
        if error.errno in _OUT_OF_REACH | _REPLACED:
            return None  # not on this machine
        raise


def mount_read_only(steps: Iterable[Step]) -> None:
    """Mount placeholders read-only in a built view."""
    for step in steps:
        _attach(_clone_read_only(step), "", step, make_mount_point=False)


def _is_replaced(path: str) -> bool:
    """Whether a private /dev or /proc replaces a path, for any policy."""
    return path in ("/dev", "/proc") or path.startswith(("/dev/", "/proc/"))


def _clone(step: Step) -> int:
    """A detached clone of the host's subtree at a step, with its current attributes."""
    descriptor = _open_step(step, step.path)
    info = os.fstat(descriptor)
    if (info.st_dev, info.st_ino) != (step.device, step.inode):
        raise StaleView(f"{step.path} was replaced")
    tree = kernel.clone_tree(descriptor)
    os.close(descriptor)
    return tree


def _open_step(step: Step, path: str) -> int:
    try:
        return kernel.open_entry(path)
    except OSError as error:
        reason = f"{step.path}: {os_error_text(error)}"
        raise (StaleView if error.errno in _REPLACED else InternalError)(reason) from error


def _clone_read_only(step: Step) -> int:
    tree = _clone(step)
    kernel.set_mount_attributes(tree, kernel.MOUNT_ATTR_RDONLY | _NOSUID_NODEV, recursive=True)
    return tree


def _clone_path(path: str) -> int:
    descriptor = kernel.open_entry(path)
    tree = kernel.clone_tree(descriptor)
    os.close(descriptor)
    return tree


def _clone_device(path: str) -> int | None:
    """A read-only mount of a device of the host.

    The kernel lets programs write to a device on a read-only mount, but not change the mode, the
    owner or the times of its node, which root would own.
    """
    try:
        tree = _clone_path(path)
    except FileNotFoundError:
        return None  # not on this machine
    kernel.set_mount_attributes(tree, kernel.MOUNT_ATTR_RDONLY, recursive=False)
    return tree


class _StagingArea:
    """The tmpfs for masks and an empty root, on /dev, which all machines have; then unmounted."""

    def __init__(self, view: View, steps: list[Step]) -> None:
        kernel.mount_new("tmpfs", _STAGING, _SKELETON_OPTIONS, _NOSUID_NODEV)
        os.mkdir(f"{_STAGING}/{_ROOT}", 0o755)
        self.prefix = ""
        if view.is_empty:
            self.prefix = f"{_STAGING}/{_ROOT}"
            kernel.mount_new("tmpfs", self.prefix, _SKELETON_OPTIONS, _NOSUID_NODEV)
            for link in view.links:
                _make_parents(self.prefix + link.path)
                os.symlink(link.target, self.prefix + link.path)
        for name, mode in (("hidden", 0o444), ("masked", _MASKED)):
            for is_directory in (False, True):
                path = f"{_STAGING}/{name}-{is_directory}"
                _make_mount_point(path, is_directory=is_directory)
                os.chmod(path, mode)
        # Only passable masks differ from each other: by the mount points in them.
        self._passable = {
            step.path: _make_passable_mask(number, step, steps)
            for number, step in enumerate(steps)
            if step.kind == "mask" and step.passable
        }
        _set_attributes(_STAGING, kernel.MOUNT_ATTR_RDONLY | _NOSUID_NODEV)

    def mask(self, step: Step) -> int:
        """A detached, empty, read-only tree for a mask."""
        return _clone_path(self._passable.get(step.path, f"{_STAGING}/masked-{step.is_directory}"))

    def hide(self, directory: str, names: tuple[str, ...]) -> None:
        """Mount empty files and directories over those of the kernel."""
        for name in names:
            target = _open_kernel_file(f"{directory}/{name}")
            if target is None:
                continue
            is_directory = stat.S_ISDIR(os.fstat(target).st_mode)
            _attach_to(_clone_path(f"{_STAGING}/hidden-{is_directory}"), target)


def _make_passable_mask(number: int, mask: Step, steps: list[Step]) -> str:
    """A directory that holds only the mount points of the steps below it."""
    root = f"{_STAGING}/mask{number}"
    os.mkdir(root)
    created = [root]
    for step in steps:
        if step.path.startswith(f"{mask.path}/"):
            below = step.path[len(mask.path) + 1 :]
            created += _make_mount_point_in_mask(root, below, step.is_directory)
    for directory in reversed(created):
        os.chmod(directory, _PASSABLE)
    return root


def _make_mount_point_in_mask(root: str, below: str, is_directory: bool) -> list[str]:
    """Create a mount point inside a mask; returns the new directories above it."""
    created = []
    *parents, name = below.split("/")
    for parent in parents:
        root = f"{root}/{parent}"
        if not os.path.isdir(root):
            os.mkdir(root)
            created.append(root)
    if not os.path.lexists(f"{root}/{name}"):
        _make_mount_point(f"{root}/{name}", is_directory=is_directory)
    return created


def _make_mount_point(path: str, *, is_directory: bool) -> None:
    if is_directory:
        os.mkdir(path, 0o755)
    else:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o444))


def _make_parents(path: str) -> None:
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)


def _attach(tree: int, prefix: str, step: Step, *, make_mount_point: bool) -> None:
    if step.path == "/":
        os.close(tree)  # nothing can be mounted over the root: it was left writable instead
        return
    path = prefix + step.path
    if make_mount_point and not os.path.lexists(path):
        _make_parents(path)
        _make_mount_point(path, is_directory=step.is_directory)
    _attach_to(tree, _open_step(step, path))


def _attach_to(tree: int, target: int) -> None:
    kernel.attach(tree, target)
    os.close(target)
    os.close(tree)


def _set_attributes(path: str, attributes: int) -> None:
    descriptor = kernel.open_entry(path)
    kernel.set_mount_attributes(descriptor, attributes, recursive=False)
    os.close(descriptor)


def _mount_proc(staging: _StagingArea, proc: ProcMount, inherited: int | None) -> None:
    path = f"{staging.prefix}/proc"
    if staging.prefix:
        os.mkdir(path, 0o755)
    elif not _is_directory(path):
        return
    if proc == "private":
        kernel.mount_new("proc", path, "", _NOSUID_NODEV | kernel.MOUNT_ATTR_NOEXEC)
        _make_read_only(path, _PROC_READ_ONLY)
        staging.hide(path, _PROC_HIDDEN)
    elif proc == "none":
        kernel.mount_new("tmpfs", path, _SKELETON_OPTIONS, kernel.MOUNT_ATTR_RDONLY | _NOSUID_NODEV)
    elif inherited is not None:
        _attach_to(inherited, kernel.open_entry(path))


def _is_directory(path: str) -> bool:
    """Whether a directory exists; unlike os.path.isdir, raises OSError if that is not certain."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _open_kernel_file(path: str) -> int | None:
    """A descriptor of an entry in /proc or /sys, None if no process of this user reaches it."""
    try:
        return kernel.open_entry(path)
    except OSError as error:
        if error.errno in _OUT_OF_REACH:
            return None
        raise


def _make_read_only(directory: str, names: tuple[str, ...]) -> None:
    for name in names:
        target = _open_kernel_file(f"{directory}/{name}")
        if target is None:
            continue
        tree = kernel.clone_tree(target)
        kernel.set_mount_attributes(
            tree,
            kernel.MOUNT_ATTR_RDONLY | _NOSUID_NODEV | kernel.MOUNT_ATTR_NOEXEC,
            recursive=True,
        )
        _attach_to(tree, target)


_DEVICE_LINKS: Final = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "ptmx": "pts/ptmx",
}


def _mount_devices(prefix: str, devices: dict[str, int | None], *, with_scratch: bool) -> None:
    path = f"{prefix}/dev"
    if prefix:
        os.mkdir(path, 0o755)
    kernel.mount_new("tmpfs", path, _SKELETON_OPTIONS, _NOSUID_NODEV | kernel.MOUNT_ATTR_NOEXEC)
    for name, tree in devices.items():
        if tree is not None:
            _make_mount_point(f"{path}/{name}", is_directory=False)
            _attach_to(tree, kernel.open_entry(f"{path}/{name}"))
    for name, target in _DEVICE_LINKS.items():
        os.symlink(target, f"{path}/{name}")
    os.mkdir(f"{path}/pts", 0o755)
    os.mkdir(f"{path}/shm", 0o755)
    if with_scratch:
        attributes = kernel.MOUNT_ATTR_NOSUID | kernel.MOUNT_ATTR_NOEXEC
        kernel.mount_new("devpts", f"{path}/pts", _TERMINAL_OPTIONS, attributes)
        kernel.mount_new("tmpfs", f"{path}/shm", _SHM_OPTIONS, _NOSUID_NODEV)
    _set_attributes(path, kernel.MOUNT_ATTR_RDONLY | _NOSUID_NODEV | kernel.MOUNT_ATTR_NOEXEC)
