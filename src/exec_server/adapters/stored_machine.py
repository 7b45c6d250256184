"""StoredMachine: the fields of a machine in the configurations that frameworks store."""

from __future__ import annotations

from typing import Any, get_type_hints

from pydantic import create_model

from exec_server.client.connect import MachineOptions
from exec_server.protocol.sandbox import PresetName

# A sandbox in a configuration: the name of a preset, or a `sandbox` object of the protocol.
StoredSandbox = PresetName | dict[str, Any]


# All options are optional. False is the default of flags, as it is in `connect`.
_Options: Any = create_model(
    "_Options",
    **{
        name: (hint, False if hint is bool else None)
        for name, hint in get_type_hints(MachineOptions).items()
    },
)


class StoredMachine(_Options):
    """A `target`, or a `registry` and `environment_id`, or none for this machine.

    The other MachineOptions of `connect` are fields too. `token_env` names the environment variable
    with the token, which must not be stored. `user` is the user of commands and files, for a server
    with the rights of root; `sandbox` confines both: "read-only", "workspace-write" or a `sandbox`
    object of the protocol.
    """

    target: str | None = None
    token_env: str | None = None
    pin: str | tuple[str, ...] | None = None  # frameworks hash frozen configurations
    user: str | None = None
    sandbox: StoredSandbox | None = None
