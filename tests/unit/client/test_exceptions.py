"""Texts of exceptions: they name the command, the end of its stderr, and no argument."""

from __future__ import annotations

import errno
import pickle

import msgspec
import pytest

import exec_server
from exec_server import errors
from exec_server.client import exceptions
from exec_server.client.exceptions import (
    CommandDenied,
    CommandFailed,
    NotAllCopied,
    PortError,
    SandboxDenied,
    Timeout,
)
from exec_server.client.results import NotCopied, Result, Transfer
from exec_server.errors import ExecServerError, NotFound
from exec_server.protocol.sandbox import Denial

RESULT = Result(("cmd", "secret"), b"secret", b"no such file\n", 3, 0.1)
DENIAL = Denial("a line", "/etc/x", "write", "read /")


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (CommandFailed(RESULT), ExecServerError, "cmd ended with exit code 3\n  no such file"),
        (
            CommandDenied(RESULT),
            SandboxDenied,
            "cmd ended with exit code 3: denied by its sandbox\n  no such file",
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


def _failed(stderr: bytes, denial: Denial | None = None) -> Result:
    return Result(("cmd",), b"", stderr, 1, 0.1, sandbox_denial=denial)


@pytest.mark.parametrize(
    ("stderr", "lines"),
    [
        (b"", []),
        (b"\n \n", []),
        (b"a\nb\n", ["a", "b"]),
        (b"\x1b[31mred\xff", ["\\x1b[31mred\ufffd"]),
        (b"".join(b"%d\n" % n for n in range(12)), ["…", *map(str, range(2, 12))]),
        (b"x" * 5000, ["…", "x" * 1000]),
    ],
)
def test_the_end_of_stderr(stderr: bytes, lines: list[str]) -> None:
    text = "".join(f"\n  {line}" for line in lines)
    assert str(CommandFailed(_failed(stderr))) == f"cmd ended with exit code 1{text}"


UNKNOWN = Denial("no", None, "write", None)
EITHER = msgspec.structs.replace(
    UNKNOWN, candidates=(UNKNOWN, DENIAL, Denial(None, None, "network", "no network"))
)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (SandboxDenied("/etc/x: no (os error 13)"), "/etc/x: no (os error 13)"),
        (SandboxDenied("/etc/x: no (os error 13)", DENIAL), "/etc/x: no (read /)"),
        (SandboxDenied("a to b: no", DENIAL), "a to b: no (write /etc/x: read /)"),
        (SandboxDenied("no", Denial(None, "/x", None, None)), "no (access /x)"),
        (
            SandboxDenied("no", Denial(None, "/x\ny\x1b", None, "a\nb")),
            r"no (access /x\ny\x1b: a\nb)",
        ),
        (SandboxDenied("no (os error 1)", Denial(None, None, None, None)), "no (os error 1)"),
        (
            CommandDenied(_failed(b"", DENIAL)),
            "cmd ended with exit code 1: denied by its sandbox (write /etc/x: read /)",
        ),
        (
            CommandDenied(_failed(b"", EITHER)),
            "cmd ended with exit code 1: denied by its sandbox "
            "(one of: a write; write /etc/x: read /; no network)",
        ),
    ],
)
def test_a_denial_names_path_and_rule(error: SandboxDenied, text: str) -> None:
    assert str(error) == text


def test_every_exception_is_exported() -> None:
    internal = {"CredentialRejected", "MalformedMessage", "NotFound", "ProgramNotFound"}
    internal |= {"ProtocolError", "RelayError"}
    for module, hidden in ((errors, internal), (exceptions, set()), (exceptions, set())):
        own = {
            name
            for name, value in vars(module).items()
            if isinstance(value, type)
            and issubclass(value, ExecServerError)
            and value.__module__ == module.__name__
        }
        assert own - hidden <= set(exec_server.__all__)
        for name in own - hidden:
            assert getattr(exec_server, name) is getattr(module, name)


def test_an_incomplete_copy_names_the_first_error() -> None:
    one, two = NotCopied("a", NotFound("a: none")), NotCopied("b", OSError("b: none"))
    for failed, text in (((one,), "a: none"), ((one, two), "a: none, and 1 more")):
        error = NotAllCopied(Transfer(0, 0, 0, 0, 0, failed=failed))
        assert str(error) == f"not everything was copied: {text}"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM])
def test_a_denial_is_a_permission_error(number: int) -> None:
    error = SandboxDenied("/etc/x: no", DENIAL, number)
    assert isinstance(error, PermissionError)
    assert (error.errno, error.filename) == (number, "/etc/x")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.errno, copy.denial, str(copy)) == (number, DENIAL, str(error))


def test_a_denied_command_is_a_permission_error() -> None:
    error = CommandDenied(_failed(b"no\n", DENIAL))
    assert isinstance(error, PermissionError)
    assert (error.errno, error.filename) == (errno.EACCES, "/etc/x")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.result, copy.denial, str(copy)) == (error.result, DENIAL, str(error))


def test_a_port_in_use_has_its_number() -> None:
    error = PortError("cannot listen on port 80: Address in use (os error 98)")
    assert (error.errno, error.strerror) == (errno.EADDRINUSE, "Address in use")
    assert str(error) == "cannot listen on port 80: Address in use (os error 98)"
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.errno, copy.message, copy.code) == (error.errno, error.message, error.code)
