"""The options with which a command is started: --env, and --sandbox by a name or a JSON file."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, Final

from exec_server.cli.errors import UsageError
from exec_server.client.arguments import AnySandbox, PathResolver
from exec_server.errors import MalformedMessage, os_error_text
from exec_server.protocol import decoding, sandbox
from exec_server.protocol.session import EnvironmentInfo

# A policy takes a few hundred bytes per entry. A larger file is not a policy.
MAX_POLICY_BYTES: Final = 1_048_576


def read_policy(flag: str, path: str) -> object:
    """The JSON value of a policy file; of whole request params only their `sandbox`.

    `flag` is the flag that names the file. Raises UsageError.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_POLICY_BYTES + 1)
    except FileNotFoundError:
        names = " and ".join(sandbox.PRESETS)
        raise UsageError(f"{flag}: {path} does not exist; the named policies are {names}") from None
    except OSError as error:
        raise UsageError(f"{flag}: {path}: {os_error_text(error)}") from None
    if len(data) > MAX_POLICY_BYTES:
        raise UsageError(f"{flag}: {path} has more than {MAX_POLICY_BYTES} bytes")
    try:
        value = decoding.parse(data)
    except MalformedMessage as error:
        raise UsageError(f"{path}: {error}") from None
    if isinstance(value, dict) and "permissions" not in value and "sandbox" in value:
        return value["sandbox"]
    return value


def load_policy(flag: str, policy: str | None) -> AnySandbox | None:
    """A policy by name or file for the client, perhaps without surroundings; raises UsageError."""
    if policy is None:
        return None
    if policy in sandbox.PRESETS:
        return policy
    value = read_policy(flag, policy)
    if not isinstance(value, dict):
        raise UsageError(f"{flag}: {policy} holds no `sandbox` object")
    return value


def needs_surroundings(value: object) -> bool:
    """Whether the value holds only the `permissions` of a `sandbox` object."""
    return isinstance(value, dict) and "type" in value and "permissions" not in value


def with_surroundings(value: object, cwd: str, roots: list[str]) -> dict[str, Any]:
    """Complete permissions to a `sandbox` object; directory and roots are file: URIs."""
    return sandbox.surroundings(cwd, roots) | {"permissions": value}


def command_sandbox(
    policy: AnySandbox | None, cwd: str | None, info: EnvironmentInfo
) -> AnySandbox | None:
    """The policy of `--sandbox`, with the working directory as its workspace."""
    if not needs_surroundings(policy):
        return policy
    paths = PathResolver(info)
    workspace = str(paths.uri(paths.cwd if cwd is None else cwd))
    return with_surroundings(policy, workspace, [workspace])


def command_variables(words: Iterable[str], *, tty: bool) -> dict[str, str]:
    """The variables of `--env K=V` and of a terminal; raises UsageError."""
    variables = {}
    if tty:
        variables["TERM"] = os.environ.get("TERM", "dumb")
        if "COLORTERM" in os.environ:
            variables["COLORTERM"] = os.environ["COLORTERM"]
    for word in words:
        name, equals, value = word.partition("=")
        if not name:
            raise UsageError(f"--env {word}: the variable has no name; write --env NAME=VALUE")
        if not equals and name not in os.environ:
            raise UsageError(
                f"--env {word}: {name} is not set in this environment; write --env {name}=VALUE"
            )
        variables[name] = value if equals else os.environ[name]
    return variables
