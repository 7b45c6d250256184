"""process/write: order, repetition, and a child that does not read."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.client import Client, Server, assemble, b64
from tests.support.server_internals import eventually, resident_bytes, start_patched

Python = Callable[[str], list[str]]
_BLOCK = bytes(65_536)


def _write(client: Client, process_id: str, data: bytes, write_id: str | None = None) -> int:
    """Sends a write and returns its request id at once."""
    params = {"processId": process_id, "chunk": b64(data)}
    if write_id is not None:
        params["writeId"] = write_id
    return client.request("process/write", params)


def _stdout(client: Client, process_id: str, size: int) -> bytes:
    """The first `size` bytes of output."""
    while len(found := assemble(process_id, client.notifications).stdout) < size:
        client.receive()
    return found


@pytest.mark.quick
def test_thousand_pipelined_writes_keep_their_order(client: Client) -> None:
    name = client.start(["cat"], pipeStdin=True)
    lines = [f"line {number}\n".encode() for number in range(1000)]
    requests = [_write(client, name, line, str(number)) for number, line in enumerate(lines)]
    for request in requests:
        assert client.result(request) == {"status": "accepted"}
    expected = b"".join(lines)
    assert _stdout(client, name, len(expected)) == expected
    client.call("process/terminate", {"processId": name})


def test_write_without_an_id_is_accepted(client: Client) -> None:
    name = client.start(["cat"], pipeStdin=True)
    for _ in range(2):
        assert client.result(_write(client, name, b"x")) == {"status": "accepted"}
    assert _stdout(client, name, 2) == b"xx"
    client.call("process/terminate", {"processId": name})


def test_repeated_write_is_accepted_and_written_once(client: Client) -> None:
    name = client.start(["cat"], pipeStdin=True)
    for data, write_id in ((b"one", "1"), (b"two", "2"), (b"one", "1"), (b"other", "2")):
        assert client.write(name, data, write_id) == "accepted"
    assert client.write(name, b"!", "3") == "accepted"
    assert _stdout(client, name, 7) == b"onetwo!"
    client.call("process/terminate", {"processId": name})


def test_oldest_write_ids_are_forgotten() -> None:
    with start_patched({"process.process.WRITE_IDS": 3}) as server, server.connect() as client:
        name = client.start(["cat"], pipeStdin=True)
        for write_id in "1234" + "2341":  # 2, 3 and 4 are remembered, 1 is not
            assert client.write(name, write_id.encode(), write_id) == "accepted"
        assert client.write(name, b".", "end") == "accepted"
        assert _stdout(client, name, 6) == b"12341."
        client.call("process/terminate", {"processId": name})


def test_4096_write_ids_are_remembered(client: Client) -> None:
    name = client.start(["cat"], pipeStdin=True)
    requests = [_write(client, name, b"", str(number)) for number in range(4096)]
    requests += [_write(client, name, b"again", str(number)) for number in range(4096)]
    requests += [_write(client, name, b"end", "end")]
    for request in requests:
        assert client.result(request) == {"status": "accepted"}
    assert _stdout(client, name, 3) == b"end"
    client.call("process/terminate", {"processId": name})


def test_statuses(client: Client) -> None:
    assert client.write("nobody", b"x", "1") == "unknownProcess"
    name = client.start(["sleep", "60"])
    assert client.write(name, b"x", "1") == "stdinClosed"
    client.call("process/terminate", {"processId": name})
    finished = client.start(["/bin/true"], pipeStdin=True)
    client.collect(finished)
    assert client.write(finished, b"x", "1") == "accepted"
    params = {"processId": finished, "chunk": "", "writeId": ""}
    assert client.failure("process/write", params) == (-32602, "writeId must not be empty")


def test_write_after_terminate_fails_unless_it_is_known(client: Client) -> None:
    name = client.start(["cat"], pipeStdin=True)
    assert client.write(name, b"x", "1") == "accepted"
    client.call("process/terminate", {"processId": name})
    expected = (-32603, "failed to write to process stdin")
    for _ in range(2):  # before and after the exit was noticed
        assert client.write(name, b"x", "1") == "accepted"
        params = {"processId": name, "chunk": b64("x"), "writeId": "2"}
        assert client.failure("process/write", params) == expected
        client.collect(name)


def test_write_to_a_child_that_closed_its_stdin_vanishes(client: Client) -> None:
    name = client.start(["/bin/sh", "-c", "exec <&-; echo closed; sleep 60"], pipeStdin=True)
    client.notice("process/output", name)
    for number in range(10):
        assert client.write(name, _BLOCK, str(number)) == "accepted"
    client.call("process/terminate", {"processId": name})
    assert client.collect(name).exit_code == 137


def test_full_stdin_holds_up_only_its_own_writes(server: Server) -> None:
    with server.connect() as client:
        before = resident_bytes(server)
        name = client.start(["sleep", "60"], pipeStdin=True)
        requests = [_write(client, name, _BLOCK, str(number)) for number in range(500)]
        assert client.call("environment/status") == {"status": "ready"}
        assert client.run(["echo", "fine"]).stdout == b"fine\n"
        poll = client.request("process/read", {"processId": name, "waitMs": 1})
        assert client.result(poll)["chunks"] == []
        assert resident_bytes(server) - before < 100 * 1_048_576
        assert client.call("process/terminate", {"processId": name}) == {"running": True}
        assert client.collect(name).exit_code == 137
        for request in requests:
            client.answer(request)


def test_waiting_writes_are_written_once_and_in_order_when_the_child_reads(
    client: Client, python: Python, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "fifo")
    code = f"""
import hashlib, sys
open({str(tmp_path / "fifo")!r}).read()
print(hashlib.md5(sys.stdin.buffer.read(100 * 65536 + 3)).hexdigest(), flush=True)
"""
    name = client.start(python(code), pipeStdin=True)
    blocks = [bytes([number]) * 65_536 for number in range(100)]
    requests = [_write(client, name, block, str(number)) for number, block in enumerate(blocks)]
    repeated = _write(client, name, blocks[99], "99")  # while the first of this id waits
    end = _write(client, name, b"END", "end")
    assert client.call("environment/status") == {"status": "ready"}
    assert not [message for message in client.messages if message.get("id") == requests[99]]
    (tmp_path / "fifo").write_text("go\n")
    for request in [*requests, repeated, end]:
        assert client.result(request) == {"status": "accepted"}
    digest = hashlib.md5(b"".join(blocks) + b"END").hexdigest()
    assert _stdout(client, name, 33).decode() == digest + "\n"
    assert client.collect(name).exit_code == 0


def test_stdin_of_other_processes_goes_on(client: Client) -> None:
    stuck = client.start(["sleep", "60"], pipeStdin=True)
    requests = [_write(client, stuck, _BLOCK, str(number)) for number in range(200)]
    name = client.start(["cat"], pipeStdin=True)
    assert client.write(name, b"through", "1") == "accepted"
    assert _stdout(client, name, 7) == b"through"
    for process_id in (stuck, name):
        client.call("process/terminate", {"processId": process_id})
    for request in requests:
        client.answer(request)


def test_writes_of_a_lost_connection_are_not_stuck(server: Server, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    client = server.connect()
    script = f"read line < {tmp_path}/fifo; exec cat"
    name = client.start(["/bin/sh", "-c", script], pipeStdin=True)
    requests = [_write(client, name, b"a" * 65_536, str(number)) for number in range(64)]
    assert client.call("environment/status") == {"status": "ready"}
    accepted = [r for r in requests if any(m.get("id") == r for m in client.messages)]
    client.close()

    def resumed() -> Client | None:
        again = server.connect(initialize=False)
        params = {"clientName": "again", "resumeSessionId": client.session_id}
        if "result" in again.answer(again.request("initialize", params)):
            again.notify("initialized")
            return again
        again.close()
        return None

    with eventually("the session is free", resumed) as again:
        (tmp_path / "fifo").write_text("go\n")
        end = _write(again, name, b"END", "end")
        assert again.result(end) == {"status": "accepted"}
        expected = b"a" * 65_536 * len(accepted) + b"END"
        assert _stdout(again, name, len(expected)) == expected
        again.call("process/terminate", {"processId": name})
