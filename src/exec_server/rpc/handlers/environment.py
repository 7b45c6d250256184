"""environment/*: what this machine is."""

from __future__ import annotations

from exec_server.protocol.session import EnvironmentInfo, EnvironmentStatus
from exec_server.rpc.scope import Scope

_READY = EnvironmentStatus("ready")


def info(scope: Scope, _params: None) -> EnvironmentInfo:
    return scope.machine.environment


def status(_scope: Scope, _params: None) -> EnvironmentStatus:
    return _READY
