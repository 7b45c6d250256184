"""Decides how a request is confined.

No confinement is built yet, so a request that asks for one is refused: nothing ever runs
freer than its client asked for.
"""

from __future__ import annotations

from exec_server.errors import InvalidRequest
from exec_server.protocol.process import SandboxType
from exec_server.protocol.sandbox import Disabled, External, Managed, Sandbox, Unrestricted

_REFUSAL = "this exec-server cannot confine {what}: nothing was done (no sandbox is built in)"


def admit_file_operation(sandbox: Sandbox) -> None:
    """Let a file operation run directly, or raise InvalidRequest because it must be confined."""
    permissions = sandbox.permissions
    if isinstance(permissions, Managed) and not isinstance(permissions.file_system, Unrestricted):
        raise InvalidRequest(_REFUSAL.format(what="file operations"))


def admit_process(sandbox: Sandbox | None) -> SandboxType:
    """Let a process run directly, or raise InvalidRequest; returns what the answer reports.

    The reference names its sandbox whenever a `sandbox` object is given, even a disabled one,
    and clients show that name; it says which mechanism is in charge, not that it confines.
    """
    if sandbox is None:
        return "none"
    permissions = sandbox.permissions
    if isinstance(permissions, Managed) and not isinstance(permissions.file_system, Unrestricted):
        raise InvalidRequest(_REFUSAL.format(what="processes to parts of the file system"))
    if isinstance(permissions, Managed | External) and permissions.network == "restricted":
        raise InvalidRequest(_REFUSAL.format(what="the network of processes"))
    assert isinstance(permissions, Managed | External | Disabled)
    return "linuxSeccomp"
