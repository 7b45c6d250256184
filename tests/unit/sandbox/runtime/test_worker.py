"""File workers: their responses to requests, as far as they need no namespaces."""

from __future__ import annotations

import os
import socket

import pytest

from exec_server.errors import InternalError
from exec_server.protocol import files
from exec_server.protocol.paths import PathUri
from exec_server.sandbox.runtime import messages, worker
from exec_server.sandbox.runtime.messages import ControlSocket
from exec_server.sandbox.runtime.worker import FileRequest, FileResponse, Worker


@pytest.mark.parametrize(
    ("path", "is_process"),
    [
        ("/proc/self/mem", True),
        ("/proc/thread-self/fd/2", True),
        ("/proc/1", True),
        ("/proc//1/task/1/mem", True),
        ("/proc/version", False),
        ("/proc/sys/1", False),
        ("/proc", False),
        ("/home/proc/1", False),
    ],
)
def test_the_directory_of_a_process(path: str, is_process: bool) -> None:
    assert worker._is_process(path) == is_process


def test_an_unexpected_exception_is_reported_and_ends_the_worker() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        messages.send(ours, FileRequest("fs/unknown", {}), [])
        with pytest.raises(KeyError):
            worker.serve(theirs)
        response, _ = messages.receive(ours, FileResponse)
    assert response.defect.endswith("KeyError: 'fs/unknown'\n")
    assert len(response.defect) <= messages.MAX_DEFECT


def test_a_reported_exception_is_logged_and_breaks_the_worker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours, theirs = socket.socketpair()
    params = files.GetMetadataParams(PathUri.from_wire("file:///"))
    with theirs, ControlSocket(os.getpid(), ours) as control:
        messages.send(theirs, FileResponse(defect="forged\nline"), [])
        broken = Worker(control)
        with pytest.raises(InternalError, match="the log of the server has the reason"):
            broken.perform(files.GET_METADATA, params)
    assert broken.is_broken
    assert "\n" not in caplog.records[0].getMessage()
