"""Paths on the server's machine: from the caller's notation to URIs and back."""

from __future__ import annotations

import os
import posixpath
import re
from urllib.parse import quote

from exec_server.errors import InvalidParams, RpcError
from exec_server.protocol.paths import PathUri
from exec_server.protocol.session import EnvironmentInfo

_windows_path = re.compile(r"[A-Za-z]:[\\/]").match

AnyPath = str | bytes | os.PathLike[str] | os.PathLike[bytes]


class PathResolver:
    """Resolves relative paths and `~` on one machine."""

    def __init__(self, info: EnvironmentInfo) -> None:
        self.update(info)

    def update(self, info: EnvironmentInfo) -> None:
        """Take the directories of a server that may be another one."""
        self.home = info.user_home_dir and native(info.user_home_dir)
        self.cwd = (info.cwd and native(info.cwd)) or self.home or "/"
        self.temporary = native(info.temp_dir)

    def absolute(self, path: AnyPath, name: str = "path") -> str:
        """The absolute path; `~` at the start is the user's home.

        A URI becomes a path, if the path is one of this platform. It begins with `file://`: other
        texts that begin with `file:` are names. Raises ValueError with the argument's `name` for an
        empty path, which a program gets by mistake and which would be the server's directory.
        """
        text = path_text(path)
        if not text:
            raise ValueError(f'{name} must not be empty: "." is the directory of the server')
        if text.startswith("file://"):
            return native(text)
        if text.startswith("/") or _windows_path(text):
            return text
        if self.home and (text == "~" or text.startswith("~/")):
            return self.home + text[1:]
        if text == ".":
            return self.cwd
        return f"{self.cwd.rstrip('/')}/{text}"

    def uri(self, path: AnyPath, name: str = "path") -> PathUri:
        """The URI of a path; raises InvalidParams if the path is invalid, ValueError if empty."""
        text = self.absolute(path, name)
        if _windows_path(text):
            text = "file:///" + quote(text.replace("\\", "/"), safe="/:")
        try:
            return PathUri.from_text(text)
        except UnicodeEncodeError:
            raise InvalidParams(f"{text!a} has a surrogate that stands for no byte") from None

    def is_above_cwd(self, path: AnyPath) -> bool:
        """Whether a path, however it is spelled, is the server's directory or one above it."""
        whole, cwd = (
            posixpath.normpath(text).strip("/") + "/" for text in (self.absolute(path), self.cwd)
        )
        return whole == "/" or cwd.startswith(whole)


def is_dot(path: AnyPath) -> bool:
    """Whether a path ends in `.` or `..`, and so is a directory without its name."""
    return path_text(path).rstrip("/").rpartition("/")[2] in (".", "..")


def path_text(path: AnyPath) -> str:
    """A path as text; raises TypeError if it is none."""
    try:
        return decoded(path)
    except TypeError:
        kind = type(path).__name__
        raise TypeError(f"a path must be str, bytes or os.PathLike, not {kind}") from None


def local_path(path: AnyPath) -> str:
    """A path of this machine as text; raises TypeError if it is none."""
    try:
        return os.fsdecode(path)
    except TypeError:
        kind = type(path).__name__
        raise TypeError(f"a path must be str, bytes or os.PathLike, not {kind}") from None


def decoded(path: AnyPath) -> str:
    """A path as text, on every system with the slashes and the encoding of a server's machine.

    Raises TypeError. On Windows `Path("a/b")` has a backslash, and os.fsdecode refuses bytes that
    are not UTF-8.
    """
    if hasattr(path, "as_posix"):
        return str(path.as_posix())
    text = os.fspath(path)
    return text.decode(errors="surrogateescape") if isinstance(text, bytes) else text


def encoded(path: str) -> bytes:
    """The bytes of a path on the server's machine: UTF-8, other bytes as surrogates."""
    return path.encode(errors="surrogateescape")


def native(uri: str) -> str:
    """The path of a URI, or the URI if its path is not one of this platform."""
    if uri.startswith("/"):
        return uri
    try:
        return PathUri.from_text(uri).native()
    except (RpcError, UnicodeEncodeError):
        return uri
