"""FileAccess: the route of an fs request to the disk, which its sandbox or its user decides.

The server itself performs requests without file limits, and reads outside procfs under a policy
that allows every read; a confined worker performs the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import msgspec

from exec_server.filesystem import nonblocking
from exec_server.filesystem.operations import OnDemand
from exec_server.host import libc
from exec_server.protocol import files
from exec_server.protocol.decoding import Call
from exec_server.protocol.files import ConfinableParams
from exec_server.protocol.sandbox import Managed, Restricted, Sandbox
from exec_server.sandbox.sandboxes import Sandboxes

if TYPE_CHECKING:  # see `sandbox.sandboxes`
    from exec_server.sandbox.files import FilePolicy

# Rules of a policy that is compiled on the event loop: ten times as many as clients send, in some
# milliseconds.
INLINE_RULES = 256

P = TypeVar("P", bound=ConfinableParams)
R = TypeVar("R")
P_contra = TypeVar("P_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)
Opened = TypeVar("Opened", files.ReadFileParams, files.OpenParams)


class Attempt(Protocol[P_contra, R_co]):
    """A function of filesystem.nonblocking: the result, or None if finding it might block."""

    def __call__(self, params: P_contra, /, *, confined: bool) -> R_co | None: ...


class FileOperation(msgspec.Struct, Generic[P, R], frozen=True):
    """The implementations of an fs call."""

    call: Call[P, R]
    function: Callable[[P], R]  # without a sandbox; blocks
    attempt: Attempt[P, R] | None = None
    # A read by the server for a policy that allows every read; None if procfs is involved. Blocks.
    trusted: Callable[[P], R | None] | None = None


class FileOpening(msgspec.Struct, Generic[Opened, R], frozen=True):
    """An fs call that opens a file, whose content the server itself reads or writes."""

    call: Call[Opened, R]
    function: Callable[[Opened], int]  # without a sandbox; blocks


class FileAccess(Protocol):
    """A route to the disk."""

    def try_now(self, attempt: Attempt[P, R], params: P) -> R | None:
        """The result if the kernel has it in memory; for the event loop."""
        ...

    def perform(self, operation: FileOperation[P, R], params: P) -> R:
        """Perform an operation. Blocking."""
        ...

    def open(self, opening: FileOpening[Opened, R], params: Opened) -> int:
        """Open a file; returns a descriptor that the caller closes. Blocking."""
        ...


class Unconfined:
    """The server performs the request without limits."""

    def try_now(self, attempt: Attempt[P, R], params: P) -> R | None:
        return attempt(params, confined=False)

    def perform(self, operation: FileOperation[P, R], params: P) -> R:
        return operation.function(params)

    def open(self, opening: FileOpening[Opened, R], params: Opened) -> int:
        return opening.function(params)


class Confined:
    """A worker that is confined by the policy performs the request."""

    __slots__ = ("_policy",)

    def __init__(self, policy: FilePolicy) -> None:
        self._policy = policy

    def try_now(self, attempt: Attempt[P, R], params: P) -> R | None:
        return None

    def perform(self, operation: FileOperation[P, R], params: P) -> R:
        return self._policy.perform(operation.call, params)

    def open(self, opening: FileOpening[Opened, R], params: Opened) -> int:
        return self._policy.open(opening.call, params)


class TrustedRead:
    """The server reads under a policy that allows every read; a worker reads in procfs.

    Files in procfs describe their reader, and the server must not show its own.
    """

    __slots__ = ("_policy",)

    def __init__(self, policy: FilePolicy) -> None:
        self._policy = policy

    def try_now(self, attempt: Attempt[P, R], params: P) -> R | None:
        return attempt(params, confined=True)

    def perform(self, operation: FileOperation[P, R], params: P) -> R:
        result = None if operation.trusted is None else operation.trusted(params)
        return self._policy.perform(operation.call, params) if result is None else result

    def open(self, opening: FileOpening[Opened, R], params: Opened) -> int:
        descriptor = nonblocking.open_trusted(params)
        return self._policy.open(opening.call, params) if descriptor is None else descriptor


class Deferred:
    """One of the other routes, chosen in the thread that takes it."""

    __slots__ = ("_choose",)

    def __init__(self, choose: Callable[[], FileAccess]) -> None:
        self._choose = choose

    def try_now(self, attempt: Attempt[P, R], params: P) -> R | None:
        return None

    def perform(self, operation: FileOperation[P, R], params: P) -> R:
        return self._choose().perform(operation, params)

    def open(self, opening: FileOpening[Opened, R], params: Opened) -> int:
        return self._choose().open(opening, params)


UNCONFINED = Unconfined()


class AsUser:
    """The server performs the request with the rights of a user."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def try_now(self, attempt: Attempt[P, R], params: P) -> R | None:
        return None

    def perform(self, operation: FileOperation[P, R], params: P) -> R:
        function = operation.function
        if isinstance(function, OnDemand):  # the user need not have the right to read its module
            function = function.load()
        with libc.acting_as(libc.find_user(self._name)):
            return function(params)

    def open(self, opening: FileOpening[Opened, R], params: Opened) -> int:
        with libc.acting_as(libc.find_user(self._name)):
            return opening.function(params)


def choose_access(
    sandboxes: Sandboxes, sandbox: Sandbox | None, *, reading: bool, user: str | None = None
) -> FileAccess:
    """The route of a request with this sandbox or user; for the event loop."""
    if user is not None:
        return AsUser(user)
    if sandbox is None:
        return UNCONFINED
    if not sandboxes.is_loaded or _rule_count(sandbox) > INLINE_RULES:
        return Deferred(lambda: _compiled_access(sandboxes, sandbox, reading=reading))
    return _compiled_access(sandboxes, sandbox, reading=reading)


def _rule_count(sandbox: Sandbox) -> int:
    """An upper bound for the rules of the compiled policy: an entry may have one for each root."""
    permissions = sandbox.permissions
    if not isinstance(permissions, Managed) or not isinstance(permissions.file_system, Restricted):
        return 0
    return len(permissions.file_system.entries) * (len(sandbox.policy_roots) + 1)


def _compiled_access(sandboxes: Sandboxes, sandbox: Sandbox, *, reading: bool) -> FileAccess:
    policy = sandboxes.files.policy_for(sandbox, reading=reading)
    if policy is None:
        return UNCONFINED
    return TrustedRead(policy) if policy.is_trusted_read else Confined(policy)
