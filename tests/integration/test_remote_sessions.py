"""Sessions through a relay: they outlive the streams and links that they were opened on."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.relay_service import Endpoint, ThreadedRelayService
from tests.support.client import KINDS, Client, RpcFailure, Server, scaled
from tests.support.relay import (
    ENVIRONMENT,
    QUICK_BACKOFF,
    RESET_REASON,
    connect,
    relay_link,
    start_executor,
    wait_attached,
)
from tests.support.server_internals import commands, eventually

READY = {"status": "ready"}

Service = ThreadedRelayService


def _lose_client(service: Service, client: Client) -> None:
    name = relay_link(client).stream_id
    client.close()
    service.until(lambda: service.service.harness(name) is None)


def _lose_client_at_the_relay(service: Service, client: Client) -> None:
    service.harness(relay_link(client).stream_id).abort()


def _lose_stream(service: Service, client: Client) -> None:
    """Only the stream: the executor finds a mistake in it."""
    link = relay_link(client)
    link.send_frame(link.seal(b"\x00\x00\x00\x00"))
    assert link.wait_reset() == RESET_REASON


def _lose_executor(service: Service, client: Client) -> None:
    service.executor(ENVIRONMENT).abort()
    assert relay_link(client).wait_reset() == "executor_disconnected"


def _lose_both(service: Service, client: Client) -> None:
    service.executor(ENVIRONMENT).abort()
    client.close()


_LOSSES: dict[str, Callable[[Service, Client], None]] = {
    "client": _lose_client,
    "client at the relay": _lose_client_at_the_relay,
    "stream": _lose_stream,
    "executor": _lose_executor,
    "both": _lose_both,
}


@pytest.fixture(scope="module")
def _shared() -> Iterator[tuple[Service, Server]]:
    with (
        ThreadedRelayService() as service,
        start_executor(service, preparation=QUICK_BACKOFF) as executor,
    ):
        yield service, executor


@pytest.fixture(params=KINDS)
def running(
    request: pytest.FixtureRequest, _shared: tuple[Service, Server]
) -> Iterator[tuple[Service, Server]]:
    """One executor of ours for all; of the reference one for each, or it would wait ever longer."""
    if request.param == "ours":
        yield _shared
        return
    with ThreadedRelayService() as service, start_executor(service, kind="reference") as executor:
        yield service, executor


def _output(client: Client, process_id: str, after: int = 0) -> bytes:
    """All that a process has printed so far, by reading it."""
    output = b""
    while True:
        params = {"processId": process_id, "afterSeq": after, "maxBytes": 65_536}
        answer = client.call("process/read", params)
        if not answer["chunks"]:
            return output
        for chunk in answer["chunks"]:
            output += base64.b64decode(chunk["chunk"])
        after = answer["nextSeq"] - 1


@pytest.mark.quick
@pytest.mark.parametrize("loss", _LOSSES)
def test_a_session_goes_on_after_a_loss(
    running: tuple[Service, Server], loss: str, tmp_path: Path
) -> None:
    service, executor = running
    script = (
        f"echo begin; while ! [ -e {tmp_path}/lost ]; do sleep 0.01; done; seq 1 2000; "
        f"touch {tmp_path}/done; read line; echo end $line"
    )
    with connect(service) as client:
        client.start(["sh", "-c", script], process_id="p", pipeStdin=True)
        assert client.notice("process/output", "p")["chunk"] == "YmVnaW4K"
        _LOSSES[loss](service, client)
    # What it prints while nobody is there is kept.
    (tmp_path / "lost").touch()
    eventually("the process goes on", (tmp_path / "done").exists)
    wait_attached(service, executor)
    with _resumed(service, client.session_id) as again:
        expected = "begin\n" + "".join(f"{n}\n" for n in range(1, 2001))
        assert eventually("all is read", lambda: _matching(again, expected.encode()))
        assert again.write("p", b"of it\n", "w") == "accepted"
        assert again.notice("process/exited", "p")["exitCode"] == 0
        assert _output(again, "p") == f"{expected}end of it\n".encode()


def _matching(client: Client, expected: bytes) -> bool:
    return _output(client, "p") == expected


def _resumed(service: Service, session_id: str) -> Client:
    """A client with this session, as soon as the executor knows that the old one is lost."""

    def attempt() -> Client | None:
        try:
            return connect(service, resume=session_id)
        except RpcFailure as failure:
            if failure.code != -32010:
                raise
            return None

    return eventually("the session is free", attempt)


def test_a_session_survives_many_losses(running: tuple[Service, Server]) -> None:
    service, executor = running
    client = connect(service)
    session = client.session_id
    client.start(["cat"], process_id="cat", pipeStdin=True)
    for number, loss in enumerate(_LOSSES.values()):
        if loss is not _lose_both or executor.kind == "ours":
            loss(service, client)
            client.close()
            wait_attached(service, executor)
            client = _resumed(service, session)
            assert client.write("cat", f"{number}\n".encode(), f"w{number}") == "accepted"
            client.wait_for(lambda n: n["method"] == "process/output")
    client.close()


def test_all_sessions_of_a_lost_link_come_back(running: tuple[Service, Server]) -> None:
    service, executor = running
    clients = [connect(service) for _ in range(10)]
    for number, client in enumerate(clients):
        client.start(["sh", "-c", f"read x; echo {number}"], process_id="p", pipeStdin=True)
    service.executor(ENVIRONMENT).abort()
    for client in clients:
        assert relay_link(client).wait_reset() == "executor_disconnected"
        client.close()
    wait_attached(service, executor)
    for number, client in enumerate(clients):
        with connect(service, resume=client.session_id) as again:
            assert again.write("p", b"\n", "w") == "accepted"
            again.notice("process/closed", "p")
            assert _output(again, "p") == f"{number}\n".encode()


# ---- the old stream is still there ------------------------------------------------------


def _has_resumed(client: Client, session_id: str) -> bool:
    try:
        client.initialize(session_id)
    except RpcFailure as failure:
        if failure.code != -32010:
            raise
    return client.session_id == session_id


def test_a_silent_stream_loses_its_session_to_who_asks_for_it() -> None:
    constants = {"net.relay_stream.PROBE_SECONDS": scaled(0.3)}
    with (
        ThreadedRelayService() as service,
        start_executor(service, constants=constants),
        connect(service) as old,
        connect(service, initialize=False) as new,
    ):
        old.start(["sleep", "600"], process_id="p")
        params = {"clientName": "test", "resumeSessionId": old.session_id}
        code, text = new.failure("initialize", params)
        assert code == -32010
        assert text == f"session {old.session_id} is already attached to another connection"
        assert relay_link(old).wait_reset() == RESET_REASON
        # The same stream may ask again.
        eventually("the session is free", lambda: _has_resumed(new, old.session_id))
        assert new.call("process/terminate", {"processId": "p"}) == {"running": True}


def test_a_stream_that_speaks_keeps_its_session() -> None:
    constants = {"net.relay_stream.PROBE_SECONDS": scaled(1.0)}
    with (
        ThreadedRelayService() as service,
        start_executor(service, constants=constants),
        connect(service) as old,
        connect(service, initialize=False) as new,
    ):
        params = {"clientName": "test", "resumeSessionId": old.session_id}
        assert new.failure("initialize", params)[0] == -32010
        assert old.call("environment/status") == READY
        new.silence(scaled(1.1))
        assert old.call("environment/status") == READY
        assert new.failure("initialize", params)[0] == -32010


# ---- the end of a session ---------------------------------------------------------------


def test_a_session_that_nobody_comes_back_for_ends() -> None:
    flags = ("--session-retention", "0.2")
    with ThreadedRelayService() as service, start_executor(service, *flags) as executor:
        client = connect(service)
        client.start(["sleep", "600"], process_id="p")
        client.close()
        eventually("its process is ended", lambda: not commands(executor))
        with connect(service, initialize=False) as late:
            params = {"clientName": "test", "resumeSessionId": client.session_id}
            code, text = late.failure("initialize", params)
            assert (code, text) == (-32600, f"unknown session id {client.session_id}")
            assert late.initialize()["sessionId"] != client.session_id


def test_another_executor_does_not_know_the_sessions_of_the_first() -> None:
    with ThreadedRelayService() as service:
        with start_executor(service), connect(service) as client:
            pass
        with start_executor(service), connect(service, initialize=False) as late:
            params = {"clientName": "test", "resumeSessionId": client.session_id}
            assert late.failure("initialize", params)[0] == -32600
        assert len(service.requests_to(Endpoint.REGISTER)) == 2
