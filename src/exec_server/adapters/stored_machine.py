"""StoredMachine: the fields of a machine in the configurations that frameworks store."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from exec_server.protocol.sandbox import PresetName

# A sandbox in a configuration: the name of a preset, or a `sandbox` object of the protocol.
StoredSandbox = PresetName | dict[str, Any]


class StoredMachine(BaseModel):
    """A `target`, or a `registry` and `environment_id`, or none for this machine.

    `token_env` names the environment variable with the token, which must not be stored. `user` is
    the user of commands and files, for a server with the rights of root; `sandbox` confines both:
    "read-only", "workspace-write" or a `sandbox` object of the protocol.
    """

    target: str | None = None
    registry: str | None = None
    environment_id: str | None = None
    executor_key: str | None = None
    account_id: str | None = None
    token_env: str | None = None
    ca_file: str | None = None
    pin: str | tuple[str, ...] | None = None
    allow_insecure_token: bool = False
    user: str | None = None
    sandbox: StoredSandbox | None = None
