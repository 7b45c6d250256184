"""The `sandbox` objects of earlier clients: what they become, and what is refused.

The conformance case `sandbox_versions` plays recorded objects of each version against a server.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.errors import InvalidParams
from exec_server.protocol import legacy_sandbox
from exec_server.protocol.decoding import decode
from exec_server.protocol.files import GetMetadataParams
from exec_server.protocol.legacy_sandbox import prepare
from exec_server.protocol.sandbox import Disabled, Managed, Sandbox

Json = dict[str, Any]

LEVEL = {"windowsSandboxLevel": "disabled"}
# What every client of the translated versions sends beside its policy.
OLD = LEVEL | {"windowsSandboxPrivateDesktop": True, "useLegacyLandlock": False}
ROOT = {"path": {"type": "special", "value": {"kind": "root"}}, "access": "read"}


def special(kind: str, access: str = "write", **members: str) -> Json:
    return {"path": {"type": "special", "value": {"kind": kind} | members}, "access": access}


def exact(path: str, access: str) -> Json:
    return {"path": {"type": "path", "path": path}, "access": access}


def managed(*entries: Json, network: str = "restricted") -> Json:
    file_system = {"type": "restricted", "entries": list(entries)}
    return {"type": "managed", "file_system": file_system, "network": network}


def translate(sandbox: Json, *, cwd: str | None = "file:///s", process: bool = False) -> Json:
    return legacy_sandbox.translate(sandbox, cwd, for_process=process)


def refusal(sandbox: Json, *, cwd: str | None = "file:///s", process: bool = False) -> str:
    with pytest.raises(InvalidParams) as caught:
        translate(sandbox, cwd=cwd, process=process)
    return caught.value.message


# ---- sandboxPolicy beside the params: 0.120 -------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "entries", "network"),
    [
        ({"type": "read-only"}, [ROOT], "restricted"),
        ({"type": "read-only", "network_access": True}, [ROOT], "enabled"),
        (
            {"type": "workspace-write", "writable_roots": ["/o"], "exclude_slash_tmp": True},
            [ROOT, special("project_roots"), special("tmpdir"), exact("file:///o", "write")],
            "restricted",
        ),
    ],
)
def test_a_policy_beside_a_native_path(policy: Json, entries: list[Json], network: str) -> None:
    workspace = {"cwd": "file:///s", "workspaceRoots": ["file:///s"]}
    more = workspace if policy["type"] == "workspace-write" else {}
    sandbox = {"permissions": managed(*entries, network=network)} | LEVEL | more
    for place in ({"path": "/a"}, {"sourcePath": "/a", "destinationPath": "/b"}):
        given = place | {"sandboxPolicy": policy}
        assert prepare(given, "file:///s") == place | {"sandbox": sandbox}
    decoded = decode(GetMetadataParams, {"path": "/a", "sandboxPolicy": policy}, "file:///s")
    assert decoded.sandbox is not None
    assert isinstance(decoded.sandbox.permissions, Managed)


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ({"path": "file:///a"}, "`sandboxPolicy` is obsolete and confines nothing"),
        ({"path": "/a", "argv": ["x"]}, "`sandboxPolicy` is obsolete and confines nothing"),
        ({"path": "/a", "sandbox": LEVEL}, "`sandboxPolicy` is obsolete and confines nothing"),
        (
            {"path": "/a", "sandboxPolicy": {"type": "danger-full-access"}},
            "`sandboxPolicy` beside the params must be one that confines",
        ),
        (
            {"path": "/a", "sandboxPolicy": {"type": "external-sandbox"}},
            "`sandboxPolicy` beside the params must be one that confines",
        ),
        (
            {"path": "/a", "sandboxPolicy": "read-only"},
            "`sandboxPolicy` beside the params must be one that confines",
        ),
        (
            {"path": "/a", "sandboxPolicy": {"type": "read-only", "access": {}}},
            "`sandboxPolicy` has a member of unknown meaning: `access`",
        ),
    ],
)
def test_a_policy_beside_the_params_that_is_refused(members: Json, text: str) -> None:
    with pytest.raises(InvalidParams, match=text):
        prepare({"sandboxPolicy": {"type": "read-only"}} | members, "file:///s")


def test_a_policy_beside_the_params_needs_a_workspace() -> None:
    params = {"path": "/a", "sandboxPolicy": {"type": "workspace-write"}}
    with pytest.raises(InvalidParams, match="or a server that was started in a workspace"):
        prepare(params, "file:///")


# ---- sandboxPolicy: 0.121 to 0.123 ----------------------------------------------------------


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
    sandbox = {"sandboxPolicy": policy, "additionalPermissions": None} | OLD
    permissions = {"permissions": managed(ROOT), "additionalPermissions": None}
    assert translate(sandbox) == permissions | OLD


def test_read_only_with_network_and_members_that_are_still_known() -> None:
    sandbox = {
        "sandboxPolicy": {"type": "read-only", "network_access": True},
        "sandboxPolicyCwd": "/w",
        **OLD,
        "windowsSandboxLevel": "elevated",
    }
    assert translate(sandbox) == {
        "permissions": managed(ROOT, network="enabled"),
        "cwd": "file:///w",
        "workspaceRoots": ["file:///w"],
        **OLD,
        "windowsSandboxLevel": "elevated",
    }


@pytest.mark.parametrize("name", ["workspace-write", "WorkspaceWrite", "workspaceWrite"])
def test_workspace_write(name: str) -> None:
    sandbox = {"sandboxPolicy": {"type": name}, "sandboxPolicyCwd": "/w s"} | OLD
    places = [special(kind) for kind in ("project_roots", "slash_tmp", "tmpdir")]
    assert translate(sandbox) == {
        "permissions": managed(ROOT, *places),
        "cwd": "file:///w%20s",
        "workspaceRoots": ["file:///w%20s"],
        **OLD,
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
        **OLD,
    }
    entries = [ROOT, special("project_roots")]
    entries += [exact("file:///a", "write"), exact("file:///b", "write")]
    translated = translate(sandbox)
    assert translated["permissions"] == managed(*entries, network="enabled")
    assert translated["workspaceRoots"] == ["file:///w"]


def test_workspace_without_a_name_is_the_directory_of_the_server() -> None:
    sandbox = {"sandboxPolicy": {"type": "workspace-write"}} | OLD
    translated = translate(sandbox, cwd="file:///srv/a%20b")
    assert translated["cwd"] == "file:///srv/a%20b"
    assert translated["workspaceRoots"] == ["file:///srv/a%20b"]
    # A server without a directory, or in `/`, where the policy would confine nothing.
    for cwd in (None, "file:///"):
        assert refusal(sandbox, cwd=cwd) == (
            "`sandboxPolicy` needs `sandboxPolicyCwd`, or a server that was started in a workspace"
        )


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
    assert translate({"sandboxPolicy": policy} | OLD) == {"permissions": permissions} | OLD


# ---- permissions without a type: 0.124 ------------------------------------------------------

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
    assert translate({"permissions": permissions} | OLD) == {"permissions": expected} | OLD


def test_depth_of_globs_is_kept() -> None:
    permissions = {"file_system": {"entries": [ROOT], "glob_scan_max_depth": 3}}
    found = translate({"permissions": permissions} | OLD)["permissions"]
    assert found["file_system"] == {
        "type": "restricted",
        "entries": [ROOT],
        "glob_scan_max_depth": 3,
    }


@pytest.mark.parametrize(
    "sandbox",
    [
        {"sandboxPolicy": {"type": "read-only"}},
        {"sandboxPolicy": {"type": "workspace-write"}, "sandboxPolicyCwd": "/w"},
        {"permissions": {"type": "disabled"}, "sandboxPolicy": {"type": "read-only"}},
        *({"permissions": permissions} for permissions, _ in UNTAGGED[:3]),
    ],
)
def test_first_forms_without_the_mark_of_their_clients_are_left_to_the_decoder(
    sandbox: Json,
) -> None:
    assert translate(sandbox | LEVEL) == sandbox | LEVEL


# ---- native paths and project roots: 0.124 to 0.144 -----------------------------------------


def test_native_paths_become_uris() -> None:
    sandbox = {"permissions": managed(exact("/a b", "write"), ROOT), "cwd": "/c d"} | LEVEL
    assert translate(sandbox) == {
        "permissions": managed(exact("file:///a%20b", "write"), ROOT),
        "cwd": "file:///c%20d",
        "workspaceRoots": ["file:///c%20d"],
        **LEVEL,
    }


@pytest.mark.parametrize("process", [False, True])
@pytest.mark.parametrize("kind", ["current_working_directory", "project_roots"])
def test_native_cwd_is_the_project_root(kind: str, process: bool) -> None:
    entries = [ROOT, special(kind), special("project_roots", "read", subpath=".git")]
    sandbox = {"permissions": managed(*entries), "cwd": "/w"} | OLD
    translated = translate(sandbox, process=process)
    assert translated == sandbox | {"cwd": "file:///w", "workspaceRoots": ["file:///w"]}
    decoded = decode(Sandbox, translated)
    assert isinstance(decoded.permissions, Managed)
    assert [root.native() for root in decoded.workspace_roots] == ["/w"]


LATER = {
    "workspaceRoots": ["file:///v"],
    "policyContext": {},
    "userHomeDir": "file:///h",
    "temporaryDirectories": [],
    "windowsSandboxProxySettingsMode": "reconcile",
}


@pytest.mark.parametrize("name", LATER)
def test_native_cwd_excludes_members_of_later_versions(name: str) -> None:
    sandbox = {"permissions": managed(special("project_roots")), "cwd": "/w", name: LATER[name]}
    message = f"a native `cwd` and `{name}` exclude each other"
    assert refusal(sandbox | OLD) == refusal(sandbox | LEVEL) == message
    assert translate(sandbox | {name: None})["workspaceRoots"] == ["file:///w"]


PROJECT = {"permissions": managed(ROOT, special("project_roots")), "cwd": "file:///w"}


def test_uri_of_cwd_is_the_project_root_of_processes_without_workspace_roots() -> None:
    sandbox = PROJECT | OLD
    assert translate(sandbox, process=True) == sandbox | {"workspaceRoots": ["file:///w"]}
    assert translate(sandbox) is sandbox  # those versions resolve the roots of file operations


@pytest.mark.parametrize("name", LATER)
def test_uri_of_cwd_grants_nothing_beside_members_of_later_versions(name: str) -> None:
    sandbox = PROJECT | OLD | {name: LATER[name]}
    assert translate(sandbox, process=True) is sandbox


def test_uri_of_cwd_grants_nothing_to_todays_clients() -> None:
    sandbox = PROJECT | LEVEL
    assert translate(sandbox, process=True) is sandbox


@pytest.mark.parametrize(
    "members",
    [
        {"workspaceRoots": ["/w"]},
        {"userHomeDir": "/h"},
        {"temporaryDirectories": ["/t"]},
        {"policyContext": {"cwd": "/p"}},
    ],
)
def test_native_paths_that_no_version_sends_are_refused(members: Json) -> None:
    sandbox = {"permissions": managed(ROOT)} | OLD | members
    assert translate(sandbox) is sandbox
    with pytest.raises(InvalidParams, match="relative URL without a base"):
        decode(Sandbox, sandbox)


def test_todays_form_stays_as_it_is_and_nothing_is_changed_in_place() -> None:
    sandbox = {"permissions": managed(ROOT, exact("file:///a", "read")), "zz": 1} | LEVEL
    assert translate(sandbox) is sandbox
    older = {"permissions": managed(ROOT), "cwd": "/c", "zz": 1} | LEVEL
    translate(older)
    assert older["cwd"] == "/c"
    oldest = {"sandboxPolicy": {"type": "workspace-write"}, "sandboxPolicyCwd": "/w"} | OLD
    translate(oldest)
    assert oldest == {"sandboxPolicy": {"type": "workspace-write"}, "sandboxPolicyCwd": "/w"} | OLD


# ---- refusals -------------------------------------------------------------------------------

UNCERTAIN: list[tuple[Json, str]] = [
    ({"sandboxPolicy": {}}, "`sandboxPolicy` has no `type`"),
    ({"sandboxPolicy": 5}, "`sandboxPolicy` has no `type`"),
    ({"sandboxPolicy": {"type": "strict"}}, "unknown `sandboxPolicy`: `strict`"),
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
        {"sandboxPolicy": {"type": "read-only", "network_access": False, "networkAccess": True}},
        "`sandboxPolicy` has a member in two spellings",
    ),
    (
        {
            "sandboxPolicy": {"type": "workspace-write", "writable_roots": "/a"},
            "sandboxPolicyCwd": "/w",
        },
        "`writable_roots` of a legacy sandbox form must be a list",
    ),
    (
        # False would let the client write there.
        {
            "sandboxPolicy": {"type": "workspace-write", "exclude_slash_tmp": None},
            "sandboxPolicyCwd": "/w",
        },
        "`exclude_slash_tmp` of a legacy sandbox form must be a boolean",
    ),
    *(
        (
            {"sandboxPolicy": "read-only", name: value},
            f"`sandboxPolicy` and `{name}` exclude each other",
        )
        for name, value in (
            ("permissions", {"type": "disabled"}),
            ("cwd", "/w"),
            ("workspaceRoots", []),
            ("additionalPermissions", {}),
            ("fileSystemSandboxPolicy", {}),
        )
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
    assert refusal(sandbox | OLD) == message


@pytest.mark.parametrize(
    "sandbox",
    [
        *({"sandboxPolicy": name} for name in ("ReadOnly", "danger-full-access")),
        {"sandboxPolicy": {"type": "WorkspaceWrite"}, "sandboxPolicyCwd": "/w"},
        *({"permissions": permissions} for permissions, _ in UNTAGGED),
    ],
)
def test_translations_are_understood(sandbox: Json) -> None:
    assert isinstance(decode(Sandbox, translate(sandbox | OLD)), Sandbox)


@pytest.mark.parametrize(
    "sandbox",
    [
        *({}, {"permissions": {}}, {"permissions": 5}, {"permissions": []}),
        {"permissions": managed(exact("tmp", "read")), "cwd": 5} | LEVEL,
        {"permissions": {"type": "managed", "file_system": 5}},
        {"permissions": {"type": "managed", "file_system": {"entries": 5}}},
        {"permissions": {"type": "managed", "file_system": {"entries": [5, {}]}}},
        {"sandboxPolicy": None},
    ],
)
def test_mistakes_of_today_are_left_to_the_decoder(sandbox: Json) -> None:
    for given_sandbox in (sandbox, sandbox | {"windowsSandboxPrivateDesktop": True}):
        assert translate(given_sandbox) is given_sandbox
        with pytest.raises(InvalidParams):
            decode(Sandbox, given_sandbox)


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


@given(
    st.dictionaries(st.sampled_from(["permissions", "sandboxPolicy", "cwd"]), VALUES), st.booleans()
)
def test_any_object_is_translated_or_refused(sandbox: Json, process: bool) -> None:
    try:
        assert isinstance(translate(sandbox | OLD, process=process), dict)
    except InvalidParams:
        pass


# ---- params ---------------------------------------------------------------------------------

OBSOLETE = "`sandboxPolicy` is obsolete and confines nothing: put the policy into `sandbox`"


@pytest.mark.parametrize("policy", [{"type": "read-only"}, {"type": "danger-full-access"}, 5, ""])
def test_policy_beside_the_params_is_never_ignored(policy: object) -> None:
    for sandbox in (None, {"permissions": managed(ROOT)} | OLD):
        with pytest.raises(InvalidParams) as caught:
            prepare({"path": "/a", "sandbox": sandbox, "sandboxPolicy": policy}, "file:///s")
        assert caught.value.message == OBSOLETE


def test_params_without_a_legacy_form_stay_as_they_are() -> None:
    odd: list[Any] = [None, 5, "x", [], {"permissions": managed(ROOT)} | LEVEL]
    for sandbox in odd:
        params = {"path": "/a", "sandbox": sandbox, "sandboxPolicy": None}
        assert prepare(params, None) is params


def test_sandbox_of_params_is_translated() -> None:
    params: Json = {"path": "/a", "sandbox": {"sandboxPolicy": "read-only"} | OLD}
    expected = {"path": "/a", "sandbox": {"permissions": managed(ROOT)} | OLD}
    assert prepare(params, None) == expected
    start: Json = {"argv": ["true"], "sandbox": PROJECT | OLD}
    assert prepare(start, None)["sandbox"]["workspaceRoots"] == ["file:///w"]


def test_decoding_translates() -> None:
    params = {"path": "/a", "sandbox": {"sandboxPolicy": "danger-full-access"} | OLD}
    decoded = decode(GetMetadataParams, params)
    assert decoded.sandbox is not None
    assert decoded.sandbox.permissions == Disabled()
    params = {"path": "/a", "sandbox": {"sandboxPolicy": "workspace-write"} | OLD}
    decoded = decode(GetMetadataParams, params, "file:///s")
    assert decoded.sandbox is not None
    assert [root.uri for root in decoded.sandbox.workspace_roots] == ["file:///s"]
    with pytest.raises(InvalidParams):
        decode(GetMetadataParams, params)
