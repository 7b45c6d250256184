"""The stdio transport: lines, limits, ends, and odd standard streams."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest
from tests.support.client import (
    Client,
    Disconnected,
    Server,
    StdioLink,
    descendants,
    run_command,
    scaled,
    server_command,
    server_environment,
    start_stdio,
    survivors,
    uri,
)
from tests.support.server_internals import resident_bytes

_STATUS = b'{"id":9,"method":"environment/status"}'
_READY = b'{"id":9,"result":{"status":"ready"}}'
_HELLO = b'{"id":1,"method":"initialize","params":{"clientName":"x"}}\n{"method":"initialized"}\n'
_MIB = 1_048_576


def _link(client: Client) -> StdioLink:
    assert isinstance(client.link, StdioLink)
    return client.link


def _answer(client: Client, seconds: float = 10) -> bytes:
    return client.link.receive(scaled(seconds))


@pytest.mark.quick
def test_lines_end_in_lf_or_crlf() -> None:
    with start_stdio("ours") as (_, client):
        client.initialize()
        _link(client).send_bytes(_STATUS + b"\r\n" + _STATUS + b"\n")
        assert [_answer(client), _answer(client)] == [_READY, _READY]


def test_blank_lines_are_skipped() -> None:
    with start_stdio("ours") as (_, client):
        client.initialize()
        _link(client).send_bytes(b"\n\r\n  \t \n" + _STATUS + b"\n\n")
        assert _answer(client) == _READY
        _link(client).send_bytes(b"\n?\n")
        assert client.receive()["id"] == -1


def test_lines_may_come_in_pieces_or_together() -> None:
    with start_stdio("ours") as (_, client):
        client.initialize()
        for byte in _STATUS + b"\n":
            _link(client).send_bytes(bytes([byte]))
        assert _answer(client) == _READY
        _link(client).send_bytes((_STATUS + b"\n") * 2000)
        assert [_answer(client) for _ in range(2000)] == [_READY] * 2000


def test_malformed_line_is_answered() -> None:
    with start_stdio("ours") as (_, client):
        _link(client).send_bytes(b"garbage\n")
        assert json.loads(_answer(client)) == {
            "error": {
                "code": -32600,
                "message": "failed to parse JSON-RPC message from exec-server stdio: "
                "JSON is malformed: invalid character (byte 0)",
            },
            "id": -1,
        }


def _is_silent_but_alive(server: Server, client: Client) -> None:
    """The connection has ended, the process waits for the end of its stdin."""
    _link(client).send_bytes(_STATUS + b"\n")
    client.silence(0.2)
    assert server.process.poll() is None


@pytest.mark.parametrize("line", [b'{"id":"\xff"}\n', b"\xc3\n", b"\xed\xa0\x80\n"])
def test_invalid_utf_8_ends_the_connection(line: bytes, python: Callable[[str], list[str]]) -> None:
    with start_stdio("ours") as (server, client):
        client.initialize()
        client.start(["sleep", "60"])
        _link(client).send_bytes(line)
        _is_silent_but_alive(server, client)


@pytest.mark.parametrize("ended", [True, False], ids=["whole", "unfinished"])
def test_too_long_line_ends_the_connection(ended: bool) -> None:
    with start_stdio("ours") as (server, client):
        client.initialize()
        _link(client).send_bytes(_STATUS + b" " * (64 * _MIB + 1 - len(_STATUS)))
        if ended:
            _link(client).send_bytes(b"\n")
        else:
            _link(client).send_bytes(b"  ")
        _is_silent_but_alive(server, client)


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_longest_line_is_accepted(end: bytes) -> None:
    with start_stdio("ours") as (_, client):
        client.initialize()
        _link(client).send_bytes(_STATUS + b" " * (64 * _MIB - len(_STATUS)) + end)
        assert _answer(client, 30) == _READY


def test_stray_response_ends_the_connection() -> None:
    with start_stdio("ours") as (server, client):
        client.initialize()
        client.send({"id": 1, "result": {}})
        _is_silent_but_alive(server, client)


def test_end_of_stdin_kills_everything_at_once(python: Callable[[str], list[str]]) -> None:
    with start_stdio("ours", "--session-retention", "30") as (server, client):
        client.initialize()
        client.start(["sleep", "600"])
        client.start(["sleep", "600"], tty=True)
        client.start(
            python("import os,time; os.setsid() if os.fork() == 0 else 0; time.sleep(600)")
        )
        family = descendants(server.process.pid)
        client.close()
        assert server.process.wait(scaled(5)) == 0
        assert survivors(family) == []


def test_unterminated_last_line_is_not_a_message() -> None:
    with start_stdio("ours") as (_, client):
        client.initialize()
        _link(client).send_bytes(_STATUS + b"\n" + _STATUS)
        client.close()
        assert _answer(client) == _READY
        with pytest.raises(Disconnected):
            _answer(client)


def _run_stdio(
    stdin: IO[bytes] | int, stdout: IO[bytes] | int = subprocess.PIPE, flags: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*server_command("ours"), "--listen", "stdio", *flags],
        env=server_environment("ours"),
        stdin=stdin,
        stdout=stdout,
        stderr=subprocess.PIPE,
        timeout=scaled(20),
        check=False,
    )


def _run_piped(lines: bytes, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[bytes]:
    """A server whose stdin is a pipe with these lines, then its end."""
    return subprocess.run(
        [*server_command("ours"), "--listen", "stdio", *flags],
        env=server_environment("ours"),
        input=lines,
        capture_output=True,
        timeout=scaled(30),
        check=False,
    )


def test_stdin_may_be_a_file(tmp_path: Path) -> None:
    requests = tmp_path / "requests"
    requests.write_bytes(_HELLO + _STATUS + b"\n")
    with requests.open("rb") as file:
        ended = _run_stdio(file)
    assert (ended.returncode, ended.stderr) == (0, b"")
    first, second = ended.stdout.splitlines()
    assert json.loads(first)["id"] == 1
    assert second == _READY


def test_stdout_may_be_a_file(tmp_path: Path) -> None:
    requests, answers = tmp_path / "requests", tmp_path / "answers"
    requests.write_bytes(_HELLO + (_STATUS + b"\n") * 100)
    with requests.open("rb") as source, answers.open("wb") as target:
        ended = _run_stdio(source, target)
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert answers.read_bytes().splitlines()[1:] == [_READY] * 100


def test_streams_may_be_null() -> None:
    ended = _run_stdio(subprocess.DEVNULL, subprocess.DEVNULL)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_answers_are_complete_when_the_reader_is_slower_than_the_end() -> None:
    """More answers than a pipe holds, all asked for before stdin ends."""
    with start_stdio("ours") as (server, client):
        client.initialize()
        _link(client).send_bytes((_STATUS + b"\n") * 5000)
        client.close()
        # Long after everything was read and answered, nothing of it was taken.
        with pytest.raises(subprocess.TimeoutExpired):
            server.process.wait(scaled(0.2))
        assert [_answer(client) for _ in range(5000)] == [_READY] * 5000
        assert server.process.wait(scaled(5)) == 0


def test_every_request_before_the_end_of_stdin_is_answered(tmp_path: Path) -> None:
    """Requests that take a thread each, far more than run at a time, then at once the end."""
    (tmp_path / "file").write_bytes(b"x" * 1000)
    path = uri(tmp_path / "file")
    count = 2000
    lines = [_HELLO]
    for number in range(2, count + 2):
        method = "fs/readFile" if number % 2 else "fs/writeFile"
        params = {"path": path} if number % 2 else {"path": path + "2", "dataBase64": "eHh4"}
        request = {"id": number, "method": method, "params": params}
        lines.append(json.dumps(request).encode() + b"\n")
    ended = _run_piped(b"".join(lines))
    answers = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [answer["id"] for answer in answers] == list(range(1, count + 2))
    assert all("result" in answer for answer in answers)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_large_answer_is_complete_when_stdin_has_ended(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(bytes(20 * _MIB))
    params = {"path": uri(tmp_path / "big")}
    request = {"id": 2, "method": "fs/readFile", "params": params}
    ended = _run_piped(_HELLO + json.dumps(request).encode() + b"\n")
    answer = json.loads(ended.stdout.splitlines()[1])
    assert len(answer["result"]["dataBase64"]) > 26 * _MIB
    assert ended.returncode == 0


def test_silent_host_does_not_keep_the_server_after_the_end_of_stdin() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        params = {"method": "GET", "url": url, "requestId": "r", "headers": []}
        request = {"id": 2, "method": "http/request", "params": params}
        ended = _run_piped(_HELLO + json.dumps(request).encode() + b"\n")
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.parametrize("flags", [(), ("--concurrent-requests", "8")])
def test_end_of_stdin_kills_processes_and_long_polls_return(flags: tuple[str, ...]) -> None:
    """Also a process whose start was requested, but not begun, when stdin ended."""
    start = {"processId": "p", "argv": ["sleep", "600"], "cwd": "/", "env": {}, "tty": False}
    poll = {"processId": "p", "waitMs": 60_000}
    requests = [
        {"id": 2, "method": "process/start", "params": start},
        {"id": 3, "method": "process/read", "params": poll},
        {"id": 4, "method": "process/read", "params": poll},
        {"id": 5, "method": "environment/status"},
    ]
    lines = b"".join(json.dumps(request).encode() + b"\n" for request in requests)
    began = time.monotonic()
    ended = _run_piped(_HELLO + lines, flags)
    assert time.monotonic() - began < scaled(10)
    answers = [json.loads(line) for line in ended.stdout.splitlines()]
    by_id = {answer["id"]: answer for answer in answers if "id" in answer}
    assert sorted(by_id) == [1, 2, 3, 4, 5]
    assert by_id[2]["result"]["processId"] == "p"
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_reader_that_takes_nothing_ends_the_server_after_stdin(tmp_path: Path) -> None:
    """Far more answers than the server holds, so that it cannot even make them all."""
    (tmp_path / "big").write_bytes(bytes(_MIB))
    request = {"id": 2, "method": "fs/readFile", "params": {"path": uri(tmp_path / "big")}}
    with start_stdio("ours") as (server, client):
        client.initialize()
        _link(client).send_bytes((json.dumps(request).encode() + b"\n") * 40)
        client.close()
        assert server.process.wait(scaled(8)) == 0


def test_reader_that_never_comes_does_not_keep_the_server() -> None:
    with start_stdio("ours") as (server, client):
        client.initialize()
        child = client.start(["sleep", "600"])
        _link(client).send_bytes((_STATUS + b"\n") * 5000)
        client.close()
        assert server.process.wait(scaled(5)) == 0
        assert child


def test_exit_on_stdin_close_does_not_steal_messages() -> None:
    with start_stdio("ours", "--exit-on-stdin-close") as (_, client):
        client.initialize()
        for _ in range(200):
            assert client.call("environment/status") == {"status": "ready"}


def test_nothing_is_printed_unasked() -> None:
    ended = run_command("ours", "--listen", "stdio://")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_client_that_does_not_read_gets_everything_later(
    python: Callable[[str], list[str]], tmp_path: Path
) -> None:
    (tmp_path / "big").write_bytes(bytes(20 * _MIB))
    with start_stdio("ours") as (_, client):
        client.initialize()
        output = client.start(python("import os; os.write(1, b'x' * 3_000_000)"))
        read = client.request("fs/readFile", {"path": uri(tmp_path / "big")})
        # Sent while the answer above does not fit into the pipe.
        polls = [client.request("environment/status") for _ in range(50)]
        run = client.collect(output, timeout=30)
        assert run.stdout == b"x" * 3_000_000
        assert len(client.result(read, timeout=30)["dataBase64"]) > 26 * _MIB
        assert [client.result(poll) for poll in polls] == [{"status": "ready"}] * 50


def test_requests_without_end_are_not_taken_without_end(tmp_path: Path) -> None:
    """The client sends and sends, and reads nothing.

    Answers of a few kilobytes: enough of them are made for every one to let in a read too many.
    """
    for number in range(100):
        (tmp_path / str(number)).touch()
    params = {"id": 1, "method": "fs/readDirectory", "params": {"path": str(tmp_path)}}
    request = json.dumps(params).encode() + b"\n"
    with start_stdio("ours") as (server, client):
        client.initialize()
        stdin = server.process.stdin
        assert stdin is not None
        os.set_blocking(stdin.fileno(), False)
        before, sent = resident_bytes(server), 0
        patience = time.monotonic() + 1.0
        while sent < 48 * _MIB and time.monotonic() < patience:
            try:
                sent += os.write(stdin.fileno(), request * 500)
                patience = time.monotonic() + 1.0
            except BlockingIOError:
                time.sleep(0.01)
        assert sent < 48 * _MIB
        assert resident_bytes(server) - before < 40 * _MIB
        # Although nothing more is read from it, its end is noticed by that of its streams.
        assert server.process.stdout is not None
        server.process.stdout.close()


def test_closed_stdout_is_survived_until_stdin_ends() -> None:
    with start_stdio("ours") as (server, client):
        client.initialize()
        assert server.process.stdout is not None
        server.process.stdout.close()
        _link(client).send_bytes((_STATUS + b"\n") * 10)
        client.close()
        assert server.process.wait(scaled(10)) == 0
        assert server.stderr() == ""


def test_standard_streams_may_be_one_socket() -> None:
    """As sshd and inetd start a program."""
    ours, theirs = socket.socketpair()
    with ours:
        process = subprocess.Popen(
            [*server_command("ours"), "--listen", "stdio"],
            env=server_environment("ours"),
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
        )
        theirs.close()
        ours.settimeout(scaled(10))
        ours.sendall(_HELLO + _STATUS + b"\n")
        try:
            with ours.makefile("rb") as lines:
                assert json.loads(lines.readline())["id"] == 1
                assert lines.readline().rstrip(b"\n") == _READY
                # More than the socket holds, and no more to come.
                ours.sendall((_STATUS + b"\n") * 20_000)
                ours.shutdown(socket.SHUT_WR)
                assert lines.read().splitlines() == [_READY] * 20_000
            assert process.wait(scaled(10)) == 0
        finally:
            process.kill()
            process.wait()


def test_children_get_none_of_the_standard_streams(python: Callable[[str], list[str]]) -> None:
    with start_stdio("ours") as (server, client):
        client.initialize()
        ours = {os.readlink(f"/proc/{server.process.pid}/fd/{number}") for number in (0, 1)}
        code = "import os; print([os.readlink(f'/proc/self/fd/{n}') for n in (0, 1, 2)])"
        seen = client.run(python(code)).stdout.decode()
        assert not [link for link in ours if link in seen and "null" not in link]
