"""process/*: params are checked here; process.table does the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from msgspec.structs import replace

from exec_server.errors import InternalError, InvalidParams, InvalidRequest, RpcError, os_error_text
from exec_server.process.command import Command
from exec_server.process.process import Bytes, Process
from exec_server.process.table import LaunchMode
from exec_server.protocol import process as wire
from exec_server.protocol.decoding import EmptyResult
from exec_server.protocol.jsonrpc import Attached
from exec_server.protocol.sandbox import NO_MXC, check_process_paths
from exec_server.server.context import ConnectionContext, check_user
from exec_server.server.process_launch import ProcessLaunch

# Clients choose the ids; the server stores them, and keeps them after the process has ended. So
# their length is limited; no client uses more than a few dozen bytes.
PROCESS_ID_BYTES = 4096
WRITE_ID_BYTES = 256
# A longer poll is answered empty after this time; the client polls again.
MAX_WAIT_SECONDS = 3600.0

R = TypeVar("R")

_ACCEPTED = wire.WriteResult("accepted")
_STDIN_CLOSED = wire.WriteResult("stdinClosed")


def start(context: ConnectionContext, params: wire.StartParams) -> Awaitable[wire.StartResult]:
    cwd = _check_command(params)
    if params.tty_size is not None and not params.tty:
        raise InvalidParams("ttySize requires tty: true")
    check_process_id(params.process_id)
    if params.user is not None:
        check_user(context.server.environment, params.sandbox)
    if params.network_proxy is not None and params.detach is not None:
        # Its decisions and questions are for the client of one session.
        raise InvalidParams("a detached process cannot have a networkProxy")
    command = Command(
        params.argv,
        cwd,
        {},
        params.tty,
        params.pipe_stdin,
        params.arg0,
        merge_stderr=params.merge_stderr,
    )
    if params.tty_size is not None:
        command = replace(command, tty_size=(params.tty_size.rows, params.tty_size.columns))
    snapshot = None
    if params.shell_snapshot is not None:
        from exec_server.server import shell_snapshots  # few clients ask for one

        snapshot = shell_snapshots.check(params)
    context.session.check_unused(params.process_id)
    if snapshot is not None:
        context.session.processes.reserve(params.process_id)
        # Before the next request is handled, which may be a terminate.
        cancellation = context.session.processes.cancellation(params.process_id)
        return _start_restored(context, params, command, snapshot.shell.name, cancellation)
    launch_mode = ProcessLaunch(context.server, context.session, params).mode
    if params.detach is not None:
        broadcast = context.server.detached.reserve(params.detach, params.argv[0])
        context.session.attach(params.process_id, broadcast)
        starting = partial(context.server.detached.start, broadcast.name, command, launch_mode)
        return _start(context, params, starting, broadcast.name)
    processes = context.session.processes
    processes.reserve(params.process_id)
    return _start(
        context, params, partial(processes.start, params.process_id, command, launch_mode)
    )


def check_process_id(process_id: wire.ProcessId) -> None:
    """Raise InvalidParams for an id that is too long."""
    _check_length("processId", process_id, PROCESS_ID_BYTES)


def _check_length(name: str, value: str, limit: int) -> None:
    if len(value) > limit // 4 and len(value.encode()) > limit:
        raise InvalidParams(f"{name} must not exceed {limit} bytes")


def _check_command(params: wire.StartParams) -> str:
    """The native cwd; raises InvalidParams for a command that no program can be started for.

    A client that makes several mistakes is told of the same one as by the reference.
    """
    sandbox = params.sandbox
    if sandbox is None:
        try:
            params.cwd.native()
        except RpcError as error:
            raise InvalidParams(
                f"cwd URI `{params.cwd.uri}` is not valid on this exec-server host: {error.message}"
            ) from None
    elif sandbox.windows_sandbox_level == "mxc":
        raise InvalidParams(NO_MXC)
    if not params.argv:
        raise InvalidParams("argv must not be empty")
    if sandbox is not None:
        check_process_paths(sandbox, params.cwd)
    return params.cwd.native()


async def _start(
    context: ConnectionContext,
    params: wire.StartParams,
    starting: Callable[[], Awaitable[None]],
    name: str | None = None,  # of a detached process
) -> wire.StartResult:
    await starting()
    # No await from here to the response: the first output has to follow it.
    process = context.session.process(params.process_id) if params.report_pid else None
    # The reference names its mechanism whenever there is a sandbox object, even one that does not
    # confine, and clients show that name.
    sandbox_type: wire.SandboxType = "none" if params.sandbox is None else "linuxSeccomp"
    pid = None if process is None else process.pid
    return wire.StartResult(params.process_id, sandbox_type, name, pid)


async def _start_restored(
    context: ConnectionContext,
    params: wire.StartParams,
    command: Command,
    shell: str,
    cancellation: asyncio.Future[None],
) -> wire.StartResult:
    """Start a shell with the state that its start-up files lead to."""
    from exec_server.server import shell_snapshots

    server, session = context.server, context.session

    def launch(capture: wire.StartParams) -> LaunchMode:
        return ProcessLaunch(server, session, capture).mode

    try:
        state = await server.shell_snapshots().state(
            session, params, server.tasks, launch, cancellation
        )
    except BaseException:
        session.processes.release(params.process_id)
        raise
    captured = None
    if state is not None:
        command, captured = shell_snapshots.restored(command, shell, state), state.variables
    launch_mode = ProcessLaunch(server, session, params, captured).mode
    starting = partial(session.processes.start, params.process_id, command, launch_mode)
    return await _start(context, params, starting)


def read(
    context: ConnectionContext, params: wire.ReadParams
) -> wire.ReadResult | Awaitable[wire.ReadResult]:
    process = _existing(context, params.process_id)
    result = process.read(params.after_seq or 0, params.max_bytes)
    if not params.wait_ms or _has_news(result, params):
        return result
    return _long_poll(process, params)


def _existing(context: ConnectionContext, process_id: wire.ProcessId) -> Process:
    process = context.session.process(process_id)
    if process is None:
        if context.session.is_starting(process_id):
            raise InvalidRequest(f"process id {process_id} is starting")
        raise InvalidRequest(f"unknown process id {process_id}")
    return process


def _has_news(result: wire.ReadResult, params: wire.ReadParams) -> bool:
    unseen_exit = result.exited and (params.after_seq or 0) < result.next_seq - 1
    return bool(result.chunks) or result.closed or unseen_exit


async def _long_poll(process: Process, params: wire.ReadParams) -> wire.ReadResult:
    assert params.wait_ms is not None
    after = params.after_seq or 0
    try:
        async with asyncio.timeout(min(params.wait_ms / 1000, MAX_WAIT_SECONDS)):
            while True:
                # Also before the first wait: there may be new output since the request was handled.
                result = process.read(after, params.max_bytes)
                if _has_news(result, params):
                    return result
                await process.next_event()
    except TimeoutError:
        return process.read(after, params.max_bytes)


def write(
    context: ConnectionContext, params: wire.WriteParams
) -> wire.WriteResult | Awaitable[wire.WriteResult]:
    return _write(context, params, params.chunk)


def write_binary(
    context: ConnectionContext, request: Attached[wire.WriteBinaryParams]
) -> wire.WriteResult | Awaitable[wire.WriteResult]:
    return _write(context, request.value, request.data)


def _write(
    context: ConnectionContext, params: wire.WriteParams | wire.WriteBinaryParams, data: Bytes
) -> wire.WriteResult | Awaitable[wire.WriteResult]:
    if params.write_id == "":
        raise InvalidParams("writeId must not be empty")
    if params.write_id is not None:
        _check_length("writeId", params.write_id, WRITE_ID_BYTES)
    session = context.session
    process = session.process(params.process_id)
    if process is None:
        starting = session.is_starting(params.process_id)
        return wire.WriteResult("starting" if starting else "unknownProcess")
    write_id = params.write_id
    attachment = session.attachments.get(params.process_id)
    if attachment is not None:
        write_id = attachment.write_id(write_id)
    if not process.accepts_write(write_id):
        return _STDIN_CLOSED
    accepted = process.write(data, write_id)
    return _ACCEPTED if accepted is None else _after(accepted, _ACCEPTED)


async def _after(future: asyncio.Future[None], result: R) -> R:
    await future
    return result


def close_stdin(
    context: ConnectionContext, params: wire.CloseStdinParams
) -> EmptyResult | Awaitable[EmptyResult]:
    process = _existing(context, params.process_id)
    if process.tty:
        raise InvalidRequest(
            f"process {process.id} has a terminal: write Ctrl-D (byte 4) to end its input"
        )
    if not process.has_stdin:
        raise InvalidRequest(f"process {process.id} was started without pipeStdin")
    closed = process.write_eof()
    return EmptyResult() if closed is None else _after(closed, EmptyResult())


def resize(context: ConnectionContext, params: wire.ResizeParams) -> EmptyResult:
    process = _existing(context, params.process_id)
    if not process.tty:
        raise InvalidRequest(f"process {process.id} has no terminal")
    try:
        process.resize(params.rows, params.columns)
    except OSError as error:
        raise InternalError(f"failed to resize terminal: {os_error_text(error)}") from error
    return EmptyResult()


def signal(context: ConnectionContext, params: wire.SignalParams) -> EmptyResult:
    process = context.session.process(params.process_id)
    if process is not None:
        try:
            process.signal(params.signal)
        except OSError as error:
            raise InternalError(f"failed to signal process: {os_error_text(error)}") from error
    return EmptyResult()


def terminate(context: ConnectionContext, params: wire.TerminateParams) -> wire.TerminateResult:
    attachment = context.session.attachments.get(params.process_id)
    if attachment is not None:
        return wire.TerminateResult(context.server.detached.terminate(attachment.broadcast.name))
    return wire.TerminateResult(context.session.processes.terminate(params.process_id))


def list_(context: ConnectionContext, params: None) -> wire.ListResult:
    summaries, truncated = context.session.processes.summaries()
    return wire.ListResult(summaries, truncated)


def set_flow(context: ConnectionContext, params: wire.SetFlowParams) -> EmptyResult:
    process = _existing(context, params.process_id)
    attachment = context.session.attachments.get(params.process_id)
    (attachment or process).set_flow(params.flow)
    return EmptyResult()


def attach(context: ConnectionContext, params: wire.AttachParams) -> wire.AttachResult:
    """Attach the session; a repeated request sends the events once more."""
    check_process_id(params.process_id)
    broadcast = context.server.detached.find(params.name)
    attachment = context.session.attachments.get(params.process_id)
    if attachment is None or attachment.broadcast is not broadcast:
        attachment = context.session.attach(params.process_id, broadcast)
    attachment.begin(params.after_seq or 0)
    process = broadcast.process
    assert process is not None
    return wire.AttachResult(
        params.process_id,
        attachment.after_seq,
        process.summary().argv,
        process.tty,
        process.has_stdin and not process.tty,
        process.pid,
    )


def detach(context: ConnectionContext, params: wire.DetachParams) -> EmptyResult:
    """End an attachment; one that does not exist is no error, as the answer may have been lost."""
    attachment = context.session.attachments.get(params.process_id)
    if attachment is not None:
        attachment.close()
        context.session.attachment_ended(params.process_id)
    return EmptyResult()


def list_detached(context: ConnectionContext, params: None) -> wire.ListDetachedResult:
    return wire.ListDetachedResult(context.server.detached.listed())
