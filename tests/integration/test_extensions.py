"""What this server adds to the protocol: see the extensions in docs/protocol.md."""

from __future__ import annotations

import base64
import hashlib
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.client import Client, Server, assemble, b64, descendants
from tests.support.sandbox import read_only
from tests.support.server_internals import eventually, open_descriptors, start_patched, stat_fields

from exec_server.process.process import LISTED_ARGV

Python = Callable[[str], list[str]]
Json = dict[str, Any]
_BLOCK = 65_536

# Everything below works in a sandbox as it does without one.
CONFINED = pytest.mark.parametrize(
    "confined", [pytest.param({}, id="free"), pytest.param({"sandbox": read_only()}, id="confined")]
)


def _until(client: Client, process_id: str, text: bytes) -> bytes:
    """Receives until the process has said a text; returns all that it has said."""
    while text not in (said := _said(client, process_id)):
        client.receive()
    return said


def _said(client: Client, process_id: str) -> bytes:
    return b"".join(assemble(process_id, client.notifications).output.values())


def _shell(client: Client, script: str, **params: Any) -> str:
    return client.start(["/bin/sh", "-c", script], **params)


def _signal(client: Client, process_id: str, name: str) -> None:
    assert client.call("process/signal", {"processId": process_id, "signal": name}) == {}


def _resumed(server: Server, lost: Client) -> Client:
    """A connection to the session of one that is gone."""

    def attempt() -> Client | None:
        again = server.connect(initialize=False)
        params = {"clientName": "again", "resumeSessionId": lost.session_id}
        if "result" in again.answer(again.request("initialize", params)):
            again.notify("initialized")
            return again
        again.close()
        return None

    return eventually("the session is free", attempt)


# ---- process/closeStdin ---------------------------------------------------------------


@CONFINED
def test_closed_stdin_ends_a_child_that_has_read_all(client: Client, confined: Json) -> None:
    name = client.start(["cat"], pipeStdin=True, **confined)
    blocks = [bytes([number]) * _BLOCK for number in range(50)]
    for number, block in enumerate(blocks):
        params = {"processId": name, "chunk": b64(block), "writeId": str(number)}
        client.request("process/write", params)
    end = client.request("process/closeStdin", {"processId": name})
    assert client.result(end) == {}
    run = client.collect(name)
    assert (run.exit_code, run.stderr) == (0, b"")
    assert hashlib.sha256(run.stdout).digest() == hashlib.sha256(b"".join(blocks)).digest()


@pytest.mark.quick
def test_end_of_input_waits_for_the_writes_before_it_and_holds_nobody_up(
    client: Client, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "fifo")
    name = _shell(client, f"read line < {tmp_path}/fifo; exec wc -c", pipeStdin=True)
    params = {"processId": name, "chunk": b64(bytes(_BLOCK))}
    writes = [client.request("process/write", params | {"writeId": str(n)}) for n in range(40)]
    ends = [client.request("process/closeStdin", {"processId": name}) for _ in range(2)]
    assert client.write(name, b"late", "late") == "stdinClosed"
    assert client.write(name, b"known", "0") == "accepted"
    assert client.call("environment/status") == {"status": "ready"}
    answered = {message.get("id") for message in client.messages}
    assert not answered & {writes[-1], *ends}
    (tmp_path / "fifo").write_text("go\n")
    assert [client.result(write)["status"] for write in writes] == ["accepted"] * 40
    assert [client.result(end) for end in ends] == [{}, {}]
    run = client.collect(name)
    assert (run.stdout.split(), run.exit_code) == ([b"%d" % (40 * _BLOCK)], 0)


def test_end_of_input_that_waits_is_taken_back_with_its_connection(
    server: Server, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "fifo")
    lost = server.connect()
    name = _shell(lost, f"read line < {tmp_path}/fifo; exec wc -c", pipeStdin=True)
    params = {"processId": name, "chunk": b64(bytes(_BLOCK))}
    writes = [lost.request("process/write", params | {"writeId": str(n)}) for n in range(40)]
    lost.request("process/closeStdin", {"processId": name})
    assert lost.call("environment/status") == {"status": "ready"}
    accepted = [write for write in writes if any(m.get("id") == write for m in lost.messages)]
    assert len(accepted) < len(writes)
    lost.close()
    with _resumed(server, lost) as client:
        # As a client does that has had no answer: all again, in order.
        again = [client.request("process/write", params | {"writeId": str(n)}) for n in range(40)]
        end = client.request("process/closeStdin", {"processId": name})
        (tmp_path / "fifo").write_text("go\n")
        assert [client.result(write)["status"] for write in again] == ["accepted"] * 40
        assert client.result(end) == {}
        run = client.collect(name)
        assert (run.stdout.split(), run.exit_code) == ([b"%d" % (40 * _BLOCK)], 0)


def test_closing_stdin_is_sent_behind_a_start_without_waiting(client: Client) -> None:
    params = {"processId": "p", "argv": ["cat"], "cwd": "/", "env": {"PATH": "/usr/bin:/bin"}}
    client.request("process/start", params | {"tty": False, "pipeStdin": True})
    client.request("process/write", {"processId": "p", "chunk": b64("text")})
    assert client.result(client.request("process/closeStdin", {"processId": "p"})) == {}
    run = client.collect("p")
    assert (run.stdout, run.exit_code) == (b"text", 0)


def test_closing_stdin_again_or_too_late_changes_nothing(client: Client) -> None:
    close = "process/closeStdin"
    ended = client.start(["cat"], pipeStdin=True)
    for _ in range(2):
        assert client.call(close, {"processId": ended}) == {}
    client.collect(ended)
    killed = client.start(["sleep", "60"], pipeStdin=True)
    client.call("process/terminate", {"processId": killed})
    assert client.call(close, {"processId": killed}) == {}
    assert client.collect(killed).exit_code == 137
    deaf = _shell(client, "exec <&-; echo closed; sleep 60", pipeStdin=True)
    _until(client, deaf, b"closed\n")
    assert client.write(deaf, b"vanishes", "1") == "accepted"
    assert client.call(close, {"processId": deaf}) == {}
    assert client.write(deaf, b"x", "2") == "stdinClosed"
    client.call("process/terminate", {"processId": deaf})
    for name in (ended, killed, deaf):
        client.collect(name)
        assert client.call(close, {"processId": name}) == {}


def test_stdin_that_cannot_be_closed(client: Client) -> None:
    close = "process/closeStdin"
    assert client.failure(close, {"processId": "x"}) == (-32600, "unknown process id x")
    name = client.start(["cat"], tty=True, process_id="t")
    text = "process t has a terminal: write Ctrl-D (byte 4) to end its input"
    assert client.failure(close, {"processId": name}) == (-32600, text)
    client.write(name, b"\x04", "1")
    assert client.collect(name).exit_code == 0
    name = client.start(["sleep", "60"], process_id="n")
    text = "process n was started without pipeStdin"
    assert client.failure(close, {"processId": name}) == (-32600, text)
    client.call("process/terminate", {"processId": name})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may count the server's descriptors")
def test_closed_stdin_gives_its_descriptor_back(fresh_server: Server) -> None:
    with fresh_server.connect() as client:
        name = _shell(client, "cat; sleep 60", pipeStdin=True)
        before = open_descriptors(fresh_server)
        assert client.call("process/closeStdin", {"processId": name}) == {}
        assert open_descriptors(fresh_server) == before - 1
        client.call("process/terminate", {"processId": name})
        client.collect(name)


# ---- process/resize -------------------------------------------------------------------


@CONFINED
def test_terminal_has_its_size_from_the_start_and_tells_of_another(
    client: Client, confined: Json
) -> None:
    traps = "trap 'stty size' WINCH; trap 'exit 3' TERM"
    script = f"stty size; {traps}; echo up; while :; do sleep 0.01; done"
    size = {"rows": 33, "columns": 132}
    name = _shell(client, script, tty=True, ttySize=size, **confined)
    assert _until(client, name, b"up\r\n") == b"33 132\r\nup\r\n"
    for rows, columns in ((50, 99), (1, 65_535)):
        params = {"processId": name, "rows": rows, "columns": columns}
        assert client.call("process/resize", params) == {}
        _until(client, name, b"%d %d\r\n" % (rows, columns))
    _signal(client, name, "SIGTERM")
    assert client.collect(name).exit_code == 3


def test_resize_does_not_overtake_the_start(client: Client) -> None:
    params = {"processId": "p", "argv": ["/bin/sh", "-c", "read line; stty size"], "cwd": "/"}
    client.request("process/start", params | {"env": {"PATH": "/usr/bin:/bin"}, "tty": True})
    resize = client.request("process/resize", {"processId": "p", "rows": 5, "columns": 6})
    assert client.result(resize) == {}
    client.write("p", b"\n", "1")
    assert client.collect("p").pty == b"\r\n5 6\r\n"


def test_terminals_that_cannot_be_resized(client: Client) -> None:
    size = {"rows": 5, "columns": 6}
    expected = (-32600, "unknown process id x")
    assert client.failure("process/resize", {"processId": "x"} | size) == expected
    name = client.start(["sleep", "60"], process_id="pipes")
    expected = (-32600, "process pipes has no terminal")
    assert client.failure("process/resize", {"processId": name} | size) == expected
    client.call("process/terminate", {"processId": name})
    name = client.start(["/bin/true"], tty=True)
    client.collect(name)
    assert client.call("process/resize", {"processId": name} | size) == {}


def test_refused_size_leaves_the_id_free(client: Client) -> None:
    params = {"processId": "p", "argv": ["/bin/true"], "cwd": "/", "env": {}, "tty": False}
    sized = params | {"ttySize": {"rows": 5, "columns": 6}}
    text = "ttySize requires tty: true"
    assert client.failure("process/start", sized) == (-32602, text)
    assert client.call("process/start", params)["processId"] == "p"
    assert client.collect("p").exit_code == 0


# ---- process/signal -------------------------------------------------------------------


@CONFINED
def test_signals_reach_the_group_by_name(client: Client, confined: Json) -> None:
    names = ("HUP", "INT", "QUIT", "USR1", "USR2", "ALRM", "TERM", "CONT", "WINCH", "PIPE")
    traps = "; ".join(f"trap 'echo {name}' {name}" for name in names)
    name = _shell(client, f"{traps}; echo up; while :; do sleep 0.01; done", **confined)
    _until(client, name, b"up\n")
    for signal in names:
        _signal(client, name, f"SIG{signal}")
        _until(client, name, f"\n{signal}\n".encode())
    _signal(client, name, "SIGKILL")
    assert client.collect(name).exit_code == 137


@CONFINED
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGHUP", 129), ("SIGABRT", 134)])
def test_terminal_process_is_signalled_too(
    client: Client, confined: Json, name: str, code: int
) -> None:
    process = _shell(client, "echo up; exec sleep 60", tty=True, **confined)
    _until(client, process, b"up\r\n")
    _signal(client, process, name)
    assert client.collect(process).exit_code == code


_seconds = itertools.count(100_000)


@CONFINED
def test_stopped_process_goes_on(server: Server, client: Client, confined: Json) -> None:
    argument = str(next(_seconds))
    name = client.start(["sleep", argument], **confined)

    def pid() -> int | None:
        for found in descendants(server.process.pid):
            try:
                if Path(f"/proc/{found}/cmdline").read_bytes() == f"sleep\0{argument}\0".encode():
                    return found
            except OSError:
                pass  # ended meanwhile
        return None

    sleeper = eventually("sleep runs", pid)
    _signal(client, name, "SIGSTOP")
    eventually("it is stopped", lambda: stat_fields(sleeper)[0] == "T")
    assert client.call("process/list")["processes"][-1]["running"]
    _signal(client, name, "SIGCONT")
    eventually("it goes on", lambda: stat_fields(sleeper)[0] == "S")
    _signal(client, name, "SIGSTOP")
    assert client.call("process/terminate", {"processId": name}) == {"running": True}
    assert client.collect(name).exit_code == 137


# The leader of the terminal's session, and a job of another group in the foreground.
_JOBS = """
import os, signal

def say(text):
    return lambda *_: os.write(1, text)

signal.signal(signal.SIGTTOU, signal.SIG_IGN)
signals = (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGUSR1)
for number in signals:
    signal.signal(number, say(b"leader %d;" % number))
if not os.fork():
    os.setpgid(0, 0)
    for number in signals:
        signal.signal(number, say(b"job %d;" % number))
    os.tcsetpgrp(0, os.getpgrp())
    os.write(1, b"up;")
while True:
    signal.pause()
"""


@CONFINED
def test_keys_of_a_terminal_reach_the_job_in_its_foreground(
    client: Client, python: Python, confined: Json
) -> None:
    name = client.start(python(_JOBS), tty=True, **confined)
    expected = b"up;"
    _until(client, name, expected)
    for signal, told in (
        ("SIGINT", b"job 2;"),
        ("SIGQUIT", b"job 3;"),
        ("SIGTSTP", b"job 20;"),
        ("SIGUSR1", b"leader 10;"),
        ("interrupt", b"leader 2;"),
    ):
        _signal(client, name, signal)
        expected += told
        _until(client, name, told)
    client.call("process/terminate", {"processId": name})
    assert client.collect(name).pty == expected


@CONFINED
def test_job_of_a_shell_is_interrupted_and_stopped(client: Client, confined: Json) -> None:
    env = {"PATH": "/usr/bin:/bin", "PS1": "> ", "HOME": "/"}
    argv = ["bash", "--norc", "--noprofile", "-i"]
    name = client.start(argv, tty=True, env=env, **confined)
    signals = [("SIGINT", 130), ("SIGQUIT", 131), ("SIGTSTP", 148)]
    for number, (signal, code) in enumerate(signals):
        # Not a subshell of bash: that ignores some signals until it has become its program.
        line = f"sh -c \"echo run'ning {number}'; exec sleep 1000\"\n"
        client.write(name, line.encode(), f"start {number}")
        _until(client, name, f"running {number}\r\n".encode())
        _signal(client, name, signal)
        client.write(name, b"echo co'de' $?\n", f"ask {number}")
        _until(client, name, f"code {code}\r\n".encode())
    client.call("process/terminate", {"processId": name})
    assert client.collect(name).exit_code == 137


def test_signal_for_nobody_is_no_error(client: Client) -> None:
    _signal(client, "nobody", "SIGTERM")
    for tty in (False, True):
        name = client.start(["/bin/true"], tty=tty)
        client.collect(name)
        for signal in ("SIGTERM", "SIGINT", "SIGKILL"):
            _signal(client, name, signal)


# ---- process/list ---------------------------------------------------------------------


@CONFINED
def test_list_tells_of_every_process_of_the_session(server: Server, confined: Json) -> None:
    with server.connect() as client, server.connect() as other:
        assert client.call("process/list") == {"processes": [], "truncated": False}
        other.start(["sleep", "60"], process_id="other")
        _shell(client, "echo out; exit 5", process_id="done", **confined)
        client.collect("done")
        client.start(["cat"], tty=True, process_id="cat", **confined)
        argv = ["/bin/sh", "-c", "echo out; exit 5"]
        done = {"processId": "done", "argv": argv, "tty": False, "running": False}
        cat = {"processId": "cat", "argv": ["cat"], "tty": True, "running": True}
        listed = client.call("process/list", {})
        children = descendants(server.process.pid)
        pids = [each.pop("pid") for each in listed["processes"]]
        assert pids[1] in children
        # The init of a sandbox ends after the command has been reported.
        eventually("it ends", lambda: pids[0] not in descendants(server.process.pid))
        assert listed == {
            "processes": [
                done | {"exitCode": 5, "closed": True, "nextSeq": 4},
                cat | {"exitCode": None, "closed": False, "nextSeq": 1},
            ],
            "truncated": False,
        }
        for connection, name in ((client, "cat"), (other, "other")):
            connection.call("process/terminate", {"processId": name})


def test_list_survives_the_connection(server: Server) -> None:
    lost = server.connect()
    name = lost.start(["sleep", "60"], process_id="sleeper")
    lost.close()
    with _resumed(server, lost) as client:
        (listed,) = client.call("process/list")["processes"]
        assert (listed["processId"], listed["running"]) == (name, True)
        client.call("process/terminate", {"processId": name})


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["/bin/true", "x" * LISTED_ARGV, "y"], ["/bin/true", "x" * (LISTED_ARGV - 10)]),
        (["/bin/true", "x" * (LISTED_ARGV - 11), "y"], ["/bin/true", "x" * (LISTED_ARGV - 11)]),
        (
            ["/bin/true", "x" * (LISTED_ARGV - 12), "y"],
            ["/bin/true", "x" * (LISTED_ARGV - 12), "y"],
        ),
        (["/bin/true", *[""] * 2000], ["/bin/true", *[""] * (LISTED_ARGV - 10)]),
    ],
)
def test_long_command_line_is_cut(client: Client, argv: list[str], shown: list[str]) -> None:
    client.collect(client.start(argv))
    assert client.call("process/list")["processes"][0]["argv"] == shown


def test_list_leaves_out_what_closed_first_beyond_its_limit() -> None:
    limits = {"process.table.MAX_LISTED": 3}
    with start_patched(limits) as server, server.connect() as client:
        client.start(["sleep", "60"], process_id="first")
        for name in ("a", "b"):
            client.collect(client.start(["/bin/true"], process_id=name))
        listed = client.call("process/list")
        assert [entry["processId"] for entry in listed["processes"]] == ["first", "a", "b"]
        assert not listed["truncated"]
        client.collect(client.start(["/bin/true"], process_id="c"))
        listed = client.call("process/list")
        assert [entry["processId"] for entry in listed["processes"]] == ["first", "b", "c"]
        assert listed["truncated"]


# ---- the loss that process/read declares ----------------------------------------------


def _chunks(client: Client, process_id: str) -> dict[int, int]:
    """The size of each chunk that was sent, by its number."""
    return {
        notice["params"]["seq"]: len(base64.b64decode(notice["params"]["chunk"]))
        for notice in client.notifications
        if notice["method"] == "process/output" and notice["params"]["processId"] == process_id
    }


def _check_loss(client: Client, process_id: str, after: int) -> Json:
    """Reads, and compares what is said to be lost with what was sent and is not returned."""
    read: Json = client.call("process/read", {"processId": process_id, "afterSeq": after})
    kept = {chunk["seq"]: len(base64.b64decode(chunk["chunk"])) for chunk in read["chunks"]}
    missing = {
        seq: size
        for seq, size in _chunks(client, process_id).items()
        if seq > after and seq not in kept
    }
    loss = (read.get("firstSeq"), read.get("lostBytes"))
    assert loss == ((min(kept), sum(missing.values())) if missing else (None, None))
    assert ("firstSeq" in read) == ("lostBytes" in read) == bool(missing)
    return read


@CONFINED
def test_lost_output_is_declared_exactly(client: Client, confined: Json) -> None:
    script = "head -c 18000000 /dev/zero; echo end; read line; echo late"
    name = _shell(client, script, pipeStdin=True, **confined)
    client.wait_for(lambda n: base64.b64decode(n["params"]["chunk"]).endswith(b"end\n"))
    first = _check_loss(client, name, 0)["firstSeq"]
    assert first > 100
    for after in (1, 2, 50, first - 2, first - 1, first, first + 1, 10**9):
        _check_loss(client, name, after)
    client.write(name, b"\n", "1")
    run = client.collect(name)
    assert len(run.stdout) == 18_000_000 + len("end\nlate\n")
    for after in (0, 7, run.seqs[-1]):
        assert _check_loss(client, name, after)["closed"]


def test_read_that_loses_nothing_says_nothing(client: Client) -> None:
    name = client.start(["head", "-c", "500000", "/dev/zero"])
    client.collect(name)
    usual = ["chunks", "nextSeq", "exited", "exitCode", "closed", "failure", "sandboxDenied"]
    for after in (0, 1, 1000):
        read = client.call("process/read", {"processId": name, "afterSeq": after, "waitMs": 10})
        assert list(read) == usual


def test_loss_counts_bytes_however_small_the_chunks_are(python: Python) -> None:
    code = """
import sys
for number in range(60):
    print("x" * number, flush=True)
    sys.stdin.readline()
"""
    with (
        start_patched({"process.output.RETAINED_CHUNKS": 10}) as server,
        server.connect() as client,
    ):
        name = client.start(python(code), pipeStdin=True)
        for number in range(60):
            _until(client, name, b"x" * number + b"\n")
            client.write(name, b"\n", str(number))
            _check_loss(client, name, max(0, number - 20))
        run = client.collect(name)
        assert len(_chunks(client, name)) == 60
        for after in range(run.seqs[-1] + 2):
            _check_loss(client, name, after)


def test_loss_that_is_too_long_ago_has_no_size() -> None:
    limits = {"process.output.DROPPED_SIZES": 16, "process.output.RECENT_BYTES": 0}
    with start_patched(limits) as server, server.connect() as own:
        name = own.start(["head", "-c", "2500000", "/dev/zero"])
        own.collect(name)
        first = _check_loss(own, name, 0)["firstSeq"]
        _check_loss(own, name, first - 8)
        read = own.call("process/read", {"processId": name, "afterSeq": first - 20})
        assert read["firstSeq"] == first
        assert "lostBytes" not in read


# ---- process/setFlow ------------------------------------------------------------------


def _set_flow(client: Client, process_id: str, flow: str) -> None:
    assert client.call("process/setFlow", {"processId": process_id, "flow": flow}) == {}


@CONFINED
def test_paused_process_waits_and_others_go_on(client: Client, confined: Json) -> None:
    """Also after the connection was lost; nothing is lost when it is sent again."""
    name = _shell(client, "read a; yes 0123456 | head -c 4000000", pipeStdin=True, **confined)
    _set_flow(client, name, "pause")
    client.write(name, b"\n", "1")
    assert client.collect(_shell(client, "echo other; exit 4", **confined)).exit_code == 4
    read = client.call("process/read", {"processId": name})
    assert (read["chunks"], read["nextSeq"], read["exited"]) == ([], 1, False)
    _set_flow(client, name, "send")
    run = client.collect(name)
    assert (run.stdout, run.exit_code) == (b"0123456\n" * 500_000, 0)
    _set_flow(client, name, "pause")  # too late, which is no error


@CONFINED
def test_retained_output_is_not_sent_but_read(client: Client, confined: Json) -> None:
    name = _shell(client, "read a; echo quiet; exit 3", pipeStdin=True, **confined)
    _set_flow(client, name, "retain")
    client.write(name, b"\n", "1")
    while not client.notifications or client.notifications[-1]["method"] != "process/closed":
        client.receive()
    received = [(each["method"], each["params"]["seq"]) for each in client.notifications]
    assert received == [("process/exited", 2), ("process/closed", 3)]
    [chunk] = client.call("process/read", {"processId": name})["chunks"]
    assert (chunk["seq"], base64.b64decode(chunk["chunk"])) == (1, b"quiet\n")


def test_flow_outlives_the_connection_and_ends_with_the_process(server: Server) -> None:
    with server.connect() as lost:
        name = _shell(lost, "echo a; read a", pipeStdin=True)
        _until(lost, name, b"a")
        _set_flow(lost, name, "pause")
    with _resumed(server, lost) as client:
        assert client.call("process/terminate", {"processId": name}) == {"running": True}
        while client.receive()["method"] != "process/closed":
            pass


def test_policy_beside_the_params_is_refused(client: Client) -> None:
    params = {"path": "file:///", "sandboxPolicy": {"type": "read-only"}}
    code, text = client.failure("fs/getMetadata", params)
    assert (code, text.partition(":")[0]) == (
        -32602,
        "`sandboxPolicy` is obsolete and confines nothing",
    )
