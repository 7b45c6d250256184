"""`exec-server up` as a systemd service of the user: its unit file, and the calls of systemctl."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from exec_server.errors import StartupError
from exec_server.host.module_path import server_words
from exec_server.host.programs import find_system_program

UNIT: Final = "exec-server-up.service"
# A user manager that does not answer is not waited for.
SYSTEMCTL_SECONDS: Final = 30.0

_TEMPLATE: Final = """\
[Unit]
Description=exec-server, reachable through {url}
Documentation=man:exec-server-up(1)

[Service]
ExecStart={command}
Restart=on-failure
RestartSec=5

[Install]
WantedBy=default.target
"""

_NO_MANAGER: Final = (
    "Services of a user need a session of systemd: log in as that user (not with su or sudo), or "
    "run `exec-server up` under another supervisor."
)


def unit_text(url: str, environment_id: str, flags: Sequence[str], command: Sequence[str]) -> str:
    """The unit file of the service; `command` runs exec-server, `flags` are more ones of `up`."""
    words = [*command, "up", url, "--environment-id", environment_id, *flags]
    return _TEMPLATE.format(url=_escaped(url), command=" ".join(map(_quoted, words)))


def _quoted(word: str) -> str:
    escaped = _escaped(word).replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return f'"{escaped}"'


def _escaped(text: str) -> str:
    return text.replace("%", "%%")  # systemd expands specifiers


def unit_path() -> Path:
    """The place of the unit file."""
    config = os.environ.get("XDG_CONFIG_HOME", "")
    base = Path(config) if config.startswith("/") else Path.home() / ".config"
    return base / "systemd" / "user" / UNIT


def own_command() -> list[str]:
    """The words that start this program again, from any directory."""
    return server_words(os.environ)


def install(url: str, environment_id: str, flags: Sequence[str] = ()) -> str:
    """Write the unit file and start the service; returns a text for the user.

    `flags` are more ones of `exec-server up`.
    """
    systemctl = _systemctl()
    path = unit_path()
    is_new = not path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(unit_text(url, environment_id, flags, own_command()))
    except OSError as error:
        raise StartupError(f"cannot write {path}: {error.strerror}") from None
    try:
        _call(systemctl, "daemon-reload")
        _call(systemctl, "enable", "--now", UNIT)
    except StartupError as error:
        if is_new:
            path.unlink(missing_ok=True)  # nothing is installed
        raise StartupError(f"{error}\n{_NO_MANAGER}") from None
    return (
        f"{UNIT} runs, and starts with your sessions; `loginctl enable-linger` starts it with the "
        f"machine.\nIts log: journalctl --user -u {UNIT}"
    )


def uninstall() -> str:
    """Stop the service and remove its unit file; returns a text for the user."""
    path = unit_path()
    if not path.exists():
        raise StartupError(f"the service is not installed: there is no {path}")
    systemctl = _systemctl()
    try:
        _call(systemctl, "disable", "--now", UNIT)
        path.unlink(missing_ok=True)
        _call(systemctl, "daemon-reload")
    except StartupError as error:
        raise StartupError(f"{error}\n{_NO_MANAGER}") from None
    return f"{UNIT} is stopped and removed."


def _systemctl() -> str:
    found = find_system_program("systemctl") or shutil.which("systemctl")
    if found is None:
        raise StartupError(
            "systemctl is not installed, so there are no services of users here; run "
            "`exec-server up` under the supervisor of this machine instead"
        )
    return found


def _call(systemctl: str, *words: str) -> None:
    shown = f"systemctl --user {' '.join(words)}"
    try:
        done = subprocess.run(
            [systemctl, "--user", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SYSTEMCTL_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StartupError(f"`{shown}` failed: {error}") from None
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}"
        raise StartupError(f"`{shown}` failed: {reason}")
