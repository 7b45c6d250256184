"""Which command lines of `exec` are plain; the whole command would read each in the same way."""

from __future__ import annotations

from pathlib import Path

import pytest

from exec_server.cli.commands import exec_command
from exec_server.cli.commands.quick_request import (
    Address,
    QuickRequest,
    find_address,
    parse,
    variables,
)

URL = "ws://127.0.0.1:7700"
PLAIN = [
    [URL, "true"],
    [URL, "--", "true"],
    ["-n", URL, "ls", "-la", "--", "-n"],
    [URL, "--no-stdin", "--cwd", "/src", "make", "--cwd", "/x"],
    ["--cwd", "/a", "--cwd", "/b", "box", "pwd"],
    ["--env", "A=1", URL, "--env", "B=-2", "--", "--env"],
    ["--token-file", "/t", URL, "sh", "-c", "exit 3"],
    ["--token-env", "T", "unix:/run/x", "--", " ", ""],
]
OTHERS = [
    [],
    [URL],
    [URL, "--"],
    ["--", URL, "true"],
    ["-t", URL, "true"],
    [URL, "-d", "true"],
    ["--timeout", "3", URL, "true"],
    ["--cwd=/src", URL, "true"],
    ["--cwd", "relative", URL, "true"],
    ["--cwd", "~", URL, "true"],
    [URL, "--cwd"],
    ["--env", "-A=1", URL, "true"],
    ["-h"],
    [URL, "--help", "true"],
    ["", "true"],
    [URL, "--", ""],
]


@pytest.mark.parametrize("words", PLAIN, ids=" ".join)
def test_plain_command_lines_are_read_as_the_whole_command_reads_them(words: list[str]) -> None:
    request = parse(words)
    arguments = exec_command.build_parser().parse_words(words)
    assert request == QuickRequest(
        arguments.target,
        arguments.argv,
        not arguments.no_stdin,
        arguments.cwd,
        tuple(arguments.env),
        arguments.token_file,
        arguments.token_env,
    )


@pytest.mark.parametrize("words", OTHERS, ids=" ".join)
def test_all_others_are_left_to_the_whole_command(words: list[str]) -> None:
    assert parse(words) is None


def _request(target: str) -> QuickRequest:
    return QuickRequest(target, ["true"])


@pytest.mark.parametrize(
    ("target", "address"),
    [
        (URL, Address("127.0.0.1", 7700, None)),
        ("ws://localhost:1/", Address("localhost", 1, None)),
        ("unix:/run/s", Address("/run/s", None, None)),
        ("unix:///run/s", Address("/run/s", None, None)),
        ("ws://127.0.0.1", None),
        ("ws://127.0.0.1:0", None),
        ("ws://127.0.0.1:65536", None),
        ("ws://127.0.0.1:80/path", None),
        ("ws://192.0.2.1:7700", None),
        ("wss://localhost:7700", None),
        ("unix:relative", None),
        ("unix:/" + "x" * 107, None),
        ("unix:/a\n", None),
        ("stdio:cat", None),
        ("relay:https://registry/box", None),
        ("stdio:", None),
    ],
)
def test_only_plain_servers_of_this_machine_have_an_address(
    target: str, address: Address | None
) -> None:
    assert find_address(_request(target)) == address


def test_named_targets_and_tokens_are_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "exec-server" / "targets.toml"
    file.parent.mkdir()
    file.write_text(
        f'[box]\nurl = "{URL}"\ntoken_env = "BOX"\n[pinned]\nurl = "{URL}"\npin = "ab"\n'
    )
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert find_address(_request("box")) is None  # the variable holds no token
    monkeypatch.setenv("BOX", "secret")
    assert find_address(_request("box")) == Address("127.0.0.1", 7700, "secret")
    monkeypatch.setenv("OTHER", "given")
    given = _request("box")._replace(token_env="OTHER")
    assert find_address(given) == Address("127.0.0.1", 7700, "given")
    assert find_address(given._replace(token_file="/x")) is None
    assert find_address(_request("pinned")) is None
    assert find_address(_request("unknown")) is None


def test_wrong_variables_are_left_to_the_whole_command() -> None:
    assert variables(_request(URL)._replace(env=("A=1", "B="))) == {"A": "1", "B": ""}
    assert variables(_request(URL)._replace(env=("=1",))) is None
