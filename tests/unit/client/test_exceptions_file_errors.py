"""Errors of files: their classes, numbers and texts."""

from __future__ import annotations

import errno
import pickle

import pytest

from exec_server import errors
from exec_server.client import exceptions
from exec_server.client.exceptions import FileError, file_error, is_a_directory

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("text", "kind", "built_in", "number"),
    [
        ("No such file or directory (os error 2)", exceptions.NotFound, FileNotFoundError, 2),
        ("Permission denied (os error 13)", exceptions.PermissionDenied, PermissionError, 13),
        ("Operation not permitted (os error 1)", exceptions.PermissionDenied, PermissionError, 1),
        ("File exists (os error 17)", exceptions.AlreadyExists, FileExistsError, 17),
        ("Not a directory (os error 20)", exceptions.NotADirectory, NotADirectoryError, 20),
        ("Is a directory (os error 21)", exceptions.IsADirectory, IsADirectoryError, 21),
        ("Directory not empty (os error 39)", exceptions.NotEmpty, OSError, 39),
        ("No space left on device (os error 28)", exceptions.NoSpace, OSError, 28),
        ("Quota exceeded (os error 122)", exceptions.NoSpace, OSError, 122),
        ("Read-only file system (os error 30)", exceptions.ReadOnly, OSError, 30),
        ("Filename too long (os error 36)", exceptions.NameTooLong, OSError, 36),
        ("Symbolic link loop (os error 40)", exceptions.LinkLoop, OSError, 40),
        ("I/O error (os error 5)", FileError, OSError, 5),
    ],
)
def test_the_class_fits_the_number(
    text: str, kind: type[FileError], built_in: type[OSError], number: int
) -> None:
    error = file_error(errors.InternalError(text), "/x")
    assert type(error) is kind
    assert isinstance(error, built_in)
    assert isinstance(error, errors.RpcError)
    assert (error.errno, error.filename) == (number, "/x")
    assert str(error) == f"/x: {text}"
    assert error.strerror == text.partition(" (os")[0]


def test_code_and_data_are_kept() -> None:
    original = errors.InvalidRequest("Permission denied (os error 13)")
    original.data = {"more": 1}
    error = file_error(original, "/x")
    assert (error.code, error.data) == (-32600, {"more": 1})


def test_a_missing_file_is_the_error_of_the_protocol_too() -> None:
    error = file_error(errors.NotFound("No such file or directory (os error 2)"), "/x")
    assert isinstance(error, errors.NotFound)
    assert error.errno == errno.ENOENT  # type: ignore[attr-defined]


def test_an_error_without_a_number_keeps_its_class() -> None:
    error = file_error(errors.InvalidParams("wrong"), "/x")
    assert type(error) is errors.InvalidParams
    assert str(error) == "/x: wrong"


def test_another_text_keeps_the_number() -> None:
    error = is_a_directory("/x").explained("something else")
    assert (str(error), error.errno, error.filename) == ("something else", errno.EISDIR, "/x")


def test_errors_can_be_copied_to_other_processes() -> None:
    copy = pickle.loads(pickle.dumps(is_a_directory("/x")))
    assert (type(copy), copy.errno, copy.filename) == (exceptions.IsADirectory, errno.EISDIR, "/x")


def test_what_is_no_regular_file_has_a_number() -> None:
    for text in ("path `/x` is not a file", "path is not a regular file"):
        error = file_error(errors.InvalidRequest(text), "/x")
        assert isinstance(error, exceptions.NotAFile)
        assert isinstance(error, errors.InvalidRequest)
        assert (error.errno, error.filename, str(error)) == (
            errno.EINVAL,
            "/x",
            "/x: not a regular file",
        )
        assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_words_of_the_protocol_are_translated() -> None:
    text = "fs/copy requires recursive: true when sourcePath is a directory"
    error = file_error(errors.InvalidRequest(text), "a", "b")
    assert isinstance(error, IsADirectoryError)
    assert str(error) == "a to b: it is a directory: pass recursive=True"
    for text in exceptions._REFUSALS:
        assert "fs/" not in str(file_error(errors.InvalidRequest(text), "a", "b"))


@pytest.mark.parametrize(
    "kind", [errors.PatchDoesNotApply, errors.EditNotFound, errors.EditAmbiguous]
)
def test_changes_that_do_not_fit_have_classes_of_their_own(
    kind: type[errors.InvalidRequest],
) -> None:
    sent = errors.InvalidRequest("it does not fit")
    sent.data = {"reason": kind.reason, "count": 2, "lines": [1, 5]}  # type: ignore[attr-defined]
    error = file_error(sent, "/x")
    assert type(error) is kind
    assert (str(error), error.code, error.data) == ("/x: it does not fit", -32600, sent.data)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.data) == (kind, str(error), error.data)
    if isinstance(error, errors.EditAmbiguous):
        assert (error.count, error.lines) == (2, (1, 5))


@pytest.mark.parametrize("data", [None, {"reason": 5}, {"reason": []}, {"reason": "other"}, "text"])
def test_other_data_is_left_alone(data: object) -> None:
    sent = errors.InvalidRequest("it does not fit")
    sent.data = data
    error = file_error(sent, "/x")
    assert (type(error), error.data) == (errors.InvalidRequest, data)


@pytest.mark.parametrize("data", [None, {}, {"count": "2", "lines": 3}])
def test_what_a_server_does_not_tell_is_unknown(data: object) -> None:
    error = errors.EditAmbiguous("text")
    error.data = data
    assert (error.count, error.lines) == (0, ())
