"""The tree of exceptions, and the one translation from OSError to the wire."""

from __future__ import annotations

import errno
import inspect

import pytest

from exec_server import errors


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.RpcError, -32603),
        (errors.InvalidRequest, -32600),
        (errors.MethodNotFound, -32601),
        (errors.InvalidParams, -32602),
        (errors.InternalError, -32603),
        (errors.NotFound, -32004),
        (errors.SessionAttached, -32010),
    ],
)
def test_codes(kind: type[errors.RpcError], code: int) -> None:
    error = kind("what happened")
    assert (error.code, error.message, str(error)) == (code, "what happened", "what happened")
    assert issubclass(kind, errors.RpcError)


def test_texts_are_harmless_to_a_terminal() -> None:
    """A traceback prints them, and a server may have chosen them."""
    error = errors.InternalError("one\ntwo \x1b[2J")
    assert (str(error), error.message) == ("one\ntwo \\x1b[2J", "one\ntwo \x1b[2J")
    assert str(errors.StdinClosed("\x9b")) == "\\x9b"


def test_there_is_one_tree() -> None:
    classes = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]
    kinds = [kind for kind in classes if issubclass(kind, BaseException)]
    assert len(kinds) > 8
    assert all(issubclass(kind, errors.ExecServerError) for kind in kinds)


def test_rejected_credential_names_whose_it_is() -> None:
    expected = "the registry has rejected the executor's credential"
    assert str(errors.CredentialRejected()) == expected


def test_protocol_error_says_how_to_end() -> None:
    error = errors.ProtocolError(1002, "unknown opcode")
    assert (error.close_code, error.reason, str(error)) == (
        1002,
        "unknown opcode",
        "unknown opcode",
    )


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (errno.ENOENT, "No such file or directory (os error 2)"),
        (errno.EIO, "I/O error (os error 5)"),
        (errno.ENOMEM, "Out of memory (os error 12)"),
        (errno.EACCES, "Permission denied (os error 13)"),
        (errno.EBUSY, "Resource busy (os error 16)"),
        (errno.EXDEV, "Cross-device link (os error 18)"),
        (errno.EMFILE, "No file descriptors available (os error 24)"),
        (errno.ENOTTY, "Not a tty (os error 25)"),
        (errno.ENOSPC, "No space left on device (os error 28)"),
        (errno.ESPIPE, "Invalid seek (os error 29)"),
        (errno.ENAMETOOLONG, "Filename too long (os error 36)"),
        (errno.ELOOP, "Symbolic link loop (os error 40)"),
        (errno.EOVERFLOW, "Value too large for data type (os error 75)"),
        (errno.EADDRINUSE, "Address in use (os error 98)"),
        (errno.ETIMEDOUT, "Operation timed out (os error 110)"),
        (errno.EDQUOT, "Quota exceeded (os error 122)"),
    ],
)
def test_texts_are_worded_as_the_reference_does(number: int, text: str) -> None:
    import os

    assert errors.os_error_text(OSError(number, os.strerror(number))) == text


def test_texts_of_odd_errors() -> None:
    assert errors.os_error_text(OSError("no number")) == "no number"
    assert errors.os_error_text(OSError(999, None)) == "Unknown error (os error 999)"


def test_names_of_files_stay_out_of_the_text() -> None:
    error = FileNotFoundError(errno.ENOENT, "No such file or directory", "/secret/path")
    assert "secret" not in errors.os_error_text(error)


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOENT, errors.NotFound),
        (errno.EPERM, errors.InvalidRequest),
        (errno.EACCES, errors.InvalidRequest),
        (errno.EINVAL, errors.InvalidRequest),
        (errno.EIO, errors.InternalError),
        (errno.EEXIST, errors.InternalError),
        (errno.ENOSPC, errors.InternalError),
    ],
)
def test_translation(number: int, kind: type[errors.RpcError]) -> None:
    error = errors.rpc_error_from_os(OSError(number, "text"))
    assert type(error) is kind
    assert error.message.endswith(f"(os error {number})")


def test_explained_error_keeps_code_and_data() -> None:
    error = errors.InvalidParams("short")
    error.code, error.data = -1, {"a": 1}
    longer = error.explained("long text")
    assert type(longer) is errors.InvalidParams
    assert (longer.code, longer.data, longer.message) == (-1, {"a": 1}, "long text")


def test_failed_connect_has_the_http_response_if_any() -> None:
    plain = errors.ConnectFailed("refused")
    assert (str(plain), plain.status, plain.headers) == ("refused", None, [])
    answered = errors.ConnectFailed("status 503", 503, [("retry-after", "1")])
    assert (answered.status, answered.headers) == (503, [("retry-after", "1")])


def test_unsupported_names_capability_and_hint() -> None:
    error = errors.Unsupported("process/list", "keep the ids")
    assert str(error) == "the server does not offer process/list: keep the ids"
    assert (error.capability, error.hint) == ("process/list", "keep the ids")
