"""`exec-server sandbox run`: arguments, streams, denials, signals and endings."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.barriers import user_id
from tests.support.client import DEFAULT_TIMEOUT, descendants, run_command, scaled, survivors
from tests.support.sandbox import (
    BASE_STEPS,
    PROTECTED,
    USERS,
    Json,
    SandboxCommand,
    Scratch,
    environment,
    guarded,
    interpreter,
    run_to_end,
)
from tests.support.server_internals import children, eventually, stat_fields


@pytest.fixture(params=USERS)
def command(request: pytest.FixtureRequest) -> Iterator[SandboxCommand]:
    """The command of root, or of an ordinary user, with its own tree."""
    with Scratch(user_id(request.param)) as scratch:
        scratch.reset(BASE_STEPS)
        yield SandboxCommand(request.param, scratch)


# ---- help and mistakes ----------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize(
    ("words", "taught"),
    [
        ((), ("check", "run", "examples:")),
        (("check",), ("--json", "exit code:", "examples:")),
        (
            ("run",),
            ("--policy", "--root", "--network", "--show", "workspace-write", "125", "examples:"),
        ),
    ],
)
def test_help_teaches(words: tuple[str, ...], taught: tuple[str, ...]) -> None:
    ended = run_command("ours", "sandbox", *words, "--help")
    assert (ended.returncode, ended.stderr) == (0, "")
    for word in taught:
        assert word in ended.stdout
    assert max(map(len, ended.stdout.splitlines())) <= 100


def test_help_of_the_server_mentions_it() -> None:
    assert "\n  sandbox " in run_command("ours", "--help").stdout


def test_policy_in_the_help_works(command: SandboxCommand) -> None:
    text = command("run", "--help").stdout
    path = command.file(text[text.index("\n  {") :])
    ended = command.run(path, "/bin/sh", "-c", "touch new && ls /home /var")
    assert (command.ws / "new").exists(), ended.stderr
    assert ended.returncode != 0


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "ACTION"),
        (("chekc",), "chekc"),
        (("check", "--yaml"), "--yaml"),
        (("check", "--", "true"), "no command"),
        (("run",), "--policy"),
        (("run", "--policy", "read-only"), "COMMAND"),
        (("run", "--policy", "read-only", "--"), "COMMAND"),
        (("run", "--policy", "read-only", "true"), "after `--`"),
        (("run", "--pol", "read-only", "--", "true"), "--policy"),
        (("run", "--policy", "readonly", "--", "true"), "read-only and workspace-write"),
        (("run", "--policy", "/", "--", "true"), "Is a directory"),
        (("run", "--policy", "/dev/zero", "--", "true"), "bytes"),
        (("run", "--policy", "read-only", "--cwd", "/none", "--", "true"), "/none"),
        (("run", "--policy", "read-only", "--root", "/", "--", "true"), "--root"),
        (("run", "--policy", "workspace-write", "--root", "/none", "--", "true"), "/none"),
    ],
)
def test_mistakes_in_arguments(words: tuple[str, ...], text: str) -> None:
    ended = run_command("ours", "sandbox", *words)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("Error: ")
    assert text in ended.stderr


# ---- running --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 42", 42), ("kill -9 $$", 137), ("kill $$", 143)]
)
def test_exit_code_is_the_commands(command: SandboxCommand, script: str, code: int) -> None:
    ended = command.run("read-only", "/bin/sh", "-c", script)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "", "")


def test_program_that_does_not_exist(command: SandboxCommand) -> None:
    ended = command.run("read-only", "/no/such/program")
    assert ended.returncode == 101
    assert "cannot execute /no/such/program: No such file" in ended.stderr


def test_words_of_the_command_are_its_own(command: SandboxCommand) -> None:
    ended = command.run("read-only", "printf", "%s|", "--policy", "--", "--show", "")
    assert (ended.stdout, ended.stderr) == ("--policy|--|--show||", "")


def test_streams_pass_through(command: SandboxCommand) -> None:
    # More than a pipe holds in each direction: a deadlock would show.
    sent = "".join(f"{number} line\n" for number in range(100_000))
    ended = command.run("read-only", "/bin/sh", "-c", "tee /dev/stderr", input=sent)
    assert ended.returncode == 0
    assert ended.stdout == sent
    assert ended.stderr == sent


@pytest.mark.parametrize("policy", ["read-only", "workspace-write"])
def test_file_as_stdin_can_only_be_read(command: SandboxCommand, policy: str) -> None:
    path = command.scratch.base / "outside/o.txt"
    script = "echo forged > /proc/self/fd/0; echo forged >> /dev/stdin; : > /dev/stdin"
    with path.open() as file:
        command.run(policy, "/bin/sh", "-c", script, stdin=file)
    assert path.read_text() == "outside"
    large = "line\n" * 100_000
    path.write_text(large)
    with path.open() as file:
        assert command.run(policy, "cat", stdin=file).stdout == large
    with path.open() as file:  # the command does not wait for the rest of its stdin
        assert command.run(policy, "head", "-n1", stdin=file).stdout == "line\n"


@pytest.mark.parametrize("policy", ["read-only", "workspace-write"])
def test_file_to_read_in_place_of_stdout_is_not_written(
    command: SandboxCommand, policy: str
) -> None:
    path = command.scratch.base / "outside/o.txt"
    script = "echo forged > /proc/self/fd/1"
    words = command.words("run", "--policy", policy, "--", "sh", "-c", script)
    run_to_end(["sh", "-c", 'exec "$@" 1<"$0"', str(path), *words], cwd=command.ws)
    assert path.read_text() == "outside"


def test_command_is_told_that_nobody_reads_its_errors(command: SandboxCommand) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    script = "trap '' PIPE; while echo x >&2; do :; done; exit 7"
    process = subprocess.Popen(
        command.words("run", "--policy", "read-only", "--", "/bin/sh", "-c", script),
        env=environment(),
        cwd=command.ws,
        stderr=writer,
    )
    os.close(writer)
    assert process.wait(scaled(DEFAULT_TIMEOUT)) == 7


def test_environment_is_inherited_and_pwd_is_the_directory(command: SandboxCommand) -> None:
    words = ("run", "--policy", "read-only", "--cwd", "sub", "--", "/bin/sh", "-c")
    ended = command(*words, 'printf "%s %s" "$PWD" "$PATH"; pwd')
    assert ended.stdout == f"{command.ws}/sub {os.environ['PATH']}{command.ws}/sub\n"


def test_denied_write_is_explained(command: SandboxCommand) -> None:
    target = command.scratch.base / "outside" / "new"
    before = guarded(command.scratch.base)
    ended = command.run("workspace-write", "/bin/sh", "-c", f"touch inside && touch {target}")
    assert ended.returncode == 1
    assert "Read-only file system" in ended.stderr
    assert ended.stderr.endswith(
        f"exec-server: denied: write {target}\n"
        "exec-server: no policy entry allows writing here; the closest one is: read /\n"
    )
    assert (command.ws / "inside").exists()
    assert guarded(command.scratch.base) == before


def test_denied_write_by_a_relative_name_is_explained(command: SandboxCommand) -> None:
    ended = command.run("workspace-write", "rm", "-r", ".git/hooks")
    assert f"denied: write {command.ws}/.git/hooks\n" in ended.stderr
    assert f"`.git` below the writable root {command.ws} is protected" in ended.stderr


def test_read_only_writes_nowhere(command: SandboxCommand) -> None:
    ended = command.run(
        "read-only", "/bin/sh", "-c", "cat a.txt; touch new; touch /tmp/exec-demo-new"
    )
    assert ended.stdout == "hello"
    assert f"denied: write {command.ws}/new" in ended.stderr
    assert not (command.ws / "new").exists()
    assert not Path("/tmp/exec-demo-new").exists()


def test_denied_write_before_a_success_is_explained(command: SandboxCommand) -> None:
    ended = command.run("read-only", "/bin/sh", "-c", "touch new; echo done")
    assert (ended.returncode, ended.stdout) == (0, "done\n")
    assert ended.stderr.endswith(
        f"exec-server: denied: write {command.ws}/new\n"
        "exec-server: no policy entry allows writing here; the closest one is: read /\n"
    )


def test_success_is_not_explained(command: SandboxCommand) -> None:
    script = "mkdir -m 000 closed; ls closed/x; rmdir closed; echo 'Read-only file system: /etc/x'"
    ended = command.run("workspace-write", "/bin/sh", "-c", script)
    assert ended.returncode == 0
    assert "exec-server" not in ended.stderr


def test_ordinary_lack_of_rights_is_told_apart(command: SandboxCommand) -> None:
    (command.ws / "program").write_text("#!/bin/sh\n")
    ended = command.run("read-only", "/bin/sh", "-c", "./program")
    assert ended.returncode == 126
    assert "exec-server: no rule of the policy explains this error: " in ended.stderr


_CONNECT = "import socket; socket.socket(); print('made')"
_CATCH = "import socket, contextlib\nwith contextlib.suppress(OSError): socket.socket()"


def test_network_is_out_of_reach_unless_asked_for(command: SandboxCommand) -> None:
    ended = command.run("read-only", interpreter(), "-c", _CONNECT)
    assert ended.returncode == 1
    assert ended.stderr.endswith(
        "exec-server: denied: network access\nexec-server: network access is restricted\n"
    )
    quiet = f"{interpreter()} -c '{_CATCH}'; echo done"
    ended = command.run("read-only", "/bin/sh", "-c", quiet)
    assert (ended.returncode, ended.stdout) == (0, "done\n")
    assert ended.stderr == (
        "exec-server: denied: network access\nexec-server: network access is restricted\n"
    )
    words = ("run", "--policy", "read-only", "--network", "--", interpreter(), "-c", _CONNECT)
    assert command(*words).stdout == "made\n"


def test_roots_replace_the_current_directory(command: SandboxCommand) -> None:
    words = ("run", "--policy", "workspace-write", "--root", "sub", "--root", "../outside")
    ended = command(*words, "--", "/bin/sh", "-c", "touch sub/new ../outside/new; touch new")
    assert (command.ws / "sub" / "new").exists()
    assert (command.scratch.base / "outside" / "new").exists()
    assert not (command.ws / "new").exists()
    assert f"denied: write {command.ws}/new" in ended.stderr


# ---- endings --------------------------------------------------------------------------

_FAMILY = ("/bin/sh", "-c", "sleep 60 & setsid sleep 60 & echo ready; wait")


def _ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    stdout, stderr = process.communicate(timeout=scaled(DEFAULT_TIMEOUT))
    return process.returncode, stdout, stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_reach_the_command_and_nothing_is_left(
    command: SandboxCommand, number: int
) -> None:
    with command.start("run", "--policy", "workspace-write", "--", *_FAMILY) as process:
        family = descendants(process.pid)
        assert len(family) >= 4  # the watchdog, the init, the shell and its children
        assert command.placeholders() == list(PROTECTED)
        os.killpg(process.pid, number)  # as a terminal does
        assert _ended(process) == (128 + number, "", "")
    assert survivors(family) == []
    assert command.placeholders() == []


def test_command_may_handle_a_signal(command: SandboxCommand) -> None:
    script = "trap 'echo caught; exit 5' TERM; echo ready; while :; do sleep 0.01; done"
    words = ("run", "--policy", "read-only", "--", "/bin/sh", "-c", script)
    with command.start(*words) as process:
        process.terminate()
        assert _ended(process)[:2] == (5, "caught\n")


def test_nothing_outlives_a_killed_parent(command: SandboxCommand) -> None:
    with command.start("run", "--policy", "workspace-write", "--", *_FAMILY) as process:
        family = descendants(process.pid)
        process.kill()
        _ended(process)
    assert survivors(family) == []
    eventually("the placeholders are gone", lambda: not command.placeholders())


def test_stopping_stops_the_command_too(command: SandboxCommand) -> None:
    script = "echo ready; while :; do echo x >> ticks; sleep 0.01; done"
    words = ("run", "--policy", "workspace-write", "--", "/bin/sh", "-c", script)
    with command.start(*words) as process:
        family = descendants(process.pid)
        ticks = command.ws / "ticks"
        eventually("it ticks", ticks.exists)
        process.send_signal(signal.SIGTSTP)
        eventually("it stops", lambda: stat_fields(process.pid)[0] == "T")
        eventually("the command stops", lambda: _has_stopped_shell(process.pid))
        size = ticks.stat().st_size
        process.send_signal(signal.SIGCONT)
        eventually("it goes on", lambda: ticks.stat().st_size > size)
        process.terminate()
        assert _ended(process)[0] == 143
    assert survivors(family) == []


def _has_stopped_shell(pid: int) -> bool:
    """Whether a shell below this process is stopped, or its child before it executes a program.

    A shell that waits in vfork for such a child does not stop itself.
    """
    for below in descendants(pid):
        with contextlib.suppress(FileNotFoundError):
            if stat_fields(below)[0] == "T" and _command_line(below)[:1] == ["/bin/sh"]:
                return True
    return False


def _command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except FileNotFoundError:
        return []  # it has ended


_ONLY_NETWORK = {
    "type": "managed",
    "file_system": {"type": "unrestricted"},
    "network": "restricted",
}


@pytest.mark.parametrize("permissions", [{"type": "disabled"}, _ONLY_NETWORK])
def test_nothing_outlives_a_command_without_namespaces(
    command: SandboxCommand, permissions: Json
) -> None:
    with command.start("run", "--policy", command.file(permissions), "--", *_FAMILY) as process:
        family = descendants(process.pid)
        (leader,) = [pid for pid in children(process.pid) if _command_line(pid)[0] == "/bin/sh"]
        os.kill(leader, signal.SIGKILL)
        code, _, stderr = _ended(process)
    assert code == 137
    assert ("runs unconfined" in stderr) == (permissions["type"] == "disabled")
    assert survivors(family) == []
