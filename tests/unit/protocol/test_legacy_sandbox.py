"""Older forms of the sandbox: what they become, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.errors import InvalidParams
from exec_server.protocol.decoding import decode
from exec_server.protocol.files import GetMetadataParams
from exec_server.protocol.legacy_sandbox import prepare, translate
from exec_server.protocol.sandbox import Disabled, Sandbox

Json = dict[str, Any]

LEVEL = {"windowsSandboxLevel": "disabled"}
ROOT = {"path": {"type": "special", "value": {"kind": "root"}}, "access": "read"}


def writable(kind: str) -> Json:
    return {"path": {"type": "special", "value": {"kind": kind}}, "access": "write"}


def exact(path: str, access: str) -> Json:
    return {"path": {"type": "path", "path": path}, "access": access}


def managed(*entries: Json, network: str = "restricted") -> Json:
    file_system = {"type": "restricted", "entries": list(entries)}
    return {"type": "managed", "file_system": file_system, "network": network}


READ_ONLY = {"permissions": managed(ROOT)} | LEVEL


@pytest.mark.parametrize(
    "policy",
    [
        {"type": "read-only"},
        {"type": "ReadOnly"},
        {"type": "readOnly"},
        {"type": "read_only", "network_access": False},
        {"type": "read-only", "networkAccess": None},
        "read-only",
        "ReadOnly",
    ],
)
def test_read_only(policy: object) -> None:
    assert translate({"sandboxPolicy": policy}) == READ_ONLY


def test_read_only_with_network_and_members_that_are_still_known() -> None:
    sandbox = {
        "sandboxPolicy": {"type": "read-only", "network_access": True},
        "sandboxPolicyCwd": "/w",
        "useLegacyLandlock": False,
        "windowsSandboxLevel": "elevated",
    }
    assert translate(sandbox) == {
        "permissions": managed(ROOT, network="enabled"),
        "cwd": "file:///w",
        "useLegacyLandlock": False,
        "windowsSandboxLevel": "elevated",
    }


@pytest.mark.parametrize("name", ["workspace-write", "WorkspaceWrite", "workspaceWrite"])
def test_workspace_write(name: str) -> None:
    sandbox = {"sandboxPolicy": {"type": name}, "sandboxPolicyCwd": "/w s"}
    places = [writable(kind) for kind in ("project_roots", "slash_tmp", "tmpdir")]
    assert translate(sandbox) == {
        "permissions": managed(ROOT, *places),
        "cwd": "file:///w%20s",
        "workspaceRoots": ["file:///w%20s"],
        **LEVEL,
    }


@pytest.mark.parametrize("camel", [False, True])
def test_workspace_write_with_everything(camel: bool) -> None:
    policy = {
        "writable_roots": ["/a", "file:///b"],
        "network_access": True,
        "exclude_tmpdir_env_var": True,
        "exclude_slash_tmp": True,
    }
    if camel:
        policy = {
            "writableRoots": ["/a", "file:///b"],
            "networkAccess": True,
            "excludeTmpdirEnvVar": True,
            "excludeSlashTmp": True,
        }
    sandbox = {
        "sandboxPolicy": {"type": "workspace-write"} | policy,
        "sandboxPolicyCwd": "file:///w",
    }
    entries = [ROOT, writable("project_roots")]
    entries += [exact("file:///a", "write"), exact("file:///b", "write")]
    assert translate(sandbox)["permissions"] == managed(*entries, network="enabled")


@pytest.mark.parametrize(
    ("policy", "permissions"),
    [
        ({"type": "danger-full-access"}, {"type": "disabled"}),
        ("DangerFullAccess", {"type": "disabled"}),
        ({"type": "external-sandbox"}, {"type": "external", "network": "restricted"}),
        (
            {"type": "external-sandbox", "network_access": "enabled"},
            {"type": "external", "network": "enabled"},
        ),
    ],
)
def test_policies_that_confine_no_files(policy: object, permissions: Json) -> None:
    assert translate({"sandboxPolicy": policy}) == {"permissions": permissions} | LEVEL


UNTAGGED = [
    ({"file_system": {"entries": [ROOT]}}, managed(ROOT)),
    ({"file_system": {"entries": [ROOT]}, "network": {"enabled": False}}, managed(ROOT)),
    ({"file_system": {"entries": []}, "network": None}, managed()),
    (
        {"file_system": {"entries": [exact("/a", "deny")]}, "network": {"enabled": True}},
        managed(exact("file:///a", "deny"), network="enabled"),
    ),
    (
        {"file_system": {"read": ["/r"], "write": ["/w", "file:///x"]}},
        managed(
            exact("file:///r", "read"), exact("file:///w", "write"), exact("file:///x", "write")
        ),
    ),
    (
        {"file_system": {"read": ["/r"], "write": None}, "network": {}},
        managed(exact("file:///r", "read")),
    ),
]


@pytest.mark.parametrize(("permissions", "expected"), UNTAGGED)
def test_permissions_without_a_type(permissions: Json, expected: Json) -> None:
    assert translate({"permissions": permissions}) == {"permissions": expected} | LEVEL


def test_depth_of_globs_is_kept() -> None:
    permissions = {"file_system": {"entries": [ROOT], "glob_scan_max_depth": 3}}
    found = translate({"permissions": permissions})["permissions"]
    assert found["file_system"] == {
        "type": "restricted",
        "entries": [ROOT],
        "glob_scan_max_depth": 3,
    }


def test_native_paths_become_uris() -> None:
    sandbox = {
        "permissions": managed(exact("/a b", "write"), ROOT),
        "cwd": "/c",
        "workspaceRoots": ["/w", "file:///v"],
        "userHomeDir": "/h",
        "temporaryDirectories": ["/t"],
        "policyContext": {"cwd": "/p", "workspaceRoots": ["/q"]},
        **LEVEL,
    }
    assert translate(sandbox) == {
        "permissions": managed(exact("file:///a%20b", "write"), ROOT),
        "cwd": "file:///c",
        "workspaceRoots": ["file:///w", "file:///v"],
        "userHomeDir": "file:///h",
        "temporaryDirectories": ["file:///t"],
        "policyContext": {"cwd": "file:///p", "workspaceRoots": ["file:///q"]},
        **LEVEL,
    }


def test_todays_form_stays_as_it_is_and_nothing_is_changed_in_place() -> None:
    sandbox = {"permissions": managed(ROOT), "cwd": "/c", "zz": 1} | LEVEL
    assert translate(sandbox) == sandbox | {"cwd": "file:///c"}
    assert sandbox["cwd"] == "/c"
    older = {"sandboxPolicy": {"type": "workspace-write"}, "sandboxPolicyCwd": "/w"}
    translate(older)
    assert older == {"sandboxPolicy": {"type": "workspace-write"}, "sandboxPolicyCwd": "/w"}


UNCERTAIN: list[tuple[Json, str]] = [
    ({"sandboxPolicy": {}}, "`sandboxPolicy` has no `type`"),
    ({"sandboxPolicy": 5}, "`sandboxPolicy` has no `type`"),
    ({"sandboxPolicy": {"type": "strict"}}, "unknown `sandboxPolicy`: `strict`"),
    (
        {"sandboxPolicy": {"type": "workspace-write"}},
        "`sandboxPolicy` needs `sandboxPolicyCwd` to be a workspace",
    ),
    (
        {"sandboxPolicy": {"type": "read-only", "access": {"type": "restricted"}}},
        "`sandboxPolicy` has a member of unknown meaning: `access`",
    ),
    (
        {"sandboxPolicy": {"type": "danger-full-access", "network_access": True}},
        "`sandboxPolicy` has a member of unknown meaning: `network_access`",
    ),
    (
        {"sandboxPolicy": {"type": "read-only", "network_access": "enabled"}},
        "`network_access` of a legacy sandbox form must be a boolean",
    ),
    (
        {
            "sandboxPolicy": {"type": "workspace-write", "writable_roots": "/a"},
            "sandboxPolicyCwd": "/w",
        },
        "`writable_roots` of a legacy sandbox form must be a list",
    ),
    (
        {"sandboxPolicy": "read-only", "permissions": {"type": "disabled"}},
        "`sandboxPolicy` and `permissions` exclude each other",
    ),
    (
        {"sandboxPolicy": "read-only", "additionalPermissions": {}},
        "`sandboxPolicy` and `additionalPermissions` exclude each other",
    ),
    (
        {"sandboxPolicy": "read-only", "fileSystemSandboxPolicy": {}},
        "`sandboxPolicy` and `fileSystemSandboxPolicy` exclude each other",
    ),
    (
        {"permissions": {"network": {"enabled": True}}},
        "`permissions` without `type` need a `file_system`",
    ),
    (
        {"permissions": {"file_system": {}}},
        "`file_system` has neither `entries` nor `read` or `write`",
    ),
    (
        {"permissions": {"file_system": {"entries": [], "read": []}}},
        "`permissions` have a member of unknown meaning: `read`",
    ),
    (
        {"permissions": {"file_system": {"entries": []}, "macos": {}}},
        "`permissions` have a member of unknown meaning: `macos`",
    ),
    (
        {"permissions": {"file_system": {"entries": []}, "network": "enabled"}},
        "`network` of `permissions` without `type` must be an object",
    ),
    (
        {"permissions": {"file_system": {"entries": []}, "network": {"enabled": 1}}},
        "`enabled` of a legacy sandbox form must be a boolean",
    ),
]


@pytest.mark.parametrize(("sandbox", "message"), UNCERTAIN)
def test_uncertain_meaning_is_refused(sandbox: Json, message: str) -> None:
    with pytest.raises(InvalidParams) as caught:
        translate(sandbox)
    assert caught.value.message == message


@pytest.mark.parametrize(
    "sandbox",
    [
        *({"sandboxPolicy": name} for name in ("ReadOnly", "danger-full-access")),
        {"sandboxPolicy": {"type": "WorkspaceWrite"}, "sandboxPolicyCwd": "/w"},
        *({"permissions": permissions} for permissions, _ in UNTAGGED),
    ],
)
def test_translations_are_understood(sandbox: Json) -> None:
    assert isinstance(decode(Sandbox, translate(sandbox)), Sandbox)


@pytest.mark.parametrize(
    "sandbox",
    [
        *({}, {"permissions": {}}, {"permissions": 5}, {"permissions": []}),
        {"permissions": managed(exact("tmp", "read")), "cwd": 5} | LEVEL,
        {"permissions": {"type": "managed", "file_system": {"entries": [5, {}]}}},
        {"sandboxPolicy": None},
    ],
)
def test_mistakes_of_today_are_left_to_the_decoder(sandbox: Json) -> None:
    assert translate(sandbox) == sandbox
    with pytest.raises(InvalidParams):
        decode(Sandbox, sandbox)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["/a", "read-only", "path", ""]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(
                [
                    "type",
                    "permissions",
                    "sandboxPolicy",
                    "sandboxPolicyCwd",
                    "file_system",
                    "entries",
                    "read",
                    "path",
                    "network",
                    "cwd",
                    "workspaceRoots",
                    "policyContext",
                    "enabled",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["permissions", "sandboxPolicy", "cwd"]), VALUES))
def test_any_object_is_translated_or_refused(sandbox: Json) -> None:
    try:
        assert isinstance(translate(sandbox), dict)
    except InvalidParams:
        pass


# ---- params ---------------------------------------------------------------------------------

OBSOLETE = "`sandboxPolicy` is obsolete and confines nothing: put the policy into `sandbox`"


@pytest.mark.parametrize("policy", [{"type": "read-only"}, {"type": "danger-full-access"}, 5, ""])
def test_policy_beside_the_params_is_never_ignored(policy: object) -> None:
    with pytest.raises(InvalidParams) as caught:
        prepare({"path": "/a", "sandboxPolicy": policy}, False)
    assert caught.value.message == OBSOLETE


def test_without_the_switch_everything_else_is_left_alone() -> None:
    for sandbox in (None, {"sandboxPolicy": "read-only"}, {"cwd": "/c"}, 5):
        params = {"path": "/a", "sandbox": sandbox, "sandboxPolicy": None}
        assert prepare(params, False) is params


def test_switch_translates_the_sandbox_of_params() -> None:
    params: dict[str, Any] = {"path": "/a", "sandbox": {"sandboxPolicy": "read-only"}}
    assert prepare(params, True) == {"path": "/a", "sandbox": READ_ONLY}
    odd: list[Any] = [None, 5, "x", []]
    for sandbox in odd:
        params = {"path": "/a", "sandbox": sandbox}
        assert prepare(params, True) == params


def test_switch_translates_a_policy_beside_the_params() -> None:
    params = {"path": "/a", "sandbox": None, "sandboxPolicy": {"type": "read-only"}}
    assert prepare(params, True) == {"path": "/a", "sandbox": READ_ONLY}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"sandboxPolicy": "read-only", "sandbox": READ_ONLY},
            "`sandboxPolicy` and `sandbox` exclude each other",
        ),
        (
            # Which directory was meant, nobody can tell.
            {"sandboxPolicy": {"type": "workspace-write"}},
            "`sandboxPolicy` needs `sandboxPolicyCwd` to be a workspace",
        ),
        ({"sandboxPolicy": 5}, "`sandboxPolicy` has no `type`"),
    ],
)
def test_switch_refuses_an_uncertain_policy_beside_the_params(params: Json, message: str) -> None:
    with pytest.raises(InvalidParams) as caught:
        prepare(params, True)
    assert caught.value.message == message


def test_flag_of_decode_translates() -> None:
    params = {"path": "/a", "sandboxPolicy": "danger-full-access"}
    decoded = decode(GetMetadataParams, params, True)
    assert decoded.sandbox is not None
    assert decoded.sandbox.permissions == Disabled()
    with pytest.raises(InvalidParams):
        decode(GetMetadataParams, params)
