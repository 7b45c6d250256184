"""Shell, directories and identity of this machine, as clients see them."""

from __future__ import annotations

import hashlib
import os
import pwd
import sys
from collections.abc import Mapping

from exec_server import __version__
from exec_server.host import libc
from exec_server.protocol.paths import path_to_uri
from exec_server.protocol.session import Capabilities, EnvironmentInfo, Shell

# The reference whose protocol this is. Codex compares the version: below 0.160 or so it asks for no
# discovery, whatever the capabilities say. Our own version follows as build metadata.
EXECUTOR_VERSION = f"0.169.0+exec-server.{__version__}"

# All but those of another platform, of a connection, and of root.
_CAPABILITIES = {
    name: True
    for name in Capabilities.__struct_fields__
    if name not in ("windows_mxc", "fs_binary", "process_binary", "other_users")
}

_KNOWN_SHELLS = ("zsh", "bash", "sh", "pwsh", "powershell", "cmd")
_FALLBACK_SHELLS = ("/bin/bash", "/usr/bin/bash", "/bin/zsh", "/usr/bin/zsh")


def login_shell() -> str:
    """The shell of the server's user in the user database; SHELL may be that of another user."""
    try:
        return pwd.getpwuid(os.getuid()).pw_shell or "/bin/sh"
    except KeyError:
        return "/bin/sh"


def user_home(variables: Mapping[str, str]) -> str | None:
    """HOME, or the directory in the user database; None if there is neither."""
    home = variables.get("HOME")
    if not home:
        try:
            home = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:
            return None
    return home if home.startswith("/") else None


def describe(variables: Mapping[str, str]) -> EnvironmentInfo:
    """The result of environment/info, which `initialize` returns too."""
    home = user_home(variables)
    temporary = _temporary_directory(variables)
    return EnvironmentInfo(
        shell=_client_shell(),
        executor_version=EXECUTOR_VERSION,
        provider_id=f"sha256:{_machine_digest()}",
        cwd=_working_directory(),
        user_home_dir=None if home is None else path_to_uri(home),
        platform_os="macos" if sys.platform == "darwin" else "linux",
        prepend_path_dirs=[],
        temporary_directories=[path_to_uri(temporary)] if temporary else [],
        temp_dir=path_to_uri(temporary or "/tmp"),
        capabilities=Capabilities(**_CAPABILITIES, other_users=libc.can_switch()),
    )


def _client_shell() -> Shell:
    path = login_shell()
    if os.path.basename(path) in _KNOWN_SHELLS:
        return Shell(os.path.basename(path), path)
    for path in _FALLBACK_SHELLS:
        if os.access(path, os.X_OK):
            return Shell(os.path.basename(path), path)
    return Shell("sh", "/bin/sh")


def _temporary_directory(variables: Mapping[str, str]) -> str | None:
    """TMPDIR, from the working directory of the server; None without a usable value."""
    named = variables.get("TMPDIR")
    try:
        return os.path.abspath(named) if named else None
    except OSError:
        return None  # the working directory is gone


def _working_directory() -> str | None:
    try:
        return path_to_uri(os.getcwd())
    except OSError:
        return None


def _machine_digest() -> str:
    return hashlib.sha256(f"exec-server\0{os.uname().nodename}\0{sys.prefix}".encode()).hexdigest()
