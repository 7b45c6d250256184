"""Short commands from the start of the program to its end, on every kind of target."""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.certificates import make_pair

from bench import remote
from bench.client import BenchError
from bench.servers import REFERENCE, Server, stop
from bench.stage import Stage

KINDS = ("ws", "unix", "wss", "stdio", "relay")
# What `exec-server exec TARGET true` may take on each of them, and a server on pipes until its
# first answer.
EXEC_SECONDS = 0.11
ANSWER_SECONDS = 0.1

_EXECS = 4  # of one turn, which starts a server
_TOKEN = "EXEC_SERVER_BENCH_TOKEN"
_ONLY_OURS = ("unix", "wss")  # the reference does not listen there
_INITIALIZE = {"id": 1, "method": "initialize", "params": {"clientName": "bench"}}


def exec_true(kind: str) -> Callable[[Stage], list[float]]:
    """A workload: `exec TARGET true` with a client of the same program, ours for the reference."""

    def turn(stage: Stage) -> list[float]:
        assert stage.server is not None
        if stage.server.label == REFERENCE and kind in _ONLY_OURS:
            return []
        with target(kind, stage.server, stage.folder) as run:
            run()  # the first command loads parts of the server
            return [_timed(run) for _ in range(_EXECS)]

    return turn


def stdio_answer(stage: Stage) -> list[float]:
    """From exec of a server on pipes until it has answered `initialize`."""
    assert stage.server is not None
    return [first_answer(stage.server)]


def first_answer(server: Server) -> float:
    """The seconds from exec of a server on pipes until it has answered `initialize`."""
    began = time.perf_counter()
    process = subprocess.Popen(
        _listening(server, "stdio"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **server.environment},
        start_new_session=True,
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(_INITIALIZE).encode() + b"\n")
        process.stdin.flush()
        if b'"result"' not in process.stdout.readline():
            raise BenchError(f"{server.label} does not answer on pipes")
        taken = time.perf_counter() - began
        process.stdin.close()
        process.wait()
        return taken
    finally:
        stop(process)


@contextmanager
def target(kind: str, server: Server, folder: str) -> Iterator[Callable[[], object]]:
    """Starts a server as this kind of target; yields what runs `true` there."""
    is_ours = server.label != REFERENCE
    program = _without_listen(server) if is_ours else [sys.executable, "-m", "exec_server"]
    variables = {**os.environ, **server.environment}
    with words(kind, server, folder, variables) as target_words:
        argv = [*program, "exec", "-n", *target_words, "true"]
        yield lambda: subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, env=variables)


@contextmanager
def words(kind: str, server: Server, folder: str, variables: dict[str, str]) -> Iterator[list[str]]:
    """Starts a server as this kind of target; yields the words that name it."""
    if kind == "stdio":
        yield [f"stdio:{shlex.join(_listening(server, 'stdio'))}"]
    elif kind == "relay":
        with remote.service() as relay, remote.executor(server, folder, relay):
            variables[_TOKEN] = relay.token
            yield ["--token-env", _TOKEN, f"relay:{relay.url}/{server.label}"]
    elif kind == "wss":
        pair = make_pair(Path(folder), "bench", "127.0.0.1")
        with _url(server, "wss://127.0.0.1:0", *pair.flags) as url:
            yield ["--pin", pair.fingerprint, url]
    else:
        listen = f"unix:{folder}/socket" if kind == "unix" else "ws://127.0.0.1:0"
        with _url(server, listen) as url:
            yield [url]


@contextmanager
def _url(server: Server, listen: str, *flags: str) -> Iterator[str]:
    """Starts a server; yields the URL that it prints."""
    process = subprocess.Popen(
        [*_listening(server, listen), *flags],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **server.environment},
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().decode().strip()
        if not url:
            raise BenchError(f"{server.label} does not listen on {listen}")
        yield url
    finally:
        stop(process)


def _without_listen(server: Server) -> list[str]:
    place = server.command.index("--listen")
    return server.command[:place] + server.command[place + 2 :]


def _listening(server: Server, listen: str) -> list[str]:
    return [*_without_listen(server), "--listen", listen]


def _timed(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
