"""`exec-server up`: remote mode with a stored login, also as a systemd service of the user."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from exec_server.cli.errors import CommandError, UsageError
from exec_server.cli.serve.arguments import parse, parse_up, stdin_flags
from exec_server.client.configuration import configuration_directory
from exec_server.client.logins import Login, load_logins, normalise_url
from exec_server.errors import RegistryError, StartupError
from exec_server.host.libc import ignore_unused
from exec_server.registry.destination import environment_id as machine_id
from exec_server.registry.executor_key import IN_MEMORY

if TYPE_CHECKING:
    from pathlib import Path

    from exec_server.cli.serve.watchdog import Watchdog

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


def up(words: list[str], watchdog: Watchdog) -> int:
    """Serve through a registry until a signal, or manage the service; returns the exit code."""
    ignore_unused()
    try:
        arguments = parse_up(words)
        if arguments.uninstall:
            print(uninstall_service())
            return 0
        stdin = stdin_flags(arguments)
        login = None if stdin else _choose_login(arguments.url)
        url = arguments.url if login is None else login.url
        environment_id = arguments.environment_id or machine_id()
        certificate = _certificate_flags(arguments.ca_file, arguments.pin)
        key = _key_flags(arguments.key_file)
        if arguments.install:
            print(install_service(url, environment_id, [*certificate, *key]))
            return 0
        if login is not None:
            certificate = certificate or _certificate_flags(login.ca_file, login.pins)
        token = None if login is None else login.read_token("executor")
        serve_words = ["--remote", url, "--environment-id", environment_id, *certificate, *key]
        _serve(arguments, [*serve_words, *stdin], token, watchdog)
    except SystemExit as end:  # argparse: --help and usage errors
        return end.code if isinstance(end.code, int) else 1
    except (StartupError, RegistryError, UsageError, CommandError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    return 0


def _choose_login(url: str | None) -> Login:
    """The login of a registry, or the only one; raises UsageError or StartupError."""
    known = [login for login in load_logins().values() if "executor" in login.tokens]
    if url is not None:
        wanted = normalise_url(url)
        known = [login for login in known if login.url == wanted]
    if len(known) == 1:
        return known[0]
    if url is not None:
        raise UsageError(
            f"there is no login for {url} that may register machines: run "
            f"`exec-server login {url}` with an executor's token first"
        )
    if known:
        listed = ", ".join(sorted(login.url for login in known))
        raise UsageError(f"there are several logins, so name one of the registries: {listed}")
    raise UsageError(
        "there is no login that may register machines: run `exec-server login URL` with an "
        "executor's token first"
    )


def _certificate_flags(ca_file: str | None, pins: Sequence[str]) -> list[str]:
    words = [] if ca_file is None else ["--ca-file", os.path.abspath(ca_file)]
    return words + [word for pin in pins for word in ("--pin", pin)]


def _key_flags(key_file: str | None) -> list[str]:
    if key_file is None:
        return []
    return ["--key-file", key_file if key_file == IN_MEMORY else os.path.abspath(key_file)]


def _serve(
    arguments: argparse.Namespace, words: Sequence[str], token: str | None, watchdog: Watchdog
) -> None:
    """Serve with these words of `serve`; the token is that of a login."""
    logging = ["--log-level", arguments.log_level, "--log-format", arguments.log_format]
    settings = parse([*words, *logging])
    settings.registry_token = token
    settings.waits_for_registry = True
    settings.on_ready = _Announcement(settings.remote, settings.environment_id)
    from exec_server.cli.serve.run import run_remote

    run_remote(settings, watchdog)


class _Announcement:
    """Prints how clients reach this machine, and later that it is reachable again."""

    def __init__(self, url: str, environment_id: str) -> None:
        self._target = f"relay:{url}/{environment_id}"
        self._is_done = False

    def __call__(self, fingerprint: str) -> None:
        if self._is_done:
            print("This machine is reachable again.", flush=True)
            return
        self._is_done = True
        print(
            f"This machine is reachable. On a client that has logged in:\n"
            f"    exec-server exec {self._target} -- uname -a\n"
            f"The fingerprint of its key, for --executor-key: {fingerprint}",
            flush=True,
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
    return configuration_directory() / "systemd" / "user" / UNIT


def install_service(url: str, environment_id: str, flags: Sequence[str] = ()) -> str:
    """Write the unit file with more `flags` of `up`, and start the service; returns a text."""
    from exec_server.host.interpreter import server_words

    systemctl = _systemctl()
    path = unit_path()
    is_new = not path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(unit_text(url, environment_id, flags, server_words(os.environ)))
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


def uninstall_service() -> str:
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
    import shutil

    from exec_server.host.interpreter import find_system_program

    program = find_system_program("systemctl") or shutil.which("systemctl")
    if program is None:
        raise StartupError(
            "systemctl is not installed, so there are no services of users here; run "
            "`exec-server up` under the supervisor of this machine instead"
        )
    return program


def _call(systemctl: str, *words: str) -> None:
    import subprocess

    command = f"systemctl --user {' '.join(words)}"
    try:
        done = subprocess.run(
            [systemctl, "--user", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SYSTEMCTL_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StartupError(f"`{command}` failed: {error}") from None
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}"
        raise StartupError(f"`{command}` failed: {reason}")
