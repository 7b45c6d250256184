"""The placeholders of a server (see `filesystem.placeholder`), shared by its commands.

A mount can only cover an existing entry, so each name that must not be created gets an empty
directory on the host. The lock guards tables only: no file system is called under it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable
from typing import Final

from exec_server.errors import InternalError, os_error_text
from exec_server.filesystem import placeholder
from exec_server.sandbox.policy.model import MissingName, Step

log = logging.getLogger(__name__)

# Placeholders that could not be removed, to be tried again; each keeps its directory open. The
# oldest one beyond it is left to the watchdog, or to the next command in its directory.
MAX_LEFT_BEHIND: Final = 64

# Called with a path and True before it is created, and with False once it is removed.
RegisterCleanup = Callable[[str, bool], None]
# Errors of a disk that has changed since the layout.
_CHANGED: Final = (FileExistsError, FileNotFoundError, NotADirectoryError)
# The directory by device and inode, and the name in it.
_Key = tuple[int, int, str]


class _Shared:
    """A placeholder in use, and the number of commands that use it."""

    def __init__(self, path: str, key: _Key, directory: int, use: placeholder.Use) -> None:
        self.path = path
        self.key = key
        self.directory = directory  # O_PATH: a command may close or move the directory
        self.use = use
        self.users = 1


class Placeholder:
    """A placeholder held by one command."""

    def __init__(self, path: str, shared: _Shared) -> None:
        self.shared = shared
        info = os.fstat(shared.use.descriptor)
        self.step = Step("read", path, True, info.st_dev, info.st_ino)


class Placeholders:
    """Creates and removes placeholders. Every method may be called from any thread.

    `register_cleanup` records each path that must be removed if this server is killed. `close`
    closes the descriptors of removed placeholders: the end of a command waits for it.
    """

    def __init__(
        self, register_cleanup: RegisterCleanup, close: Callable[[int], None] = os.close
    ) -> None:
        self._register_cleanup = register_cleanup
        self._close = close
        self._lock = threading.Lock()  # guards the tables below
        self._shared: dict[_Key, _Shared] = {}
        self._left_behind: dict[_Key, tuple[str, int]] = {}  # path and directory, oldest first
        self._registered: dict[str, int] = {}  # how often each path is in use or left behind
        self._remover: threading.Thread | None = None

    def hold(self, missing: Iterable[MissingName]) -> list[Placeholder]:
        """Create or share a placeholder at each name.

        Raises FileExistsError, FileNotFoundError or NotADirectoryError if the disk has changed
        since the layout, InternalError if a placeholder cannot be created where a command could
        create the name.
        """
        held: list[Placeholder] = []
        try:
            for name in missing:
                if (created := self._hold(name)) is not None:
                    held.append(created)
        except BaseException:
            self.release(held)
            raise
        return held

    def _hold(self, missing: MissingName) -> Placeholder | None:
        path = f"{missing.path.rstrip('/')}/{missing.name}"
        key = (missing.device, missing.inode, missing.name)
        try:
            shared = self._share(key) or self._create(missing, path, key)
        except _CHANGED:
            raise
        except OSError as error:
            raise InternalError(
                f"cannot protect the missing path {path}: {os_error_text(error)}"
            ) from error
        return None if shared is None else Placeholder(path, shared)

    def _share(self, key: _Key) -> _Shared | None:
        """A placeholder that other commands of this server use and that is still in place."""
        with self._lock:
            shared = self._shared.get(key)
            if shared is None:
                return None
            shared.users += 1
        if placeholder.is_at(shared.directory, key[2], shared.use.descriptor):
            return shared
        self._release(shared)
        return None

    def _create(self, missing: MissingName, path: str, key: _Key) -> _Shared | None:
        directory = os.open(missing.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._register(path)
        use = None
        may_exist = False
        try:
            info = os.fstat(directory)
            if (info.st_dev, info.st_ino) != key[:2]:
                raise FileExistsError(f"{missing.path} was replaced")
            use = placeholder.make(directory, missing.name)
        except OSError as error:
            may_exist = not isinstance(error, _CHANGED)
            raise
        finally:
            if may_exist:
                self._leave_behind(path, key, directory)
            elif use is None:
                self._unregister(path)
                os.close(directory)
        if use is None:
            return None
        shared = _Shared(path, key, directory, use)
        with self._lock:
            self._shared[key] = shared
        return shared

    def release(self, placeholders: Iterable[Placeholder]) -> None:
        """Release placeholders; remove those without a user, unless they were replaced."""
        for held in placeholders:
            self._release(held.shared)

    def _release(self, shared: _Shared) -> None:
        key = shared.key
        with self._lock:
            shared.users -= 1
            if shared.users:
                return
            if self._shared.get(key) is shared:
                del self._shared[key]
        is_done = placeholder.release(shared.directory, key[2], shared.use, self._close)
        with self._lock:
            is_done = is_done or key in self._shared  # another command removes it
        if is_done:
            self._unregister(shared.path)
            os.close(shared.directory)
        else:
            log.info("sandbox: the placeholder %r cannot be removed yet", shared.path)
            self._leave_behind(shared.path, key, shared.directory)

    def drop_idle(self) -> None:
        """Try again, in a thread, to remove the placeholders that could not be removed."""
        if not self._left_behind or (self._remover is not None and self._remover.is_alive()):
            return
        self._remover = threading.Thread(
            target=self.remove_left_behind, name="placeholders", daemon=True
        )
        try:
            self._remover.start()
        except RuntimeError:
            self._remover = None  # no thread can be started now

    def remove_left_behind(self) -> None:
        """Try again to remove the placeholders that could not be removed. Blocking."""
        with self._lock:
            left_behind, self._left_behind = self._left_behind, {}
        for key, (path, directory) in left_behind.items():
            if placeholder.remove_left_behind(directory, key[2]):
                self._unregister(path)
                os.close(directory)
            else:
                self._leave_behind(path, key, directory)

    def _leave_behind(self, path: str, key: _Key, directory: int) -> None:
        with self._lock:
            older = self._left_behind.pop(key, None)
            self._left_behind[key] = (path, directory)
            beyond = None
            if len(self._left_behind) > MAX_LEFT_BEHIND:
                beyond = self._left_behind.pop(next(iter(self._left_behind)))
                self._registered.pop(beyond[0], None)  # without telling the watchdog
        if older is not None:
            self._unregister(older[0])
            os.close(older[1])
        if beyond is not None:
            os.close(beyond[1])

    def _register(self, path: str) -> None:
        with self._lock:
            count = self._registered.get(path, 0)
            self._registered[path] = count + 1
            if not count:
                self._register_cleanup(path, True)

    def _unregister(self, path: str) -> None:
        with self._lock:
            count = self._registered.pop(path, 0)
            if count > 1:
                self._registered[path] = count - 1
            elif count:
                self._register_cleanup(path, False)
