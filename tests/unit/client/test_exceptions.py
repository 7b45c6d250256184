"""Texts of exceptions: they name the command and no argument or output."""

from __future__ import annotations

import pytest

from exec_server.client.exceptions import (
    CommandDenied,
    CommandFailed,
    NotAllCopied,
    SandboxDenied,
    Timeout,
)
from exec_server.client.results import NotCopied, Result, Transfer
from exec_server.errors import ExecServerError, NotFound

RESULT = Result(("cmd", "secret"), b"secret", b"secret", 3, 0.1)


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (CommandFailed(RESULT), ExecServerError, "cmd ended with exit code 3"),
        (
            CommandDenied(RESULT),
            SandboxDenied,
            "cmd ended with exit code 3: denied by its sandbox",
        ),
        (Timeout(0.5, RESULT), TimeoutError, "cmd did not end within 0.5 s and was killed"),
    ],
)
def test_an_error_of_a_command(
    error: CommandFailed | Timeout, kind: type[Exception], text: str
) -> None:
    assert isinstance(error, kind)
    assert str(error) == text
    assert error.result is RESULT


def test_an_incomplete_copy_names_the_first_error() -> None:
    one, two = NotCopied("a", NotFound("a: none")), NotCopied("b", OSError("b: none"))
    for failed, text in (((one,), "a: none"), ((one, two), "a: none, and 1 more")):
        error = NotAllCopied(Transfer(0, 0, 0, 0, 0, failed=failed))
        assert str(error) == f"not everything was copied: {text}"
