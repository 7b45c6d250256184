"""environment/*: a description of the server and its host."""

from __future__ import annotations

from exec_server.protocol.session import EnvironmentInfo, EnvironmentStatus
from exec_server.server.context import ConnectionContext

_READY = EnvironmentStatus("ready")


def info(context: ConnectionContext, _params: None) -> EnvironmentInfo:
    return context.environment


def status(_context: ConnectionContext, _params: None) -> EnvironmentStatus:
    return _READY
