"""The commands against a hostile server: what it says reaches the terminal as text only."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.cli import client_environment, run_client, stderr_text
from tests.support.client import scaled, server_command
from tests.support.raw_servers import (
    ENVIRONMENT,
    SESSION,
    Flood,
    Message,
    Refusal,
    Reply,
    command_output,
    encoded,
    hostile_server,
    notice,
)

EVIL = "\x1b]0;owned\x07\x9b2J\u202egpj\nexec-server: all is well\r\x08"
SHOWN = "\\x1b]0;owned\\x07\\x9b2J\\u202egpj\\nexec-server: all is well\\r\\x08"
FILE: Message = {
    "isDirectory": False,
    "isFile": True,
    "isSymlink": False,
    "size": 1,
    "createdAtMs": 0,
    "modifiedAtMs": 0,
}


def _assert_harmless(text: bytes) -> None:
    assert all(each == "\n" or each.isprintable() for each in text.decode())


@pytest.mark.parametrize(
    "words",
    [
        *("ls {}:/x", "ls -l {}:/x", "cat {}:/x", "rm {}:/x", "exec {} -- x", "info {}"),
        *("cp {}:/x y", "cp y {}:/x", "cp {}:/x {}:/y"),
    ],
)
def test_errors_are_escaped(words: str, tmp_path: Path) -> None:
    refusal = Refusal(EVIL)
    methods = ("getMetadata", "remove", "open", "readFile", "writeFile", "copy", "canonicalize")
    answers = {f"fs_{method}": refusal for method in methods}
    (tmp_path / "y").write_text("y")
    with hostile_server(process_start=refusal, environment_status=refusal, **answers) as server:
        ended = run_client(*words.replace("{}", server.url).split(), cwd=tmp_path)
    assert ended.returncode in (1, 125)
    assert SHOWN in stderr_text(ended)
    assert len(stderr_text(ended).splitlines()) == 1
    _assert_harmless(ended.stderr)


@pytest.mark.parametrize("code", [-32600, -32601, -32010])
def test_the_refusal_of_a_handshake_is_escaped(code: int) -> None:
    with hostile_server(initialize=Refusal(EVIL, code)) as server:
        ended = run_client("ls", f"{server.url}:/x")
    assert ended.returncode == 1
    assert SHOWN in stderr_text(ended)
    _assert_harmless(ended.stderr)


def test_the_description_of_a_server_is_escaped() -> None:
    environment = ENVIRONMENT | {
        "executorVersion": EVIL,
        "platformOs": EVIL,
        "shell": {"name": EVIL, "path": EVIL},
        "cwd": EVIL,
        "userHomeDir": EVIL,
        "tempDir": EVIL,
    }
    greeting = {"sessionId": SESSION, "environmentInfo": environment}
    confined = command_output(b"", 1, EVIL.encode())
    with hostile_server(initialize=greeting, process_start=confined) as server:
        ended = run_client("info", server.url)
        as_json = run_client("info", "--json", server.url)
    assert ended.returncode == 0, ended.stderr
    _assert_harmless(ended.stdout)
    assert ended.stdout.decode().count(SHOWN) >= 6
    assert as_json.stdout.isascii()
    _assert_harmless(as_json.stdout)
    assert json.loads(as_json.stdout)["version"] == EVIL


@pytest.mark.parametrize("words", [["ls"], ["ls", "-l"], ["ls", "-l", "-a"]], ids=" ".join)
def test_names_are_escaped_on_a_terminal_alone(words: list[str]) -> None:
    entries = [{"fileName": EVIL, "isDirectory": False, "isFile": True}]
    directory = FILE | {"isDirectory": True, "isFile": False}

    def stat(request: Message) -> Message:
        return directory if request["params"]["path"].endswith("/x") else FILE

    with hostile_server(fs_getMetadata=stat, fs_readDirectory={"entries": entries}) as server:
        leader, follower = pty.openpty()
        try:
            subprocess.run(
                [*server_command("ours"), *words, f"{server.url}:/x"],
                env=client_environment(None),
                stdin=subprocess.DEVNULL,
                stdout=follower,
                check=True,
                timeout=scaled(30),
            )
            shown = os.read(leader, 65_536)
        finally:
            os.close(leader)
            os.close(follower)
        piped = run_client("ls", f"{server.url}:/x")
    _assert_harmless(shown.replace(b"\r\n", b"\n"))
    assert SHOWN in shown.decode()
    assert EVIL.encode() in piped.stdout


def test_stderr_of_a_program_that_serves_is_escaped(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\nprintf '{EVIL}\\r\\n' >&2\n".replace("\x1b", "\\033"))
    program.chmod(0o755)
    ended = run_client("info", f"stdio:{program}")
    assert ended.returncode == 1
    _assert_harmless(ended.stderr)
    assert "\\x1b]0;owned" in stderr_text(ended)


def test_contents_are_not_escaped() -> None:
    content = b"\x1b[31mred\x1b[0m\x00\xff"
    with hostile_server(process_start=command_output(content, 3)) as server:
        ended = run_client("exec", server.url, "--", "x")
    assert (ended.stdout, ended.returncode) == (content, 3)


# ---- cp -------------------------------------------------------------------------------

DIRECTORY: Message = FILE | {"isDirectory": True, "isFile": False}


def _entry(path: str, kind: str = "f", target: str = "", size: int = 1) -> bytes:
    fields = (kind, "755", str(size), "1", path, target)
    return "".join(f"{field}\0" for field in fields).encode()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A directory that the server wants to write to."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "x").write_text("mine")
    return home


def _assert_untouched(home: Path) -> None:
    assert [path.name for path in home.iterdir()] == ["x"]
    assert (home / "x").read_text() == "mine"


@pytest.mark.parametrize("is_directory", [True, False])
def test_a_top_that_is_called_a_symlink_is_not_made(
    tmp_path: Path, home: Path, is_directory: bool
) -> None:
    """Otherwise the next copy into `d` would go through the link."""
    stat = DIRECTORY if is_directory else FILE
    listing = command_output(_entry("", "l", str(home)))
    with hostile_server(
        fs_getMetadata=stat, process_start=listing, fs_readFile={"dataBase64": "ZXZpbA=="}
    ) as server:
        for _ in range(2):
            ended = run_client("cp", f"{server.url}:/d", ".", cwd=tmp_path)
            assert ended.returncode == 1
            assert not (tmp_path / "d").exists()
        server.answers["process/start"] = command_output(_entry("", "f"))
        server.answers["fs/getMetadata"] = FILE
        assert run_client("cp", f"{server.url}:/x", "d", cwd=tmp_path).returncode == 0
    assert (tmp_path / "d").read_text() == "evil"
    _assert_untouched(home)


def test_the_next_copy_does_not_go_through_a_link_of_the_first(tmp_path: Path, home: Path) -> None:
    """The server turns a directory into a link, and back."""
    (tmp_path / "out").mkdir()
    first = command_output(_entry("", "d") + _entry("sub", "l", str(home)))
    second = command_output(_entry("", "d") + _entry("sub", "d") + _entry("sub/x"))
    third = command_output(_entry("", "d") + _entry("x"))

    with hostile_server(
        fs_getMetadata=lambda request: (
            FILE if request["params"]["path"].endswith("/x") else DIRECTORY
        ),
        process_start=first,
        fs_readFile={"dataBase64": "ZXZpbA=="},
    ) as server:
        assert run_client("cp", f"{server.url}:/t", "out", cwd=tmp_path).returncode == 0
        assert os.readlink(tmp_path / "out" / "t" / "sub") == str(home)
        server.answers["process/start"] = second
        ended = run_client("cp", f"{server.url}:/t", "out", cwd=tmp_path)
        assert (ended.returncode, ended.stderr.count(b"nothing is written through")) == (1, 1)
        # Now `sub` is the source, so that its name is that of the link.
        server.answers["process/start"] = third
        ended = run_client("cp", f"{server.url}:/t/sub", "out/t", cwd=tmp_path)
        assert (ended.returncode, ended.stderr.count(b"nothing is written through")) == (1, 1)
        assert (tmp_path / "out" / "t" / "sub").is_symlink()
        # A link of the user's is followed when the user asks for it.
        (tmp_path / "mine").symlink_to("out")
        assert run_client("cp", f"{server.url}:/t/.", "mine", cwd=tmp_path).returncode == 0
        assert (tmp_path / "out" / "x").read_text() == "evil"
    _assert_untouched(home)


@pytest.mark.parametrize(
    "entries",
    [
        pytest.param([_entry("../home/x")], id="parent"),
        pytest.param([_entry("/x")], id="absolute"),
        pytest.param([_entry("a", "d"), _entry("a/../../home/x")], id="parent below"),
        pytest.param([_entry("a", "l", "../home"), _entry("a/x")], id="below a link"),
        pytest.param([_entry("a"), _entry("a/x")], id="below a file"),
        pytest.param([_entry("a", "d"), _entry("a", "l", "../home")], id="twice"),
        pytest.param([b"garbage"], id="garbage"),
        pytest.param([_entry("a")[:-1]], id="cut off"),
        pytest.param([b"f\x00755\x00-5\x001\0a\0\0"], id="negative size"),
        pytest.param([b"f\0rwx\x005\x001\0a\0\0"], id="mode"),
        pytest.param([_entry("a", size=10**30)], id="absurd size"),
    ],
)
def test_impossible_trees_are_refused(tmp_path: Path, home: Path, entries: list[bytes]) -> None:
    listing = command_output(_entry("", "d") + b"".join(entries))
    with hostile_server(
        fs_getMetadata=DIRECTORY, process_start=listing, fs_readFile={"dataBase64": "ZXZpbA=="}
    ) as server:
        ended = run_client("cp", f"{server.url}:/t", "out", cwd=tmp_path)
    assert ended.returncode == 1
    assert stderr_text(ended).startswith("Error: /t: the ")
    assert stderr_text(ended).count("\n") == 1
    assert not (tmp_path / "out").exists()
    _assert_untouched(home)


def _flood(data: bytes, limit: int) -> Callable[[Message], Flood]:
    """A command that prints this again and again."""

    def answer(request: Message) -> Flood:
        of = request["params"]["processId"]
        chunk = encoded(data)
        return Flood(
            {"id": request["id"], "result": {"processId": of, "sandboxType": "none"}},
            lambda number: notice(
                "process/output", processId=of, seq=number + 1, stream="stdout", chunk=chunk
            ),
            limit,
        )

    return answer


@pytest.mark.parametrize("data", [b"\0" * 60_000, b"x" * 60_000, _entry("a") * 3000], ids=len)
def test_a_flood_instead_of_a_list_ends_the_copy(tmp_path: Path, data: bytes) -> None:
    """600 MB are on their way; the copy ends at the first wrong field."""
    with hostile_server(
        fs_getMetadata=DIRECTORY, process_start=_flood(_entry("", "d") + data, 10_000)
    ) as server:
        ended = run_client("cp", f"{server.url}:/t", "out", cwd=tmp_path)
    assert ended.returncode == 1
    assert stderr_text(ended).startswith("Error: /t: the ")
    assert not (tmp_path / "out").exists()


MEMORY = """
import os, resource, sys
from exec_server.cli.main import run_client
from exec_server.client.transfer import remote_tree
remote_tree.LISTING_BYTES = 8 * 1_048_576
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
code = run_client("cp", sys.argv[1:])
print(code, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.measured
def test_a_flood_of_entries_takes_little_memory(tmp_path: Path) -> None:
    """Every entry is valid: the tree is refused when its list is too long, here 8 MiB."""
    count = 0

    def answer(request: Message) -> Flood:
        of = request["params"]["processId"]

        def make(number: int) -> Message:
            nonlocal count
            entries = [_entry(f"{number}-{each}-{'x' * 80}") for each in range(500)]
            data = b"".join(entries if number else [_entry("", "d"), *entries])
            count += 500
            return notice(
                "process/output", processId=of, seq=number + 1, stream="stdout", chunk=encoded(data)
            )

        return Flood(
            {"id": request["id"], "result": {"processId": of, "sandboxType": "none"}}, make, 6000
        )

    with hostile_server(fs_getMetadata=DIRECTORY, process_start=answer) as server:
        ended = subprocess.run(
            [sys.executable, "-c", MEMORY, f"{server.url}:/t", str(tmp_path / "out")],
            env=client_environment(None),
            capture_output=True,
            timeout=scaled(120),
            check=False,
        )
    code, grown = map(int, ended.stdout.split())
    assert (code, stderr_text(ended).count("entries: copy the directories")) == (1, 1)
    assert grown * 1024 < 40 * 1_048_576
    assert count > 50_000


@pytest.mark.parametrize("chunk", ["!!!!", "abc", 5, None, "YQ", "YQ==\n"])
def test_an_undecodable_chunk_is_an_error(chunk: object) -> None:
    """The command ends with exit code 0, and a part of its output is missing."""

    def answer(request: Message) -> Reply:
        of = request["params"]["processId"]
        return Reply(
            {"id": request["id"], "result": {"processId": of, "sandboxType": "none"}},
            notice("process/output", processId=of, seq=1, stream="stdout", chunk=chunk),
            notice("process/exited", processId=of, seq=2, exitCode=0, sandboxDenied=False),
            notice("process/closed", processId=of, seq=3),
        )

    ending = {"chunks": [], "nextSeq": 4, "exited": True, "exitCode": 0, "closed": True}
    read = ending | {"failure": None, "sandboxDenied": False}
    with hostile_server(process_start=answer, process_read=read) as server:
        ended = run_client("exec", server.url, "--", "x")
    assert (ended.returncode, ended.stdout) == (255, b"")
    assert "malformed message from the server: process/output" in stderr_text(ended)


@pytest.mark.parametrize(
    "block",
    [
        {"chunk": [], "eof": True},
        {"chunk": {}, "eof": True},
        {"chunk": "eA==", "eof": False},
        {"chunk": "!!!!", "eof": True},
    ],
    ids=str,
)
def test_a_wrong_block_is_an_error(block: Message) -> None:
    with hostile_server(
        fs_getMetadata=FILE, fs_open={"handleId": "h"}, fs_readBlock=block
    ) as server:
        ended = run_client("cat", f"{server.url}:/x")
    assert (ended.returncode, ended.stdout) == (1, b"")
    text = stderr_text(ended)
    assert "the server sent a block" in text or "answer to fs/readBlock: " in text
