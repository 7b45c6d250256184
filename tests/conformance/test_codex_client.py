"""A real Codex as the client, with a scripted model: does it work unchanged with our server?

Every test runs against the reference as well and expects the same of both, so what the
model is told through our server is what it would have been told through the reference.
"""

from __future__ import annotations

import base64
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conformance.codex import (
    Codex,
    Report,
    appears,
    command,
    environment,
    patch,
    report,
    start_codex,
    write,
)
from tests.conformance.model import Model, Step, ToolCall
from tests.conformance.proxy import Proxy
from tests.support.client import (
    Server,
    descendants,
    run_command,
    server_command,
    server_environment,
    start_server,
    survivors,
)
from tests.support.pictures import PICTURE
from tests.support.server_internals import is_kept_for_later

pytestmark = pytest.mark.reference

# Prints eight lines in 0.8 s and leaves a mark beside each, for tests to wait for.
_LINES = "for i in 1 2 3 4 5 6 7 8; do echo line-$i; touch mark-$i; sleep 0.1; done; exit 5"
_ALL_LINES = "".join(f"line-{n}\n" for n in range(1, 9))


@dataclass
class Stage:
    """A server and a folder to work in."""

    server: Server
    folder: Path

    def play(self, *script: Step, mcp: str = "", sandbox: str = "danger-full-access") -> Model:
        """Runs a whole script and returns what the model was told."""
        url = self.server.url
        with start_codex(script, self.folder, url=url, mcp=mcp, sandbox=sandbox) as client:
            return _finished(client)


@pytest.fixture
def stage(server: Server, folder: Path) -> Iterator[Stage]:
    """The server of this kind; nothing of what a test started may be left when it ends."""
    before = descendants(server.process.pid)
    yield Stage(server, folder)
    started = {
        pid: start
        for pid, start in descendants(server.process.pid).items()
        if pid not in before and not is_kept_for_later(pid)
    }
    assert not (left := survivors(started)), f"processes left behind: {left}"


def _finished(client: Codex) -> Model:
    events = client.finish()
    assert client.process.returncode == 0, client.errors()
    assert events[-1]["type"] == "turn.completed", events[-1]
    return client.model


def _ended(model: Model, call_id: str) -> tuple[int | None, str]:
    told = report(model.outputs[call_id])
    return told.exit_code, told.text


def test_output_and_exit_code(stage: Stage) -> None:
    model = stage.play(
        [command("both", "echo out; sleep 0.1; echo err >&2; exit 3")],
        [command("folder", "pwd; cat; echo end of input", workdir=str(stage.folder))],
        [command("bytes", r"printf 'ü\xff\x00z'")],
        [command("signal", "kill -9 $$")],
        [command("unknown", "no-such-program 2>&1 | sed 's/.*no-such/no-such/'; exit 127")],
    )
    assert _ended(model, "both") == (3, "out\nerr\n")
    assert _ended(model, "folder") == (0, f"{stage.folder}\nend of input\n")
    assert _ended(model, "bytes") == (0, "ü\ufffd\0z")
    assert _ended(model, "signal") == (137, "")
    assert _ended(model, "unknown") == (127, "no-such-program: command not found\n")


def test_a_workspace_can_be_written_and_nothing_else(stage: Stage) -> None:
    (stage.folder / ".git").mkdir()
    outside = "/etc/exec-server-conformance"
    model = stage.play(
        [command("inside", "echo new > new.txt && cat new.txt")],
        [command("outside", f"echo new > {outside}")],
        [command("git", "touch .git/config")],
        [command("network", "exec 3<>/dev/tcp/127.0.0.1/9", shell="/bin/bash")],
        [patch("patch", "*** Add File: added.txt", "+first")],
        [patch("change", "*** Update File: added.txt", "@@", "-first", "+second")],
        [patch("escape", f"*** Add File: {outside}", "+first")],
        sandbox="workspace-write",
    )
    assert _ended(model, "inside") == (0, "new\n")
    assert "Read-only file system" in report(model.outputs["outside"]).text
    assert "Read-only file system" in report(model.outputs["git"]).text
    assert report(model.outputs["network"]).exit_code != 0
    assert (stage.folder / "added.txt").read_text() == "second\n"
    assert sorted(path.name for path in stage.folder.iterdir()) == [".git", "added.txt", "new.txt"]
    assert not Path(outside).exists()


def test_a_workspace_that_can_only_be_read(stage: Stage) -> None:
    (stage.folder / "old.txt").write_text("old\n")
    model = stage.play(
        [command("read", "cat old.txt")],
        [command("write", "echo new > old.txt")],
        sandbox="read-only",
    )
    assert _ended(model, "read") == (0, "old\n")
    assert "Read-only file system" in report(model.outputs["write"]).text
    assert (stage.folder / "old.txt").read_text() == "old\n"


def test_environment_of_a_command(stage: Stage) -> None:
    model = stage.play([command("env", "echo $TERM $NO_COLOR $PAGER; echo ${HOME:+home}")])
    assert _ended(model, "env") == (0, "dumb 1 cat\nhome\n")


def test_command_that_cannot_start(stage: Stage) -> None:
    model = stage.play([command("c", "pwd", workdir=str(stage.folder / "missing"))])
    assert model.outputs["c"] == (
        'exec_command failed: CreateProcess { message: "Rejected(\\"Failed to create unified '
        "exec process: exec-server rejected request (-32603): No such file or directory "
        '(os error 2)\\")" }'
    )


def test_terminal(stage: Stage) -> None:
    text = "test -t 0 && test -t 1 && stty size; read a; echo hi $a; read b; echo bye $b; exit 4"
    model = stage.play(
        [command("start", text, tty=True, yield_time_ms=1500)],
        write("first", "start", "Ann\n", yield_time_ms=1000),
        write("second", "start", "Zoë\n"),
    )
    started, first = report(model.outputs["start"]), report(model.outputs["first"])
    assert started.session is not None
    assert started.text == "24 80\r\n"
    assert (first.session, first.text) == (started.session, "Ann\r\nhi Ann\r\n")
    assert _ended(model, "second") == (4, "Zoë\r\nbye Zoë\r\n")


def test_interrupted_commands(stage: Stage) -> None:
    trap = "trap 'echo stopped; exit 6' INT; echo ready; while :; do sleep 0.05; done"
    model = stage.play(
        [
            command("pipes", trap, yield_time_ms=1500),
            command("terminal", trap, tty=True, yield_time_ms=1500),
        ],
        write("stop pipes", "pipes", "\x03"),
        write("stop terminal", "terminal", "\x03"),
    )
    assert report(model.outputs["pipes"]).text == "ready\n"
    assert _ended(model, "stop pipes") == (6, "stopped\n")
    assert report(model.outputs["terminal"]).text == "ready\r\n"
    assert _ended(model, "stop terminal") == (6, "^Cstopped\r\n")


def test_command_left_running_ends_with_the_client(stage: Stage) -> None:
    # The fixture checks that both are gone; setsid and nohup are not used to escape.
    model = stage.play(
        [
            command("pipes", "echo ready; sleep 1000 & sleep 1001", yield_time_ms=1500),
            command("terminal", "echo ready; sleep 1002", tty=True, yield_time_ms=1500),
        ]
    )
    assert report(model.outputs["pipes"]).session is not None
    assert report(model.outputs["terminal"]).session is not None


def test_client_interrupted_during_a_command(stage: Stage) -> None:
    script = [[command("c", "touch started; sleep 1000")]]
    with start_codex(script, stage.folder, url=stage.server.url) as client:
        appears(stage.folder / "started")
        client.interrupt()
        client.finish()
    assert client.model.outputs == {}


def test_parallel_commands(stage: Stage) -> None:
    # Each waits for the file of its successor: none can end unless all run at once.
    count = 8
    calls = [
        command(
            f"c{n}",
            f"touch here-{n}; while ! test -e here-{(n + 1) % count}; do sleep 0.02; done;"
            f" echo {n}; exit {n}",
        )
        for n in range(count)
    ]
    model = stage.play(calls)
    assert [_ended(model, f"c{n}") for n in range(count)] == [(n, f"{n}\n") for n in range(count)]


def test_big_output(stage: Stage) -> None:
    # The client counts four bytes as a token and shows the ends of what it got. Of many MB
    # it sometimes counts too little although all were sent, so only less is compared.
    model = stage.play(
        [command("numbers", "seq 1 100000", max_output_tokens=100)],
        [command("endless", "yes | head -c 30000000; echo end", max_output_tokens=100)],
        [command("terminal", "seq 1 20000", tty=True, max_output_tokens=100)],
    )
    numbers, terminal = report(model.outputs["numbers"]), report(model.outputs["terminal"])
    assert (numbers.exit_code, numbers.tokens) == (0, 147_224)
    assert "\n1\n2\n3\n" in numbers.text
    assert numbers.text.endswith("\n99999\n100000\n")
    assert (terminal.exit_code, terminal.tokens) == (0, 32_224)
    assert terminal.text.endswith("\r\n19999\r\n20000\r\n")
    code, text = _ended(model, "endless")
    assert (code, text[-8:]) == (0, "y\ny\nend\n")


def test_patches(stage: Stage) -> None:
    (stage.folder / "update.sh").write_text("one\ntwo\nthree\n")
    (stage.folder / "update.sh").chmod(0o750)
    (stage.folder / "move.txt").write_text("saw\n")
    (stage.folder / "delete.txt").write_text("x\n")
    model = stage.play(
        [
            patch(
                "good",
                *("*** Add File: new/dir ü/add.txt", "+hello"),
                *("*** Update File: update.sh", "@@", " one", "-two", "+2", " three"),
                *(
                    "*** Update File: move.txt",
                    "*** Move to: moved/here.txt",
                    "@@",
                    "-saw",
                    "+seen",
                ),
                "*** Delete File: delete.txt",
            )
        ],
        [patch("bad", "*** Update File: missing.txt", "@@", "-a", "+b")],
        [command("seen", "cat update.sh")],
    )
    assert model.outputs["good"].endswith(
        "Output:\nSuccess. Updated the following files:\n"
        "A new/dir ü/add.txt\nM update.sh\nM moved/here.txt\nD delete.txt\n"
    )
    assert model.outputs["bad"] == (
        "apply_patch verification failed: Failed to read file to update "
        f"{stage.folder}/missing.txt: No such file or directory (os error 2)"
    )
    assert _ended(model, "seen") == (0, "one\n2\nthree\n")
    files = {str(p.relative_to(stage.folder)): p for p in stage.folder.rglob("*") if p.is_file()}
    assert {name: path.read_text() for name, path in files.items()} == {
        "new/dir ü/add.txt": "hello\n",
        "update.sh": "one\n2\nthree\n",
        "moved/here.txt": "seen\n",
    }
    assert files["update.sh"].stat().st_mode & 0o777 == 0o750


def test_patch_of_a_large_file(stage: Stage) -> None:
    # Arrives as one frame of 8 MB, which the client does not split.
    filler = "x" * 59 + "\n"
    (stage.folder / "large.txt").write_text("first\n" + filler * 100_000)
    model = stage.play([patch("p", "*** Update File: large.txt", "@@", "-first", "+changed")])
    assert model.outputs["p"].endswith("Updated the following files:\nM large.txt\n")
    assert (stage.folder / "large.txt").read_text() == "changed\n" + filler * 100_000


def test_image(stage: Stage) -> None:
    (stage.folder / "image.png").write_bytes(PICTURE)
    model = stage.play([ToolCall("i", "view_image", {"path": "image.png"})])
    assert model.images["i"] == "data:image/png;base64," + base64.b64encode(PICTURE).decode()


def test_project_files(stage: Stage) -> None:
    skill = stage.folder / ".agents" / "skills" / "juggle"
    skill.mkdir(parents=True)
    (stage.folder / ".git").mkdir()
    (stage.folder / "AGENTS.md").write_text("Whistle while you work.\n")
    (skill / "SKILL.md").write_text(
        "---\nname: juggle\ndescription: Keeps balls up.\n---\nThrow.\n"
    )
    model = stage.play()
    assert "Whistle while you work." in model.instructions
    assert "Keeps balls up." in model.instructions


_MCP_SERVER = """
import json, os, sys
for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    params = message.get("params", {})
    schema = {"type": "object", "properties": {"text": {"type": "string"}}}
    tool = {"name": "echo", "description": "echoes", "inputSchema": schema}
    result = {
        "initialize": lambda: {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "echo", "version": "1"},
        },
        "tools/list": lambda: {"tools": [tool]},
        "tools/call": lambda: {
            "content": [{"type": "text", "text": params["arguments"]["text"] + os.getcwd()}]
        },
    }.get(message["method"], dict)()
    print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
"""


def test_mcp_server_on_pipes(stage: Stage) -> None:
    (stage.folder / "echo.py").write_text(_MCP_SERVER)
    settings = (
        f'[mcp_servers.echo]\ncommand = "{sys.executable}"\nargs = ["-S", "echo.py"]\n'
        f'cwd = "{stage.folder}"\nenvironment_id = "remote"\nrequired = true\n'
    )
    model = stage.play([ToolCall("m", "echo", {"text": "here: "}, "mcp__echo")], mcp=settings)
    assert model.outputs["m"].endswith(f"here: {stage.folder}")


def test_connection_lost_during_a_command(stage: Stage) -> None:
    script = [[command("c", _LINES)], [command("next", "echo after")]]
    with (
        Proxy(stage.server.url) as proxy,
        start_codex(script, stage.folder, url=proxy.url) as client,
    ):
        appears(stage.folder / "mark-3")
        proxy.cut()
        model = _finished(client)
    assert proxy.accepted >= 2
    assert _ended(model, "c") == (5, _ALL_LINES)
    assert _ended(model, "next") == (0, "after\n")


def test_connection_lost_until_the_command_has_ended(stage: Stage) -> None:
    script = [[command("c", _LINES)], [command("next", "echo after")]]
    with (
        Proxy(stage.server.url) as proxy,
        start_codex(script, stage.folder, url=proxy.url) as client,
    ):
        appears(stage.folder / "mark-3")
        proxy.cut(refuse_for=1.5)
        model = _finished(client)
    assert _ended(model, "c") == (5, _ALL_LINES)
    assert _ended(model, "next") == (0, "after\n")


def test_connection_lost_during_big_output(stage: Stage) -> None:
    # Below the 1 MiB that the server retains, so that nothing may be missing.
    text = "seq 1 50000; touch half; sleep 0.5; seq 50001 100000"
    script = [[command("c", text, max_output_tokens=100)]]
    with (
        Proxy(stage.server.url) as proxy,
        start_codex(script, stage.folder, url=proxy.url) as client,
    ):
        appears(stage.folder / "half")
        proxy.cut(refuse_for=1.0)
        told = report(_finished(client).outputs["c"])
    assert (told.exit_code, told.tokens) == (0, 147224)
    assert told.text.endswith("\n99999\n100000\n")


def test_connection_lost_before_typing(stage: Stage) -> None:
    text = "read a; touch asked; echo hi $a; read b; echo bye $b"
    with Proxy(stage.server.url) as proxy:

        def cut_and_type(outputs: dict[str, str]) -> list[ToolCall]:
            proxy.cut()
            return type_more(outputs)

        type_more = write("second", "start", "Zoë\n")
        script: list[Step] = [
            [command("start", text, tty=True, yield_time_ms=500)],
            write("first", "start", "Ann\n", yield_time_ms=1000),
            cut_and_type,
        ]
        with start_codex(script, stage.folder, url=proxy.url) as client:
            model = _finished(client)
    assert proxy.accepted >= 2
    assert report(model.outputs["first"]).text == "Ann\r\nhi Ann\r\n"
    assert _ended(model, "second") == (0, "Zoë\r\nbye Zoë\r\n")


def test_server_restarted(stage: Stage, kind: str) -> None:
    script = [[command("c", _LINES)], [command("next", "echo after")]]
    with (
        start_server(kind, cwd=stage.folder) as first,
        Proxy(first.url) as proxy,
        start_codex(script, stage.folder, url=proxy.url) as client,
    ):
        appears(stage.folder / "mark-3")
        proxy.target = stage.server.url
        proxy.cut()
        first.stop()
        model = _finished(client)
    failure = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "ID", model.outputs["c"])
    assert failure.replace(proxy.url, "URL") == (
        'exec_command failed: ProcessFailed { message: "exec-server transport disconnected: '
        "failed to read websocket JSON-RPC message from exec-server websocket URL: WebSocket "
        "protocol error: Connection reset without closing handshake; failed to resume "
        "exec-server session: exec-server rejected request (-32600): unknown session id "
        'ID" }'
    )
    assert _ended(model, "next") == (0, "after\n")


def test_server_started_by_the_client(kind: str, folder: Path) -> None:
    program, *arguments = server_command(kind)
    own = environment(
        program=program,
        args=[*arguments, "--listen", "stdio"],
        env=server_environment(kind, {"HOME": str(folder)}),
    )
    script: list[Step] = [
        [command("plain", "pwd; exit 3")],
        [command("start", "read n; echo hi $n; exec sleep 1000", tty=True, yield_time_ms=1000)],
        write("typed", "start", "Ann\n", yield_time_ms=1000),
        [patch("p", "*** Add File: new.txt", "+x")],
    ]
    with start_codex(script, folder, environments=own) as client:
        model = _finished(client)
    assert _ended(model, "plain") == (3, f"{folder}\n")
    assert report(model.outputs["typed"]).text == "Ann\r\nhi Ann\r\n"
    assert (folder / "new.txt").read_text() == "x\n"


def test_tls_of_ours_and_the_file_before_the_variable(folder: Path) -> None:
    """The certificate of `exec-server tls-init` is one that the client can be told to trust."""
    made = run_command("ours", "tls-init", str(folder))
    assert made.returncode == 0, made.stderr
    (folder / "token").write_text("correct horse")
    flags = (
        *("--listen", "wss://127.0.0.1:0"),
        *("--tls-cert", str(folder / "cert.pem"), "--tls-key", str(folder / "key.pem")),
        *("--ws-auth", "capability-token", "--ws-token-file", str(folder / "token")),
    )
    # With the variable alone the client would find no server.
    variables = {
        "SSL_CERT_FILE": str(folder / "cert.pem"),
        "CODEX_EXEC_SERVER_URL": "ws://127.0.0.1:9",
    }
    script = [[command("c", "echo in")]]
    with start_server("ours", *flags, cwd=folder) as secure:
        named = environment(url=secure.url, auth_bearer_token="correct horse")
        with start_codex(script, folder, environments=named, variables=variables) as client:
            output = _finished(client).outputs["c"]
    assert report(output) == Report(0, "in\n", tokens=1)


def test_bearer_token(kind: str, folder: Path) -> None:
    (folder / "token").write_text("correct horse")
    flags = ("--ws-auth", "capability-token", "--ws-token-file", str(folder / "token"))
    script = [[command("c", "echo in")]]
    with start_server(kind, *flags, cwd=folder) as guarded:
        for token, told in (("correct horse", True), ("wrong", False)):
            ours = environment(url=guarded.url, auth_bearer_token=token)
            with start_codex(script, folder, environments=ours) as client:
                output = _finished(client).outputs["c"]
            if told:
                assert report(output) == Report(0, "in\n", tokens=1)
            else:
                assert "No usable execution environment is available" in output
