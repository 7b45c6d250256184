"""spawn() with real children: descriptors of the Child, closed ends, failures."""

from __future__ import annotations

import errno
import os
import resource
import select
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest
from tests.support.forked import in_own_process

from exec_server.errors import InternalError
from exec_server.process import tags
from exec_server.process.command import Command
from exec_server.process.orphans import Owner
from exec_server.process.spawn import Child, Streams, resize_terminal, signal_foreground, spawn
from exec_server.protocol.process import Stream

_ENV = {"PATH": "/usr/bin:/bin"}


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    before = os.listdir("/proc/self/fd")
    yield
    assert os.listdir("/proc/self/fd") == before


def _start(*argv: str, **changes: Any) -> Child:
    return spawn(Command(list(argv), **({"cwd": "/", "env": _ENV} | changes)), Owner(None))


def _output(child: Child) -> Mapping[Stream, bytes]:
    """The whole output of a child; closes the descriptors of the Child."""
    said = {stream: b"" for stream, _ in child.outputs}
    open_streams = {descriptor: stream for stream, descriptor in child.outputs}
    while open_streams:
        readable, _, _ = select.select(list(open_streams), [], [], 10)
        assert readable, "the child is silent"
        for descriptor in readable:
            try:
                data = os.read(descriptor, 65536)
            except OSError:
                data = b""  # a terminal without users
            said[open_streams[descriptor]] += data
            if not data:
                del open_streams[descriptor]
                if descriptor != child.stdin:
                    os.close(descriptor)
    if child.stdin is not None:
        os.close(child.stdin)
    os.waitpid(child.pid, 0)
    return said


def test_pipes() -> None:
    child = _start("sh", "-c", "echo out; echo err >&2; cat")
    assert child.stdin is None
    assert _output(child) == {"stdout": b"out\n", "stderr": b"err\n"}


def test_one_pipe_for_both_streams() -> None:
    child = _start("sh", "-c", "echo a; echo b >&2; echo c", merge_stderr=True)
    assert _output(child) == {"stdout": b"a\nb\nc\n"}


def test_pipe_for_stdin() -> None:
    child = _start("sh", "-c", "read line; echo $line", pipe_stdin=True)
    assert child.stdin is not None
    os.write(child.stdin, b"hello\n")
    assert _output(child) == {"stdout": b"hello\n", "stderr": b""}


def test_terminal() -> None:
    child = _start("sh", "-c", "stty size; echo x > /dev/tty", tty=True)
    assert child.outputs == (("pty", child.stdin),)
    assert _output(child) == {"pty": b"24 80\r\nx\r\n"}


@pytest.mark.parametrize("tty", [False, True])
def test_the_state_of_a_shell_is_a_file_that_nothing_changes(tty: bool) -> None:
    script = "cat /dev/fd/9; echo x >/dev/fd/9; cat /dev/fd/9; exec 9<&-; [ -e /dev/fd/9 ] || echo"
    child = _start("sh", "-c", script, tty=tty, shell_state=b"state ")
    output = _output(child)
    if tty:
        assert output["pty"].count(b"state ") == 2
    else:
        assert output["stdout"] == b"state state \n"
    assert b"not permitted" in output["pty" if tty else "stderr"]


def test_terminal_of_another_size() -> None:
    child = _start("stty", "size", tty=True, tty_size=(50, 65_535))
    assert _output(child) == {"pty": b"50 65535\r\n"}


def test_resized_terminal_tells_its_foreground() -> None:
    script = "trap 'stty size; exit' WINCH; echo up; while :; do sleep 0.01; done"
    child = _start("sh", "-c", script, tty=True)
    assert child.stdin is not None
    select.select([child.stdin], [], [], 10)
    assert os.read(child.stdin, 100) == b"up\r\n"
    resize_terminal(child.stdin, 2, 3)
    assert _output(child) == {"pty": b"2 3\r\n"}


def test_foreground_of_a_terminal_is_signalled() -> None:
    script = "trap 'echo caught; exit' QUIT; echo up; while :; do sleep 0.01; done"
    child = _start("sh", "-c", script, tty=True)
    assert child.stdin is not None
    select.select([child.stdin], [], [], 10)
    assert os.read(child.stdin, 100) == b"up\r\n"
    signal_foreground(child.stdin, signal.SIGQUIT)
    assert b"caught\r\n" in _output(child)["pty"]


@pytest.mark.parametrize("tty", [False, True])
def test_our_ends_do_not_block(tty: bool) -> None:
    child = _start("sleep", "1000", tty=tty, pipe_stdin=True)
    for _, descriptor in child.outputs:
        assert not os.get_blocking(descriptor)
        assert not os.get_inheritable(descriptor)
    assert child.stdin is not None
    assert not os.get_blocking(child.stdin)
    os.kill(child.pid, 9)
    _output(child)


def test_directory_and_arg0(tmp_path: Path) -> None:
    child = _start("sh", "-c", "pwd; echo $0", cwd=str(tmp_path), arg0="other")
    lines = _output(child)["stdout"].decode().splitlines()
    assert lines == [os.path.realpath(tmp_path), "other"]


@in_own_process
def test_starts_in_many_threads_keep_their_tags_apart() -> None:
    tags.mark_this_process()
    seen: dict[int, list[bytes]] = {}

    def start() -> None:
        owner = Owner(None)
        child = spawn(Command(["cat", "/proc/self/limits"], "/", _ENV), owner)
        lines = _output(child)["stdout"].splitlines()
        number = str(owner.tag).encode()
        seen[owner.tag] = [line for line in lines if number in line.split()]

    threads = [threading.Thread(target=start) for _ in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 30
    assert all(tag in tags.SERVER_TAGS for tag in seen)
    for tag, (line,) in seen.items():
        assert line.split().count(str(tag).encode()) == 2  # the soft and the hard limit


def test_path_is_searched_past_what_cannot_be_run(tmp_path: Path) -> None:
    for name in ("empty", "denied", "good"):
        (tmp_path / name).mkdir()
    (tmp_path / "denied" / "tool").touch(0o644)
    (tmp_path / "good" / "tool").write_text("#!/bin/sh\necho found")
    (tmp_path / "good" / "tool").chmod(0o755)
    path = f"{tmp_path}/empty:{tmp_path}/denied:{tmp_path}/none:{tmp_path}/good"
    assert _output(_start("tool", env={"PATH": path}))["stdout"] == b"found\n"
    with pytest.raises(PermissionError):
        _start("tool", env={"PATH": f"{tmp_path}/denied:{tmp_path}/empty"})
    with pytest.raises(FileNotFoundError):
        _start("tool", env={"PATH": f"{tmp_path}/empty:{tmp_path}/none"})


@pytest.mark.parametrize("tty", [False, True])
@pytest.mark.parametrize(
    ("changes", "number"),
    [
        ({"argv": ["/missing"]}, errno.ENOENT),
        ({"argv": ["/etc"]}, errno.EACCES),
        ({"cwd": "/missing"}, errno.ENOENT),
        ({"cwd": "/etc/passwd"}, errno.ENOTDIR),
        ({"argv": ["/bin/true", "x" * 3_000_000]}, errno.E2BIG),
    ],
)
def test_refusals_of_the_kernel(changes: dict[str, Any], number: int, tty: bool) -> None:
    values: dict[str, Any] = {
        "argv": ["/bin/true"],
        "cwd": "/",
        "env": _ENV,
        "tty": tty,
        "pipe_stdin": True,
    }
    with pytest.raises(OSError) as caught:
        spawn(Command(**(values | changes)), Owner(None))
    assert caught.value.errno == number


def test_a_program_that_is_named_by_its_path_fails_as_the_kernel_says(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(OSError) as caught:
        _start(str(loop))
    assert caught.value.errno == errno.ELOOP


def test_a_terminal_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int) -> NoReturn:
        raise OSError(errno.ENODEV, "no name")

    monkeypatch.setattr(os, "ttyname", refuse)
    with pytest.raises(OSError, match="no name"):
        _start("/bin/true", tty=True)


@pytest.mark.parametrize(("state", "actions"), [(None, []), (5, [(9, 5)])])
def test_inherited_streams(state: int | None, actions: list[tuple[int, int]]) -> None:
    streams = Streams.inherited(state)
    assert (streams.actions, streams.own_session, streams.outputs) == (actions, False, ())
    streams.release(started=False)  # closes nothing, not even the state


@pytest.mark.parametrize(
    ("tty", "changes", "text"),
    [
        (False, {"argv": ["/bin/true", "\0"]}, "nul byte found in provided data"),
        (False, {"argv": ["\0"], "arg0": "x"}, "nul byte found in provided data"),
        (False, {"arg0": "\0"}, "nul byte found in provided data"),
        (False, {"env": {"A\0": ""}}, "nul byte found in provided data"),
        (False, {"env": {"A": "\0"}}, "data provided contains a nul byte"),
        (True, {"env": {"A": "\0"}}, "nul byte found in provided data"),
        (False, {"argv": [""]}, "missing program for pipe spawn"),
        (True, {"argv": [""]}, "missing program for PTY spawn"),
    ],
)
def test_what_cannot_be_passed_to_the_kernel(tty: bool, changes: dict[str, Any], text: str) -> None:
    values: dict[str, Any] = {"argv": ["/bin/true"], "cwd": "/", "env": _ENV, "tty": tty}
    with pytest.raises(InternalError) as caught:
        spawn(Command(**(values | changes)), Owner(None))
    assert caught.value.message == text


@pytest.mark.parametrize("tty", [False, True])
@in_own_process
def test_no_descriptor_is_lost_when_there_are_too_few(tty: bool) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    outcomes = set()
    try:
        for free in range(8):
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + free, hard))
            try:
                child = _start("/bin/true", tty=tty, pipe_stdin=True)
            except OSError as error:
                outcomes.add(error.errno)
            else:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                outcomes.add(0)
                _output(child)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert outcomes == {0, errno.EMFILE}
