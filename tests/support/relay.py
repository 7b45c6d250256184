"""Clients through a relay, and executors for them: ours or the reference's.

`RelayLink` is the client's end of one relay stream on a blocking socket. It serves `client.Client`
as a link, and also sends what no client should. `start_executor` runs an executor that registers
with a `relay_service` and sees that nothing of it is left behind.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import shlex
import struct
import subprocess
import sys
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

from exec_server.relay.frames import Frame, Kind, decode, encode
from exec_server.relay.noise import Identity, Initiator, PublicKey, prologue
from exec_server.relay.records import PlainChannel, RelayChannel
from tests.relay_service import ThreadedRelayService
from tests.support.client import (
    CLOSE,
    DEFAULT_TIMEOUT,
    PING,
    PONG,
    Client,
    Disconnected,
    HttpReply,
    Server,
    WebSocketLink,
    descendants,
    http,
    run_command,
    scaled,
    survivors,
)
from tests.support.server_internals import eventually

ENVIRONMENT = "env-1"
RESET_REASON = "noise_relay_protocol_error"
SUITE = "Noise_hybridIK_X25519+MLKEM768_AESGCM_SHA256"

# Waits of the link are as long as they should be, but only on paper: they go to stderr.
QUICK_BACKOFF = """
import sys, exec_server.server.remote as remote
_next_delay = remote.Backoff.next_delay
def _told(backoff):
    print(f"backoff {_next_delay(backoff):.6f}", file=sys.stderr, flush=True)
    return 0.01
remote.Backoff.next_delay = _told
"""


class StreamReset(Disconnected):
    """The stream was ended by a reset; `reason` is its text."""

    def __init__(self, reason: str) -> None:
        super().__init__(None, reason)


@dataclass(frozen=True)
class ConnectionBundle:
    """The answer of the registry to a client, for one connection."""

    url: str
    registration_id: str
    executor_key: PublicKey
    authorization: str


def post(
    service: ThreadedRelayService, path: str, body: Any = None, authorization: str = "Bearer client"
) -> HttpReply:
    """A request to the registry; a body of None is empty, and an empty authorization not sent."""
    content = b"" if body is None else json.dumps(body).encode()
    path = f"{urlsplit(service.url).path}{path}"
    lines = [f"POST {path} HTTP/1.1", "host: registry", f"content-length: {len(content)}"]
    if authorization:
        lines.append(f"authorization: {authorization}")
    return http(service.url, "\r\n".join([*lines, "", ""]).encode() + content)


def key_object(key: PublicKey) -> dict[str, str]:
    return {
        "suite": SUITE,
        "x25519_public_key": base64.b64encode(key.x25519).decode(),
        "mlkem768_public_key": base64.b64encode(key.mlkem768).decode(),
    }


def register_absent(service: ThreadedRelayService, authorization: str = "Bearer executor") -> None:
    """Register an executor that does not connect: the environment is offline, but known."""
    key = key_object(Identity.generate().public)
    body = {"security_profile": "noise_hybrid_ik_v1", "executor_public_key": key}
    reply = post(service, f"/cloud/environment/{ENVIRONMENT}/register", body, authorization)
    assert reply.status == 200, reply


def ask_to_connect(
    service: ThreadedRelayService, key: PublicKey, environment_id: str = ENVIRONMENT
) -> ConnectionBundle:
    path = f"/cloud/environment/{environment_id}/connect"
    reply = post(service, path, {"harness_public_key": key_object(key)})
    assert reply.status == 200, reply
    answer = json.loads(reply.body)
    executor = answer["executor_public_key"]
    return ConnectionBundle(
        answer["url"],
        answer["executor_registration_id"],
        PublicKey(
            base64.b64decode(executor["x25519_public_key"]),
            base64.b64decode(executor["mlkem768_public_key"]),
        ),
        answer["harness_key_authorization"],
    )


def dial(url: str) -> WebSocketLink:
    """Open a WebSocket at an address that the registry gave out."""
    parts = urlsplit(url)
    return WebSocketLink(url, target=f"{parts.path}?{parts.query}")


class RelayLink:
    """The client's end of a relay stream: raw frames always, messages after the handshake."""

    def __init__(
        self,
        service: ThreadedRelayService,
        *,
        environment_id: str = ENVIRONMENT,
        stream_id: str | None = None,
        handshake: bool = True,
    ) -> None:
        self.environment_id = environment_id
        self.stream_id = stream_id or str(uuid.uuid4())
        self.identity = Identity.generate()
        self.bundle = ask_to_connect(service, self.identity.public, environment_id)
        self.socket = dial(self.bundle.url)
        self.channel: RelayChannel | PlainChannel | None = None
        self._messages: deque[bytes] = deque()
        if handshake:
            try:
                self.shake_hands()
            except BaseException:
                self.close()
                raise

    def __enter__(self) -> RelayLink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- frames -----------------------------------------------------------------------

    def send_frame(self, frame: Frame | bytes) -> None:
        self.socket.send_binary(frame if isinstance(frame, bytes) else encode(frame))

    def send_kind(self, kind: Kind, payload: bytes = b"", **members: Any) -> None:
        """Send a frame of this stream."""
        self.send_frame(Frame(self.stream_id, kind, payload, **members))

    def next_frame(self, timeout: float) -> Frame:
        """The next relay frame of any kind; the limit is not scaled again."""
        deadline = time.monotonic() + timeout
        while True:
            found = self.socket.receive_frame(deadline - time.monotonic())
            if found.opcode == PING:
                with contextlib.suppress(OSError):
                    self.socket.send_frame(PONG, found.payload)
            elif found.opcode == CLOSE:
                raise Disconnected(struct.unpack("!H", found.payload[:2])[0])
            elif found.opcode != PONG:
                frame = decode(found.payload)
                assert frame.stream_id == self.stream_id, frame
                return frame

    def wait_reset(self) -> str:
        """Read on until the stream is reset; returns the reason."""
        try:
            while True:
                self.receive(scaled(DEFAULT_TIMEOUT))
        except StreamReset as end:
            return end.reason

    def drain(self) -> list[bytes]:
        """The messages that the relay sends before it answers a ping, which it does in order."""
        self.socket.send_frame(PING, b"all")
        messages = []
        while (found := self.socket.receive_frame(scaled(DEFAULT_TIMEOUT))).opcode != PONG:
            messages.append(found.payload)
        return messages

    def outcome(self, other: Client) -> list[bytes]:
        """All messages sent in response to ours; a request of `other` marks their end."""
        early = self.drain()  # after this the relay has read everything
        assert other.call("environment/status") == {"status": "ready"}
        return early + self.drain()

    # ---- the handshake ----------------------------------------------------------------

    def initiator(
        self,
        *,
        environment_id: str | None = None,
        registration_id: str | None = None,
        stream_id: str | None = None,
        executor_key: PublicKey | None = None,
    ) -> Initiator:
        """The client's part of a handshake; arguments replace correct values with wrong ones."""
        context = prologue(
            environment_id or self.environment_id,
            registration_id or self.bundle.registration_id,
            stream_id or self.stream_id,
        )
        return Initiator(self.identity, executor_key or self.bundle.executor_key, context)

    def begin(
        self,
        authorization: bytes | None = None,
        *,
        past: ThreadedRelayService | None = None,
        **mistakes: Any,
    ) -> Initiator:
        """Send the first message of a handshake.

        A registry of ours forwards one handshake of a stream; `past` sends a further one.
        """
        initiator = self.initiator(**mistakes)
        text = self.bundle.authorization.encode() if authorization is None else authorization
        frame = Frame(self.stream_id, Kind.HANDSHAKE, initiator.write_first(text))
        if past is None:
            self.send_frame(frame)
        else:
            past.executor(self.environment_id).send(encode(frame))
        return initiator

    def finish(self, initiator: Initiator) -> None:
        """Wait for the second message; raises StreamReset."""
        frame = self.next_frame(scaled(DEFAULT_TIMEOUT))
        if frame.kind is Kind.RESET:
            raise StreamReset(frame.reason)
        assert frame.kind is Kind.HANDSHAKE, frame
        self.channel = RelayChannel(self.stream_id, initiator.read_second(frame.payload))

    def shake_hands(self) -> None:
        self.send_kind(Kind.RESUME)
        self.finish(self.begin())

    # ---- messages ---------------------------------------------------------------------

    def seal(self, record: bytes) -> bytes:
        """The next data frame of the stream, around any plaintext."""
        assert self.channel is not None
        return self.channel.seal(record)

    def sealed(self, message: bytes) -> list[bytes]:
        """The data frames of a message, to be sent by the caller."""
        assert self.channel is not None
        return [self.channel.seal(piece) for piece in self.channel.records(message)]

    def send_text(self, text: str | bytes) -> None:
        for frame in self.sealed(text.encode() if isinstance(text, str) else text):
            self.send_frame(frame)

    def receive(self, timeout: float) -> bytes:
        """The next message; raises StreamReset or Disconnected at the end."""
        deadline = time.monotonic() + timeout
        while not self._messages:
            frame = self.next_frame(deadline - time.monotonic())
            if frame.kind is Kind.RESET:
                raise StreamReset(frame.reason)
            assert frame.kind is Kind.DATA, frame
            assert self.channel is not None, "data before the handshake"
            self._messages.extend(self.channel.receive(frame))
        return self._messages.popleft()

    def close(self) -> None:
        """Drop the socket without a close frame; the relay notifies the executor."""
        self.socket.close()


class PlainLink(RelayLink):
    """The same for the historical form without encryption and handshake."""

    def __init__(self, service: ThreadedRelayService, environment_id: str = ENVIRONMENT) -> None:
        self.environment_id = environment_id
        self.stream_id = str(uuid.uuid4())
        self.socket = dial(service.plain_url(environment_id))
        self.channel = PlainChannel(self.stream_id)
        self._messages = deque()
        self.send_kind(Kind.RESUME)


def relay_link(client: Client) -> RelayLink:
    """The link below a client that `connect` has made."""
    assert isinstance(client.link, RelayLink)
    return client.link


def connect(
    service: ThreadedRelayService,
    *,
    initialize: bool = True,
    resume: str | None = None,
    **options: Any,
) -> Client:
    """A client through the relay, past its handshakes unless `initialize` is false."""
    client = Client(RelayLink(service, **options))
    if initialize:
        try:
            client.initialize(resume)
        except BaseException:
            client.close()
            raise
    return client


def is_served(service: ThreadedRelayService) -> bool:
    """Whether a new client can connect and is answered."""
    with connect(service) as client:
        return bool(client.call("environment/status") == {"status": "ready"})


# ---- executors ------------------------------------------------------------------------


def patches(constants: Mapping[str, object]) -> str:
    """Python that sets constants, each named like `relay.multiplexer.MAX_STREAMS`."""
    lines = []
    for name, value in constants.items():
        module, _, constant = name.rpartition(".")
        lines.append(f"import exec_server.{module} as module")
        lines.append(f"assert hasattr(module, {constant!r})")
        lines.append(f"module.{constant} = {value!r}")
    return "\n".join(lines)


@contextlib.contextmanager
def prepared(preparation: str, constants: Mapping[str, object] | None = None) -> Iterator[None]:
    """While it lasts, a server of ours runs some Python before anything else."""
    code = "\n".join(part for part in (preparation, patches(constants or {})) if part)
    command = [sys.executable, "-c", f"{code}\nfrom exec_server.cli.main import main\nmain()"]
    changed = {"EXEC_SERVER_COMMAND": shlex.join(command)} if code else {}
    with mock.patch.dict(os.environ, changed):
        yield


def remote_flags(service: ThreadedRelayService, environment_id: str = ENVIRONMENT) -> list[str]:
    return ["--remote", service.url, "--environment-id", environment_id]


@contextlib.contextmanager
def start_executor(
    service: ThreadedRelayService,
    *flags: str,
    kind: str = "ours",
    environment_id: str = ENVIRONMENT,
    env: Mapping[str, str | None] | None = None,
    constants: Mapping[str, object] | None = None,
    preparation: str = "",
    stdin: int = subprocess.DEVNULL,
    attached: bool = True,
) -> Iterator[Server]:
    """An executor ("ours" or "reference"), attached to the relay unless `attached` is false.

    `flags` that say where to register replace the usual ones.
    """
    where = [] if "--remote" in flags else remote_flags(service, environment_id)
    variables = {"CODEX_API_KEY": service.token, **(env or {})}
    with prepared(preparation, constants):
        executor = Server(kind, [*flags, *where], env=variables, stdin=stdin)
    try:
        if attached:
            wait_attached(service, executor, environment_id)
        yield executor
    except BaseException:
        executor.kill()
        raise
    else:
        if executor.process.poll() is None:
            executor.stop()
    finally:
        executor.release()


def wait_attached(
    service: ThreadedRelayService, executor: Server, environment_id: str = ENVIRONMENT
) -> Any:
    """The socket of the executor at the relay, once it is there."""
    try:
        return service.wait_for_executor(environment_id)
    except TimeoutError:
        raise AssertionError(f"the executor does not come: {executor.stderr()}") from None


def run_executor(
    service: ThreadedRelayService,
    *flags: str,
    kind: str = "ours",
    env: Mapping[str, str | None] | None = None,
    constants: Mapping[str, object] | None = None,
    preparation: str = "",
) -> subprocess.CompletedProcess[str]:
    """An executor that is expected to end by itself."""
    where = [] if "--remote" in flags else remote_flags(service)
    variables = {"CODEX_API_KEY": service.token, **(env or {})}
    with prepared(preparation, constants):
        return run_command(kind, *flags, *where, env=variables)


def exit_code(executor: Server) -> int:
    """Wait until the executor has ended, and see that nothing is left of it."""
    family = descendants(executor.process.pid)
    try:
        code = executor.process.wait(scaled(DEFAULT_TIMEOUT))
    except subprocess.TimeoutExpired:
        raise AssertionError(f"the executor does not end: {executor.stderr()}") from None
    assert not (left := survivors(family)), f"processes left behind: {left}"
    return code


def wait_logged(executor: Server, text: str, times: int = 1) -> None:
    """Wait until the executor has written this to stderr so many times."""
    eventually(f"{text!r} on stderr", lambda: executor.stderr().count(text) >= times)


def backoffs(executor: Server) -> list[float]:
    """The waits so far of an executor with QUICK_BACKOFF."""
    lines = executor.stderr().splitlines()
    return [float(line.split()[1]) for line in lines if line.startswith("backoff ")]


def backoff_bases(waits: list[float]) -> list[float]:
    """The base of each wait: a wait is between half of its base and all of it."""
    bases = itertools.chain([1.0, 2.0, 4.0, 8.0, 16.0], itertools.repeat(30.0))
    return [base for wait, base in zip(waits, bases, strict=False) if base / 2 <= wait <= base]
