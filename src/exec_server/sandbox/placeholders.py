"""The placeholders of a server: see core.placeholder.

A mount can only cover what exists. So each name that must not come into being gets an empty
directory on the host for the time of the command, which then sees it read-only.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable

from exec_server.core import placeholder
from exec_server.sandbox.plan import Missing, Step

Remember = Callable[[str, bool], None]


class Placeholder:
    """One of them, held by one command."""

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        info = os.fstat(descriptor)
        self.step = Step("read", path, True, info.st_dev, info.st_ino)


class Placeholders:
    """Makes and removes them. Every method may be called from any thread.

    `remember` is told of each path that has to go should this server be killed.
    """

    def __init__(self, remember: Remember) -> None:
        self._remember = remember
        self._lock = threading.Lock()  # two that let go at once would each see the other's lock

    def hold(self, missing: Iterable[Missing]) -> list[Placeholder]:
        """Put a placeholder at each name. Raises OSError if a name has come into being."""
        held: list[Placeholder] = []
        try:
            for name in missing:
                found = self._hold(name)
                if found is not None:
                    held.append(found)
        except BaseException:
            self.release(held)
            raise
        return held

    def _hold(self, missing: Missing) -> Placeholder | None:
        directory = os.open(missing.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            info = os.fstat(directory)
            if (info.st_dev, info.st_ino) != (missing.device, missing.inode):
                raise FileExistsError(f"{missing.path} was replaced")
            path = f"{missing.path.rstrip('/')}/{missing.name}"
            with self._lock:
                self._remember(path, True)
                descriptor = None
                try:
                    descriptor = placeholder.make(directory, missing.name)
                finally:
                    if descriptor is None:
                        self._remember(path, False)
                return None if descriptor is None else Placeholder(path, descriptor)
        finally:
            os.close(directory)

    def release(self, placeholders: Iterable[Placeholder]) -> None:
        """Let go; what nobody holds any more is removed, unless it is no longer ours."""
        for held in placeholders:
            with self._lock:
                if placeholder.remove(held.path, held.descriptor):
                    self._remember(held.path, False)
                os.close(held.descriptor)
