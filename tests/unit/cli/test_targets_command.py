"""`exec-server targets`, the access flags, and files that only the user can read."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from exec_server.cli import main
from exec_server.cli.errors import UsageError
from exec_server.cli.info import build_parser
from exec_server.cli.targets import access_options, write_private_file


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


def test_token_flags_exclude_each_other() -> None:
    words = ["--token-file", "f", "--token-env", "E", "build"]
    with pytest.raises(UsageError, match="exclude each other"):
        access_options(build_parser().parse_words(words))


def test_a_pin_replaces_root_certificates() -> None:
    with pytest.raises(UsageError, match="--ca-file and --pin exclude each other"):
        access_options(build_parser().parse_words(["--pin", "a", "--ca-file", "f", "build"]))
    words = ["--pin", "a", "--pin", "b", "--allow-insecure-token", "build"]
    given = access_options(build_parser().parse_words(words))
    assert (given.pin, given.allow_insecure_token) == (("a", "b"), True)


def test_flags_become_options() -> None:
    words = ["--token-env", "E", "--ca-file", "c", "build"]
    given = access_options(build_parser().parse_words(words))
    assert (given.token_env, given.ca_file) == ("E", "c")


def test_a_file_and_its_directory_are_for_the_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "a" / "file"
    umask = os.umask(0)
    try:
        write_private_file(path, b"one")
        write_private_file(path, b"two")
    finally:
        os.umask(umask)
    assert path.read_bytes() == b"two"
    assert [stat.S_IMODE(each.stat().st_mode) for each in (path.parent, path)] == [0o700, 0o600]


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").mkdir()
    with pytest.raises(OSError):
        write_private_file(tmp_path / "cert.pem", b"x", 0o644)
    assert [path.name for path in tmp_path.iterdir()] == ["cert.pem"]
