"""Detached processes: structs and calls of the extension `processDetach`.

A detached process belongs to the server and has a name. A session attaches to it under a process
id of its own, and from then on uses all methods and notifications of `protocol.process`.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from exec_server.protocol.decoding import U64, Params, Result
from exec_server.protocol.method import Call
from exec_server.protocol.process import ProcessId

# The limit that ended a process.
EndedBy = Literal["maxLifetime", "idleTimeout"]


class AttachParams(Params, frozen=True):
    wire_name: ClassVar[str] = "AttachParams"
    omissible: ClassVar[tuple[str, ...]] = ("after_seq",)
    process_id: ProcessId  # chosen by the client, for this session
    name: str
    after_seq: U64 | None = None  # None: from the oldest retained output on


class AttachResult(Result, frozen=True):
    process_id: ProcessId
    after_seq: int  # the events after this one are sent; not above the last event
    argv: list[str]  # truncated if it is long
    tty: bool
    pipe_stdin: bool
    pid: int


class DetachParams(Params, frozen=True):
    wire_name: ClassVar[str] = "DetachParams"
    process_id: ProcessId


class DetachResult(Result, frozen=True):
    pass


class ListedDetached(Result, frozen=True):
    name: str
    argv: list[str]  # truncated if it is long
    tty: bool
    running: bool
    exit_code: int | None
    closed: bool
    next_seq: int
    pid: int
    started_at_ms: int
    attached: int  # the number of attachments
    max_lifetime_ms: int | None
    idle_timeout_ms: int | None
    ended_by: EndedBy | None


class ListDetachedResult(Result, frozen=True):
    processes: list[ListedDetached]


ATTACH = Call("process/attach", AttachParams, AttachResult)
DETACH = Call("process/detach", DetachParams, DetachResult)
LIST_DETACHED: Call[None, ListDetachedResult] = Call(
    "process/listDetached", None, ListDetachedResult
)
