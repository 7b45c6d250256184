"""Discovery of skills and plugins, and environmentConfig/read: structs and calls."""

from __future__ import annotations

from typing import Any, ClassVar

from exec_server.protocol.decoding import Call, Params, Prepare, Result
from exec_server.protocol.paths import PathUri
from exec_server.protocol.sandbox import Confinable, FileUri, Sandbox


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


class DiscoverRootsParams(Params, frozen=True):
    wire_name: ClassVar[str] = "WireCapabilityRootsDiscoverParams"
    prepare: ClassVar[Prepare] = staticmethod(_prepare_roots)
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


class DiscoverRootsResult(Result, frozen=True):
    roots: list[DiscoveredRoot]


DISCOVER_ROOTS = Call("capabilityRoots/discoverV1", DiscoverRootsParams, DiscoverRootsResult)


class DiscoverSandbox(Sandbox, frozen=True, kw_only=True):
    """The sandbox of a discovery, which has to have a `cwd`."""

    omissible: ClassVar[tuple[str, ...]] = tuple(
        name for name in Sandbox.omissible if name != "cwd"
    )
    cwd: FileUri


class DiscoverParams(Confinable, frozen=True):
    wire_name: ClassVar[str] = "DiscoverV2CapabilitiesRequest"
    cwd: PathUri
    sandbox: DiscoverSandbox | None = None


class SkillTool(Result, frozen=True):
    type: str
    value: str
    description: str | None
    transport: str | None
    command: str | None
    url: str | None
    oauth_callback_port: int | None


class SkillDependencies(Result, frozen=True):
    tools: list[SkillTool]


class SkillPolicy(Result, frozen=True):
    allow_implicit_invocation: bool | None
    products: list[str]


class PluginSkill(Result, frozen=True):
    name: str
    description: str
    short_description: str | None
    path: str
    dependencies: SkillDependencies | None
    policy: SkillPolicy | None


class DiscoveryRoot(Result, frozen=True):
    id: str
    path: str


class Skill(Result, frozen=True):
    name: str
    description: str
    short_description: str | None
    path: str
    discovery_root: DiscoveryRoot
    dependencies: SkillDependencies | None
    policy: SkillPolicy | None


class Plugin(Result, frozen=True):
    id: str
    display_name: str
    remote_plugin_id: str | None
    version: str
    root: str
    files: PluginFiles
    skills: list[PluginSkill]


class DiscoverResult(Result, frozen=True):
    plugins: list[Plugin]
    skills: list[Skill]
    warnings: list[str]


DISCOVER = Call("capabilities/discoverV2", DiscoverParams, DiscoverResult)


class ReadConfigParams(Params, frozen=True):
    """Each path is a list of keys of a TOML document, the outermost first."""

    wire_name: ClassVar[str] = "EnvironmentConfigReadParams"
    cwd: PathUri
    config_paths: list[list[str]]
    requirements_paths: list[list[str]]


class ConfigLayer(Result, frozen=True):
    """The requested part of one file, as TOML text."""

    source: str
    base_dir: str
    toml: str


class LayerStack(Result, frozen=True):
    """Layers from the lowest precedence to the highest."""

    layers: list[ConfigLayer]
    # The number of layers before the place of those that a client knows from its service.
    cloud_insertion_index: int


class ReadConfigResult(Result, frozen=True):
    user_home_dir: str | None
    codex_home_dir: str
    hostname: str | None
    config: LayerStack
    requirements: LayerStack


READ_CONFIG = Call("environmentConfig/read", ReadConfigParams, ReadConfigResult)
