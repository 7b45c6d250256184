"""`exec-server up`: which login it uses, and what it hands to remote mode."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from exec_server.cli.serve import run
from exec_server.cli.serve import up as command
from exec_server.cli.serve.up import up
from exec_server.client import logins
from exec_server.client.logins import Login
from exec_server.registry.destination import environment_id

DOG: Any = None


@pytest.fixture(autouse=True)
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[argparse.Namespace]:
    """The arguments of each run of remote mode, which is not entered."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(command, "ignore_unused", lambda: None)
    seen: list[argparse.Namespace] = []
    monkeypatch.setattr(run, "run_remote", lambda arguments, watchdog: seen.append(arguments))
    return seen


def test_the_only_login_is_used(
    served: list[argparse.Namespace], capsys: pytest.CaptureFixture[str]
) -> None:
    pin = "sha256:" + "ab" * 32
    logins.save_login(Login("https://r", {"executor": "secret"}, None, (pin,)), "file")
    logins.save_login(Login("https://other", {"client": "t"}), "file")
    assert up(["--log-level", "info"], DOG) == 0
    [arguments] = served
    assert arguments.remote == "https://r"
    assert arguments.environment_id == environment_id()
    assert (arguments.registry_token, arguments.pin) == ("secret", [pin])
    assert (arguments.waits_for_registry, arguments.key_file) == (True, None)
    assert arguments.log_level == "info"
    arguments.on_ready("SHA")
    arguments.on_ready("SHA")
    assert capsys.readouterr().out.splitlines() == [
        "This machine is reachable. On a client that has logged in:",
        f"    exec-server exec relay:https://r/{environment_id()} -- uname -a",
        "The fingerprint of its key, for --executor-key: SHA",
        "This machine is reachable again.",
    ]


def test_a_credential_on_stdin_needs_no_login(served: list[argparse.Namespace]) -> None:
    assert up(["https://r", "--environment-id", "box", "--registration-bearer-stdin"], DOG) == 0
    [arguments] = served
    assert (arguments.remote, arguments.environment_id) == ("https://r", "box")
    assert (arguments.registry_token, arguments.waits_for_registry) == (None, True)
    assert arguments.stdin_flag == "--registration-bearer-stdin"
    assert up(["https://r", "--chatgpt-account-id", "a"], DOG) == 2


def test_one_of_several_logins_is_named(
    served: list[argparse.Namespace], capsys: pytest.CaptureFixture[str]
) -> None:
    assert up([], DOG) == 1
    assert "run `exec-server login URL` with an executor's token first" in capsys.readouterr().err
    logins.save_login(Login("https://a", {"executor": "one"}, "/ca.pem"), "file")
    logins.save_login(Login("https://b", {"executor": "two"}), "file")
    assert up([], DOG) == 1
    assert "name one of the registries: https://a, https://b" in capsys.readouterr().err
    assert up(["https://c"], DOG) == 1
    assert "there is no login for https://c" in capsys.readouterr().err
    assert up(["https://a/", "--environment-id", "box"], DOG) == 0
    [arguments] = served
    assert (arguments.environment_id, arguments.ca_file) == ("box", "/ca.pem")


def test_flags_replace_the_certificate_checks_of_the_login(
    served: list[argparse.Namespace], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    old, new = ("sha256:" + digit * 64 for digit in "ab")
    logins.save_login(Login("https://r", {"executor": "secret"}, None, (old,)), "file")
    assert up(["--pin", new, "--pin", old], DOG) == 0
    assert up(["--ca-file", "ca.pem"], DOG) == 0
    assert [(each.ca_file, each.pin) for each in served] == [
        (None, [new, old]),
        (str(tmp_path / "ca.pem"), None),
    ]
    [stored] = logins.load_logins().values()
    assert stored.pins == (old,)
    installed: list[tuple[object, ...]] = []
    monkeypatch.setattr(command, "install_service", lambda *words: installed.append(words))
    assert up(["--install", "--environment-id", "box", "--ca-file", "ca.pem"], DOG) == 0
    assert installed == [("https://r", "box", ["--ca-file", str(tmp_path / "ca.pem")])]


def test_key_file_is_passed_on_with_its_whole_path(
    served: list[argparse.Namespace], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    pin = "sha256:" + "a" * 64
    logins.save_login(Login("https://r", {"executor": "secret"}, None, (pin,)), "file")
    assert up(["--key-file", "key.pem"], DOG) == 0
    assert up(["--key-file", "none"], DOG) == 0
    assert [(each.key_file, each.pin) for each in served] == [
        (str(tmp_path / "key.pem"), [pin]),
        ("none", [pin]),
    ]
    installed: list[tuple[object, ...]] = []
    monkeypatch.setattr(command, "install_service", lambda *words: installed.append(words))
    assert up(["--install", "--environment-id", "box", "--key-file", "key.pem"], DOG) == 0
    assert installed == [("https://r", "box", ["--key-file", str(tmp_path / "key.pem")])]


def test_the_service_is_managed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logins.save_login(Login("https://r", {"executor": "secret"}), "file")
    monkeypatch.setattr(command, "install_service", lambda *words: " ".join(map(str, words)))
    monkeypatch.setattr(command, "uninstall_service", lambda: "removed")
    assert up(["--install", "--environment-id", "box"], DOG) == 0
    assert up(["--uninstall"], DOG) == 0
    assert capsys.readouterr().out == "https://r box []\nremoved\n"


def test_wrong_arguments_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert up(["--no-such"], DOG) == 2
    assert "unrecognized arguments" in capsys.readouterr().err
    assert up(["--ca-file", "x", "--pin", "y"], DOG) == 2
    assert "not allowed with" in capsys.readouterr().err
