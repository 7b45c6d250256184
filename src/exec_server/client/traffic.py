"""Traffic: the calls of an environment, its tasks, and when it stops reading from the server.

Theory of operation. All answers and the output of all processes come on one connection, so when
output that nobody takes has filled its queue, reading has to stop altogether: that is how the
server, and at last the process, learns to wait. But somebody who takes no output because they
wait for an answer must get the answer, or they would wait for ever. So a full queue is excused,
and does not stop the reading, while its reader waits for an answer (see `parties`), while anybody
does if it has no reader yet, and, if its reader stands still for no reason that can be seen here,
after a while. What comes in through such a hole has a limit of its own, which the owner of the
queue sees to.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from exec_server.client.parties import Party, waiting_parties
from exec_server.client.session import ClientSession
from exec_server.errors import SessionLost
from exec_server.protocol.method import Call

# How long a full queue may stand still while somebody waits for an answer. A reader that is only
# slow takes something more often.
STILL_SECONDS: Final = 1.0

P = TypeVar("P")
R = TypeVar("R")
T = TypeVar("T")


class Traffic:
    """What the parts of an environment share."""

    def __init__(self, session: ClientSession, tasks: asyncio.TaskGroup) -> None:
        self.session = session
        self._tasks = tasks
        self._full: dict[object, Party | None] = {}
        self._still: set[object] = set()
        self._waiting = 0
        self._waiting_parties: Counter[Party] = Counter()
        self._holds = False
        self._has_moved = False
        self._watch: asyncio.TimerHandle | None = None
        self._is_closed = False

    async def call(self, call: Call[P, R], params: P, *, is_retryable: bool = False) -> R:
        """Ask the server; as `ClientSession.call`, and nothing holds up the answer."""
        parties = self.wait_begins()
        try:
            return await self.session.call(call, params, is_retryable=is_retryable)
        finally:
            self.wait_ends(parties)

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Begin something that goes on whoever is cancelled, until its future is.

        The future has the result; nobody needs to ask for it.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        if self._is_closed:
            work.close()
            future.set_exception(SessionLost("the environment was closed"))
            future.exception()  # nobody has to ask
            return future
        task = self._tasks.create_task(_settle(work, future))
        future.add_done_callback(lambda _: task.cancel())
        task.add_done_callback(lambda _: work.close())  # it may never have begun
        return future

    def close(self) -> None:
        """Begin nothing more."""
        self._is_closed = True
        if self._watch is not None:
            self._watch.cancel()

    # ---- when to stop reading ---------------------------------------------------------

    def queue_full(self, queue: object, reader: Party | None) -> None:
        """Nobody takes what is in this queue fast enough; its reader is who took some last."""
        if queue not in self._full or self._full[queue] is not reader:
            self._full[queue] = reader
            self._weigh()

    def queue_moves(self, queue: object, reader: Party) -> None:
        """Something was taken from a queue that is perhaps full."""
        if queue in self._full:
            self._full[queue] = reader
            self._still.discard(queue)
            self._has_moved = True
            self._weigh()

    def queue_free(self, queue: object) -> None:
        """There is room in it again, or nobody cares any more."""
        if queue in self._full:
            del self._full[queue]
            self._still.discard(queue)
            self._weigh()

    def wait_begins(self) -> tuple[Party, ...]:
        """Somebody waits for something that only the server can bring; goes to `wait_ends`."""
        parties = waiting_parties()
        self._waiting += 1
        self._waiting_parties.update(parties)
        self._weigh()
        return parties

    def wait_ends(self, parties: tuple[Party, ...]) -> None:
        self._waiting -= 1
        self._waiting_parties.subtract(parties)
        for party in parties:
            if not self._waiting_parties[party]:
                del self._waiting_parties[party]
        self._weigh()

    def _weigh(self) -> None:
        """Hold the reading or go on with it, as things are now."""
        holds = any(not self._is_excused(queue) for queue in self._full)
        if holds != self._holds:
            self._holds = holds
            if holds:
                self.session.hold()
            else:
                self.session.release()
        if holds and self._waiting and self._watch is None:
            self._has_moved = False
            loop = asyncio.get_running_loop()
            self._watch = loop.call_later(STILL_SECONDS, self._look_again)

    def _is_excused(self, queue: object) -> bool:
        reader = self._full[queue]
        if reader is None:
            return self._waiting > 0
        return reader in self._waiting_parties or queue in self._still

    def _look_again(self) -> None:
        """Somebody waited while reading was held: has anybody taken output meanwhile?"""
        self._watch = None
        if self._holds and self._waiting and not self._has_moved:
            self._still.update(self._full)
        self._weigh()


async def _settle(work: Coroutine[Any, Any, T], future: asyncio.Future[T]) -> None:
    try:
        result = await work
    except asyncio.CancelledError:
        future.cancel()
        raise
    except Exception as error:  # an edge: it belongs to whoever asks the future
        if not future.done():
            future.set_exception(error)
            future.exception()  # nobody has to
    else:
        if not future.done():
            future.set_result(result)
