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
