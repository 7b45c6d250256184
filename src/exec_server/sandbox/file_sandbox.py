"""FileSandbox: the policies of file operations, and the workers that perform them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import msgspec

from exec_server.errors import InternalError, RpcError
from exec_server.protocol.decoding import Call
from exec_server.protocol.files import ConfinableParams
from exec_server.protocol.sandbox import Sandbox
from exec_server.sandbox.builder import (
    LEGACY_LANDLOCK,
    SandboxBuilder,
    build_view,
    host_paths,
    retry_while_stale,
)
from exec_server.sandbox.denial_explainer import DenialExplainer
from exec_server.sandbox.policy import compiler, globs
from exec_server.sandbox.policy.access import allows_all_reads
from exec_server.sandbox.policy.layout import is_visible, resolve_globs, writable_paths
from exec_server.sandbox.policy.model import Policy
from exec_server.sandbox.runtime.capabilities import Confinement
from exec_server.sandbox.runtime.disk import HostDisk
from exec_server.sandbox.runtime.messages import BuildRequest
from exec_server.sandbox.runtime.staleness import ViewDependencies
from exec_server.sandbox.runtime.view import ProcMount
from exec_server.sandbox.runtime.worker import Worker
from exec_server.sandbox.runtime.worker_pool import WorkerPool

P = TypeVar("P", bound=ConfinableParams)
R = TypeVar("R")
T = TypeVar("T")

# Compiled policies in the cache: clients send the same few sandbox objects with every request. The
# one that was not used for the longest time is dropped.
_CACHED_POLICIES: Final = 256
# A longer sandbox object is compiled for each request: its policy takes several times its size.
_CACHED_KEY_BYTES: Final = 65_536


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
        key = msgspec.msgpack.encode(sandbox, enc_hook=_uri_text) + (b"r" if reading else b"w")
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
    """A policy that limits a file operation, and the workers that are confined by it.

    `is_trusted_read` is true for a read under a policy that allows every read: the server may
    perform it without a worker.
    """

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
            if is_visible(view, path) and not globs.denies(denied, path, writable)
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
        return DenialExplainer(self._policy).file_error(params, error)


def _uri_text(value: object) -> str:
    return str(getattr(value, "uri", value))
