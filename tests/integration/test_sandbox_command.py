"""`exec-server sandbox`: what `check` says about a machine, and commands that `run` confines."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import circumstances
from circumstances import User, user_id
from inside import children, eventually, stat_fields
from sandboxing import (
    BASE_STEPS,
    NEEDS_ROOT,
    PROTECTED,
    USERS,
    Json,
    Scratch,
    entry,
    glob,
    guarded,
    interpreter,
    policy,
    special,
    workspace_write,
)
from wire import (
    PATIENCE,
    descendants,
    run_command,
    scaled,
    server_command,
    server_environment,
    survivors,
)

_AS_ROOT = pytest.param("root", marks=[pytest.mark.root, NEEDS_ROOT])
_NOTHING_HAS_RUN = 125
# Becomes an ordinary user that may make no user namespace, by a limit of the kernel's own.
_WITHOUT_USER_NAMESPACES = """
import ctypes, os, sys
from pathlib import Path
uid, gid = os.geteuid(), os.getegid()
assert ctypes.CDLL(None).unshare(0x10000000) == 0
Path("/proc/self/setgroups").write_text("deny")
Path("/proc/self/uid_map").write_text(f"20000 {uid} 1")
Path("/proc/self/gid_map").write_text(f"20000 {gid} 1")
Path("/proc/sys/user/max_user_namespaces").write_text("0")
os.execvp(sys.argv[1], sys.argv[1:])
"""


class Hand:
    """Somebody who types commands in a workspace."""

    def __init__(self, user: User, scratch: Scratch) -> None:
        self.user: User = user
        self.scratch = scratch
        self.ws = scratch.base / "ws"

    def words(self, *words: str, barrier: str = "none") -> list[str]:
        """The command line as this user."""
        become = [sys.executable, circumstances.__file__, str(user_id(self.user)), barrier]
        return [*become, *server_command("ours"), "sandbox", *words]

    def __call__(
        self, *words: str, barrier: str = "none", **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command line to its end."""
        return _finished(self.words(*words, barrier=barrier), cwd=self.ws, **options)

    def run(self, policy_name: str, *argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command under a policy."""
        return self("run", "--policy", policy_name, "--", *argv, **options)

    @contextlib.contextmanager
    def start(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        """Start a command line in a group of its own, and wait until the command is ready."""
        with subprocess.Popen(
            self.words(*words),
            env=_environment(),
            cwd=self.ws,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
        ) as process:
            try:
                assert process.stdout is not None
                if process.stdout.readline() != "ready\n":
                    pytest.fail(str(process.communicate(timeout=scaled(PATIENCE))))
                yield process
            finally:
                process.kill()

    def file(self, value: Json | str) -> str:
        """The path of a file with a policy, which no policy lets anybody write."""
        path = self.scratch.base / "policy.json"
        path.write_text(value if isinstance(value, str) else json.dumps(value))
        return str(path)

    def placeholders(self) -> list[str]:
        """Protected names that have come into being."""
        return [name for name in PROTECTED if (self.ws / name).exists()]


def _environment() -> dict[str, str]:
    return server_environment("ours", {"TMPDIR": None})


def _finished(words: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words,
        env=_environment(),
        **{"stdin": None if "input" in options else subprocess.DEVNULL} | options,
        capture_output=True,
        text=True,
        timeout=scaled(PATIENCE),
        check=False,
    )


@pytest.fixture(params=USERS)
def hand(request: pytest.FixtureRequest) -> Iterator[Hand]:
    """Root, or an ordinary user, with a tree of their own."""
    with Scratch(user_id(request.param)) as scratch:
        scratch.reset(BASE_STEPS)
        yield Hand(request.param, scratch)


# ---- help and mistakes ----------------------------------------------------------------


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
    assert "exec-server sandbox check" in run_command("ours", "--help").stdout


def test_policy_in_the_help_works(hand: Hand) -> None:
    text = hand("run", "--help").stdout
    path = hand.file(text[text.index("\n  {") :])
    ended = hand.run(path, "/bin/sh", "-c", "touch new && ls /home /var")
    assert (hand.ws / "new").exists(), ended.stderr
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
def test_exit_code_is_the_commands(hand: Hand, script: str, code: int) -> None:
    ended = hand.run("read-only", "/bin/sh", "-c", script)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "", "")


def test_program_that_does_not_exist(hand: Hand) -> None:
    ended = hand.run("read-only", "/no/such/program")
    assert ended.returncode == 101
    assert "cannot execute /no/such/program: No such file" in ended.stderr


def test_words_of_the_command_are_its_own(hand: Hand) -> None:
    ended = hand.run("read-only", "printf", "%s|", "--policy", "--", "--show", "")
    assert (ended.stdout, ended.stderr) == ("--policy|--|--show||", "")


def test_streams_pass_through(hand: Hand) -> None:
    # More than a pipe holds in each direction, so that nothing may wait for anything else.
    sent = "".join(f"{number} line\n" for number in range(100_000))
    ended = hand.run("read-only", "/bin/sh", "-c", "tee /dev/stderr", input=sent)
    assert ended.returncode == 0
    assert ended.stdout == sent
    assert ended.stderr == sent


def test_command_is_told_that_nobody_reads_its_errors(hand: Hand) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    script = "trap '' PIPE; while echo x >&2; do :; done; exit 7"
    process = subprocess.Popen(
        hand.words("run", "--policy", "read-only", "--", "/bin/sh", "-c", script),
        env=_environment(),
        cwd=hand.ws,
        stderr=writer,
    )
    os.close(writer)
    assert process.wait(scaled(PATIENCE)) == 7


def test_environment_is_inherited_and_pwd_is_the_directory(hand: Hand) -> None:
    words = ("run", "--policy", "read-only", "--cwd", "sub", "--", "/bin/sh", "-c")
    ended = hand(*words, 'printf "%s %s" "$PWD" "$PATH"; pwd')
    assert ended.stdout == f"{hand.ws}/sub {os.environ['PATH']}{hand.ws}/sub\n"


def test_denied_write_is_explained(hand: Hand) -> None:
    target = hand.scratch.base / "outside" / "new"
    before = guarded(hand.scratch.base)
    ended = hand.run("workspace-write", "/bin/sh", "-c", f"touch inside && touch {target}")
    assert ended.returncode == 1
    assert "Read-only file system" in ended.stderr
    assert ended.stderr.endswith(
        f"exec-server: denied: to write {target}\n"
        "exec-server: no entry grants writing; the deepest entry is read /\n"
    )
    assert (hand.ws / "inside").exists()
    assert guarded(hand.scratch.base) == before


def test_denied_write_by_a_relative_name_is_explained(hand: Hand) -> None:
    ended = hand.run("workspace-write", "rm", "-r", ".git/hooks")
    assert f"denied: to write {hand.ws}/.git/hooks\n" in ended.stderr
    assert f"`.git` below the writable root {hand.ws} is protected" in ended.stderr


def test_read_only_writes_nowhere(hand: Hand) -> None:
    ended = hand.run("read-only", "/bin/sh", "-c", "cat a.txt; touch new; touch /tmp/exec-demo-new")
    assert ended.stdout == "hello"
    assert f"denied: to write {hand.ws}/new" in ended.stderr
    assert not (hand.ws / "new").exists()
    assert not Path("/tmp/exec-demo-new").exists()


def test_success_is_not_explained(hand: Hand) -> None:
    ended = hand.run("read-only", "/bin/sh", "-c", "touch new; true")
    assert ended.returncode == 0
    assert "exec-server" not in ended.stderr


def test_ordinary_lack_of_rights_is_told_apart(hand: Hand) -> None:
    (hand.ws / "program").write_text("#!/bin/sh\n")
    ended = hand.run("read-only", "/bin/sh", "-c", "./program")
    assert ended.returncode == 126
    assert "exec-server: no rule of the policy is known to be behind this: " in ended.stderr


_CONNECT = "import socket; socket.socket(); print('made')"


def test_network_is_out_of_reach_unless_asked_for(hand: Hand) -> None:
    ended = hand.run("read-only", interpreter(), "-c", _CONNECT)
    assert ended.returncode == 1
    assert ended.stderr.endswith(
        "exec-server: denied: to use the network\nexec-server: network access is restricted\n"
    )
    words = ("run", "--policy", "read-only", "--network", "--", interpreter(), "-c", _CONNECT)
    assert hand(*words).stdout == "made\n"


def test_roots_replace_the_current_directory(hand: Hand) -> None:
    words = ("run", "--policy", "workspace-write", "--root", "sub", "--root", "../outside")
    ended = hand(*words, "--", "/bin/sh", "-c", "touch sub/new ../outside/new; touch new")
    assert (hand.ws / "sub" / "new").exists()
    assert (hand.scratch.base / "outside" / "new").exists()
    assert not (hand.ws / "new").exists()
    assert f"denied: to write {hand.ws}/new" in ended.stderr


# ---- endings --------------------------------------------------------------------------

_FAMILY = ("/bin/sh", "-c", "sleep 60 & setsid sleep 60 & echo ready; wait")


def _ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    stdout, stderr = process.communicate(timeout=scaled(PATIENCE))
    return process.returncode, stdout, stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_reach_the_command_and_nothing_is_left(hand: Hand, number: int) -> None:
    with hand.start("run", "--policy", "workspace-write", "--", *_FAMILY) as process:
        family = descendants(process.pid)
        assert len(family) >= 4  # the guardian, the init, the shell and what it has started
        assert hand.placeholders() == list(PROTECTED)
        os.killpg(process.pid, number)  # as a terminal does
        assert _ended(process) == (128 + number, "", "")
    assert survivors(family) == []
    assert hand.placeholders() == []


def test_command_may_handle_a_signal(hand: Hand) -> None:
    script = "trap 'echo caught; exit 5' TERM; echo ready; while :; do sleep 0.01; done"
    words = ("run", "--policy", "read-only", "--", "/bin/sh", "-c", script)
    with hand.start(*words) as process:
        process.terminate()
        assert _ended(process)[:2] == (5, "caught\n")


def test_nothing_outlives_a_killed_parent(hand: Hand) -> None:
    with hand.start("run", "--policy", "workspace-write", "--", *_FAMILY) as process:
        family = descendants(process.pid)
        process.kill()
        _ended(process)
    assert survivors(family) == []
    eventually("the placeholders are gone", lambda: not hand.placeholders())


def test_stopping_stops_the_command_too(hand: Hand) -> None:
    script = "echo ready; while :; do echo x >> ticks; sleep 0.01; done"
    words = ("run", "--policy", "workspace-write", "--", "/bin/sh", "-c", script)
    with hand.start(*words) as process:
        family = descendants(process.pid)
        ticks = hand.ws / "ticks"
        eventually("it ticks", ticks.exists)
        process.send_signal(signal.SIGTSTP)
        eventually("it stops", lambda: stat_fields(process.pid)[0] == "T")
        # Not only the shell: what it has just forked is called the same for a moment.
        shells = [pid for pid in family if _command_line(pid)[:1] == ["/bin/sh"]]
        eventually("the command stops", lambda: any(_is_stopped(pid) for pid in shells))
        size = ticks.stat().st_size
        process.send_signal(signal.SIGCONT)
        eventually("it goes on", lambda: ticks.stat().st_size > size)
        process.terminate()
        assert _ended(process)[0] == 143
    assert survivors(family) == []


def _is_stopped(pid: int) -> bool:
    try:
        return stat_fields(pid)[0] == "T"
    except FileNotFoundError:
        return False


def _command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except FileNotFoundError:
        return []  # it has ended meanwhile


_ONLY_NETWORK = {
    "type": "managed",
    "file_system": {"type": "unrestricted"},
    "network": "restricted",
}


@pytest.mark.parametrize("permissions", [{"type": "disabled"}, _ONLY_NETWORK])
def test_nothing_outlives_a_command_without_namespaces(hand: Hand, permissions: Json) -> None:
    with hand.start("run", "--policy", hand.file(permissions), "--", *_FAMILY) as process:
        family = descendants(process.pid)
        (leader,) = [pid for pid in children(process.pid) if _command_line(pid)[0] == "/bin/sh"]
        os.kill(leader, signal.SIGKILL)
        code, _, stderr = _ended(process)
    assert code == 137
    assert ("runs unconfined" in stderr) == (permissions["type"] == "disabled")
    assert survivors(family) == []


# ---- policies from files --------------------------------------------------------------


def test_file_with_a_whole_object(hand: Hand) -> None:
    path = hand.file(workspace_write(hand.ws, entry(hand.ws / "sub", "deny")))
    ended = hand.run(path, "/bin/sh", "-c", "touch new; cat sub/s.txt")
    assert (hand.ws / "new").exists()
    assert f"denied: to read {hand.ws}/sub/s.txt" in ended.stderr
    assert f"deny entry {hand.ws}/sub" in ended.stderr


def test_file_with_permissions_is_completed(hand: Hand) -> None:
    permissions = policy(special("root", "read"), special("project_roots", "write"))["permissions"]
    path = hand.file(permissions)
    assert hand.run(path, "touch", "new").returncode == 0
    words = ("run", "--policy", path, "--root", "sub", "--")
    assert hand(*words, "touch", "sub/new").returncode == 0
    assert hand(*words, "touch", "other").returncode == 1


def test_file_with_a_request(hand: Hand) -> None:
    path = hand.file({"argv": ["x"], "sandbox": policy(special("root", "read"))})
    assert "denied" in hand.run(path, "touch", "new").stderr


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("{", "EOF while parsing an object at line 1 column 1"),
        ("[1", "EOF while parsing a list at line 1 column 2"),
        ({}, "missing field `permissions`"),
        ('"x"', 'invalid type: string "x", expected struct WireFileSystemSandboxContext'),
        ({"permissions": {"type": "disabled"}}, "missing field `windowsSandboxLevel`"),
        (
            {"type": "zz"},
            "unknown variant `zz`, expected one of `managed`, `disabled`, `external`",
        ),
        (
            policy({"path": {"type": "path", "path": "/tmp"}, "access": "read"}),
            "invalid URI: relative URL without a base",
        ),
        (policy(special("root", "zz")), "unknown variant `zz`, expected one of `read`, `write`"),
        (policy(glob("/*.key")), "unreadable glob `/*.key` cannot be safely expanded"),
        (policy(useLegacyLandlock=True), "useLegacyLandlock is not supported"),
        (policy(cwd="file:///C:/x"), "'file:///C:/x' is invalid on 'linux'"),
    ],
)
def test_file_with_a_mistake(tmp_path: Path, value: Json | str, text: str) -> None:
    path = tmp_path / "policy.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    ended = run_command("ours", "sandbox", "run", "--policy", str(path), "--", "echo", "x")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"Error: {path}: ")
    assert text in ended.stderr


@pytest.mark.parametrize("flags", [("--network",), ("--root", "/")])
def test_flags_that_a_file_decides(tmp_path: Path, flags: tuple[str, ...]) -> None:
    path = tmp_path / "policy.json"
    path.write_text(json.dumps(policy(special("root", "read"))))
    ended = run_command("ours", "sandbox", "run", "--policy", str(path), *flags, "--", "true")
    assert ended.returncode == 2
    assert flags[0] in ended.stderr


def test_policy_that_cannot_be_enforced_runs_nothing(hand: Hand) -> None:
    hand.scratch.apply([{"symlink": ["../outside", "ws/link"]}])
    path = hand.file(workspace_write(hand.ws, entry(hand.ws / "link" / "dir", "deny")))
    ended = hand.run(path, "touch", "new")
    assert ended.returncode == _NOTHING_HAS_RUN
    assert "crosses writable symlink" in ended.stderr
    assert not (hand.ws / "new").exists()


# ---- showing --------------------------------------------------------------------------


def test_view_is_shown(hand: Hand) -> None:
    entries = (entry(hand.ws / "sub" / "deep", "deny"), glob(f"{hand.ws}/**/*.txt"))
    path = hand.file(workspace_write(hand.ws, *entries))
    ended = hand("run", "--policy", path, "--show", "--", "touch", "new")
    assert (ended.returncode, ended.stderr) == (0, "")
    lines = [tuple(line.split(maxsplit=1)) for line in ended.stdout.splitlines()]
    assert lines[0] == ("files", "everything, read-only, but (/dev and /proc are private)")
    for line in (
        ("write", f"{hand.ws}"),
        ("read", f"{hand.ws}/.git"),
        ("pin", f"{hand.ws}/sub"),
        ("mask", f"{hand.ws}/sub/deep"),
        ("mask", f"{hand.ws}/a.txt"),
        ("missing", f"{hand.ws}/.codex"),
        ("deny", f"glob  {hand.ws}/**/*.txt"),
        ("network", "restricted"),
    ):
        assert line in lines
    assert not (hand.ws / "new").exists()


@pytest.mark.parametrize(
    ("value", "first"),
    [
        (policy(special("minimal", "read")), "files      nothing but the following"),
        ({"type": "disabled"}, "files      no limits\nnetwork    no limits\n"),
        ({"type": "external", "network": "restricted"}, "files      no limits\nnetwork    restr"),
    ],
)
def test_other_views_are_shown(tmp_path: Path, value: Json, first: str) -> None:
    path = tmp_path / "policy.json"
    path.write_text(json.dumps(value))
    ended = run_command("ours", "sandbox", "run", "--policy", str(path), "--show")
    assert ended.returncode == 0
    assert ended.stdout.startswith(first)


# ---- checking -------------------------------------------------------------------------


def test_everything_is_enforced_here(hand: Hand) -> None:
    ended = hand("check")
    assert (ended.returncode, ended.stderr) == (0, "")
    rows = dict(
        line.strip().split("  ", 1) for line in ended.stdout.splitlines() if "  " in line[2:]
    )
    for part in ("user", "mount", "pid", "ipc", "network"):
        assert rows[f"{part} namespaces"].strip() == "yes"
    assert rows["private /proc"].strip() == rows["seccomp"].strip() == "yes"
    assert os.uname().release in rows["kernel"]
    assert ended.stdout.endswith("What is refused\n  nothing\n")
    assert max(map(len, ended.stdout.splitlines())) <= 120


def test_check_for_programs(hand: Hand) -> None:
    ended = hand("check", "--json")
    value = json.loads(ended.stdout)
    assert ended.returncode == 0
    assert value["uid"] == user_id(hand.user)
    assert value["offers"]["user namespaces"] == {"works": True, "reason": None}
    assert value["enforced"] == {
        "fileOperations": True,
        "commands": True,
        "userNamespace": True,
        "privateProc": True,
    }
    assert (value["refused"], value["gaps"]) == ([], [])


@pytest.mark.parametrize("barrier", ["no-namespaces", "no-namespaces-no-landlock"])
def test_check_without_namespaces_says_why_and_what_to_do(hand: Hand, barrier: str) -> None:
    ended = hand("check", barrier=barrier)
    assert (ended.returncode, ended.stderr) == (1, "")
    assert "user namespaces     no: Operation not permitted (os error 1)" in ended.stdout
    assert "seccomp             yes" in ended.stdout
    assert ("Landlock            no" in ended.stdout) == (barrier != "no-namespaces")
    refused = ended.stdout.partition("What is refused\n")[2]
    assert "commands whose policy limits files" in refused
    assert "--security-opt seccomp=unconfined" in refused
    value = json.loads(hand("check", "--json", barrier=barrier).stdout)
    assert value["enforced"]["commands"] is False
    assert [gap["part"] for gap in value["gaps"]] == ["user namespaces"]


def test_nothing_runs_where_nothing_can_be_confined(hand: Hand) -> None:
    words = ("run", "--policy", "workspace-write", "--", "touch", "new")
    ended = hand(*words, barrier="no-namespaces")
    assert ended.returncode == _NOTHING_HAS_RUN
    assert "cannot create namespaces: Operation not permitted" in ended.stderr
    assert "exec-server sandbox check" in ended.stderr
    assert not (hand.ws / "new").exists()


def test_check_with_a_masked_proc(hand: Hand) -> None:
    ended = hand("check", barrier="masked-proc")
    assert ended.returncode == 1
    assert "mount namespaces    yes" in ended.stdout
    assert "private /proc       no: " in ended.stdout
    assert "--security-opt systempaths=unconfined" in ended.stdout
    assert "policy denies files by a pattern" in ended.stdout
    assert hand.run("read-only", "true", barrier="masked-proc").returncode == 0


@pytest.mark.parametrize("user", [_AS_ROOT])
def test_root_does_without_user_namespaces(user: User) -> None:
    with Scratch(user_id(user)) as scratch:
        scratch.reset(BASE_STEPS)
        ended = Hand(user, scratch)("check", barrier="no-user-namespaces")
    assert ended.returncode == 0
    assert "user namespaces     no, and root does without" in ended.stdout


def test_limit_of_the_kernel_is_named(tmp_path: Path) -> None:
    words = [sys.executable, "-c", _WITHOUT_USER_NAMESPACES, *server_command("ours")]
    ended = _finished([*words, "sandbox", "check"], cwd=tmp_path)
    assert ended.returncode == 1, ended.stderr
    assert "user namespaces     no: No space left on device (os error 28)" in ended.stdout
    assert "mount namespaces    no: not without user namespaces" in ended.stdout
    assert "sysctl -w user.max_user_namespaces=15000   (it is 0)" in ended.stdout


def test_reader_of_the_report_may_leave() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    words = [*server_command("ours"), "sandbox", "check"]
    process = subprocess.Popen(words, env=_environment(), stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    _, stderr = process.communicate(timeout=scaled(PATIENCE))
    assert (process.returncode, stderr) == (0, b"")
