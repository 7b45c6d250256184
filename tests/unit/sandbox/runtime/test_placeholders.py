"""Placeholders on a real directory: created, shared, removed, and registered for clean-up."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.forked import in_own_process

from exec_server.errors import InternalError
from exec_server.filesystem import placeholder
from exec_server.filesystem.placeholder import Use
from exec_server.sandbox.policy.model import MissingName
from exec_server.sandbox.runtime import placeholders as placeholders_module
from exec_server.sandbox.runtime.placeholders import Placeholder, Placeholders

Registered = list[tuple[str, bool]]


def _missing(directory: Path, name: str = ".codex") -> MissingName:
    info = directory.stat()
    return MissingName(str(directory), info.st_dev, info.st_ino, name)


@pytest.fixture
def registered() -> Registered:
    return []


@pytest.fixture
def placeholders(registered: Registered) -> Placeholders:
    return Placeholders(lambda path, exists: registered.append((path, exists)))


def test_a_placeholder_exists_while_it_is_held(
    tmp_path: Path, placeholders: Placeholders, registered: Registered
) -> None:
    path = tmp_path / ".codex"
    (held,) = placeholders.hold([_missing(tmp_path)])
    info = path.stat()
    assert placeholder.is_placeholder(info, str(path))
    assert (held.step.kind, held.step.path) == ("read", str(path))
    assert (held.step.device, held.step.inode) == (info.st_dev, info.st_ino)
    placeholders.release([held])
    assert not path.exists()
    assert registered == [(str(path), True), (str(path), False)]


def test_the_last_holder_removes_a_shared_placeholder(
    tmp_path: Path, placeholders: Placeholders
) -> None:
    first = placeholders.hold([_missing(tmp_path)])
    second = placeholders.hold([_missing(tmp_path)])
    placeholders.release(first)
    assert (tmp_path / ".codex").exists()
    placeholders.release(second)
    assert not (tmp_path / ".codex").exists()


def test_nothing_is_held_if_one_name_exists(
    tmp_path: Path, placeholders: Placeholders, registered: Registered
) -> None:
    (tmp_path / ".aws").mkdir()
    with pytest.raises(FileExistsError):
        placeholders.hold([_missing(tmp_path), _missing(tmp_path, ".aws")])
    assert sorted(os.listdir(tmp_path)) == [".aws"]
    assert registered[-1] == (str(tmp_path / ".codex"), False)


def test_a_replaced_directory_is_refused(tmp_path: Path, placeholders: Placeholders) -> None:
    (tmp_path / "ws").mkdir()
    missing = _missing(tmp_path / "ws")
    (tmp_path / "ws").rename(tmp_path / "old")
    (tmp_path / "ws").mkdir()
    with pytest.raises(FileExistsError, match="was replaced"):
        placeholders.hold([missing])


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOSPC, errno.EMFILE, errno.EIO])
def test_a_name_that_cannot_be_protected_is_refused_with_its_path_and_the_reason(
    tmp_path: Path, placeholders: Placeholders, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """EACCES: a command could reopen the directory."""

    def refuse(directory: int, name: str) -> Use | None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(placeholder, "make", refuse)
    with pytest.raises(InternalError) as refused:
        placeholders.hold([_missing(tmp_path)])
    path = tmp_path / ".codex"
    assert refused.value.message.startswith(f"cannot protect the missing path {path}: ")
    assert refused.value.message.endswith(f"(os error {number})")


def test_a_name_that_no_command_could_create_needs_no_placeholder(
    tmp_path: Path,
    placeholders: Placeholders,
    registered: Registered,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placeholder, "make", lambda directory, name: None)
    assert placeholders.hold([_missing(tmp_path)]) == []
    assert registered[-1] == (str(tmp_path / ".codex"), False)


def _registered_now(registered: Registered) -> list[str]:
    """The paths that the watchdog would remove."""
    paths: list[str] = []
    for path, exists in registered:
        if exists:
            assert path not in paths
            paths.append(path)
        else:
            paths.remove(path)
    return paths


def test_commands_share_descriptors(tmp_path: Path, placeholders: Placeholders) -> None:
    before = len(os.listdir("/proc/self/fd"))
    first = placeholders.hold([_missing(tmp_path)])
    one = len(os.listdir("/proc/self/fd"))
    many = [held for _ in range(50) for held in placeholders.hold([_missing(tmp_path)])]
    assert len(os.listdir("/proc/self/fd")) == one
    placeholders.release(first + many)
    assert len(os.listdir("/proc/self/fd")) == before
    assert os.listdir(tmp_path) == []


def test_a_placeholder_is_removed_before_its_descriptor_is_closed(tmp_path: Path) -> None:
    unclosed: list[int] = []
    placeholders = Placeholders(lambda path, exists: None, unclosed.append)
    placeholders.release(placeholders.hold([_missing(tmp_path)]))
    assert os.listdir(tmp_path) == []
    (descriptor,) = unclosed
    assert os.fstat(descriptor).st_nlink == 0
    os.close(descriptor)


def test_a_placeholder_that_the_host_has_removed_is_made_again(
    tmp_path: Path, placeholders: Placeholders, registered: Registered
) -> None:
    first = placeholders.hold([_missing(tmp_path)])
    (tmp_path / ".codex").rmdir()
    second = placeholders.hold([_missing(tmp_path)])
    placeholders.release(first)
    assert (tmp_path / ".codex").is_dir()
    assert _registered_now(registered) == [str(tmp_path / ".codex")]
    placeholders.release(second)
    assert os.listdir(tmp_path) == []
    assert _registered_now(registered) == []


def _pausing(
    function: Callable[..., object], reached: threading.Event, resume: threading.Event
) -> Callable[..., object]:
    """The same function, which waits before it does its work."""

    def paused(*arguments: object) -> object:
        reached.set()
        assert resume.wait(30)
        return function(*arguments)

    return paused


@pytest.mark.parametrize("slow", ["make", "release"])
def test_a_file_system_that_hangs_delays_no_other_command(
    tmp_path: Path, placeholders: Placeholders, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    (tmp_path / "slow").mkdir()
    (tmp_path / "fast").mkdir()
    reached, resume = threading.Event(), threading.Event()
    held: list[Placeholder] = []
    if slow == "release":
        held = placeholders.hold([_missing(tmp_path / "slow")])
    with monkeypatch.context() as patched:
        patched.setattr(placeholder, slow, _pausing(getattr(placeholder, slow), reached, resume))

        def work() -> None:
            if slow == "make":
                held.extend(placeholders.hold([_missing(tmp_path / "slow")]))
            else:
                placeholders.release(held)

        thread = threading.Thread(target=work)
        thread.start()
        assert reached.wait(30)
    other = placeholders.hold([_missing(tmp_path / "fast")])
    placeholders.release(other)
    assert os.listdir(tmp_path / "fast") == []
    resume.set()
    thread.join()
    if slow == "make":
        placeholders.release(held)
    assert os.listdir(tmp_path / "slow") == []


@pytest.mark.parametrize("operation", [fcntl.LOCK_SH, fcntl.LOCK_EX])
def test_a_lock_of_another_process_stops_nothing_and_is_waited_out(
    tmp_path: Path, placeholders: Placeholders, registered: Registered, operation: int
) -> None:
    path = tmp_path / ".codex"
    path.mkdir()
    os.utime(path, ns=(placeholder.MARK_NS, placeholder.MARK_NS))
    lock = os.open(path, os.O_RDONLY)
    fcntl.flock(lock, operation)
    for _ in range(3):
        placeholders.release(placeholders.hold([_missing(tmp_path)]))
    placeholders.remove_left_behind()
    assert path.exists()
    assert _registered_now(registered) == [str(path)]
    os.close(lock)
    placeholders.drop_idle()
    assert placeholders._remover is not None
    placeholders._remover.join()
    assert os.listdir(tmp_path) == []
    assert _registered_now(registered) == []


def test_what_cannot_be_removed_is_bounded_and_stays_registered(
    tmp_path: Path,
    placeholders: Placeholders,
    registered: Registered,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placeholders_module, "MAX_LEFT_BEHIND", 2)
    before = len(os.listdir("/proc/self/fd"))
    names = [f"n{number}" for number in range(5)]
    with monkeypatch.context() as patched:
        patched.setattr(placeholder, "release", _never_done)
        for name in names:
            placeholders.release(placeholders.hold([_missing(tmp_path, name)]))
    assert len(os.listdir("/proc/self/fd")) == before + 2
    assert _registered_now(registered) == [str(tmp_path / name) for name in names]
    placeholders.remove_left_behind()
    assert len(os.listdir("/proc/self/fd")) == before
    assert sorted(os.listdir(tmp_path)) == names[:3]
    assert _registered_now(registered) == [str(tmp_path / name) for name in names[:3]]


def _never_done(directory: int, name: str, use: Use, close: Callable[[int], None]) -> bool:
    close(use.descriptor)
    return False


def test_without_a_thread_the_removal_waits(
    tmp_path: Path, placeholders: Placeholders, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(placeholder, "release", _never_done)
        patched.setattr(threading.Thread, "start", refuse)
        placeholders.drop_idle()
        placeholders.release(placeholders.hold([_missing(tmp_path)]))
        placeholders.drop_idle()
    assert (tmp_path / ".codex").exists()
    placeholders.remove_left_behind()
    assert os.listdir(tmp_path) == []


def test_the_same_name_in_a_directory_that_was_moved_is_removed(
    tmp_path: Path, placeholders: Placeholders
) -> None:
    (tmp_path / "ws").mkdir()
    held = placeholders.hold([_missing(tmp_path / "ws")])
    (tmp_path / "ws").rename(tmp_path / "moved")
    (tmp_path / "ws").mkdir()
    placeholders.release(held)
    assert os.listdir(tmp_path / "moved") == []


@in_own_process
def _hold_without_descriptors(path: str) -> None:
    """Hold placeholders with every number of descriptors that may be left."""
    directory = Path(path)
    missing = [_missing(directory), _missing(directory, ".aws")]
    placeholders = Placeholders(lambda path, exists: None)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd")) - 1
    refusals = []
    for spare in range(12):
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + spare, hard))
        try:
            placeholders.release(placeholders.hold(missing))
        except InternalError as error:
            refusals.append(error.message)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        placeholders.remove_left_behind()
        assert len(os.listdir("/proc/self/fd")) - 1 == used
        assert os.listdir(directory) == []
    assert 0 < len(refusals) < 12
    assert all(text.startswith("cannot protect the missing path ") for text in refusals)


def test_without_descriptors_nothing_is_left_or_leaked(tmp_path: Path) -> None:
    _hold_without_descriptors(str(tmp_path))
