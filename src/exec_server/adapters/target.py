"""What adapters share: their machine, its files, and its errors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

from exec_server import sync
from exec_server.client.arguments import AnySandbox, retention_seconds
from exec_server.client.commands import SystemCommands
from exec_server.client.connect import ConnectOptions, MachineOptions, connect
from exec_server.client.environment import Environment
from exec_server.client.files import Files
from exec_server.errors import (
    ConnectFailed,
    ConnectionLost,
    ProcessLost,
    RegistryError,
    SessionLost,
    StartupError,
    missing_package,
)
from exec_server.sync import files as sync_files

if TYPE_CHECKING:  # it needs pydantic, and this module does not
    from exec_server.adapters.stored_machine import StoredMachine

AnyFiles = TypeVar("AnyFiles", Files, sync_files.Files)

# The errors of a machine that is out of reach, that frameworks map to their own exception. They
# are raised in time: a lost session is given up after RECOVERY_SECONDS of the client.
UNREACHABLE: Final = (ConnectFailed, ConnectionLost, ProcessLost, RegistryError, SessionLost)
# The options of `connect` that are parts of a TARGET argument.
_OPTIONS_OF_TARGET: Final = frozenset({"registry", "environment_id"})
# The options of `connect` that say nothing about the machine.
_OPTIONS_OF_ALL: Final = frozenset({"client_name", "reconnect", "retention"})


def stored_options(machine: StoredMachine) -> ConnectOptions:
    """The options of a stored machine; raises ValueError if its token is in no variable."""
    return take_options({**vars(machine)})


def take_options(values: MutableMapping[str, Any]) -> ConnectOptions:
    """Remove the MachineOptions and `token_env` from `values`, and return them as options.

    Raises ValueError if the variable that `token_env` names is not set.
    """
    token = token_of_variable(values.pop("token_env", None))
    names = [name for name in MachineOptions.__annotations__ if name in values]
    options: ConnectOptions = {"token": token, "reconnect": True}
    options.update({name: values.pop(name) for name in names})  # type: ignore[typeddict-item]
    return options


def exec_words(machine: StoredMachine, user: str | None) -> list[str]:
    """The words before a command that is run on a terminal of a stored machine, as a user.

    Raises NotImplementedError if `exec-server exec` cannot reach the machine.
    """
    target = machine.target
    if target is None and machine.registry is not None:
        target = f"relay:{machine.registry.rstrip('/')}/{machine.environment_id}"
    if target is None or machine.account_id is not None:
        raise NotImplementedError("only a machine with a target or a registry can be connected to")
    words = [] if user is None else ["--user", user]
    for name in ("token_env", *MachineOptions.__annotations__):
        value = None if name in _OPTIONS_OF_TARGET else getattr(machine, name)
        if name == "retention" and value is not None:
            value = str(retention_seconds(value))
        values = value if isinstance(value, tuple) else (value,)
        flag = f"--{name.replace('_', '-')}"
        for each in filter(None, values):
            words += [flag] if each is True else [flag, str(each)]
    return ["exec-server", "exec", "-t", *words, target, "--"]


@contextmanager
def unreachable_as(kind: Callable[[str], Exception], prefix: str = "") -> Iterator[None]:
    """Let a machine out of reach be an exception of the framework; a decorator too."""
    try:
        yield
    except UNREACHABLE as error:
        raise kind(f"{prefix}{error}") from error


def configured_files(
    files: AnyFiles, user: str | None, sandbox: AnySandbox | None, cwd: str | None = None
) -> AnyFiles:
    """The files as a user, and confined by a sandbox whose workspace is `cwd`."""
    if user is not None:
        files = files.as_user(user)
    return files if sandbox is None else files.sandboxed(sandbox, cwd=cwd)


class ServerUser:
    """The user of a server, which needs no other rights to act as this one."""

    def __init__(self) -> None:
        self._names: list[str] = []

    async def has_name(self, environment: Environment, name: str) -> bool:
        """Whether this is the name or the number of the server's own user."""
        if not self._names:
            commands = SystemCommands(environment.run, environment.start)
            result = await commands.run(["/bin/sh", "-c", "id -un; id -u"], cwd="/")
            self._names = result.text.split()
        return name in self._names


def token_of_variable(name: str | None) -> str | None:
    """The token in an environment variable; raises ValueError if the variable is not set."""
    if name is None:
        return None
    if name not in os.environ:
        raise ValueError(f"token_env: the variable {name} is not set")
    return os.environ[name]


def make_environment(
    target: str | None, options: ConnectOptions, env: Mapping[str, str] | None = None
) -> Environment:
    """An environment to open, by default a local server; StartupError for incomplete options.

    `env` has the variables of a local server, by default those of this process. The default target
    of commands is `:` here, as a configuration without a target has always meant this machine.
    """
    if _is_local(target, options):
        return Environment.local(env=env)
    return connect(target, **options)


def open_environment(target: str | None, options: ConnectOptions) -> sync.Environment:
    """The same without async, opened."""
    if _is_local(target, options):
        return sync.Environment.local()
    return sync.connect(target, **options)


def _is_local(target: str | None, options: ConnectOptions) -> bool:
    """Whether there is no target and no option about a machine but this one.

    Raises StartupError if there are options alone: a command for a machine whose target was
    forgotten must not run here.
    """
    names = {name for name, value in options.items() if value not in (None, False)}
    if target is not None or "registry" in names:
        return False
    if not names <= _OPTIONS_OF_ALL:
        listed = ", ".join(sorted(names - _OPTIONS_OF_ALL))
        raise StartupError(f"no target for {listed}: name a machine, or `:` for the default target")
    return True


def framework_missing(framework: str, extra: str, cause: ImportError) -> ImportError:
    """The error of an adapter whose framework cannot be imported: one sentence with the extra."""
    text = missing_package("this adapter", framework, extra)
    return ImportError(f"{text} ({cause})", name=cause.name)
