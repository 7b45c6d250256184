"""`exec-server targets`: the list, and changes of the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from exec_server.cli import main


def test_targets_are_listed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    file = tmp_path / "exec-server" / "targets.toml"
    assert main.run_client("targets", []) == 0
    out, err = capfd.readouterr()
    assert (out, err) == (
        "",
        f"exec-server: {file} defines no targets; see `exec-server targets -h`\n",
    )
    file.parent.mkdir()
    file.write_text('[b]\nurl = "ws://h"\n[long]\nstdio = "x y"\n')
    assert main.run_client("targets", []) == 0
    assert capfd.readouterr().out == "b     ws://h\nlong  stdio:x y\n"
    assert main.run_client("targets", ["--names"]) == 0
    assert capfd.readouterr().out == "b\nlong\n"
    assert main.run_client("targets", ["--json"]) == 0
    assert json.loads(capfd.readouterr().out) == [
        {"name": "b", "address": "ws://h"},
        {"name": "long", "address": "stdio:x y"},
    ]
    assert main.run_client("targets", ["--json", "--names"]) == 2


@pytest.mark.parametrize(
    ("entry", "shown"),
    [
        ('url = "wss://me:pass@h:1/a?token=abc&x=1"', "wss://***@h:1/a?token=***&x=***"),
        ('url = "wss://pass@h"', "wss://***@h"),
        ('url = "wss://me:p@ s@h/"', "wss://***@h/"),
        ('url = "wss://h?abc#def"', "wss://h?***#***"),
        ('url = "wss://h:80/a@b"', "wss://h:80/a@b"),
        ('url = "unix:/run/a?b=c"', "unix:/run/a?b=c"),
        ('url = "relay:https://me:pass@r/e"', "relay:https://***@r/e"),
        ('stdio = ["go", "wss://me:pass@h?a=b", "c?d=e"]', "stdio:go 'wss://***@h?a=***' 'c?d=e'"),
    ],
)
def test_secrets_in_addresses_are_not_shown(
    entry: str,
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "exec-server").mkdir()
    (tmp_path / "exec-server/targets.toml").write_text(f"[b]\n{entry}\n")
    assert main.run_client("targets", []) == 0
    assert capfd.readouterr().out == f"b  {shown}\n"
    assert main.run_client("targets", ["--json"]) == 0
    assert json.loads(capfd.readouterr().out) == [{"name": "b", "address": shown}]
