"""The lifetime of confined commands: nothing of them is left after any kind of end."""

from __future__ import annotations

import base64
import ctypes
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.support.barriers import User, start_server_as
from tests.support.client import Client, Server, b64, descendants, survivors, uri
from tests.support.sandbox import (
    MARKER,
    NEEDS_ROOT,
    PROTECTED,
    USERS,
    Json,
    Stage,
    finish,
    guarded,
    interpreter,
    start_process,
    start_stage,
    workspace_write,
)
from tests.support.server_internals import eventually, launcher_pid

from exec_server.sandbox.runtime.disk import MAX_MATCHES

# Policies that a test uses at once: many more than a server keeps workers.
_POLICIES = 100
# Sixteen workers, four prebuilt sandboxes, the processes of every server; two may be ending.
_PROCESSES_AT_MOST = 24


@pytest.fixture(params=USERS)
def user(request: pytest.FixtureRequest) -> User:
    """The user of the server."""
    name: User = request.param
    return name


class Shell:
    """A confined shell that runs one line after the other."""

    def __init__(self, client: Client, sandbox: Json | None, ws: Path, **params: Any) -> None:
        self.client = client
        loop = 'while read -r line; do eval "$line"; done'
        argv = ["/bin/sh", "-c", loop]
        options = {"cwd": uri(ws), "pipeStdin": True} | params
        self.start = start_process(client, sandbox, argv, **options)
        self.id = self.start["processId"]
        self._lines = 0

    def output(self) -> str:
        """The output so far, of stdout or the terminal."""
        result = self.client.call("process/read", {"processId": self.id})
        return "".join(
            base64.b64decode(chunk["chunk"]).decode()
            for chunk in result["chunks"]
            if chunk["stream"] != "stderr"
        )

    def do(self, line: str) -> str:
        """Run a line and return its output."""
        self._lines += 1
        mark = f"end of {self._lines}\n"
        before = len(self.output())
        text = f"{line}; echo {mark}"
        assert self.client.write(self.id, text.encode(), str(self._lines)) == "accepted"
        said = eventually(
            f"the end of {line!r}",
            lambda: out if (out := self.output()[before:]).endswith(mark) else "",
        )
        return said.removesuffix(mark)

    def terminate(self) -> None:
        """End the shell, and wait until the server reports it closed."""
        self.client.call("process/terminate", {"processId": self.id})
        finish(self.client, self.start)


def _tag() -> str:
    """A duration for sleep that no other process has on its command line."""
    return f"4000.{random.randrange(10**9)}"


def _running(tag: str) -> list[int]:
    """The processes of the host that have the tag on their command line."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                line = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if tag.encode() in line.split(b"\0"):
                found.append(int(folder.name))
    return found


def _daemon(tag: str) -> str:
    """A script that starts three orphans in their own sessions and then prints a line."""
    quiet = "</dev/null >/dev/null 2>&1"
    return (
        f"setsid sh -c 'setsid sleep {tag} {quiet} & exit 0' & setsid sleep {tag} {quiet} & "
        f"setsid sleep {tag} & "
        f"while [ $(grep -lx 'sleep' /proc/[0-9]*/comm | wc -l) != 3 ]; do :; done"
    )


def _placeholders(ws: Path) -> list[str]:
    return [name for name in (*PROTECTED, ".env") if os.path.lexists(ws / name)]


@pytest.mark.parametrize("terminal", [False, True], ids=["pipes", "terminal"])
def test_orphans_die_with_their_command(stage: Stage, client: Client, terminal: bool) -> None:
    tag = _tag()
    outcome = stage.shell(client, "WW", f"{_daemon(tag)}; echo started", tty=terminal)
    assert (outcome.exit_code, outcome.stdout.strip()) == (0, "started")
    assert _running(tag) == []


@pytest.mark.quick
@pytest.mark.parametrize("name", ["WW", "WWNET", "MINW"])
def test_orphans_die_when_the_command_is_terminated(
    stage: Stage, client: Client, name: str
) -> None:
    tag = _tag()
    shell = Shell(client, stage.policy(name), stage.ws)
    shell.do(_daemon(tag))
    assert len(_running(tag)) >= 3
    shell.terminate()
    assert _running(tag) == []
    assert _placeholders(stage.ws) == []


def test_everything_ends_with_the_session(user: User) -> None:
    tag = _tag()
    with start_stage(user, "--session-retention", "0") as stage:
        with stage.server.connect() as client:
            Shell(client, stage.policy("DENYMISSING"), stage.ws).do(_daemon(tag))
            assert len(_running(tag)) >= 3
        eventually("the end of the orphans", lambda: not _running(tag))
        eventually("the end of the placeholders", lambda: not _placeholders(stage.ws))


def test_a_session_is_resumed_with_its_confined_command(stage: Stage, client: Client) -> None:
    shell = Shell(client, stage.policy("WW"), stage.ws)
    assert shell.do("echo before") == "before\n"
    client.websocket.abort()
    found: list[Client] = eventually(
        "the end of the connection", lambda: _resumed(stage.server, client)
    )
    with found[0] as other:
        shell.client = other
        assert shell.do("echo x 2>/dev/null > .git/new || echo after") == "after\n"
        other.call("process/terminate", {"processId": shell.id})
        other.notice("process/closed", shell.id)
    assert _placeholders(stage.ws) == []


def _resumed(server: Server, client: Client) -> list[Client]:
    """A connection to the same session, as soon as the first one is lost."""
    other = server.connect(initialize=False)
    answer = other.answer(
        other.request("initialize", {"clientName": "t", "resumeSessionId": client.session_id})
    )
    if "error" in answer:
        other.close()
        return []
    other.notify("initialized", {})
    return [other]


def test_nothing_survives_a_server_that_is_killed(user: User) -> None:
    tag = _tag()
    with start_stage(user) as stage, stage.server.connect() as client:
        write = {"path": uri(stage.ws / "n"), "dataBase64": "", "sandbox": stage.policy("WW")}
        client.call("fs/writeFile", write)
        Shell(client, stage.policy("DENYMISSING"), stage.ws).do(_daemon(tag))
        family = descendants(stage.server.process.pid)
        assert len(family) >= 5
        stage.server.process.send_signal(signal.SIGKILL)
        stage.server.process.wait()
        assert survivors(family) == []
        assert _running(tag) == []
        # Placeholders of the killed server are removed by the next server that finds them.
        with start_server_as("ours", user) as server, server.connect() as other:
            Stage(server, stage.scratch).shell(other, "DENYMISSING", "true")
        assert _placeholders(stage.ws) == []


def test_the_end_of_a_server_is_the_end_of_its_commands(user: User) -> None:
    tag = _tag()
    with start_stage(user) as stage:
        with stage.server.connect() as client:
            Shell(client, stage.policy("WW"), stage.ws).do(_daemon(tag))
            stage.server.stop()
        assert _running(tag) == []
        assert _placeholders(stage.ws) == []


@pytest.mark.parametrize("ending", ["exit 0", "exit 3", "kill -9 $$", "kill -9 -1", "exec true"])
def test_placeholders_are_gone_when_a_command_has_ended(
    stage: Stage, client: Client, ending: str
) -> None:
    before = guarded(stage.base)
    stage.shell(client, "DENYMISSING", f"{ending}; exit 1")
    assert _placeholders(stage.ws) == []
    assert guarded(stage.base) == before


_FORGE = "mkdir -p .codex/x 2>/dev/null; echo x 2>/dev/null > .codex/f || echo refused"


def test_a_command_stays_protected_when_its_neighbour_ends(stage: Stage, client: Client) -> None:
    first = Shell(client, stage.policy("WW"), stage.ws)
    second = Shell(client, stage.policy("WWNET"), stage.ws)
    assert first.do(_FORGE) == second.do(_FORGE) == "refused\n"
    first.terminate()
    assert second.do(_FORGE) == "refused\n"
    second.terminate()
    assert _placeholders(stage.ws) == []


def test_a_command_stays_protected_when_that_of_another_server_ends(user: User) -> None:
    with (
        start_stage(user) as stage,
        start_server_as("ours", user) as neighbour,
        stage.server.connect() as client,
        neighbour.connect() as other,
    ):
        first = Shell(client, stage.policy("WW"), stage.ws)
        second = Shell(other, stage.policy("WW"), stage.ws)
        assert first.do(_FORGE) == second.do(_FORGE) == "refused\n"
        first.terminate()
        assert second.do(_FORGE) == "refused\n"
        second.terminate()
        assert _placeholders(stage.ws) == []


def test_a_placeholder_with_something_in_it_stays(stage: Stage, client: Client) -> None:
    shell = Shell(client, stage.policy("WW"), stage.ws)
    assert shell.do(_FORGE) == "refused\n"
    folder = stage.ws / ".codex"
    folder.mkdir(exist_ok=True)
    folder.chmod(0o755)
    (folder / "config").write_text("host")
    stage.scratch.give_away()
    assert shell.do("echo x 2>/dev/null >> .codex/config || echo refused") == "refused\n"
    shell.terminate()
    assert (folder / "config").read_text() == "host"
    assert _placeholders(stage.ws) == [".codex"]


def test_a_placeholder_that_was_replaced_stays(stage: Stage, client: Client) -> None:
    shell = Shell(client, stage.policy("WW"), stage.ws)
    shell.do("true")
    folder = stage.ws / ".codex"
    if folder.exists():
        folder.rmdir()
    folder.mkdir()
    (folder / "config").write_text("host")
    link = stage.ws / ".agents"
    if link.exists():
        link.rmdir()
    link.symlink_to("sub")
    shell.terminate()
    assert (folder / "config").read_text() == "host"
    assert link.is_symlink()
    assert _placeholders(stage.ws) == [".codex", ".agents"]


def test_a_name_that_appears_while_a_command_runs_is_protected(
    stage: Stage, client: Client
) -> None:
    """File operations of a policy whose command holds placeholders see the same tree."""
    shell = Shell(client, stage.policy("WW"), stage.ws)
    shell.do("true")
    for name in PROTECTED:
        for method, more in (
            ("fs/writeFile", {"path": uri(stage.ws / name / "f"), "dataBase64": ""}),
            ("fs/createDirectory", {"path": uri(stage.ws / name / "d"), "recursive": True}),
            ("fs/remove", {"path": uri(stage.ws / name), "recursive": True, "force": False}),
        ):
            assert client.failure(method, more | {"sandbox": stage.policy("WW")})
    assert shell.do(_FORGE) == "refused\n"
    shell.terminate()
    assert _placeholders(stage.ws) == []


@pytest.mark.parametrize(
    ("name", "steps", "path"),
    [
        ("WW", [{"write": ["ws/.codex/config", "host"]}], "ws/.codex/config"),
        ("WW", [{"rm": "ws/.git"}, {"write": ["ws/.git/config", "host"]}], "ws/.git/config"),
        ("WW", [{"rm": "ws"}, {"write": ["ws/.git/config", "host"]}], "ws/.git/config"),
        ("WW", [{"mv": ["ws", "old"]}, {"write": ["ws/.aws/c", "host"]}], "ws/.aws/c"),
        ("DENYSUB", [{"rm": "ws/sub"}, {"write": ["ws/sub/s.txt", "host"]}], "ws/sub/s.txt"),
        ("DENYMISSING", [{"write": ["ws/.env", "host"]}], "ws/.env"),
        ("GLOB", [{"write": ["ws/sub/late.key", "host"]}], "ws/sub/late.key"),
        ("GLOB", [{"mkdir": "ws/n"}, {"write": ["ws/n/late.key", "host"]}], "ws/n/late.key"),
        ("MINW", [{"rm": "ws"}, {"write": ["ws/.git/config", "host"]}], "ws/.git/config"),
        (
            "WW",
            [
                {"rm": "ws/.git"},
                {"write": ["ws/real/config", "host"]},
                {"write": ["ws/.git", "gitdir: real"]},
            ],
            "ws/real/config",
        ),
    ],
)
def test_a_command_meets_the_tree_as_it_is_now(
    stage: Stage, client: Client, name: str, steps: list[Json], path: str
) -> None:
    """A prebuilt sandbox of an older tree is not used."""
    for _ in range(3):
        assert stage.shell(client, name, "true").exit_code == 0
    stage.scratch.apply(steps)
    script = f"echo x > {stage.base / path}; rm -rf {stage.base / path}; echo x > made"
    assert stage.shell(client, name, script).exit_code == 0
    assert (stage.base / path).read_text() == "host"
    assert (stage.ws / "made").read_text() == "x\n"


def test_a_confined_command_is_written_to_and_interrupted(stage: Stage, client: Client) -> None:
    shell = Shell(client, stage.policy("WW"), stage.ws)
    assert shell.do("echo yes") == "yes\n"
    client.call("process/signal", {"processId": shell.id, "signal": "interrupt"})
    assert finish(client, shell.start).exit_code == 130


def test_a_confined_terminal_is_interrupted_by_its_key(stage: Stage, client: Client) -> None:
    argv = ["/bin/sh", "-c", "trap 'echo caught; exit 7' INT; echo ready; while :; do :; done"]
    start = start_process(client, stage.policy("WW"), argv, cwd=uri(stage.ws), tty=True)
    client.wait_for(
        lambda n: n["method"] == "process/output" and n["params"]["chunk"] == b64("ready\r\n")
    )
    client.write(start["processId"], b"\x03", "key")
    outcome = finish(client, start)
    assert (outcome.exit_code, outcome.stdout) == (7, "ready\r\n^Ccaught\r\n")


@pytest.mark.parametrize("program", ["/nowhere/at/all", "no-such-program"])
def test_a_program_that_does_not_exist_is_a_denial(
    stage: Stage, client: Client, program: str
) -> None:
    outcome = stage.run(client, "WW", [program])
    assert (outcome.refusal, outcome.exit_code, outcome.denied) == (None, 101, True)
    outcome = stage.run(client, "MINW", [str(stage.base / "outside/o.txt")])
    assert (outcome.refusal, outcome.exit_code, outcome.denied) == (None, 101, True)


def test_many_policies_do_not_make_many_workers(stage: Stage, client: Client) -> None:
    stage.scratch.apply([{"mkdir": f"ws{number}"} for number in range(_POLICIES)])
    for number in range(_POLICIES):
        folder = stage.base / f"ws{number}"
        params = {"path": uri(folder / "n"), "dataBase64": b64("n")}
        client.call("fs/writeFile", params | {"sandbox": workspace_write(folder)})
        assert (folder / "n").read_text() == "n"
        outside = {"path": uri(stage.base / "outside/o.txt"), "dataBase64": b64("n")}
        assert client.failure("fs/writeFile", outside | {"sandbox": workspace_write(folder)})
    assert len(descendants(stage.server.process.pid)) <= _PROCESSES_AT_MOST


def test_refusals_without_namespaces_say_why(user: User) -> None:
    for barrier in ("no-namespaces", "no-namespaces-no-landlock"):
        with start_stage(user, barrier=barrier) as stage, stage.server.connect() as client:
            before = guarded(stage.base, "a.txt", "sub")
            for name in ("RO", "WW", "MINW", "DENYSUB"):
                outcome = stage.shell(client, name, f"echo x > a.txt; cat {stage.base}/outside/*")
                assert outcome.refusal is not None
                assert outcome.refusal.code == -32603
                assert "namespace" in outcome.refusal.message
            assert guarded(stage.base, "a.txt", "sub") == before
            assert stage.shell(client, "NONE", "exit 5").exit_code == 5


_INSIDE = f"""
cat {MARKER} 2>/dev/null; echo x 2>/dev/null > ../outside/o.txt || echo outside
echo x 2>/dev/null > .git/config || echo repository
mkdir .codex 2>/dev/null || echo missing
kill -0 $1 2>/dev/null || echo server
grep -q {MARKER} /proc/*/environ 2>/dev/null || echo marker
grep CapEff /proc/self/status | cut -f2
echo x > a.txt && cat a.txt
"""


@pytest.mark.parametrize(
    "barrier",
    [
        pytest.param("no-user-namespaces", marks=[pytest.mark.root, NEEDS_ROOT]),
        pytest.param("masked-proc", marks=[pytest.mark.root, NEEDS_ROOT]),
    ],
)
def test_weaker_kernels_confine_as_well(barrier: str, user: User) -> None:
    if barrier == "no-user-namespaces" and user != "root":
        pytest.skip("only root does without user namespaces")
    with start_stage(user, barrier=barrier) as stage, stage.server.connect() as client:
        before = guarded(stage.base)
        argv = ["/bin/sh", "-c", _INSIDE, "sh", str(stage.server.process.pid)]
        outcome = stage.run(client, "WW", argv)
        lines = ["outside", "repository", "missing", "server", "marker", "0" * 16, "x"]
        assert outcome.stdout.splitlines() == lines, outcome
        for path, done in (("ws/n", True), ("outside/n", False), ("ws/.codex", False)):
            params = {"path": uri(stage.base / path), "dataBase64": b64("n")}
            answer = client.answer(
                client.request("fs/writeFile", params | {"sandbox": stage.policy("WW")})
            )
            assert ("result" in answer, (stage.base / path).exists()) == (done, done), answer
        assert guarded(stage.base) == before


_KEYS = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
number, buffer = int(sys.argv[1]), ctypes.create_string_buffer(64)
size = libc.syscall(number, 11, int(sys.argv[2]), buffer, 64, 0)
print(buffer.raw[:max(size, 0)].decode())
"""


@pytest.mark.root
@NEEDS_ROOT
def test_keys_of_the_server_are_out_of_reach() -> None:
    """A child process does the test, because its keyring ends with it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            _reach_for_keys()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _reach_for_keys() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    keyctl, add_key = {"x86_64": (250, 248)}.get(os.uname().machine, (219, 217))
    libc.syscall(keyctl, 1, None)  # a new session keyring
    key = libc.syscall(add_key, b"user", b"exec-server-test", b"secret", 6, -3)
    assert key > 0
    argv = [interpreter(), "-I", "-S", "-c", _KEYS, str(keyctl), str(key)]
    with start_stage("root") as stage, stage.server.connect() as client:
        assert stage.run(client, "NONE", argv).stdout == "secret\n"
        assert stage.run(client, "WW", argv).stdout == "\n"
        assert stage.run(client, "WWNET", argv).stdout == "\n"


def test_a_launcher_that_is_killed_is_replaced(user: User) -> None:
    with start_stage(user) as own, own.server.connect() as client:
        assert own.shell(client, "WW", "echo one").stdout == "one\n"
        os.kill(launcher_pid(own.server), signal.SIGKILL)
        for _ in range(3):
            assert own.shell(client, "WW", "echo two").stdout == "two\n"
        params = {"path": uri(own.ws / "new"), "dataBase64": b64("x")}
        client.call("fs/writeFile", params | {"sandbox": own.policy("RODEEP")})
        assert (own.ws / "new").read_bytes() == b"x"


def test_thousands_of_files_are_masked_and_more_are_refused(stage: Stage, client: Client) -> None:
    folder = stage.ws / "keys"
    folder.mkdir()
    for number in range(MAX_MATCHES):
        (folder / f"{number}.key").write_text("secret")
    stage.scratch.give_away()
    script = f"cat keys/*{MAX_MATCHES - 1}.key keys/0.key; ls keys | wc -l"
    outcome = stage.shell(client, "GLOB", script)
    assert (outcome.exit_code, outcome.stdout) == (0, f"{MAX_MATCHES}\n")
    assert "Permission denied" in outcome.output
    (folder / "one more.key").write_text("secret")
    refused = stage.shell(client, "GLOB", script)
    assert refused.refusal is not None
    assert refused.refusal.code == -32603
