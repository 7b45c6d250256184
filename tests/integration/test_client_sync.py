"""The client without async: the same things, from threads, under Ctrl-C and in notebooks."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.client import scaled
from tests.support.client_targets import ClientTarget
from tests.support.server_internals import eventually

import exec_server
from exec_server import (
    Cancelled,
    Chunk,
    CommandFailed,
    ConnectFailed,
    NotFound,
    Progress,
    SessionLost,
    Timeout,
    sync,
)
from exec_server.client import environment, files, http, local_server, process
from exec_server.client.transfer import open_file, text_file
from exec_server.protocol.session import INFO


@pytest.fixture
def env(there: ClientTarget) -> Iterator[sync.Environment]:
    before = threading.active_count()
    with sync.connect(there.url) as connected:
        yield connected
    assert threading.active_count() == before


def count_running(word: str) -> int:
    words = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    return sum(line.split()[-1:] == [word] for line in words.stdout.splitlines())


def is_running(word: str) -> bool:
    return count_running(word) > 0


@pytest.mark.quick
@pytest.mark.parametrize("name", sync.__all__)
def test_everything_is_there_without_async(name: str) -> None:
    def names(of: type) -> set[str]:
        return {name for name in dir(of) if not name.startswith(("_", "on_"))} - {"aclose"}

    internal = {"path", "take_lines", "put_back"}
    missing = names(getattr(exec_server, name)) - names(getattr(sync, name)) - internal
    assert missing == set()


def test_commands(env: sync.Environment) -> None:
    assert env.info.platform_os == "linux"
    assert env.capabilities.file_write_streaming
    assert env.call(INFO, None).shell == env.info.shell
    result = env.run(["sh", "-c", "cat; exit 3"], input=b"in")
    assert (result.stdout, result.exit_code) == (b"in", 3)
    with pytest.raises(CommandFailed):
        env.run(["false"], check=True)
    with pytest.raises(Timeout) as late:
        env.run(["sh", "-c", "echo begun; sleep 100"], timeout=0.3)
    assert late.value.result.stdout == b"begun\n"


def test_a_process(env: sync.Environment) -> None:
    with env.start(["sh", "-c", "read a; echo $a; exit 4"], stdin=True) as running:
        assert (running.exit_code, running.argv[0], len(running.id)) == (None, "sh", 32)
        running.write(b"word\n")
        assert list(running) == [Chunk("stdout", b"word\n")]
        assert running.wait() == running.exit_code == 4
        assert (running.sandbox_denied, running.sandbox_denial, running.lost_bytes) == (
            False,
            None,
            0,
        )
    with env.start(["echo", "x"]) as running:
        assert running.read_some() == [Chunk("stdout", b"x\n")]
        assert running.read_some() == []
        assert running.is_over
    with env.start(["sleep", "100"]) as running:
        running.interrupt()
        assert running.wait() == 130
    with env.start(["sh", "-c", "stty size"], tty=True, size=(5, 6)) as running:
        assert b"".join(chunk.data for chunk in running) == b"5 6\r\n"


def test_calls_within_a_loop_over_output(env: sync.Environment) -> None:
    """Who takes output and makes calls in between must not wait for themselves."""
    with env.start(["sh", "-c", "yes 0123456 | head -c 4000000"]) as running:
        output = []
        for chunk in running:
            output.append(chunk.data)
            if len(output) < 20:
                assert env.run(["true"])
    assert b"".join(output) == b"0123456\n" * 500_000


def test_files(env: sync.Environment, tmp_path: Path) -> None:
    data = os.urandom(3_000_000)
    with env.files.open(tmp_path / "f", "wb") as writer:
        writer.write(data[:1_000_000])
        writer.flush()
        assert writer.written == 1_000_000
        writer.write(data[1_000_000:])
    with env.files.open(tmp_path / "f", offset=5) as reader:
        assert reader.size == len(data)
        assert reader.read(10) == data[5:15]
        assert b"".join(reader) == data[15:]
    assert env.files.read(tmp_path / "f") == data
    env.files.mkdir(tmp_path / "d")
    env.files.write(tmp_path / "d" / "g", b"1")
    assert env.files.stat(tmp_path / "d").is_directory
    assert [entry.name for entry in env.files.list(tmp_path)] == ["d", "f"]
    assert [entry.name for entry in env.files.walk(tmp_path)] == ["d", "f", "g"]
    env.files.copy(tmp_path / "d", tmp_path / "e", recursive=True)
    env.files.remove(tmp_path / "d", recursive=True)
    assert not env.files.exists(tmp_path / "d")
    assert env.files.realpath(tmp_path / "e" / ".." / "f") == str(tmp_path / "f")
    with pytest.raises(NotFound):
        env.files.read(tmp_path / "none")
    seen: list[Progress] = []
    env.files.upload(tmp_path / "e", tmp_path / "up", progress=seen.append)
    env.files.download(tmp_path / "up", tmp_path / "down")
    assert (tmp_path / "down" / "g").read_bytes() == b"1"
    assert seen[-1].done_files == 1


def test_text_files(env: sync.Environment, tmp_path: Path) -> None:
    path = tmp_path / "f"
    with env.files.open(path, "x") as writer:
        writer.write("one\ntwo\nthree\nfour")
    with env.files.open(path, "r") as reader:
        assert next(reader) == "one\n"
        assert reader.readline() == "two\n"
        for line in reader:
            assert line == "three\n"
            break
        assert reader.read() == "four"
        assert list(reader) == []
    with env.files.open(path, "ab") as appender:
        appender.write(b"\n")
    with contextlib.suppress(RuntimeError), env.files.open(path, "w") as writer:
        raise RuntimeError
    assert path.read_text() == "one\ntwo\nthree\nfour\n"
    log = env.files.open(path, "a")
    log.write("five")
    log.close()
    log.close()
    with env.files.open(path, "rt") as reader:
        assert [*reader][-1] == "five"
    with env.files.open(path) as blocks:
        assert b"".join(blocks).endswith(b"five")


def test_http(env: sync.Environment) -> None:
    class Web(threading.Thread):
        def __init__(self) -> None:
            super().__init__()
            import socket

            self.socket = socket.create_server(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}/"

        def run(self) -> None:
            for _ in range(2):
                peer, _ = self.socket.accept()
                with peer:
                    peer.recv(65536)
                    peer.sendall(
                        b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\nconnection: close\r\n\r\nbody"
                    )
            self.socket.close()

    web = Web()
    web.start()
    assert env.http("GET", web.url).body == b"body"
    with env.http_stream("GET", web.url) as response:
        assert (response.status, response.header("Content-Length")) == (200, "4")
        assert ("content-length", "4") in response.headers
        assert b"".join(response) == b"body"
    web.join()


def test_directories_are_plain_paths(env: sync.Environment) -> None:
    assert env.run(["pwd"]).text.strip() == env.cwd
    assert env.home == os.environ["HOME"]
    assert env.files.stat(env.temp_dir).is_directory


def test_from_many_threads(env: sync.Environment) -> None:
    with ThreadPoolExecutor(16) as threads:
        results = list(threads.map(lambda number: env.run(["echo", str(number)]), range(64)))
    assert [result.text for result in results] == [f"{number}\n" for number in range(64)]


def test_calls_are_cancelled_from_another_thread(env: sync.Environment) -> None:
    """The environment and its processes stay; the commands of the calls are killed."""
    word = f"42{os.getpid()}"

    def works() -> list[Callable[[], object]]:
        return [
            lambda: env.run(["sleep", word]),
            lambda: env.run_many([["sleep", word], ["sleep", word]]),
            lambda: list(env.run_each([["sleep", word]])),
            lambda: sleeping.read_until(b"never"),
        ]

    with env.start(["sleep", "100"]) as sleeping, ThreadPoolExecutor(4) as threads:
        running = [threads.submit(work) for work in works()]
        eventually("the commands run", lambda: count_running(word) == 4)
        env.cancel_calls()
        for each in running:
            assert isinstance(each.exception(scaled(20)), Cancelled)
        eventually("the commands are gone", lambda: not is_running(word))
        assert sleeping.exit_code is None
        env.cancel_calls()  # there are none
        assert env.run(["echo", "alive"]).text == "alive\n"


def test_results_are_cancelled_from_another_thread(env: sync.Environment) -> None:
    word = f"44{os.getpid()}"
    with env.run_each([["sleep", word]]) as results, ThreadPoolExecutor(1) as threads:
        running = threads.submit(list, results)
        eventually("the command runs", lambda: is_running(word))
        results.close()
        assert isinstance(running.exception(scaled(20)), Cancelled)
        assert not is_running(word)


def test_an_interrupt_kills_what_was_asked_for(there: ClientTarget) -> None:
    """Ctrl-C, in a program of its own."""
    word = f"41{os.getpid()}"
    program = (
        "import sys\n"
        "from exec_server import sync\n"
        "with sync.connect(sys.argv[1]) as env:\n"
        "    try:\n"
        "        env.run(['sleep', sys.argv[2]])\n"
        "    except KeyboardInterrupt:\n"
        "        print('interrupted', env.run(['echo', 'alive']).text)\n"
    )
    words = [sys.executable, "-c", program, there.url, word]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as running:
        try:
            eventually("the command runs", lambda: is_running(word))
            running.send_signal(signal.SIGINT)
            output, _ = running.communicate(timeout=scaled(20))
        finally:
            running.kill()
    assert output == "interrupted alive\n\n"
    assert running.returncode == 0
    eventually("the command is gone", lambda: not is_running(word))


def test_a_program_that_just_ends_leaves_nothing_running(there: ClientTarget) -> None:
    word = f"43{os.getpid()}"
    program = (
        "import sys\n"
        "from exec_server import sync\n"
        "env = sync.connect(sys.argv[1])\n"
        "process = env.start(['sleep', sys.argv[2]])\n"
        "print(process.is_over)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, there.url, word],
        capture_output=True,
        text=True,
        check=False,
        timeout=scaled(20),
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "False\n", "")
    assert not is_running(word)


@pytest.mark.quick
def test_the_child_of_a_fork_leaves_the_connection_to_its_parent(there: ClientTarget) -> None:
    program = (
        "import os, sys\n"
        "from exec_server import sync\n"
        "env = sync.connect(sys.argv[1])\n"
        "process = env.start(['sleep', '60'])\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try:\n"
        "        env.run(['true'])\n"
        "    except RuntimeError as error:\n"
        "        print(error)\n"
        "    env.close()\n"
        "    sys.exit(7)\n"  # with all destructors, those of libuv too
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "print(process.exit_code, env.run(['echo', 'alive']).text)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program, there.url],
        capture_output=True,
        text=True,
        check=False,
        timeout=scaled(20),
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    error, *others = ended.stdout.splitlines()
    assert error.endswith("connect again after a fork")
    assert others == ["7", "None alive", ""]


def test_within_a_running_loop(there: ClientTarget) -> None:
    """Notebooks have one in their main thread."""

    async def cell() -> str:
        with sync.connect(there.url) as env:
            return str(env.run(["echo", "x"]).text)

    assert asyncio.run(cell()) == "x\n"


def test_closing_ends_calls_under_way(there: ClientTarget) -> None:
    word = f"42{os.getpid()}"
    env = sync.connect(there.url)
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(env.run, ["sleep", word])
        eventually("the command runs", lambda: is_running(word))
        env.close()
        with pytest.raises(SessionLost, match="the environment was closed"):
            call.result()
    with pytest.raises(SessionLost, match="the environment was closed"):
        env.run(["true"])
    env.close()
    eventually("the command is gone", lambda: not is_running(word))


def test_a_callback_must_not_wait(env: sync.Environment, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")

    def tell(progress: Progress) -> None:
        env.run(["true"])

    with pytest.raises(RuntimeError, match="a callback of the client must not call"):
        env.files.upload(tmp_path / "a", tmp_path / "b", progress=tell)
    assert env.run(["true"])


def test_nobody_is_there() -> None:
    before = threading.active_count()
    with pytest.raises(ConnectFailed, match="Connection refused"):
        sync.connect("ws://127.0.0.1:1")
    with pytest.raises(exec_server.StartupError, match="no target: name one"):
        sync.connect()
    assert threading.active_count() == before


def test_servers_and_this_machine() -> None:
    before = threading.active_count()
    token = "correct-horse-battery-staple"
    with sync.serve(token=token) as server, sync.connect(server.url, token=token) as env:
        assert env.run(["echo", "x"]).text == "x\n"
        assert env.processes()[0].argv == ["echo", "x"]
        assert repr(server) == f"<sync.RunningServer {server.url}, pid {server.pid}, open>"
    with sync.Environment.local() as env:
        assert env.run(["echo", "y"]).text == "y\n"
    # asyncio's own thread that waits for a child may take a moment longer.
    eventually("the threads are gone", lambda: threading.active_count() == before)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (sync.Environment, environment.Environment),
        (sync.Files, files.Files),
        (sync.Process, process.Process),
        (sync.HttpStream, http.HttpStream),
        (sync.RunningServer, local_server.RunningServer),
        (sync.FileReader, open_file.FileReader),
        (sync.FileWriter, open_file.FileWriter),
        (sync.FileAppender, open_file.FileAppender),
        (sync.TextReader, text_file.TextReader),
        (sync.TextWriter, text_file.TextWriter),
    ],
)
def test_the_names_are_the_same(ours: type, theirs: type) -> None:
    """Whatever the async class has, this one has with the same parameters and defaults."""
    internal = {"read_some", "is_over", "path", "take_lines", "put_back"}
    names = {name for name in dir(theirs) if not name.startswith(("_", "on_"))} - internal
    assert names
    for name in names:
        method = getattr(theirs, name)
        twin = getattr(ours, "close" if name == "aclose" else name)
        if inspect.isroutine(method):
            assert _parameters(twin) == _parameters(method), name
        else:
            assert not inspect.isroutine(twin), name


@pytest.mark.parametrize("name", ["connect", "serve"])
def test_the_functions_are_the_same(name: str) -> None:
    assert _parameters(getattr(sync, name)) == _parameters(getattr(exec_server, name))


def _parameters(function: Callable[..., object]) -> list[tuple[str, object, object]]:
    parameters = inspect.signature(function).parameters.values()
    return [(each.name, each.kind, each.default) for each in parameters]
