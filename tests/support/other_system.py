"""Python as on macOS or Windows: `install` takes away what those systems lack.

Only the modules of this package see the difference. The standard library is that of Linux and needs
Linux, and the dependencies have wheels for each system. The lists follow the documents of `os`,
`signal`, `socket`, `select` and `asyncio`.
"""

from __future__ import annotations

import asyncio
import builtins
import enum
import errno
import os
import select
import signal
import socket
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

MACOS = "darwin"
WINDOWS = "win32"

_MISSING_MODULES = {
    MACOS: {"ctypes", "uvloop"},  # ctypes exists there, but not the C library of Linux
    WINDOWS: {
        *("ctypes", "curses", "fcntl", "grp", "pty", "pwd", "readline", "resource", "syslog"),
        *("termios", "tty", "uvloop"),
    },
}
# The parts of this package that need Linux.
LINUX_PARTS = ("host.libc", "process", "filesystem", "sandbox", "server")

_OS_WITHOUT = {
    MACOS: {
        *("O_PATH", "O_TMPFILE", "O_DIRECT", "O_NOATIME", "O_RSYNC", "O_LARGEFILE", "close_range"),
        *("copy_file_range", "eventfd", "fdatasync", "getrandom", "getresgid", "getresuid"),
        *("getxattr", "listxattr", "memfd_create", "pidfd_open", "pipe2", "posix_fadvise"),
        *("posix_fallocate", "removexattr", "sched_getaffinity", "sched_setaffinity"),
        *("sched_setscheduler", "setns", "setresgid", "setresuid", "setxattr", "splice"),
        *("timerfd_create", "unshare"),
    }
}
_OS_OF_WINDOWS = {
    *("DirEntry", "F_OK", "O_APPEND", "O_CREAT", "O_EXCL", "O_RDONLY", "O_RDWR", "O_TRUNC"),
    *("O_WRONLY", "PathLike", "R_OK", "SEEK_CUR", "SEEK_END", "SEEK_SET", "W_OK", "X_OK", "_exit"),
    *("abort", "access", "chdir", "chmod", "close", "closerange", "cpu_count", "curdir"),
    *("devnull", "dup", "dup2", "environ", "error", "extsep", "fdopen", "fsdecode", "fsencode"),
    *("fspath", "fstat", "fsync", "ftruncate", "get_exec_path", "get_inheritable"),
    *("get_terminal_size", "getcwd", "getcwdb", "getenv", "getlogin", "getpid", "getppid"),
    *("isatty", "kill", "linesep", "link", "listdir", "lseek", "lstat", "makedirs", "mkdir"),
    *("open", "pardir", "path", "pathsep", "pipe", "popen", "putenv", "read", "readlink"),
    *("remove", "removedirs", "rename", "renames", "replace", "rmdir", "scandir"),
    *("set_inheritable", "stat", "stat_result", "strerror", "supports_dir_fd", "symlink"),
    *("system", "terminal_size", "times", "truncate", "umask", "unlink", "unsetenv", "urandom"),
    *("utime", "waitpid", "waitstatus_to_exitcode", "walk", "write"),
}
_SIGNALS_OF_WINDOWS = ("SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM")
_SIGNAL_OF_WINDOWS = {
    *("SIG_DFL", "SIG_IGN", "default_int_handler", "getsignal", "raise_signal", "set_wakeup_fd"),
    *("signal", "strsignal", "valid_signals"),
    *_SIGNALS_OF_WINDOWS,
}
_SOCKET_OF_LINUX = {
    *("MSG_DONTWAIT", "SOCK_CLOEXEC", "SOCK_NONBLOCK", "SO_BINDTODEVICE", "SO_PEERCRED"),
    *("SO_BUSY_POLL", "SO_INCOMING_CPU", "TCP_QUICKACK", "TCP_USER_TIMEOUT", "AF_VSOCK"),
}
_SOCKET_WITHOUT = {
    MACOS: _SOCKET_OF_LINUX,
    WINDOWS: _SOCKET_OF_LINUX | {"AF_UNIX", "SO_REUSEPORT", "SCM_RIGHTS", "sendmsg"},
}
_ERRNO = {
    MACOS: {
        "EAGAIN": 35,
        "EDEADLK": 11,
        "EDQUOT": 69,
        "ELOOP": 62,
        "ENAMETOOLONG": 63,
        "ENOSYS": 78,
        "ENOTEMPTY": 66,
        "EOPNOTSUPP": 102,
        "ESTALE": 70,
        "ETIMEDOUT": 60,
    },
    WINDOWS: {
        "EDEADLK": 36,
        "EDQUOT": 10069,
        "ELOOP": 10062,
        "ENAMETOOLONG": 38,
        "ENOSYS": 40,
        "ENOTEMPTY": 41,
        "EOPNOTSUPP": 10045,
        "ETIMEDOUT": 10060,
    },
}


class _Facade(types.ModuleType):
    """A module of the standard library as this package sees it."""

    def __init__(
        self,
        module: types.ModuleType,
        *,
        is_missing: Callable[[str], bool] = lambda name: False,
        changed: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(_module=module, _is_missing=is_missing, _changed=changed or {})

    def __getattr__(self, name: str) -> Any:
        if name in self._changed:
            return self._changed[name]
        if not name.startswith("__") and self._is_missing(name):
            raise AttributeError(f"module {self._module.__name__!r} has no {name!r} on this system")
        return getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)


class _WindowsLoop(asyncio.SelectorEventLoop):
    """A loop without the methods that the default loop of Windows lacks."""


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError


for _name in (
    *("add_reader", "add_writer", "add_signal_handler", "remove_signal_handler"),
    *("create_unix_connection", "create_unix_server"),
):
    setattr(_WindowsLoop, _name, _refuse)


def install(system: str) -> None:
    """Make this process look like another system to the modules of the package."""
    for name in list(sys.modules):
        assert not name.startswith("exec_server"), f"{name} was imported before"
    modules: dict[str, Any] = sys.modules
    modules["uvloop"] = None  # importing it raises ImportError
    facades = _facades(system)
    genuine = builtins.__import__

    def importing(
        name: str,
        module_globals: Mapping[str, Any] | None = None,
        module_locals: Any = None,
        fromlist: Any = (),
        level: int = 0,
    ) -> Any:
        importer = str((module_globals or {}).get("__name__", ""))
        if importer.partition(".")[0] != "exec_server" or level:
            return genuine(name, module_globals, module_locals, fromlist, level)
        top = name.partition(".")[0]
        if top in _MISSING_MODULES[system]:
            raise ModuleNotFoundError(f"No module named {name!r} on this system", name=name)
        module = genuine(name, module_globals, module_locals, fromlist, level)
        return facades.get(name if fromlist else top, module)

    setattr(builtins, "__import__", importing)  # noqa: B010 - the types do not agree exactly


def check_no_linux_part() -> None:
    """Nothing that needs Linux was imported."""
    parts = tuple(f"exec_server.{part}" for part in LINUX_PARTS)
    loaded = [name for name in sys.modules if name in parts or name.startswith(parts)]
    assert not loaded, loaded


def _facades(system: str) -> dict[str, _Facade]:
    without = _SOCKET_WITHOUT[system]
    facades = {
        "sys": _Facade(sys, changed={"platform": system}),
        "errno": _Facade(errno, changed=_ERRNO[system]),
        "socket": _Facade(socket, is_missing=without.__contains__),
        "select": _Facade(select, is_missing={"epoll", "EPOLLIN"}.__contains__),
    }
    if system == MACOS:
        missing = _OS_WITHOUT[MACOS]
        facades["os"] = _Facade(os, is_missing=missing.__contains__)
        facades["signal"] = _Facade(signal, is_missing=_is_signal_of_linux)
        return facades
    facades["os"] = _Facade(
        os,
        is_missing=lambda name: name not in _OS_OF_WINDOWS,
        changed={
            **{name: _without_directories(getattr(os, name)) for name in _TAKE_DIRECTORIES},
            **{name: _refusing_open_files(getattr(os, name)) for name in ("replace", "unlink")},
            "O_BINARY": 0,
            "O_NOINHERIT": 0,
            "sep": "\\",
            "altsep": "/",
            "name": "nt",
        },
    )
    numbers = {name: int(getattr(signal, name)) for name in _SIGNALS_OF_WINDOWS}
    facades["signal"] = _Facade(
        signal,
        is_missing=lambda name: name not in _SIGNAL_OF_WINDOWS,
        changed={"Signals": enum.IntEnum("Signals", numbers)},
    )
    facades["select"] = _Facade(select, is_missing=lambda name: name != "select")
    facades["asyncio"] = _Facade(asyncio, changed={"new_event_loop": _WindowsLoop})
    return facades


_TAKE_DIRECTORIES = (
    *("access", "chmod", "link", "lstat", "mkdir", "open", "readlink", "rename", "remove"),
    *("rmdir", "stat", "symlink", "utime"),
)


def _is_signal_of_linux(name: str) -> bool:
    return name in ("SIGPWR", "SIGSTKFLT", "SIGRTMIN", "SIGRTMAX", "SIGPOLL", "sigtimedwait")


def _without_directories(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of `os` that knows no directory descriptors."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.keys() & {"dir_fd", "src_dir_fd", "dst_dir_fd"}:
            raise NotImplementedError(f"{function.__name__}: dir_fd unavailable on this platform")
        return function(*args, **kwargs)

    return call


def _refusing_open_files(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of `os` that fails for a file that this process has open."""
    plain = _without_directories(function)

    def call(path: str, *args: Any, **kwargs: Any) -> Any:
        whole = os.path.realpath(path)
        for descriptor in os.listdir("/proc/self/fd"):
            try:
                is_open = os.readlink(f"/proc/self/fd/{descriptor}") == whole
            except OSError:
                continue
            if is_open:
                raise PermissionError(errno.EACCES, "another process uses the file", path)
        return plain(path, *args, **kwargs)

    return call
