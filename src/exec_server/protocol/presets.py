"""Named policies as the `sandbox` object of a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, get_args

PresetName = Literal["read-only", "workspace-write"]
PRESETS: Final[tuple[PresetName, ...]] = get_args(PresetName)

# Writable directories: the workspace and those for temporary files.
_WRITABLE: Final = {
    "read-only": (),
    "workspace-write": ("project_roots", "slash_tmp", "tmpdir"),
}


def preset(
    name: PresetName, *, cwd: str, roots: Sequence[str], network: bool = False
) -> dict[str, Any]:
    """Everything is readable; the preset selects the writable directories. Paths are file: URIs."""
    return surroundings(cwd, roots) | {"permissions": _permissions(_WRITABLE[name], network)}


def surroundings(cwd: str, roots: Sequence[str]) -> dict[str, Any]:
    """The members of a `sandbox` object beside its permissions."""
    return {"cwd": cwd, "workspaceRoots": list(roots), "windowsSandboxLevel": "disabled"}


def _permissions(writable: Sequence[str], is_online: bool) -> dict[str, Any]:
    accesses = {"root": "read"} | dict.fromkeys(writable, "write")
    entries = [
        {"path": {"type": "special", "value": {"kind": kind}}, "access": access}
        for kind, access in accesses.items()
    ]
    return {
        "type": "managed",
        "file_system": {"type": "restricted", "entries": entries},
        "network": "enabled" if is_online else "restricted",
    }
