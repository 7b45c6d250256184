"""Policies with a name are `sandbox` objects that mean what they say."""

from __future__ import annotations

import pytest

from exec_server.protocol import decoding, sandbox
from exec_server.protocol.sandbox import Confinable, Sandbox

HERE = "file:///src"


class _Document(Confinable, frozen=True):
    sandbox: Sandbox


@pytest.mark.parametrize("name", sandbox.PRESETS)
@pytest.mark.parametrize("network", [False, True])
def test_a_preset_is_a_sandbox_object(name: sandbox.PresetName, network: bool) -> None:
    value = sandbox.preset(name, cwd=HERE, roots=[HERE], network=network)
    assert decoding.decode(_Document, {"sandbox": value}).sandbox.cwd is not None
    assert value["permissions"]["network"] == ("enabled" if network else "restricted")
    accesses = {
        entry["path"]["value"]["kind"]: entry["access"]
        for entry in value["permissions"]["file_system"]["entries"]
    }
    assert accesses.pop("root") == "read"
    writable = {"project_roots", "slash_tmp", "tmpdir"} if name == "workspace-write" else set()
    assert accesses == dict.fromkeys(writable, "write")
