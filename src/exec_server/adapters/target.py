"""The machine of an adapter: a target, a registry with an environment, or a local server."""

from __future__ import annotations

import os
import ssl
from collections.abc import Sequence
from typing import Final, Protocol, TypedDict

from exec_server import sync
from exec_server.client.connect import connect
from exec_server.client.environment import Environment
from exec_server.errors import (
    ConnectFailed,
    ConnectionLost,
    ProcessLost,
    RegistryError,
    SessionLost,
)

# The errors of a machine that is out of reach, which frameworks have a word of their own for. They
# are raised in time: a lost session is given up after RECOVERY_SECONDS of the client.
UNREACHABLE: Final = (ConnectFailed, ConnectionLost, ProcessLost, RegistryError, SessionLost)


class ConnectOptions(TypedDict, total=False):
    """The options of `exec_server.connect`."""

    token: str | None
    registry: str | None
    environment_id: str | None
    executor_key: str | None
    account_id: str | None
    tls: ssl.SSLContext | None
    ca_file: str | None
    pin: str | Sequence[str] | None
    allow_insecure_token: bool
    client_name: str
    reconnect: bool


class StoredMachine(Protocol):
    """A machine in a configuration that a framework stores, so without its token."""

    registry: str | None
    environment_id: str | None
    executor_key: str | None
    token_env: str | None
    ca_file: str | None


def stored_options(machine: StoredMachine) -> ConnectOptions:
    """The options of a stored machine; raises ValueError if its token is in no variable."""
    return {
        "token": token_of_variable(machine.token_env),
        "registry": machine.registry,
        "environment_id": machine.environment_id,
        "executor_key": machine.executor_key,
        "ca_file": machine.ca_file,
        "reconnect": True,
    }


def token_of_variable(name: str | None) -> str | None:
    """The token in an environment variable; raises ValueError if the variable is not set."""
    if name is None:
        return None
    if name not in os.environ:
        raise ValueError(f"token_env: the variable {name} is not set")
    return os.environ[name]


def make_environment(target: str | None, options: ConnectOptions) -> Environment:
    """An environment to open; a server of this machine if there is no target and no registry."""
    if target is None and options.get("registry") is None:
        return Environment.local()
    return connect(target, **options)


def open_environment(target: str | None, options: ConnectOptions) -> sync.Environment:
    """The same without async, opened."""
    if target is None and options.get("registry") is None:
        return sync.Environment.local()
    return sync.connect(target, **options)


def framework_missing(framework: str, extra: str, cause: ImportError) -> ImportError:
    """The error of an adapter whose framework cannot be imported: one sentence with the extra."""
    return ImportError(
        f"this adapter needs {framework}: pip install 'exec-server[{extra}]' ({cause})",
        name=cause.name,
    )
