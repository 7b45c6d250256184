"""Faults on request: each is armed for a request or frame, hits it, and counts its hits.

Deterministic: what is left to chance comes from one seeded generator. `HttpFaults` spoils
answers of the registry and upgrades, `FrameFaults` what is forwarded. Faults of a whole
socket (abort, close, freeze, stall, swallowed pings) and sending something of one's own are
methods of `sockets.Socket`; the service finds the socket of an executor or a client.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from http import HTTPStatus
from random import Random
from typing import Any, NamedTuple

from exec_server.errors import RelayError
from exec_server.relay.frames import Frame, Kind, decode

# Armed at the same time; a test that needs more has lost count.
FAULTS_ARMED = 1000
GARBAGE = b"\x16\x03\x01 this is no HTTP \x00\xff\r\n\r\n"

TO_EXECUTOR, TO_HARNESS = "to executor", "to harness"


class Endpoint(StrEnum):
    """The endpoints of the service; the last two are upgrades."""

    REGISTER = "register"
    CONNECT = "connect"
    VALIDATE = "validate"
    DIRECT_REGISTER = "direct/register"
    EXECUTOR_SOCKET = "executor socket"
    HARNESS_SOCKET = "harness socket"


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer with any status; a body that is not bytes becomes JSON."""

    status: int
    body: Any = field(default_factory=dict)
    headers: tuple[tuple[str, str], ...] = ()

    def content(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()

    def encode(self) -> bytes:
        known = {status.value: status.phrase for status in HTTPStatus}
        content = self.content()
        lines = [f"HTTP/1.1 {self.status} {known.get(self.status, 'Unknown')}"]
        lines += [f"{name}: {value}" for name, value in self.headers]
        if content and not any(name.lower() == "content-type" for name, _ in self.headers):
            lines.append("content-type: application/json")
        if self.status not in (204, 304):
            lines.append(f"content-length: {len(content)}")
        lines += ["connection: close", "", ""]
        return "\r\n".join(lines).encode("latin-1") + content


def error_answer(status: int, code: str) -> Answer:
    return Answer(status, {"error": {"code": code, "message": code.replace("_", " ")}})


def relay_frame(data: bytes) -> Frame | None:
    """The relay frame of a message; None if it is none."""
    try:
        return decode(data)
    except RelayError:
        return None


@dataclass(eq=False)
class Fault:
    """An armed fault: passes over `skip` occasions, then hits `times` (None: always)."""

    skip: int = 0
    times: int | None = 1
    hits: int = 0

    def strikes(self) -> bool:
        """Count an occasion that this fault is for; whether it hits."""
        if self.skip:
            self.skip -= 1
            return False
        if self.is_spent:
            return False
        self.hits += 1
        return True

    @property
    def is_spent(self) -> bool:
        return self.times is not None and self.hits >= self.times

    def cancel(self) -> None:
        """Never hit again."""
        self.times = self.hits


class HttpFaultKind(StrEnum):
    """How an answer is sent."""

    WHOLE = "whole"
    HANG = "hang"  # nothing is ever sent
    CUT = "cut"  # half of the body, then the connection is aborted
    GARBAGE = "garbage"  # no HTTP at all
    DRIP = "drip"  # a few bytes at a time


@dataclass(eq=False)
class HttpFault(Fault):
    """Another answer, or another way of sending it."""

    endpoint: Endpoint | None = None
    manner: HttpFaultKind = HttpFaultKind.WHOLE
    answer: Answer | None = None
    rewrite: Callable[[dict[str, Any]], Any] | None = None
    # Between two pieces of a dripping answer, and their size.
    pause: float = 0.0
    piece: int = 1

    @property
    def preempts(self) -> bool:
        """Whether the service behind does not even hear of the request."""
        return self.answer is not None or self.manner in (HttpFaultKind.HANG, HttpFaultKind.GARBAGE)


class HttpFaults:
    """Faults of answers. An endpoint of None stands for all of the registry."""

    def __init__(self) -> None:
        self._armed: list[HttpFault] = []

    def _arm(self, fault: HttpFault) -> HttpFault:
        if len(self._armed) >= FAULTS_ARMED:
            raise ValueError("too many faults")
        self._armed.append(fault)
        return fault

    def answer(
        self,
        endpoint: Endpoint | None,
        status: int,
        body: Any = None,
        *,
        code: str | None = None,
        headers: Sequence[tuple[str, str]] = (),
        **when: Any,
    ) -> HttpFault:
        """Answer with this instead; a body of None is empty, `code` makes an error body."""
        content = b"" if body is None else body
        if code is not None:
            content = error_answer(status, code).body
        answer = Answer(status, content, tuple(headers))
        return self._arm(HttpFault(endpoint=endpoint, answer=answer, **when))

    def reject(
        self, endpoint: Endpoint, status: int, reason: str | None = None, **when: Any
    ) -> HttpFault:
        """Refuse an upgrade, with the header that gives the reason."""
        name = "x-codex-rendezvous-rejection-reason"
        headers = [] if reason is None else [(name, reason)]
        return self.answer(endpoint, status, headers=headers, **when)

    def rewrite(
        self, endpoint: Endpoint | None, change: Callable[[dict[str, Any]], Any], **when: Any
    ) -> HttpFault:
        """Let the service do its work, and change the members of its answer."""
        return self._arm(HttpFault(endpoint=endpoint, rewrite=change, **when))

    def hang(self, endpoint: Endpoint | None, **when: Any) -> HttpFault:
        """Take the request and never answer."""
        return self._arm(HttpFault(endpoint=endpoint, manner=HttpFaultKind.HANG, **when))

    def cut(self, endpoint: Endpoint | None, **when: Any) -> HttpFault:
        """Do the work, then abort the connection in the middle of the answer's body."""
        return self._arm(HttpFault(endpoint=endpoint, manner=HttpFaultKind.CUT, **when))

    def garbage(self, endpoint: Endpoint | None, **when: Any) -> HttpFault:
        """Answer something that is not HTTP, and hang up."""
        return self._arm(HttpFault(endpoint=endpoint, manner=HttpFaultKind.GARBAGE, **when))

    def drip(
        self, endpoint: Endpoint | None, pause: float, *, piece: int = 1, **when: Any
    ) -> HttpFault:
        """Send the answer slowly. Not for upgrades."""
        return self._arm(
            HttpFault(
                endpoint=endpoint, manner=HttpFaultKind.DRIP, pause=pause, piece=piece, **when
            )
        )

    def take(self, endpoint: Endpoint | None, *, upgrade: bool = False) -> HttpFault | None:
        """The fault that hits this request, if any."""
        self._armed = [fault for fault in self._armed if not fault.is_spent]
        for fault in self._armed:
            matches = fault.endpoint == endpoint or (fault.endpoint is None and not upgrade)
            if matches and fault.strikes():
                return fault
        return None

    def clear(self) -> None:
        for fault in self._armed:
            fault.cancel()
        self._armed.clear()


def _payload_span(frame: bytes, relayed: Frame | None) -> tuple[int, int]:
    """Where the payload is; the whole frame if it has none."""
    if relayed is None or not relayed.payload:
        return 0, len(frame)
    start = frame.index(relayed.payload)
    return start, start + len(relayed.payload)


Change = Callable[[bytes, Frame | None], list[bytes]]


@dataclass(eq=False)
class FrameFault(Fault):
    """A fault of forwarded frames that match; None matches all."""

    direction: str | None = None
    kind: Kind | None = None
    stream_id: str | None = None
    where: Callable[[bytes], bool] | None = None
    change: Change | None = None
    swaps: bool = False
    seconds: float = 0.0
    # Of a swap: the frame that waits for its successor, and its stream.
    kept: bytes | None = None
    kept_for: tuple[str, str] | None = None

    def matches(self, direction: str, relayed: Frame | None, frame: bytes) -> bool:
        if self.direction is not None and direction != self.direction:
            return False
        if self.kind is not None and (relayed is None or relayed.kind is not self.kind):
            return False
        if self.stream_id is not None and (relayed is None or relayed.stream_id != self.stream_id):
            return False
        return self.where is None or self.where(frame)


class Outcome(NamedTuple):
    """The frames to forward instead of one, and the delay."""

    frames: list[bytes]
    seconds: float


class FrameFaults:
    """Faults of forwarded frames; selected by `direction`, `kind`, `stream_id`, `where`."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self.armed: list[FrameFault] = []

    def _arm(self, fault: FrameFault) -> FrameFault:
        if len(self.armed) >= FAULTS_ARMED:
            raise ValueError("too many faults")
        self.armed.append(fault)
        return fault

    def alter(self, change: Change, **match: Any) -> FrameFault:
        """Forward the frame that `change` returns."""
        return self._arm(FrameFault(change=change, **match))

    def drop(self, **match: Any) -> FrameFault:
        return self.alter(lambda _frame, _relayed: [], **match)

    def duplicate(self, **match: Any) -> FrameFault:
        return self.alter(lambda frame, _: [frame, frame], **match)

    def swap(self, **match: Any) -> FrameFault:
        """Send the frame after its successor in the same stream and direction."""
        return self._arm(FrameFault(swaps=True, **match))

    def truncate(self, keep: int | None = None, **match: Any) -> FrameFault:
        """Cut the frame off, at a random place unless `keep` is given."""

        def cut(frame: bytes, _: Frame | None) -> list[bytes]:
            return [frame[: self._random.randrange(len(frame)) if keep is None else keep]]

        return self.alter(cut, **match)

    def corrupt_payload(self, **match: Any) -> FrameFault:
        """Flip one bit of the payload."""

        def flip(frame: bytes, relayed: Frame | None) -> list[bytes]:
            return [self._flipped(frame, *_payload_span(frame, relayed))]

        return self.alter(flip, **match)

    def corrupt_header(self, **match: Any) -> FrameFault:
        """Flip one bit around the payload."""

        def flip(frame: bytes, relayed: Frame | None) -> list[bytes]:
            return [self._flipped(frame, 0, _payload_span(frame, relayed)[0] or len(frame))]

        return self.alter(flip, **match)

    def _flipped(self, frame: bytes, start: int, end: int) -> bytes:
        if start >= end:
            return frame
        changed = bytearray(frame)
        changed[self._random.randrange(start, end)] ^= 1 << self._random.randrange(8)
        return bytes(changed)

    def delay(self, seconds: float, **match: Any) -> FrameFault:
        """Hold back the frame and, to keep the order, all that follows to the same socket."""
        return self._arm(FrameFault(seconds=seconds, **match))

    def apply(self, direction: str, relayed: Frame | None, frame: bytes) -> Outcome:
        """The frames to forward for one that arrived."""
        frames, seconds = [frame], 0.0
        stream = (direction, relayed.stream_id if relayed is not None else "")
        for fault in self.armed:
            if fault.kept is not None and fault.kept_for == stream:
                frames.append(fault.kept)
                fault.kept = None
            elif fault.matches(direction, relayed, frame) and fault.strikes():
                if fault.swaps:
                    fault.kept, fault.kept_for = frame, stream
                    frames = []
                elif fault.change is not None:
                    changed = fault.change
                    frames = [piece for one in frames for piece in changed(one, relayed)]
                seconds = max(seconds, fault.seconds)
        self.armed = [f for f in self.armed if not f.is_spent or f.kept is not None]
        return Outcome(frames, seconds)

    def clear(self) -> None:
        for fault in self.armed:
            fault.cancel()
        self.armed.clear()


@dataclass
class Faults:
    """All faults of one service."""

    seed: int = 0
    http: HttpFaults = field(default_factory=HttpFaults)
    frames: FrameFaults = field(init=False)

    def __post_init__(self) -> None:
        self.frames = FrameFaults(Random(self.seed))

    def clear(self) -> None:
        """Disarm everything."""
        self.http.clear()
        self.frames.clear()
