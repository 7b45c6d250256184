"""Paths on the server's machine: from what a caller writes to what is on the wire, and back."""

from __future__ import annotations

import os
import re
from urllib.parse import quote

from exec_server.errors import RpcError
from exec_server.protocol.paths import PathUri
from exec_server.protocol.session import EnvironmentInfo

_windows_path = re.compile(r"[A-Za-z]:[\\/]").match

AnyPath = str | os.PathLike[str]


class Places:
    """What relative paths and `~` stand for on one machine."""

    def __init__(self, info: EnvironmentInfo) -> None:
        self.home = info.user_home_dir and native(info.user_home_dir)
        self.cwd = (info.cwd and native(info.cwd)) or self.home or "/"
        self.temporary = native(info.temp_dir)

    def absolute(self, path: AnyPath) -> str:
        """The path from the root, or a URI; `~` at the beginning is the user's home."""
        text = os.fspath(path)
        if text.startswith(("/", "file:")) or _windows_path(text):
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
