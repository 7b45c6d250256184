"""process/start, process/read and the order of events, with real children."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.client import Client, Message, ProcessRun, Server, b64, scaled, start_server, uri
from tests.support.server_internals import start_patched, start_prepared

Python = Callable[[str], list[str]]


@pytest.fixture
def patient_cat(client: Client) -> Iterator[str]:
    """A process whose every written chunk comes back as a chunk of its own."""
    process_id = client.start(["cat"], process_id="cat", pipeStdin=True)
    yield process_id
    client.call("process/terminate", {"processId": process_id})


def _echo(client: Client, text: str) -> int:
    """Has the cat say something; returns the number of that chunk."""
    client.write("cat", text.encode(), text)
    return int(
        client.wait_for(
            lambda n: n["method"] == "process/output" and n["params"]["chunk"] == b64(text)
        )["params"]["seq"]
    )


def _read(client: Client, process_id: str, **params: Any) -> Message:
    result: Message = client.call("process/read", {"processId": process_id} | params)
    return result


def _state(code: int | None = None, *, closed: bool = False) -> Message:
    """What a process/read says of the process, next to its chunks."""
    return {
        "exited": code is not None,
        "exitCode": code,
        "closed": closed,
        "failure": None,
        "sandboxDenied": False,
    }


def _chunk(seq: int, text: str, stream: str = "stdout") -> Message:
    return {"seq": seq, "stream": stream, "chunk": b64(text)}


def _kinds(run: ProcessRun) -> list[str]:
    return [kind for _, kind in run.events]


# ---- order ----------------------------------------------------------------------------


@pytest.mark.parametrize("concurrent", [1, 8])
def test_answer_precedes_all_events_and_events_come_in_order(concurrent: int) -> None:
    with (
        start_server("ours", "--concurrent-requests", str(concurrent)) as server,
        server.connect() as client,
    ):
        programs = [["/bin/true"], ["/bin/sh", "-c", "echo a; echo b >&2; exit 1"]]
        requests = {}
        for number in range(300):
            name = f"quick-{number}"
            params = {
                "processId": name,
                "argv": programs[number % 2],
                "cwd": "file:///",
                "env": {},
                "tty": number % 10 == 0,
            }
            requests[name] = client.request("process/start", params)
        for name in requests:
            client.collect(name, timeout=30)

        for name, request_id in requests.items():
            about_it = [
                message
                for message in client.messages
                if message.get("id") == request_id
                or message.get("params", {}).get("processId") == name
            ]
            assert about_it[0]["result"]["processId"] == name
            seqs = [message["params"]["seq"] for message in about_it[1:]]
            assert seqs == list(range(1, len(seqs) + 1))
            assert [m["method"] for m in about_it[-2:]] == ["process/exited", "process/closed"]


@pytest.mark.quick
@pytest.mark.parametrize("tty", [False, True])
def test_output_printed_before_the_exit_precedes_it(client: Client, tty: bool) -> None:
    script = "head -c 3000 /dev/zero; echo; exit 3"
    names = [client.start(["/bin/sh", "-c", script], tty=tty) for _ in range(50)]
    for name in names:
        run = client.collect(name)
        assert _kinds(run)[-2:] == ["exited", "closed"]
        assert "exited" not in _kinds(run)[:-2]
        assert sum(map(len, run.output.values())) == 3001 + tty


def test_full_pipe_at_the_exit_is_read_before_it(client: Client) -> None:
    run = client.run(["/bin/sh", "-c", "head -c 65536 /dev/zero; exit 4"])
    assert _kinds(run) == ["output"] * (len(run.events) - 2) + ["exited", "closed"]
    assert (len(run.stdout), run.exit_code) == (65536, 4)


def test_exit_and_close_are_separate_and_late_output_comes_between(
    client: Client, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "fifo")
    script = f"{{ read line < {tmp_path}/fifo; echo $line; }} & echo early; exit 5"
    name = client.start(["/bin/sh", "-c", script])
    exited = client.notice("process/exited", name)
    assert exited == {"processId": name, "seq": 2, "exitCode": 5, "sandboxDenied": False}
    assert _read(client, name, afterSeq=1) == {"chunks": [], "nextSeq": 3} | _state(5)

    # Somebody who has seen the exit waits for what comes after it.
    poll = client.request("process/read", {"processId": name, "afterSeq": 2, "waitMs": 10_000})
    (tmp_path / "fifo").write_text("late\n")
    late = client.result(poll)
    assert late["chunks"] == [_chunk(3, "late\n")]
    run = client.collect(name)
    assert run.events == [(1, "output"), (2, "exited"), (3, "output"), (4, "closed")]
    assert _read(client, name, afterSeq=3) == {"chunks": [], "nextSeq": 5} | _state(5, closed=True)


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 255", 255), ("kill -9 $$", 137), ("kill $$", 143)]
)
def test_exit_codes(client: Client, script: str, code: int) -> None:
    assert client.run(["/bin/sh", "-c", script]).exit_code == code


# ---- starting -------------------------------------------------------------------------


def test_id_is_taken_while_the_process_is_known(client: Client) -> None:
    client.run(["/bin/true"], process_id="one")
    params = {"processId": "one", "argv": ["/bin/true"], "cwd": "file:///", "env": {}, "tty": False}
    assert client.failure("process/start", params) == (-32600, "process one already exists")


def test_failed_start_frees_its_id(client: Client) -> None:
    params = {"processId": "one", "argv": ["/missing"], "cwd": "file:///", "env": {}, "tty": False}
    for tty in (False, True):
        expected = (-32603, "No such file or directory (os error 2)")
        assert client.failure("process/start", params | {"tty": tty}) == expected
    assert client.run(["/bin/true"], process_id="one").exit_code == 0


@pytest.mark.parametrize("tty", [False, True])
def test_exec_failures_are_in_the_answer(client: Client, tmp_path: Path, tty: bool) -> None:
    (tmp_path / "plain").write_text("no program")
    (tmp_path / "shapeless").write_bytes(b"\0\1\2")
    (tmp_path / "shapeless").chmod(0o755)
    failures = {
        "/missing": "No such file or directory (os error 2)",
        f"{tmp_path}/plain": "Permission denied (os error 13)",
        f"{tmp_path}": "Permission denied (os error 13)",
        f"{tmp_path}/shapeless": "Exec format error (os error 8)",
    }
    for program, text in failures.items():
        params = {"processId": "p", "argv": [program], "cwd": "file:///", "env": {}, "tty": tty}
        assert client.failure("process/start", params) == (-32603, text)
    params["argv"] = ["/bin/true", "x" * 3_000_000]
    expected = (-32603, "Argument list too long (os error 7)")
    assert client.failure("process/start", params) == expected
    client.silence(0.1)


@pytest.mark.parametrize("tty", [False, True])
def test_bad_directory_is_an_error(client: Client, tmp_path: Path, tty: bool) -> None:
    (tmp_path / "file").touch()
    params = {"processId": "p", "argv": ["/bin/true"], "env": {}, "tty": tty}
    for name, text in {
        "missing": "No such file or directory (os error 2)",
        "file": "Not a directory (os error 20)",
    }.items():
        failure = client.failure("process/start", params | {"cwd": uri(tmp_path / name)})
        assert failure == (-32603, text)


def test_relative_program_is_looked_up_in_the_childs_directory(
    client: Client, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "hello"
    program.write_text("#!/bin/sh\necho hello from $PWD\n")
    program.chmod(0o755)
    cwd = os.path.realpath(tmp_path)
    expected = f"hello from {cwd}\n".encode()
    for argv, env in (
        (["./bin/hello"], {}),
        (["bin/hello"], {}),
        (["hello"], {"PATH": "nowhere:bin"}),
    ):
        assert client.run(argv, cwd=uri(cwd), env=env).stdout == expected


def test_terminate_during_the_start_cancels_it(tmp_path: Path) -> None:
    """A start takes as long as the program's file system: here until we let it go on."""
    slow = (
        "import exec_server.server.process_launch as processes\n"
        "real = processes.spawn\n"
        "def spawn(command, tag):\n"
        f"    open({str(tmp_path / 'fifo')!r}).read()\n"
        "    return real(command, tag)\n"
        "processes.spawn = spawn\n"
    )
    os.mkfifo(tmp_path / "fifo")
    with start_prepared(slow, "--concurrent-requests", "8") as server, server.connect() as client:
        params = {"processId": "p", "argv": ["sleep", "60"], "cwd": "file:///", "tty": False}
        params["env"] = {"PATH": "/usr/bin:/bin"}
        start = client.request("process/start", params)
        write = {"processId": "p", "chunk": "", "writeId": "w"}
        assert client.call("process/write", write) == {"status": "starting"}
        assert client.failure("process/read", {"processId": "p"})[0] == -32600
        expected = (-32600, "process p already exists")
        assert client.failure("process/start", params) == expected
        assert client.call("process/terminate", {"processId": "p"}) == {"running": True}
        (tmp_path / "fifo").write_text("go")
        answer = client.answer(start)
        assert answer["error"] == {"code": -32600, "message": "process p start was cancelled"}
        # Nobody hears of it and its id is free.
        again = client.request("process/start", params)
        (tmp_path / "fifo").write_text("go")
        assert client.result(again)["processId"] == "p"
        assert client.notifications == []
        assert client.call("process/terminate", {"processId": "p"}) == {"running": True}
        assert client.collect("p").exit_code == 137


def test_pipelined_requests_about_a_starting_process_wait_for_it(client: Client) -> None:
    for number in range(20):
        name = f"p{number}"
        params = {"processId": name, "argv": ["sleep", "60"], "cwd": "file:///", "tty": False}
        start = client.request("process/start", params | {"env": {"PATH": "/usr/bin:/bin"}})
        signal = client.request("process/signal", {"processId": name, "signal": "interrupt"})
        assert client.result(start)["processId"] == name
        assert client.result(signal) == {}
        assert client.collect(name).exit_code == 130
    start = client.request("process/start", params | {"env": {}, "processId": "q"})
    terminate = client.request("process/terminate", {"processId": "q"})
    assert client.result(start)["processId"] == "q"
    assert client.result(terminate) == {"running": True}
    assert client.collect("q").exit_code == 137


def test_too_many_live_processes_are_refused() -> None:
    with start_patched({"process.table.MAX_LIVE": 3}) as server, server.connect() as client:
        names = [client.start(["sleep", "60"]) for _ in range(3)]
        params = {"processId": "more", "argv": ["/bin/true"], "cwd": "file:///", "tty": False}
        failure = client.failure("process/start", params | {"env": {}})
        assert failure == (-32600, "at most 3 processes may run per session")
        with server.connect() as other:
            assert other.run(["/bin/true"]).exit_code == 0
        client.call("process/terminate", {"processId": names[0]})
        client.collect(names[0])
        assert client.run(["/bin/true"]).exit_code == 0


def test_running_out_of_descriptors_is_an_answer_and_passes() -> None:
    preparation = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))"
    with start_prepared(preparation) as server, server.connect() as client:
        params = {"argv": ["sleep", "60"], "cwd": "file:///", "tty": False}
        params["env"] = {"PATH": "/usr/bin:/bin"}
        started = []
        for number in range(64):
            name = f"p{number}"
            answer = client.answer(client.request("process/start", params | {"processId": name}))
            if "error" in answer:
                break
            started.append(name)
        text = "No file descriptors available (os error 24)"
        assert answer["error"] == {"code": -32603, "message": text}
        assert len(started) > 10
        for name in started:
            client.call("process/terminate", {"processId": name})
            client.collect(name)
        assert client.run(["/bin/true"]).exit_code == 0


# ---- reading --------------------------------------------------------------------------


def test_read_pages_by_bytes(client: Client, patient_cat: str) -> None:
    for text in ("abc", "defg", "h"):
        _echo(client, text)
    one, two, three = _chunk(1, "abc"), _chunk(2, "defg"), _chunk(3, "h")
    for params, chunks, next_seq in (
        ({}, [one, two, three], 4),
        ({"maxBytes": 0}, [one], 2),
        ({"maxBytes": 6}, [one], 2),
        ({"maxBytes": 7}, [one, two], 3),
        ({"maxBytes": 8}, [one, two, three], 4),
        ({"afterSeq": 1, "maxBytes": 1}, [two], 3),
        ({"afterSeq": 2}, [three], 4),
        ({"afterSeq": 3}, [], 4),
        ({"afterSeq": 3, "maxBytes": 9}, [], 4),
        ({"afterSeq": 99}, [], 4),
    ):
        expected = {"chunks": chunks, "nextSeq": next_seq} | _state()
        assert _read(client, patient_cat, **params) == expected, params


def test_long_poll_returns_with_the_next_chunk(client: Client, patient_cat: str) -> None:
    poll = client.request("process/read", {"processId": "cat", "waitMs": 60_000})
    assert client.call("environment/status") == {"status": "ready"}
    _echo(client, "news")
    assert client.result(poll) == {"chunks": [_chunk(1, "news")], "nextSeq": 2} | _state()


def test_long_poll_ends_in_time(client: Client, patient_cat: str) -> None:
    before = time.monotonic()
    assert _read(client, "cat", waitMs=100) == {"chunks": [], "nextSeq": 1} | _state()
    assert 0.1 <= time.monotonic() - before < scaled(5)


def test_long_poll_returns_at_the_exit(client: Client, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    holder = f"{{ read line < {tmp_path}/fifo; }} & exit 3"
    name = client.start(["/bin/sh", "-c", holder])
    assert _read(client, name, waitMs=60_000) == {"chunks": [], "nextSeq": 2} | _state(3)
    poll = client.request("process/read", {"processId": name, "afterSeq": 1, "waitMs": 60_000})
    (tmp_path / "fifo").write_text("end\n")
    assert client.result(poll) == {"chunks": [], "nextSeq": 3} | _state(3, closed=True)


def test_long_poll_misses_no_event_that_comes_with_it(client: Client) -> None:
    for _ in range(200):
        name = client.start(["/bin/true"])
        result = _read(client, name, waitMs=60_000)
        while not result["closed"]:
            result = _read(client, name, waitMs=60_000, afterSeq=result["nextSeq"] - 1)
        assert result == {"chunks": [], "nextSeq": 3} | _state(0, closed=True)


def test_long_polls_hold_up_nobody(client: Client, patient_cat: str) -> None:
    polls = [
        client.request("process/read", {"processId": "cat", "waitMs": 600_000, "afterSeq": 9})
        for _ in range(500)
    ]
    assert client.run(["echo", "x"]).stdout == b"x\n"
    assert client.call("process/terminate", {"processId": "cat"}) == {"running": True}
    client.collect("cat")
    for poll in polls:
        assert client.result(poll)["exitCode"] == 137


def test_reading_an_unknown_process(client: Client) -> None:
    expected = (-32600, "unknown process id nobody")
    params = {"processId": "nobody", "waitMs": 60_000}
    assert client.failure("process/read", params) == expected


# ---- forgetting -----------------------------------------------------------------------


def test_closed_process_is_readable_for_a_while_and_then_forgotten() -> None:
    with start_server("ours", "--process-retention", "2") as server, server.connect() as client:
        began = time.monotonic()
        name = client.start(["echo", "x"], process_id="p")
        client.collect(name)
        assert _read(client, name)["chunks"] == [_chunk(1, "x\n")]
        while "result" in client.answer(client.request("process/read", {"processId": name})):
            assert time.monotonic() - began < scaled(20)
        assert time.monotonic() - began >= 2.0
        write = {"processId": name, "chunk": "", "writeId": "w"}
        assert client.call("process/write", write) == {"status": "unknownProcess"}
        assert client.call("process/terminate", {"processId": name}) == {"running": False}
        assert client.start(["/bin/true"], process_id=name) == name


@pytest.mark.parametrize(
    "limits", [{"process.table.MAX_CLOSED": 3}, {"process.table.CLOSED_BYTES": 12_000}]
)
def test_closed_processes_are_bounded(limits: dict[str, int]) -> None:
    with start_patched(limits) as server, server.connect() as client:
        for number in range(5):
            client.run(["head", "-c", "1000", "/dev/zero"], process_id=f"p{number}")
        known = [
            number
            for number in range(5)
            if "result"
            in client.answer(client.request("process/read", {"processId": f"p{number}"}))
        ]
        assert known == [2, 3, 4]


# ---- signal and terminate -------------------------------------------------------------


def test_interrupt_reaches_the_group_and_is_nothing_for_the_dead(client: Client) -> None:
    script = "trap 'echo caught; exit 7' INT; sleep 60 > /dev/null 2>&1 & echo up; wait"
    name = client.start(["/bin/sh", "-c", script])
    client.notice("process/output", name)
    params = {"processId": name, "signal": "interrupt"}
    assert client.call("process/signal", params) == {}
    run = client.collect(name)
    assert (run.stdout, run.exit_code) == (b"up\ncaught\n", 7)
    assert client.call("process/signal", params) == {}
    assert client.call("process/signal", params | {"processId": "nobody"}) == {}


def test_terminate_tells_whether_it_was_running(client: Client) -> None:
    name = client.start(["sleep", "60"])
    assert client.call("process/terminate", {"processId": name}) == {"running": True}
    run = client.collect(name)
    assert (run.exit_code, _kinds(run)) == (137, ["exited", "closed"])
    assert client.call("process/terminate", {"processId": name}) == {"running": False}
    assert client.call("process/terminate", {"processId": "nobody"}) == {"running": False}


def test_server_serves_many_sessions_with_the_same_ids(server: Server) -> None:
    with server.connect() as one, server.connect() as two:
        one.start(["cat"], process_id="p", pipeStdin=True)
        two.start(["cat"], process_id="p", pipeStdin=True)
        one.write("p", b"one", "w")
        two.write("p", b"two", "w")
        assert one.notice("process/output", "p")["chunk"] == b64("one")
        assert two.notice("process/output", "p")["chunk"] == b64("two")
        for client in (one, two):
            client.call("process/terminate", {"processId": "p"})
            client.collect("p")


def test_ids_without_end_are_refused(client: Client) -> None:
    params = {"argv": ["cat"], "cwd": "/", "env": {"PATH": "/usr/bin:/bin"}, "tty": False}
    too_long = {"processId": "ü" * 2049, **params}
    assert client.failure("process/start", too_long) == (
        -32602,
        "processId must not exceed 4096 bytes",
    )
    name = "ü" * 2048
    client.call("process/start", {"processId": name, **params, "pipeStdin": True})
    write = {"processId": name, "chunk": "", "writeId": "x" * 257}
    assert client.failure("process/write", write) == (-32602, "writeId must not exceed 256 bytes")
    assert client.call("process/write", write | {"writeId": "x" * 256}) == {"status": "accepted"}
    client.call("process/terminate", {"processId": name})
    client.collect(name)
