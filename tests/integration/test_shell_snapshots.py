"""Snapshots of shells: zsh, and processes that start-up files leave behind."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.support.client import Client, ProcessRun, RpcFailure, start_server, survivors, uri

_ZSH = shutil.which("zsh")


def _params(home: Path, shell: str, text: str) -> dict[str, Any]:
    return {
        "processId": "p",
        "argv": [shell, "-lc", text],
        "cwd": uri(home),
        "env": {"PATH": os.environ["PATH"], "HOME": str(home)},
        "tty": False,
        "shellSnapshot": {
            "scopeId": "scope",
            "shell": {"name": os.path.basename(shell), "path": shell},
        },
    }


def _run(client: Client, home: Path, shell: str, text: str) -> ProcessRun:
    params = _params(home, shell, text)
    del params["processId"]
    return client.run(params.pop("argv"), **params)


@pytest.mark.skipif(_ZSH is None, reason="there is no zsh")
def test_zsh(tmp_path: Path) -> None:
    assert _ZSH is not None
    (tmp_path / ".zprofile").write_text(
        "echo x >> ~/runs; export FROM=profile; f() { print f-$1 }; setopt extended_glob\n"
    )
    (tmp_path / ".zshrc").write_text("export RC=1; typeset -x MULTI=$'a\\nb'\n")
    with start_server("ours") as server, server.connect() as client:
        for _ in range(2):
            text = 'echo $FROM $RC $0; f 1; setopt | grep glob; echo "$MULTI"; cat ~/runs; nosuch'
            run = _run(client, tmp_path, _ZSH, text)
            assert run.stdout.decode() == f"profile 1 {_ZSH}\nf-1\nextendedglob\na\nb\nx\n"
            assert run.stderr == b"zsh:3: command not found: nosuch\n"


def test_a_child_of_a_profile_lives_as_long_as_the_session(tmp_path: Path) -> None:
    text = "sleep 600 & echo $! > ~/pid; export FROM=profile\n"
    (tmp_path / ".bash_profile").write_text(text)
    with start_server("ours", "--session-retention", "0") as server:
        with server.connect() as client:
            assert _run(client, tmp_path, "/bin/bash", "echo $FROM").stdout == b"profile\n"
            left = _started(tmp_path)
            assert _run(client, tmp_path, "/bin/bash", f"kill -0 {min(left)}").exit_code == 0
        assert survivors(left) == []


_HOSTILE = {
    "a trap of all commands": "trap 'echo noise' DEBUG",
    "other traps": "trap 'echo noise' EXIT ERR; set -E",
    "functions with the names of commands": "printf() { echo; }; env() { echo; }; command() { :; }",
    "a function that hides builtins": "builtin() { echo hostile; }",
    "bytes that are no text": "head -c 9999 /dev/urandom; export BAD=$'\\xff'",
    "a copy of the marks": "mark=$(tr '\\0' '\\n' < /proc/$$/cmdline"
    " | grep -o 'exec-server-[0-9a-f]*');"
    " for n in 1 2 3 4 5 6; do printf '\\0%s\\0=x\\0' $mark; done",
    "no PATH": "export PATH=",
    "a shell that fails at the first error": "set -eu",
}
_HOSTILE_ZSH = {
    "a trap": "trap 'echo noise' DEBUG",
    "a trap that is a function": "TRAPDEBUG() { echo noise }",
    "aliases of all commands": "alias -g builtin=false command=false",
    "another emulation": "emulate sh",
    "a restricted shell": "setopt restricted",
}


@pytest.mark.parametrize("shell", ["/bin/bash", "/usr/bin/zsh"])
def test_hostile_start_up_files(tmp_path: Path, shell: str) -> None:
    """The command runs as if the files were run for it, or as a login shell."""
    if not os.path.exists(shell):
        pytest.skip(f"there is no {shell}")
    is_bash = shell == "/bin/bash"
    with start_server("ours") as server, server.connect() as client:
        for name, text in (_HOSTILE if is_bash else _HOSTILE_ZSH).items():
            home = tmp_path / name
            home.mkdir()
            last = "\nexport FROM=profile; f() { echo f; }\n"
            if name == "a restricted shell":
                text, last = last, f"{text}\n"  # noqa: PLW2901
            (home / (".bash_profile" if is_bash else ".zprofile")).write_text(text + last)
            run = _run(client, home, shell, "echo :$FROM; f")
            if name == "a copy of the marks":
                assert run.exit_code == 127, name  # the files have said that there is no function
                continue
            assert run.stdout.endswith((b":profile\nf\n", b":profile\nf\nnoise\n")), (name, run)
            assert run.stderr == b"", name


def _started(home: Path) -> dict[int, str]:
    """The process whose id is in a file, and when it started."""
    pid = int((home / "pid").read_text())
    return {pid: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]}


def _hang(client: Client, home: Path) -> int:
    """Ask for a start whose profile waits for a writer of a fifo; returns the request's id."""
    (home / ".bash_profile").write_text("echo $$ > ~/pid; mkfifo ~/fifo; cat ~/fifo\n")
    watch = {"watchId": 1, "missing": [uri(home / "fifo")]}
    assert client.call("fs/watchMissing", watch)["watching"]
    request = client.request("process/start", _params(home, "/bin/bash", "echo > ~/ran"))
    client.wait_for(lambda notice: notice["method"] == "fs/missingChanged")
    return request


def test_terminate_ends_a_start_that_waits_for_its_profile(tmp_path: Path) -> None:
    with start_server("ours") as server, server.connect() as client:
        request = _hang(client, tmp_path)
        shell = _started(tmp_path)
        assert client.call("process/terminate", {"processId": "p"}) == {"running": True}
        with pytest.raises(RpcFailure, match="process p start was cancelled"):
            client.result(request)
        assert survivors(shell) == []
        assert not (tmp_path / "ran").exists()
        (tmp_path / ".bash_profile").write_text("export FROM=profile\n")
        assert _run(client, tmp_path, "/bin/bash", "echo $FROM").stdout == b"profile\n"


def test_the_end_of_a_session_ends_its_captures(tmp_path: Path) -> None:
    with start_server("ours", "--session-retention", "0") as server:
        with server.connect() as client:
            _hang(client, tmp_path)
            shell = _started(tmp_path)
        assert survivors(shell) == []
    assert not (tmp_path / "ran").exists()


def test_a_lost_connection_frees_the_id_of_a_start_that_waits(tmp_path: Path) -> None:
    (tmp_path / ".bash_profile").write_text("mkfifo ~/fifo; cat ~/fifo\n")
    with start_server("ours") as server:
        with server.connect() as client:
            watch = {"watchId": 1, "missing": [uri(tmp_path / "fifo")]}
            assert client.call("fs/watchMissing", watch)["watching"]
            client.request("process/start", _params(tmp_path, "/bin/bash", "true"))
            client.wait_for(lambda notice: notice["method"] == "fs/missingChanged")
        with server.connect(resume=client.session_id) as client:
            assert client.run(["/bin/true"], process_id="p").exit_code == 0
        with os.fdopen(os.open(tmp_path / "fifo", os.O_RDWR)):
            pass  # the profile goes on
