"""The same work without a server: the cost of the kernel alone."""

import errno
import os
import socket
import subprocess
import sys
import time

from pybase64 import b64encode

from bench import files, processes
from bench.stage import Stage, sample, shared_file

# The default capacity of a pipe, so the maximum of one read.
_READ_BYTES = 65536

# As our commands do it: without the garbage collector, and without a clean-up at the end.
INTERPRETER = [
    *(sys.executable, "-c"),
    "import gc, os; gc.disable(); import asyncio, msgspec, uvloop; os._exit(0)",
]

_ECHO_PEER = """
import socket, sys
peer = socket.create_connection(("127.0.0.1", int(sys.argv[1])), 10)
peer.settimeout(None)
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
while data := peer.recv(4096):
    peer.sendall(data)
"""


def loopback(stage: Stage) -> list[float]:
    """64 bytes to another process over TCP on loopback, and back."""
    payload = bytes(64)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)
        command = [sys.executable, "-S", "-c", _ECHO_PEER, str(listener.getsockname()[1])]
        with subprocess.Popen(command) as peer:
            try:
                link, _ = listener.accept()
                with link:
                    link.settimeout(None)
                    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    return sample(stage, lambda _: (link.send(payload), link.recv(4096)))
            finally:
                peer.terminate()


def interpreter(_: Stage) -> list[float]:
    """An interpreter that imports what every server and client here needs, and ends.

    No command of ours can be faster than this.
    """
    began = time.perf_counter()
    subprocess.run(INTERPRETER, check=True, stdin=subprocess.DEVNULL)
    return [time.perf_counter() - began]


def spawn(stage: Stage) -> list[float]:
    """posix_spawn and waitpid."""

    def operation(_: int) -> None:
        os.waitpid(os.posix_spawn("/bin/true", ["/bin/true"], {}), 0)

    return sample(stage, operation)


def spawn_parallel(stage: Stage) -> list[float]:
    """As many posix_spawns at once as the parallel workload makes, then all waits."""

    def operation(_: int) -> None:
        children = []
        for _ in range(processes.PARALLEL):
            children.append(os.posix_spawn("/bin/true", ["/bin/true"], {}))
        for child in children:
            os.waitpid(child, 0)

    return sample(stage, operation)


def stream_pipe(stage: Stage) -> list[float]:
    """The same child, its pipe read and discarded."""
    path = shared_file(stage, "stream", processes.STREAM_FILE_BYTES)
    repeats = 2 if stage.quick else processes.STREAM_REPEATS
    argv = ["/bin/cat", *[path] * repeats]
    return _pipe_rate(stage, argv, processes.STREAM_FILE_BYTES * repeats)


def small_chunks(stage: Stage) -> list[float]:
    """The same shell, its pipe read and discarded."""
    return _pipe_rate(stage, processes.small_chunks_argv(), processes.SMALL_WRITES)


def _pipe_rate(stage: Stage, argv: list[str], amount: int) -> list[float]:
    def operation(_: int) -> None:
        reader, writer = os.pipe()
        actions = [(os.POSIX_SPAWN_DUP2, writer, 1)]
        child = os.posix_spawn(argv[0], argv, {}, file_actions=actions)
        os.close(writer)
        while os.read(reader, _READ_BYTES):
            pass
        os.close(reader)
        os.waitpid(child, 0)

    return [amount / taken for taken in sample(stage, operation)]


def stream_pty(stage: Stage) -> list[float]:
    """The same child on a terminal, its master read and discarded."""
    path = shared_file(stage, "terminal", processes.PTY_FILE_BYTES)

    def operation(_: int) -> None:
        master, slave = os.openpty()
        actions: list[tuple[int, ...]] = [(os.POSIX_SPAWN_DUP2, slave, fd) for fd in (0, 1, 2)]
        child = os.posix_spawn("/bin/cat", ["/bin/cat", path], {}, file_actions=actions)
        os.close(slave)
        try:
            while os.read(master, _READ_BYTES):
                pass
        except OSError as error:
            # Linux reports the hang-up of a terminal this way.
            if error.errno != errno.EIO:
                raise
        os.close(master)
        os.waitpid(child, 0)

    return [processes.PTY_FILE_BYTES / taken for taken in sample(stage, operation)]


def echo(stage: Stage) -> list[float]:
    """One line into `cat` and out again, over two pipes."""
    pipe = subprocess.PIPE
    with subprocess.Popen(["/bin/cat"], stdin=pipe, stdout=pipe, bufsize=0) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        into, out = child.stdin.fileno(), child.stdout.fileno()
        return sample(stage, lambda _: (os.write(into, processes.LINE), os.read(out, 8192)))


def read_large(stage: Stage) -> list[float]:
    """The large file read and encoded, in blocks that stay in the cache."""
    path = shared_file(stage, "large", files.LARGE_BYTES)

    def operation(_: int) -> None:
        with open(path, "rb", buffering=0) as file:
            while block := file.read(files.BLOCK_BYTES):
                b64encode(block)

    return [files.LARGE_BYTES / taken for taken in sample(stage, operation)]
