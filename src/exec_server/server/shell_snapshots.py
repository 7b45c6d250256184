"""ShellSnapshots: the states of login shells, captured once and restored in later starts.

A capture is a session process in a table of its own, with the command's sandbox. One that fails is
no error: the command runs as a login shell, and the failure is remembered.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
from msgspec.structs import replace

from exec_server.errors import ExecServerError, InvalidParams, InvalidRequest
from exec_server.host.event_loop import GuardedTasks
from exec_server.process.command import Command
from exec_server.process.shell_state import (
    SHELLS,
    ShellState,
    StateReader,
    capture_argv,
    restoring_argv,
)
from exec_server.process.table import LaunchMode, ProcessTable
from exec_server.protocol.decoding import Notice
from exec_server.protocol.process import (
    ExitedParams,
    OutputParams,
    ProcessId,
    ShellSnapshot,
    StartParams,
)
from exec_server.protocol.sandbox import External, Managed
from exec_server.server.session import Session

log = logging.getLogger(__name__)

# The reference's limits: of a scope in bytes, of the states of a session, of a capture.
SCOPE_BYTES = 256
MAX_STATES = 16
CAPTURE_SECONDS = 10.0
# Captures of one state that may fail, and the time between the end of one and the start of the
# next, as in the reference. Starts in between, and all starts after the last one, have no state.
CAPTURE_ATTEMPTS = 3
RETRY_SECONDS = 1.0
# The states of all sessions. Beyond it a further state is not kept.
TOTAL_BYTES = 64 * 1_048_576

# Starts a capture, whose params are given, in the table.
Launch = Callable[[StartParams], LaunchMode]


def check(params: StartParams) -> ShellSnapshot | None:
    """The snapshot that a start asks for; None if it does not apply. Raises InvalidParams."""
    snapshot = params.shell_snapshot
    if snapshot is None:
        return None
    if not 0 < len(snapshot.scope_id.encode("utf-8", "surrogatepass")) <= SCOPE_BYTES:
        raise InvalidParams(
            f"shell snapshot scope must be non-empty and at most {SCOPE_BYTES} bytes"
        )
    if len(params.argv) < 3 or params.argv[:2] != [snapshot.shell.path, "-lc"]:
        return None
    if snapshot.shell.name not in SHELLS:
        raise InvalidParams(f"shell snapshots are unsupported for shell `{snapshot.shell.name}`")
    # A detached process outlives its session, and another user has another shell. Functions and
    # aliases of a state may contain secrets that are masked in the environment.
    proxy = None if params.network_proxy is None else params.network_proxy.proxy
    if params.detach is not None or params.user is not None:
        return None
    return None if proxy is not None and proxy.credential_masking else snapshot


def restored(command: Command, shell: str, state: ShellState) -> Command:
    """The command of a request with the state of its shell, without start-up files."""
    argv = restoring_argv(shell, command.argv)
    return replace(command, argv=argv, shell_state=state.script)


class ShellSnapshots:
    """The states of all sessions. For the event loop."""

    def __init__(self) -> None:
        self._sessions: WeakKeyDictionary[Session, _SessionStates] = WeakKeyDictionary()

    async def state(
        self,
        session: Session,
        params: StartParams,
        tasks: GuardedTasks,
        launch: Launch,
        cancellation: asyncio.Future[None],
    ) -> ShellState | None:
        """The state for a start; the first one captures it, others wait. None if that failed.

        Raises InvalidRequest if the start is cancelled meanwhile; a capture for which no other
        start waits is then ended.
        """
        states = self._sessions.get(session)
        if states is None:
            states = self._sessions[session] = _SessionStates(session)
        used = sum(each.size for each in self._sessions.values())
        kept = states.get(_key(params), params, tasks, launch, TOTAL_BYTES - used)
        kept.waiting += 1
        try:
            # The capture belongs to the session: it goes on if this connection is lost.
            either: set[asyncio.Future[Any]] = {kept.state, cancellation}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            kept.waiting -= 1
        if not cancellation.done():
            return kept.state.result()
        if not kept.waiting:
            states.abandon(kept)
        raise InvalidRequest(f"process {params.process_id} start was cancelled")


def _key(params: StartParams) -> bytes:
    assert params.shell_snapshot is not None
    shell = params.shell_snapshot.shell
    parts = (params.shell_snapshot.scope_id, shell.name, shell.path, params.cwd)
    return msgspec.msgpack.encode((*parts, params.env_policy, params.sandbox), enc_hook=str)


class _KeptState:
    """A state that is being captured, or that is kept; None: the last capture has failed."""

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.waiting = 0  # starts
        self._attempts = 0
        self._failed_at = 0.0

    def begin(self) -> None:
        """Begin a capture, the first one or another."""
        self._attempts += 1
        self.state: asyncio.Future[ShellState | None]
        self.state = asyncio.get_running_loop().create_future()
        self.ended = asyncio.Event()  # the shell has printed its state, or is not needed any more

    def finish(self, state: ShellState | None, *, is_final: bool) -> None:
        """Keep the state, or the failure: for a while, or for good if it `is_final`."""
        if is_final:
            self._attempts = CAPTURE_ATTEMPTS
        self._failed_at = asyncio.get_running_loop().time()
        self.state.set_result(state)

    @property
    def is_due(self) -> bool:
        """Whether the next start captures the state, for the first time or again."""
        if not self._attempts:
            return True
        if not self.state.done() or self.state.result() is not None:
            return False
        passed = asyncio.get_running_loop().time() - self._failed_at
        return self._attempts < CAPTURE_ATTEMPTS and passed >= RETRY_SECONDS

    @property
    def size(self) -> int:
        state = self.state.result() if self.state.done() else None
        return 0 if state is None else state.size


class _SessionStates:
    """The states of one session, the least recently used first."""

    def __init__(self, session: Session) -> None:
        self._states: OrderedDict[bytes, _KeptState] = OrderedDict()
        # Each is ended by the last mark, its exit, its size, or because no start waits for it.
        self._captures: dict[ProcessId, tuple[StateReader, asyncio.Event]] = {}
        self._table: ProcessTable = session.make_captures(self._on_event)
        self._count = 0

    @property
    def size(self) -> int:
        return sum(each.size for each in self._states.values())

    def get(
        self, key: bytes, params: StartParams, tasks: GuardedTasks, launch: Launch, room: int
    ) -> _KeptState:
        kept = self._states.get(key)
        if kept is None:
            kept = self._states[key] = _KeptState(key)
            if len(self._states) > MAX_STATES:
                self._states.popitem(last=False)
        if kept.is_due:
            kept.begin()
            tasks.create_task(self._capture(kept, params, launch, room))
        self._states.move_to_end(key)
        return kept

    def abandon(self, kept: _KeptState) -> None:
        """End a capture for which no start waits; a later start begins another one."""
        if not kept.state.done():
            kept.ended.set()
            if self._states.get(kept.key) is kept:
                del self._states[kept.key]

    async def _capture(
        self, kept: _KeptState, params: StartParams, launch: Launch, room: int
    ) -> None:
        state, is_final = None, False
        try:
            state, is_final = await self._run(kept, params, launch)
            if state is not None and state.size > room:
                state, is_final = None, False
        except Exception:  # a defect here must not end other sessions
            log.exception("a capture failed")
        finally:
            kept.finish(state, is_final=is_final)

    async def _run(
        self, kept: _KeptState, params: StartParams, launch: Launch
    ) -> tuple[ShellState | None, bool]:
        """The state, and whether another capture would have the same result."""
        assert params.shell_snapshot is not None
        shell = params.shell_snapshot.shell
        mark = f"exec-server-{os.urandom(16).hex()}"  # a text that nothing else prints
        params = _capture_params(params, capture_argv(shell.name, shell.path, mark))
        reader = StateReader(shell.name, mark)
        self._count += 1
        process_id = ProcessId(str(self._count))
        self._captures[process_id] = reader, kept.ended
        command = Command(params.argv, params.cwd.native(), {}, arg0=params.arg0)
        try:
            self._table.reserve(process_id)
            await self._table.start(process_id, command, launch(params))
            async with asyncio.timeout(CAPTURE_SECONDS):
                await kept.ended.wait()
        except TimeoutError:
            log.info("the start-up files of %s take more than %d s", shell.path, CAPTURE_SECONDS)
        except ExecServerError as error:
            log.info("the state of %s cannot be captured: %s", shell.path, error)
        finally:
            del self._captures[process_id]
        if not reader.is_complete:
            self._table.terminate(process_id)
            return None, reader.is_too_large
        return reader.state(), True

    def _on_event(self, notice: Notice[msgspec.Struct], params: msgspec.Struct) -> None:
        """An event of a capture; later output of its children has no meaning."""
        if not isinstance(params, OutputParams | ExitedParams):
            return
        reader, ended = self._captures.get(params.process_id, (None, None))
        if reader is None or ended is None:
            return
        if isinstance(params, OutputParams) and params.stream == "stdout":
            reader.feed(params.chunk)
        if isinstance(params, ExitedParams) or reader.is_complete or reader.is_too_large:
            ended.set()


def _capture_params(params: StartParams, argv: list[str]) -> StartParams:
    """Capture params: no terminal, no input, no proxy, whose variables belong to one process."""
    sandbox = params.sandbox
    if params.enforce_managed_network and sandbox is not None:
        restricted: Managed | External = External(network="restricted")
        if isinstance(sandbox.permissions, Managed):
            restricted = replace(sandbox.permissions, network="restricted")
        sandbox = replace(sandbox, permissions=restricted)
    return replace(
        params,
        argv=argv,
        tty=False,
        tty_size=None,
        pipe_stdin=False,
        merge_stderr=False,
        network_proxy=None,
        managed_network=None,
        enforce_managed_network=False,
        sandbox=sandbox,
    )
