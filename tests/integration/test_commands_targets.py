"""Targets of the commands for people: names, tokens, kinds; `info`, help and completion."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.relay_service import ThreadedRelayService
from tests.support.cli import client_environment, run_client, stderr_text
from tests.support.client import scaled, server_command, server_environment, start_server
from tests.support.client_targets import ClientTarget
from tests.support.relay import start_executor

from exec_server.cli.table import COMMANDS


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The directory with targets.toml, which run_client lets the client find."""
    directory = tmp_path / "config" / "exec-server"
    directory.mkdir(parents=True)
    return directory


# ---- targets --------------------------------------------------------------------------


@pytest.mark.quick
def test_a_program_is_a_target(there: ClientTarget) -> None:
    """Over the standard streams of whichever server; what it says on stderr is passed on."""
    serve = shlex.join([*server_command(there.kind), "--listen", "stdio"])
    target = f"stdio:sh -c 'echo complaint >&2; exec {serve}'"
    ended = run_client("exec", target, "--", "echo", "hi", env=server_environment(there.kind))
    assert (ended.returncode, ended.stdout) == (0, b"hi\n")
    assert "complaint\n" in stderr_text(ended)


def test_names_and_tokens(config: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("right-token\n")
    flags = ("--ws-auth", "capability-token", "--ws-token-file", str(token))
    with start_server("ours", *flags) as server:
        (config / "wrong").write_text("wrong-token")
        (config / "targets.toml").write_text(
            f'[right]\nurl = "{server.url}"\ntoken_file = "{token}"\n'
            f'[wrong]\nurl = "{server.url}"\ntoken_file = "wrong"\n'
            f'[none]\nurl = "{server.url}"\n'
        )
        assert run_client("exec", "right", "--", "echo", "hi", config=config).stdout == b"hi\n"
        given = ("--token-env", "T", server.url, "--", "echo", "hi")
        assert run_client("exec", *given, env={"T": "right-token"}).stdout == b"hi\n"

        wrong = run_client("exec", "wrong", "--", "true", config=config)
        assert wrong.returncode == 255
        assert "Check that the token is the one this server expects" in stderr_text(wrong)
        none = run_client("info", "none", config=config)
        assert none.returncode == 1
        assert "The server requires a token: use --token-file" in stderr_text(none)
        for ended in (wrong, none):
            assert "-token\n" not in stderr_text(ended)
        unknown = run_client("ls", "nope:/", config=config)
        assert unknown.returncode == 2
        assert "targets.toml defines none, right, wrong" in stderr_text(unknown)


def test_the_default_target(config: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here\n")
    with start_server("ours", env={"EXEC_SERVER_TARGET": "unix:/none"}) as server:
        (config / "targets.toml").write_text(f'[box]\nurl = "{server.url}"\n')
        env = {"EXEC_SERVER_TARGET": "box"}
        for words, out in (
            (("exec", "--", "echo", "hi"), b"hi\n"),
            (("exec", ":", "sh", "-c", "echo ${EXEC_SERVER_TARGET-unset}"), b"unset\n"),
            (("cp", f":{tmp_path}/file", f":{tmp_path}/copy"), b""),
            (
                ("cp", "-n", f":{tmp_path}/file", f":{tmp_path}/x"),
                f"copy    :{tmp_path}/x\n".encode(),
            ),
            (("ls", f":{tmp_path}/cop*"), f"{tmp_path}/copy\n".encode()),
            (("complete-path", f":{tmp_path}/cop"), f":{tmp_path}/copy\n".encode()),
        ):
            ended = run_client(*words, config=config, env=env)
            assert (ended.stdout, stderr_text(ended), ended.returncode) == (out, "", 0)
        missing = run_client("cp", f":{tmp_path}/file", ":no/x", config=config, env=env)
        assert "create it with exec-server mkdir -p :no\n" in stderr_text(missing)
        (tmp_path / "within").mkdir()
        for same in ("box", server.url):  # its files pass through no directory of this machine
            words = ("cp", "--sync", "--delete", f":{tmp_path}/within/.", f"{same}:{tmp_path}")
            refused = run_client(*words, config=config, env=env)
            assert "one of them contains the other: nothing is deleted" in stderr_text(refused)
        named = run_client("exec", "echo", "hi", config=config, env=env)
        assert named.returncode == 2
        assert "unknown target `echo`" in stderr_text(named)
        assert "the target of EXEC_SERVER_TARGET is written `:`" in stderr_text(named)
    unset = run_client("exec", "--", "echo", "hi", config=config)
    assert (unset.returncode, unset.stdout) == (2, b"")
    assert "Error: no target: name one, such as ws://127" in stderr_text(unset)


def test_tokens_are_not_sent_in_the_open(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret-1")
    ended = run_client("info", "--token-file", str(tmp_path / "token"), "ws://192.0.2.1:7")
    assert ended.returncode == 2
    assert "a token is sent only to wss:// URLs" in stderr_text(ended)
    assert "secret-1" not in stderr_text(ended)


def test_an_environment_of_a_registry_is_a_target(config: Path) -> None:
    with ThreadedRelayService() as service, start_executor(service):
        (config / "targets.toml").write_text(
            f'[far]\nregistry = "{service.url}"\nenvironment_id = "env-1"\ntoken_env = "T"\n'
        )
        env = {"T": service.token}
        data = os.urandom(200_000)
        ended = run_client("exec", "far", "--", "cat", config=config, env=env, input=data)
        assert (ended.returncode, ended.stdout) == (0, data)
        words = ("--token-env", "T", f"relay:{service.url}/env-1", "--", "echo", "hi")
        assert run_client("exec", *words, env=env).stdout == b"hi\n"
        wrong = run_client("exec", "--executor-key", "ab" * 32, *words, env=env)
        assert wrong.returncode == 255
        assert "cannot reach relay:" in stderr_text(wrong)
        assert "whose key is not the expected one" in stderr_text(wrong)


def test_targets_are_listed(config: Path) -> None:
    ended = run_client("targets", config=config)
    assert (ended.returncode, ended.stdout) == (0, b"")
    assert "defines no targets" in stderr_text(ended)
    (config / "targets.toml").write_text('[b]\nurl = "ws://h"\n[a-long]\nstdio = ["x", "y z"]\n')
    assert run_client("targets", config=config).stdout == b"a-long  stdio:x 'y z'\nb       ws://h\n"
    assert run_client("targets", "--names", config=config).stdout == b"a-long\nb\n"


def test_a_target_alone_is_where_it_works(tmp_path: Path, config: Path) -> None:
    (tmp_path / "here").write_bytes(b"")
    with start_server("ours", cwd=tmp_path) as server:
        (config / "targets.toml").write_text(f'[build]\nurl = "{server.url}"\n')
        for words in ([server.url], [f"{server.url}:"], ["build"], ["build:"], ["build:."]):
            assert b"here\n" in run_client("ls", *words, config=config).stdout
        assert run_client("cat", "build:here", config=config).returncode == 0


def test_a_target_is_described(there: ClientTarget) -> None:
    text = run_client("info", there.url).stdout.decode()
    labels = ("target", "version", "session", "shell", "directory", "sandbox", "capabilities")
    for label in (*labels, "unsupported"):
        assert f"\n{label} " in f"\n{text}"
    facts = json.loads(run_client("info", "--json", there.url).stdout)
    assert facts["target"] == there.url
    assert facts["directory"] == os.getcwd()
    assert facts["capabilities"]["fsWatchMissing"] is True
    assert isinstance(facts["sandbox"]["works"], bool)
    assert facts["capabilities"]["processResize"] is (there.kind == "ours")


# ---- help and completion --------------------------------------------------------------


@pytest.mark.parametrize("command", ["exec", "cp", "ls", "cat", "rm", "info", "targets"])
def test_help(command: str) -> None:
    ended = run_client(command, "--help")
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert ended.stdout.decode().startswith(f"usage: exec-server {command}")


_BASH = r"""
source <(exec-server completion bash)
compopt() { :; }  # it works only while a key is pressed
for typed in "$@"; do
    read -r -a COMP_WORDS <<< "$typed"
    [[ $typed == *' ' ]] && COMP_WORDS+=('')
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMP_LINE=$typed COMP_POINT=${#typed}
    $(complete -p exec-server | sed 's/.*-F \([^ ]*\).*/\1/')
    echo "${COMPREPLY[*]}"
done
"""
_TYPED = {
    "exec-server ": " ".join(name for name, row in COMMANDS.items() if row.is_visible),
    "exec-server help ex": "exec",
    "exec-server serve --log-l": "--log-level",
    "exec-server e": "exec",
    "exec-server exec --ti": "--timeout",
    "exec-server exec bu": "build",
    "exec-server exec build -- bu": "",
    "exec-server info ": "build lab",
    "exec-server cat ": "build: lab:",
    "exec-server cp la": "lab:",
    "exec-server cp /etc/os-rel": "/etc/os-release",
    "exec-server completion f": "fish",
    "exec-server --log-l": "--log-level",
    "exec-server --log-level d": "debug",
    "exec-server exec --sandbox work": "workspace-write",
    "exec-server kill -s HU": "HUP",
    "exec-server exec -n bu": "build",
    "exec-server logs -n bu": "",
}


@pytest.fixture
def installed(config: Path, tmp_path: Path) -> dict[str, str]:
    """The environment of a shell that finds exec-server and two targets."""
    (config / "targets.toml").write_text('[build]\nurl = "ws://h"\n[lab]\nstdio = "x"\n')
    program = tmp_path / "bin" / "exec-server"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.join(server_command("ours"))} "$@"\n')
    program.chmod(0o755)
    environment = client_environment(config)
    return environment | {"PATH": f"{program.parent}:{environment['PATH']}"}


def test_bash_completes(installed: dict[str, str]) -> None:
    ended = subprocess.run(
        ["bash", "--norc", "-c", _BASH, "bash", *_TYPED],
        env=installed,
        capture_output=True,
        text=True,
        timeout=scaled(30),
        check=True,
    )
    assert dict(zip(_TYPED, ended.stdout.split("\n"), strict=False)) == _TYPED
    assert ended.stderr == ""


def test_remote_paths_are_completed(
    installed: dict[str, str], config: Path, tmp_path: Path
) -> None:
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "name").touch()
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b" / "it's $1").touch()
    with start_server("ours", cwd=tmp_path) as server:
        (config / "targets.toml").write_text(f'[build]\nurl = "{server.url}"\n')
        typed = {
            "exec-server cat build:some/n": "some/name",
            f"exec-server ls build:{tmp_path}/so": f"{tmp_path}/some/",
            f"exec-server cp {server.url}:{tmp_path}/some/": f"{tmp_path}/some/name",
            "exec-server rm build:missing/": "",
            "exec-server cat build:a": "a\\ b/",
            "exec-server cat build:a\\ b/i": "a\\ b/it\\'s\\ \\$1",
            'exec-server cat "build:a b/': "build:a b/it's \\$1",
            "exec-server cat 'build:a b/": "build:a b/it'\\''s $1",
            f"exec-server cat {server.url}:{tmp_path}/a": f"{tmp_path}/a\\ b/",
            "exec-server logs build we": "web.1",
            f"exec-server kill -s KILL {server.url} ": "other web.1",
            "exec-server attach bui": "build",
        }
        for name in ("web.1", "other"):
            run_client("exec", "-d", "--name", name, server.url, "sleep", "1000")
        ended = subprocess.run(
            ["bash", "--norc", "-c", _BASH, "bash", *typed],
            env=installed,
            capture_output=True,
            text=True,
            timeout=scaled(30),
            check=True,
        )
        if shutil.which("fish"):
            script = "exec-server completion fish | source; for t in $argv; complete -C $t; end"
            lines = [
                "exec-server logs -n 3 build w",
                "exec-server cat build:a",
                "exec-server cat build:a\\ b/",
                'exec-server cat "build:a b/',
            ]
            fish = subprocess.run(
                ["fish", "--no-config", "-c", script, *lines],
                env=installed,
                capture_output=True,
                text=True,
                check=True,
            )
            file = "build:a b/it's $1"
            assert fish.stdout.splitlines() == ["web.1", "build:a b/", file, file]
            assert fish.stderr == ""
    assert dict(zip(typed, ended.stdout.split("\n"), strict=False)) == typed
    assert ended.stderr == ""


def test_fish_completes(installed: dict[str, str]) -> None:
    if not any(Path(place, "fish").exists() for place in ("/usr/bin", "/bin", "/usr/local/bin")):
        pytest.skip("there is no fish")
    script = 'exec-server completion fish | source; for t in $argv; complete -C "$t"; echo .; end'
    typed = [text for text in _TYPED if "--log-level " not in text and "/etc" not in text]
    ended = subprocess.run(
        ["fish", "--no-config", "-c", script, *typed],
        env=installed,
        capture_output=True,
        text=True,
        timeout=scaled(30),
        check=True,
    )
    answers = [
        {line.partition("\t")[0] for line in answer.split("\n") if line}
        for answer in ended.stdout.split(".\n")
    ]
    for text, answer in zip(typed, answers, strict=False):
        assert set(_TYPED[text].split()) <= answer, text
