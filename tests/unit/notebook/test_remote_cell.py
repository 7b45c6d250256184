"""The errors of the magics are short, and errors of the client."""

from __future__ import annotations

from exec_server.client.exceptions import CommandFailed, Timeout
from exec_server.client.results import Result
from exec_server.errors import ExecServerError
from exec_server.notebook.remote_cell import (
    RemoteCommandFailed,
    RemoteError,
    RemoteInterrupt,
    RemoteTimeout,
)

RESULT = Result(("bash", "-c", "secret"), b"", b"noise", 2, 1.26)


def test_texts() -> None:
    failed = RemoteCommandFailed(RESULT)
    assert failed._render_traceback_() == ["RemoteCommandFailed: exit code 2 after 1.3 s"]
    denied = RemoteCommandFailed(Result((), b"", b"", 1, 0.0, sandbox_denied=True))
    assert str(denied) == "exit code 1 after 0.0 s, denied by its sandbox"
    assert str(RemoteTimeout(0.5, RESULT)) == "killed after 0.5 s"
    assert str(RemoteInterrupt()) == "the command was killed"
    assert str(RemoteError("a\nb\x1b[2J")) == "a\nb\\x1b[2J"


def test_kinds() -> None:
    assert issubclass(RemoteError, ExecServerError)
    assert issubclass(RemoteCommandFailed, CommandFailed)
    assert issubclass(RemoteTimeout, Timeout)
    assert issubclass(RemoteInterrupt, KeyboardInterrupt)
    assert not issubclass(RemoteInterrupt, Exception)
