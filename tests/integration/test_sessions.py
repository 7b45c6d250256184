"""Sessions across connections: resume, conflict, retention, and clients that vanish."""

from __future__ import annotations

import base64
import json
import os
import socket
import time
from pathlib import Path

import pytest
from tests.support.client import (
    CLOSE,
    PING,
    TEXT,
    Client,
    Server,
    b64,
    descendants,
    frame_bytes,
    scaled,
    start_server,
    survivors,
    uri,
)
from tests.support.server_internals import eventually, own_processes, resident_bytes, start_patched

_MIB = 1_048_576


@pytest.fixture
def server(fresh_server: Server) -> Server:
    """A server for each test: detached sessions and their processes live on."""
    return fresh_server


def _try_resume(server: Server, session_id: str) -> Client | int:
    """One attempt: a client past its handshake, or the error code."""
    client = server.connect(initialize=False)
    params = {"clientName": "again", "resumeSessionId": session_id}
    answer = client.answer(client.request("initialize", params))
    if "result" in answer:
        client.session_id = answer["result"]["sessionId"]
        client.notify("initialized")
        return client
    client.close()
    return int(answer["error"]["code"])


def _resume(server: Server, session_id: str, timeout: float = 10.0) -> Client:
    """Tries as clients do, until it works; an answer other than the conflict is an error."""

    def attempt() -> Client | None:
        outcome = _try_resume(server, session_id)
        if isinstance(outcome, Client):
            return outcome
        assert outcome == -32010
        return None

    return eventually("the session is resumed", attempt, timeout)


def _output(read: dict[str, list[dict[str, str]]]) -> bytes:
    return b"".join(base64.b64decode(chunk["chunk"]) for chunk in read["chunks"])


def test_sessions_of_clients_that_left_do_not_lock_out_others() -> None:
    with start_patched({"server.session.MAX_SESSIONS": 4}) as server:
        with server.connect() as busy:
            busy.start(["sleep", "60"])
            session_id = busy.session_id
        for argv in (None, ["true"]):
            for _ in range(12):
                with server.connect() as client:
                    if argv is not None:
                        client.run(argv)
        # Sessions without running processes gave way; this one was older than all of them.
        _resume(server, session_id).close()


def test_new_sessions_do_not_end_running_processes() -> None:
    constants = {"server.session.MAX_SESSIONS": 2, "server.session.SEARCH_SECONDS": 0.0}
    with start_patched(constants) as server:
        clients = [server.connect() for _ in range(2)]
        names = [client.start(["cat"], pipeStdin=True) for client in clients]
        for client in clients:
            client.close()

        text = "at most 2 sessions may exist, and all have a connection or running processes"
        with server.connect(initialize=False) as another:
            failure = another.failure("initialize", {"clientName": "another"})
            assert failure == (-32600, text)
        for client, name in zip(clients, names, strict=True):
            with _resume(server, client.session_id) as again:
                assert not again.call("process/read", {"processId": name})["exited"]
                again.call("process/terminate", {"processId": name})
                again.notice("process/closed", name)
        eventually("there is room", lambda: _has_room(server))


def _has_room(server: Server) -> bool:
    with server.connect(initialize=False) as client:
        answer = client.answer(client.request("initialize", {"clientName": "another"}))
        return "result" in answer


def _is_known(client: Client, name: str) -> bool:
    answer = client.answer(client.request("process/read", {"processId": name, "afterSeq": 99}))
    if "error" in answer:
        assert answer["error"] == {"code": -32600, "message": f"unknown process id {name}"}
    return "result" in answer


def test_sessions_that_keep_much_take_nothing_from_one_that_keeps_little() -> None:
    with start_patched({"process.retention.SERVER_RETAINED_BYTES": 6 * _MIB}) as server:
        modest = server.connect()
        modest.run(["head", "-c", "100000", "/dev/zero"], process_id="finished")
        running = modest.start(["sh", "-c", "head -c 400000 /dev/zero; exec sleep 60"])
        eventually(
            "the output",
            lambda: modest.call("process/read", {"processId": running, "afterSeq": 40})["chunks"],
        )
        modest.close()
        before = resident_bytes(server)
        greedy = []
        for _ in range(5):
            with server.connect() as client:
                for number in range(8):
                    client.run(["head", "-c", "1040000", "/dev/zero"], process_id=str(number))
                greedy.append(client.session_id)
        # Otherwise 40 MiB. Free memory returns to the system within some seconds.
        eventually("less memory", lambda: resident_bytes(server) - before < 20 * _MIB or None, 15)
        with _resume(server, modest.session_id) as again:
            for name, size in (("finished", 100_000), (running, 400_000)):
                read = again.call("process/read", {"processId": name})
                assert len(_output(read)) == size
                assert (read["exited"], "lostBytes" in read) == (name == "finished", False)
        kept = 0
        for session_id in greedy:
            with _resume(server, session_id) as again:
                known = [number for number in range(8) if _is_known(again, str(number))]
                assert known == list(range(8 - len(known), 8))
                kept += len(known)
        assert 3 <= kept <= 6


@pytest.mark.quick
def test_nothing_of_a_closed_session_goes_on(server: Server, tmp_path: Path) -> None:
    with server.connect() as client:
        client.call("fs/watch", {"watchId": 1, "path": uri(tmp_path)})
        port = client.call("port/listen", {"listenerId": "l", "port": 0})["port"]
        with socket.create_connection(("127.0.0.1", port), scaled(10)) as forwarded:
            client.wait_for(lambda notice: notice["method"] == "port/accepted")
            assert client.call("session/close") == {}
            with pytest.raises(ConnectionResetError):
                forwarded.recv(1)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port)).close()
        (tmp_path / "new").touch()
        client.silence(0.3)


def test_session_ids_are_different(server: Server) -> None:
    with server.connect() as one, server.connect() as two:
        assert one.session_id != two.session_id


def test_resumed_session_has_its_processes_and_their_missed_events(
    server: Server, tmp_path: Path
) -> None:
    # One for each step: a reader could still meet the writer of the step before.
    os.mkfifo(tmp_path / "first")
    os.mkfifo(tmp_path / "second")
    client = server.connect()
    name = client.start(
        ["/bin/sh", "-c", f"cd {tmp_path}; echo one; read x < first; echo two; read y < second"]
    )
    client.notice("process/output", name)
    client.close()
    (tmp_path / "first").write_text("go\n")
    with _resume(server, client.session_id) as again:
        assert again.session_id == client.session_id
        missed = again.call("process/read", {"processId": name, "afterSeq": 1, "waitMs": 10_000})
        assert _output(missed) == b"two\n"
        (tmp_path / "second").write_text("go\n")
        assert again.notice("process/closed", name)["seq"] == 4
        everything = again.call("process/read", {"processId": name})
        assert _output(everything) == b"one\ntwo\n"
        assert (everything["exitCode"], everything["closed"]) == (0, True)


def test_notifications_flow_from_the_resume_on(server: Server, tmp_path: Path) -> None:
    client = server.connect()
    name = client.start(["sh", "-c", "while :; do echo x; sleep 0.02; done"])
    client.close()
    again = eventually("the session is free", lambda: server.connect(initialize=False))

    def initialized() -> bool:
        params = {"clientName": "again", "resumeSessionId": client.session_id}
        return "result" in again.answer(again.request("initialize", params))

    eventually("the session is resumed", initialized)
    # No `initialized` yet: events come all the same.
    again.notice("process/output", name)
    again.notify("initialized")
    again.call("process/terminate", {"processId": name})
    again.close()


def test_exit_while_detached_is_seen_after_the_resume(server: Server) -> None:
    client = server.connect()
    name = client.start(["/bin/sh", "-c", "read line; echo $line; exit 3"], pipeStdin=True)
    client.write(name, b"bye\n", "1")
    client.close()
    with _resume(server, client.session_id) as again:
        result = again.call("process/read", {"processId": name, "afterSeq": 1, "waitMs": 10_000})
        while not result["closed"]:
            after = result["nextSeq"] - 1
            params = {"processId": name, "afterSeq": after, "waitMs": 10_000}
            result = again.call("process/read", params)
        assert result["exitCode"] == 3
        assert _output(again.call("process/read", {"processId": name})) == b"bye\n"


def test_detached_process_goes_on_and_only_its_tail_is_kept(server: Server, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    client = server.connect()
    script = f"read x < {tmp_path}/fifo; head -c {5 * _MIB} /dev/zero; printf end; touch done"
    name = client.start(["/bin/sh", "-c", script], cwd=f"file://{tmp_path}")
    client.close()
    (tmp_path / "fifo").write_text("go\n")
    eventually("the child has written everything", (tmp_path / "done").exists)
    with _resume(server, client.session_id) as again:
        while not (read := again.call("process/read", {"processId": name}))["closed"]:
            again.call("environment/status")
        kept = _output(read)
        assert kept.endswith(b"\0\0\0end")
        assert _MIB - 8192 <= len(kept) <= _MIB
        assert read["chunks"][0]["seq"] > 1


def test_attached_session_cannot_be_resumed(server: Server) -> None:
    with server.connect() as client, server.connect(initialize=False) as second:
        params = {"clientName": "thief", "resumeSessionId": client.session_id}
        text = f"session {client.session_id} is already attached to another connection"
        assert second.failure("initialize", params) == (-32010, text)
        assert client.call("environment/status") == {"status": "ready"}
        # The second connection stays and may try again, or take a session of its own.
        assert second.failure("initialize", params)[0] == -32010
        assert second.initialize()["sessionId"] != client.session_id
        assert client.call("environment/status") == {"status": "ready"}


def test_unknown_session_cannot_be_resumed(server: Server) -> None:
    with server.connect(initialize=False) as client:
        for name in ("nonsense", "00000000-0000-4000-8000-000000000000", ""):
            failure = client.failure("initialize", {"clientName": "x", "resumeSessionId": name})
            assert failure == (-32600, f"unknown session id {name}")
        client.initialize()


def test_vanished_client_is_found_out_and_its_session_resumed_soon(server: Server) -> None:
    """A half-open connection: no byte and no pong comes from it, but its socket is open."""
    vanished = server.connect()
    name = vanished.start(["sleep", "60"])
    before = time.monotonic()
    with _resume(server, vanished.session_id) as again:
        assert time.monotonic() - before < scaled(5)
        assert again.call("process/terminate", {"processId": name}) == {"running": True}
    vanished.close()


def test_vanished_client_that_had_stopped_reading_is_found_out(server: Server) -> None:
    vanished = server.connect()
    name = vanished.start(["cat", "/dev/zero"])
    before = time.monotonic()
    with _resume(server, vanished.session_id) as again:
        assert time.monotonic() - before < scaled(5)
        assert again.call("process/terminate", {"processId": name}) == {"running": True}
    vanished.close()


def test_living_client_keeps_its_session() -> None:
    with (
        start_patched({"net.websocket.server.PROBE_SECONDS": 0.3}) as server,
        server.connect() as client,
    ):
        assert _try_resume(server, client.session_id) == -32010
        frame = client.websocket.receive_frame(scaled(10))
        assert frame.opcode == PING
        client.websocket.send_frame(0xA, frame.payload)
        time.sleep(0.5)  # longer than the server waits for the answer
        assert client.call("environment/status") == {"status": "ready"}
        assert _try_resume(server, client.session_id) == -32010
        client.silence(0.1)


def test_silent_client_loses_its_session_when_it_is_wanted() -> None:
    with start_patched({"net.websocket.server.PROBE_SECONDS": 0.3}) as server:
        client = server.connect()
        with _resume(server, client.session_id) as again:
            assert again.call("environment/status") == {"status": "ready"}
        client.close()


def test_long_poll_of_a_dead_connection_does_not_delay_the_resume(server: Server) -> None:
    client = server.connect()
    name = client.start(["sleep", "60"])
    client.request("process/read", {"processId": name, "waitMs": 600_000})
    client.close()
    before = time.monotonic()
    with _resume(server, client.session_id) as again:
        assert time.monotonic() - before < scaled(2)
        again.call("process/terminate", {"processId": name})


@pytest.mark.parametrize("way", ["close frame", "close", "abort"])
def test_start_survives_the_loss_of_its_connection(server: Server, way: str) -> None:
    """Sent together with the end of the connection, a start happens or was never received."""
    params = {"processId": "p", "argv": ["sleep", "60"], "cwd": "file:///", "tty": False}
    params["env"] = {"PATH": "/usr/bin:/bin"}
    message = json.dumps({"id": 2, "method": "process/start", "params": params}).encode()
    for _ in range(20):
        client = server.connect()
        if way == "close frame":
            frames = frame_bytes(TEXT, message) + frame_bytes(CLOSE, b"\x03\xe8")
            client.websocket.send_bytes(frames)
            client.wait_closed()
        else:
            client.send(json.loads(message))
            getattr(client.websocket, way)()
        with _resume(server, client.session_id) as again:

            def outcome(again: Client = again) -> str | None:
                answer = again.answer(again.request("process/read", {"processId": "p"}))
                text = answer["error"]["message"] if "error" in answer else "started"
                return text if text != "process id p is starting" else None

            happened = eventually("the start is over", outcome)
            assert happened in ("started", "unknown process id p")
            if way == "close frame":
                assert happened == "started"
            running = again.call("process/terminate", {"processId": "p"})["running"]
            assert running == (happened == "started")
        client.close()


# ---- retention ------------------------------------------------------------------------


def test_retention_zero_ends_the_session_with_its_connection() -> None:
    with start_server("ours", "--session-retention", "0") as server:
        client = server.connect()
        client.start(["sleep", "60"])
        client.start(["sleep", "60"], tty=True)
        own = own_processes(server)
        family = {p: s for p, s in descendants(server.process.pid).items() if p not in own}
        assert len(family) == 2
        client.close()
        assert survivors(family) == []
        assert _try_resume(server, client.session_id) == -32600


def test_expired_session_is_unknown_and_its_processes_are_dead() -> None:
    with start_server("ours", "--session-retention", "1") as server:
        client = server.connect()
        client.start(["/bin/sh", "-c", "setsid sleep 60 & sleep 60"])
        client.start(["sleep", "60"], tty=True)
        own = own_processes(server)

        def family() -> dict[int, str]:
            found = descendants(server.process.pid)
            return {pid: start for pid, start in found.items() if pid not in own}

        eventually("all processes run", lambda: len(family()) == 4)
        processes = family()
        client.close()
        before = time.monotonic()
        assert survivors(processes) == []
        assert time.monotonic() - before > 0.9
        assert _try_resume(server, client.session_id) == -32600


def test_resume_stops_the_expiry() -> None:
    with start_server("ours", "--session-retention", "1") as server:
        client = server.connect()
        name = client.start(["sleep", "60"])
        client.close()
        with _resume(server, client.session_id) as again:
            time.sleep(1.2)
            assert again.call("process/terminate", {"processId": name}) == {"running": True}
            again.collect(name)


def test_server_with_attached_and_detached_sessions_ends_cleanly(server: Server) -> None:
    attached, detached = server.connect(), server.connect()
    for client in (attached, detached):
        client.start(["sleep", "60"])
        client.start(["cat"], pipeStdin=True, process_id="cat")
    detached.close()
    attached.request("process/read", {"processId": "cat", "waitMs": 600_000})
    attached.call("process/write", {"processId": "cat", "chunk": b64("x"), "writeId": "1"})
    server.stop()
    assert server.stderr() == ""
    attached.close()


def test_sigterm_with_retention_zero_and_a_client_ends_cleanly() -> None:
    with start_server("ours", "--session-retention", "0") as server:
        client = server.connect()
        client.start(["sleep", "60"])
        server.stop()
        assert server.stderr() == ""
        client.close()
