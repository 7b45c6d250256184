"""`exec-server exec`: streams, exit codes, signals and failures, against both servers."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.cli import (
    client_environment,
    next_line,
    run_client,
    start_client,
    stderr_text,
    wait_gone,
)
from tests.support.client import (
    DEFAULT_TIMEOUT,
    KINDS,
    descendants,
    scaled,
    server_command,
    server_environment,
    start_server,
)
from tests.support.client_targets import ClientTarget, Proxy, bounded
from tests.support.server_internals import eventually, stat_fields

# ---- streams and exit codes -----------------------------------------------------------


@pytest.mark.quick
def test_output_and_exit_code_are_the_commands(there: ClientTarget) -> None:
    ended = run_client("exec", there.url, "--", "sh", "-c", "echo out; echo err >&2; exit 3")
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, b"out\n", b"err\n")


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 255", 255), ("kill $$", 143)])
def test_exit_codes(there: ClientTarget, script: str, code: int) -> None:
    assert run_client("exec", there.url, "--", "sh", "-c", script).returncode == code


def test_words_reach_the_command_as_they_are(there: ClientTarget) -> None:
    words = ["a b", "", "--", "-t", "'\"$HOME*", "żółć", "\n"]
    ended = run_client("exec", there.url, "--", "printf", "<%s>", *words)
    assert ended.stdout.decode() == "".join(f"<{word}>" for word in words)


def test_all_bytes_pass_both_ways(ours: ClientTarget) -> None:
    data = os.urandom(3_000_000)
    ended = run_client("exec", ours.url, "--", "sh", "-c", "tee /dev/stderr", input=data)
    assert ended.returncode == 0
    assert ended.stdout == data
    assert ended.stderr == data


def test_all_bytes_pass_without_the_end_of_input(there: ClientTarget) -> None:
    data = os.urandom(1_000_000)
    ended = run_client("exec", there.url, "--", "head", "-c", str(len(data)), input=data)
    assert (ended.returncode, ended.stdout) == (0, data)


def test_input_may_be_a_file(ours: ClientTarget, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"x" * 200_000)
    with (tmp_path / "data").open("rb") as file:
        ended = run_client("exec", ours.url, "--", "wc", "-c", stdin=file)
    assert ended.stdout.split() == [b"200000"]


@pytest.mark.parametrize("flags", [(), ("-n",)])
def test_without_input_the_command_reads_the_end_at_once(
    there: ClientTarget, flags: tuple[str, ...]
) -> None:
    ended = run_client("exec", *flags, there.url, "--", "cat")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")


def test_a_command_need_not_read_its_input(there: ClientTarget) -> None:
    ended = run_client("exec", there.url, "--", "true", input=b"x" * 5_000_000)
    assert (ended.returncode, ended.stderr) in [(0, b""), (0, _NO_END)]


_NO_END = (
    b"exec-server: this server cannot close the command's stdin; "
    b"if the command waits for the end of its input, end it with Ctrl-C\n"
)


@pytest.mark.reference
@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_server_that_cannot_end_input_is_told_of_once(kind: str) -> None:
    with start_server(kind) as server:
        words = ("exec", server.url, "--", "cat")
        with start_client(*words, stdin=subprocess.PIPE) as client:
            assert client.stdin is not None
            assert client.stderr is not None
            client.stdin.write(b"hello\n")
            client.stdin.close()
            client.stdin = None
            assert client.stderr.readline() == _NO_END
            assert next_line(client) == b"hello\n"
            client.send_signal(signal.SIGINT)
            assert client.wait(scaled(DEFAULT_TIMEOUT)) == 130


def test_output_is_passed_on_at_once(there: ClientTarget) -> None:
    with start_client("exec", there.url, "--", "sh", "-c", "printf begun; sleep 1000") as client:
        assert client.stdout is not None
        assert client.stdout.read(5) == b"begun"


def test_directory_and_variables(there: ClientTarget, tmp_path: Path) -> None:
    ended = run_client(
        *("exec", "--cwd", str(tmp_path), "--env", "A=b=c", "--env", "HERE", there.url),
        *("--", "sh", "-c", 'echo "$PWD $A $HERE ${PATH:+inherited}"'),
        env={"HERE": "there"},
    )
    assert ended.stdout.decode() == f"{tmp_path} b=c there inherited\n"


def test_nobody_is_left_when_nobody_reads(there: ClientTarget) -> None:
    with start_client("exec", there.url, "--", "sh", "-c", "echo $$; exec yes") as client:
        pid = int(next_line(client))
        assert client.stdout is not None
        client.stdout.close()
        client.stdout = None
        assert client.wait(scaled(DEFAULT_TIMEOUT)) == 141
        wait_gone(pid)


def test_background_children_end_with_the_command(ours: ClientTarget) -> None:
    script = "setsid sleep 1000 < /dev/null > /dev/null 2>&1 & echo $!; exit 3"
    ended = run_client("exec", ours.url, "--", "sh", "-c", script)
    assert ended.returncode == 3
    wait_gone(int(ended.stdout))


def test_a_slow_reader_gets_all_output(ours: ClientTarget) -> None:
    script = "head -c 9000000 /dev/zero; echo all written >&2; exit 4"
    with start_client("exec", ours.url, "--", "sh", "-c", script) as client:
        tasks = f"/proc/{client.pid}/task"
        # A thread of the client waits for the reader.
        eventually("a thread writes", lambda: len(os.listdir(tasks)) > 1)
        stdout, stderr = client.communicate(timeout=scaled(3 * DEFAULT_TIMEOUT))
        assert (client.returncode, len(stdout), stderr) == (4, 9_000_000, b"all written\n")


def test_a_command_that_takes_too_long_is_ended(there: ClientTarget) -> None:
    words = ("exec", "--timeout", "0.3", there.url, "--", "sh", "-c", "echo $$; exec sleep 1000")
    ended = run_client(*words)
    assert ended.returncode == 124
    assert stderr_text(ended) == "exec-server: the command was killed after 0.3 s\n"
    wait_gone(int(ended.stdout))


@pytest.mark.parametrize("kind", KINDS)
def test_a_late_command_of_a_server_that_does_not_answer(kind: str) -> None:
    with start_server(kind) as server:
        words = ("exec", "--timeout", "1", server.url, "--", "sh", "-c", "echo begun; sleep 1000")
        with start_client(*words) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == b"begun\n"
            server.process.send_signal(signal.SIGSTOP)
            try:
                stderr = client.communicate(timeout=scaled(20))[1]
            finally:
                server.process.send_signal(signal.SIGCONT)
        assert client.returncode == 124
        assert stderr == (
            b"exec-server: the command did not end within 1 s; it may still run, because the "
            b"server did not report its end\n"
        )


def test_a_terminated_client_of_a_server_that_does_not_answer() -> None:
    with start_server("ours") as server:
        words = ("exec", server.url, "--", "sh", "-c", "echo begun; sleep 1000")
        with start_client(*words) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == b"begun\n"
            server.process.send_signal(signal.SIGSTOP)
            try:
                client.send_signal(signal.SIGTERM)
                stderr = client.communicate(timeout=scaled(20))[1]
            finally:
                server.process.send_signal(signal.SIGCONT)
        assert client.returncode == 128 + signal.SIGTERM
        assert stderr == (
            b"exec-server: the server has not confirmed SIGTERM\n"
            b"exec-server: the command may still run, because the server did not report its end\n"
        )


def test_a_command_that_has_exited_is_not_late(there: ClientTarget) -> None:
    """Its child keeps the output open beyond the time limit."""
    words = ("exec", "--timeout", "0.3", there.url, "--", "sh", "-c")
    ended = run_client(*words, "echo out; sleep 1000 & echo $!; exit 3")
    assert (ended.returncode, ended.stderr) == (3, b"")
    assert ended.stdout.startswith(b"out\n")
    child = int(ended.stdout.split()[1])
    if there.kind != "ours":
        os.kill(child, signal.SIGKILL)
    wait_gone(child)


def test_a_terminal_without_one_here(there: ClientTarget) -> None:
    words = ("exec", "-t", there.url, "--", "sh", "-c", "tty; echo $TERM; cat")
    ended = run_client(*words, input=b"abc\n")
    assert ended.returncode == 0
    assert b"/dev/pts/" in ended.stdout
    assert b"dumb" in ended.stdout
    assert b"abc" in ended.stdout


@pytest.mark.parametrize(("flags", "stdin"), [((), "/dev/null"), ((), "-"), (("-n",), "/dev/zero")])
def test_a_terminal_without_input_reads_the_end_at_once(
    there: ClientTarget, flags: tuple[str, ...], stdin: str
) -> None:
    script = 'exec "$@" <&-' if stdin == "-" else f'exec "$@" < {stdin}'
    words = (*server_command("ours"), "exec", "-t", *flags, there.url, "--", "cat")
    ended = subprocess.run(
        ["sh", "-c", script, "sh", *words],
        env=client_environment(None),
        capture_output=True,
        timeout=scaled(30),
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, b"")


# ---- signals --------------------------------------------------------------------------


def _trap(name: str) -> list[str]:
    return [
        "sh",
        "-c",
        f"trap 'echo {name}; exit 7' {name}; echo begun; sleep 1000 > /dev/null 2>&1 & wait",
    ]


@pytest.mark.parametrize("name", ["INT", "TERM", "HUP", "QUIT", "USR1", "USR2"])
def test_signals_reach_the_command(ours: ClientTarget, name: str) -> None:
    with start_client("exec", ours.url, "--", *_trap(name)) as client:
        assert next_line(client) == b"begun\n"
        client.send_signal(getattr(signal, f"SIG{name}"))
        assert next_line(client) == f"{name}\n".encode()
        assert client.wait(scaled(DEFAULT_TIMEOUT)) == 7


def test_where_only_ctrl_c_can_be_sent_the_others_kill(there: ClientTarget) -> None:
    with start_client("exec", there.url, "--", *_trap("INT")) as client:
        assert next_line(client) == b"begun\n"
        client.send_signal(signal.SIGINT)
        assert next_line(client) == b"INT\n"
        assert client.wait(scaled(DEFAULT_TIMEOUT)) == 7
    with start_client("exec", there.url, "--", "sh", "-c", "echo begun; exec sleep 1000") as client:
        assert next_line(client) == b"begun\n"
        client.send_signal(signal.SIGTERM)
        expected = 143 if there.kind == "ours" else 137
        assert client.wait(scaled(DEFAULT_TIMEOUT)) == expected


def test_who_insists_gets_an_end(there: ClientTarget) -> None:
    script = (
        "trap 'echo ignored' INT; echo $$; while :; do sleep 1000 > /dev/null 2>&1 & wait; done"
    )
    with start_client("exec", there.url, "--", "sh", "-c", script) as client:
        pid = int(next_line(client))
        client.send_signal(signal.SIGINT)
        assert next_line(client) == b"ignored\n"
        client.send_signal(signal.SIGINT)
        assert client.wait(scaled(DEFAULT_TIMEOUT)) == 130
        wait_gone(pid)


def test_stopping_the_client_stops_the_command(ours: ClientTarget) -> None:
    words = ("exec", ours.url, "--", "sh", "-c", "echo $$; exec cat")
    with start_client(*words, stdin=subprocess.PIPE) as client:
        assert client.stdin is not None
        pid = int(next_line(client))
        client.send_signal(signal.SIGTSTP)
        eventually("stopped", lambda: stat_fields(pid)[0] == "T")
        # It stops itself after the command: a signal in between would be no reason to go on.
        eventually("client stopped", lambda: stat_fields(client.pid)[0] == "T")
        client.send_signal(signal.SIGCONT)
        eventually("continued", lambda: stat_fields(pid)[0] == "S")
        client.stdin.write(b"on\n")
        client.stdin.close()
        client.stdin = None
        assert next_line(client) == b"on\n"
        assert client.wait(scaled(DEFAULT_TIMEOUT)) == 0


def test_a_signal_before_the_command_ends_the_client(tmp_path: Path) -> None:
    # A program that never answers: the client hangs in its handshake.
    pid_file = tmp_path / "pid"
    with start_client(
        "exec", f"stdio:sh -c 'echo $$ > {pid_file}; exec sleep 1000'", "--", "x"
    ) as client:
        pid = int(
            eventually("pid", lambda: (pid_file.exists() and pid_file.read_text().strip()) or None)
        )
        client.send_signal(signal.SIGTERM)
        assert client.wait(scaled(DEFAULT_TIMEOUT)) == 143
        wait_gone(pid)


def test_a_signal_that_our_starter_ignores_is_ignored(there: ClientTarget) -> None:
    """As nohup has it, and a shell for what it starts in the background."""
    ignored = ("HUP", "INT", "QUIT")
    trap = f"trap '' {' '.join(ignored)}; exec \"$@\""
    words = ["sh", "-c", trap, "sh", *server_command("ours"), "exec", there.url, "--"]
    with subprocess.Popen(
        [*words, "sh", "-c", "echo begun; read -r line; echo $line"],
        env=server_environment("ours"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as client:
        try:
            assert next_line(client) == b"begun\n"
            for name in ignored * 2:
                client.send_signal(getattr(signal, f"SIG{name}"))
            assert client.communicate(b"on\n", scaled(DEFAULT_TIMEOUT))[0] == b"on\n"
            assert client.returncode == 0
        finally:
            client.kill()


# Sends itself a signal where a user who is quick would: in the middle of loading.
_QUICK = """
import os, signal, sys
class Quick:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPTED_IMPORT"]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Quick())
from exec_server.cli.main import main
main()
"""


@pytest.mark.parametrize(
    ("before", "module", "code"),
    [
        ("-", "exec_server.cli.table", 130),
        ("-", "exec_server.cli.streams", -signal.SIGINT),
        ("''", "exec_server.cli.streams", 0),
    ],
)
def test_an_interrupt_while_it_is_loaded(before: str, module: str, code: int) -> None:
    trap = f'trap {before} INT; exec "$@"'
    words = ["sh", "-c", trap, "sh", sys.executable, "-c", _QUICK, "completion", "fish"]
    ended = subprocess.run(
        words,
        env=server_environment("ours", {"INTERRUPTED_IMPORT": module}),
        capture_output=True,
        timeout=scaled(30),
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (code, b"")


# ---- what fails -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "texts"),
    [
        (["ws://127.0.0.1:1"], 255, ["cannot connect", "refused", "Check that the server is"]),
        (["ws://nowhere.invalid"], 255, ["cannot connect", "Check the spelling"]),
        (["ws://user:pw@127.0.0.1"], 2, ["must not contain a user name"]),
        (["nobody"], 2, ["unknown target `nobody`", "targets.toml defines no targets"]),
        (["stdio:/no/such/program"], 255, ["cannot start /no/such/program"]),
        (["stdio:true"], 255, ["must speak the protocol"]),
        (["stdio:cat"], 255, ["cannot connect to stdio:cat", "must speak the protocol"]),
        (
            ["--ca-file", "/etc/passwd", "wss://127.0.0.1"],
            2,
            ["no certificates in the CA file /etc"],
        ),
        (["--token-env", "UNSET", "ws://127.0.0.1"], 2, ["environment variable UNSET"]),
        (["--env", "=x", "ws://127.0.0.1"], 2, ["has no name"]),
        (["--env", "UNSET", "ws://127.0.0.1"], 2, ["UNSET=VALUE"]),
        (["--sandbox", "/no/such", "ws://127.0.0.1"], 2, ["the named policies are read-only"]),
        (["relay:https://127.0.0.1/e"], 2, ["requires a token"]),
        (["-x"], 2, ["try 'exec-server exec -h'"]),
    ],
)
def test_failures_say_what_to_do(words: list[str], code: int, texts: list[str]) -> None:
    ended = run_client("exec", *words, "--", "true")
    assert (ended.returncode, ended.stdout) == (code, b"")
    said = stderr_text(ended)
    assert said.startswith("Error: ")
    for text in texts:
        assert text in said
    assert "Traceback" not in said


def test_commands_that_cannot_be_run(there: ClientTarget) -> None:
    ended = run_client("exec", there.url, "no-such-program")
    assert ended.returncode == 127
    assert "cannot start no-such-program: No such file or directory\n" in stderr_text(ended)
    ended = run_client("exec", there.url, "/etc/passwd")
    assert ended.returncode == 126
    assert "cannot start /etc/passwd: Permission denied\n" in stderr_text(ended)
    for word, code in (("no-such-program", 127), ("./none", 127), ("/etc/passwd", 126)):
        ended = run_client("exec", "-t", there.url, word)
        assert (ended.returncode, stderr_text(ended).count("\n")) == (code, 1), word
    ended = run_client("exec", there.url, "ls / | wc")
    assert ended.returncode == 127
    assert stderr_text(ended).endswith("let a shell read it: sh -c 'ls / | wc'\n")
    ended = run_client("exec", "--cwd", "/no/such/place", there.url, "--", "true")
    assert ended.returncode == 126
    text = "cannot start true in /no/such/place: No such file or directory\n"
    assert stderr_text(ended).endswith(text)


def test_options_stand_before_the_command(ours: ClientTarget) -> None:
    ended = run_client("exec", "--cwd", "/", ours.url, "-n", "sh", "-c", "pwd; echo $0", "--cwd")
    assert (ended.returncode, ended.stdout) == (0, b"/\n--cwd\n")


def test_a_shell_reads_commands_from_stdin(there: ClientTarget) -> None:
    ended = run_client("shell", there.url, input=b"cd /; pwd; exit 3\n")
    assert (ended.returncode, ended.stdout) == (3, b"/\n")


@pytest.mark.parametrize("policy", ["read-only", "file"])
def test_a_command_is_confined(ours: ClientTarget, tmp_path: Path, policy: str) -> None:
    if policy == "file":
        policy = str(tmp_path / "policy.json")
        read = {"path": {"type": "special", "value": {"kind": "root"}}, "access": "read"}
        files = {"type": "restricted", "entries": [read]}
        permissions = {"type": "managed", "file_system": files, "network": "restricted"}
        Path(policy).write_text(json.dumps(permissions))
    words = ("--sandbox", policy, "--cwd", str(tmp_path), ours.url, "touch", "new")
    ended = run_client("exec", *words)
    assert ended.returncode == 1
    assert f"exec-server: denied: write {tmp_path}/new\n" in stderr_text(ended)
    assert not (tmp_path / "new").exists()


def test_a_workspace_can_be_written(ours: ClientTarget, tmp_path: Path) -> None:
    words = ("--sandbox", "workspace-write", "--cwd", str(tmp_path), ours.url, "touch", "new")
    assert run_client("exec", *words).returncode == 0
    assert (tmp_path / "new").exists()


def test_a_lost_session_is_a_failure(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    serve = shlex.join([*server_command("ours"), "--listen", "stdio"])
    target = f"stdio:sh -c 'echo $$ > {pid_file}; exec {serve}'"
    with start_client("exec", target, "--", "sh", "-c", "echo begun; sleep 1000") as client:
        assert next_line(client) == b"begun\n"
        os.kill(int(pid_file.read_text()), signal.SIGKILL)
        assert client.wait(scaled(DEFAULT_TIMEOUT)) == 255
        assert client.stderr is not None
        assert b"connection lost" in client.stderr.read()


def test_a_client_needs_no_watchdog(ours: ClientTarget) -> None:
    with start_client("exec", ours.url, "--", "sh", "-c", "echo begun; sleep 1000") as client:
        assert next_line(client) == b"begun\n"
        assert descendants(client.pid) == {}


def test_an_interrupted_connection_is_reported(ours: ClientTarget) -> None:
    async def scene() -> None:
        async with Proxy(ours.url).running() as proxy:
            client = await asyncio.create_subprocess_exec(
                *(*server_command("ours"), "exec", proxy.url, "--", "sh", "-c"),
                "echo begun; read -r line; echo $line",
                env=client_environment(None),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            try:
                assert client.stdin is not None
                assert client.stdout is not None
                assert client.stderr is not None
                assert await client.stdout.readline() == b"begun\n"
                proxy.is_open = False
                proxy.cut()
                lost = rf"exec-server: connection to {proxy.url} lost 1 s ago \(.+\); "
                told = (await client.stderr.readline()).decode()
                assert re.fullmatch(rf"{lost}trying again for 4\d s\n", told)
                proxy.is_open = True
                back = f"exec-server: {proxy.url}: reconnected\n"
                assert (await client.stderr.readline()).decode() == back
                client.stdin.write(b"on\n")
                assert await client.communicate() == (b"on\n", b"")
                assert client.returncode == 0
            finally:
                if client.returncode is None:
                    client.kill()
                    await client.wait()

    bounded(scene(), patience=2)


def test_who_insists_gets_an_end_without_a_server(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with start_server("ours", "--listen", f"unix:{path}") as server:
        words = ("exec", f"unix:{path}", "--", "sh", "-c", "echo $$; exec sleep 1000")
        with start_client(*words) as client:
            assert client.stderr is not None
            pid = int(next_line(client))
            server.process.kill()
            server.process.wait()
            # The client knows of it, and keeps the signals for the resumed session.
            assert b" lost 1 s ago" in client.stderr.readline()
            client.send_signal(signal.SIGINT)
            # A signal that is still pending would be the same one.
            status = Path(f"/proc/{client.pid}/status")
            none = "ShdPnd:\t0000000000000000\n"
            eventually("the signal is received", lambda: none in status.read_text())
            client.send_signal(signal.SIGINT)
            assert client.wait(scaled(DEFAULT_TIMEOUT)) == 130
            wait_gone(pid)
