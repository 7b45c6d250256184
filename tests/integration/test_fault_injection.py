"""A failure that one client causes ends at most that client's connection.

Every handler, encoder, callback and clean-up of a connection is made to raise once, by
`tests.support.faults`, while a first client uses the server in every way. A second client, with a
running process, must not notice; and a third one can connect.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.relay_service import Endpoint, ThreadedRelayService
from tests.support import faults
from tests.support.client import (
    PING,
    Client,
    Disconnected,
    HandshakeRefused,
    NothingArrived,
    WebSocketLink,
    b64,
    start_server,
    uri,
)
from tests.support.relay import StreamReset, connect, start_executor
from tests.support.server_internals import start_prepared

# The first client waits for its last answer this long, since a fault may have swallowed it.
_ANSWER_SECONDS = 0.2
_LAST = 99
# What may happen to a client whose connection the server ends.
_ENDS = (Disconnected, HandshakeRefused, NothingArrived, StreamReset, OSError)


def _requests(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """Requests that reach most functions of a connection; none depends on an earlier answer."""
    shell = {"cwd": uri(folder), "env": {"PATH": "/usr/bin:/bin"}, "tty": False}
    script = "echo begun; cat; echo ended >&2"
    file = uri(folder / "file")
    return [
        ("process/start", {"processId": "a", "argv": ["sh", "-c", script], **shell}
         | {"pipeStdin": True}),
        ("process/write", {"processId": "a", "chunk": b64(b"input\n"), "writeId": "1"}),
        ("process/closeStdin", {"processId": "a"}),
        ("process/start", {"processId": "b", "argv": ["sleep", "60"], **shell, "tty": True}),
        ("process/resize", {"processId": "b", "rows": 9, "columns": 9}),
        ("process/signal", {"processId": "b", "signal": "interrupt"}),
        ("process/setFlow", {"processId": "b", "flow": "pause"}),
        ("process/setFlow", {"processId": "b", "flow": "send"}),
        ("process/terminate", {"processId": "b"}),
        ("process/start", {"processId": "c", "argv": ["sh", "-c", "echo x; sleep 60"], **shell}
         | {"detach": {"name": "detached"}}),
        ("process/attach", {"processId": "d", "name": "detached"}),
        ("process/detach", {"processId": "c"}),
        ("process/terminate", {"processId": "d"}),
        ("process/list", {}),
        ("fs/watch", {"watchId": 1, "path": uri(folder)}),
        ("fs/watchMissing", {"watchId": 2, "missing": [uri(folder / "new")]}),
        ("fs/writeFile", {"path": file, "dataBase64": b64(b"x" * 50_000)}),
        ("fs/writeFile", {"path": uri(folder / "new"), "dataBase64": b64(b"x")}),
        ("fs/readFile", {"path": file}),
        ("fs/readFile", {"path": uri(folder / "large")}),
        ("fs/open", {"path": file, "handleId": "h"}),
        ("fs/readBlock", {"handleId": "h", "offset": 0, "len": 100}),
        ("fs/open", {"path": file, "handleId": "open to the end"}),
        ("fs/readFile", {"path": uri(folder / "no such file")}),
        ("fs/remove", {"path": uri(folder / "new"), "recursive": False, "force": True}),
        ("port/listen", {"listenerId": "l", "port": 0}),
        ("port/open", {"streamId": "s", "port": 1, "window": 1000}),
        ("http/request", {"requestId": "r", "method": "GET", "url": "http://127.0.0.1:1/"}
         | {"headers": [], "timeoutMs": 500}),
        ("process/read", {"processId": "a", "afterSeq": 0, "waitMs": 50}),
        ("port/data", {"streamId": "s", "chunk": b64(b"x")}),
        ("port/closeListener", {"listenerId": "l"}),
        ("fs/close", {"handleId": "h"}),
        ("no/such", {}),
        ("initialize", {}),
    ]  # fmt: skip


def _use(client: Client, folder: Path) -> None:
    """Use the server as the first client; whatever happens to it is no failure of the test."""
    with contextlib.suppress(*_ENDS, AssertionError):
        client.initialize()
        for number, (method, params) in enumerate(_requests(folder), start=200):
            client.send({"id": number, "method": method, "params": params})
        if isinstance(client.link, WebSocketLink):
            client.websocket.send_frame(PING, b"x")
            client.websocket.send_fragments([b"not", b"JSON"])
            client.websocket.send_binary(b"\0\0\0\0 not a request")
        # No control method: it would overtake the others.
        client.send({"id": _LAST, "method": "fs/getMetadata", "params": {"path": "file:///"}})
        client.answer(_LAST, _ANSWER_SECONDS)
    with contextlib.suppress(OSError):
        client.close()


class Scene:
    """A server whose functions can be made to raise, and its second client with its process."""

    def __init__(self, control: faults.Control, dial: Callable[[], Client], folder: Path) -> None:
        self._control = control
        self._dial = dial
        self._folder = folder
        (folder / "large").write_bytes(bytes(5_000_000))
        self._second = self._new_client()
        self._second.start(["cat"], process_id="cat", pipeStdin=True)
        self._lines = 0

    def _new_client(self) -> Client:
        client = self._dial()
        client.initialize()
        return client

    def use_with_fault(self, point: str) -> bool:
        """Whether the point has raised while a client used the server."""
        self._control.arm(point)
        with contextlib.suppress(*_ENDS):
            _use(self._dial(), self._folder)
        fired = self._control.disarm()
        self._check_others(point)
        return fired

    def call_with_fault(self, point: str, method: str) -> bool:
        """The same for one request, whose handler raises."""
        with self._new_client() as client:
            self._control.arm(point)
            failure = client.failure(method, {})
            fired = self._control.disarm()
            assert not fired or failure == (-32603, "internal error")
        self._check_others(point)
        return fired

    def _check_others(self, point: str) -> None:
        self._lines += 1
        line = b"line %d\n" % self._lines
        try:
            assert self._second.write("cat", line, str(self._lines)) == "accepted"
            self._second.wait_for(
                lambda notice: (
                    notice["method"] == "process/output" and notice["params"]["chunk"] == b64(line)
                )
            )
            self._second.notifications.clear()
            self._new_client().close()
        except (*_ENDS, AssertionError) as error:
            raise AssertionError(f"others noticed a fault of {point}: {error!r}") from None

    def close(self) -> None:
        self._second.close()


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("faults")
    control = faults.Control(tmp_path_factory.mktemp("control") / "page")
    with start_prepared(
        faults.PREPARATION, "--session-retention", "0", env=control.environment
    ) as server:
        running = Scene(control, lambda: server.connect(initialize=False), folder)
        yield running
        running.close()


@pytest.mark.parametrize("when", ["call", "await"])
def test_handlers(scene: Scene, when: str) -> None:
    fired = [scene.call_with_fault(f"{when} {name}", name) for name in faults.methods()]
    assert all(fired)


@pytest.mark.parametrize("part", range(4))
def test_encoders_callbacks_and_clean_ups(scene: Scene, part: int) -> None:
    names = list(faults.numbered(faults.points(), 4))[part]
    missed = [name for name in names if not scene.use_with_fault(name)]
    # The others belong to circumstances that this client does not bring about.
    assert len(missed) < len(names) / 2, missed


@pytest.fixture(scope="module")
def relayed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Clients that share the link of an executor."""
    folder = tmp_path_factory.mktemp("faults")
    control = faults.Control(tmp_path_factory.mktemp("control") / "page")
    flags = ("--session-retention", "0")
    with (
        ThreadedRelayService() as service,
        start_executor(
            service, *flags, preparation=faults.PREPARATION, env=control.environment
        ) as executor,
    ):
        assert executor.process.poll() is None
        running = Scene(control, lambda: connect(service, initialize=False), folder)
        yield running
        running.close()
        # The link of all clients was never lost.
        assert len(service.requests_to(Endpoint.EXECUTOR_SOCKET)) == 1


def test_streams_of_one_link(relayed: Scene) -> None:
    names = faults.relay_points()
    missed = [name for name in names if not relayed.use_with_fault(name)]
    assert len(missed) < len(names) / 2, missed


def test_a_denied_path_that_is_not_utf8(tmp_path: Path) -> None:
    """One such request ended the server with all its clients."""
    entries = [
        {"path": {"type": "special", "value": {"kind": "root"}}, "access": "read"},
        {"path": {"type": "path", "path": str(tmp_path)}, "access": "deny"},
    ]
    permissions = {
        "type": "managed",
        "file_system": {"type": "restricted", "entries": entries},
        "network": "restricted",
    }
    sandbox = {"permissions": permissions, "windowsSandboxLevel": "disabled"}
    with start_server("ours") as server, server.connect() as other, server.connect() as client:
        other.start(["sleep", "60"], process_id="sleep")
        for method in ("fs/readFile", "fs/getMetadata", "fs/readDirectory", "fs/canonicalize"):
            params = {"path": f"{uri(tmp_path)}/%FF", "sandbox": sandbox}
            answer = client.answer(client.request(method, params))
            assert answer["error"]["code"] == -32600, answer
            denial = answer["error"]["data"]["sandboxDenial"]
            assert denial["path"] == f"{tmp_path}/\ufffd"
        (listed,) = other.call("process/list")["processes"]
        assert listed["running"]
