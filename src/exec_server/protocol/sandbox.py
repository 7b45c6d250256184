"""The `sandbox` member of requests: the confinement of a process or file operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final, Literal, Self, get_args

import msgspec

from exec_server.errors import InvalidParams, RpcError
from exec_server.protocol import legacy_sandbox
from exec_server.protocol.decoding import NonZeroUsize, Params, Prepare, Result
from exec_server.protocol.paths import PathUri

Access = Literal["read", "write", "deny", "none"]
Network = Literal["restricted", "enabled"]
Operation = Literal["read", "write", "network", "syscall"]

PresetName = Literal["read-only", "workspace-write"]
PRESETS: Final[tuple[PresetName, ...]] = get_args(PresetName)

# `windowsSandboxLevel: "mxc"` asks for a sandbox of Windows.
NO_MXC: Final = "native MXC is unavailable on this executor"

# Writable directories: the workspace and those for temporary files.
_WRITABLE: Final = {"read-only": (), "workspace-write": ("project_roots", "slash_tmp", "tmpdir")}


class FileUri(PathUri):
    """A path inside a `sandbox` object: only a URI; a native path is a sign of a legacy form."""

    __slots__ = ()

    @classmethod
    def from_wire(cls, value: object) -> Self:
        if isinstance(value, str) and value[:1] == "/":
            raise InvalidParams("invalid URI: relative URL without a base")
        return super().from_wire(value)


# Inside `permissions` the wire is snake case (rename=None) and its unions are tagged by `type`
# or `kind`, unlike everywhere else in the protocol.


class ExactPath(Params, frozen=True, rename=None, tag_field="type", tag="path"):
    wire_name: ClassVar[str] = "ExecFileSystemPath::Path"
    path: FileUri


class GlobPattern(Params, frozen=True, rename=None, tag_field="type", tag="glob_pattern"):
    wire_name: ClassVar[str] = "ExecFileSystemPath::GlobPattern"
    pattern: str


class Root(Params, frozen=True, rename=None, tag_field="kind", tag="root"):
    wire_name: ClassVar[str] = "FileSystemSpecialPath::Root"


class Minimal(Params, frozen=True, rename=None, tag_field="kind", tag="minimal"):
    wire_name: ClassVar[str] = "FileSystemSpecialPath::Minimal"


class ProjectRoots(Params, frozen=True, rename=None, tag_field="kind", tag="project_roots"):
    wire_name: ClassVar[str] = "FileSystemSpecialPath::ProjectRoots"
    tag_aliases: ClassVar[tuple[str, ...]] = ("current_working_directory",)
    omissible: ClassVar[tuple[str, ...]] = ("subpath",)
    subpath: str | None = None


class TmpDir(Params, frozen=True, rename=None, tag_field="kind", tag="tmpdir"):
    wire_name: ClassVar[str] = "FileSystemSpecialPath::Tmpdir"


class SlashTmp(Params, frozen=True, rename=None, tag_field="kind", tag="slash_tmp"):
    wire_name: ClassVar[str] = "FileSystemSpecialPath::SlashTmp"


class UnknownSpecial(Params, frozen=True, rename=None, tag_field="kind", tag="unknown"):
    wire_name: ClassVar[str] = "FileSystemSpecialPath::Unknown"
    omissible: ClassVar[tuple[str, ...]] = ("subpath",)
    path: str
    subpath: str | None = None


SpecialKind = Root | Minimal | ProjectRoots | TmpDir | SlashTmp | UnknownSpecial


class SpecialPath(Params, frozen=True, rename=None, tag_field="type", tag="special"):
    wire_name: ClassVar[str] = "ExecFileSystemPath::Special"
    value: SpecialKind


class PolicyEntry(Params, frozen=True, rename=None):
    wire_name: ClassVar[str] = "ExecFileSystemSandboxEntry"
    omissible: ClassVar[tuple[str, ...]] = ("missing_path_behavior",)
    path: ExactPath | GlobPattern | SpecialPath
    access: Access
    missing_path_behavior: Literal["skip"] | None = None


class Restricted(Params, frozen=True, rename=None, tag_field="type", tag="restricted"):
    wire_name: ClassVar[str] = "ExecManagedFileSystemPermissions::Restricted"
    omissible: ClassVar[tuple[str, ...]] = ("glob_scan_max_depth",)
    entries: list[PolicyEntry]
    glob_scan_max_depth: NonZeroUsize | None = None


class Unrestricted(Params, frozen=True, rename=None, tag_field="type", tag="unrestricted"):
    wire_name: ClassVar[str] = "ExecManagedFileSystemPermissions::Unrestricted"


class Managed(Params, frozen=True, rename=None, tag_field="type", tag="managed"):
    wire_name: ClassVar[str] = "ExecPermissionProfile::Managed"
    file_system: Restricted | Unrestricted
    network: Network


class Disabled(Params, frozen=True, rename=None, tag_field="type", tag="disabled"):
    wire_name: ClassVar[str] = "ExecPermissionProfile::Disabled"


class External(Params, frozen=True, rename=None, tag_field="type", tag="external"):
    wire_name: ClassVar[str] = "ExecPermissionProfile::External"
    network: Network


class PolicyContext(Params, frozen=True):
    wire_name: ClassVar[str] = "WireFileSystemPolicyContext"
    omissible: ClassVar[tuple[str, ...]] = ("cwd",)
    cwd: FileUri | None = None
    workspace_roots: list[FileUri] = msgspec.field(default_factory=list)


class Sandbox(Params, frozen=True, kw_only=True):
    """The requested confinement; without `managed` permissions nothing is confined."""

    wire_name: ClassVar[str] = "WireFileSystemSandboxContext"
    omissible: ClassVar[tuple[str, ...]] = (
        *("cwd", "policy_context", "user_home_dir", "temporary_directories"),
        "windows_sandbox_proxy_settings_mode",
    )
    permissions: Managed | Disabled | External
    sandbox_override: Literal[
        "noOverride", "escalatedSandboxWithRestrictions", "bypassSandboxFirstAttempt"
    ] = "noOverride"
    cwd: FileUri | None = None
    policy_context: PolicyContext | None = None
    workspace_roots: list[FileUri] = msgspec.field(default_factory=list)
    user_home_dir: FileUri | None = None
    temporary_directories: list[FileUri] | None = None
    windows_sandbox_level: Literal["disabled", "restricted-token", "elevated", "mxc"]
    windows_sandbox_proxy_settings_mode: Literal["reconcile", "preserve"] | None = None
    use_legacy_landlock: bool = False

    @property
    def policy_cwd(self) -> FileUri | None:
        """The directory that relative entries belong to; None: that of the process."""
        context = self.policy_context
        return self.cwd if context is None or context.cwd is None else context.cwd

    @property
    def policy_roots(self) -> list[FileUri]:
        """The project roots; those beside a context do not count, even if it has none."""
        return (self.policy_context or self).workspace_roots


class Confinable(Params, frozen=True, kw_only=True):
    """Params with a `sandbox`, and a `user` whose rights apply instead of the server's."""

    named_only: ClassVar[tuple[str, ...]] = ("user",)

    prepare: ClassVar[Prepare] = staticmethod(legacy_sandbox.prepare)
    user: str | None = None  # extension: a name or a number


class Denial(Result, frozen=True, omit_defaults=True):
    """The operation that a confined process was denied, as far as known; for people.

    If it is not certain which one was denied, `candidates` has them all, the likeliest first.
    """

    text: str | None  # the line of output that reports it
    path: str | None
    operation: Operation | None
    rule: str | None  # of the policy; None if no rule is known to forbid it
    candidates: tuple[Denial, ...] = ()  # extension: none or several, which have none


def check_process_paths(sandbox: Sandbox, cwd: PathUri) -> None:
    """Raise InvalidParams for a path of another system, in the order of the reference."""
    _check_native(sandbox.policy_cwd or cwd, "invalid sandbox policy cwd: ")
    for root in sandbox.policy_roots:
        _check_native(root, "invalid sandbox workspace root: ")
    permissions = sandbox.permissions
    if isinstance(permissions, Managed) and isinstance(permissions.file_system, Restricted):
        for entry in permissions.file_system.entries:
            if isinstance(entry.path, ExactPath):
                _check_native(entry.path.path, "invalid sandbox permission path: ")
    _check_native(cwd, f"command cwd URI `{cwd}` is not valid on this host: ")


def _check_native(path: PathUri, prefix: str) -> None:
    try:
        path.native()
    except RpcError as error:
        text = f"failed to prepare process sandbox: {prefix}{error.message}"
        raise InvalidParams(text) from None


# Named policies as the `sandbox` object of a request.
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
