"""What an executor puts on the wire: its requests, its upgrade, its frames and records.

How it judges what it receives, stream by stream, is in integration/test_remote_streams.py and
test_remote_handshakes.py, which ask the reference as well.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exec_server.relay.frames import Frame, Kind, decode
from tests.relay_service import TO_HARNESS, Endpoint, Message, Request, ThreadedRelayService
from tests.support.client import Client, uri
from tests.support.relay import (
    ENVIRONMENT,
    RelayLink,
    connect,
    exit_code,
    relay_link,
    start_executor,
)

_VECTORS = json.loads(
    (Path(__file__).resolve().parent.parent / "vectors" / "relay_frames.json").read_text()
)
_READY = {"status": "ready"}
_SUITE = "Noise_hybridIK_X25519+MLKEM768_AESGCM_SHA256"
_TAG_BYTES = 16


@pytest.fixture(scope="module")
def shared(kind: str) -> Iterator[ThreadedRelayService]:
    """A relay with one executor for all tests that need no other."""
    with ThreadedRelayService() as running, start_executor(running, kind=kind):
        yield running


@pytest.fixture
def service() -> Iterator[ThreadedRelayService]:
    with ThreadedRelayService() as running:
        yield running


# ---- requests --------------------------------------------------------------------------


def _is_key_object(value: Any) -> bool:
    halves = (value["x25519_public_key"], value["mlkem768_public_key"])
    sizes = [len(base64.b64decode(half, validate=True)) for half in halves]
    names = ["suite", "x25519_public_key", "mlkem768_public_key"]
    return value["suite"] == _SUITE and list(value) == names and sizes == [32, 1184]


def _compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def _headers(request: Request) -> dict[str, str]:
    """All headers but those that say nothing about who wrote the request."""
    kept = {name: value for name, value in request.headers if name != "sec-websocket-key"}
    assert len(kept) + ("sec-websocket-key" in dict(request.headers)) == len(request.headers)
    return kept


@pytest.mark.quick
def test_registration(shared: ThreadedRelayService) -> None:
    (request,) = shared.requests_to(Endpoint.REGISTER)
    body = json.loads(request.body)
    assert (request.method, request.target) == ("POST", "/cloud/environment/env-1/register")
    assert list(body) == ["security_profile", "executor_public_key"]
    assert body["security_profile"] == "noise_hybrid_ik_v1"
    assert _is_key_object(body["executor_public_key"])
    assert request.body == _compact(body)
    assert _headers(request) == {
        "host": shared.url.removeprefix("http://"),
        "content-type": "application/json",
        "content-length": str(len(request.body)),
        "authorization": f"Bearer {shared.token}",
        "accept": "*/*",
    }


def test_upgrade(shared: ThreadedRelayService) -> None:
    request = shared.requests_to(Endpoint.EXECUTOR_SOCKET)[0]
    headers = _headers(request)
    assert re.fullmatch(r"req_[0-9a-f]{32}", headers.pop("x-request-id"))
    # Neither a credential nor an extension: the address is all that the relay gets.
    assert headers == {
        "host": shared.url.removeprefix("http://"),
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
    }


def test_upgrade_says_where_it_comes_from(service: ThreadedRelayService, kind: str) -> None:
    variables = {"OPENAI_CLUSTER": "cluster-7", "DD_SERVICE": "caller-9"}
    with start_executor(service, kind=kind, env=variables):
        (request,) = service.requests_to(Endpoint.EXECUTOR_SOCKET)
    assert request.header("x-cluster-name") == "cluster-7"
    assert request.header("x-openai-internal-caller") == "caller-9"


def _target(service: ThreadedRelayService, kind: str, remote: str, environment_id: str) -> str:
    """What is asked for a registration."""
    service.faults.http.answer(None, 404, times=None)
    flags = ("--remote", remote, "--environment-id", environment_id)
    with start_executor(service, *flags, kind=kind, attached=False) as executor:
        assert exit_code(executor) == 1
    (request,) = service.requests
    return request.target


@pytest.mark.parametrize(
    ("remote", "environment_id", "target"),
    [
        ("{}/", "env-1", "/cloud/environment/env-1/register"),
        (" {}/api/v1// ", "env-1", "/api/v1/cloud/environment/env-1/register"),
        ("{}", "  env-1\t", "/cloud/environment/env-1/register"),
        ("{}", "a b", "/cloud/environment/a%20b/register"),
        ("{}", "ü", "/cloud/environment/%C3%BC/register"),
    ],
)
def test_address_of_a_registration(
    service: ThreadedRelayService, kind: str, remote: str, environment_id: str, target: str
) -> None:
    assert _target(service, kind, remote.format(service.url), environment_id) == target


@pytest.mark.parametrize(
    ("environment_id", "ours", "theirs"),
    [
        ("a/b", "environment/a%2Fb", "environment/a/b"),
        ("a?b", "environment/a%3Fb", "environment/a?b"),
        ("100%", "environment/100%25", "environment/100%"),
        ("../x", "environment/..%2Fx", "x"),
    ],
)
def test_an_id_cannot_leave_its_place_in_the_address(
    service: ThreadedRelayService, kind: str, environment_id: str, ours: str, theirs: str
) -> None:
    # By choice only ours encodes it: the other asks for something that was not meant.
    expected = ours if kind == "ours" else theirs
    assert _target(service, kind, service.url, environment_id) == f"/cloud/{expected}/register"


def test_a_busy_registry_is_asked_again(service: ThreadedRelayService, kind: str) -> None:
    later = [("retry-after", "600")]
    for status, code in (
        (502, "authentication_service_unavailable"),
        (503, "registration_conflict"),
    ):
        service.faults.http.answer(Endpoint.REGISTER, status, code=code, headers=later)
    with start_executor(service, kind=kind) as executor:
        assert executor.stderr() == ""
    first, second, third = service.requests_to(Endpoint.REGISTER)
    assert first.body == second.body == third.body
    assert first.headers == second.headers == third.headers
    # Twice as long each time, and by chance up to half of that more. `Retry-After` is no order.
    assert second.time - first.time >= 0.49
    assert third.time - second.time >= 0.99


def test_a_refused_upgrade_leads_to_a_new_registration(
    service: ThreadedRelayService, kind: str
) -> None:
    service.faults.http.reject(Endpoint.EXECUTOR_SOCKET, 429, "expired")
    with start_executor(service, kind=kind) as executor:
        assert executor.stderr() == ""
    first, again = service.requests_to(Endpoint.REGISTER)
    refused, accepted = service.requests_to(Endpoint.EXECUTOR_SOCKET)
    assert first.body == again.body
    # Before the wait, not after it.
    assert accepted.time - again.time >= 0.49
    assert refused.target != accepted.target
    assert refused.header("x-request-id") != accepted.header("x-request-id")


def test_a_relay_in_trouble_is_asked_again_at_the_same_address(
    service: ThreadedRelayService, kind: str
) -> None:
    service.faults.http.reject(Endpoint.EXECUTOR_SOCKET, 503)
    with start_executor(service, kind=kind):
        pass
    assert len(service.requests_to(Endpoint.REGISTER)) == 1
    refused, accepted = service.requests_to(Endpoint.EXECUTOR_SOCKET)
    assert refused.target == accepted.target
    assert accepted.time - refused.time >= 0.49


@pytest.mark.parametrize(("size", "survives"), [(262_144, True), (262_145, False)])
def test_the_largest_message_of_a_relay(
    service: ThreadedRelayService, kind: str, size: int, survives: bool
) -> None:
    with start_executor(service, kind=kind):
        # What is no frame is dropped; what is too large ends the connection.
        service.executor(ENVIRONMENT).send(bytes(size))
        if not survives:
            service.until(lambda: service.service.executor(ENVIRONMENT) is None)
            service.wait_for_executor(ENVIRONMENT)
        with connect(service) as client:
            assert client.call("environment/status") == _READY
    assert len(service.requests_to(Endpoint.EXECUTOR_SOCKET)) == (1 if survives else 2)
    assert len(service.requests_to(Endpoint.REGISTER)) == 1


_UUID = "0f8fad5b-d9cb-469f-a165-70867728950e"


@pytest.mark.parametrize(
    ("stream_id", "told"),
    [
        (_UUID, _UUID),
        (_UUID.upper(), _UUID),
        (_UUID.replace("-", ""), _UUID),
        (f"{{{_UUID}}}", _UUID),
        (f"urn:uuid:{_UUID}", _UUID),
        ("00000000-0000-0000-0000-000000000000", "00000000-0000-0000-0000-000000000000"),
        (f" {_UUID}", None),
        ("my stream", None),
    ],
)
def test_validation(shared: ThreadedRelayService, stream_id: str, told: str | None) -> None:
    before = len(shared.requests_to(Endpoint.VALIDATE))
    with RelayLink(shared, stream_id=stream_id) as link:
        (request,) = shared.requests_to(Endpoint.VALIDATE)[before:]
    body = json.loads(request.body)
    assert request.target == "/cloud/environment/env-1/validate"
    assert list(body) == [
        "executor_registration_id",
        "harness_public_key",
        "harness_key_authorization",
    ]
    assert body["executor_registration_id"] == link.bundle.registration_id
    assert body["harness_key_authorization"] == link.bundle.authorization
    assert _is_key_object(body["harness_public_key"])
    assert request.body == _compact(body)
    headers = _headers(request)
    assert headers.pop("x-codex-noise-stream-id", None) == told
    assert headers == {
        "host": shared.url.removeprefix("http://"),
        "content-type": "application/json",
        "content-length": str(len(request.body)),
        "authorization": f"Bearer {shared.token}",
        "accept": "*/*",
    }


# ---- frames ----------------------------------------------------------------------------


def _sent(service: ThreadedRelayService, stream_id: str) -> list[Message]:
    """What the executor has sent on a stream."""
    return [
        message
        for message in service.frames
        if (message.stream_id, message.direction) == (stream_id, TO_HARNESS)
    ]


def _varint(number: int) -> bytes:
    out = b""
    while number > 0x7F:
        out += bytes((number & 0x7F | 0x80,))
        number >>= 7
    return out + bytes((number,))


def _written(stream_id: str, field: int, body: bytes) -> bytes:
    """The one way to write a frame, apart from the codec of the product."""
    name = stream_id.encode()
    tag = bytes((field << 3 | 2,))
    return b"\x08\x01\x12" + _varint(len(name)) + name + tag + _varint(len(body)) + body


def _data(frame: Frame) -> bytes:
    """The one way to write a data frame of an executor: no acknowledgements, nothing empty."""
    seq = b"\x08" + _varint(frame.seq) if frame.seq else b""
    body = seq + b"\x18\x01\x22" + _varint(len(frame.payload)) + frame.payload
    return _written(frame.stream_id, 5, body)


@pytest.mark.parametrize(
    "vector", [pytest.param(vector, id=vector["name"]) for vector in _VECTORS["invalid"]]
)
def test_verdict_on_a_frame(shared: ThreadedRelayService, vector: dict[str, Any]) -> None:
    encoded = bytes.fromhex(vector["encoded"])
    known = vector.get("frame", {}).get("stream_id", "").strip()
    stream_id = known or "vector-unknown-stream"
    with RelayLink(shared, stream_id=stream_id, handshake=False) as link, connect(shared) as other:
        link.send_kind(Kind.RESUME)
        assert link.drain() == []  # now the stream is this client's
        # By the relay's own hand: it would not forward all of these.
        shared.executor(ENVIRONMENT).send(encoded)
        answers = link.outcome(other)
    if vector["executor_verdict"] == "dropped":
        assert answers == []
    else:
        assert answers == [
            bytes.fromhex(frame["encoded"])
            for frame in _VECTORS["from_reference_binary_0_166_0"]
            if frame["name"] == "reset_frame_from_reference"
        ]


def test_answer_to_a_handshake(shared: ThreadedRelayService) -> None:
    with RelayLink(shared) as link:
        (answer,) = _sent(shared, link.stream_id)
    payload = decode(answer.data).payload
    assert len(payload) == 3424
    body = b"\x0a" + _varint(3424) + payload
    assert answer.data == _written(link.stream_id, 10, body)


def test_data_frames_are_counted_and_carry_one_message_each(shared: ThreadedRelayService) -> None:
    with connect(shared) as client:
        client.run(["sh", "-c", "for i in 1 2 3 4 5 6 7 8; do echo $i; sleep 0.01; done"])
        for _ in range(130):
            client.call("environment/status")
        _, *frames = _sent(shared, relay_link(client).stream_id)
    decoded = [decode(frame.data) for frame in frames]
    assert [frame.seq for frame in decoded] == list(range(len(client.raw)))
    assert len(decoded) > 0x80
    assert [_data(frame) for frame in decoded] == [frame.data for frame in frames]
    # A small message has a record to itself: its length, itself, and the tag.
    sizes = [len(frame.payload) for frame in decoded]
    assert sizes == [4 + len(message) + _TAG_BYTES for message in client.raw]


_CUTS = [row for row in _VECTORS["record_framing"] if 61_000 < row.get("message_len", 0) < 130_000]


@pytest.mark.parametrize("row", [pytest.param(row, id=row["name"]) for row in _CUTS])
def test_a_message_is_cut_into_records(
    shared: ThreadedRelayService, folder: Path, row: dict[str, Any]
) -> None:
    size = row["message_len"]
    with connect(shared) as client:
        before = len(_sent(shared, relay_link(client).stream_id))
        _read_file(client, folder / "f", size)
        frames = _sent(shared, relay_link(client).stream_id)[before:]
    assert len(client.raw[-1]) == size
    assert [len(decode(frame.data).payload) for frame in frames] == row["record_ciphertext_lengths"]


def _read_file(client: Client, path: Path, size: int) -> None:
    """Reads a file whose answer has this many bytes, which the length of the id decides."""
    around = len('{"id":"","result":{"dataBase64":""}}')
    groups, name = divmod(size - around - 1, 4)
    path.write_bytes(bytes(3 * groups))
    request_id = "x" * (name + 1)
    client.send({"id": request_id, "method": "fs/readFile", "params": {"path": uri(path)}})
    client.result(request_id)


def test_silent_on_its_standard_streams(service: ThreadedRelayService, kind: str) -> None:
    with start_executor(service, "--name", "builder", kind=kind) as executor:
        with connect(service) as client:
            client.run(["true"])
        executor.stop()
        assert executor.process.stdout is not None
        assert executor.process.stdout.read() == b""
        assert executor.stderr() == ""
    assert b"builder" not in b"".join(request.body for request in service.requests)
