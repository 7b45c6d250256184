"""A ProcessTable whose children are pipes, and a Reaper that is the test."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import cast

import msgspec

from exec_server.host.threads import ThreadPool
from exec_server.process.command import Command
from exec_server.process.orphans import Owner
from exec_server.process.process import Process
from exec_server.process.retention import SERVER_RETAINED_BYTES, RetentionBudget
from exec_server.process.spawn import Child, ExitReport
from exec_server.process.table import LaunchMode, ProcessTable, Reaper
from exec_server.protocol.decoding import Notice
from exec_server.protocol.process import ProcessId, Stream

COMMAND = Command(["cmd"], "/", {})
_FIRST_PID = 2**22 + 1  # above the largest pid of Linux


class FakeOrphans:
    """Records whose orphans are to be killed, among the owners that were expected."""

    def __init__(self) -> None:
        self.owners: list[Owner] = []
        self.killed: list[list[Owner]] = []

    def kill(self, has_ended: Callable[[Owner], bool]) -> None:
        self.killed.append([owner for owner in self.owners if has_ended(owner)])


class FakeReaper:
    """A Reaper that reports the exits which the test asks for."""

    def __init__(self) -> None:
        self.orphans = FakeOrphans()
        self.expected: set[Owner] = set()
        self.callbacks: dict[int, Callable[[int], None]] = {}

    def expect(self, owner: Owner) -> None:
        self.expected.add(owner)
        self.orphans.owners.append(owner)

    def unexpect(self, owner: Owner) -> None:
        self.expected.remove(owner)

    def watch(self, pid: int, owner: Owner, callback: Callable[[int], None]) -> None:
        self.callbacks[pid] = callback
        self.expected.remove(owner)

    def exit(self, pid: int, code: int = 0) -> None:
        self.callbacks.pop(pid)(code)


class World:
    """A table whose children are pipes: the test holds the child's ends."""

    def __init__(self, threads: ThreadPool, killed: list[int]) -> None:
        self.events: list[msgspec.Struct] = []
        self.reaper = FakeReaper()
        self.stdout: dict[ProcessId, int] = {}
        self.pids: dict[ProcessId, int] = {}
        self.owners: dict[ProcessId, Owner] = {}
        self.killed = killed
        self.cleaned_up: list[ProcessId] = []
        self.budget = RetentionBudget(SERVER_RETAINED_BYTES)
        self._threads = threads
        self.table = self.make_table()

    def make_table(self) -> ProcessTable:
        """The table of a further session of the same server."""
        reaper, threads = cast(Reaper, self.reaper), self._threads
        return ProcessTable(self._emit, reaper, threads, threads, retention_budget=self.budget)

    def _emit(self, notice: Notice[msgspec.Struct], params: msgspec.Struct) -> None:
        self.events.append(params)

    def mode(
        self, name: ProcessId, *, with_clean_up: bool = False, exit_report: ExitReport | None = None
    ) -> LaunchMode:
        def spawn(command: Command, owner: Owner) -> Child:
            reader, self.stdout[name] = os.pipe()
            os.set_blocking(reader, False)
            pid = self.pids[name] = _FIRST_PID + len(self.pids)
            self.owners[name] = owner
            clean_up = (lambda: self.cleaned_up.append(name)) if with_clean_up else None
            outputs: tuple[tuple[Stream, int], ...] = (("stdout", reader),)
            return Child(pid, None, outputs, clean_up, exit_report=exit_report)

        return LaunchMode(spawn)

    async def start(
        self,
        text: str,
        *,
        command: Command = COMMAND,
        with_clean_up: bool = False,
        exit_report: ExitReport | None = None,
    ) -> Process:
        name = ProcessId(text)
        self.table.reserve(name)
        mode = self.mode(name, with_clean_up=with_clean_up, exit_report=exit_report)
        await self.table.start(name, command, mode)
        process = self.table.get(name)
        assert process is not None
        return process

    async def finish(self, text: str) -> None:
        """End the output and the child, and wait for the close."""
        name = ProcessId(text)
        process = self.table.get(name)
        assert process is not None
        os.close(self.stdout.pop(name))
        self.reaper.exit(self.pids[name])
        while not process.closed:
            await process.next_event()

    def ids(self) -> list[str]:
        return [each.process_id for each in self.table.summaries()[0]]


Run = Callable[[Callable[[World], Awaitable[None]]], None]
