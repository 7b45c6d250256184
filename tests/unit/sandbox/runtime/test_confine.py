"""The checks of confinement that need no confined process, and the filter in the kernel."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.forked import in_own_process

from exec_server.sandbox.policy.model import Restrictions, View
from exec_server.sandbox.runtime import confine, kernel
from exec_server.sandbox.runtime.confine import NotConfined, check_streams

_VIEW = View(False, (), (), (), ())
_RESTRICTIONS = Restrictions(
    allow_nesting=False, file_rights=False, unix_sockets=True, is_separate=True
)
_NEEDS_FILTER = pytest.mark.skipif(not kernel.is_supported_machine(), reason="there is no filter")


@contextmanager
def _opened(path: Path | str, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("has_file_rights", [False, True])
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_PATH])
def test_a_directory_as_a_stream_is_refused(
    tmp_path: Path, flags: int, has_file_rights: bool
) -> None:
    with _opened(tmp_path, flags) as descriptor, pytest.raises(NotConfined, match="is a directory"):
        check_streams([descriptor], has_file_rights=has_file_rights)


def test_a_file_to_read_needs_file_rights(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with _opened(path, os.O_RDONLY) as descriptor:
        check_streams([descriptor], has_file_rights=True)
        with pytest.raises(NotConfined, match=f"standard stream {descriptor} is a file"):
            check_streams([descriptor], has_file_rights=False)


def test_other_streams_are_accepted(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    with (
        _opened(tmp_path / "new", os.O_WRONLY | os.O_CREAT) as file,
        _opened(os.devnull, os.O_RDONLY) as device,
    ):
        check_streams([reader, writer, file, device], has_file_rights=False)
    os.close(reader)
    os.close(writer)


@_NEEDS_FILTER
@in_own_process
def test_a_command_without_network_has_one_listener_at_most() -> None:
    kernel.set_no_new_privileges()
    first = confine._filter_command("restricted", _VIEW, _RESTRICTIONS)
    assert first is not None
    # The kernel refuses a second one: then the filter itself refuses sockets.
    assert confine._filter_command("restricted", _VIEW, _RESTRICTIONS) is None
    with pytest.raises(PermissionError):
        socket.socket()


@_NEEDS_FILTER
@pytest.mark.parametrize(("network", "view"), [("enabled", _VIEW), ("restricted", None)])
def test_other_commands_have_no_listener(network: str, view: View | None) -> None:
    @in_own_process
    def check() -> None:
        kernel.set_no_new_privileges()
        assert confine._filter_command(network, view, _RESTRICTIONS) is None  # type: ignore[arg-type]
        assert kernel.has_filter()

    check()
