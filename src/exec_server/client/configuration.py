"""The user's configuration files: where they are, who may change them, and their replacement."""

from __future__ import annotations

import os
import stat
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from exec_server.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


# A target or a login takes a few hundred bytes. A larger file is none of ours.
MAX_FILE_BYTES: Final = 1_048_576

# A change takes milliseconds. Whoever holds the lock for longer does not change a file.
LOCK_SECONDS: Final = 5.0
_LOCK_RETRY_SECONDS: Final = 0.02

# Elsewhere modes and owners say nothing about who can read and write a file.
_HAS_MODES: Final = os.name == "posix"


def configuration_directory() -> Path:
    """The directory of the user's configurations."""
    from pathlib import Path  # slow to import, and needed for targets with a name only

    config = os.environ.get("XDG_CONFIG_HOME", "")
    # The XDG base directory specification says to ignore a relative path.
    return Path(config) if config.startswith("/") else Path.home() / ".config"


def targets_file() -> Path:
    """The path of targets.toml."""
    return configuration_directory() / "exec-server" / "targets.toml"


def read_configuration(path: Path) -> tuple[bytes, bool] | None:
    """A configuration file, and whether others can read it; None if missing.

    Raises StartupError, also if others can write the file or its directory, or that to which a link
    leads: it names programs to run and servers that get tokens.
    """
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            info = os.fstat(file.fileno())
            if not stat.S_ISREG(info.st_mode):
                raise StartupError(f"{path} is not a regular file")
            for directory in dict.fromkeys((path.parent, path.resolve().parent)):
                _check_writers(directory, directory.stat())
            _check_writers(path, info)
            content = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}") from None
    if len(content) > MAX_FILE_BYTES:
        raise StartupError(f"{path} has more than {MAX_FILE_BYTES} bytes")
    return content, _HAS_MODES and bool(info.st_mode & 0o077)


def _open_at_once(path: str, flags: int) -> int:
    """Open without waiting for the writer of a FIFO."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _check_writers(path: Path, info: os.stat_result) -> None:
    """Raise StartupError if users other than this one and root can change a file or directory."""
    if not _HAS_MODES:
        return
    if info.st_uid not in (0, os.geteuid()):
        raise StartupError(
            f"{path} belongs to another user (uid {info.st_uid}), who could change it: make it "
            "yours with chown, or replace it with a copy of your own"
        )
    is_shared = info.st_mode & stat.S_IWGRP and not _is_own_group(info.st_gid)
    if is_shared or info.st_mode & stat.S_IWOTH:
        raise StartupError(f"{path} is writable by other users: run `chmod go-w {path}`")


def _is_own_group(gid: int) -> bool:
    """Whether a group has no members but this user and root.

    Systems that give each user such a group make new files writable for it.
    """
    import grp
    import pwd

    try:
        own = {"root", pwd.getpwuid(os.geteuid()).pw_name}
        members = {*grp.getgrgid(gid).gr_mem}
    except KeyError:
        return False
    return members | {each.pw_name for each in pwd.getpwall() if each.pw_gid == gid} <= own


def write_private_file(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Replace a file at once; its directory is created for the user alone. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with open(descriptor, "wb") as file:
            if _HAS_MODES:
                os.fchmod(descriptor, mode)  # whatever the umask is
            file.write(content)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def changing(path: Path) -> Iterator[None]:
    """Let no other command change a file between its reading and writing; makes its directory.

    Raises StartupError.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Without modes there are no locks of directories either.
        flags = getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
        directory = os.open(path.parent, os.O_RDONLY | flags) if _HAS_MODES else None
    except OSError as error:
        raise StartupError(f"cannot write {path}: {error.strerror}") from None
    if directory is None:
        yield
        return
    try:
        _lock(directory, path)
        yield
    finally:
        os.close(directory)


def _lock(directory: int, path: Path) -> None:
    import fcntl
    import time

    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise StartupError(f"another program is changing {path}") from None
            time.sleep(_LOCK_RETRY_SECONDS)
        except OSError:
            return  # a file system without locks
        else:
            return
