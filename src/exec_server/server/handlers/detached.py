"""process/attach, process/detach, process/listDetached: the use of detached processes."""

from __future__ import annotations

from exec_server.protocol.process import (
    AttachParams,
    AttachResult,
    DetachParams,
    DetachResult,
    ListDetachedResult,
)
from exec_server.server.context import ConnectionContext
from exec_server.server.handlers.process import check_process_id


def attach(context: ConnectionContext, params: AttachParams) -> AttachResult:
    """Attach the session; a repeated request sends the events once more."""
    check_process_id(params.process_id)
    broadcast = context.server.detached.find(params.name)
    attachment = context.session.attachments.get(params.process_id)
    if attachment is None or attachment.broadcast is not broadcast:
        attachment = context.session.attach(params.process_id, broadcast)
    attachment.begin(params.after_seq or 0)
    process = broadcast.process
    assert process is not None
    return AttachResult(
        params.process_id,
        attachment.after_seq,
        process.summary().argv,
        process.tty,
        process.has_stdin and not process.tty,
        process.pid,
    )


def detach(context: ConnectionContext, params: DetachParams) -> DetachResult:
    """End an attachment; one that does not exist is no error, as the answer may have been lost."""
    attachment = context.session.attachments.get(params.process_id)
    if attachment is not None:
        attachment.close()
        context.session.attachment_ended(params.process_id)
    return DetachResult()


def list_(context: ConnectionContext, params: None) -> ListDetachedResult:
    return ListDetachedResult(context.server.detached.listed())
