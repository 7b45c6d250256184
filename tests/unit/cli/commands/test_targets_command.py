"""`exec-server targets`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from exec_server.cli.commands import dispatch


def test_targets_are_listed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    file = tmp_path / "exec-server" / "targets.toml"
    assert dispatch.run("targets", []) == 0
    out, err = capfd.readouterr()
    assert (out, err) == (
        "",
        f"exec-server: {file} defines no targets; see `exec-server targets -h`\n",
    )
    file.parent.mkdir()
    file.write_text('[b]\nurl = "ws://h"\n[long]\nstdio = "x y"\n')
    assert dispatch.run("targets", []) == 0
    assert capfd.readouterr().out == "b     ws://h\nlong  stdio:x y\n"
    assert dispatch.run("targets", ["--names"]) == 0
    assert capfd.readouterr().out == "b\nlong\n"
    assert dispatch.run("targets", ["--json"]) == 0
    assert json.loads(capfd.readouterr().out) == [
        {"name": "b", "address": "ws://h"},
        {"name": "long", "address": "stdio:x y"},
    ]
    assert dispatch.run("targets", ["--json", "--names"]) == 2
