"""Workloads about connections and processes."""

import base64
import os

from bench.client import uri
from bench.stage import Stage, expect, sample, shared_file

PARALLEL = 32
PIPELINED = 5000
SMALL_WRITES = 20_000
PROFILE_SECONDS = 0.2
LINE = b"hello, terminal\n"

# One output file of this size is written by `cat` as often as the workload needs.
STREAM_FILE_BYTES = 20_000_000
STREAM_REPEATS = 10
PTY_FILE_BYTES = 20_000_000

_CLOSED = b'{"method":"process/closed","params":{"processId":"%s"'


def start_params(name: str, argv: list[str], folder: str, **more: bool) -> dict[str, object]:
    """Builds the parameters of process/start with an empty environment."""
    params = {"processId": name, "argv": argv, "cwd": uri(folder), "env": {}, "tty": False}
    return {**params, **more}


def round_trip(stage: Stage) -> list[float]:
    """The cheapest request and its answer, one after the other."""
    connection = stage.connection
    calls = [connection.prepare("environment/status", {}) for _ in range(stage.samples)]
    return sample(stage, lambda number: connection.exchange(*calls[number]))


def connect(stage: Stage) -> list[float]:
    """TCP connection, upgrade and initialize."""
    assert stage.running is not None
    running, opened = stage.running, []
    running.prepare()
    # A small buffer, so that page faults of the client are not measured.
    taken = sample(stage, lambda _: opened.append(running.connect(16384)))
    for connection in opened:
        connection.close()
    return taken


def pipelined(stage: Stage) -> list[float]:
    """Many requests sent before the first answer is read; in requests per second."""
    connection = stage.connection
    calls = [connection.prepare("environment/status", {}) for _ in range(PIPELINED)]
    requests = b"".join(request for request, _ in calls)

    def operation(_: int) -> None:
        connection.send(requests)
        for _request, prefix in calls:
            connection.wait_for(prefix)

    return [PIPELINED / taken for taken in sample(stage, operation)]


def spawn_pipe(stage: Stage) -> list[float]:
    """From process/start to process/closed of a program that does nothing, on pipes."""
    return _spawn(stage, tty=False)


def spawn_pty(stage: Stage) -> list[float]:
    """The same on a terminal."""
    return _spawn(stage, tty=True)


def _spawn(stage: Stage, *, tty: bool) -> list[float]:
    connection = stage.connection
    calls = []
    for _ in range(stage.samples):
        name = stage.fresh_name("spawn")
        params = start_params(name, ["/bin/true"], stage.folder, tty=tty)
        request, _answer = connection.prepare("process/start", params)
        calls.append((request, _CLOSED % name.encode()))
    return sample(stage, lambda number: connection.exchange(*calls[number]))


def login_first(stage: Stage) -> list[float]:
    """The first command of a thread in a login shell: its slow start-up files run."""
    return _login(stage, [stage.fresh_name("scope") for _ in range(stage.samples)])


def login_again(stage: Stage) -> list[float]:
    """A further command of the thread, which restores the state of the shell."""
    scope = stage.fresh_name("scope")
    samples, stage.samples = stage.samples, 1
    _login(stage, [scope])
    stage.samples = samples
    return _login(stage, [scope] * samples)


def _login(stage: Stage, scopes: list[str]) -> list[float]:
    """From process/start to process/closed of a login shell that does nothing."""
    home = os.path.join(stage.folder, "login-home")
    os.makedirs(home, exist_ok=True)
    with open(os.path.join(home, ".bash_profile"), "w") as profile:
        profile.write(f"sleep {PROFILE_SECONDS}; export READY=1\n")
    connection = stage.connection
    calls = []
    for scope in scopes:
        name = stage.fresh_name("login")
        params = start_params(name, ["/bin/bash", "-lc", "true"], home)
        params["env"] = {"HOME": home, "PATH": "/usr/bin:/bin"}
        shell = {"name": "bash", "path": "/bin/bash"}
        params["shellSnapshot"] = {"scopeId": scope, "shell": shell}
        request, _answer = connection.prepare("process/start", params)
        calls.append((request, _CLOSED % name.encode()))
    return sample(stage, lambda number: connection.exchange(*calls[number]))


def spawn_parallel(stage: Stage) -> list[float]:
    """Many starts sent at once; the time until all of them are closed."""
    connection = stage.connection
    batches = []
    for _ in range(stage.samples):
        batch = b""
        for _ in range(PARALLEL):
            params = start_params(stage.fresh_name("parallel"), ["/bin/true"], stage.folder)
            batch += connection.prepare("process/start", params)[0]
        batches.append(batch)

    def operation(number: int) -> None:
        connection.send(batches[number])
        for _ in range(PARALLEL):
            connection.wait_for(b'{"method":"process/closed"')

    return sample(stage, operation)


def stream_pipe(stage: Stage) -> list[float]:
    """A child that writes as fast as it can to a pipe; in bytes of output per second."""
    path = shared_file(stage, "stream", STREAM_FILE_BYTES)
    repeats = 2 if stage.quick else STREAM_REPEATS
    argv = ["/bin/cat", *[path] * repeats]
    return _rate(stage, argv, STREAM_FILE_BYTES * repeats, tty=False)


def stream_pty(stage: Stage) -> list[float]:
    """The same on a terminal."""
    path = shared_file(stage, "terminal", PTY_FILE_BYTES)
    return _rate(stage, ["/bin/cat", path], PTY_FILE_BYTES, tty=True)


def small_chunks_argv() -> list[str]:
    """A shell that makes one system call per line of output."""
    loop = f"i=0; while [ $i -lt {SMALL_WRITES} ]; do echo $i; i=$((i+1)); done"
    return ["/bin/sh", "-c", loop]


def small_chunks(stage: Stage) -> list[float]:
    """A child that writes one line at a time; in writes per second until it is closed."""
    return _rate(stage, small_chunks_argv(), SMALL_WRITES, tty=False)


def _rate(stage: Stage, argv: list[str], amount: int, *, tty: bool) -> list[float]:
    """Runs one command after the other to its end; returns the amount per second."""
    connection = stage.connection

    def operation(_: int) -> None:
        name = stage.fresh_name("stream")
        params = start_params(name, argv, stage.folder, tty=tty)
        request, _answer = connection.prepare("process/start", params)
        before = connection.received
        connection.exchange(request, _CLOSED % name.encode())
        # Base64 makes four bytes of three; both kinds of amount are a lower bound of the output.
        received = connection.received - before
        expect(received >= amount * 4 // 3, f"only {received} bytes of output for {amount}")

    return [amount / taken for taken in sample(stage, operation)]


def echo(stage: Stage) -> list[float]:
    """One line into `cat`, and the wait for its output notification."""
    connection = stage.connection
    name = stage.fresh_name("cat")
    output = b'{"method":"process/output","params":{"processId":"%s"' % name.encode()
    chunk = base64.b64encode(LINE).decode()
    writes = []
    for _ in range(stage.samples):
        params = {"processId": name, "chunk": chunk, "writeId": stage.fresh_name("write")}
        writes.append(connection.prepare("process/write", params)[0])
    argv = ["/bin/cat"]
    connection.call("process/start", start_params(name, argv, stage.folder, pipeStdin=True))
    taken = sample(stage, lambda number: connection.exchange(writes[number], output))
    connection.call("process/terminate", {"processId": name})
    return taken
