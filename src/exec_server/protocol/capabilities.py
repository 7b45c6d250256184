"""capabilities/discoverV2: structs and the call."""

from __future__ import annotations

from typing import ClassVar

from exec_server.protocol.capability_roots import PluginFiles
from exec_server.protocol.decoding import Result
from exec_server.protocol.method import Call
from exec_server.protocol.paths import PathUri
from exec_server.protocol.sandbox import Confinable, FileUri, Sandbox


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
