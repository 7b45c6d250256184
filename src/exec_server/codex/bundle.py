"""The files of a capability root: a plugin's manifest and declarations, and all skills below it."""

from __future__ import annotations

from typing import Any, Final

from exec_server.codex.capability_files import (
    CapabilityFiles,
    Files,
    ResponseBudget,
    error_text,
    is_denied,
)
from exec_server.codex.manifest import (
    JsonObject,
    ManifestFault,
    declared_servers,
    parse_members,
)
from exec_server.errors import RpcError
from exec_server.protocol.codex import (
    CapabilityFile,
    DiscoveredRoot,
    PluginFiles,
    RootParams,
    SkillFiles,
)
from exec_server.protocol.files import WalkOptions
from exec_server.protocol.paths import PathUri, child_uri

# The first that a directory has is its manifest.
MANIFESTS: Final = (
    ".codex-plugin/plugin.json",
    ".claude-plugin/plugin.json",
    ".cursor-plugin/plugin.json",
)
# A look into a directory.
_ONE_ENTRY: Final = WalkOptions(
    max_depth=1, max_directories=1, max_entries=1, follow_directory_symlinks=False
)
_SKILL: Final = "/SKILL.md"
_METADATA: Final = "agents/openai.yaml"


def discover_root(root: RootParams, files: Files, budget: ResponseBudget) -> DiscoveredRoot:
    """The files of one root; what cannot be read is a warning. Blocking."""

    def failed(error: str) -> DiscoveredRoot:
        return DiscoveredRoot(root.id, root.path.uri, None, [], [], [], error)

    try:
        root.path.native()
    except RpcError as error:
        return failed(f"failed to inspect capability root {root.path}: {error.message}")
    try:
        is_directory = files.metadata(root.path).is_directory
    except (OSError, RpcError) as error:
        if not is_denied(error) or not _may_look_around(root, files):
            return failed(f"failed to inspect capability root {root.path}: {error_text(error)}")
        is_directory = True  # the root itself is denied: the scan finds nothing and says why
    if not is_directory:
        return failed(f"capability root {root.path} is not a directory")
    return _Bundle(root, CapabilityFiles(files, budget)).read()


def _may_look_around(root: RootParams, files: Files) -> bool:
    """Whether the directory of a root may be read, so that only the root itself is denied."""
    parent = PathUri.from_text(root.path.uri.rstrip("/").rpartition("/")[0] + "/")
    try:
        return not files.walk(parent, _ONE_ENTRY).errors
    except (OSError, RpcError):
        return False


def manifest_directory(uri: str) -> str:
    """The URI of the directory that a manifest is about."""
    return uri.rsplit("/", 2)[0]


class _Bundle:
    """Files are read in the order of the reference, which decides what is left out."""

    def __init__(self, root: RootParams, files: CapabilityFiles) -> None:
        self._root = root
        self._uri = root.path.uri.rstrip("/")
        self._files = files

    def read(self) -> DiscoveredRoot:
        found = self._files.scan(self._root.path)
        manifest = self._first_manifest(self._uri)
        namespaces = [manifest or self._manifest_above()]
        namespaces += self._nested_manifests(found, manifest is not None)
        plugin = None if manifest is None else self._plugin(manifest)
        skills = self._skills(found)
        return DiscoveredRoot(
            self._root.id,
            self._root.path.uri,
            plugin,
            skills,
            [each for each in namespaces if each is not None],
            self._files.warnings,
            None,
        )

    def _first_manifest(self, directory: str) -> CapabilityFile | None:
        for name in MANIFESTS:
            manifest = self._files.read(f"{directory}/{name}")
            if manifest is not None:
                return manifest
        return None

    def _manifest_above(self) -> CapabilityFile | None:
        """The manifest of the nearest directory above the root."""
        directory = self._uri
        while directory != "file://":
            directory = directory.rsplit("/", 1)[0]
            manifest = self._first_manifest(directory)
            if manifest is not None:
                return manifest
        return None

    def _nested_manifests(self, found: list[str], has_own: bool) -> list[CapabilityFile | None]:
        """One manifest for each directory below the root that has some."""
        best: dict[str, int] = {}
        for rank, name in enumerate(MANIFESTS):
            for uri in found:
                if uri.endswith(f"/{name}"):
                    best.setdefault(manifest_directory(uri), rank)
        if has_own:
            best.pop(self._uri, None)
        return [
            self._files.read(f"{directory}/{MANIFESTS[rank]}")
            for directory, rank in sorted(best.items())
        ]

    def _skills(self, found: list[str]) -> list[SkillFiles]:
        skills = []
        for uri in sorted(uri for uri in found if uri.endswith(_SKILL)):
            instructions = self._files.read(uri)
            metadata = self._files.read(f"{uri.removesuffix(_SKILL)}/{_METADATA}")
            if instructions is not None:
                skills.append(SkillFiles(instructions, metadata))
        return skills

    def _plugin(self, manifest: CapabilityFile) -> PluginFiles:
        servers, apps = _declarations(manifest.contents)
        mcp_config = None
        if not isinstance(servers, JsonObject):  # the servers are in the manifest itself
            mcp_config = self._declared(manifest, "mcpServers", servers, ".mcp.json")
        apps_config = self._declared(manifest, "apps", apps, ".app.json")
        return PluginFiles(manifest, mcp_config, apps_config)

    def _declared(
        self, manifest: CapabilityFile, field: str, name: object, default: str
    ) -> CapabilityFile | None:
        """The file that a manifest names, or that of the usual name."""
        if not isinstance(name, str):
            return self._files.read(f"{self._uri}/{default}")
        segments = name.removeprefix("./").rstrip("/").split("/")
        if not name.startswith("./"):
            fault = "path must start with `./`"
        elif name[2:3] in ("", "/") or ".." in segments or "\0" in name:
            fault = "path must remain below the capability root"
        else:
            plain = [segment for segment in segments if segment not in ("", ".")]
            return self._files.read(child_uri(self._uri, "/".join(plain)))
        self._files.warn(f"ignoring {field} in {manifest.path}: {fault}")
        return self._files.read(f"{self._uri}/{default}")


def _declarations(manifest: str) -> tuple[Any, Any]:
    """The servers and the apps that a manifest declares; nothing if it is not valid."""
    try:
        members = parse_members(manifest)
        return declared_servers(members), members.get("apps")
    except ManifestFault:
        return None, None
