"""The command: help, flags, start-up, logs, signals, exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tests.support.certificates import make_pair
from tests.support.client import (
    Client,
    Disconnected,
    Server,
    StdioLink,
    WebSocketLink,
    b64,
    descendants,
    run_command,
    scaled,
    server_command,
    server_environment,
    start_server,
    survivors,
    uri,
)
from tests.support.sandbox import workspace_write
from tests.support.server_internals import (
    eventually,
    own_processes,
    start_prepared,
    start_unprivileged,
)

_LOOPBACK = "ws://127.0.0.1:0"


# ---- help and flags -------------------------------------------------------------------


@pytest.mark.quick
def test_help_teaches() -> None:
    ended = run_command("ours", "serve", "--help")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert run_command("ours", "--listen", "stdio", "-h").stdout == ended.stdout
    for word in ("--listen", "--concurrent-requests", "--ws-auth", "--session-retention"):
        assert word in ended.stdout
    assert "examples:" in ended.stdout
    for word in ("--remote", "--environment-id"):
        assert word in ended.stdout
    # A flag of the reference that does not work here is not shown.
    assert "--linux-sandbox-pid-namespace" not in ended.stdout


def test_every_example_of_the_help_starts(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a-token")
    make_pair(tmp_path, "cert", "127.0.0.1").key.rename(tmp_path / "key.pem")
    help_text = run_command("ours", "serve", "--help").stdout
    examples = re.findall(r"^  exec-server(.*)$", help_text, re.MULTILINE)
    assert len(examples) >= 4
    for example in examples:
        words = example.split()
        if "--remote" in words:
            words = ["http://127.0.0.1:9" if word == "URL" else word for word in words]
            refused = run_command("ours", *words)
            assert refused.returncode == 1
            assert "requires ChatGPT authentication or API key" in refused.stderr
            continue
        if "stdio" in words:
            assert run_command("ours", *words).returncode == 0
            continue
        # Any port but theirs, which may be taken here, and a socket in our own directory.
        words = [re.sub(r":7700$", ":0", word) for word in words]
        words = [re.sub(r"unix:.*", f"unix:{tmp_path}/s", word) for word in words]
        flags = words if "--listen" in words else ["--listen", _LOOPBACK]
        with start_server("ours", *flags, cwd=tmp_path) as server:
            assert server.url.startswith(("ws://", "wss://", "unix:"))


@pytest.mark.quick
def test_help_lists_the_commands_of_people_first() -> None:
    ended = run_command("ours", "--help")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.index("\n  exec ") < ended.stdout.index("\n  serve ")
    assert "--ws-auth" not in ended.stdout
    assert run_command("ours", "help").stdout == ended.stdout


@pytest.mark.parametrize(("words", "usage"), [("forward", "forward"), ("sandbox run", "sandbox")])
def test_help_of_a_command(words: str, usage: str) -> None:
    shown = run_command("ours", "help", *words.split())
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith(f"usage: exec-server {usage}")
    assert run_command("ours", *words.split(), "--help").stdout == shown.stdout


def test_an_unknown_command_suggests_the_nearest() -> None:
    ended = run_command("ours", "exce", "build")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("Error: unknown command `exce`; did you mean `exec`?\n")


@pytest.mark.parametrize("word", ["--version", "version"])
def test_version(word: str) -> None:
    ended = run_command("ours", word)
    assert ended.returncode == 0
    assert re.fullmatch(r"exec-server \d+\.\d+\.\d+(\.dev\d+)?\n", ended.stdout)


@pytest.mark.parametrize(
    "flags",
    [
        ["--no-such-flag"],
        ["word"],
        ["--listen"],
        ["--concurrent-requests", "0"],
        ["--concurrent-requests", "-1"],
        ["--concurrent-requests", "x"],
        ["--concurrent-requests", "1.5"],
        ["--session-retention", "-1"],
        ["--session-retention", "nan"],
        ["--session-retention", "x"],
        ["--ws-auth", "password"],
        ["--ws-max-clock-skew-seconds", "x"],
        ["--log-level", "loud"],
        ["--log-format", "xml"],
        ["--concurrent", "2"],  # no abbreviations: they would break when flags are added
    ],
)
def test_wrong_flags_are_usage_errors(flags: list[str]) -> None:
    ended = run_command("ours", *flags)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("Error: ")
    assert re.search(r"try 'exec-server (serve )?--help'", ended.stderr)


_SCHEMES = "expected `ws://IP:PORT` or `stdio`, or `wss://IP:PORT` or `unix:/PATH`"


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("http://127.0.0.1:1", f"unsupported --listen URL `{{}}`; {_SCHEMES}"),
        ("WS://127.0.0.1:1", f"unsupported --listen URL `{{}}`; {_SCHEMES}"),
        ("", f"unsupported --listen URL `{{}}`; {_SCHEMES}"),
        ("ws://example.net:1", "invalid websocket --listen URL `{}`; expected `ws://IP:PORT`"),
        ("ws://127.0.0.1", "invalid websocket --listen URL `{}`; expected `ws://IP:PORT`"),
        ("ws://127.0.0.1:1/", "invalid websocket --listen URL `{}`; expected `ws://IP:PORT`"),
        ("ws://127.0.0.1:65536", "invalid websocket --listen URL `{}`; expected `ws://IP:PORT`"),
        ("ws://256.0.0.1:1", "invalid websocket --listen URL `{}`; expected `ws://IP:PORT`"),
        ("ws://::1:1", "invalid websocket --listen URL `{}`; expected `ws://IP:PORT`"),
    ],
)
def test_wrong_listen_urls(url: str, text: str) -> None:
    ended = run_command("ours", "--listen", url)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == f"Error: {text.format(url)}\n"


def test_taken_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        url = f"ws://127.0.0.1:{holder.getsockname()[1]}"
        ended = run_command("ours", "--listen", url)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == f"Error: cannot listen on {url}: Address in use (os error 98)\n"


def test_port_can_be_used_again_at_once() -> None:
    with start_server("ours") as server:
        url = server.url
        client = server.connect()
    client.close()
    with start_server("ours", "--listen", url) as server:
        assert server.url == url


@pytest.mark.parametrize("address", ["0.0.0.0", "[::]"])
def test_listening_beyond_loopback_needs_authentication(address: str, tmp_path: Path) -> None:
    if "::" in address and not _has_ipv6():
        pytest.skip("this machine has no IPv6")
    url = f"ws://{address}:0"
    ended = run_command("ours", "--listen", url)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert re.fullmatch(
        r"Error: refusing to listen on \S+ without authentication: .*--allow-unauthenticated\n",
        ended.stderr,
    )
    (tmp_path / "token").write_text("a-token")
    token = ("--ws-auth", "capability-token", "--ws-token-file", str(tmp_path / "token"))
    for flags in (("--allow-unauthenticated",), token):
        with start_server("ours", "--listen", url, *flags) as server:
            assert server.url.startswith(f"ws://{address}:")


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


# ---- start-up -------------------------------------------------------------------------


def test_prints_one_line_and_nothing_else(python: Callable[[str], list[str]]) -> None:
    with start_server("ours") as server:
        assert re.fullmatch(r"ws://127\.0\.0\.1:[1-9]\d*", server.url)
        with server.connect() as client:
            client.run(["true"])
            client.link.send_text("garbage")
            client.receive()
        server.stop()
        assert server.process.stdout is not None
        assert server.process.stdout.read() == b""
        assert server.stderr() == ""


def test_first_connection_is_served_as_soon_as_the_line_is_there() -> None:
    with start_server("ours") as server:
        assert server.http(b"GET /readyz HTTP/1.1\r\n\r\n").status == 200


def test_signal_right_after_the_line_ends_it_cleanly() -> None:
    for _ in range(5):
        with start_server("ours") as server:
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(scaled(5)) == 0


def test_stdin_is_ignored_by_default() -> None:
    server = Server("ours", ["--listen", _LOOPBACK], stdin=subprocess.PIPE)
    try:
        server.read_url()
        assert server.process.stdin is not None
        server.process.stdin.write(b"garbage\n")
        server.process.stdin.close()
        with server.connect() as client:
            assert client.run(["true"]).exit_code == 0
        server.stop()
    finally:
        server.kill()
        server.release()


@pytest.mark.parametrize(
    ("flags", "environment"),
    [
        (["--exit-on-stdin-close"], {}),
        ([], {"CODEX_EXEC_SERVER_EXIT_ON_STDIN_CLOSE": "true"}),
    ],
)
def test_exit_on_stdin_close(flags: list[str], environment: dict[str, str]) -> None:
    server = Server("ours", ["--listen", _LOOPBACK, *flags], stdin=subprocess.PIPE, env=environment)
    try:
        server.read_url()
        client = server.connect()
        # The thread that watches stdin does not take the signals that tell of ended children.
        assert client.run(["true"]).exit_code == 0
        client.start(["sleep", "600"])
        family = descendants(server.process.pid)
        assert server.process.stdin is not None
        server.process.stdin.write(b"ignored\n")
        server.process.stdin.flush()
        assert client.call("environment/status") == {"status": "ready"}
        server.process.stdin.close()
        assert client.wait_closed() == 1001
        assert server.process.wait(scaled(5)) == 0
        assert survivors(family) == []
        client.close()
    finally:
        server.kill()
        server.release()


_CLOSED = {0: "<&-", 1: ">&-", 2: "2>&-"}


def _with_closed(closed: tuple[int, ...], *flags: str) -> list[str]:
    """The words that start a server with some of its standard descriptors closed."""
    redirections = " ".join(_CLOSED[descriptor] for descriptor in closed)
    return ["/bin/sh", "-c", f'exec "$@" {redirections}', "sh", *server_command("ours"), *flags]


def _assert_serves(client: Client, workspace: Path) -> None:
    """Commands and file operations work, with and without a sandbox."""
    argv = ["sh", "-c", "readlink /proc/self/fd/0; ls /proc/self/fd | head -n 3; echo bad >&2"]
    run = client.run(argv)
    assert (run.stdout, run.stderr) == (b"/dev/null\n0\n1\n2\n", b"bad\n")
    sandbox = workspace_write(workspace)
    run = client.run(["sh", "-c", "echo good; echo bad >&2"], sandbox=sandbox)
    assert (run.stdout, run.stderr) == (b"good\n", b"bad\n")
    written = {"path": uri(workspace / "file"), "dataBase64": b64("text"), "sandbox": sandbox}
    assert client.call("fs/writeFile", written) == {}
    assert (workspace / "file").read_text() == "text"


@pytest.mark.parametrize("closed", [(0,), (2,), (0, 2), (0, 1, 2)], ids=str)
def test_a_listener_works_without_standard_streams(closed: tuple[int, ...], tmp_path: Path) -> None:
    """No socket may get the number of a closed stream, in the server or in its helpers."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        url = f"ws://127.0.0.1:{holder.getsockname()[1]}"
    process = subprocess.Popen(
        _with_closed(closed, "--listen", url),
        env=server_environment("ours"),
        stdout=subprocess.DEVNULL,
    )
    try:
        with eventually("it listens", lambda: _try_to_connect(url)) as client:
            _assert_serves(client, tmp_path)
    finally:
        process.terminate()
        assert process.wait(scaled(10)) == 0


def _try_to_connect(url: str) -> Client | None:
    try:
        client = Client(WebSocketLink(url))
    except OSError:
        return None
    client.initialize()
    return client


def test_a_server_on_stdio_works_without_stderr(tmp_path: Path) -> None:
    process = subprocess.Popen(
        _with_closed((2,), "--listen", "stdio"),
        env=server_environment("ours"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with Client(StdioLink(process)) as client:
        client.initialize()
        _assert_serves(client, tmp_path)
    assert process.wait(scaled(10)) == 0
    assert process.stdout is not None
    process.stdout.close()


@pytest.mark.parametrize("closed", [(0,), (1,), (0, 1), (0, 1, 2)], ids=str)
def test_a_server_on_closed_stdio_ends_at_once(closed: tuple[int, ...]) -> None:
    ended = subprocess.run(
        _with_closed(closed, "--listen", "stdio"),
        env=server_environment("ours"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=scaled(20),
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")


def test_an_error_is_not_printed_to_stdout_without_stderr() -> None:
    ended = subprocess.run(
        _with_closed((2,), "--listen", "nowhere"),
        env=server_environment("ours"),
        capture_output=True,
        timeout=scaled(20),
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (1, b"")


def test_a_url_that_cannot_be_printed_is_an_error() -> None:
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            [*server_command("ours"), "--listen", _LOOPBACK],
            env=server_environment("ours"),
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=scaled(20),
            check=False,
        )
    text = b"Error: cannot write the URL to stdout: No space left on device (os error 28)\n"
    assert (ended.returncode, ended.stderr) == (1, text)


# ---- signals --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 0),
        (signal.SIGINT, 0),
        (signal.SIGHUP, -signal.SIGHUP),
        (signal.SIGQUIT, -signal.SIGQUIT),
        (signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_signals_end_the_server_and_all_children(
    number: signal.Signals, code: int, python: Callable[[str], list[str]]
) -> None:
    with start_server("ours") as server:
        client = server.connect()
        client.start(["sleep", "600"])
        client.start(["sleep", "600"], tty=True)
        client.start(["/bin/sh", "-c", "trap '' TERM INT HUP; sleep 600 & wait"])
        daemon = "import os,time; os.fork() or os.setsid(); print(flush=True); time.sleep(600)"
        client.notice("process/output", client.start(python(daemon)))
        family = descendants(server.process.pid)
        assert len(family) >= 7
        server.process.send_signal(number)
        assert server.process.wait(scaled(5)) == code
        assert survivors(family) == []
        client.close()


def test_clients_are_told_before_the_end() -> None:
    with start_server("ours") as server:
        client, bare = server.connect(), server.link()
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(Disconnected) as end:
            bare.receive(scaled(5))
        assert (end.value.close_code, end.value.reason) == (1001, "server is shutting down")
        assert client.wait_closed() == 1001
        assert server.process.wait(scaled(5)) == 0
        client.close()
        bare.close()


@pytest.mark.alone
def test_end_does_not_wait_for_silent_clients() -> None:
    with start_server("ours") as server:
        silent = [server.connect() for _ in range(5)]
        unfinished = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(scaled(5)) == 0
        assert time.monotonic() - began < scaled(1)
        unfinished.close()
        for client in silent:
            client.close()


def test_second_signal_changes_nothing() -> None:
    with start_server("ours") as server:
        client = server.connect()
        client.start(["sleep", "600"])
        for _ in range(3):
            server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(scaled(5)) == 0
        client.close()


def test_signals_after_the_end_of_the_loop_change_nothing() -> None:
    """The rest of the clean-up is not interrupted by an impatient supervisor."""
    preparation = """
import os, signal
from exec_server.process import descendants
kill_all = descendants.kill_all_descendants
def interrupted(spared):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        os.kill(os.getpid(), number)
    kill_all(spared)
descendants.kill_all_descendants = interrupted
"""
    with start_prepared(preparation) as server:
        server.stop()
        assert server.stderr() == ""


def test_a_signal_during_the_start_shows_no_traceback() -> None:
    preparation = """
import os, signal
import exec_server.cli.serve_command as module
module.parse = lambda words: os.kill(os.getpid(), signal.SIGINT)
"""
    code = f"{preparation}\nfrom exec_server.cli.main import main\nmain()"
    argv = [sys.executable, "-c", code]
    ended = subprocess.run(
        argv, env=server_environment("ours"), capture_output=True, timeout=scaled(20), check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, b"", b"")


def test_signals_without_an_action_disturb_no_process_of_the_server(tmp_path: Path) -> None:
    numbers = (*_UNUSED_SIGNALS, signal.SIGRTMIN + 5)
    with start_server("ours", "--log-level", "warning") as server, server.connect() as client:
        _assert_serves(client, tmp_path)
        family = {pid: _name_of(pid) for pid in descendants(server.process.pid)}
        assert {"exec-guardian", "exec-launcher", "exec-worker"} <= set(family.values())
        for pid in (*family, server.process.pid):
            for number in numbers:
                os.kill(pid, number)
        _assert_serves(client, tmp_path)
        left = descendants(server.process.pid)
        assert [
            name for pid, name in family.items() if pid not in left and name != "exec-init"
        ] == []
        server.stop()
        lines = server.stderr().splitlines()
    told = [line.partition(" exec_server.cli.signal_handlers: ")[2] for line in lines]
    names = [number.name for number in _UNUSED_SIGNALS] + [f"signal {signal.SIGRTMIN + 5}"]
    assert set(told) == {f"ignored {name}: the server has no action for it" for name in names}


_UNUSED_SIGNALS = (
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF),
    *(signal.SIGIO, signal.SIGPWR, signal.SIGSTKFLT),
)


def _name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""  # it has ended


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGKILL])
def test_helpers_that_are_killed_are_replaced(number: signal.Signals, tmp_path: Path) -> None:
    """Idle ones: an operation in a worker that is killed fails."""
    with start_server("ours") as server, server.connect() as client:
        _assert_serves(client, tmp_path)
        for name in ("exec-launcher", "exec-worker", "exec-init"):
            found = eventually("it waits", partial(_helpers, server, name))
            for pid in found:
                os.kill(pid, number)
            if number == signal.SIGKILL:
                assert survivors(found) == []
            _assert_serves(client, tmp_path)
        server.stop()
        assert server.stderr() == ""


def _helpers(server: Server, name: str) -> dict[int, str]:
    """The helper processes with this name, and their start times."""
    family = descendants(server.process.pid)
    return {pid: start for pid, start in family.items() if _name_of(pid) == name}


# ---- logs -----------------------------------------------------------------------------


def _logged(*flags: str, env: dict[str, str] | None = None) -> str:
    """What a server with these settings says about a connection, a refusal and a session."""
    with start_server("ours", *flags, env=env) as server:
        with server.connect() as client:
            client.start(["true"], process_id="forged\nerror line \x1b[31m")
        server.http(b"GET / HTTP/1.1\r\nOrigin: x\r\nConnection: close\r\n\r\n")
        server.stop()
        return server.stderr()


def test_quiet_by_default() -> None:
    assert _logged() == ""
    assert _logged("--log-level", "error") == ""


@pytest.mark.parametrize(
    ("flags", "env"),
    [(["--log-level", "info"], {}), ([], {"EXEC_SERVER_LOG": "info"})],
)
def test_info_tells_of_connections_and_sessions(flags: list[str], env: dict[str, str]) -> None:
    lines = _logged(*flags, env=env).splitlines()
    assert any("has session" in line for line in lines)
    assert any("refused: 403" in line for line in lines)
    for line in lines:
        assert re.match(r"\S+T\S+ info +exec_server\.\S+: ", line), line


def test_flag_beats_the_environment() -> None:
    assert _logged("--log-level", "error", env={"EXEC_SERVER_LOG": "debug"}) == ""


def test_wrong_level_in_the_environment() -> None:
    ended = run_command("ours", "--listen", _LOOPBACK, env={"EXEC_SERVER_LOG": "loud"})
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == "Error: EXEC_SERVER_LOG must be one of error, warning, info, debug\n"


def test_json_lines() -> None:
    lines = _logged("--log-level", "debug", "--log-format", "json").splitlines()
    events = [json.loads(line) for line in lines]
    assert any("has session" in event["message"] for event in events)
    assert all(set(event) == {"time", "level", "logger", "message"} for event in events)


def test_debug_lines_cannot_be_forged() -> None:
    """A process id, a client name, a method and a session id with line feeds of their own."""
    forged = "x\n2026-01-01T00:00:00.000+00:00 error   exec_server: forged\r\x1b[2J"
    with start_server("ours", "--log-level", "debug") as server:
        with server.connect(initialize=False) as client:
            client.failure("initialize", {"clientName": forged, "resumeSessionId": forged})
            client.initialize(name=forged)
            client.start(["true"], process_id=forged)
            client.failure("process/start", {"processId": forged})
            client.failure(forged, {})
            client.notify(forged)
            client.call("process/terminate", {"processId": forged})
            client.send({"id": forged, "method": "fs/readFile", "params": {"path": f"/{forged}"}})
            client.answer(forged)
        server.http(f"GET /{forged.split(maxsplit=1)[0]} HTTP/1.1\r\n\r\n".encode())
        server.stop()
        text = server.stderr()
    assert "\x1b" not in text
    assert "\r" not in text
    assert not [line for line in text.splitlines() if "exec_server: forged" in line[:70]]


# ---- the environment ------------------------------------------------------------------


def test_secrets_of_the_environment_do_not_reach_children() -> None:
    secrets = {
        "CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN": "hush-1",
        "NODE_REPL_AUTH_TOKEN": "hush-2",
        "OPENAI_IDENTITY_TOKEN_FILE": "hush-3",
        "CODEX_EXEC_SERVER_EXIT_ON_STDIN_CLOSE": "false",
    }
    policy = {
        "inherit": "all",
        "ignoreDefaultExcludes": True,
        "exclude": [],
        "set": {},
        "includeOnly": [],
    }
    environment = secrets | {"ORDINARY": "yes"}
    with start_server("ours", env=environment) as server, server.connect() as client:
        seen = client.run(["env"], envPolicy=policy).stdout.decode()
        assert "ORDINARY=yes" in seen
        assert not [name for name in secrets if name in seen]
        assert "hush" not in seen


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may read the files of its processes")
def test_children_of_root_find_no_secret_of_the_environment_in_proc() -> None:
    variables = {"NODE_REPL_AUTH_TOKEN": "hush-1", "EXEC_SERVER_API_KEY": "hush-2", "NAME": "x"}
    with start_server("ours", env=variables) as server, server.connect() as client:
        for pid in own_processes(server):
            seen = client.run(["cat", f"/proc/{pid}/environ", f"/proc/{pid}/cmdline"]).stdout
            assert seen
            assert b"hush" not in seen


def test_children_of_the_same_user_cannot_look_into_the_server() -> None:
    with start_unprivileged() as server, server.connect() as client:
        for pid in own_processes(server):
            for name in ("environ", "mem", "maps"):
                looked = client.run(["head", "-c", "1", f"/proc/{pid}/{name}"])
                assert looked.exit_code != 0, f"{name} of {pid}: {looked.stdout!r}"
                assert b"Permission denied" in looked.stderr


def test_contents_and_environment_values_are_not_logged(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content-of-a-file")
    with start_server("ours", "--log-level", "debug") as server:
        with server.connect() as client:
            client.run(["printf", "printed"], env={"NAME": "value-of-a-name", "PATH": "/usr/bin"})
            client.call("fs/readFile", {"path": str(tmp_path / "file")})
            written = {"path": str(tmp_path / "new"), "dataBase64": b64("written-text")}
            client.call("fs/writeFile", written)
        server.stop()
        text = server.stderr()
    for secret in ("content-of-a-file", "value-of-a-name", "written-text", b64("written-text")):
        assert secret not in text
