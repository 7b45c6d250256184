"""The `sandbox` member: what its paths may be, and which params take one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from exec_server.errors import InvalidParams
from exec_server.protocol import files, legacy_sandbox, process
from exec_server.protocol.decoding import Params, decode, decode_value
from exec_server.protocol.paths import PathUri
from exec_server.protocol.sandbox import (
    Confinable,
    Disabled,
    ExactPath,
    FileUri,
    Managed,
    PolicyContext,
    PolicyEntry,
    ProjectRoots,
    Restricted,
    Sandbox,
    SpecialPath,
    check_process_paths,
)

DISABLED = {"permissions": {"type": "disabled"}, "windowsSandboxLevel": "disabled"}


def test_uris_inside_a_sandbox_are_normalised() -> None:
    value = DISABLED | {
        "cwd": "file:///a/../b",
        "workspaceRoots": ["file:///w"],
        "policyContext": {"cwd": "file:///c%20d"},
    }
    expected = Sandbox(
        permissions=Disabled(),
        cwd=FileUri.from_wire("file:///b"),
        workspace_roots=[FileUri.from_wire("file:///w")],
        policy_context=PolicyContext(FileUri.from_wire("file:///c%20d")),
        windows_sandbox_level="disabled",
    )
    for decoded in (decode(Sandbox, value), decode_value(Sandbox, value)):
        assert decoded == expected
        assert decoded.cwd is not None
        assert decoded.cwd.native() == "/b"


@pytest.mark.parametrize("text", ["/tmp", "//tmp", "/", "tmp", "", " /tmp", "\\tmp"])
def test_only_uris_are_paths_inside_a_sandbox(text: str) -> None:
    for value in (
        DISABLED | {"cwd": text},
        DISABLED | {"workspaceRoots": [text]},
        DISABLED | {"userHomeDir": text},
        DISABLED | {"temporaryDirectories": [text]},
        DISABLED | {"policyContext": {"cwd": text}},
        DISABLED | {"policyContext": {"workspaceRoots": [text]}},
    ):
        with pytest.raises(InvalidParams, match=r"^invalid URI: relative URL without a base$"):
            decode(Sandbox, value)


def test_paths_that_are_equal_stay_equal_whatever_their_kind() -> None:
    assert FileUri.from_wire("file:///a") == PathUri.from_wire("/a")


def test_entries_are_decoded() -> None:
    entries: list[dict[str, Any]] = [
        {"path": {"type": "path", "path": "file:///a"}, "access": "none"},
        {
            "path": {"type": "special", "value": {"kind": "current_working_directory"}},
            "access": "write",
            "missing_path_behavior": "skip",
        },
    ]
    permissions = {
        "type": "managed",
        "file_system": {"type": "restricted", "entries": entries},
        "network": "enabled",
    }
    decoded = decode(Sandbox, DISABLED | {"permissions": permissions})
    expected = [
        PolicyEntry(ExactPath(FileUri.from_wire("file:///a")), "none"),
        PolicyEntry(SpecialPath(ProjectRoots()), "write", "skip"),
    ]
    assert decoded.permissions == Managed(Restricted(expected), "enabled")


_PREFIX = "failed to prepare process sandbox: "
_HERE, _FOREIGN, _OTHER = "file:///tmp", "file:///C:/x", "file://server/share"
_INVALID = f"'{_FOREIGN}' is invalid on 'linux'"


def _managed(path: str = _HERE, **members: Any) -> dict[str, Any]:
    entries: list[dict[str, Any]] = [
        {"path": {"type": "special", "value": {"kind": "root"}}, "access": "read"},
        {"path": {"type": "path", "path": path}, "access": "read"},
    ]
    file_system = {"type": "restricted", "entries": entries}
    permissions = {"type": "managed", "file_system": file_system, "network": "restricted"}
    return DISABLED | {"permissions": permissions} | members


@pytest.mark.parametrize(
    ("sandbox", "cwd", "text"),
    [
        (_managed(_FOREIGN), _HERE, f"invalid sandbox permission path: {_INVALID}"),
        (_managed(_OTHER, cwd=_FOREIGN), _OTHER, f"invalid sandbox policy cwd: {_INVALID}"),
        (_managed(_OTHER), _FOREIGN, f"invalid sandbox policy cwd: {_INVALID}"),
        (
            _managed(_OTHER, cwd=_OTHER, policyContext={"cwd": _FOREIGN}),
            _HERE,
            f"invalid sandbox policy cwd: {_INVALID}",
        ),
        (
            _managed(cwd=_FOREIGN, policyContext={}),
            _HERE,
            f"invalid sandbox policy cwd: {_INVALID}",
        ),
        (
            _managed(_OTHER, workspaceRoots=[_HERE, _FOREIGN]),
            _HERE,
            f"invalid sandbox workspace root: {_INVALID}",
        ),
        (
            _managed(policyContext={"workspaceRoots": [_FOREIGN]}),
            _HERE,
            f"invalid sandbox workspace root: {_INVALID}",
        ),
        (
            _managed(cwd=_HERE),
            _FOREIGN,
            f"command cwd URI `{_FOREIGN}` is not valid on this host: {_INVALID}",
        ),
        (DISABLED | {"cwd": _FOREIGN}, _HERE, f"invalid sandbox policy cwd: {_INVALID}"),
        (
            DISABLED | {"cwd": _HERE},
            _FOREIGN,
            f"command cwd URI `{_FOREIGN}` is not valid on this host: {_INVALID}",
        ),
    ],
)
def test_paths_of_another_system_are_refused_for_processes(
    sandbox: dict[str, Any], cwd: str, text: str
) -> None:
    with pytest.raises(InvalidParams) as refusal:
        check_process_paths(decode(Sandbox, sandbox), PathUri.from_wire(cwd))
    assert refusal.value.message == _PREFIX + text


def test_roots_beside_a_policy_context_do_not_count_for_processes() -> None:
    sandbox = decode(Sandbox, _managed(workspaceRoots=[_FOREIGN], policyContext={}))
    check_process_paths(sandbox, PathUri.from_wire(_HERE))
    assert sandbox.policy_roots == []


def _params() -> list[type[Params]]:
    return [
        kind
        for module in (files, process)
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, Params) and kind is not Sandbox
    ]


def test_every_method_with_a_sandbox_looks_for_its_older_forms() -> None:
    with_sandbox = {
        kind for kind in _params() if "sandbox" in {f.name for f in msgspec.structs.fields(kind)}
    }
    confinable = {kind for kind in _params() if issubclass(kind, Confinable)} - {Confinable}
    assert with_sandbox == confinable
    assert len(confinable) == 25
    assert {kind.prepare for kind in confinable} == {legacy_sandbox.prepare}
