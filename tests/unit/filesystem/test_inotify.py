"""Inotify: subscriptions that share watches, against the kernel."""

from __future__ import annotations

import asyncio
import errno
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.clock import Clock

from exec_server.filesystem import inotify as module
from exec_server.filesystem.inotify import (
    BURST,
    DIRECTORY_MASK,
    FILE_MASK,
    DirectoryListener,
    Inotify,
    Subscription,
)


class Loop(Clock):
    """A clock that also records the readers of descriptors."""

    def __init__(self) -> None:
        super().__init__()
        self.readers: set[int] = set()

    def call_soon_threadsafe(self, callback: object) -> None:
        self.call_soon(callback)  # type: ignore[arg-type]

    def add_reader(self, fd: int, callback: object) -> None:
        self.readers.add(fd)

    def remove_reader(self, fd: int) -> None:
        self.readers.discard(fd)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    loop = Loop()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
    return loop


@pytest.fixture
def inotify(loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Inotify]:
    monkeypatch.chdir(tmp_path)
    instance = Inotify(lambda function: function())
    yield instance
    instance.close()
    assert loop.readers == set()


def _subscribe(inotify: Inotify, *names: str, path: str = ".") -> Subscription:
    subscription = Subscription()
    descriptor = inotify.add(subscription, path, DIRECTORY_MASK)
    for name in names:
        inotify.add_name(subscription, descriptor, name.encode())
    return subscription


def test_the_instance_is_opened_at_its_first_use(inotify: Inotify, loop: Loop) -> None:
    loop.run_soon()
    assert loop.readers == set()
    _subscribe(inotify)
    _subscribe(inotify)
    loop.run_soon()
    assert len(loop.readers) == 1
    inotify.read_events()  # there are none


def test_an_event_fires_those_that_watch_its_name(inotify: Inotify) -> None:
    a, b, both = (_subscribe(inotify, *names) for names in ("a", "b", "ab"))
    Path("a").touch()
    Path("c").touch()
    inotify.read_events()
    assert (a.has_fired, b.has_fired, both.has_fired) == (True, False, True)


def test_a_subscription_calls_back_once(inotify: Inotify) -> None:
    early, late = _subscribe(inotify, "a"), _subscribe(inotify, "a")
    calls: list[str] = []
    early.on_fired(lambda: calls.append("early"))
    for name in ("a", "b"):
        Path(name).touch()
        Path(name).unlink()
        inotify.read_events()
    assert calls == ["early"]
    late.on_fired(lambda: calls.append("late"))
    assert calls == ["early", "late"]


def test_the_last_subscription_removes_the_watch(inotify: Inotify) -> None:
    first, second = _subscribe(inotify, "a", "b"), _subscribe(inotify, "a")
    inotify.remove(first)
    assert len(inotify._watches) == 1
    Path("b").touch()
    Path("a").touch()
    inotify.read_events()
    assert (first.has_fired, second.has_fired) == (False, True)
    inotify.remove_later(second)
    inotify.remove(second)
    assert inotify._watches == {}
    Path("a").unlink()
    inotify.read_events()  # the kernel confirms the removal


def test_a_removed_subscription_adds_nothing(inotify: Inotify) -> None:
    subscription = Subscription()
    inotify.remove(subscription)
    with pytest.raises(OSError, match="canceled") as failed:
        inotify.add(subscription, ".", DIRECTORY_MASK)
    assert failed.value.errno == errno.ECANCELED
    assert inotify.explain(failed.value) is None


def test_the_end_of_a_directory_fires_and_removes_its_watch(inotify: Inotify) -> None:
    os.mkdir("d")
    subscription = _subscribe(inotify, "a", path="d")
    os.rmdir("d")
    inotify.read_events()
    assert subscription.has_fired
    assert inotify._watches == {}
    [descriptor] = subscription.names
    inotify.add_name(subscription, descriptor, b"b")
    inotify.remove(subscription)


def test_attributes_of_a_watched_directory_itself_do_not_fire(inotify: Inotify) -> None:
    subscription = _subscribe(inotify, "a")
    os.utime(".")
    inotify.read_events()
    assert not subscription.has_fired


def test_a_file_fires_when_it_is_written(inotify: Inotify) -> None:
    Path("f").touch()
    subscription = Subscription()
    inotify.add(subscription, "f", FILE_MASK)
    Path("f").write_text("x")
    inotify.read_events()
    assert subscription.has_fired


def test_lost_events_fire_everything_in_bursts(
    inotify: Inotify, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkdir("d")
    paths = [".", "d"] * BURST
    subscriptions = [_subscribe(inotify, path=path) for path in paths]
    loop.run_soon()
    overflow = struct.pack("iIII", -1, 0x4000, 0, 0)
    monkeypatch.setattr(os, "read", lambda fd, size: overflow)
    inotify.read_events()
    assert sum(each.has_fired for each in subscriptions) == BURST
    loop.run_soon()
    assert all(each.has_fired for each in subscriptions)


def test_the_watches_of_the_server_are_limited(
    inotify: Inotify, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_SERVER_WATCHES", 1)
    first = _subscribe(inotify)
    with pytest.raises(OSError, match="quota") as failed:
        inotify.add(Subscription(), "..", DIRECTORY_MASK)
    assert inotify.explain(failed.value) == (
        "the server watches at most 16384 files and directories, 8192 of them for fs/watch"
    )
    inotify.remove(first)
    _subscribe(inotify)


def test_a_closed_instance_watches_nothing(loop: Loop, tmp_path: Path) -> None:
    unused = Inotify(lambda function: function())
    unused.close()
    with pytest.raises(OSError, match="canceled"):
        _subscribe(unused, path=str(tmp_path))
    closed = Inotify(lambda function: function())
    subscription = _subscribe(closed, path=str(tmp_path))
    closed.close()
    loop.run_soon()
    closed.remove(subscription)
    assert loop.readers == set()


def test_a_thread_that_hangs_does_not_keep_the_server_from_ending(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CLOSE_SECONDS", 0.001)
    instance = Inotify(lambda function: function())
    _subscribe(instance, path=str(tmp_path))
    with instance._lock:
        instance.close()
    os.close(instance._fd)


class Listener(DirectoryListener):
    """Records its events."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[bytes] = []
        self.overflows = 0

    def on_event(self, descriptor: int, mask: int, name: bytes) -> None:
        self.names.append(name)

    def on_overflow(self) -> None:
        self.overflows += 1


def test_a_listener_and_a_subscription_share_a_watch(inotify: Inotify) -> None:
    subscription, listener = _subscribe(inotify, "f"), Listener()
    inotify.listen(listener, ".", "here")
    inotify.add(subscription, ".", DIRECTORY_MASK)  # keeps the events of the listener
    Path("f").touch()
    inotify.read_events()
    assert (subscription.has_fired, b"f" in listener.names) == (True, True)
    late = _subscribe(inotify, "f")
    with open("f", "r+") as file:
        file.write("x")
    inotify.read_events()
    assert not late.has_fired  # the name did not come or go
    inotify.remove(subscription)
    inotify.remove(late)
    assert len(inotify._watches) == 1
    inotify.remove_listener_later(listener)
    assert (inotify._watches, listener.directories.names()) == ({}, [])
    with pytest.raises(OSError, match="canceled"):
        inotify.listen(listener, ".", "here")


def test_listeners_leave_room_for_subscriptions(
    inotify: Inotify, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_LISTENED", 1)
    os.mkdir("d")
    inotify.listen(Listener(), ".", "")
    with pytest.raises(OSError, match="quota"):
        inotify.listen(Listener(), "d", "")
    _subscribe(inotify, path="d")


def test_lost_events_are_an_overflow_for_listeners(inotify: Inotify) -> None:
    listener = Listener()
    os.mkdir("d")
    inotify.listen(listener, ".", "")
    inotify.listen(listener, "d", "d")
    inotify._report(-1, 0x4000, b"")
    assert listener.overflows == 1
    inotify._report(12345, 0x2, b"")  # of a watch that is gone
    DirectoryListener().on_event(0, 0, b"")
    DirectoryListener().on_overflow()


def test_many_reports_are_made_in_parts(
    inotify: Inotify, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REPORTS", 4)
    listeners = [Listener(), Listener()]
    for listener in listeners:
        inotify.listen(listener, ".", "")
    subscription = _subscribe(inotify, "e")
    loop.run_soon()
    for name in "abcde":
        os.mkdir(name)
    inotify.read_events()
    assert [listener.names for listener in listeners] == [[b"a", b"b"]] * 2
    os.mkdir("f")
    inotify.read_events()  # the earlier events are reported first
    assert (listeners[0].names, subscription.has_fired) == ([b"a", b"b"], False)
    loop.run_soon()
    inotify.read_events()
    assert [listener.names for listener in listeners] == [list(map(str.encode, "abcdef"))] * 2
    assert subscription.has_fired
