"""The exchange of frames between an executor and its clients, by plain calls from link to link.

A client's link owns the first stream that it names, so no client speaks into another's stream. When
a side leaves, the other one gets a reset with a reason. A receiver that does not read stops its
senders; a client that does so for too long loses its stream, since the executor has one link.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from exec_server.hosting import envelope
from exec_server.hosting.metrics import Metrics
from exec_server.hosting.relay_link import RelayLink, flush_links
from exec_server.hosting.rules import ByteRate
from exec_server.hosting.store import ExecutorLease, Limits
from exec_server.relay.frames import FRAME_BYTES, Kind, decode, token_field
from exec_server.relay.multiplexer import REVOKED_REASON

log = logging.getLogger(__name__)

# Unsent bytes to one client at which the executor is not read, and to one executor at which none
# of its clients is read. Beside them one read, 256 KiB, may be on its way.
CLIENT_UNSENT_BYTES: Final = 1_048_576
EXECUTOR_UNSENT_BYTES: Final = 4_194_304
# An executor that takes nothing for so long is cut off.
EXECUTOR_STALL_SECONDS: Final = 30.0
# What a frame counts at least in the rate of a tenant: the work for a tiny one is that for 1 KiB.
FRAME_COST_BYTES: Final = 1024
# Streams of an executor, as in the executor itself, and those of them that one token may have. The
# others are left to other tokens.
STREAMS: Final = 128
STREAMS_OF_TOKEN: Final = 112

TO_CLIENT: Final = "to_client"
TO_EXECUTOR: Final = "to_executor"

EXECUTOR_GONE: Final = "executor_disconnected"
CLIENT_GONE: Final = "harness_disconnected"
CLIENT_STALLED: Final = "harness_stalled"
FOREIGN_STREAM: Final = "stream_id_not_owned"
USED_STREAM: Final = "stream_id_in_use"
SECOND_HANDSHAKE: Final = "second_handshake"
FORGED_REASON: Final = "reason_not_allowed"
# An executor of ours ends the session of this stream with its processes, others the stream.
REVOKED: Final = REVOKED_REASON
# How long an executor keeps the session of a client that has left, and how many streams of such
# clients are remembered for `token revoke --kill`. Beyond it the oldest are forgotten: their
# sessions end by themselves soon after.
RETAINED_SECONDS: Final = 80.0
ENDED_STREAMS: Final = 16_384

GOING_AWAY: Final = 1001
NOT_BINARY: Final = 1003
UNREADABLE: Final = 1007
POLICY: Final = 1008
RESTARTING: Final = 1012
REPLACED: Final = 4001


@dataclass(eq=False, slots=True)
class Tenant:
    """What the sockets of a tenant on this node share."""

    limits: Limits
    rate: ByteRate
    sockets: int = 0


class _Ended(NamedTuple):
    """A stream whose session the executor may still have."""

    token_id: str
    at: float
    is_killed: bool = False  # and the executor could not be told yet


@dataclass(slots=True)
class RelayHub:
    """What all executors of a node share."""

    metrics: Metrics
    stall_seconds: float
    executors: dict[tuple[str, str], RelayedExecutor] = field(default_factory=dict)
    clients: set[RelayedClient] = field(default_factory=set)
    tenants: dict[str, Tenant] = field(default_factory=dict)
    # Streams that have ended, by executor and prefix; the oldest first.
    _ended: dict[tuple[tuple[str, str], bytes], _Ended] = field(default_factory=dict)

    def tenant(self, name: str, limits: Limits) -> Tenant:
        """The tenant with its limits of now."""
        tenant = self.tenants.get(name)
        if tenant is None:
            now = asyncio.get_running_loop().time()
            tenant = self.tenants[name] = Tenant(limits, ByteRate(limits.bytes_per_second, now))
        elif tenant.limits != limits:
            tenant.limits = limits
            tenant.rate.rate = limits.bytes_per_second
        return tenant

    def forget_idle_tenants(self) -> None:
        for name in [name for name, tenant in self.tenants.items() if not tenant.sockets]:
            del self.tenants[name]

    def stream_began(self, executor: tuple[str, str], prefix: bytes) -> None:
        """Its id is in use again, by any token."""
        self._ended.pop((executor, prefix), None)

    def stream_ended(self, executor: tuple[str, str], prefix: bytes, token_id: str) -> None:
        """Remember a stream whose session the executor may still have."""
        now = asyncio.get_running_loop().time()
        self._ended.pop((executor, prefix), None)
        self._ended[executor, prefix] = _Ended(token_id, now)
        while len(self._ended) > ENDED_STREAMS or (
            next(iter(self._ended.values())).at < now - RETAINED_SECONDS
        ):
            del self._ended[next(iter(self._ended))]

    def end_streams_of(self, tokens: frozenset[str]) -> None:
        """Tell executors to end what clients with these tokens have begun."""
        if not tokens:
            return
        for client in [each for each in self.clients if each.link.token_id in tokens]:
            client.end_stream(REVOKED)  # the caller closes the link
        for key, ended in self._ended.items():
            if ended.token_id in tokens:
                self._ended[key] = ended._replace(is_killed=True)
        self.tell_killed(self.executors)

    def tell_killed(self, executors: Container[tuple[str, str]]) -> None:
        """Tell these executors which streams were killed, also while they were away."""
        killed = [key for key, ended in self._ended.items() if ended.is_killed]
        for environment, prefix in killed:
            if environment in executors:
                del self._ended[environment, prefix]
                self.reset(self.executors[environment].link, prefix, REVOKED)

    def unsent(self) -> int:
        """Bytes in all queues of the node."""
        total = sum(executor.link.unsent() for executor in self.executors.values())
        return total + sum(client.link.unsent() for client in self.clients)

    def streams(self) -> int:
        return sum(len(executor.streams) for executor in self.executors.values())

    def reset(self, link: RelayLink, prefix: bytes, reason: str) -> None:
        self.metrics.resets.add(reason)
        link.send(envelope.reset(prefix, reason))


class _End:
    """What executor and client have in common: the rate of their tenant."""

    __slots__ = ("_hub", "_resume", "_tenant", "link")

    def __init__(self, hub: RelayHub, tenant: Tenant, link: RelayLink) -> None:
        self._hub = hub
        self._tenant = tenant
        self._resume: asyncio.TimerHandle | None = None
        self.link = link
        tenant.sockets += 1

    def _count(self, count: int, frames: int) -> None:
        """Count received bytes; reads slower if the tenant has used its rate."""
        loop = asyncio.get_running_loop()
        cost = max(count, frames * FRAME_COST_BYTES)
        pause = self._tenant.rate.spend(cost, loop.time())
        if pause and self._resume is None and self.link.is_open:
            self.link.hold_reading()
            self._resume = loop.call_later(pause, self._go_on)

    def _go_on(self) -> None:
        self._resume = None
        self.link.release_reading()

    def _leave(self) -> None:
        self._tenant.sockets -= 1
        if self._resume is not None:
            self._resume.cancel()


class RelayedExecutor(_End):
    """The link of an executor, which carries the streams of all its clients."""

    __slots__ = (
        "_lost",
        "_stalled_at",
        "_unsent_before",
        "bytes",
        "clients",
        "counted_streams",
        "lease",
        "streams",
    )

    def __init__(
        self,
        hub: RelayHub,
        tenant: Tenant,
        link: RelayLink,
        lease: ExecutorLease,
        lost: Callable[[ExecutorLease], None],
    ) -> None:
        super().__init__(hub, tenant, link)
        self.lease = lease
        self._lost = lost
        self.counted_streams = 0  # at the last renewal
        self.clients: set[RelayedClient] = set()
        self.streams: dict[bytes, RelayedClient] = {}
        self.bytes = 0  # since the last renewal
        self._stalled_at: float | None = None
        self._unsent_before = 0

    @property
    def key(self) -> tuple[str, str]:
        return self.lease.tenant, self.lease.environment_id

    def open(self, first: bytes) -> None:
        """Take the place of an older link of this environment."""
        old = self._hub.executors.get(self.key)
        is_newest = old is None or old.lease.epoch < self.lease.epoch
        if is_newest:
            self._hub.executors[self.key] = self
        self.link.start(self, first, EXECUTOR_UNSENT_BYTES)
        replaced = old if is_newest else self
        if replaced is not None:
            replaced.link.close(REPLACED, "replaced by a new connection")
        if is_newest:
            self._hub.tell_killed((self.key,))

    def has_room(self, token_id: str) -> bool:
        """Whether one more client with this token may have a stream."""
        of_token = sum(client.link.token_id == token_id for client in self.clients)
        return len(self.clients) < STREAMS and of_token < STREAMS_OF_TOKEN

    def frame_received(self, frame: bytes) -> None:
        # The hot path: every frame begins with the prefix of its stream, and a body follows.
        end = 4 + frame[3] if len(frame) > 3 else 0
        client = self.streams.get(frame[:end]) if len(frame) > end else None
        if client is None:
            header = envelope.read(frame)
            client = None if header is None else self.streams.get(header.prefix)
            if client is None:
                return  # unreadable, or of a client that has just left
        client.link.send(frame)

    def bytes_read(self, count: int, messages: int, frames: int) -> None:
        self.bytes += count
        metrics = self._hub.metrics
        metrics.relayed_bytes.add(TO_CLIENT, count=count)
        metrics.relayed_frames.add(TO_CLIENT, count=messages)
        self._count(count, frames)

    def text_received(self) -> None:
        """Dropped, as an executor drops it."""

    def writing_changed(self, *, is_paused: bool) -> None:
        self._stalled_at = None
        for client in self.clients:
            if is_paused:
                client.link.hold_reading()
            else:
                client.link.release_reading()

    def check_progress(self, now: float) -> None:
        """Cut off an executor that takes nothing."""
        unsent = self.link.unsent()
        if not self.link.is_writing_paused or unsent < self._unsent_before:
            self._stalled_at = None
        elif self._stalled_at is None:
            self._stalled_at = now
        elif now - self._stalled_at >= EXECUTOR_STALL_SECONDS:
            log.info("%s: cut off: takes no bytes", self.lease.environment_id)
            self.link.abort()
        self._unsent_before = unsent

    def close(self, code: int, reason: str) -> None:
        """End the link after its streams: the clients look for the executor elsewhere first."""
        self._leave_clients()
        self.link.close(code, reason)

    def link_lost(self) -> None:
        self._leave()
        if self._hub.executors.get(self.key) is self:
            del self._hub.executors[self.key]
        self._leave_clients()
        self._lost(self.lease)

    def _leave_clients(self) -> None:
        clients, self.clients = self.clients, set()
        self.streams.clear()
        for client in clients:
            client.executor_left()
        flush_links()


class RelayedClient(_End):
    """The link of one client, with one stream."""

    __slots__ = ("_has_shaken_hands", "_prefix", "_prefix_bytes", "_stall", "executor")

    def __init__(
        self, hub: RelayHub, tenant: Tenant, link: RelayLink, executor: RelayedExecutor
    ) -> None:
        super().__init__(hub, tenant, link)
        self.executor: RelayedExecutor | None = executor
        self._prefix = b""  # of the stream that this link owns
        self._prefix_bytes = 0
        self._has_shaken_hands = False
        self._stall: asyncio.TimerHandle | None = None

    def open(self, first: bytes) -> None:
        assert self.executor is not None
        self._hub.clients.add(self)
        self.executor.clients.add(self)
        if self.executor.link.is_writing_paused:
            self.link.hold_reading()
        self.link.start(self, first, CLIENT_UNSENT_BYTES)

    def frame_received(self, frame: bytes) -> None:
        executor = self.executor
        if executor is None:
            return
        # The hot path: a data frame of the own stream.
        if (
            self._prefix_bytes
            and frame.startswith(self._prefix)
            and envelope.is_data(frame, self._prefix_bytes)
        ):
            executor.link.send(frame)
        elif (checked := self._checked(executor, frame)) is not None:
            executor.link.send(checked)

    def _checked(self, executor: RelayedExecutor, frame: bytes) -> bytes | None:
        """A frame as it is forwarded, None if it is not; a handshake gets the client's token id."""
        header = envelope.read(frame)
        if header is None:
            self.link.close(UNREADABLE, "unreadable frame")
            return None
        refusal = self._refusal(executor, header, frame)
        if refusal is not None:
            self._hub.reset(self.link, header.prefix, refusal)
            return None
        if header.kind is not Kind.HANDSHAKE:
            return frame
        named = frame + token_field(self.link.token_id)
        if len(named) > FRAME_BYTES:  # which would cost the executor its link
            self.link.close(UNREADABLE, "handshake is too large")
            return None
        return named

    def _refusal(
        self, executor: RelayedExecutor, header: envelope.RelayEnvelope, frame: bytes
    ) -> str | None:
        """Why a frame is not for the executor; the first stream that is named becomes the own."""
        if header.kind is Kind.RESET and decode(frame).reason == REVOKED:
            return FORGED_REASON  # it could name a stream of another client that has left
        if not self._prefix_bytes:
            if header.prefix in executor.streams:
                return USED_STREAM
            self._prefix = header.prefix
            self._prefix_bytes = len(header.prefix)
            executor.streams[header.prefix] = self
            self._hub.stream_began(executor.key, header.prefix)
        elif header.prefix != self._prefix:
            return FOREIGN_STREAM
        if header.kind is Kind.HANDSHAKE:
            if self._has_shaken_hands:
                return SECOND_HANDSHAKE
            self._has_shaken_hands = True
        return None

    def bytes_read(self, count: int, messages: int, frames: int) -> None:
        if self.executor is not None:
            self.executor.bytes += count
        metrics = self._hub.metrics
        metrics.relayed_bytes.add(TO_EXECUTOR, count=count)
        metrics.relayed_frames.add(TO_EXECUTOR, count=messages)
        self._count(count, frames)

    def text_received(self) -> None:
        self.link.close(NOT_BINARY, "binary messages only")

    def writing_changed(self, *, is_paused: bool) -> None:
        if self.executor is None:
            return
        if is_paused:
            self.executor.link.hold_reading()
            loop = asyncio.get_running_loop()
            self._stall = loop.call_later(self._hub.stall_seconds, self._give_up)
        else:
            self._stop_stalling(self.executor)

    def _stop_stalling(self, executor: RelayedExecutor) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
            executor.link.release_reading()

    def _give_up(self) -> None:
        """The client has not read for too long: its stream ends, and the others go on."""
        log.info("a client does not read its stream: cut off")
        self.end_stream(CLIENT_STALLED)
        self.link.abort()
        flush_links()

    def end_stream(self, reason: str) -> None:
        """Tell the executor that this client has left."""
        executor, self.executor = self.executor, None
        if executor is None:
            return
        executor.clients.discard(self)
        self._stop_stalling(executor)
        if self._prefix_bytes and executor.streams.pop(self._prefix, None) is not None:
            self._hub.reset(executor.link, self._prefix, reason)
            if reason != REVOKED:
                self._remember(executor)

    def _remember(self, executor: RelayedExecutor) -> None:
        self._hub.stream_ended(executor.key, self._prefix, self.link.token_id)

    def executor_left(self) -> None:
        """Tell the client, which comes back by itself."""
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        executor, self.executor = self.executor, None
        if self._prefix_bytes:
            if executor is not None:
                self._remember(executor)
            self._hub.reset(self.link, self._prefix, EXECUTOR_GONE)
        self.link.close(GOING_AWAY, "the executor has left")

    def link_lost(self) -> None:
        self._leave()
        self._hub.clients.discard(self)
        self.end_stream(CLIENT_GONE)
        flush_links()
