"""PendingCall: a request of the client until its answer. CallQueue: those that wait to be sent."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable

from msgspec import Raw

from exec_server.client.engine.messages import BinaryBody
from exec_server.errors import ExecServerError
from exec_server.net.stream import BinaryStream, MessageStream
from exec_server.protocol import binary


class PendingCall:
    """A request that is queued or sent; cancelling its future discards the answer.

    A call that `is_retryable` may be sent again if its answer is lost. One that `is_urgent` is
    sent before others. One that `is_bound` names something that ends with the session.
    `on_answer` is called when the result is received, before the next message is: the caller's task
    runs later.
    """

    __slots__ = (
        "body",
        "future",
        "is_bound",
        "is_retryable",
        "is_urgent",
        "on_answer",
        "times_sent",
    )

    def __init__(
        self,
        body: bytes,
        *,
        is_retryable: bool,
        is_urgent: bool = False,
        is_bound: bool = False,
        on_answer: Callable[[], None] | None = None,
    ) -> None:
        self.body = body
        self.is_retryable = is_retryable
        self.is_urgent = is_urgent
        self.is_bound = is_bound
        self.on_answer = on_answer
        self.times_sent = 0
        self.future: asyncio.Future[Raw] = asyncio.get_running_loop().create_future()

    def send(self, stream: MessageStream, number: int) -> None:
        """Send the request with this id; data needs a stream that carries binary messages."""
        text = b'{"id":%d,%b' % (number, self.body)
        if isinstance(self.body, BinaryBody):
            assert isinstance(stream, BinaryStream)
            stream.send_binary(binary.head(text), self.body.data)
        else:
            stream.send(text)
        self.times_sent += 1
        if not self.is_retryable:
            self.body = b""  # it may be large, and the answer may take long

    @property
    def fits_any_session(self) -> bool:
        """Whether the call can be made in another session than the one it was meant for."""
        return self.times_sent == 0 and not self.is_bound

    def resolve(self, result: Raw) -> None:
        if not self.future.done():
            self.future.set_result(result)
            if self.on_answer is not None:
                self.on_answer()

    def fail(self, error: ExecServerError) -> None:
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # the caller may be cancelled before it retrieves this


class InitializeCall(PendingCall):
    """`initialize`, whose answer is processed as soon as it is received."""

    __slots__ = ("_accept",)

    def __init__(self, body: bytes, accept: Callable[[Raw], None]) -> None:
        super().__init__(body, is_retryable=False)
        self._accept = accept

    def resolve(self, result: Raw) -> None:
        try:
            self._accept(result)
        except ExecServerError as error:
            self.fail(error)
        else:
            super().resolve(result)


class CallQueue:
    """Calls that wait to be sent, in order; urgent ones are first."""

    def __init__(self) -> None:
        self._calls: OrderedDict[PendingCall, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: PendingCall) -> None:
        self._calls[call] = None
        if call.is_urgent:
            self._calls.move_to_end(call, last=False)

    def put_back(self, calls: Iterable[PendingCall]) -> None:
        """Queue calls that were sent in this order before all others."""
        for call in reversed(list(calls)):
            self._calls[call] = None
            self._calls.move_to_end(call, last=False)

    @property
    def is_urgent(self) -> bool:
        """Whether the first call is urgent."""
        return next(iter(self._calls)).is_urgent

    def pop(self) -> PendingCall:
        """Take the first call."""
        return self._calls.popitem(last=False)[0]

    def discard(self, call: PendingCall) -> None:
        """Remove a call that is cancelled, if it is still here."""
        self._calls.pop(call, None)

    def fail(self, error: ExecServerError, *, keep_movable: bool = False) -> None:
        """Fail all calls, or all except those that can be made in another session."""
        calls, self._calls = self._calls, OrderedDict()
        for call in calls:
            if keep_movable and call.fits_any_session:
                self._calls[call] = None
            else:
                call.fail(error)
