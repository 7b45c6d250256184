"""Detached processes: they outlive their session, and every client of the server may attach."""

from __future__ import annotations

import base64
import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
from tests.support.client import Client, Server, assemble, b64, descendants, survivors
from tests.support.sandbox import read_only
from tests.support.server_internals import eventually, start_patched

_MIB = 1_048_576


def _start(client: Client, script: str, **params: Any) -> tuple[str, str]:
    """Starts a detached script; returns the process id in the session, and the name."""
    detach = params.pop("detach", {})
    process_id = f"d{len(client.messages)}"
    request = {
        "processId": process_id,
        "argv": ["/bin/sh", "-c", script],
        "cwd": "file:///",
        "env": {"PATH": "/usr/bin:/bin"},
        "tty": False,
        "detach": detach,
    }
    return process_id, client.call("process/start", request | params)["name"]


def _attach(client: Client, name: str, **params: Any) -> str:
    process_id = f"a{len(client.messages)}"
    client.call("process/attach", {"processId": process_id, "name": name} | params)
    return process_id


def _listed(client: Client, name: str) -> dict[str, Any] | None:
    processes = client.call("process/listDetached")["processes"]
    return next((each for each in processes if each["name"] == name), None)


def _kill(client: Client, process_id: str) -> None:
    client.call("process/terminate", {"processId": process_id})
    client.notice("process/closed", process_id)


def _until(client: Client, process_id: str, text: bytes) -> None:
    """Receives until a chunk of the process contains a text."""
    client.wait_for(
        lambda notice: (
            notice["method"] == "process/output"
            and notice["params"]["processId"] == process_id
            and text in base64.b64decode(notice["params"]["chunk"])
        )
    )


def _seqs(client: Client, process_id: str) -> list[int]:
    """The numbers of the events that were received."""
    params = [notice["params"] for notice in client.notifications]
    return [each["seq"] for each in params if each["processId"] == process_id]


@pytest.mark.parametrize("confined", [{}, {"sandbox": read_only()}], ids=["free", "confined"])
def test_a_detached_process_outlives_its_session(server: Server, confined: dict[str, Any]) -> None:
    with server.connect() as first:
        _, name = _start(
            first, "echo one; read line; echo $line; exit 3", pipeStdin=True, **confined
        )
        assert first.environment_info["capabilities"]["processDetach"] is True
    with server.connect() as second:
        process_id = _attach(second, name)
        _until(second, process_id, b"one\n")
        assert second.write(process_id, b"two\n", "1") == "accepted"
        run = second.collect(process_id)
        assert (run.stdout, run.exit_code) == (b"one\ntwo\n", 3)
    with server.connect() as third:  # it has ended, and its output is still there
        run = third.collect(_attach(third, name))
        assert (run.stdout, run.exit_code) == (b"one\ntwo\n", 3)
        listed = _listed(third, name)
        assert listed is not None
        assert (listed["running"], listed["exitCode"], listed["closed"]) == (False, 3, True)


def test_two_clients_see_the_same_and_both_write(server: Server) -> None:
    with server.connect() as one, server.connect() as two:
        mine, name = _start(one, "while read line; do echo got $line; done", pipeStdin=True)
        theirs = _attach(two, name)
        # Both number their writes from 1: the ids of one client are not those of another.
        assert one.write(mine, b"a\n", "1") == "accepted"
        _until(two, theirs, b"got a\n")
        assert two.write(theirs, b"b\n", "1") == "accepted"
        assert two.write(theirs, b"b\n", "1") == "accepted"  # repeated, not written again
        _until(one, mine, b"got b\n")
        two.call("process/closeStdin", {"processId": theirs})
        assert one.collect(mine).stdout == two.collect(theirs).stdout == b"got a\ngot b\n"


def test_detaching_leaves_the_process_running(server: Server) -> None:
    with server.connect() as client:
        process_id, name = _start(client, "echo x; exec sleep 60", detach={"name": "leave"})
        assert name == "leave"
        client.notice("process/output", process_id)
        assert client.call("process/detach", {"processId": process_id}) == {}
        assert client.call("process/detach", {"processId": process_id}) == {}
        read = client.failure("process/read", {"processId": process_id})
        assert read == (-32600, f"unknown process id {process_id}")
        listed = _listed(client, name)
        assert listed is not None
        assert (listed["running"], listed["attached"]) == (True, 0)
        again = _attach(client, name)
        assert client.notice("process/output", again)["seq"] == 1
        _kill(client, again)


def test_a_position_is_chosen_and_the_loss_before_it_declared(server: Server) -> None:
    script = "head -c 3000000 /dev/zero; echo end; exec sleep 60"
    with server.connect() as client:
        process_id, name = _start(client, script)
        _until(client, process_id, b"end\n")
        listed = _listed(client, name)
        assert listed is not None
        client.call("process/detach", {"processId": process_id})
        # From the oldest on: the first event has a later number, and a read tells the loss.
        oldest = _attach(client, name)
        first = client.notice("process/output", oldest)["seq"]
        read = client.call("process/read", {"processId": oldest, "maxBytes": 1})
        assert read["firstSeq"] == first > 1
        _until(client, oldest, b"end\n")
        kept = len(assemble(oldest, client.notifications).stdout)
        assert read["lostBytes"] + kept == 3_000_004
        # From the last event on, also if the number is beyond it.
        last = listed["nextSeq"] - 1
        for after in (last - 1, 2**64 - 1):
            tail = f"tail{after}"
            params = {"processId": tail, "name": name, "afterSeq": after}
            assert client.call("process/attach", params)["afterSeq"] == min(after, last)
        assert client.notice("process/output", f"tail{last - 1}")["seq"] == last
        _kill(client, oldest)
        assert client.notice("process/exited", f"tail{2**64 - 1}")["seq"] == last + 1


def test_a_repeated_attach_sends_the_events_again(server: Server) -> None:
    with server.connect() as client:
        _, name = _start(client, "echo x; exec sleep 60")
        params = {"processId": "again", "name": name}
        client.call("process/attach", params)
        client.notice("process/output", "again")
        client.call("process/attach", params)
        while len(_seqs(client, "again")) < 2:
            client.receive()
        assert _seqs(client, "again") == [1, 1]
        _kill(client, "again")


def test_a_client_that_does_not_read_delays_no_one(server: Server, tmp_path: Path) -> None:
    with server.connect() as slow, server.connect() as quick:
        _, name = _start(slow, f"head -c {24 * _MIB} /dev/zero; touch {tmp_path}/written; read x")
        # `slow` receives nothing more. Its buffers hold a few MiB at most.
        eventually("all is written", (tmp_path / "written").exists)
        process_id = _attach(quick, name)
        closed = quick.notice("process/closed", process_id)["seq"]
        seqs = _seqs(quick, process_id)
        assert seqs == list(range(seqs[0], closed + 1))  # the retained rest, without a gap


def test_a_slow_client_gets_the_retained_rest_and_a_gap(server: Server, tmp_path: Path) -> None:
    with server.connect() as client:
        script = f"head -c {24 * _MIB} /dev/zero; touch {tmp_path}/written"
        process_id, _ = _start(client, script)
        eventually("all is written", (tmp_path / "written").exists)
        closed = client.notice("process/closed", process_id)["seq"]
        seqs = _seqs(client, process_id)
        assert seqs == sorted(seqs)
        assert len(seqs) < closed == seqs[-1]
        read = client.call("process/read", {"processId": process_id, "maxBytes": 1})
        assert read["lostBytes"] >= 22 * _MIB
        assert len(base64.b64decode(read["chunks"][0]["chunk"])) > 0


def test_a_resumed_session_is_still_attached(fresh_server: Server) -> None:
    lost = fresh_server.connect()
    process_id, name = _start(lost, "echo one; read x; echo two; read y", pipeStdin=True)
    _until(lost, process_id, b"one\n")
    lost.close()
    with fresh_server.connect() as other:
        theirs = _attach(other, name)
        other.write(theirs, b"\n", "1")
        _until(other, theirs, b"two\n")

        def resumed() -> Client | None:
            again = fresh_server.connect(initialize=False)
            params = {"clientName": "again", "resumeSessionId": lost.session_id}
            if "result" in again.answer(again.request("initialize", params)):
                again.notify("initialized")
                return again
            again.close()
            return None

        with eventually("the session is free", resumed) as again:
            read = again.call("process/read", {"processId": process_id, "afterSeq": 1})
            assert base64.b64decode(read["chunks"][0]["chunk"]) == b"two\n"
            other.write(theirs, b"\n", "2")
            assert again.notice("process/closed", process_id)["seq"] == 4


def test_names_are_checked_and_chosen(server: Server) -> None:
    with server.connect() as client:
        first, name = _start(client, "exec sleep 60")
        assert name.startswith("sh-")
        for bad in ("", "-x", "a b", "x" * 65, "ü"):
            with pytest.raises(Exception, match="begins with a letter or digit"):
                _start(client, "true", detach={"name": bad})
        with pytest.raises(Exception, match=f"the name {name} is in use"):
            _start(client, "true", detach={"name": name})
        with pytest.raises(Exception, match="idleTimeoutMs must be 1 to"):
            _start(client, "true", detach={"idleTimeoutMs": 0})
        assert client.failure("process/attach", {"processId": "x", "name": "nothing"}) == (
            -32600,
            "unknown detached process nothing",
        )
        params = {"processId": first, "name": name}
        client.call("process/attach", params)  # attached by the start: a repetition
        _kill(client, first)
        # The name of a process that has ended is free.
        second, again = _start(client, "exit 5", detach={"name": name})
        assert (again, client.notice("process/exited", second)["exitCode"]) == (name, 5)
        # Its predecessor is forgotten, and with it the attachment.
        assert client.failure("process/read", {"processId": first})[0] == -32600


def test_a_failed_start_leaves_no_name(server: Server) -> None:
    with server.connect() as client:
        for _ in range(2):
            with pytest.raises(Exception, match="os error 2"):
                _start(client, "", argv=["/nonexistent"], detach={"name": "none"})
        assert _listed(client, "none") is None


def test_detached_processes_end_by_their_own_limits(server: Server) -> None:
    with server.connect() as client:
        # The first ends by SIGTERM; the second ignores it, and is killed after the grace.
        short, old = _start(client, "exec sleep 60", detach={"maxLifetimeMs": 50})
        assert client.notice("process/exited", short)["exitCode"] == 128 + 15
        listed = _listed(client, old)
        assert listed is not None
        assert (listed["endedBy"], listed["maxLifetimeMs"]) == ("maxLifetime", 50)
        # Several, because a timer may fire a fraction of a millisecond early.
        names = set()
        for timeout in range(20, 60):
            idle, name = _start(client, "exec sleep 60", detach={"idleTimeoutMs": timeout})
            names.add(name)
            client.call("process/detach", {"processId": idle})

        def ended() -> bool:
            processes = client.call("process/listDetached")["processes"]
            reasons = {each["name"]: each["endedBy"] for each in processes if each["closed"]}
            return all(reasons.get(name) == "idleTimeout" for name in names)

        eventually("they are idle for too long", ended)


def test_a_process_that_ignores_sigterm_is_killed_after_the_grace() -> None:
    with (
        start_patched({"server.detached.GRACE_SECONDS": 0.05}) as server,
        server.connect() as client,
    ):
        script = "trap '' TERM; while :; do sleep 0.01; done"
        process_id, _ = _start(client, script, detach={"maxLifetimeMs": 50})
        assert client.notice("process/exited", process_id)["exitCode"] == 128 + 9


def test_their_number_is_limited() -> None:
    limits = {
        "server.detached.MAX_RUNNING": 2,
        "server.detached.MAX_CLOSED": 1,
        "server.detached.MAX_ATTACHMENTS": 2,
    }
    with start_patched(limits) as server, server.connect() as client:
        ids = [_start(client, "exec sleep 60", detach={"name": f"n{n}"})[0] for n in range(2)]
        with pytest.raises(Exception, match="at most 2 detached processes may run"):
            _start(client, "true")
        _attach(client, "n0")
        params = {"processId": "third", "name": "n0"}
        text = "at most 2 clients may be attached to n0"
        assert client.failure("process/attach", params) == (-32600, text)
        for process_id in ids:
            _kill(client, process_id)
        assert [each["name"] for each in client.call("process/listDetached")["processes"]] == ["n1"]
        _kill(client, _start(client, "exec sleep 60")[0])


@pytest.mark.parametrize("number", [15, 9], ids=["SIGTERM", "SIGKILL"])
def test_detached_processes_end_with_the_server(fresh_server: Server, number: int) -> None:
    with fresh_server.connect() as client:
        _start(client, "setsid sleep 61 & exec sleep 60")
    pids = eventually("both run", lambda: _sleeping(fresh_server))
    os.kill(fresh_server.process.pid, number)
    fresh_server.process.wait()
    assert not survivors(pids)


def _sleeping(server: Server) -> dict[int, str] | None:
    """Both sleeping processes and when they started, once they run."""
    found = {}
    for pid, started in descendants(server.process.pid).items():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep"):
                found[pid] = started
    return found if len(found) == 2 else None


def test_input_of_a_terminal_and_its_size(server: Server) -> None:
    with server.connect() as one, server.connect() as two:
        _, name = _start(one, "read x; stty size; read y", tty=True)
        process_id = _attach(two, name)
        two.call("process/resize", {"processId": process_id, "rows": 33, "columns": 77})
        two.call("process/write", {"processId": process_id, "chunk": b64(b"\n")})
        _until(two, process_id, b"33 77")
        two.call("process/signal", {"processId": process_id, "signal": "SIGKILL"})
        assert two.notice("process/exited", process_id)["exitCode"] == 128 + 9
