"""What a child finds when it starts: descriptors, signals, environment, and no way back."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.client import Client, Server, start_server
from tests.support.server_internals import (
    commands,
    own_processes,
    start_prepared,
    start_unprivileged,
)

from exec_server.process import tags

Python = Callable[[str], list[str]]

_IGNORE_ALL = """
import signal
for number in signal.valid_signals():
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGWINCH})
"""
_EXTRA_DESCRIPTORS = """
import os
for number in (7, 9, 40):
    os.dup2(os.open("/etc/passwd", os.O_RDONLY), number)
"""
_POLICY = {
    "inherit": "all",
    "ignoreDefaultExcludes": False,
    "exclude": [],
    "set": {},
    "includeOnly": [],
}


def _environment(client: Client, *, tty: bool = False, **params: Any) -> dict[str, str]:
    """The environment that a child reports."""
    run = client.run(["/usr/bin/env"], tty=tty, **params)
    text = (run.pty if tty else run.stdout).decode().replace("\r\n", "\n")
    return dict(line.split("=", 1) for line in text.splitlines())


# ---- descriptors ----------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("tty", [False, True])
@pytest.mark.parametrize("preparation", ["", _EXTRA_DESCRIPTORS])
def test_only_the_standard_descriptors_are_inherited(preparation: str, tty: bool) -> None:
    with start_prepared(preparation) as server, server.connect() as client:
        # Others are open at the same time, so that there is something to inherit.
        for number in range(5):
            client.start(["cat"], pipeStdin=True, process_id=f"pipe-{number}")
            client.start(["cat"], tty=True, process_id=f"tty-{number}")
        run = client.run(["/bin/ls", "/proc/self/fd"], tty=tty)
        assert (run.pty if tty else run.stdout).split() == [b"0", b"1", b"2", b"3"]  # 3: the folder


def test_stdin_without_a_pipe_is_empty(client: Client) -> None:
    run = client.run(["/bin/sh", "-c", "cat; readlink /proc/self/fd/0"])
    assert run.stdout == b"/dev/null\n"


def test_server_without_standard_descriptors_starts_children_with_them() -> None:
    with start_prepared("import os; os.close(0)") as server, server.connect() as client:
        assert client.run(["/bin/ls", "/proc/self/fd"]).stdout.split() == [b"0", b"1", b"2", b"3"]


# ---- signals --------------------------------------------------------------------------


@pytest.mark.parametrize("tty", [False, True])
@pytest.mark.parametrize("preparation", ["", _IGNORE_ALL])
def test_signals_are_at_their_defaults(preparation: str, tty: bool) -> None:
    with start_prepared(preparation) as server, server.connect() as client:
        run = client.run(["/bin/grep", "^Sig[BI]", "/proc/self/status"], tty=tty)
        lines = (run.pty if tty else run.stdout).decode().split()
        assert lines == ["SigBlk:", "0" * 16, "SigIgn:", "0" * 16]
        assert client.run(["/bin/sh", "-c", "kill -PIPE $$"], tty=tty).exit_code == 141


def test_leader_of_pipes_leads_its_session_and_group(client: Client) -> None:
    script = "echo $$; cut -d' ' -f5,6,7 /proc/$$/stat"
    pid, group, session, terminal = client.run(["/bin/sh", "-c", script]).stdout.split()
    assert pid == group == session
    assert terminal == b"0"


def test_limits_and_umask_are_inherited() -> None:
    preparation = """
import os, resource
os.umask(0o027)
resource.setrlimit(resource.RLIMIT_NOFILE, (333, 444))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
"""
    with start_prepared(preparation) as server, server.connect() as client:
        script = "umask; ulimit -n; ulimit -Hn; ulimit -c"
        assert client.run(["/bin/sh", "-c", script]).stdout == b"0027\n333\n444\n0\n"


def test_server_keeps_all_limits_that_the_kernel_enforces(client: Client, server: Server) -> None:
    def limits() -> list[tuple[int, int]]:
        numbers = set(range(16)) - {tags.LOCKS.number, tags.RSS.number}
        return [resource.prlimit(server.process.pid, number) for number in numbers]

    before = limits()
    for _ in range(5):
        client.run(["/bin/true"])
    assert limits() == before


# ---- environment ----------------------------------------------------------------------


def test_environment_is_exactly_the_given_one() -> None:
    with start_server("ours", env={"FROM_SERVER": "1"}) as server, server.connect() as client:
        assert _environment(client, env={}) == {}
        given = {"A": "1", "PATH": "/nowhere", "ü": "ö", "EMPTY": ""}
        assert _environment(client, env=given) == given
        shell = _environment(client, env={"SHELL": "/x"}, tty=True)
        assert shell == {"SHELL": "/x"}
        assert set(_environment(client, env={}, tty=True)) == {"SHELL"}


def test_environment_policy_is_applied_to_the_servers_environment() -> None:
    variables = {"MY_TOKEN": "t", "SECRET_PLAN": "s", "API_KEY": "k", "PLAIN": "p", "LANG": "C"}
    with start_server("ours", env=variables) as server, server.connect() as client:
        seen = _environment(client, env={"OWN": "1"}, envPolicy=_POLICY)
        assert (seen["PLAIN"], seen["OWN"]) == ("p", "1")
        assert not {"MY_TOKEN", "SECRET_PLAN", "API_KEY"} & set(seen)

        policy = _POLICY | {"ignoreDefaultExcludes": True, "exclude": ["SECRET_*", "p?ain"]}
        seen = _environment(client, env={}, envPolicy=policy)
        assert (seen["MY_TOKEN"], seen["API_KEY"]) == ("t", "k")
        assert not {"SECRET_PLAN", "PLAIN"} & set(seen)

        policy = _POLICY | {"inherit": "none", "set": {"A_KEY": "set", "B": "set"}}
        assert _environment(client, env={"B": "own"}, envPolicy=policy) == {
            "A_KEY": "set",
            "B": "own",
        }
        policy = _POLICY | {"inherit": "core", "includeOnly": ["LANG", "NOTHING"]}
        assert _environment(client, env={"OWN": "1"}, envPolicy=policy) == {"LANG": "C", "OWN": "1"}


def test_metadata_is_in_the_environment(client: Client) -> None:
    thread = "67e55044-10b1-426f-9247-bb680e5fe0c8"
    metadata = {"threadId": thread, "toolCallId": "call-1"}
    env = {"CODEX_THREAD_ID": "forged", "CODEX_TOOL_CALL_ID": "forged"}
    expected = {"CODEX_THREAD_ID": thread, "CODEX_TOOL_CALL_ID": "call-1"}
    assert _environment(client, env=env, metadata=metadata) == expected
    assert "CODEX_TOOL_CALL_ID" not in _environment(client, env=env)


def test_credentials_of_the_server_never_reach_a_child() -> None:
    names = [
        "CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN",
        "CODEX_GUARDIAN_DECISIONS_API_KEY",
        "NODE_REPL_AUTH_TOKEN",
        "OPENAI_FEDERATION_RULE_ID",
        "OPENAI_IDENTITY_TOKEN_FILE",
        "OPENAI_WORKLOAD_IDENTITY_CONTEXT",
    ]
    secrets = dict.fromkeys(names, "secret")
    lower = {name.lower(): "secret" for name in names}
    with start_server("ours", env=secrets | lower) as server, server.connect() as client:
        policy = _POLICY | {"ignoreDefaultExcludes": True, "set": secrets}
        for tty in (False, True):
            seen = _environment(client, env=secrets | lower, envPolicy=policy, tty=tty)
            assert "secret" not in seen.values()


def test_nul_bytes_are_refused(client: Client) -> None:
    params = {"processId": "p", "argv": ["/bin/true"], "cwd": "file:///", "tty": False}
    found, contains = "nul byte found in provided data", "data provided contains a nul byte"
    for tty, change, text in (
        (False, {"argv": ["/bin/true", "a\0b"]}, found),
        (False, {"env": {"A\0": "x"}}, found),
        (False, {"env": {"A": "x\0"}}, contains),
        (True, {"env": {"A": "x\0"}}, found),
    ):
        failure = client.failure("process/start", params | {"env": {}, "tty": tty} | change)
        assert failure == (-32603, text)


# ---- the way back ---------------------------------------------------------------------


def test_child_of_the_same_user_cannot_look_into_the_server() -> None:
    with (
        start_unprivileged(env={"PLANTED": "secret of the server"}) as server,
        server.connect() as client,
    ):
        own = own_processes(server)
        assert len(own) == 2
        for pid in own:
            status = client.run(["/bin/cat", f"/proc/{pid}/status"]).stdout.decode()
            owner = int(status.split("Uid:")[1].split()[0])
            assert owner == (65534 if os.geteuid() == 0 else os.geteuid())
            for name in ("environ", "mem", "maps"):
                run = client.run(["/usr/bin/head", "-c", "1", f"/proc/{pid}/{name}"])
                assert (run.stdout, run.exit_code) == (b"", 1), name
                assert b"Permission denied" in run.stderr
            assert client.run(["/bin/ls", f"/proc/{pid}/fd"]).exit_code != 0
        # A child is what the server would be without protection.
        name = client.start(["/bin/sleep", "60"], env={"PLANTED": "readable"})
        pids = commands(server)
        seen = client.run(["/bin/cat", f"/proc/{pids[0]}/environ"]).stdout
        assert b"PLANTED=readable" in seen
        client.call("process/terminate", {"processId": name})
