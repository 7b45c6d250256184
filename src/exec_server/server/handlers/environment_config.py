"""environmentConfig/read: the configuration of Codex on this machine."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping

from exec_server.errors import InvalidParams
from exec_server.protocol.codex import ReadConfigParams, ReadConfigResult
from exec_server.server.context import ConnectionContext


def read(context: ConnectionContext, params: ReadConfigParams) -> Awaitable[ReadConfigResult]:
    params.cwd.native(InvalidParams)  # raises for a path of another platform
    if not params.config_paths and not params.requirements_paths:
        raise InvalidParams("at least one config or requirements path is required")
    if not all([*params.config_paths, *params.requirements_paths]):
        raise InvalidParams("TOML paths must contain at least one key segment")
    return context.in_thread(_read, params, context.server.variables)


def _read(params: ReadConfigParams, variables: Mapping[str, str]) -> ReadConfigResult:
    from exec_server.codex import config  # slow imports stay out of start-up

    return config.read(params, variables)
