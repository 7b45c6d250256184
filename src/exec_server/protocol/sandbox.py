"""The `sandbox` member of requests: what a client wants a process or file call confined to."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from exec_server.protocol.paths import PathUri
from exec_server.protocol.wire import U64, Params

Access = Literal["read", "write", "deny", "none"]
Network = Literal["restricted", "enabled"]


# Inside `permissions` the wire is snake case and its unions are tagged by `type` or `kind`,
# unlike everywhere else in the protocol.


class ExactPath(msgspec.Struct, frozen=True, tag_field="type", tag="path"):
    wire_name: ClassVar[str] = "struct variant FileSystemPath::Path"
    path: PathUri


class GlobPattern(msgspec.Struct, frozen=True, tag_field="type", tag="glob_pattern"):
    wire_name: ClassVar[str] = "struct variant FileSystemPath::GlobPattern"
    pattern: str


class Root(msgspec.Struct, frozen=True, tag_field="kind", tag="root"):
    pass


class Minimal(msgspec.Struct, frozen=True, tag_field="kind", tag="minimal"):
    pass


class ProjectRoots(msgspec.Struct, frozen=True, tag_field="kind", tag="project_roots"):
    subpath: str | None = None


class CurrentWorkingDirectory(
    msgspec.Struct, frozen=True, tag_field="kind", tag="current_working_directory"
):
    """An older name of project_roots."""

    subpath: str | None = None


class TmpDir(msgspec.Struct, frozen=True, tag_field="kind", tag="tmpdir"):
    pass


class SlashTmp(msgspec.Struct, frozen=True, tag_field="kind", tag="slash_tmp"):
    pass


class UnknownSpecial(msgspec.Struct, frozen=True, tag_field="kind", tag="unknown"):
    path: str
    subpath: str | None = None


SpecialKind = (
    Root | Minimal | ProjectRoots | CurrentWorkingDirectory | TmpDir | SlashTmp | UnknownSpecial
)


class SpecialPath(msgspec.Struct, frozen=True, tag_field="type", tag="special"):
    wire_name: ClassVar[str] = "struct variant FileSystemPath::Special"
    value: SpecialKind


class Entry(msgspec.Struct, frozen=True):
    wire_name: ClassVar[str] = "struct FileSystemSandboxEntry"
    path: ExactPath | GlobPattern | SpecialPath
    access: Access
    missing_path_behavior: Literal["skip"] | None = None


class Restricted(msgspec.Struct, frozen=True, tag_field="type", tag="restricted"):
    wire_name: ClassVar[str] = "struct variant ManagedFileSystemPermissions::Restricted"
    entries: list[Entry]
    glob_scan_max_depth: U64 | None = None


class Unrestricted(msgspec.Struct, frozen=True, tag_field="type", tag="unrestricted"):
    pass


class Managed(msgspec.Struct, frozen=True, tag_field="type", tag="managed"):
    wire_name: ClassVar[str] = "struct variant PermissionProfile::Managed"
    file_system: Restricted | Unrestricted
    network: Network


class Disabled(msgspec.Struct, frozen=True, tag_field="type", tag="disabled"):
    pass


class External(msgspec.Struct, frozen=True, tag_field="type", tag="external"):
    wire_name: ClassVar[str] = "struct variant PermissionProfile::External"
    network: Network


class PolicyContext(Params, frozen=True):
    wire_name: ClassVar[str] = "FileSystemSandboxPolicyContext"
    cwd: PathUri | None = None
    workspace_roots: list[PathUri] = msgspec.field(default_factory=list)


class Sandbox(Params, frozen=True):
    """The confinement asked for; `permissions` decides whether anything is confined at all."""

    wire_name: ClassVar[str] = "WireFileSystemSandboxContext"
    permissions: Managed | Disabled | External
    windows_sandbox_level: Literal["disabled", "restricted-token", "elevated", "mxc"]
    cwd: PathUri | None = None
    workspace_roots: list[PathUri] = msgspec.field(default_factory=list)
    user_home_dir: PathUri | None = None
    temporary_directories: list[PathUri] | None = None
    policy_context: PolicyContext | None = None
    sandbox_override: (
        Literal["noOverride", "escalatedSandboxWithRestrictions", "bypassSandboxFirstAttempt"]
        | None
    ) = None
    windows_sandbox_proxy_settings_mode: Literal["reconcile", "preserve"] | None = None
    use_legacy_landlock: bool = False
