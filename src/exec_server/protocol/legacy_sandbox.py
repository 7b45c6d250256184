"""Legacy forms of the `sandbox` object: refused, or translated into the current form.

By default only the current form is accepted, as by the reference. With `--legacy-sandbox-forms`
every legacy form with a certain meaning is translated, and the others are refused with the
reason: a guessed policy could confine less, or more, than the client meant. The forms, oldest
first:

- `sandboxPolicy` beside the other params: {"type":"read-only"} and so on
- `sandbox.sandboxPolicy` with `sandboxPolicyCwd`
- `sandbox.permissions` without a `type`
- native paths instead of URIs

The first is never ignored, even without the flag: the client would expect to be confined.
"""

from __future__ import annotations

from typing import Any, Final

from exec_server.errors import InvalidParams
from exec_server.protocol.paths import path_to_uri

_Json = dict[str, Any]


_ENTRIES_OF_ROOT: Final = [
    {"path": {"type": "special", "value": {"kind": "root"}}, "access": "read"}
]
# The names of legacy policies in lower case, without separators.
_READ_ONLY: Final = "readonly"
_WORKSPACE_WRITE: Final = "workspacewrite"
_FULL_ACCESS: Final = "dangerfullaccess"
_EXTERNAL: Final = "externalsandbox"


def prepare(params: _Json, accept: bool) -> _Json:
    """The params of a request, with legacy forms translated or refused; raises InvalidParams."""
    if params.get("sandboxPolicy") is not None:
        if not accept:
            raise InvalidParams(
                "`sandboxPolicy` is obsolete and confines nothing: put the policy into `sandbox`"
            )
        params = _without_outer_policy(params)
    sandbox = params.get("sandbox")
    if accept and isinstance(sandbox, dict):
        return params | {"sandbox": translate(sandbox)}
    return params


def _without_outer_policy(params: _Json) -> _Json:
    if params.get("sandbox") is not None:
        raise InvalidParams("`sandboxPolicy` and `sandbox` exclude each other")
    rest = {name: value for name, value in params.items() if name != "sandboxPolicy"}
    return rest | {"sandbox": {"sandboxPolicy": params["sandboxPolicy"]}}


def translate(sandbox: _Json) -> _Json:
    """The current form of a `sandbox` object; raises InvalidParams if that is uncertain.

    Errors that the current form has as well are left to the decoder, which has the texts.
    """
    translated = dict(sandbox)
    permissions = translated.get("permissions")
    if translated.get("sandboxPolicy") is not None:
        translated = _from_policy(translated)
    elif isinstance(permissions, dict) and "type" not in permissions and permissions:
        translated["permissions"] = _from_untagged(permissions)
        translated.setdefault("windowsSandboxLevel", "disabled")
    return _with_uris(translated)


# ---- sandbox.sandboxPolicy ------------------------------------------------------------------


def _from_policy(sandbox: _Json) -> _Json:
    policy, cwd = sandbox.pop("sandboxPolicy"), sandbox.pop("sandboxPolicyCwd", None)
    _exclude(
        sandbox,
        "sandboxPolicy",
        *("permissions", "workspaceRoots", "policyContext"),
        *("fileSystemSandboxPolicy", "additionalPermissions"),
    )
    if isinstance(policy, str):
        policy = {"type": policy}
    if not isinstance(policy, dict) or not isinstance(policy.get("type"), str):
        raise InvalidParams("`sandboxPolicy` has no `type`")
    members = {_snake(name): value for name, value in policy.items() if name != "type"}
    name = policy["type"].replace("-", "").replace("_", "").lower()
    sandbox["permissions"] = _permissions(name, policy["type"], members)
    if name == _WORKSPACE_WRITE:
        if cwd is None:
            raise InvalidParams("`sandboxPolicy` needs `sandboxPolicyCwd` to be a workspace")
        sandbox["workspaceRoots"] = [cwd]
    if members:
        raise InvalidParams(f"`sandboxPolicy` has a member of unknown meaning: `{min(members)}`")
    if cwd is not None:
        sandbox["cwd"] = cwd
    sandbox.setdefault("windowsSandboxLevel", "disabled")
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
    if not _flag(members, "exclude_slash_tmp"):
        kinds.append("slash_tmp")
    if not _flag(members, "exclude_tmpdir_env_var"):
        kinds.append("tmpdir")
    paths: list[_Json] = [{"type": "special", "value": {"kind": kind}} for kind in kinds]
    paths += [{"type": "path", "path": root} for root in _list(members, "writable_roots")]
    return [{"path": path, "access": "write"} for path in paths]


# ---- sandbox.permissions without a type -----------------------------------------------------


def _from_untagged(permissions: _Json) -> _Json:
    rest = dict(permissions)
    file_system, network = rest.pop("file_system", None), rest.pop("network", None)
    if not isinstance(file_system, dict):
        raise InvalidParams("`permissions` without `type` need a `file_system`")
    network = {} if network is None else network
    if not isinstance(network, dict):
        raise InvalidParams("`network` of `permissions` without `type` must be an object")
    network = dict(network)
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
    unknown = [*rest, *network, *translated.keys() - {"entries", "glob_scan_max_depth"}]
    if unknown:
        raise InvalidParams(f"`permissions` have a member of unknown meaning: `{min(unknown)}`")
    return _managed(translated, is_online=is_online)


# ---- native paths ---------------------------------------------------------------------------


def _with_uris(sandbox: _Json) -> _Json:
    translated = _with_directory_uris(sandbox)
    if isinstance(translated.get("policyContext"), dict):
        translated["policyContext"] = _with_directory_uris(translated["policyContext"])
    permissions = translated.get("permissions")
    if isinstance(permissions, dict):
        file_system = permissions.get("file_system")
        if isinstance(file_system, dict) and isinstance(file_system.get("entries"), list):
            entries = [_with_entry_uri(entry) for entry in file_system["entries"]]
            file_system = file_system | {"entries": entries}
            translated["permissions"] = permissions | {"file_system": file_system}
    return translated


def _with_directory_uris(value: _Json) -> _Json:
    translated = dict(value)
    for name in ("cwd", "userHomeDir"):
        if name in translated:
            translated[name] = _uri(translated[name])
    for name in ("workspaceRoots", "temporaryDirectories"):
        if isinstance(translated.get(name), list):
            translated[name] = [_uri(path) for path in translated[name]]
    return translated


def _with_entry_uri(entry: object) -> object:
    path = entry.get("path") if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or not isinstance(path, dict) or path.get("type") != "path":
        return entry
    return entry | {"path": path | {"path": _uri(path.get("path"))}}


def _uri(value: object) -> object:
    return path_to_uri(value) if isinstance(value, str) and value[:1] == "/" else value


# ---- members --------------------------------------------------------------------------------


def _managed(file_system: _Json, *, is_online: bool) -> _Json:
    return {
        "type": "managed",
        "file_system": {"type": "restricted"} | file_system,
        "network": "enabled" if is_online else "restricted",
    }


def _exclude(sandbox: _Json, name: str, *others: str) -> None:
    for other in others:
        if sandbox.get(other) is not None:
            raise InvalidParams(f"`{name}` and `{other}` exclude each other")


def _flag(members: _Json, name: str) -> bool:
    """Remove a boolean from the members; absent and null are false."""
    value = members.pop(name, None)
    if value is not None and type(value) is not bool:
        raise InvalidParams(f"`{name}` of a legacy sandbox form must be a boolean")
    return bool(value)


def _list(members: _Json, name: str) -> list[Any]:
    """Remove a list from the members; absent and null are empty."""
    value = members.pop(name, None)
    if value is not None and not isinstance(value, list):
        raise InvalidParams(f"`{name}` of a legacy sandbox form must be a list")
    return value or []


def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)
