"""Placeholders: created, shared between servers, recognised and removed by the last user."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.forked import in_own_process

from exec_server.filesystem import placeholder
from exec_server.filesystem.placeholder import Use

_NOBODY = 65_534


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.chdir(tmp_path)
    descriptor = os.open(".", os.O_PATH | os.O_DIRECTORY)
    yield descriptor
    os.close(descriptor)


def _make(directory: int, name: str = ".git") -> Use:
    use = placeholder.make(directory, name)
    assert use is not None
    return use


def _release(directory: int, use: Use) -> bool:
    return placeholder.release(directory, ".git", use)


def _abandon(use: Use) -> None:
    """Close the descriptors, as the kernel does for a dead server."""
    if use.claim is not None:
        os.close(use.claim.descriptor)
    os.close(use.descriptor)


def _is_placeholder(path: str) -> bool:
    return placeholder.is_placeholder(os.lstat(path), path)


@pytest.fixture
def stranger(directory: int) -> Iterator[int]:
    """A descriptor, opened like that of another process, of a placeholder without users."""
    _abandon(_make(directory))
    descriptor = os.open(".git", os.O_RDONLY | os.O_DIRECTORY)
    yield descriptor
    os.close(descriptor)


def test_a_placeholder_is_recognised_and_removed(directory: int) -> None:
    use = _make(directory)
    info = os.lstat(".git")
    assert _is_placeholder(".git")
    assert stat.S_IMODE(info.st_mode) == 0o555
    assert os.path.samestat(info, os.fstat(use.descriptor))
    assert _release(directory, use)
    assert not os.path.lexists(".git")


def test_other_directories_are_no_placeholders(directory: int) -> None:
    os.mkdir(".git")
    assert not _is_placeholder(".git")
    with pytest.raises(FileExistsError):
        placeholder.make(directory, ".git")
    Path("file").touch()
    os.utime("file", ns=(placeholder.MARK_NS, placeholder.MARK_NS))
    assert not _is_placeholder("file")
    os.symlink("nowhere", "link")
    for name in ("file", "link"):
        with pytest.raises(FileExistsError):
            placeholder.make(directory, name)


def test_a_new_placeholder_is_recognised_before_it_has_its_time(directory: int) -> None:
    os.mkdir(".git", 0o1700)
    assert _is_placeholder(".git")
    assert _release(directory, _make(directory))
    os.mkdir(".git", 0o3700)
    assert _is_placeholder(".git")
    os.mkdir(".git/config")
    assert not _is_placeholder(".git")
    with pytest.raises(FileExistsError):
        placeholder.make(directory, ".git")


@in_own_process
def _make_with_umask(path: str, umask: int) -> None:
    os.umask(umask)
    directory = os.open(path, os.O_PATH | os.O_DIRECTORY)
    use = _make(directory)
    info = os.lstat(f"{path}/.git")
    assert stat.S_IMODE(info.st_mode) == 0o555
    assert _release(directory, use)
    assert os.listdir(path) == []


@pytest.mark.parametrize("umask", [0, 0o077, 0o277])
def test_any_umask_will_do(tmp_path: Path, umask: int) -> None:
    _make_with_umask(str(tmp_path), umask)


def test_the_last_user_removes_a_shared_placeholder(directory: int) -> None:
    first, second = _make(directory), _make(directory)
    assert os.path.samestat(os.fstat(first.descriptor), os.fstat(second.descriptor))
    assert not _release(directory, first)
    assert os.path.isdir(".git")
    assert _release(directory, second)
    assert not os.path.lexists(".git")


def test_the_placeholder_of_a_dead_server_is_taken_over(directory: int) -> None:
    _abandon(_make(directory))  # the kernel has released its lock
    assert _release(directory, _make(directory))
    _abandon(_make(directory))
    assert placeholder.remove_left_behind(directory, b".git")
    assert not os.path.lexists(".git")
    assert placeholder.remove_left_behind(directory, b".git")


def test_the_placeholder_of_a_living_server_is_left_behind(directory: int) -> None:
    use = _make(directory)
    assert not placeholder.remove_left_behind(directory, b".git")
    assert os.path.isdir(".git")
    assert _release(directory, use)


def test_only_placeholders_are_removed(directory: int) -> None:
    os.mkdir(".git")
    assert placeholder.remove_left_behind(directory, ".git")
    os.symlink(".git", "link")
    assert placeholder.remove_left_behind(directory, "link")
    assert sorted(os.listdir()) == [".git", "link"]


def test_a_placeholder_that_was_filled_or_replaced_is_kept(directory: int) -> None:
    use = _make(directory)
    os.chmod(".git", 0o755)
    os.mkdir(".git/inner")
    assert _release(directory, use)
    assert os.path.isdir(".git/inner")
    os.rmdir(".git/inner")
    os.rmdir(".git")
    use = _make(directory)
    os.rename(".git", "elsewhere")
    os.mkdir(".git")
    assert _release(directory, use)
    assert os.path.isdir(".git")


@pytest.mark.parametrize(
    ("number", "owned", "raised"),
    [
        (errno.EROFS, True, None),
        (errno.EPERM, True, None),
        (errno.EACCES, False, None),
        (errno.EACCES, True, PermissionError),  # the owner may change the mode
        (errno.ENOSPC, True, OSError),
    ],
    ids=["EROFS", "EPERM", "EACCES", "EACCES-owner", "ENOSPC"],
)
def test_a_place_where_no_command_can_create_anything_needs_no_placeholder(
    directory: int,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    owned: bool,
    raised: type[OSError] | None,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "mkdir", refuse)
    owner = os.fstat(directory).st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner if owned else owner + 1)
    if raised is None:
        assert placeholder.make(directory, ".git") is None
    else:
        with pytest.raises(raised):
            placeholder.make(directory, ".git")


def test_a_placeholder_that_is_removed_while_it_is_opened_is_made_again(
    directory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open
    failures = [FileNotFoundError(errno.ENOENT, "")]

    def flaky_open(*arguments: object, **options: object) -> int:
        if failures:
            raise failures.pop()
        return real_open(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", flaky_open)
    assert _release(directory, _make(directory))


def test_a_name_that_keeps_changing_is_given_up(
    directory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os.path, "samestat", lambda one, other: False)
    with pytest.raises(FileExistsError, match="keeps changing"):
        placeholder.make(directory, ".git")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_system_with_coarse_times_is_refused_and_nothing_is_left(
    directory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "utime", lambda *_, **__: None)
    with pytest.raises(OSError, match="modification times"):
        placeholder.make(directory, ".git")
    assert os.listdir() == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_directory_that_replaces_a_new_placeholder_is_not_changed(
    directory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.makedirs("filled/inner")
    before = os.stat("filled")
    real_mkdir = os.mkdir

    def replaced(name: str, mode: int, *, dir_fd: int) -> None:
        real_mkdir(name, mode, dir_fd=dir_fd)
        os.rmdir(name, dir_fd=dir_fd)
        os.rename("filled", name)

    monkeypatch.setattr(os, "mkdir", replaced)
    with pytest.raises(FileExistsError):
        placeholder.make(directory, ".git")
    after = os.stat(".git")
    assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)


def test_a_placeholder_that_is_claimed_while_it_is_settled_stays_recognised(
    directory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_utime = os.utime

    def claimed(descriptor: int, *, ns: tuple[int, int]) -> None:
        real_utime(descriptor, ns=ns)
        os.mkdir(".git/.exec-server-claim")

    with monkeypatch.context() as patched:
        patched.setattr(os, "utime", claimed)
        use = _make(directory)
    assert _is_placeholder(".git")
    assert _release(directory, use)
    assert not os.path.lexists(".git")


# ---- locks of other processes ---------------------------------------------------------


def test_an_exclusive_lock_of_a_stranger_stops_no_user(directory: int, stranger: int) -> None:
    fcntl.flock(stranger, fcntl.LOCK_EX)
    first, second = _make(directory), _make(directory)
    assert first.claim is not None
    assert second.claim is not None
    assert _is_placeholder(".git")
    assert not _release(directory, first)
    # The lock is free now, so another server may use and release the placeholder.
    fcntl.flock(stranger, fcntl.LOCK_UN)
    _release(directory, _make(directory))
    assert placeholder.remove_left_behind(directory, ".git")
    assert os.listdir(".git") == [second.claim.name]
    assert _release(directory, second)
    assert not os.path.lexists(".git")


def test_the_claim_of_a_dead_server_is_removed(directory: int, stranger: int) -> None:
    fcntl.flock(stranger, fcntl.LOCK_EX)
    _abandon(_make(directory))
    fcntl.flock(stranger, fcntl.LOCK_UN)
    assert len(os.listdir(".git")) == 1
    use = _make(directory)
    assert use.claim is None
    assert _release(directory, use)
    assert not os.path.lexists(".git")


def test_a_shared_lock_of_a_stranger_delays_the_removal(directory: int, stranger: int) -> None:
    fcntl.flock(stranger, fcntl.LOCK_SH)
    use = _make(directory)
    assert use.claim is None
    assert not _release(directory, use)
    assert not placeholder.remove_left_behind(directory, ".git")
    fcntl.flock(stranger, fcntl.LOCK_UN)
    assert placeholder.remove_left_behind(directory, ".git")
    assert not os.path.lexists(".git")


def test_a_placeholder_that_is_removed_while_it_is_claimed_is_missing(
    directory: int, stranger: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fcntl.flock(stranger, fcntl.LOCK_EX)
    before = len(os.listdir("/proc/self/fd"))
    real_chmod = os.fchmod

    def remove_first(descriptor: int, mode: int) -> None:
        real_chmod(descriptor, mode)
        os.rmdir(".git")

    monkeypatch.setattr(os, "fchmod", remove_first)
    with pytest.raises(FileNotFoundError):
        placeholder.make(directory, ".git")
    assert len(os.listdir("/proc/self/fd")) == before


def test_claims_that_are_locked_as_soon_as_they_appear_are_given_up(
    directory: int, stranger: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fcntl.flock(stranger, fcntl.LOCK_EX)
    before = len(os.listdir("/proc/self/fd"))

    def refuse(descriptor: int, operation: int) -> None:
        raise BlockingIOError(errno.EAGAIN, "")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(BlockingIOError):
        placeholder.make(directory, ".git")
    assert os.listdir(".git") == []
    assert len(os.listdir("/proc/self/fd")) == before


# ---- directories of an ordinary user --------------------------------------------------


@in_own_process
def _as_ordinary(path: str, mode: int) -> None:
    """Close the directory of a placeholder, and release the placeholder."""
    if os.geteuid() == 0:
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    directory = os.open(path, os.O_PATH | os.O_DIRECTORY)
    use = _make(directory)
    os.chmod(path, mode)
    assert _release(directory, use)
    assert stat.S_IMODE(os.stat(path).st_mode) == mode
    os.chmod(path, 0o700)
    assert os.listdir(path) == []
    _abandon(_make(directory))
    os.chmod(path, mode)
    assert placeholder.remove_left_behind(directory, ".git")
    os.chmod(path, 0o700)
    assert os.listdir(path) == []
    # A placeholder that was closed itself.
    _abandon(_make(directory))
    os.chmod(f"{path}/.git", 0)
    assert _release(directory, _make(directory))
    assert os.listdir(path) == []


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Path]:
    """A directory that every user can reach."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield Path(folder)


@pytest.mark.parametrize("mode", [0o500, 0o400, 0o100, 0])
def test_a_placeholder_in_a_closed_directory_is_removed(shared: Path, mode: int) -> None:
    if os.geteuid() == 0:
        os.chown(shared, _NOBODY, _NOBODY)
    _as_ordinary(str(shared), mode)


def test_without_procfs_a_closed_directory_keeps_its_placeholder(
    directory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use = _make(directory)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "")

    with monkeypatch.context() as patched:
        patched.setattr(os, "rmdir", refuse)
        patched.setattr(os, "chmod", refuse)
        os.fchmod(directory_fd := os.open(".", os.O_RDONLY), 0o500)
        assert not _release(directory, use)
    os.fchmod(directory_fd, 0o700)
    os.close(directory_fd)
    assert placeholder.remove_left_behind(directory, ".git")


@in_own_process
def _use_foreign(path: str) -> None:
    os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    directory = os.open(path, os.O_PATH | os.O_DIRECTORY)
    locked, closed = _make(directory, "locked"), _make(directory, "closed")
    for name, use in (("locked", locked), ("closed", closed)):
        assert use.claim is None
        assert os.path.samestat(os.fstat(use.descriptor), os.stat(f"{path}/{name}"))
        assert placeholder.release(directory, name, use)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="gives a directory to another user")
def test_a_file_system_that_changes_the_owner_keeps_no_placeholder(
    directory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As network file systems do with the files of root."""
    real_mkdir = os.mkdir

    def squashed(name: str, mode: int, *, dir_fd: int) -> None:
        real_mkdir(name, mode, dir_fd=dir_fd)
        os.chown(name, _NOBODY, _NOBODY, dir_fd=dir_fd)

    with monkeypatch.context() as patched:
        patched.setattr(os, "mkdir", squashed)
        first = _make(directory)
        assert _is_placeholder(".git")
        second = _make(directory)
    assert _release(directory, second)  # left to its owner
    assert os.path.isdir(".git")
    assert _release(directory, first)
    assert not os.path.lexists(".git")


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="makes directories of another user")
def test_a_forged_placeholder_of_another_user_stops_nothing(shared: Path) -> None:
    """Its owner has locked it, or closed it, in a directory with the sticky bit."""
    shared.chmod(0o1777)
    for name in ("locked", "closed"):
        (shared / name).mkdir()
        os.utime(shared / name, ns=(placeholder.MARK_NS, placeholder.MARK_NS))
    (shared / "closed").chmod(0)
    lock = os.open(shared / "locked", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    _use_foreign(str(shared))
    os.close(lock)
    assert sorted(os.listdir(shared)) == ["closed", "locked"]
