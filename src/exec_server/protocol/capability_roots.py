"""capabilityRoots/discoverV1: structs and the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from exec_server.protocol.decoding import Params, Result
from exec_server.protocol.method import Call
from exec_server.protocol.paths import PathUri
from exec_server.protocol.sandbox import Confinable, Sandbox


class RootParams(Confinable, frozen=True):
    wire_name: ClassVar[str] = "WireCapabilityRootDiscoverRequest"
    id: str
    path: PathUri
    sandbox: Sandbox | None = None


def _prepare_roots(value: dict[str, Any], server_cwd: str | None) -> dict[str, Any]:
    """Translate the sandbox of each root, as for params of other methods."""
    roots = value.get("roots")
    if not isinstance(roots, list):
        return value
    return value | {
        "roots": [
            RootParams.prepare(root, server_cwd) if isinstance(root, dict) else root
            for root in roots
        ]
    }


class DiscoverParams(Params, frozen=True):
    wire_name: ClassVar[str] = "WireCapabilityRootsDiscoverParams"
    prepare: ClassVar[Callable[[dict[str, Any], str | None], dict[str, Any]]] = staticmethod(
        _prepare_roots
    )
    roots: list[RootParams]


class CapabilityFile(Result, frozen=True):
    path: str
    contents: str


class PluginFiles(Result, frozen=True):
    manifest: CapabilityFile
    mcp_config: CapabilityFile | None
    apps_config: CapabilityFile | None


class SkillFiles(Result, frozen=True):
    instructions: CapabilityFile
    metadata: CapabilityFile | None


class DiscoveredRoot(Result, frozen=True):
    id: str
    path: str
    plugin: PluginFiles | None
    skills: list[SkillFiles]
    namespace_manifests: list[CapabilityFile]
    warnings: list[str]
    error: str | None


class DiscoverResult(Result, frozen=True):
    roots: list[DiscoveredRoot]


DISCOVER = Call("capabilityRoots/discoverV1", DiscoverParams, DiscoverResult)
