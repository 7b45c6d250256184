"""The numbers of Linux are those of this machine, and are translated on others."""

from __future__ import annotations

import errno
import os
import signal

import pytest

from exec_server.client import exceptions
from exec_server.client.exceptions import NotEmpty, command_error, file_error
from exec_server.errors import InternalError

pytestmark = pytest.mark.quick


def test_errors_are_those_of_this_machine() -> None:
    for number, error in exceptions.ERRORS.items():
        assert (getattr(errno, error.name), os.strerror(number)) == (number, error.text)
        assert exceptions.local_number(number) == number
        assert exceptions.number_of_text(error.text) == number
    assert exceptions.local_number(4000) == 4000
    assert exceptions.number_of_text("no error of a system") is None


def test_signals_are_those_of_this_machine() -> None:
    named = {f"SIG{name}": number for number, name in exceptions.SIGNALS.items()}
    assert named == {
        each.name: each.value for each in signal.Signals if each.value < 32 and each.name in named
    }


def test_an_error_has_the_number_of_the_client_and_its_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(errno, "ELOOP", 62)
    error = file_error(command_error("Too many levels of symbolic links"), "/x")
    assert (error.errno, error.message) == (  # type: ignore[attr-defined]
        62,
        "/x: Too many levels of symbolic links (os error 40)",
    )
    assert type(file_error(InternalError("Directory not empty (os error 39)"), "/x")) is NotEmpty
