"""Workloads about start-up time and memory; each starts a server of its own."""

import time

from bench.client import SOCKET_SECONDS, BenchError, uri
from bench.processes import start_params
from bench.servers import Running, running
from bench.stage import Stage, shared_file

IDLE_CONNECTIONS = 1000

# Long enough for the lazy work of a server after its start or its last connection.
_SETTLE_SECONDS = 0.5
# Large enough for the answers to an idle connection; the client's memory is not measured.
_SMALL_BUFFER = 8192


def listen(stage: Stage) -> list[float]:
    """From exec of the server until its URL is printed."""
    assert stage.server is not None
    with running(stage.server, stage.folder) as server:
        return [server.listen_seconds]


def first_answer(stage: Stage) -> list[float]:
    """From exec of the server until the first initialize is answered."""
    assert stage.server is not None
    began = time.perf_counter()
    with running(stage.server, stage.folder) as server:
        connection = server.connect(_SMALL_BUFFER)
        taken = time.perf_counter() - began
        connection.close()
    return [taken]


def idle_resident(stage: Stage) -> list[float]:
    """Resident memory of a fresh server without connections."""
    assert stage.server is not None
    with running(stage.server, stage.folder) as server:
        return [_settled(server)[0]]


def idle_proportional(stage: Stage) -> list[float]:
    """The same, with each shared page divided by the number of its users."""
    assert stage.server is not None
    with running(stage.server, stage.folder) as server:
        proportional = _settled(server)[1]
    if proportional is None:
        raise BenchError("proportional memory is readable by root only")
    return [proportional]


def used_resident(stage: Stage) -> list[float]:
    """Resident memory after one client started a process, used a terminal and read a file."""
    assert stage.server is not None
    path = shared_file(stage, "small", 1024)
    with running(stage.server, stage.folder) as server:
        connection = server.connect()
        for tty in (False, True):
            params = start_params(f"tty-{tty}", ["/bin/true"], stage.folder, tty=tty)
            connection.call("process/start", params)
            connection.wait_for(b'{"method":"process/closed"')
        connection.call("fs/readFile", {"path": uri(path)})
        connection.close()
        return [_settled(server)[0]]


def idle_connections(stage: Stage) -> list[float]:
    """Resident memory that each of many initialized, silent connections adds."""
    assert stage.server is not None
    with running(stage.server, stage.folder) as server:
        server.connect(_SMALL_BUFFER).close()
        before, _ = _settled(server)
        opened = []
        try:
            for _ in range(IDLE_CONNECTIONS):
                opened.append(server.connect(_SMALL_BUFFER))
            after, _ = _settled(server)
            # Only connections that are still served count.
            for connection in opened:
                connection.deadline = time.monotonic() + SOCKET_SECONDS
                connection.call("environment/status", {})
        finally:
            for connection in opened:
                connection.close()
    return [(after - before) / IDLE_CONNECTIONS]


def _settled(server: Running) -> tuple[int, int | None]:
    time.sleep(_SETTLE_SECONDS)
    return server.memory()
