"""fs/watchMissing against the kernel; what fires was asked of the reference."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from exec_server.core import watch
from exec_server.core.watch import Armed, MissingWatch, arm
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


def _fires(action: Callable[[], object], missing: str = "x", present: str | None = None) -> bool:
    armed = arm(_params([missing], present))
    assert armed is not None
    try:
        assert not armed.has_fired()
        action()
        return armed.has_fired()
    finally:
        armed.close()


def _watchable(missing: list[str], present: str | None = None) -> bool:
    armed = arm(_params(missing, present))
    if armed is not None:
        armed.close()
    return armed is not None


@pytest.mark.parametrize(
    "action",
    [
        lambda: Path("x").touch(),
        lambda: os.mkdir("x"),
        lambda: os.symlink("q", "x"),
        lambda: os.rename("file", "x"),
        lambda: os.link("file", "x"),
        lambda: (Path("x").touch(), os.unlink("x")),
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
        ("g1/g2/x", lambda: (os.rename("g1", "g9"), os.rename("g9", "g1"))),
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
        lambda: (Path("g1/g2/other").touch(), os.unlink("g1/g2/other")),
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
    assert arm(WatchMissingParams(1, [foreign])) is None
    assert arm(WatchMissingParams(1, [here], foreign)) is None


# The watch of a connection


def _with_watch(scenario: Callable[[MissingWatch, asyncio.Queue[int]], Awaitable[None]]) -> None:
    async def run() -> None:
        watched = MissingWatch(asyncio.get_running_loop())
        fired: asyncio.Queue[int] = asyncio.Queue()
        try:
            async with asyncio.timeout(10):
                await scenario(watched, fired)
        finally:
            watched.close()
            await asyncio.get_running_loop().shutdown_default_executor()

    asyncio.run(run())


async def _in_thread(function: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(None, function)


async def _start(
    watched: MissingWatch, fired: asyncio.Queue[int], watch_id: int, *missing: str
) -> bool:
    return await watched.start(
        _params(list(missing), watch_id=watch_id), fired.put_nowait, _in_thread
    )


def test_a_watch_notifies_once() -> None:
    async def scenario(watched: MissingWatch, fired: asyncio.Queue[int]) -> None:
        assert await _start(watched, fired, 1, "x", "y")
        Path("x").touch()
        Path("y").touch()
        assert await fired.get() == 1
        # The next watch proves that nothing else came from the first.
        assert await _start(watched, fired, 2, "z")
        Path("z").touch()
        assert await fired.get() == 2

    _with_watch(scenario)


def test_a_later_request_cancels_even_when_it_cannot_be_watched() -> None:
    async def scenario(watched: MissingWatch, fired: asyncio.Queue[int]) -> None:
        assert await _start(watched, fired, 1, "x")
        assert not await _start(watched, fired, 2, "file")
        Path("x").touch()
        assert await _start(watched, fired, 3, "y")
        Path("y").touch()
        assert await fired.get() == 3

    _with_watch(scenario)


def test_an_old_id_changes_nothing() -> None:
    async def scenario(watched: MissingWatch, fired: asyncio.Queue[int]) -> None:
        assert not await _start(watched, fired, 0, "x")
        assert await _start(watched, fired, 5, "x")
        for old in (5, 4, 0):
            assert not await _start(watched, fired, old, "y")
        Path("x").touch()
        assert await fired.get() == 5

    _with_watch(scenario)


def test_a_request_overtaken_by_a_later_one_is_given_up() -> None:
    async def scenario(watched: MissingWatch, fired: asyncio.Queue[int]) -> None:
        assert watched.begin(1)
        armed = arm(_params(["x"]))
        assert isinstance(armed, Armed)
        assert await _start(watched, fired, 2, "y")
        assert not watched.commit(1, armed, fired.put_nowait)
        Path("x").touch()
        Path("y").touch()
        assert await fired.get() == 2

    _with_watch(scenario)


def test_what_happened_before_the_loop_watched_is_not_lost() -> None:
    async def scenario(watched: MissingWatch, fired: asyncio.Queue[int]) -> None:
        assert watched.begin(1)
        armed = arm(_params(["x"]))
        Path("x").touch()
        assert watched.commit(1, armed, fired.put_nowait)
        assert await fired.get() == 1

    _with_watch(scenario)


def test_a_closed_watch_starts_no_more() -> None:
    async def scenario(watched: MissingWatch, fired: asyncio.Queue[int]) -> None:
        assert await _start(watched, fired, 1, "x")
        watched.close()
        assert not await _start(watched, fired, 2, "x")

    _with_watch(scenario)


def test_a_watch_on_an_ended_loop_is_closed_directly() -> None:
    loop = asyncio.new_event_loop()
    watched = MissingWatch(loop)
    armed = arm(_params(["x"]))
    assert armed is not None
    loop.close()
    watched.begin(1)
    watched.begin(2)
    assert not watched.commit(1, armed, lambda _: None)
