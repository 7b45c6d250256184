"""CertificateFile: the certificates that masked processes trust, in a file of the server.

A process in a view of its own gets a copy there. All others read this file, in a directory that
policies leave alone unless one names it, so it is verified before each use.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import tempfile
import threading
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

log = logging.getLogger(__name__)

_PREFIX: Final = "exec-server-ca-"
_SUFFIX: Final = ".pem"
_MODE: Final = 0o644
# The directory of runtime files of root; policies for a workspace do not make it writable.
_ROOT_DIRECTORY: Final = "/run"


class VerifiedFile(NamedTuple):
    """The path of a file, and the content that it had a moment ago."""

    path: str
    content: bytes


class CertificateFile:
    """A file with a fixed content. Every method is thread-safe, and blocking."""

    def __init__(self, content: bytes, variables: Mapping[str, str]) -> None:
        """`variables` are the server's own; the file is written at its first use."""
        self._content = content
        self._variables = variables
        self._lock = threading.Lock()  # guards the two below
        self._path: str | None = None
        self._is_closed = False

    def verified(self) -> VerifiedFile:
        """The file, written again if it is absent or another one; raises OSError."""
        with self._lock:
            if self._is_closed:
                raise OSError("the server is shutting down")
            if self._path is None:
                self._path = self._write(None)
            elif not self._is_intact(self._path):
                log.warning("%s was changed or removed, and is written again", self._path)
                self._path = self._write(self._path)
            return VerifiedFile(self._path, self._content)

    @property
    def path(self) -> str | None:
        """Where the file is; None before its first use."""
        return self._path

    def close(self) -> None:
        """Remove the file, if it is there."""
        with self._lock, contextlib.suppress(OSError):
            self._is_closed = True
            if self._path is not None:
                os.unlink(self._path)

    def _is_intact(self, path: str) -> bool:
        """Whether only this server's user can have written the file, and its content is right."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            with open(os.open(path, flags), "rb") as file:
                info = os.fstat(file.fileno())
                is_ours = (info.st_uid, info.st_nlink) == (os.geteuid(), 1)
                # The type is compared, too: reading a named pipe would wait.
                if not is_ours or info.st_mode != stat.S_IFREG | _MODE:
                    return False
                return file.read(len(self._content) + 1) == self._content
        except OSError:
            return False

    def _write(self, known: str | None) -> str:
        """Write the file, at its known path if that is possible: processes have it already."""
        failure = OSError("no directory for a file")
        for directory in _directories(self._variables):
            try:
                path = self._write_in(directory)
            except OSError as error:
                failure = error
                continue
            if known is None:
                return path
            with contextlib.suppress(OSError):  # it has become a directory, or a file elsewhere
                os.replace(path, known)
                return known
            return path
        raise failure

    def _write_in(self, directory: str) -> str:
        descriptor, path = tempfile.mkstemp(_SUFFIX, _PREFIX, directory)
        try:
            with open(descriptor, "wb") as file:
                file.write(self._content)
                os.fchmod(file.fileno(), _MODE)
        except BaseException:
            os.unlink(path)
            raise
        return path


def _directories(variables: Mapping[str, str]) -> Iterator[str]:
    """Where the file may be, the best first.

    Most policies can write to the last one: there only the check before each use protects.
    """
    if os.geteuid() == 0:
        yield _ROOT_DIRECTORY
    runtime = variables.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime) and _is_own_directory(runtime):
        yield os.path.realpath(runtime)
    home = variables.get("HOME", "")
    cache = variables.get("XDG_CACHE_HOME", "") or os.path.join(home, ".cache")
    if os.path.isabs(cache) and _is_own_directory(os.path.dirname(cache)):
        own = os.path.join(os.path.realpath(cache), "exec-server")
        with contextlib.suppress(OSError):
            os.makedirs(own, 0o700, exist_ok=True)
            yield own
    yield os.path.realpath(tempfile.gettempdir())


def _is_own_directory(path: str) -> bool:
    try:
        info = os.stat(path)
    except OSError:
        return False
    is_private = not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and is_private
