"""SandboxBuilder: launches confined processes by the best confinement of this kernel.

ViewDependencies tell whether a view that was built earlier still matches its policy and the disk.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final, TypeVar

from exec_server.errors import InternalError, os_error_text
from exec_server.filesystem.placeholder import is_placeholder
from exec_server.sandbox.policy import compiler
from exec_server.sandbox.policy.compiler import HostPaths
from exec_server.sandbox.policy.layout import lay_out
from exec_server.sandbox.policy.model import Dependency, Policy, View
from exec_server.sandbox.runtime import capabilities, kernel
from exec_server.sandbox.runtime.disk import HostDisk
from exec_server.sandbox.runtime.launcher import Launched, Launcher, launch
from exec_server.sandbox.runtime.messages import BuildRequest
from exec_server.sandbox.runtime.view import StaleView

# Descriptors for all views together. A usual policy needs fewer than ten; a server often has a
# limit of 1024 for everything. A view without pins is built anew for each use.
MAX_PINS: Final = 384
# Attempts to build a view of a tree that changes meanwhile; each takes milliseconds. Then the
# request fails.
_ATTEMPTS: Final = 8
_MOUNT_TABLE: Final = "/proc/self/mountinfo"
LEGACY_LANDLOCK: Final = (
    "useLegacyLandlock is not supported: it would confine less than was asked for"
)


T = TypeVar("T")


class MountChanges:
    """Counts changes of this server's mount table; without /proc each look counts as a change."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._poll = select.poll()
        with suppress(OSError):
            # The kernel reports changes since the table was opened or last polled.
            self._descriptor = os.open(_MOUNT_TABLE, os.O_RDONLY | os.O_CLOEXEC)
            self._poll.register(self._descriptor, select.POLLPRI)
        self._lock = threading.Lock()
        self._changes = 0

    def count(self) -> int:
        with self._lock:
            if self._descriptor is None or self._poll.poll(0):
                self._changes += 1
            return self._changes

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)


class InodePins:
    """Descriptors that keep inode numbers from reuse; a view's mounts are detached by a removal."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = MAX_PINS

    def acquire(self, paths: list[str]) -> list[int] | None:
        """A descriptor of each entry; None if there are too many, or one is missing."""
        with self._lock:
            if len(paths) > self._left:
                return None
            self._left -= len(paths)
        descriptors: list[int] = []
        try:
            for path in paths:
                descriptors.append(os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC))
        except OSError:
            self.release(descriptors, len(paths))
            return None
        return descriptors

    def release(self, descriptors: list[int], count: int) -> None:
        for descriptor in descriptors:
            os.close(descriptor)
        with self._lock:
            self._left += count


class ViewDependencies:
    """The entries that a view was derived from: recorded before building, checked before use."""

    def __init__(
        self, view: View, mounts: MountChanges, pins: InodePins, *, sees_placeholders: bool
    ) -> None:
        self._mounts = mounts
        self._pins = pins
        self._changes = mounts.count()
        self._sees_placeholders = sees_placeholders
        self._dependencies = view.dependencies
        existing = [each.path for each in view.dependencies if each.device is not None]
        self._pinned = pins.acquire(existing)
        # Entries may have been replaced, and their numbers reused, before they were pinned.
        if self._pinned is not None and self.changed_path() is not None:
            self.close()

    def is_current(self) -> bool:
        """Whether the view can be used later, as all dependencies are unchanged. Blocking.

        A view whose entries could not be pinned is used only once, right after it was built.
        """
        return (
            self._pinned is not None
            and self._mounts.count() == self._changes
            and self.changed_path() is None
        )

    def changed_path(self) -> str | None:
        """The path of an entry that has changed since the layout. Blocking: examines the disk."""
        for dependency in self._dependencies:
            try:
                if self._current(dependency) != dependency:
                    return dependency.path
            except OSError:
                return dependency.path  # the next layout reports the reason
        return None

    def close(self) -> None:
        """Release the pins; from here on the view counts as stale."""
        pinned, self._pinned = self._pinned, None
        if pinned is not None:
            self._pins.release(pinned, len(pinned))

    def _current(self, dependency: Dependency) -> Dependency:
        """The dependency as it would be laid out now."""
        path = dependency.path
        try:
            info = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return Dependency(path, None, None)
        if not self._sees_placeholders and is_placeholder(info, path):
            return Dependency(path, None, None)
        changed_ns = None if dependency.changed_ns is None else info.st_ctime_ns
        return Dependency(path, info.st_dev, info.st_ino, changed_ns)


class SandboxBuilder:
    """The launcher of a server and the confinement that works. Every method is thread-safe."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self.launcher = Launcher(variables)
        self.mounts = MountChanges()
        self.pins = InodePins()
        self._confinement = capabilities.BEST_CONFINEMENT
        self._lock = threading.Lock()  # guards _confinement

    def close(self) -> None:
        self.launcher.close()
        self.mounts.close()

    def launch(
        self, make_request: Callable[[capabilities.Confinement], BuildRequest], *, network: bool
    ) -> Launched:
        """Launch a confined process, with `network` in its own namespace. Blocking.

        The best confinement is tried at once: looking for it would take longer.
        """
        with self._lock:
            confinement = self._confinement
        try:
            return self._launch_as(confinement, make_request(confinement), network=network)
        except (InternalError, OSError) as error:
            if isinstance(error, StaleView):
                raise
        with self._lock:
            self._confinement = confinement = capabilities.find_confinement(self.launcher)
            if confinement.refusal is not None:
                self._confinement = capabilities.BEST_CONFINEMENT  # the refusal may be temporary
                raise _not_available(confinement.refusal)
        return self._launch_as(confinement, make_request(confinement), network=network)

    def launch_unlimited(self, request: BuildRequest) -> Launched:
        """Launch the init of a command without limits on files. Blocking.

        A network of its own needs a user namespace: root could leave it otherwise.
        """
        if request.network != "proxied":
            return launch(self.launcher, 0, request)
        try:
            return launch(self.launcher, kernel.CLONE_NEWUSER | kernel.CLONE_NEWNET, request)
        except OSError as error:
            raise _not_available(f"no network namespace: {os_error_text(error)}") from error

    def _launch_as(
        self, confinement: capabilities.Confinement, request: BuildRequest, *, network: bool
    ) -> Launched:
        restrictions = confinement.restrictions(request.view, request.network)
        if request.role == "init" and not restrictions.is_separate:
            raise _not_available(capabilities.NOT_SEPARATE)
        return launch(self.launcher, confinement.namespaces(network=network), request)


def _not_available(reason: str) -> InternalError:
    return InternalError(
        f"the requested sandbox is not available on this machine: {reason}; "
        "the request was refused (`exec-server sandbox check` shows details)"
    )


def build_view(policy: Policy, disk: HostDisk, denied: Sequence[str] = ()) -> View:
    """The view of a policy; raises InternalError for a path that a private /proc would expose."""
    view = lay_out(policy, disk, denied)
    for step in view.steps:
        if step.kind == "mask" and f"{step.path}/".startswith(("/proc/", "/dev/")):
            raise InternalError(
                f"cannot enforce sandbox deny-read path {step.path}: /proc and /dev are private"
            )
    return view


def retry_while_stale(build: Callable[[], T]) -> T:
    """Repeat a build whose view became stale before it was finished."""
    for _ in range(_ATTEMPTS - 1):
        try:
            return build()
        except StaleView:
            pass
    return build()


def host_paths(tmpdir: str | None, cwd: str | None) -> HostPaths:
    """The paths of this host that a policy may refer to by name."""
    minimal = tuple(path for path in compiler.MINIMAL_PATHS if os.path.exists(path))
    return HostPaths(tmpdir, minimal, os.path.isdir("/tmp"), cwd)
