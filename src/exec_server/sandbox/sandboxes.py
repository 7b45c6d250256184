"""Confinement on Linux: from a `sandbox` object to a worker or a confined command."""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Literal, TypeVar

import msgspec

from exec_server.core.command import Command
from exec_server.core.processes import Judge, Start
from exec_server.core.spawn import Child, Streams, check_directory, encoded
from exec_server.errors import InternalError, RpcError, rpc_error_from_os
from exec_server.protocol import files
from exec_server.protocol.method import Call
from exec_server.protocol.process import Chunk
from exec_server.protocol.sandbox import Denial, Sandbox
from exec_server.sandbox import globs, means, policy
from exec_server.sandbox.denial import find, judge
from exec_server.sandbox.disk import HostDisk
from exec_server.sandbox.freshness import Freshness, Mounts, Pins
from exec_server.sandbox.launcher import Launcher
from exec_server.sandbox.layout import lay_out, real_globs
from exec_server.sandbox.means import BEST_MEANS, Launched, Means, StaleOrder, launch, tell
from exec_server.sandbox.orders import Order, Program
from exec_server.sandbox.placeholders import Placeholder, Placeholders, Remember
from exec_server.sandbox.plan import Policy, View
from exec_server.sandbox.policy import Surroundings
from exec_server.sandbox.spares import Init, Spares
from exec_server.sandbox.view import ProcMount
from exec_server.sandbox.worker import Worker
from exec_server.sandbox.workers import WorkerPool

log = logging.getLogger(__name__)
T = TypeVar("T")
CleanUp = Callable[[], None]

# A tree that is rebuilt faster than a view of it cannot be confined; each attempt takes
# milliseconds.
_ATTEMPTS: Final = 8
# Clients send the same few objects with every request.
_COMPILED: Final = 256
_LEGACY: Final = "useLegacyLandlock is not supported: it would confine less than was asked for"


class Sandboxes:
    """All that confines on behalf of one server. Any thread may call anything."""

    def __init__(self, variables: Mapping[str, str], remember: Remember) -> None:
        self._launcher = Launcher(variables)
        self._mounts = Mounts()
        self._pins = Pins()
        self._placeholders = Placeholders(remember)
        self._tmpdir = variables.get("TMPDIR")
        self._means = BEST_MEANS
        self._means_lock = threading.Lock()
        self._compiled: OrderedDict[bytes, FilePolicy | None] = OrderedDict()
        self.workers = WorkerPool(self._build_worker)
        self.spares = Spares(self._build_init)

    def close(self) -> None:
        """End the workers and the launcher. Commands end with their sessions."""
        self.spares.close()
        self.workers.close()
        self._launcher.close()
        self._mounts.close()

    def drop_idle(self) -> None:
        """End what nobody has needed for a while."""
        self.workers.drop_idle()
        self.spares.drop_idle()

    def _confined(self, order: Callable[[Means], Order], *, network: bool) -> Launched:
        """Launch what is ordered by the best means. Blocking.

        The best ones are taken to work until they fail: finding out takes longer than to try.
        """
        with self._means_lock:
            found = self._means
        best = order(found)
        try:
            return launch(self._launcher, found.namespaces(network=network), best)
        except (InternalError, OSError) as error:
            if isinstance(error, StaleOrder):
                raise
        with self._means_lock:
            self._means = found = means.find_means(self._launcher)
            if found.refusal is not None:
                self._means = BEST_MEANS  # the reason may pass: try again next time
                raise InternalError(
                    f"this machine cannot confine what was asked to be confined: {found.refusal}; "
                    "nothing was done (`exec-server sandbox check` says more)"
                )
        return launch(self._launcher, found.namespaces(network=network), order(found))

    # ---- files ------------------------------------------------------------------------

    def for_files(self, sandbox: Sandbox, *, reading: bool) -> FilePolicy | None:
        """The policy of a file operation; None if it does not limit files."""
        key = msgspec.msgpack.encode(sandbox, enc_hook=_as_uri) + (b"r" if reading else b"w")
        try:
            self._compiled.move_to_end(key)
            return self._compiled[key]
        except KeyError:
            pass
        compiled = self._compile(sandbox, reading=reading)
        self._compiled[key] = compiled
        if len(self._compiled) > _COMPILED:
            self._compiled.popitem(last=False)
        return compiled

    def _compile(self, sandbox: Sandbox, *, reading: bool) -> FilePolicy | None:
        surroundings = _surroundings(self._tmpdir, None)
        compiled = policy.compile_policy(sandbox, surroundings, for_process=False, reading=reading)
        if compiled is None or compiled.rules is None:
            return None
        direct = reading and policy.reads_everything(compiled)
        return FilePolicy(self, compiled, direct, is_legacy=sandbox.use_legacy_landlock)

    def _build_worker(self, compiled: Policy) -> tuple[Worker, Freshness]:
        disk = HostDisk(sees_placeholders=True)

        def build() -> tuple[Worker, Freshness]:
            view = lay_out(compiled, disk)
            _check_view(view)
            patterns = real_globs(compiled, disk)
            freshness = Freshness(view, self._mounts, self._pins, sees_placeholders=True)

            def order(found: Means) -> Order:
                if patterns and not found.own_proc:
                    raise InternalError("deny patterns need a private /proc, which is refused here")
                proc: ProcMount = "own" if found.own_proc else "none"
                return Order("worker", view, "restricted", proc, patterns)

            try:
                _, control = self._confined(order, network=False)
            except BaseException:
                freshness.close()
                raise
            return Worker(control), freshness

        return _repeatedly(build)

    # ---- commands ---------------------------------------------------------------------

    def spawn(self, compiled: Policy, command: Command, tag: int) -> Child:
        """Start a command confined by the policy; like core.spawn.spawn otherwise. Blocking."""
        encoded(command)  # says what cannot be passed to any program
        check_directory(command.cwd)
        # Patterns are searched for each command anew, so nothing can be built ahead.
        ahead = compiled.rules is not None and not compiled.globs
        return self.spawn_on(Streams.make(command), compiled, command, tag, ahead=ahead)

    def spawn_on(
        self,
        streams: Streams,
        compiled: Policy,
        command: Command,
        tag: int,
        *,
        ahead: bool = False,
    ) -> Child:
        """Start a command on streams that are there, which are released. Blocking.

        With `ahead` a sandbox for the next command is built meanwhile.
        """
        started = False
        try:
            standard, terminal = _standard_streams(command, streams)

            def start() -> tuple[int, CleanUp | None]:
                init = self._take_init(compiled, terminal, ahead=ahead)
                return self._start(init, command, terminal, tag, standard)

            pid, clean_up = _repeatedly(start)
            started = True
        finally:
            streams.release(started=started)
        return Child(pid, streams.stdin, streams.outputs, clean_up)

    def _take_init(self, compiled: Policy, terminal: str | None, *, ahead: bool) -> Init:
        """An init in the view of the policy: one that was built ahead, or a new one."""
        # An empty root has to be built around its terminal.
        needs_own = terminal is not None and policy.access(compiled, "/") is None
        init = None if needs_own else self.spares.take(compiled)
        if init is None:
            init = self._build_init(compiled, terminal if needs_own else None)
        if ahead:
            self.spares.want(compiled)
        return init

    def _start(
        self, init: Init, command: Command, terminal: str | None, tag: int, standard: list[int]
    ) -> tuple[int, CleanUp | None]:
        """Have an init run the command; returns its pid and what is to be done afterwards."""
        held: list[Placeholder] = []
        try:
            try:
                held = self._placeholders.hold(init.missing)
            except (FileExistsError, FileNotFoundError, NotADirectoryError) as error:
                raise StaleOrder(str(error)) from error
            covers = tuple(placeholder.step for placeholder in held)
            program = Program(
                command.argv, command.arg0, command.cwd, command.env, terminal, tag, covers
            )
            tell(init.control, program, standard)
        except BaseException:
            self._placeholders.release(held)
            raise
        finally:
            init.close()
        return init.pid, partial(self._placeholders.release, held) if held else None

    def _build_init(self, compiled: Policy, terminal: str | None = None) -> Init:
        """An init in the view of the policy; without limits on files there is no view."""
        if compiled.rules is None:
            unlimited = Order("init", None, compiled.network, "inherited")
            return Init(*launch(self._launcher, 0, unlimited), (), None)
        disk = HostDisk(sees_placeholders=False)
        denied = globs.scan(real_globs(compiled, disk)) if compiled.globs else []
        view = lay_out(compiled, disk, denied)
        _check_view(view)
        # New files may match a pattern at any time: such a view is never good for later use.
        freshness = (
            None
            if compiled.globs
            else Freshness(view, self._mounts, self._pins, sees_placeholders=False)
        )

        def order(found: Means) -> Order:
            proc: ProcMount = "own" if found.own_proc else "inherited"
            return Order("init", view, compiled.network, proc, terminal=terminal)

        try:
            launched = self._confined(order, network=compiled.network == "restricted")
            return Init(*launched, view.missing, freshness)
        except BaseException:
            if freshness is not None:
                freshness.close()
            raise

    def for_process(self, sandbox: Sandbox, cwd: str, env: dict[str, str]) -> Start:
        """How to start a command in this sandbox, whose environment gets what belongs to it."""
        env["PWD"] = cwd
        surroundings = _surroundings(env.get("TMPDIR"), cwd)
        compiled = policy.compile_policy(sandbox, surroundings, for_process=True)
        if compiled is None or (compiled.rules is None and compiled.network == "enabled"):
            return Start(judge=lambda code, output: (judge(code, output), None))
        if sandbox.use_legacy_landlock:
            raise InternalError(_LEGACY)
        return Start(partial(self.spawn, compiled), _judge_by(compiled, cwd))


def _judge_by(compiled: Policy, cwd: str) -> Judge:
    """Judge a command by its output, and explain what it was denied by its policy."""

    def explain(path: str, operation: Literal["read", "write"]) -> str | None:
        return policy.explain(compiled, path, operation)

    def verdict(exit_code: int, output: list[Chunk]) -> tuple[bool, Denial | None]:
        if not judge(exit_code, output):
            return False, None
        is_offline = compiled.network == "restricted"
        denial = find(exit_code, output, explain, cwd=cwd, is_offline=is_offline)
        log.info("sandbox denied something to a command: %s", denial)
        return True, denial

    return verdict


class FilePolicy:
    """A policy that limits a file operation, and the workers that know no other.

    `is_direct` if it is a read, and the policy allows all reads: the server performs it then.
    """

    def __init__(
        self, owner: Sandboxes, compiled: Policy, is_direct: bool, *, is_legacy: bool
    ) -> None:
        self.is_direct = is_direct
        self._owner = owner
        self._policy = compiled
        self._is_legacy = is_legacy

    def perform(self, call: Call[Any, Any], params: Any) -> Any:
        """Perform an operation in a confined worker. Blocking."""
        return self._run(params, lambda worker: worker.perform(call, params))

    def open(self, call: Call[Any, Any], params: Any) -> int:
        """Open a file in a confined worker; returns its descriptor. Blocking."""
        return self._run(params, lambda worker: worker.open(call, params))

    def _run(self, params: Any, action: Callable[[Worker], T]) -> T:
        if self._is_legacy:
            raise InternalError(_LEGACY)
        try:
            return self._owner.workers.run(self._policy, action)
        except OSError as error:
            raise self._explained(params, error) from error

    def _explained(self, params: Any, error: OSError) -> RpcError:
        """The error with the rule that is behind it, if it is one of the policy's."""
        failure = rpc_error_from_os(error)
        for path, operation in _touched(params):
            rule = policy.explain(self._policy, path, operation) or policy.explain(
                self._policy, os.path.realpath(path), operation
            )
            if rule is not None:
                log.info("sandbox denied to %s %s: %s (%s)", operation, path, rule, error.strerror)
                denial = {"path": path, "operation": operation, "rule": rule}
                failure.data = {"sandboxDenial": denial}
                break
        return failure


def _touched(params: Any) -> list[tuple[str, Any]]:
    """The paths of a file operation, and what it does with each."""
    if isinstance(params, files.CopyParams):
        source, destination = params.source_path.native(), params.destination_path.native()
        return [(source, "read"), (destination, "write")]
    writes = isinstance(
        params, files.WriteFileParams | files.CreateDirectoryParams | files.RemoveParams
    ) or (isinstance(params, files.OpenParams) and params.mode != "read")
    return [(params.path.native(), "write" if writes else "read")]


def _as_uri(value: object) -> str:
    return str(getattr(value, "uri", value))


def _surroundings(tmpdir: str | None, cwd: str | None) -> Surroundings:
    minimal = tuple(path for path in policy.MINIMAL_PATHS if os.path.exists(path))
    return Surroundings(tmpdir, minimal, os.path.isdir("/tmp"), cwd)


def _repeatedly(build: Callable[[], T]) -> T:
    for attempt in range(_ATTEMPTS):
        try:
            return build()
        except StaleOrder:
            if attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")


def _check_view(view: View) -> None:
    """Refuse what a private /proc and /dev would undo."""
    for step in view.steps:
        if step.kind == "mask" and f"{step.path}/".startswith(("/proc/", "/dev/")):
            raise InternalError(
                f"cannot enforce sandbox deny-read path {step.path}: /proc and /dev are private"
            )


def _standard_streams(command: Command, streams: Streams) -> tuple[list[int], str | None]:
    """The descriptors for 0, 1 and 2, and the path of the terminal if that is what they are."""
    if command.tty:
        (slave,) = streams.theirs
        return [slave, slave, slave], os.ttyname(slave)
    if not command.pipe_stdin:
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        streams.theirs.append(null)
        return [null, *streams.theirs[:2]], None
    return list(streams.theirs), None
