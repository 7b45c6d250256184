"""Failures of the kernel while a view is built: each one is reported, or harmless."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from unittest import mock

import pytest

from exec_server.errors import InternalError
from exec_server.sandbox.policy.model import Step
from exec_server.sandbox.runtime import kernel, view
from exec_server.sandbox.runtime.view import StaleView

_STEP = Step("read", "/ws/.git", True, 1, 2)
_FAILURES = [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO]


@contextlib.contextmanager
def _failing(number: int) -> Iterator[None]:
    """No path can be opened or examined."""

    def refuse(path: str, **_: object) -> int:
        raise OSError(number, os.strerror(number), path)

    with mock.patch.object(kernel, "open_entry", refuse), mock.patch.object(os, "stat", refuse):
        yield


def _staging() -> view._StagingArea:
    staging = view._StagingArea.__new__(view._StagingArea)
    staging.prefix = ""
    return staging


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENOTDIR, errno.ELOOP])
def test_a_path_that_was_replaced_makes_the_view_stale(number: int) -> None:
    for act in (lambda: view._clone(_STEP), lambda: view.mount_read_only([_STEP])):
        with pytest.raises(StaleView, match=r"/ws/\.git: "), _failing(number):
            act()


@pytest.mark.parametrize("number", [*_FAILURES, errno.EACCES, errno.ENAMETOOLONG])
def test_a_path_that_cannot_be_opened_is_refused_with_the_reason(number: int) -> None:
    with pytest.raises(InternalError) as refused, _failing(number):
        view._clone(_STEP)
    assert not isinstance(refused.value, StaleView)
    assert refused.value.message.startswith("/ws/.git: ")
    assert refused.value.message.endswith(f"(os error {number})")


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES])
def test_files_of_the_kernel_that_no_process_reaches_need_no_mounts(number: int) -> None:
    with _failing(number):
        view._make_read_only("/proc", ("sys",))
        _staging().hide("/proc", ("kcore",))
        assert view._open_terminals() is None


@pytest.mark.parametrize("number", _FAILURES)
def test_files_of_the_kernel_that_cannot_be_examined_are_a_failure(number: int) -> None:
    staging = _staging()
    for act in (
        lambda: view._make_read_only("/proc", ("sys",)),
        lambda: staging.hide("/proc", ("kcore",)),
        lambda: view._mount_proc(staging, "private", None),
        view._open_terminals,
    ):
        with pytest.raises(OSError, match=os.strerror(number)), _failing(number):
            act()


def test_a_machine_without_procfs_gets_none() -> None:
    with _failing(errno.ENOENT):
        view._mount_proc(_staging(), "private", None)
