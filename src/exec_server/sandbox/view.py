"""Builds a View: turns the mounts of a fresh mount namespace into what a policy allows.

The order matters. All that is needed of the host's tree is opened and cloned while it is as
the host has it; each clone is checked to be the very file or directory that the view was laid
out for, so no link or rename put in the way meanwhile leads elsewhere. Attributes are given to
the whole tree at once, a stricter one after each round of clones: first devices are cloned,
then nothing may be a device; then what is writable is cloned, then nothing may be written; what
is cloned last is read-only. Then all of it is attached on top of the tree, parents first.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from typing import Final, Literal

from exec_server.errors import ExecServerError
from exec_server.sandbox import kernel
from exec_server.sandbox.plan import Step, View

ProcMount = Literal["own", "inherited", "none"]

_QUIET: Final = kernel.NO_SUID | kernel.NO_DEVICES
_DEVICES: Final = ("null", "zero", "full", "random", "urandom", "tty")
_STAGE: Final = "/dev"
# A tmpfs takes memory of the machine. These hold only names; programs write to /dev/shm alone.
_SKELETON_OPTIONS: Final = "mode=0755,size=1m,nr_inodes=4096"
_SHM_OPTIONS: Final = "mode=1777,size=50%"
_TERMINAL_OPTIONS: Final = "newinstance,ptmxmode=0666,mode=620"
_MASKED, _PASSABLE = 0o000, 0o111

# Kernel settings that root may write by ownership alone, without any capability.
_PROC_READ_ONLY: Final = ("sys", "sysrq-trigger", "irq", "bus", "fs")
# What container runtimes hide: memory and keys of the kernel, and its hardware. What else is
# delicate there asks for capabilities.
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


class StaleView(ExecServerError):
    """The disk is no longer what the view was laid out for."""


def build(view: View, *, proc: ProcMount, terminal: str | None, with_scratch: bool) -> int | None:
    """Change this process's mount namespace, which must be new, into the view.

    `terminal` is the path of the terminal a command runs on; `with_scratch` gives it memory
    and terminals of its own in /dev. Returns the directory of the host's terminals for
    `add_terminal`; an empty root has left it behind.
    """
    steps = [step for step in view.steps if not _is_kernels(step.path)]
    terminals = None if view.is_empty or not with_scratch else _open_terminals()
    root = kernel.open_entry("/")
    kernel.set_mount(root, kernel.NO_SUID, below_too=True)
    devices = {name: _clone_device(f"/dev/{name}") for name in _DEVICES}
    if terminal is not None:
        devices["console"] = _clone_device(terminal)
    kernel.set_mount(root, kernel.NO_DEVICES, below_too=True)
    trees = {step.path: _clone(step) for step in steps if step.kind in ("write", "pin")}
    if "/" not in trees:  # otherwise only what is cloned from here on is read-only
        kernel.set_mount(root, kernel.READ_ONLY, below_too=True)
    os.close(root)
    trees |= {step.path: _clone_read_only(step) for step in steps if step.kind == "read"}
    inherited = _clone_of("/proc") if proc == "inherited" and view.is_empty else None
    stage = _Stage(view, steps)
    around: list[str] = []  # the steps that this one is below
    for step in steps:
        while around and not step.path.startswith(f"{around[-1]}/"):
            around.pop()
        # Masks are many where patterns are denied: they are cloned one at a time.
        tree = stage.mask(step) if step.kind == "mask" else trees[step.path]
        # Below another step the mount point is the host's own, or in a mask: none is made there.
        _attach(tree, stage.prefix, step, make_point=view.is_empty and not around)
        around.append(step.path)
    _mount_proc(stage, proc, inherited)
    if view.is_empty:
        _mount_devices(stage.prefix, devices, with_scratch=with_scratch)
        _set(stage.prefix, kernel.READ_ONLY | _QUIET)
        kernel.become_root(stage.prefix)
    else:
        _freeze_parts("/", ("sys",))
        stage.hide("/sys", _SYS_HIDDEN)
        kernel.unmount(_STAGE)
        _mount_devices("", devices, with_scratch=with_scratch)
    return terminals


def add_terminal(terminals: int, path: str) -> None:
    """Show one of the host's terminals, the one a command runs on, as /dev/console."""
    descriptor = os.open(os.path.basename(path), os.O_PATH | os.O_NOFOLLOW, dir_fd=terminals)
    tree = kernel.clone_tree(descriptor)
    os.close(descriptor)
    devices = kernel.open_entry("/dev")
    kernel.allow_writing(devices)
    _make_point("/dev/console", is_directory=False)
    kernel.set_mount(devices, kernel.READ_ONLY, below_too=False)
    os.close(devices)
    _attach_to(tree, kernel.open_entry("/dev/console"))


def _open_terminals() -> int | None:
    try:
        return kernel.open_entry("/dev/pts")
    except OSError:
        return None  # this machine has none


def cover(steps: Iterable[Step]) -> None:
    """Add read-only steps to a view that is built."""
    for step in steps:
        _attach(_clone_read_only(step), "", step, make_point=False)


def _is_kernels(path: str) -> bool:
    """Whether a path is replaced by a private one anyway, whatever a policy grants there."""
    return path in ("/dev", "/proc") or path.startswith(("/dev/", "/proc/"))


def _clone(step: Step) -> int:
    """The host's subtree at a step, detached, with the attributes that it has by now."""
    try:
        descriptor = kernel.open_entry(step.path)
    except OSError as error:
        raise StaleView(f"{step.path}: {error.strerror}") from error
    info = os.fstat(descriptor)
    if (info.st_dev, info.st_ino) != (step.device, step.inode):
        raise StaleView(f"{step.path} was replaced")
    tree = kernel.clone_tree(descriptor)
    os.close(descriptor)
    return tree


def _clone_read_only(step: Step) -> int:
    tree = _clone(step)
    kernel.set_mount(tree, kernel.READ_ONLY | _QUIET, below_too=True)
    return tree


def _clone_of(path: str) -> int:
    descriptor = kernel.open_entry(path)
    tree = kernel.clone_tree(descriptor)
    os.close(descriptor)
    return tree


def _clone_device(path: str) -> int | None:
    try:
        return _clone_of(path)
    except FileNotFoundError:
        return None  # this machine has none


# ---- masks ----------------------------------------------------------------------------


class _Stage:
    """Where masks and an empty root are prepared, out of sight in the end.

    Every machine has the directory it is mounted on, and a private one takes its place later.
    """

    def __init__(self, view: View, steps: list[Step]) -> None:
        kernel.mount_new("tmpfs", _STAGE, _SKELETON_OPTIONS, _QUIET)
        self.prefix = ""
        if view.is_empty:
            self.prefix = f"{_STAGE}/root"
            os.mkdir(self.prefix, 0o755)
            kernel.mount_new("tmpfs", self.prefix, _SKELETON_OPTIONS, _QUIET)
            for link in view.links:
                _make_parents(self.prefix + link.path)
                os.symlink(link.target, self.prefix + link.path)
        for name, mode in (("hidden", 0o444), ("masked", _MASKED)):
            for is_directory in (False, True):
                place = f"{_STAGE}/{name}-{is_directory}"
                _make_point(place, is_directory=is_directory)
                os.chmod(place, mode)
        # Only a mask with something below it looks different from all others.
        self._own = {
            step.path: _make_passable_mask(number, step, steps)
            for number, step in enumerate(steps)
            if step.kind == "mask" and step.passable
        }
        _set(_STAGE, kernel.READ_ONLY | _QUIET)

    def mask(self, step: Step) -> int:
        """A detached, empty, read-only tree for a mask."""
        return _clone_of(self._own.get(step.path, f"{_STAGE}/masked-{step.is_directory}"))

    def hide(self, directory: str, names: tuple[str, ...]) -> None:
        """Cover files and directories of the kernel with nothing."""
        for name in names:
            try:
                target = kernel.open_entry(f"{directory}/{name}")
            except OSError:
                continue  # not on this kernel
            is_directory = stat.S_ISDIR(os.fstat(target).st_mode)
            _attach_to(_clone_of(f"{_STAGE}/hidden-{is_directory}"), target)


def _make_passable_mask(number: int, mask: Step, steps: list[Step]) -> str:
    """A directory that is empty but for mount points of the steps below it."""
    place = f"{_STAGE}/mask{number}"
    os.mkdir(place)
    made = [place]
    for step in steps:
        if step.path.startswith(f"{mask.path}/"):
            below = step.path[len(mask.path) + 1 :]
            made += _make_inner_point(place, below, step.is_directory)
    for directory in reversed(made):
        os.chmod(directory, _PASSABLE)
    return place


def _make_inner_point(place: str, below: str, is_directory: bool) -> list[str]:
    """Make a mount point inside a mask; returns the directories above it that are new."""
    made = []
    *parents, name = below.split("/")
    for parent in parents:
        place = f"{place}/{parent}"
        if not os.path.isdir(place):
            os.mkdir(place)
            made.append(place)
    if not os.path.lexists(f"{place}/{name}"):
        _make_point(f"{place}/{name}", is_directory=is_directory)
    return made


def _make_point(path: str, *, is_directory: bool) -> None:
    if is_directory:
        os.mkdir(path, 0o755)
    else:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o444))


def _make_parents(path: str) -> None:
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)


# ---- attaching ------------------------------------------------------------------------


def _attach(tree: int, prefix: str, step: Step, *, make_point: bool) -> None:
    if step.path == "/":
        os.close(tree)  # the root was left writable instead: nothing can be mounted over it
        return
    path = prefix + step.path
    if make_point and not os.path.lexists(path):
        _make_parents(path)
        _make_point(path, is_directory=step.is_directory)
    try:
        target = kernel.open_entry(path)
    except OSError as error:
        raise StaleView(f"{step.path}: {error.strerror}") from error
    _attach_to(tree, target)


def _attach_to(tree: int, target: int) -> None:
    kernel.attach(tree, target)
    os.close(target)
    os.close(tree)


def _set(path: str, attributes: int) -> None:
    descriptor = kernel.open_entry(path)
    kernel.set_mount(descriptor, attributes, below_too=False)
    os.close(descriptor)


# ---- /proc and /dev -------------------------------------------------------------------


def _mount_proc(stage: _Stage, proc: ProcMount, inherited: int | None) -> None:
    path = f"{stage.prefix}/proc"
    if stage.prefix:
        os.mkdir(path, 0o755)
    elif not os.path.isdir(path):
        return
    if proc == "own":
        kernel.mount_new("proc", path, "", _QUIET | kernel.NO_EXEC)
        _freeze_parts(path, _PROC_READ_ONLY)
        stage.hide(path, _PROC_HIDDEN)
    elif proc == "none":
        kernel.mount_new("tmpfs", path, _SKELETON_OPTIONS, kernel.READ_ONLY | _QUIET)
    elif inherited is not None:
        _attach_to(inherited, kernel.open_entry(path))


def _freeze_parts(directory: str, names: tuple[str, ...]) -> None:
    """Make parts of a mount read-only."""
    for name in names:
        try:
            target = kernel.open_entry(f"{directory}/{name}")
        except OSError:
            continue  # not on this kernel
        tree = kernel.clone_tree(target)
        kernel.set_mount(tree, kernel.READ_ONLY | _QUIET | kernel.NO_EXEC, below_too=True)
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
    kernel.mount_new("tmpfs", path, _SKELETON_OPTIONS, _QUIET | kernel.NO_EXEC)
    for name, tree in devices.items():
        if tree is not None:
            _make_point(f"{path}/{name}", is_directory=False)
            _attach_to(tree, kernel.open_entry(f"{path}/{name}"))
    for name, target in _DEVICE_LINKS.items():
        os.symlink(target, f"{path}/{name}")
    os.mkdir(f"{path}/pts", 0o755)
    os.mkdir(f"{path}/shm", 0o755)
    if with_scratch:
        quiet = kernel.NO_SUID | kernel.NO_EXEC
        kernel.mount_new("devpts", f"{path}/pts", _TERMINAL_OPTIONS, quiet)
        kernel.mount_new("tmpfs", f"{path}/shm", _SHM_OPTIONS, _QUIET)
    _set(path, kernel.READ_ONLY | _QUIET | kernel.NO_EXEC)
