"""ProcessTable: the processes of one session, their start, retention and end."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec

from exec_server.errors import InternalError, InvalidRequest, os_error_text
from exec_server.host import libc
from exec_server.host.event_loop import guarded_call
from exec_server.host.threads import ThreadPool
from exec_server.process.command import Command
from exec_server.process.orphans import Orphans, Owner
from exec_server.process.output import SESSION_RECENT_BYTES, Charges, RecentOutputBudget
from exec_server.process.process import DenialCheck, Emit, Process
from exec_server.process.retention import RetentionBudget
from exec_server.process.spawn import Child, ExitReport, spawn
from exec_server.protocol.decoding import Notice
from exec_server.protocol.process import ProcessId, ProcessInfo

ExitCallback = Callable[[int], None]
_SIGNAL_RECORD_BYTES = 128 * 32

# A closed process stays readable this long, as on the reference: a client whose connection was lost
# tries for 45 s to come back and then reads the rest of the output.
RETENTION_SECONDS = 80.0
# Processes of one session that have not closed. Above this a start is refused.
MAX_LIVE = 1024
# Closed processes of one session, and their memory. Above either limit the process that closed
# first is forgotten before its retention ends. A client that starts 100 commands a second has 8,000
# of them, and each may take 8 KiB. All sessions together have a limit in process.retention.
MAX_CLOSED = 8192
CLOSED_BYTES = 64 * 1_048_576
# Entries of one process/list: all live processes, and as many closed ones. With the longest ids
# and words, every character escaped, this is just below the 64 MiB limit of a message.
MAX_LISTED = 2 * MAX_LIVE
# When a connection is lost, its processes are charged for this long before other clients' events;
# `server.connection` has the same limit for requests.
BURST_SECONDS = 0.002


class Reaper:
    """Reaps all children, also orphans, by one signalfd, and reports exit codes of watched ones."""

    def __init__(self) -> None:
        self.orphans = Orphans()
        self._descriptor = libc.child_signal_descriptor()
        self._watched: dict[int, ExitCallback] = {}
        # Exit codes of children that ended before `watch`. Only filled while a start is under
        # way, so it holds no more than the children that ended during those starts.
        self._early_exits: dict[int, int] = {}
        self._starting = 0

    def open(self) -> None:
        asyncio.get_running_loop().add_reader(self._descriptor, self._on_signal)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        self.orphans.close()

    def expect(self, owner: Owner) -> None:
        """Announce a start: exits are remembered until `watch` or `unexpect` is called."""
        self._starting += 1
        self.orphans.expect(owner)

    def unexpect(self, owner: Owner) -> None:
        """Withdraw an `expect`, because the start failed."""
        self.orphans.ended(owner)
        self._end_start()

    def watch(self, pid: int, owner: Owner, callback: ExitCallback) -> None:
        """Call back once when the child has ended, not before the loop's next iteration."""
        code = self._early_exits.pop(pid, None)
        if code is not None and _is_reaped(pid):
            self.orphans.ended(owner)
            asyncio.get_running_loop().call_soon(callback, code)
        else:
            self.orphans.started(owner, pid)
            self._watched[pid] = callback
        self._end_start()

    def _end_start(self) -> None:
        self._starting -= 1
        if not self._starting:
            self._early_exits.clear()

    def _on_signal(self) -> None:
        try:
            os.read(self._descriptor, _SIGNAL_RECORD_BYTES)
        except BlockingIOError:
            pass
        for pid, status in self.orphans.reap():
            code = libc.exit_code(status)
            callback = self._watched.pop(pid, None)
            if callback is not None:
                guarded_call(callback, code)  # the exits of other commands follow
            elif self._starting:
                self._early_exits[pid] = code


def _is_reaped(pid: int) -> bool:
    # The remembered exit may be that of an orphan whose pid was reused for this child, which
    # still runs: then waitid finds the child.
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


class LaunchMode(msgspec.Struct, frozen=True):
    """How to start a command, and what to do at its end."""

    spawn: Callable[[Command, Owner], Child] | None = None  # None: unconfined
    check_denial: DenialCheck | None = None
    # Called once: the process has closed, or was not started.
    on_closed: Callable[[], None] | None = None


class TableLimits(msgspec.Struct, frozen=True):
    """The limits of a table that is not that of a session."""

    live: int
    closed: int
    closed_bytes: int
    retention_seconds: float


class TableObserver(Protocol):
    """Learns of each process that enters or leaves a table."""

    def started(self, process: Process) -> None:
        """A start has succeeded, perhaps after its request was abandoned."""
        ...

    def start_failed(self, process_id: ProcessId) -> None: ...

    def forgotten(self, process: Process) -> None:
        """A closed process has left the table."""
        ...


def _discard(notice: Notice[msgspec.Struct], params: msgspec.Struct) -> None:
    """Ignore an event of a process whose start has failed."""


class ProcessTable:
    """The processes of one session, by the ids that its client chose; or detached ones by name."""

    def __init__(
        self,
        emit: Emit,
        reaper: Reaper,
        spawn_threads: ThreadPool,
        cleanup_threads: ThreadPool,
        *,
        limits: TableLimits | None = None,  # None: those of a session
        retention_seconds: float | None = None,  # of a session; None: RETENTION_SECONDS
        observer: TableObserver | None = None,
        recent_budget: RecentOutputBudget | None = None,  # of the server
        retention_budget: RetentionBudget | None = None,  # of the server
    ) -> None:
        self._emit = emit
        if retention_seconds is None:
            retention_seconds = RETENTION_SECONDS
        self._limits = limits or TableLimits(MAX_LIVE, MAX_CLOSED, CLOSED_BYTES, retention_seconds)
        self._observer = observer
        # A detached process has several readers or none, and none of them is an early client.
        self._recent_budget = (
            RecentOutputBudget(SESSION_RECENT_BYTES, recent_budget) if limits is None else None
        )
        # The limits of another owner than a session are those of the whole server already.
        self._charges = (
            Charges(retention_budget.open_account(self._evict))
            if limits is None and retention_budget is not None
            else None
        )
        self._uncharged: list[Process] = []  # live ones, just after the connection was lost
        self._is_connected = True
        self._reaper = reaper
        self._spawn_threads = spawn_threads
        self._cleanup_threads = cleanup_threads
        self._loop = asyncio.get_running_loop()
        self._processes: dict[ProcessId, Process] = {}
        self._starting: dict[ProcessId, bool] = {}  # True once a terminate has cancelled it
        # Of the starts that wait for something before they begin.
        self._cancellations: dict[ProcessId, asyncio.Future[None]] = {}
        # Those that have not closed. Pausing passes over thousands of closed ones otherwise.
        self._live: dict[Process, None] = {}
        # The times at which closed ones are forgotten, in the order of closing, and the one timer.
        self._closed: dict[Process, float] = {}
        self._expiry: asyncio.TimerHandle | None = None
        self._keeps_closed = False  # until the client is back
        self._closed_sizes: dict[Process, int] = {}  # as counted in the sum
        self._closed_bytes = 0
        self._paused = False
        self._ended = False
        self._is_terminating = False  # each process dies as soon as it has started
        self._has_started = False  # a process, successfully or not

    def get(self, process_id: ProcessId) -> Process | None:
        return self._processes.get(process_id)

    @property
    def is_empty(self) -> bool:
        """Whether there is no process: none starting, running or kept after its end."""
        return not (self._processes or self._starting)

    def is_starting(self, process_id: ProcessId) -> bool:
        return process_id in self._starting

    def reserve(self, process_id: ProcessId) -> None:
        """Reserve an id for a start; raises InvalidRequest if it is in use or at the limit."""
        if process_id in self._processes or process_id in self._starting:
            raise InvalidRequest(f"process {process_id} already exists")
        if self.live_count >= self._limits.live:
            raise InvalidRequest(f"at most {self._limits.live} processes may run per session")
        self._starting[process_id] = False

    def cancellation(self, process_id: ProcessId) -> asyncio.Future[None]:
        """A future for a reserved id, done once a terminate cancels the start."""
        return self._cancellations.setdefault(process_id, self._loop.create_future())

    def can_cancel(self, process_id: str | None) -> bool:
        """Whether a start waits for something, and a terminate cancels it at once."""
        return process_id in self._cancellations

    def release(self, process_id: ProcessId) -> None:
        """Give up a reservation: there is no start."""
        del self._starting[process_id]
        self._cancellations.pop(process_id, None)

    def _cancel_start(self, process_id: ProcessId) -> None:
        self._starting[process_id] = True
        cancellation = self._cancellations.pop(process_id, None)
        if cancellation is not None:
            cancellation.set_result(None)

    @property
    def live_count(self) -> int:
        """The number of processes that start, or that have not closed."""
        return len(self._live) + len(self._starting)

    async def start(self, process_id: ProcessId, command: Command, launch_mode: LaunchMode) -> None:
        """Start a command under a reserved id.

        No output is read before the caller's next await, so its response precedes every
        notification.
        """
        self._has_started = True
        if self._cancellations:
            self._cancellations.pop(process_id, None)
        owner = Owner(self)
        self._reaper.expect(owner)
        future = self._spawn_threads.run(launch_mode.spawn or spawn, command, owner)
        try:
            child = await asyncio.shield(future)
        except asyncio.CancelledError:
            # The connection is lost but the start goes on: the process belongs to the session.
            future.add_done_callback(
                lambda done: self._on_detached_start(process_id, command, done, owner, launch_mode)
            )
            raise
        except Exception as error:
            self._on_failed_start(process_id, owner, launch_mode)
            if isinstance(error, OSError):
                raise InternalError(os_error_text(error)) from error
            raise
        self._add(process_id, command, child, owner, launch_mode)

    def _on_detached_start(
        self,
        process_id: ProcessId,
        command: Command,
        done: asyncio.Future[Child],
        owner: Owner,
        launch_mode: LaunchMode,
    ) -> None:
        """Finish a start whose request was cancelled with its connection."""
        if done.exception() is not None:
            self._on_failed_start(process_id, owner, launch_mode)
            return
        try:
            self._add(process_id, command, done.result(), owner, launch_mode)
        except InvalidRequest:
            pass  # terminated meanwhile, and no request is left to answer

    def _on_failed_start(
        self, process_id: ProcessId, owner: Owner, launch_mode: LaunchMode
    ) -> None:
        self._reaper.unexpect(owner)
        del self._starting[process_id]
        self._report_failed_start(process_id, launch_mode)

    def _report_failed_start(self, process_id: ProcessId, launch_mode: LaunchMode) -> None:
        if launch_mode.on_closed is not None:
            launch_mode.on_closed()
        if self._observer is not None:
            self._observer.start_failed(process_id)

    def _add(
        self,
        process_id: ProcessId,
        command: Command,
        child: Child,
        owner: Owner,
        launch_mode: LaunchMode,
    ) -> None:
        if self._starting.pop(process_id) or self._ended:
            # The start fails, so the client gets no event of the child and its id is free.
            process = Process(
                process_id, command, child, owner, _discard, check_denial=launch_mode.check_denial
            )
            self._watch(process, child)
            self._terminate(process)
            self._report_failed_start(process_id, launch_mode)
            raise InvalidRequest(f"process {process_id} start was cancelled")
        process = Process(
            process_id,
            command,
            child,
            owner,
            self._emit,
            check_denial=launch_mode.check_denial,
            recent_budget=self._recent_budget,
        )
        process.on_closed = partial(self._on_closed, launch_mode.on_closed)
        self._processes[process_id] = process
        self._live[process] = None
        if not self._is_connected and self._charges is not None:
            process.log.charge(self._charges)
        if not self._paused:
            process.resume_reading()
        self._watch(process, child)
        if self._observer is not None:
            self._observer.started(process)
        if self._is_terminating:
            self._terminate(process)

    def _watch(self, process: Process, child: Child) -> None:
        """Pass the exit of the child to its process, after the child's clean-up if it has one."""
        report, clean_up = child.exit_report, child.clean_up

        def on_exit(code: int) -> None:
            if process.has_ended:
                return  # it was reported before
            process.has_ended = True
            if report is not None:
                self._loop.remove_reader(report.fileno())
            if clean_up is None:
                process.on_exit(code)
            else:
                done = self._cleanup_threads.run(clean_up)
                done.add_done_callback(lambda _: process.on_exit(code))

        def on_report(report: ExitReport) -> None:
            code = report.read()
            if code is not None:
                on_exit(code)
            elif report.is_at_end:
                self._loop.remove_reader(report.fileno())  # the reaper reports the exit

        self._reaper.watch(process.pid, process.owner, on_exit)
        if report is not None:
            self._loop.add_reader(report.fileno(), on_report, report)

    def summaries(self) -> tuple[list[ProcessInfo], bool]:
        """The processes in order of their start, and whether closed ones are left out."""
        surplus = max(0, len(self._processes) - MAX_LISTED)
        left_out = set(itertools.islice(self._closed, surplus))  # those that closed first
        kept = [each.summary() for each in self._processes.values() if each not in left_out]
        return kept, bool(left_out)

    def pause_reading(self) -> None:
        """Leave all output in the pipes: the client does not read."""
        self._paused = True
        for process in self._live:
            process.pause_reading()

    def resume_reading(self) -> None:
        self._paused = False
        for process in self._live:
            process.resume_reading()

    def connection_opened(self) -> None:
        """The client is there: recent output is kept for it."""
        self._is_connected = True
        if self._keeps_closed:
            self._keeps_closed = False
            expiry = self._loop.time() + self._limits.retention_seconds
            self._closed = dict.fromkeys(self._closed, expiry)
            if self._closed:
                self._expire()
        if self._recent_budget is not None:
            self._recent_budget.is_open = True
        self._uncharged.clear()
        for process in self._live:
            process.log.discharge()

    def connection_lost(self, *, keeps_closed: bool = False) -> None:
        """The client is away: its output takes memory of the server's budget.

        With `keeps_closed` no process is forgotten because of its age until the client is back.
        """
        self._is_connected = False
        self._keeps_closed = keeps_closed
        if keeps_closed and self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        if self._recent_budget is not None:
            self._recent_budget.is_open = False
        self._uncharged = list(self._live)
        self._charge_some()

    def _charge_some(self) -> None:
        """Charge the output of live processes, and of the rest after the events of other clients.

        Output that exceeds the budget is dropped, which takes long if it consists of small chunks.
        """
        until = self._loop.time() + BURST_SECONDS
        while self._uncharged and self._charges is not None:
            process = self._uncharged.pop()
            if not process.closed:
                process.log.charge(self._charges)
            if self._loop.time() >= until:
                self._loop.call_soon(self._charge_some)
                break

    def terminate(self, process_id: ProcessId) -> bool:
        """Kill a process with all its descendants; True if it was running."""
        if process_id in self._starting:
            self._cancel_start(process_id)
            return True
        process = self._processes.get(process_id)
        return process is not None and self._terminate(process)

    def _terminate(self, process: Process) -> bool:
        running = process.terminate()
        self._kill_orphans(lambda owner: owner is process.owner)
        return running

    def terminate_all(self) -> None:
        """Kill all processes, and each later one as soon as it has started; they stay listed."""
        self._is_terminating = True
        for process in self._live:
            process.terminate()
        if self._has_started:
            self._kill_orphans(self._is_owner)

    def _is_owner(self, owner: Owner) -> bool:
        return owner.session is self

    def _kill_orphans(self, has_ended: Callable[[Owner], bool]) -> asyncio.Future[None]:
        """Kill orphans of ended commands, not in a start thread, which can hang on a dead disk."""
        return self._cleanup_threads.run(self._reaper.orphans.kill, has_ended)

    def _on_closed(self, on_closed: Callable[[], None] | None, process: Process) -> None:
        if on_closed is not None:
            on_closed()
        del self._live[process]
        process.log.discharge()
        limits, size = self._limits, process.memory_bytes()
        while self._closed and (
            len(self._closed) >= limits.closed or self._closed_bytes + size > limits.closed_bytes
        ):
            self._forget(next(iter(self._closed)))
        self._closed[process] = self._loop.time() + limits.retention_seconds
        if self._expiry is None and not self._keeps_closed:
            self._expiry = self._loop.call_later(limits.retention_seconds, self._expire)
        self._closed_sizes[process] = size
        self._closed_bytes += size
        if self._charges is not None:
            self._charges.account.add(size)

    def _evict(self) -> None:
        """Free memory: forget the process that closed first, or drop some output of a live one."""
        if self._closed:
            self._forget(next(iter(self._closed)))
        elif self._charges is not None:
            self._charges.give_back()

    def _expire(self) -> None:
        """Forget the processes whose retention has ended, and wait for the next one."""
        self._expiry = None
        now = self._loop.time()
        while self._closed:
            process, expiry = next(iter(self._closed.items()))
            if expiry > now:
                self._expiry = self._loop.call_later(expiry - now, self._expire)
                return
            self._forget(process)

    def forget(self, process_id: ProcessId) -> bool:
        """Forget a process before the end of its retention; False if it has not closed."""
        process = self._processes.get(process_id)
        if process is None or process not in self._closed:
            return False
        self._forget(process)
        return True

    def _forget(self, process: Process) -> None:
        del self._closed[process]
        size = self._closed_sizes.pop(process)
        self._closed_bytes -= size
        if self._charges is not None:
            self._charges.account.remove(size)
        process.release_recent_output()
        del self._processes[process.id]
        if self._observer is not None:
            self._observer.forgotten(process)

    async def end(self) -> None:
        """Kill and forget all processes of the session; returns when all are dead."""
        self._ended = True
        self._uncharged.clear()
        for process_id in self._starting:
            self._cancel_start(process_id)
        processes = list(self._processes.values())
        for process in processes:
            process.terminate()
        if self._has_started:  # otherwise there is no orphan to look for
            await asyncio.shield(self._kill_orphans(self._is_owner))
        for process in processes:
            while process.exit_code is None:
                await process.next_event()
            process.abandon_output()
        for process in processes:
            process.release_recent_output()
        if self._expiry is not None:
            self._expiry.cancel()
        if self._charges is not None:
            self._charges.account.remove(self._charges.account.size)
        self._live.clear()
        self._closed.clear()
        self._closed_sizes.clear()
        self._processes.clear()
