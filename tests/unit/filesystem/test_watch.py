"""fs/watchMissing against the kernel; the relevant events are those of the reference."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar
from unittest import mock

import pytest

from exec_server.filesystem import syscalls, watch
from exec_server.filesystem.inotify import Inotify, Subscription
from exec_server.filesystem.watch import MissingWatch, add_watches
from exec_server.protocol.files import WatchMissingParams
from exec_server.protocol.paths import PathUri

T = TypeVar("T")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    home = tmp_path.resolve()
    monkeypatch.chdir(home)
    os.makedirs("dir")
    os.makedirs("g1/g2")
    Path("file").write_text("x")
    os.symlink("dir", "dlink")
    os.symlink("file", "flink")
    os.symlink("nowhere", "dangling")
    before = os.listdir("/proc/self/fd")
    yield
    assert os.listdir("/proc/self/fd") == before


def _params(
    missing: list[str], present: str | None = None, watch_id: int = 1
) -> WatchMissingParams:
    here = os.getcwd()
    return WatchMissingParams(
        watch_id,
        [PathUri.from_wire(os.path.join(here, path)) for path in missing],
        None if present is None else PathUri.from_wire(os.path.join(here, present)),
    )


@contextmanager
def _inotify() -> Iterator[Inotify]:
    """An instance on a loop that never runs: the test reads its events."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    with mock.patch.object(asyncio, "get_running_loop", return_value=loop):
        inotify = Inotify(lambda function: function())
    try:
        yield inotify
    finally:
        inotify.close()
        asyncio.set_event_loop(None)
        loop.close()


def _fires(action: Callable[[], object], missing: str = "x", present: str | None = None) -> bool:
    with _inotify() as inotify:
        subscription = Subscription()
        assert add_watches(_params([missing], present), inotify, subscription)
        inotify.read_events()
        assert not subscription.has_fired
        action()
        inotify.read_events()
        return subscription.has_fired


def _watchable(missing: list[str], present: str | None = None) -> bool:
    with _inotify() as inotify:
        return add_watches(_params(missing, present), inotify, Subscription())


def _touch_and_unlink(path: str) -> None:
    Path(path).touch()
    os.unlink(path)


def _rename_and_back(path: str) -> None:
    os.rename(path, "elsewhere")
    os.rename("elsewhere", path)


@pytest.mark.parametrize(
    "action",
    [
        lambda: Path("x").touch(),
        lambda: os.mkdir("x"),
        lambda: os.symlink("q", "x"),
        lambda: os.rename("file", "x"),
        lambda: os.link("file", "x"),
        partial(_touch_and_unlink, "x"),
    ],
)
def test_a_missing_path_that_appears_fires(action: Callable[[], object]) -> None:
    assert _fires(action)


@pytest.mark.parametrize(
    ("missing", "action"),
    [
        ("d1/d2/f", lambda: os.mkdir("d1")),
        ("g1/d2/f", lambda: os.mkdir("g1/d2")),
        ("dir/x", lambda: os.rmdir("dir")),
        ("dir/x", lambda: os.rename("dir", "moved")),
        ("g1/g2/x", lambda: os.rename("g1", "g9")),
        ("g1/g2/x", partial(_rename_and_back, "g1")),
        ("g1/g2/x", lambda: os.chmod("g1/g2", 0o700)),
        ("g1/g2/x", lambda: os.utime("g1/g2")),
        ("g1/g2/x", lambda: shutil.rmtree("g1")),
    ],
)
def test_a_change_on_the_way_fires(missing: str, action: Callable[[], object]) -> None:
    assert _fires(action, missing)


@pytest.mark.parametrize(
    "action",
    [
        lambda: Path("g1/other").touch(),
        lambda: Path("g1/g2/other").write_text("x"),
        partial(_touch_and_unlink, "g1/g2/other"),
        lambda: os.listdir("g1/g2"),
    ],
)
def test_unrelated_changes_do_not_fire(action: Callable[[], object]) -> None:
    assert not _fires(action, "g1/g2/x")


def _replace() -> None:
    Path("other").write_text("y")
    os.rename("other", "file")


@pytest.mark.parametrize(
    ("present", "action"),
    [
        ("file", lambda: Path("file").write_text("more")),
        ("file", lambda: os.utime("file")),
        ("file", lambda: os.chmod("file", 0o600)),
        ("file", lambda: os.unlink("file")),
        ("file", lambda: os.rename("file", "moved")),
        ("file", _replace),
        ("dir", lambda: os.utime("dir")),
        ("dir", lambda: os.rmdir("dir")),
        ("g1/g2", lambda: os.rename("g1", "g9")),
    ],
)
def test_a_change_of_what_is_present_fires(present: str, action: Callable[[], object]) -> None:
    assert _fires(action, "x", present)


@pytest.mark.parametrize(
    ("present", "action"),
    [
        ("file", lambda: Path("file").read_text()),
        ("file", lambda: open("file", "r+").close()),
        ("file", lambda: os.link("file", "hard")),
        ("dir", lambda: Path("dir/child").write_text("x")),
        ("/", lambda: Path("dir/child").write_text("x")),
    ],
)
def test_other_uses_of_what_is_present_do_not_fire(
    present: str, action: Callable[[], object]
) -> None:
    assert not _fires(action, "x", present)


@pytest.mark.parametrize("path", ["file", "dangling", "dlink/x", "file/x", "dangling/x", "/"])
def test_what_exists_or_lies_behind_a_link_is_not_missing(path: str) -> None:
    assert not _watchable([path])
    assert not _watchable(["x", path])


@pytest.mark.parametrize("path", ["missing", "dangling", "flink", "dlink", "file/x"])
def test_what_is_no_plain_file_or_directory_is_not_present(path: str) -> None:
    assert not _watchable(["x"], path)


@pytest.mark.parametrize("path", ["/proc/x", "/sys/x", "/dev/pts/x", "n" * 300])
def test_places_without_events_are_not_watched(path: str) -> None:
    assert not _watchable([path])


def test_the_number_of_paths_is_limited() -> None:
    names = [f"m{number}" for number in range(watch.MAX_MISSING)]
    assert _watchable(names)
    assert _watchable(["x", "x"])
    assert not _watchable([*names, "more"])
    assert not _watchable([])


def test_the_number_of_watches_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "MAX_WATCHES", 2)
    assert not _watchable(["g1/g2/x"])


def test_foreign_paths_are_not_watched() -> None:
    foreign = PathUri.from_wire("file:///C:/x")
    here = PathUri.from_wire(f"{os.getcwd()}/x")
    with _inotify() as inotify:
        for params in (WatchMissingParams(1, [foreign]), WatchMissingParams(1, [here], foreign)):
            assert not add_watches(params, inotify, Subscription())


@pytest.mark.parametrize(
    ("call", "number", "reason"),
    [
        ("inotify_init", errno.EMFILE, "fs.inotify.max_user_instances"),
        ("inotify_add_watch", errno.ENOSPC, "fs.inotify.max_user_watches"),
    ],
)
def test_a_limit_of_the_kernel_is_named_in_the_log_once(
    call: str,
    number: int,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(syscalls, call, fail)
    with _inotify() as inotify:
        for _ in range(3):
            assert not add_watches(_params(["x"]), inotify, Subscription())
    assert caplog.text.count("fs/watchMissing fails") == caplog.text.count(reason) == 1


# The watch of a connection


class World:
    """The watch of a connection, its instance, and the ids that it has notified."""

    def __init__(self) -> None:
        self.inotify = Inotify(self._run_in_thread)
        self.watched = MissingWatch(self.inotify)
        self.fired: asyncio.Queue[int] = asyncio.Queue()
        self._jobs: list[asyncio.Future[None]] = []

    def _run_in_thread(self, function: Callable[[], None]) -> object:
        self._jobs.append(asyncio.get_running_loop().run_in_executor(None, function))
        return None

    async def close(self) -> None:
        self.watched.close()
        for job in self._jobs:
            await job
        assert self.inotify._watches == {}
        self.inotify.close()
        await asyncio.get_running_loop().shutdown_default_executor()

    async def start(self, watch_id: int, *missing: str) -> bool:
        params = _params(list(missing), watch_id=watch_id)
        return await self.watched.start(params, self.fired.put_nowait, _in_thread)


def _with_world(scenario: Callable[[World], Awaitable[None]]) -> None:
    async def run() -> None:
        world = World()
        try:
            async with asyncio.timeout(10):
                await scenario(world)
        finally:
            await world.close()

    asyncio.run(run())


async def _in_thread(function: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(None, function)


def test_a_watch_notifies_once() -> None:
    async def scenario(world: World) -> None:
        assert await world.start(1, "x", "y")
        Path("x").touch()
        Path("y").touch()
        assert await world.fired.get() == 1
        # The next watch proves that the first one sent nothing else.
        assert await world.start(2, "z")
        Path("z").touch()
        assert await world.fired.get() == 2

    _with_world(scenario)


def test_a_later_request_cancels_even_when_it_cannot_be_watched() -> None:
    async def scenario(world: World) -> None:
        assert await world.start(1, "x")
        assert not await world.start(2, "file")
        Path("x").touch()
        assert await world.start(3, "y")
        Path("y").touch()
        assert await world.fired.get() == 3

    _with_world(scenario)


def test_an_old_id_changes_nothing() -> None:
    async def scenario(world: World) -> None:
        assert not await world.start(0, "x")
        assert await world.start(5, "x")
        for old in (5, 4, 0):
            assert not await world.start(old, "y")
        Path("x").touch()
        assert await world.fired.get() == 5

    _with_world(scenario)


def test_a_request_overtaken_by_a_later_one_is_given_up() -> None:
    async def scenario(world: World) -> None:
        begun, go_on = threading.Event(), threading.Event()

        async def slowly(function: Callable[[], bool]) -> bool:
            def wait() -> bool:
                begun.set()
                go_on.wait(10)
                return function()

            return await _in_thread(wait)

        async with asyncio.TaskGroup() as tasks:
            params = _params(["x"], watch_id=1)
            first = tasks.create_task(world.watched.start(params, world.fired.put_nowait, slowly))
            await _in_thread(begun.wait)
            assert await world.start(2, "y")
            go_on.set()
        assert not first.result()
        Path("x").touch()
        Path("y").touch()
        assert await world.fired.get() == 2

    _with_world(scenario)


def test_a_request_that_is_cancelled_leaves_no_watch() -> None:
    """With its connection, while a thread adds the watches."""

    async def scenario(world: World) -> None:
        begun, go_on, done = threading.Event(), threading.Event(), threading.Event()

        async def slowly(function: Callable[[], bool]) -> bool:
            def wait() -> bool:
                begun.set()
                go_on.wait(10)
                assert not function()
                done.set()
                return False

            return await _in_thread(wait)

        async with asyncio.TaskGroup() as tasks:
            params = _params(["x"])
            request = tasks.create_task(world.watched.start(params, world.fired.put_nowait, slowly))
            await _in_thread(begun.wait)
            request.cancel()
        assert request.cancelled()
        for job in world._jobs:
            await job
        go_on.set()
        await _in_thread(done.wait)

    _with_world(scenario)


def test_a_change_before_the_answer_is_not_lost() -> None:
    async def scenario(world: World) -> None:
        assert world.watched.begin(1)
        subscription = Subscription()
        assert await _in_thread(lambda: add_watches(_params(["x"]), world.inotify, subscription))
        Path("x").touch()
        while not subscription.has_fired:
            await asyncio.sleep(0.001)
        assert world.watched.commit(1, subscription, world.fired.put_nowait)
        assert await world.fired.get() == 1

    _with_world(scenario)


def test_a_closed_watch_starts_no_more() -> None:
    async def scenario(world: World) -> None:
        assert await world.start(1, "x")
        world.watched.close()
        assert not await world.start(2, "x")

    _with_world(scenario)


def test_watches_of_many_connections_share_one_instance() -> None:
    async def scenario(world: World) -> None:
        watches = [MissingWatch(world.inotify) for _ in range(200)]
        for number, watch_ in enumerate(watches):
            params = _params([f"m{number}", "shared"])
            assert await watch_.start(params, lambda _: None, _in_thread)
        with os.scandir("/proc/self/fd") as entries:
            links = [os.readlink(entry) for entry in entries]
        assert links.count("anon_inode:inotify") == 1
        for watch_ in watches:
            watch_.close()

    _with_world(scenario)
