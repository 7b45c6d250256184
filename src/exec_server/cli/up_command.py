"""`exec-server up`: remote mode with the registry and the token of a stored login."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from exec_server.cli import server_arguments
from exec_server.cli.commands import logins
from exec_server.cli.commands.errors import CommandError, UsageError
from exec_server.cli.up_arguments import build_parser
from exec_server.errors import RegistryError, StartupError
from exec_server.host.signals import ignore_unused
from exec_server.registry.executor_key import IN_MEMORY
from exec_server.registry.machine_name import environment_id as machine_id

if TYPE_CHECKING:
    from exec_server.cli.watchdog import Watchdog


def up(words: list[str], watchdog: Watchdog) -> int:
    """Serve through a registry until a signal, or manage the service; returns the exit code."""
    ignore_unused()
    try:
        arguments = build_parser().parse_args(words)
        if arguments.uninstall:
            return _manage_service(uninstall=True)
        login = _choose_login(arguments.url)
        environment_id = arguments.environment_id or machine_id()
        certificate = _certificate_flags(arguments.ca_file, arguments.pin)
        key = _key_flags(arguments.key_file)
        if arguments.install:
            return _manage_service(login.url, environment_id, [*certificate, *key])
        certificate = certificate or _certificate_flags(login.ca_file, login.pins)
        _serve(arguments, login, environment_id, [*certificate, *key], watchdog)
    except SystemExit as end:  # argparse: --help and usage errors
        return end.code if isinstance(end.code, int) else 1
    except (StartupError, RegistryError, UsageError, CommandError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    return 0


def _choose_login(url: str | None) -> logins.Login:
    """The login of a registry, or the only one; raises UsageError or StartupError."""
    known = [login for login in logins.load().values() if "executor" in login.tokens]
    if url is not None:
        wanted = logins.normalise_url(url)
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
    """The flags that say which certificate of the registry is accepted."""
    words = [] if ca_file is None else ["--ca-file", os.path.abspath(ca_file)]
    return words + [word for pin in pins for word in ("--pin", pin)]


def _key_flags(key_file: str | None) -> list[str]:
    """The flag that says where the key of this machine is."""
    if key_file is None:
        return []
    return ["--key-file", key_file if key_file == IN_MEMORY else os.path.abspath(key_file)]


def _manage_service(
    url: str = "", environment_id: str = "", flags: Sequence[str] = (), *, uninstall: bool = False
) -> int:
    from exec_server.cli import user_service

    if uninstall:
        print(user_service.uninstall())
    else:
        print(user_service.install(url, environment_id, flags))
    return 0


def _serve(
    arguments: argparse.Namespace,
    login: logins.Login,
    environment_id: str,
    flags: Sequence[str],
    watchdog: Watchdog,
) -> None:
    words = ["--remote", login.url, "--environment-id", environment_id]
    words += ["--log-level", arguments.log_level, "--log-format", arguments.log_format]
    words += flags
    settings = server_arguments.parse(words)
    settings.registry_token = login.read_token("executor")
    settings.waits_for_registry = True
    settings.on_ready = _Announcement(login.url, environment_id)
    from exec_server.cli.server_run import run_remote

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
