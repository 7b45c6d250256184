"""The `sandbox` objects of earlier clients, translated into today's form or refused.

The forms were recorded from the clients themselves, and their meaning from the servers of the
same versions. The oldest first:

- 0.120: `sandboxPolicy` beside the native path of a file operation; the workspace is the server's
  directory. Its client sends none, but its server obeys one.
- 0.121: `sandboxPolicy`, such as {"type": "read-only"}; the workspace is the server's directory
- 0.122 and 0.123: the same with `sandboxPolicyCwd`, the workspace
- 0.124: `permissions` without a `type`
- 0.124 to 0.140: native paths instead of URIs in `cwd` and entries. Up to 0.130 the entries name
  the project roots, up to 0.125 as `current_working_directory`; both mean `cwd`
- 0.142 to 0.144: `process/start` names the project roots without `workspaceRoots`; again `cwd`

A form without a certain meaning is refused with the reason: a guessed policy could confine less
than the client meant. That is why the three after the first are translated only beside a member
that all clients of that time send and today's do not (`_MARK`), and why a `sandboxPolicy` beside
the other params is refused if it does not confine, beside URIs, and for commands.
"""

from __future__ import annotations

from typing import Any, Final

from exec_server.errors import InvalidParams
from exec_server.protocol.paths import path_to_uri

_Json = dict[str, Any]

# A member that every client from 0.121 to 0.153 sends and that has no meaning outside Windows.
_MARK: Final = "windowsSandboxPrivateDesktop"
# Members that came with or after `workspaceRoots`, which made `cwd` cease to be a project root.
_LATER_MEMBERS: Final = (
    *("workspaceRoots", "policyContext", "userHomeDir", "temporaryDirectories"),
    "windowsSandboxProxySettingsMode",
)
# Members that a `sandboxPolicy` excludes.
_NEWER_FORMS: Final = (
    *("permissions", "cwd", "workspaceRoots", "policyContext", "fileSystemSandboxPolicy"),
    "additionalPermissions",
)
_ENTRIES_OF_ROOT: Final = [
    {"path": {"type": "special", "value": {"kind": "root"}}, "access": "read"}
]
_NO_WINDOWS: Final = {"windowsSandboxLevel": "disabled"}  # a member that must not be missing
# The names of the policies in lower case, without separators.
_READ_ONLY: Final = "readonly"
_WORKSPACE_WRITE: Final = "workspacewrite"
_FULL_ACCESS: Final = "dangerfullaccess"
_EXTERNAL: Final = "externalsandbox"


def prepare(params: _Json, server_cwd: str | None) -> _Json:
    """The params with a `sandbox` in today's form; raises InvalidParams. `server_cwd` is a URI."""
    if params.get("sandboxPolicy") is not None:
        return _with_policy_beside(params, server_cwd)
    sandbox = params.get("sandbox")
    if not isinstance(sandbox, dict):
        return params
    translated = translate(sandbox, server_cwd, for_process="argv" in params)
    return params if translated is sandbox else params | {"sandbox": translated}


def translate(sandbox: _Json, server_cwd: str | None, *, for_process: bool) -> _Json:
    """Today's form of a `sandbox` object; raises InvalidParams if that is uncertain."""
    if _MARK in sandbox:
        permissions = sandbox.get("permissions")
        if sandbox.get("sandboxPolicy") is not None:
            return _with_uris(_from_policy(dict(sandbox), server_cwd))
        if isinstance(permissions, dict) and "type" not in permissions and permissions:
            sandbox = sandbox | {"permissions": _from_untagged(permissions)}
    return _with_uris(_with_project_roots(sandbox, for_process=for_process))


def _with_policy_beside(params: _Json, server_cwd: str | None) -> _Json:
    """Translate the policy of a file operation of 0.120; raises InvalidParams for others."""
    policy = params["sandboxPolicy"]
    kind = policy.get("type") if isinstance(policy, dict) else None
    is_native = any(_is_native(params.get(name)) for name in ("path", "sourcePath"))
    # Later clients send a `sandbox`, null or not.
    if not is_native or "argv" in params or "sandbox" in params:
        raise InvalidParams(
            "`sandboxPolicy` is obsolete and confines nothing: put the policy into `sandbox`"
        )
    if kind not in ("read-only", "workspace-write"):
        raise InvalidParams("`sandboxPolicy` beside the params must be one that confines")
    sandbox = _from_policy({"sandboxPolicy": policy}, server_cwd) | _NO_WINDOWS
    others = {name: value for name, value in params.items() if name != "sandboxPolicy"}
    return others | {"sandbox": _with_uris(sandbox)}


def _from_policy(sandbox: _Json, server_cwd: str | None) -> _Json:
    policy, cwd = sandbox.pop("sandboxPolicy"), sandbox.pop("sandboxPolicyCwd", None)
    for other in _NEWER_FORMS:
        if sandbox.get(other) is not None:
            raise InvalidParams(f"`sandboxPolicy` and `{other}` exclude each other")
    if isinstance(policy, str):
        policy = {"type": policy}
    if not isinstance(policy, dict) or not isinstance(policy.get("type"), str):
        raise InvalidParams("`sandboxPolicy` has no `type`")
    members = {_snake(name): value for name, value in policy.items() if name != "type"}
    if len(members) < len(policy) - 1:
        raise InvalidParams("`sandboxPolicy` has a member in two spellings")
    name = policy["type"].replace("-", "").replace("_", "").lower()
    sandbox["permissions"] = _permissions(name, policy["type"], members)
    if members:
        raise InvalidParams(f"`sandboxPolicy` has a member of unknown meaning: `{min(members)}`")
    if name == _WORKSPACE_WRITE and cwd is None:
        # The workspace of a client that names none is, in 0.121, the directory of its server. The
        # root of the file system is refused: such a policy would confine nothing.
        if server_cwd is None or server_cwd == "file:///":
            raise InvalidParams(
                "`sandboxPolicy` needs `sandboxPolicyCwd`, or a server that was started in a "
                "workspace"
            )
        cwd = server_cwd
    if cwd is not None:
        sandbox["cwd"] = cwd
        sandbox["workspaceRoots"] = [cwd]
    return sandbox


def _permissions(name: str, spelling: str, members: _Json) -> _Json:
    """The permissions of a policy; removes the known members from `members`."""
    if name == _FULL_ACCESS:
        return {"type": "disabled"}
    if name == _EXTERNAL:
        return {"type": "external", "network": members.pop("network_access", "restricted")}
    entries = list(_ENTRIES_OF_ROOT)
    if name == _WORKSPACE_WRITE:
        entries += _workspace_entries(members)
    elif name != _READ_ONLY:
        raise InvalidParams(f"unknown `sandboxPolicy`: `{spelling}`")
    return _managed({"entries": entries}, is_online=_flag(members, "network_access"))


def _workspace_entries(members: _Json) -> list[_Json]:
    kinds = ["project_roots"]
    for name, kind in (("exclude_slash_tmp", "slash_tmp"), ("exclude_tmpdir_env_var", "tmpdir")):
        if members.get(name, False) is None:
            raise InvalidParams(f"`{name}` of a legacy sandbox form must be a boolean")
        if not _flag(members, name):
            kinds.append(kind)
    paths: list[_Json] = [{"type": "special", "value": {"kind": kind}} for kind in kinds]
    paths += [{"type": "path", "path": root} for root in _list(members, "writable_roots")]
    return [{"path": path, "access": "write"} for path in paths]


def _from_untagged(permissions: _Json) -> _Json:
    others = dict(permissions)
    file_system, network = others.pop("file_system", None), others.pop("network", None)
    if not isinstance(file_system, dict):
        raise InvalidParams("`permissions` without `type` need a `file_system`")
    if network is not None and not isinstance(network, dict):
        raise InvalidParams("`network` of `permissions` without `type` must be an object")
    network = dict(network or {})
    is_online = _flag(network, "enabled")
    translated = dict(file_system)
    if "entries" not in translated:
        accesses = ("read", "write")
        if not any(access in translated for access in accesses):
            raise InvalidParams("`file_system` has neither `entries` nor `read` or `write`")
        translated["entries"] = [
            {"path": {"type": "path", "path": path}, "access": access}
            for access in accesses
            for path in _list(translated, access)
        ]
    unknown = [*others, *network, *translated.keys() - {"entries", "glob_scan_max_depth"}]
    if unknown:
        raise InvalidParams(f"`permissions` have a member of unknown meaning: `{min(unknown)}`")
    return _managed(translated, is_online=is_online)


def _with_project_roots(sandbox: _Json, *, for_process: bool) -> _Json:
    """Name the project root of a client that knew no other one than `cwd`.

    A native `cwd` is a sign of such a client. Today's clients send a URI, and then `cwd` grants
    nothing: a client that names no `workspaceRoots` has none.
    """
    cwd = sandbox.get("cwd")
    is_native = _is_native(cwd)
    if not is_native and not (for_process and _MARK in sandbox and isinstance(cwd, str)):
        return sandbox  # fast path: today's form
    later = [name for name in _LATER_MEMBERS if sandbox.get(name) is not None]
    if not later:
        return sandbox | {"workspaceRoots": [cwd]}
    if is_native:
        raise InvalidParams(f"a native `cwd` and `{later[0]}` exclude each other")
    return sandbox


def _with_uris(sandbox: _Json) -> _Json:
    """Convert native paths in `cwd`, its roots and entries: no version sends them elsewhere."""
    if _is_native(sandbox.get("cwd")):
        uri = path_to_uri(sandbox["cwd"])
        sandbox = sandbox | {"cwd": uri, "workspaceRoots": [uri]}
    permissions = sandbox.get("permissions")
    file_system = permissions.get("file_system") if isinstance(permissions, dict) else None
    entries = file_system.get("entries") if isinstance(file_system, dict) else None
    if not isinstance(permissions, dict) or not isinstance(file_system, dict):
        return sandbox
    if not isinstance(entries, list):
        return sandbox
    if not any(map(_has_native_path, entries)):
        return sandbox
    file_system = file_system | {"entries": [_with_entry_uri(entry) for entry in entries]}
    return sandbox | {"permissions": permissions | {"file_system": file_system}}


def _with_entry_uri(entry: Any) -> Any:
    if not _has_native_path(entry):
        return entry
    return entry | {"path": entry["path"] | {"path": path_to_uri(entry["path"]["path"])}}


def _has_native_path(entry: object) -> bool:
    path = entry.get("path") if isinstance(entry, dict) else None
    if not isinstance(path, dict) or path.get("type") != "path":
        return False
    return _is_native(path.get("path"))


def _is_native(value: object) -> bool:
    return isinstance(value, str) and value[:1] == "/"


def _managed(file_system: _Json, *, is_online: bool) -> _Json:
    return {
        "type": "managed",
        "file_system": {"type": "restricted"} | file_system,
        "network": "enabled" if is_online else "restricted",
    }


def _flag(members: _Json, name: str) -> bool:
    value = members.pop(name, None)
    if value is not None and type(value) is not bool:
        raise InvalidParams(f"`{name}` of a legacy sandbox form must be a boolean")
    return bool(value)


def _list(members: _Json, name: str) -> list[Any]:
    value = members.pop(name, None)
    if value is not None and not isinstance(value, list):
        raise InvalidParams(f"`{name}` of a legacy sandbox form must be a list")
    return value or []


def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)
