"""Log lines of a server, and secrets that are in no log and reach no child."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from tests.support.client import b64, run_command, start_server
from tests.support.server_internals import own_processes, start_unprivileged

_LOOPBACK = "ws://127.0.0.1:0"


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
    ("flags", "env"), [(["--log-level", "info"], {}), ([], {"EXEC_SERVER_LOG": "info"})]
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


# ---- secrets --------------------------------------------------------------------------


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
