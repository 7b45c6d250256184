"""process/*: from params to core.processes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import replace

from exec_server.core.command import Command, child_environment
from exec_server.core.processes import Process, Start
from exec_server.errors import (
    InternalError,
    InvalidParams,
    InvalidRequest,
    RpcError,
    os_error_text,
)
from exec_server.protocol.process import (
    CloseStdinParams,
    CloseStdinResult,
    ListResult,
    ProcessId,
    ReadParams,
    ReadResult,
    ResizeParams,
    ResizeResult,
    SandboxType,
    SignalParams,
    SignalResult,
    StartParams,
    StartResult,
    TerminateParams,
    TerminateResult,
    WriteParams,
    WriteResult,
)
from exec_server.protocol.sandbox import External, Managed, Sandbox
from exec_server.rpc.scope import Scope

# Ids are the client's choice and are kept, of a process also after its end, so they may not be
# of any length; no client uses more than a few dozen bytes.
PROCESS_ID_BYTES = 4096
WRITE_ID_BYTES = 256
# A longer poll than this is answered empty; the client asks again.
MAX_WAIT_SECONDS = 3600.0

_ACCEPTED = WriteResult("accepted")
_STDIN_CLOSED = WriteResult("stdinClosed")


def start(scope: Scope, params: StartParams) -> Awaitable[StartResult]:
    if params.network_proxy is not None:
        raise InvalidParams("this exec-server starts no network proxy")
    cwd = _native_cwd(params)
    if not params.argv:
        raise InvalidParams("argv must not be empty")
    if params.tty_size is not None and not params.tty:
        raise InvalidParams("ttySize is only for a process with tty")
    _check_length("processId", params.process_id, PROCESS_ID_BYTES)
    env = child_environment(params.env, params.env_policy, params.metadata, scope.machine.variables)
    if params.tty:
        env.setdefault("SHELL", scope.machine.login_shell)
    how = Start()
    if params.sandbox is not None:
        if params.enforce_managed_network and _has_network(params.sandbox):
            raise InvalidRequest("this exec-server has no managed network to enforce")
        how = scope.machine.sandboxes.for_process(params.sandbox, cwd, env)
    command = Command(params.argv, cwd, env, params.tty, params.pipe_stdin, params.arg0)
    if params.tty_size is not None:
        command = replace(command, tty_size=(params.tty_size.rows, params.tty_size.columns))
    scope.session.processes.reserve(params.process_id)
    return _start(scope, params, command, how)


def _check_length(name: str, value: str, limit: int) -> None:
    if len(value) > limit // 4 and len(value.encode()) > limit:
        raise InvalidParams(f"{name} must not exceed {limit} bytes")


def _has_network(sandbox: Sandbox) -> bool:
    """Whether a process in this sandbox would reach the network without any proxy."""
    permissions = sandbox.permissions
    return isinstance(permissions, Managed | External) and permissions.network == "enabled"


def _native_cwd(params: StartParams) -> str:
    try:
        return params.cwd.native()
    except RpcError as error:
        raise InvalidParams(
            f"cwd URI `{params.cwd.uri}` is not valid on this exec-server host: {error.message}"
        ) from None


async def _start(scope: Scope, params: StartParams, command: Command, how: Start) -> StartResult:
    await scope.session.processes.start(params.process_id, command, how)
    # No await from here to the answer: the first output comes after it.
    # The reference names its sandbox whenever there is such an object, even one that does not
    # confine, and clients show that name: it says which mechanism is in charge.
    sandbox_type: SandboxType = "none" if params.sandbox is None else "linuxSeccomp"
    return StartResult(params.process_id, sandbox_type)


def read(scope: Scope, params: ReadParams) -> ReadResult | Awaitable[ReadResult]:
    process = _existing(scope, params.process_id)
    result = process.read(params.after_seq or 0, params.max_bytes)
    if not params.wait_ms or _is_news(result, params):
        return result
    return _long_poll(process, params)


def _existing(scope: Scope, process_id: ProcessId) -> Process:
    process = scope.session.processes.get(process_id)
    if process is None:
        if scope.session.processes.is_starting(process_id):
            raise InvalidRequest(f"process id {process_id} is starting")
        raise InvalidRequest(f"unknown process id {process_id}")
    return process


def _is_news(result: ReadResult, params: ReadParams) -> bool:
    """Whether the client would learn something from this result."""
    unseen_exit = result.exited and (params.after_seq or 0) < result.next_seq - 1
    return bool(result.chunks) or result.closed or unseen_exit


async def _long_poll(process: Process, params: ReadParams) -> ReadResult:
    assert params.wait_ms is not None
    after = params.after_seq or 0
    try:
        async with asyncio.timeout(min(params.wait_ms / 1000, MAX_WAIT_SECONDS)):
            while True:
                # Again before the first wait: something may have come since the request did.
                result = process.read(after, params.max_bytes)
                if _is_news(result, params):
                    return result
                await process.next_event()
    except TimeoutError:
        return process.read(after, params.max_bytes)


def write(scope: Scope, params: WriteParams) -> WriteResult | Awaitable[WriteResult]:
    if params.write_id == "":
        raise InvalidParams("writeId must not be empty")
    if params.write_id is not None:
        _check_length("writeId", params.write_id, WRITE_ID_BYTES)
    process = scope.session.processes.get(params.process_id)
    if process is None:
        starting = scope.session.processes.is_starting(params.process_id)
        return WriteResult("starting" if starting else "unknownProcess")
    if not process.takes(params.write_id):
        return _STDIN_CLOSED
    turn = process.write(params.chunk, params.write_id)
    return _ACCEPTED if turn is None else _accepted_after(turn)


async def _accepted_after(turn: asyncio.Future[None]) -> WriteResult:
    await turn
    return _ACCEPTED


def close_stdin(
    scope: Scope, params: CloseStdinParams
) -> CloseStdinResult | Awaitable[CloseStdinResult]:
    process = _existing(scope, params.process_id)
    if process.tty:
        raise InvalidRequest(
            f"process {process.id} has a terminal: write Ctrl-D (byte 4) to end its input"
        )
    if not process.has_stdin:
        raise InvalidRequest(f"process {process.id} was started without pipeStdin")
    turn = process.end_input()
    return CloseStdinResult() if turn is None else _closed_after(turn)


async def _closed_after(turn: asyncio.Future[None]) -> CloseStdinResult:
    await turn
    return CloseStdinResult()


def resize(scope: Scope, params: ResizeParams) -> ResizeResult:
    process = _existing(scope, params.process_id)
    if not process.tty:
        raise InvalidRequest(f"process {process.id} has no terminal")
    try:
        process.resize(params.rows, params.columns)
    except OSError as error:
        raise InternalError(f"failed to resize terminal: {os_error_text(error)}") from error
    return ResizeResult()


def signal(scope: Scope, params: SignalParams) -> SignalResult:
    process = scope.session.processes.get(params.process_id)
    if process is not None:
        try:
            process.signal(params.signal)
        except OSError as error:
            raise InternalError(f"failed to signal process: {os_error_text(error)}") from error
    return SignalResult()


def terminate(scope: Scope, params: TerminateParams) -> TerminateResult:
    return TerminateResult(scope.session.processes.terminate(params.process_id))


def list_(scope: Scope, params: None) -> ListResult:
    listed, truncated = scope.session.processes.listed()
    return ListResult(listed, truncated)
