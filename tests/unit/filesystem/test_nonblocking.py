"""Nonblocking operations return the results of the blocking ones, or None."""

from __future__ import annotations

import base64
import errno
import os
import stat
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import pytest

from exec_server.errors import InvalidRequest
from exec_server.filesystem import nonblocking, operations, safe_write
from exec_server.filesystem.syscalls import RESOLVE_NO_SYMLINKS, MountTable
from exec_server.protocol import files
from exec_server.protocol.paths import PathUri

pytestmark = pytest.mark.skipif(not nonblocking._SUPPORTED, reason="needs Linux 5.12 or newer")

LIMIT = 65536


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with one of everything, as a path without links."""
    home = tmp_path.resolve()
    monkeypatch.chdir(home)
    Path("file").write_bytes(b"abc")
    Path("empty").touch()
    Path("large").write_bytes(bytes(LIMIT + 1))
    Path("full").write_bytes(bytes(LIMIT))
    os.makedirs("dir/sub")
    os.mkfifo("fifo")
    links = {"flink": "file", "dlink": "dir", "dangling": "no", "loop": "loop", "twice": "flink"}
    for name, target in links.items():
        os.symlink(target, name)
    return home


NAMES = [
    *("file", "empty", "large", "dir", "fifo", "flink", "dlink", "dangling", "loop", "twice"),
    *("dlink/sub", "file/x", "missing", "missing/x", "dir/missing", "n" * 300, "."),
    *("/", "/dev/null", "/proc/version", "/proc/self/exe"),
]


def _uri(path: str) -> PathUri:
    return PathUri.from_wire(os.path.join(os.getcwd(), path))


def _outcome(operation: Callable[[], object]) -> object:
    try:
        return operation()
    except OSError as error:
        return error.errno


@pytest.mark.parametrize("name", NAMES)
def test_metadata_equals_what_a_thread_finds(home: Path, name: str) -> None:
    params = files.GetMetadataParams(_uri(name))
    expected = _outcome(lambda: operations.get_metadata(params))
    assert _outcome(lambda: nonblocking.try_metadata(params)) in (expected, None)


@pytest.mark.usefixtures("kernel_cache")
@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("/")])
def test_metadata_of_cached_paths_is_found(home: Path, name: str) -> None:
    params = files.GetMetadataParams(_uri(name))
    expected = _outcome(lambda: operations.get_metadata(params))
    assert _outcome(lambda: nonblocking.try_metadata(params)) == expected


def test_the_kernel_answers_from_its_cache(home: Path) -> None:
    """Against the real cache, which may refuse any single lookup but not all of them."""
    params = files.GetMetadataParams(_uri("file"))
    if not nonblocking._open_modes(str(home), False):
        pytest.skip("the temporary directory is on a slow file system")
    deadline = time.monotonic() + 10
    while (found := nonblocking.try_metadata(params)) is None:
        assert time.monotonic() < deadline
        os.stat("file")
    assert found == operations.get_metadata(params)


@pytest.mark.parametrize("name", NAMES)
def test_canonicalize_equals_what_a_thread_finds(home: Path, name: str) -> None:
    params = files.CanonicalizeParams(_uri(name))
    expected = _outcome(lambda: operations.canonicalize(params))
    assert _outcome(lambda: nonblocking.try_canonicalize(params)) in (expected, None)


def test_a_removed_file_is_left_to_a_thread(home: Path) -> None:
    Path("x (deleted)").touch()
    assert nonblocking.try_canonicalize(files.CanonicalizeParams(_uri("x (deleted)"))) is None


@pytest.mark.parametrize("name", NAMES)
def test_what_is_read_equals_what_a_thread_reads(home: Path, name: str) -> None:
    params = files.ReadFileParams(_uri(name))

    def read() -> object:
        try:
            return operations.read_file(params)
        except InvalidRequest:
            return None

    expected = _outcome(read)
    assert _outcome(lambda: nonblocking.try_read_file(params, LIMIT)) in (expected, None)


@pytest.mark.usefixtures("kernel_cache")
def test_small_files_in_the_page_cache_are_read(home: Path) -> None:
    probe = os.open("file", os.O_RDONLY)
    try:
        os.preadv(probe, [bytearray(1)], 0, os.RWF_NOWAIT)
    except BlockingIOError:
        pass  # supported: the page was reclaimed
    except OSError:
        pytest.skip("this file system does not support RWF_NOWAIT")
    finally:
        os.close(probe)
    for name, data in {"file": b"abc", "twice": b"abc", "full": bytes(LIMIT)}.items():
        params = files.ReadFileParams(_uri(name))
        deadline = time.monotonic() + 10
        while (result := nonblocking.try_read_file(params, LIMIT)) is None:
            assert time.monotonic() < deadline
            assert Path(name).read_bytes() == data  # brings reclaimed pages back
        assert result == files.ReadFileResult(data)


def test_a_file_that_is_not_cached_is_left_to_a_thread(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise BlockingIOError

    monkeypatch.setattr(os, "preadv", refuse)
    assert nonblocking.try_read_file(files.ReadFileParams(_uri("file")), LIMIT) is None


@pytest.mark.parametrize("name", ["large", "empty", "dir", "fifo", "/proc/version", "/dev/null"])
def test_everything_else_is_left_to_a_thread(home: Path, name: str) -> None:
    assert nonblocking.try_read_file(files.ReadFileParams(_uri(name)), LIMIT) is None


def test_certain_failures_are_raised(home: Path) -> None:
    missing = _uri("missing")
    assert not os.path.exists("missing")
    for operation in (
        lambda: nonblocking.try_read_file(files.ReadFileParams(missing), LIMIT),
        lambda: nonblocking.try_metadata(files.GetMetadataParams(missing)),
        lambda: nonblocking.try_canonicalize(files.CanonicalizeParams(missing)),
    ):
        assert _outcome(operation) in (errno.ENOENT, None)
    with pytest.raises(InvalidRequest):
        nonblocking.try_metadata(files.GetMetadataParams(PathUri.from_wire("file:///C:/x")))


def test_paths_that_follow_no_link_are_left_to_a_thread(home: Path) -> None:
    assert nonblocking.try_read_file(files.ReadFileParams(_uri("file"), False), LIMIT) is None
    assert nonblocking.try_metadata(files.GetMetadataParams(_uri("file"), False)) is None


def test_a_file_being_written_is_left_to_a_thread(home: Path) -> None:
    with safe_write.INODE_LOCKS.acquire(os.stat("file")):
        assert nonblocking.try_read_file(files.ReadFileParams(_uri("file")), LIMIT) is None


def test_without_kernel_support_everything_is_left_to_a_thread(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nonblocking, "_SUPPORTED", False)
    path = _uri("file")
    assert nonblocking.try_read_file(files.ReadFileParams(path), LIMIT) is None
    assert nonblocking.try_metadata(files.GetMetadataParams(path)) is None
    assert nonblocking.try_canonicalize(files.CanonicalizeParams(path)) is None


class _SlowMounts(MountTable):
    def __init__(self, *points: str) -> None:
        super().__init__()
        self._points = points

    def slow_mounts(self) -> tuple[str, ...]:
        return self._points


def test_slow_file_systems_are_left_alone(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nonblocking, "MOUNTS", _SlowMounts(f"{home}/dir/"))
    monkeypatch.setattr(nonblocking, "_NO_SYMLINKS", nonblocking._OpenModes(RESOLVE_NO_SYMLINKS))
    metadata = {
        name: _outcome(partial(nonblocking.try_metadata, files.GetMetadataParams(_uri(name))))
        for name in ("dir", "dir/sub", "dlink", "dlink/sub", "flink", "file")
    }
    known = metadata.pop("file")
    assert isinstance(known, files.GetMetadataResult)
    assert set(metadata.values()) == {None}
    for name in ("dir/x", "dlink/x"):
        assert nonblocking.try_read_file(files.ReadFileParams(_uri(name)), LIMIT) is None
    assert nonblocking.try_canonicalize(files.CanonicalizeParams(_uri("dir"))) is None


def test_nothing_stays_open(home: Path) -> None:
    before = os.listdir("/proc/self/fd")
    for name in NAMES:
        for operation in (
            lambda name=name: nonblocking.try_read_file(files.ReadFileParams(_uri(name)), LIMIT),
            lambda name=name: nonblocking.try_metadata(files.GetMetadataParams(_uri(name))),
            lambda name=name: nonblocking.try_canonicalize(files.CanonicalizeParams(_uri(name))),
        ):
            _outcome(operation)
    assert os.listdir("/proc/self/fd") == before


# fs/readDirectory


def _list(path: str, *, confined: bool = False) -> list[tuple[str, bool, bool]] | None:
    params = files.ReadDirectoryParams(_uri(path))
    result = nonblocking.try_read_directory(params, confined=confined)
    if result is None:
        return None
    return sorted((entry.file_name, entry.is_directory, entry.is_file) for entry in result.entries)


@pytest.mark.usefixtures("kernel_cache")
@pytest.mark.parametrize("confined", [False, True])
def test_a_directory_that_was_just_listed_is_listed_at_once(home: Path, confined: bool) -> None:
    for name, target in {"link": "../file", "dangling": "nothing"}.items():
        os.symlink(target, f"dir/{name}")
    assert _list("dir", confined=confined) is None
    nonblocking.directory_was_listed("dir", 3)
    assert _list("dir", confined=confined) == [("link", False, True), ("sub", True, False)]
    os.utime("dir", ns=(1, 1))  # as any change would do
    assert _list("dir", confined=confined) is None


@pytest.mark.usefixtures("kernel_cache")
def test_a_directory_whose_links_are_not_cached_is_left_to_a_thread(home: Path) -> None:
    os.symlink("loop", "dir/loop")
    nonblocking.directory_was_listed("dir", 2)
    assert _list("dir") is None


@pytest.mark.usefixtures("kernel_cache")
def test_a_directory_with_a_link_into_procfs_is_left_to_the_worker(home: Path) -> None:
    os.symlink("/proc/version", "dir/link")
    nonblocking.directory_was_listed("dir", 2)
    assert _list("dir") == [("link", False, True), ("sub", True, False)]
    assert _list("dir", confined=True) is None


@pytest.mark.usefixtures("kernel_cache")
def test_large_directories_are_left_to_threads(home: Path) -> None:
    nonblocking.directory_was_listed("dir", nonblocking.INLINE_ENTRIES + 1)
    assert _list("dir") is None


@pytest.mark.usefixtures("kernel_cache")
def test_a_listing_is_remembered_for_seconds_only(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nonblocking.directory_was_listed("dir", 1)
    later = time.monotonic() + 6
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert _list("dir") is None


# ---- writing --------------------------------------------------------------------------

_SIZES = (0, 1, 2, 100, 4095, 4096, 4097, 9000)
_TARGETS = (
    *("file", "empty", "large", "dir", "flink", "dlink", "dangling", "loop", "twice", "new"),
    *("dir/new", "dlink/new", "dir/sub/new", "file/x", "missing/x", "n" * 300, ".", "sparse"),
)


def _write_params(path: Path, data: bytes, *, follow: bool | None = None) -> files.WriteFileParams:
    text = base64.b64encode(data).decode()
    return files.WriteFileParams(PathUri.from_wire(str(path)), text, follow)


def _state(path: Path) -> object:
    """Everything about a path that a write may change, but its times."""
    try:
        info = path.lstat()
    except OSError as error:
        return error.errno
    content = path.read_bytes() if path.is_file() else None
    return stat.S_IMODE(info.st_mode), info.st_nlink, info.st_size, content


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.usefixtures("kernel_cache")
def test_writes_of_the_loop_and_of_threads_leave_the_same_files(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    twins = [tmp_path.resolve() / "loop", tmp_path.resolve() / "thread"]
    for folder in twins:
        _furnish(folder)
    written = 0
    for _ in range(60):
        name, data = random.choice(_TARGETS), random.randbytes(random.choice(_SIZES))
        by_loop, by_thread = (_write_params(folder / name, data) for folder in twins)
        result = _outcome(partial(nonblocking.try_write_file, by_loop))
        written += result == files.Done()
        if result is None:
            result = _outcome(partial(operations.write_file, by_loop))
        assert result == _outcome(partial(operations.write_file, by_thread)), name
        states = [{each: _state(folder / each) for each in _TARGETS} for folder in twins]
        assert states[0] == states[1]
    assert written > 5
    assert len(safe_write.INODE_LOCKS) == 0


def _furnish(folder: Path) -> None:
    (folder / "dir" / "sub").mkdir(parents=True)
    (folder / "file").write_bytes(b"abc")
    (folder / "file").chmod(0o640)
    os.link(folder / "file", folder / "hard")
    (folder / "empty").touch()
    (folder / "large").write_bytes(bytes(9000))
    with (folder / "sparse").open("wb") as sparse:
        sparse.truncate(4000)
    links = {"flink": "file", "dlink": "dir", "dangling": "no", "loop": "loop", "twice": "flink"}
    for name, target in links.items():
        os.symlink(target, folder / name)


@pytest.mark.usefixtures("kernel_cache")
def test_the_loop_writes_only_short_regular_files_by_their_names(home: Path) -> None:
    data = b"data"
    for name in ("large", "flink", "dangling", "dir", "fifo", "missing/x", "n" * 300):
        assert nonblocking.try_write_file(_write_params(home / name, data)) is None, name
    for params in (
        _write_params(home / "file", data, follow=False),
        _write_params(home / "file", bytes(4097)),
        _write_params(home / "file", bytes(4099)),
        _write_params(Path("/proc/self/comm"), data),
        _write_params(Path("/dev/null"), data),
        _write_params(Path("/"), data),
    ):
        assert nonblocking.try_write_file(params) is None
    assert nonblocking.try_write_file(_write_params(home / "file", data), confined=True) is None
    assert (home / "file").read_bytes() == b"abc"
    for name in ("file", "empty", "new", "dlink/new"):
        assert nonblocking.try_write_file(_write_params(home / name, data)) == files.Done(), name
        assert (home / name).read_bytes() == data


@pytest.mark.usefixtures("kernel_cache")
def test_a_new_file_that_another_writer_overwrites_is_left_to_a_thread(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_new = safe_write.fill_new

    def overtaken(fd: int, directory: int | None, name: str, content: safe_write.Content) -> None:
        safe_write.write(str(home / "new"), safe_write.BytesContent(b"other" * 10))
        fill_new(fd, directory, name, content)

    monkeypatch.setattr(safe_write, "fill_new", overtaken)
    params = _write_params(home / "new", b"data")
    assert nonblocking.try_write_file(params) is None
    operations.write_file(params)
    assert (home / "new").read_bytes() == b"data"


@pytest.mark.usefixtures("kernel_cache")
def test_a_written_file_that_was_removed_or_replaced_is_written_by_a_thread_once(
    home: Path,
) -> None:
    path = home / "dir" / "new"
    params = _write_params(path, b"data")
    replacements: list[Callable[[], None]] = [
        lambda: None,
        lambda: os.symlink("sub", path),
        lambda: os.mkfifo(path),
    ]
    for replace in replacements:
        path.unlink(missing_ok=True)
        assert nonblocking.try_write_file(params) == files.Done()
        path.unlink()
        replace()
        assert nonblocking.try_write_file(params) is None
    path.unlink()
    assert nonblocking.try_write_file(params) == files.Done()
    assert path.read_bytes() == b"data"


@pytest.mark.usefixtures("kernel_cache")
def test_a_directory_is_looked_up_once_in_a_while(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    lookups: list[bytes] = []
    parent = nonblocking._UNCONFINED.parent

    class Counted:
        def open(self, path: bytes) -> int:
            lookups.append(path)
            return parent.open(path)

    monkeypatch.setattr(nonblocking._UNCONFINED, "parent", Counted())
    for name in ("a", "b", "a"):
        assert nonblocking.try_write_file(_write_params(home / "dir" / name, b"x")) == files.Done()
    assert lookups == [os.fsencode(home / "dir") + b"/"]
    now += 2 * nonblocking.PARENT_SECONDS
    assert nonblocking.try_write_file(_write_params(home / "dir" / "a", b"x")) == files.Done()
    assert len(lookups) == 2
    # With a slow file system mounted, each lookup must follow no link.
    monkeypatch.setattr(nonblocking, "_open_modes", lambda path, confined: nonblocking._NO_SYMLINKS)
    monkeypatch.setattr(nonblocking._NO_SYMLINKS, "parent", Counted())
    for _ in range(2):
        assert nonblocking.try_write_file(_write_params(home / "dir" / "a", b"x")) == files.Done()
    assert len(lookups) == 4


def test_only_some_uses_are_remembered() -> None:
    recent = nonblocking.RecentUses()
    keys = [str(number) for number in range(2 * nonblocking.MAX_RECENT)]
    for key in keys:
        recent.add(key, 100.0)
    assert sum(recent.has(key, 99.0) for key in keys) <= nonblocking.MAX_RECENT
    assert recent.has(keys[-1], 99.0)
    assert not recent.has(keys[-1], 101.0)
    recent.forget(keys[-1])
    recent.forget(keys[-1])
    assert not recent.has(keys[-1], 99.0)


@pytest.mark.usefixtures("kernel_cache")
def test_a_file_that_a_thread_uses_is_left_to_a_thread(home: Path) -> None:
    params = _write_params(home / "file", b"new")
    with safe_write.INODE_LOCKS.acquire(os.stat("file")):
        assert nonblocking.try_write_file(params) is None
    assert nonblocking.try_write_file(params) == files.Done()


class Moments:
    """The clock and the waits of the loop's thread, set by the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.waits = 7
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(nonblocking, "_count_waits", lambda: self.waits)

    def write(
        self, guard: nonblocking.WriteGuard, seconds: float, waits: int, *, is_done: bool = True
    ) -> bool:
        """Whether the loop performs a write that takes so long, done or left to a thread."""
        began: list[float] = []

        def perform(params: files.WriteFileParams, now: float) -> files.Done | None:
            began.append(now)
            self.now += seconds
            self.waits += waits
            return files.Done() if is_done else None

        result = guard.run(perform, _write_params(Path("/x"), b""))
        assert result == (files.Done() if is_done and began else None)
        return bool(began)


def test_a_write_that_waited_long_leaves_the_next_ones_to_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moments, guard = Moments(monkeypatch), nonblocking.WriteGuard()
    long = 2 * nonblocking.SLOW_WRITE_SECONDS
    assert moments.write(guard, nonblocking.SLOW_WRITE_SECONDS / 2, waits=1)
    assert moments.write(guard, long, waits=0)  # another program had the processor
    assert moments.write(guard, long, waits=1)
    assert not moments.write(guard, 0, waits=0)
    moments.now += 0.9 * long * nonblocking.PAUSE_FACTOR
    assert not moments.write(guard, 0, waits=0)
    moments.now += 0.2 * long * nonblocking.PAUSE_FACTOR
    assert moments.write(guard, 0, waits=0)


def test_a_disk_that_stays_slow_is_left_to_threads_for_longer_and_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moments, guard = Moments(monkeypatch), nonblocking.WriteGuard()

    def pause(seconds: float) -> float:
        """Seconds for which a write that takes so long keeps the loop from writing."""
        assert moments.write(guard, seconds, waits=1)
        began = moments.now
        while not moments.write(guard, 0, waits=0):
            moments.now += seconds
        return (moments.now - began) / seconds

    factors = [20, 40, 80, 160, 320, 640, 1280, 1280]
    assert [pause(0.002) for _ in factors] == pytest.approx(factors, abs=1.1)
    assert pause(1.0) == pytest.approx(nonblocking.MAX_PAUSE_SECONDS, abs=1.1)
    for _ in range(nonblocking.QUICK_WRITES - 2):
        assert moments.write(guard, 0, waits=0)
    assert pause(0.002) == pytest.approx(1280, abs=1.1)
    for _ in range(nonblocking.QUICK_WRITES):  # left to threads, so the disk was not used
        assert moments.write(guard, 0, waits=0, is_done=False)
    assert pause(0.002) == pytest.approx(1280, abs=1.1)
    for _ in range(nonblocking.QUICK_WRITES):
        assert moments.write(guard, 0, waits=0)
    assert pause(0.002) == pytest.approx(20, abs=1.1)


def test_the_waits_of_the_thread_are_counted() -> None:
    before = nonblocking._count_waits()
    time.sleep(0.001)
    assert nonblocking._count_waits() > before


@pytest.mark.usefixtures("kernel_cache")
def test_the_loop_does_not_write_after_a_slow_write(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nonblocking, "SLOW_WRITE_SECONDS", -1.0)
    monkeypatch.setattr(nonblocking, "PAUSE_FACTOR", 1e9)
    monkeypatch.setattr(nonblocking, "_WRITE_GUARD", nonblocking.WriteGuard())
    monkeypatch.setattr(nonblocking, "_count_waits", iter(range(2)).__next__)
    params = _write_params(home / "file", b"new")
    assert nonblocking.try_write_file(params) == files.Done()
    assert nonblocking.try_write_file(params) is None


@pytest.mark.usefixtures("kernel_cache")
def test_a_write_that_is_no_base64_is_refused_as_by_threads(home: Path) -> None:
    params = files.WriteFileParams(_uri("file"), "?", None)
    errors = []
    for operation in (nonblocking.try_write_file, operations.write_file):
        with pytest.raises(InvalidRequest) as caught:
            operation(params)
        errors.append(caught.value.message)
    assert errors[0] == errors[1]
