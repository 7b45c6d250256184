"""Processes on a terminal (`tty: true`)."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.client import Client, Server, assemble, uri
from tests.support.server_internals import eventually, open_descriptors, start_prepared

Python = Callable[[str], list[str]]


def _start(client: Client, script: str, **params: Any) -> str:
    return client.start(["/bin/sh", "-c", script], tty=True, **params)


def _until(client: Client, process_id: str, text: bytes) -> bytes:
    """Receives until the terminal has shown a text; returns all of it so far."""
    while text not in (shown := assemble(process_id, client.notifications).pty):
        client.receive()
    return shown


@pytest.mark.quick
def test_terminal_is_24_by_80_with_kernel_default_modes(client: Client) -> None:
    run = client.run(["/bin/sh", "-c", "stty size; stty -a; tty; ls -l /proc/self/fd"], tty=True)
    assert run.exit_code == 0
    lines = run.pty.decode().split("\r\n")
    assert lines[0] == "24 80"
    words = run.pty.decode().replace(";", " ").split()
    assert {"echo", "icanon", "onlcr", "icrnl", "isig"} <= set(words)
    assert "/dev/pts/" in run.pty.decode()


def test_terminal_merges_the_streams_and_turns_newlines(client: Client) -> None:
    run = client.run(["/bin/sh", "-c", "echo out; echo err >&2"], tty=True)
    assert run.output == {"pty": b"out\r\nerr\r\n"}


def test_terminal_is_the_controlling_one(client: Client) -> None:
    run = client.run(["/bin/sh", "-c", "echo via tty > /dev/tty; ps -o tty= -p $$; tty"], tty=True)
    first, by_ps, by_name = run.pty.decode().split()[1:]  # "via" is before them
    assert (first, f"/dev/{by_ps}") == ("tty", by_name)


def test_leader_leads_session_group_and_foreground(client: Client) -> None:
    script = "echo $$; cut -d' ' -f5,6,8 /proc/$$/stat"
    pid, group, session, foreground = client.run(["/bin/sh", "-c", script], tty=True).pty.split()
    assert pid == group == session == foreground


def test_typed_text_is_echoed_and_delivered(client: Client) -> None:
    name = _start(client, "read line; echo got $line")
    assert client.write(name, b"hello\n", "1") == "accepted"
    run = client.collect(name)
    assert run.pty == b"hello\r\ngot hello\r\n"


def test_control_c_interrupts_the_foreground(client: Client) -> None:
    name = client.start(["sleep", "60"], tty=True)
    assert client.write(name, b"\x03", "1") == "accepted"
    assert client.collect(name).exit_code == 130


def test_control_d_is_end_of_input(client: Client) -> None:
    name = client.start(["cat"], tty=True)
    client.write(name, b"line\n", "1")
    client.write(name, b"\x04", "2")
    run = client.collect(name)
    assert (run.pty, run.exit_code) == (b"line\r\nline\r\n", 0)


def test_job_control_works(client: Client) -> None:
    env = {"PATH": "/usr/bin:/bin", "PS1": "> ", "HOME": "/"}
    name = client.start(["bash", "--norc", "--noprofile", "-i"], tty=True, env=env)
    client.write(name, b'(echo run"ning"; exec sleep 1000)\n', "1")
    _until(client, name, b"running\r\n")
    client.write(name, b"\x1a", "2")
    _until(client, name, b"Stopped")
    client.write(name, b"jobs; echo $((40 + 2))\n", "3")
    shown = _until(client, name, b"42\r\n")
    assert shown.count(b"Stopped") == 2
    assert b"no job control" not in shown
    client.call("process/terminate", {"processId": name})
    assert client.collect(name).exit_code == 137


@pytest.mark.parametrize(("signal", "code"), [("TERM", 143), ("KILL", 137), ("SEGV", 139)])
def test_death_by_signal_is_128_plus_its_number(client: Client, signal: str, code: int) -> None:
    assert client.run(["/bin/sh", "-c", f"kill -{signal} $$"], tty=True).exit_code == code


def test_terminate(client: Client) -> None:
    name = client.start(["sleep", "60"], tty=True)
    assert client.call("process/terminate", {"processId": name}) == {"running": True}
    assert client.collect(name).exit_code == 137


def test_arg0_renames_the_program_but_does_not_replace_it(client: Client) -> None:
    run = client.run(["/bin/sh", "-c", "echo $0; cat /proc/$$/cmdline"], tty=True, arg0="/bin/no")
    assert run.exit_code == 0
    assert run.pty.startswith(b"/bin/no\r\n/bin/no\0-c\0")


def test_shell_is_the_login_shell_unless_given(client: Client) -> None:
    login_shell = pwd.getpwuid(os.getuid()).pw_shell or "/bin/sh"
    shown = client.run(["/bin/sh", "-c", "echo $SHELL"], tty=True).pty
    assert shown.decode().strip() == login_shell
    env = {"SHELL": "/bin/other", "PATH": "/usr/bin:/bin"}
    shown = client.run(["/bin/sh", "-c", "echo $SHELL; env"], tty=True, env=env).pty
    assert shown.startswith(b"/bin/other\r\n")
    assert b"TERM=" not in shown


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("", "missing program for PTY spawn"),
        ("./none", "Unable to spawn {cwd}/./none because it does not exist"),
        ("./dir", "Unable to spawn {cwd}/./dir because it is a directory"),
        ("./plain", "Unable to spawn {cwd}/./plain because it is not executable"),
        (
            "plain",
            "Unable to spawn plain because:\n{cwd}/plain exists but is not executable.\n"
            'No viable candidates found in PATH "{cwd}:/nowhere"',
        ),
        (
            "dir",
            "Unable to spawn dir because:\n{cwd}/dir exists but is a directory.\n"
            'No viable candidates found in PATH "{cwd}:/nowhere"',
        ),
    ],
)
def test_programs_that_cannot_be_started(
    client: Client, tmp_path: Path, program: str, text: str
) -> None:
    (tmp_path / "dir").mkdir()
    (tmp_path / "plain").touch(0o644)
    params = {"processId": "p", "argv": [program], "cwd": uri(tmp_path), "tty": True}
    params["env"] = {"PATH": f"{tmp_path}:/nowhere"}
    assert client.failure("process/start", params) == (-32603, text.format(cwd=tmp_path))


def test_leader_that_lets_go_of_its_terminal_goes_on(client: Client, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    script = f"""
        echo shown; exec < /dev/null > /dev/null 2>&1
        read line < {tmp_path}/fifo
        exit 6
    """
    name = _start(client, script)
    _until(client, name, b"shown\r\n")
    with open(tmp_path / "fifo", "w") as fifo:  # opens once the child has let go
        client.silence(0.1)
        fifo.write("go\n")
    run = client.collect(name)
    assert (run.exit_code, [kind for _, kind in run.events]) == (6, ["output", "exited", "closed"])


def test_end_of_the_leader_hangs_up_on_its_background(client: Client) -> None:
    run = client.run(["/bin/sh", "-c", "sleep 60 & echo up"], tty=True)
    assert run.pty == b"up\r\n"


def test_six_hundred_terminals_in_a_row() -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))"
    with start_prepared(limit) as server, server.connect() as client:
        for batch in range(30):
            names = []
            for number in range(20):
                name = f"{batch}-{number}"
                params = {"processId": name, "argv": ["/bin/true"], "cwd": "file:///"}
                client.request("process/start", params | {"env": {}, "tty": True})
                names.append(name)
            for name in names:
                assert client.collect(name).exit_code == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may count the server's descriptors")
def test_descriptors_are_given_back(fresh_server: Server) -> None:
    with fresh_server.connect() as client:
        client.run(["/bin/true"], tty=True)
        before = open_descriptors(fresh_server)
        for number in range(100):
            client.start(["/bin/sh", "-c", f"echo {number}"], tty=True, process_id=f"t{number}")
            client.start(["cat"], pipeStdin=True, process_id=f"cat{number}")
            client.call("process/terminate", {"processId": f"cat{number}"})
        for number in range(100):
            client.collect(f"t{number}")
            client.collect(f"cat{number}")
        params = {"argv": ["/missing"], "cwd": "file:///", "env": {}}
        for number in range(50):
            more = {"processId": str(number), "tty": number % 2 == 0, "pipeStdin": True}
            client.failure("process/start", params | more)
        eventually("descriptors are closed", lambda: open_descriptors(fresh_server) <= before)
