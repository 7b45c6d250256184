"""Paths on the server's machine: from what a caller writes to what is on the wire, and back.

And what is wrong with one, in the words of an error.
"""

from __future__ import annotations

import os
import re
from typing import Final
from urllib.parse import quote

import msgspec

from exec_server.client.failures import SandboxDenied
from exec_server.errors import ExecServerError, RpcError
from exec_server.protocol.paths import PathUri
from exec_server.protocol.sandbox import Denial
from exec_server.protocol.session import EnvironmentInfo

_windows_path = re.compile(r"[A-Za-z]:[\\/]").match

AnyPath = str | os.PathLike[str]

# Errors of the operating system that a sandbox makes: EPERM, EACCES, EROFS.
_DENIALS: Final = ("(os error 1)", "(os error 13)", "(os error 30)")


class Places:
    """What relative paths and `~` stand for on one machine."""

    def __init__(self, info: EnvironmentInfo) -> None:
        self.home = info.user_home_dir and native(info.user_home_dir)
        self.cwd = (info.cwd and native(info.cwd)) or self.home or "/"
        self.temporary = native(info.temp_dir)

    def absolute(self, path: AnyPath) -> str:
        """The path from the root; `~` at the beginning is the user's home.

        A URI becomes the path that it stands for, if that is one of this platform.
        """
        text = os.fspath(path)
        if text.startswith("file:"):
            return native(text)
        if text.startswith("/") or _windows_path(text):
            return text
        if self.home and (text == "~" or text.startswith("~/")):
            return self.home + text[1:]
        if text in ("", "."):
            return self.cwd
        return f"{self.cwd.rstrip('/')}/{text}"

    def uri(self, path: AnyPath) -> PathUri:
        """What the path is on the wire; raises InvalidParams if it is no path."""
        text = self.absolute(path)
        if _windows_path(text):
            text = "file:///" + quote(text.replace("\\", "/"), safe="/:")
        return PathUri.from_wire(text)


def native(uri: str) -> str:
    """The path that a URI stands for, or the URI if that is none of this platform."""
    if uri.startswith("/"):
        return uri
    try:
        return PathUri.from_wire(uri).native()
    except RpcError:
        return uri


def explained(error: RpcError, path: AnyPath, *, is_confined: bool) -> ExecServerError:
    """The same error with the path in it, or that it is the sandbox's doing."""
    text = f"{os.fspath(path)}: {error.message}"
    denial = _denial(error)
    if denial is not None or (is_confined and error.message.endswith(_DENIALS)):
        return SandboxDenied(text, denial)
    return error.explained(text)


def _denial(error: RpcError) -> Denial | None:
    """What the server says about it, if that can be understood."""
    said = error.data.get("sandboxDenial") if isinstance(error.data, dict) else None
    try:
        return None if said is None else msgspec.convert(said, Denial)
    except msgspec.ValidationError:
        return None
