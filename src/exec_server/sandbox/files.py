"""FileSandbox: the policies of file operations, and the workers that perform them."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final, Literal, TypeVar

import msgspec

from exec_server.errors import InternalError, InvalidRequest, RpcError, lossy, rpc_error_from_os
from exec_server.protocol import files
from exec_server.protocol.decoding import Call
from exec_server.protocol.files import ConfinableParams
from exec_server.protocol.sandbox import NO_MXC, Sandbox
from exec_server.sandbox.builder import (
    LEGACY_LANDLOCK,
    SandboxBuilder,
    ViewDependencies,
    build_view,
    host_paths,
    retry_while_stale,
)
from exec_server.sandbox.policy import access, compiler
from exec_server.sandbox.policy.access import allows_all_reads, explain_denial
from exec_server.sandbox.policy.layout import is_visible, resolve_globs, writable_paths
from exec_server.sandbox.policy.model import Policy
from exec_server.sandbox.runtime.capabilities import Confinement
from exec_server.sandbox.runtime.disk import HostDisk
from exec_server.sandbox.runtime.messages import BuildRequest
from exec_server.sandbox.runtime.view import ProcMount
from exec_server.sandbox.runtime.worker import Worker

log = logging.getLogger(__name__)

T = TypeVar("T")
P = TypeVar("P", bound=ConfinableParams)
R = TypeVar("R")

# Each is an interpreter of a few MiB. Beyond it the longest idle worker is closed.
MAX_WORKERS: Final = 16
# Concurrent requests of one policy; more would keep workers from other policies.
MAX_PER_POLICY: Final = 4
# An active client sends its next request within seconds.
IDLE_SECONDS: Final = 60.0

# Compiled policies in the cache: clients send the same few sandbox objects with every request. The
# one that was not used for the longest time is dropped.
_CACHED_POLICIES: Final = 256
# A longer sandbox object is compiled for each request: its policy takes several times its size.
_CACHED_KEY_BYTES: Final = 65_536

Build = Callable[[Policy], tuple[Worker, ViewDependencies]]

# Params of operations that change the path.
_WRITES = (
    files.WriteFileParams
    | files.CreateParams
    | files.CreateDirectoryParams
    | files.RemoveParams
    | files.AppendParams
    | files.ChmodParams
    | files.SymlinkParams
    | files.SetTimesParams
    | files.EditParams
    | files.ApplyPatchParams
)


class _PooledWorker:
    """A worker, its policy, and the dependencies of its view."""

    def __init__(self, policy: Policy, worker: Worker, dependencies: ViewDependencies) -> None:
        self.policy = policy
        self.worker = worker
        self.dependencies = dependencies
        self.idle_since = 0.0

    def is_usable(self) -> bool:
        """Whether the idle worker lives and its view is current."""
        return self.dependencies.is_current() and not self.worker.has_ended()

    def close(self) -> None:
        self.worker.close()
        self.dependencies.close()


class WorkerPool:
    """Lends workers, for one policy and request each: built on demand, reused, bounded."""

    def __init__(self, build: Build) -> None:
        self._build = build
        self._idle: list[_PooledWorker] = []  # the longest idle first
        self._busy: dict[Policy, int] = {}
        self._changed = threading.Condition()
        self._is_closed = False

    def run(self, policy: Policy, action: Callable[[Worker], T]) -> T:
        """Call `action` with a worker for the policy; waits if all are busy. Blocking."""
        pooled = self._acquire(policy)
        try:
            if pooled is not None and not pooled.is_usable():
                pooled.close()
                pooled = None
            if pooled is None:
                pooled = _PooledWorker(policy, *self._build(policy))
            return action(pooled.worker)
        finally:
            self._release(policy, pooled)

    def _acquire(self, policy: Policy) -> _PooledWorker | None:
        """Wait for a free slot; returns an idle worker for the policy, None to build one."""
        with self._changed:
            while not self._is_closed:
                for pooled in reversed(self._idle):
                    if pooled.policy == policy:
                        self._idle.remove(pooled)
                        self._count_busy(policy)
                        return pooled
                busy = sum(self._busy.values())
                if self._busy.get(policy, 0) < MAX_PER_POLICY and busy < MAX_WORKERS:
                    if busy + len(self._idle) >= MAX_WORKERS:
                        self._idle.pop(0).close()
                    self._count_busy(policy)
                    return None
                self._changed.wait()
            raise InternalError("the server is shutting down")

    def _count_busy(self, policy: Policy) -> None:
        self._busy[policy] = self._busy.get(policy, 0) + 1

    def _release(self, policy: Policy, pooled: _PooledWorker | None) -> None:
        with self._changed:
            self._busy[policy] -= 1
            if not self._busy[policy]:
                del self._busy[policy]
            if pooled is not None:
                if pooled.worker.is_broken or self._is_closed:
                    pooled.close()
                else:
                    pooled.idle_since = time.monotonic()
                    self._idle.append(pooled)
            self._changed.notify_all()

    def drop_idle(self) -> None:
        """End the workers that were unused for IDLE_SECONDS."""
        with self._changed:
            oldest = time.monotonic() - IDLE_SECONDS
            while self._idle and self._idle[0].idle_since < oldest:
                self._idle.pop(0).close()

    def close(self) -> None:
        """End all workers, the busy ones as soon as they are released."""
        with self._changed:
            self._is_closed = True
            while self._idle:
                self._idle.pop().close()
            self._changed.notify_all()


class FileSandbox:
    """Compiles the policies of file operations. Every method is thread-safe."""

    def __init__(self, builder: SandboxBuilder, tmpdir: str | None) -> None:
        self._builder = builder
        self._tmpdir = tmpdir
        self._policies: OrderedDict[bytes, FilePolicy | None] = OrderedDict()
        self._policies_lock = threading.Lock()  # of the dict; never held for longer than a lookup
        self._workers = WorkerPool(self._build_worker)

    def close(self) -> None:
        self._workers.close()

    def drop_idle(self) -> None:
        self._workers.drop_idle()

    def policy_for(self, sandbox: Sandbox, *, reading: bool) -> FilePolicy | None:
        """The policy of a file operation, None if it does not limit files."""
        key = msgspec.msgpack.encode(sandbox, enc_hook=str) + (b"r" if reading else b"w")
        with self._policies_lock:
            if key in self._policies:
                self._policies.move_to_end(key)
                return self._policies[key]
        policy = self._compile(sandbox, reading=reading)
        if len(key) <= _CACHED_KEY_BYTES:
            with self._policies_lock:
                self._policies[key] = policy
                if len(self._policies) > _CACHED_POLICIES:
                    self._policies.popitem(last=False)
        return policy

    def _compile(self, sandbox: Sandbox, *, reading: bool) -> FilePolicy | None:
        paths = host_paths(self._tmpdir, None)
        policy = compiler.compile_policy(sandbox, paths, for_process=False, reading=reading)
        if policy is None or policy.rules is None:
            return None
        is_trusted_read = reading and allows_all_reads(policy)
        if sandbox.windows_sandbox_level == "mxc" and not is_trusted_read:
            raise InvalidRequest(
                f"failed to prepare fs sandbox: failed to prepare MXC sandbox: {NO_MXC}"
            )
        return FilePolicy(
            self._workers, policy, is_trusted_read, is_legacy=sandbox.use_legacy_landlock
        )

    def _build_worker(self, policy: Policy) -> tuple[Worker, ViewDependencies]:
        disk = HostDisk(sees_placeholders=True)

        def build() -> tuple[Worker, ViewDependencies]:
            view = build_view(policy, disk)
            patterns = resolve_globs(policy, disk)
            dependencies = ViewDependencies(
                view, self._builder.mounts, self._builder.pins, sees_placeholders=True
            )

            def make_request(confinement: Confinement) -> BuildRequest:
                if patterns and not confinement.private_proc:
                    raise InternalError("deny patterns need a private /proc, which is refused here")
                proc: ProcMount = "private" if confinement.private_proc else "none"
                return BuildRequest("worker", view, "restricted", proc, patterns)

            try:
                _, control = self._builder.launch(make_request, network=False)
            except BaseException:
                dependencies.close()
                raise
            return Worker(control), dependencies

        return retry_while_stale(build)


class FilePolicy:
    """A policy for a file operation, and its workers; `is_trusted_read` needs none of them."""

    def __init__(
        self, workers: WorkerPool, policy: Policy, is_trusted_read: bool, *, is_legacy: bool
    ) -> None:
        self.is_trusted_read = is_trusted_read
        self._workers = workers
        self._policy = policy
        self._is_legacy = is_legacy

    def perform(self, call: Call[P, R], params: P) -> R:
        """Perform an operation in a confined worker. Blocking."""
        result: R = self._run(params, lambda worker: worker.perform(call, params))
        return result

    def open(self, call: Call[P, R], params: P) -> int:
        """Open a file in a confined worker; returns its descriptor. Blocking."""
        return self._run(params, lambda worker: worker.open(call, params))

    def visible(self, paths: Sequence[str]) -> list[str]:
        """Those of some paths without links that the policy allows to read now. Blocking."""
        if self._is_legacy:
            raise InternalError(LEGACY_LANDLOCK)
        disk = HostDisk(sees_placeholders=True)
        view = build_view(self._policy, disk)
        denied = resolve_globs(self._policy, disk)
        writable = writable_paths(view)
        return [
            path
            for path in paths
            if is_visible(view, path) and not access.denies(denied, path, writable)
        ]

    def _run(self, params: ConfinableParams, action: Callable[[Worker], T]) -> T:
        if self._is_legacy:
            raise InternalError(LEGACY_LANDLOCK)
        try:
            return self._workers.run(self._policy, action)
        except OSError as error:
            raise self.explain(params, error) from error

    def explain(self, params: ConfinableParams, error: OSError) -> RpcError:
        """The error of an operation, with the rule that denied it. Blocking."""
        return explain_file_error(self._policy, params, error)


def explain_file_error(policy: Policy, params: ConfinableParams, error: OSError) -> RpcError:
    """The error of a file operation, with the rule that denied the operation. Blocking."""
    failure = rpc_error_from_os(error)
    for path, operation in _accessed_paths(params):
        rule = explain_denial(policy, path, operation) or explain_denial(
            policy, os.path.realpath(path), operation
        )
        if rule is not None:
            log.info("sandbox denied to %s %s: %s (%s)", operation, path, rule, error.strerror)
            denial = {"path": lossy(path), "operation": operation, "rule": lossy(rule)}
            failure.data = {"sandboxDenial": denial}
            break
    return failure


def _accessed_paths(params: ConfinableParams) -> list[tuple[str, Literal["read", "write"]]]:
    if isinstance(params, files.CopyParams | files.RenameParams):
        source, destination = params.source_path.native(), params.destination_path.native()
        is_copy = isinstance(params, files.CopyParams)
        return [(source, "read" if is_copy else "write"), (destination, "write")]
    writes = isinstance(params, _WRITES) or (
        isinstance(params, files.OpenParams) and params.mode != "read"
    )
    return [(params.path.native(), "write" if writes else "read")]
