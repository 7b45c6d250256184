"""Messages between the server and its watchdog; killing is tested in integration."""

from __future__ import annotations

import os

import pytest

from exec_server.cli.serve import watchdog
from exec_server.cli.serve.watchdog import Watchdog, read_registrations


def _registered(*messages: tuple[str, bool]) -> set[bytes]:
    reader, writer = os.pipe()
    dog = Watchdog(0, writer, -1)
    for path, exists in messages:
        dog.register_cleanup(path, exists)
    os.close(writer)
    try:
        return read_registrations(reader)
    finally:
        os.close(reader)


def test_paths_are_registered_until_they_are_gone() -> None:
    assert _registered(("/a", True), ("/b", True), ("/a", False), ("/c", False)) == {b"/b"}
    assert _registered(("/a\n\udcff", True)) == {b"/a\n\xff"}
    assert _registered() == set()


def test_messages_may_be_cut_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_READ_BYTES", 3)
    assert _registered(("/first", True), ("/second", True), ("/first", False)) == {b"/second"}


def test_registrations_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "MAX_REGISTERED", 2)
    assert _registered(*((f"/{number}", True) for number in range(5))) == {b"/0", b"/1"}


def test_readiness_is_read_once() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"r")
    dog = Watchdog(0, -1, reader)
    dog.wait_until_ready()
    dog.wait_until_ready()
    os.close(writer)
    with pytest.raises(OSError):
        os.fstat(reader)


def test_a_watchdog_that_is_gone_does_no_harm() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    Watchdog(0, writer, -1).register_cleanup("/a", True)
    os.close(writer)


def test_a_watchdog_that_does_not_read_does_not_block_the_server() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    dog = Watchdog(0, writer, -1)
    for _ in range(100):
        dog.register_cleanup("/" + "x" * 4000, True)
    os.close(writer)
    os.close(reader)


@pytest.mark.parametrize("parents", [[4], [7, 4]], ids=["before", "meanwhile"])
def test_only_the_server_is_moved_to_the_cgroup(
    monkeypatch: pytest.MonkeyPatch, parents: list[int]
) -> None:
    """A server that is killed at once leaves its watchdog to init, here process 4."""
    moved, removed = [], []

    class FakeCgroup:
        @staticmethod
        def create_for(pid: int) -> FakeCgroup:
            moved.append(pid)
            return FakeCgroup()

        def remove(self) -> None:
            removed.append(self)

    monkeypatch.setattr(watchdog, "Cgroup", FakeCgroup)
    monkeypatch.setattr(os, "getppid", iter(parents).__next__)
    assert watchdog._move_to_cgroup(7) is None
    assert moved == [7] * (len(parents) - 1)
    assert len(removed) == len(moved)
