"""CertificateFile: its place, and what it is after others had it."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from exec_server.proxy import certificate_file as module
from exec_server.proxy.certificate_file import CertificateFile, VerifiedFile

_CONTENT = b"certificates\n"


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of runtime files of the user, for root too."""
    monkeypatch.setattr(module, "_ROOT_DIRECTORY", str(tmp_path / "absent"))
    runtime = tmp_path / "runtime"
    runtime.mkdir(0o700)
    return runtime


@pytest.fixture
def file(runtime: Path) -> Iterator[CertificateFile]:
    with closing(CertificateFile(_CONTENT, {"XDG_RUNTIME_DIR": str(runtime)})) as made:
        yield made


def test_the_file_is_written_once_and_removed(file: CertificateFile, runtime: Path) -> None:
    assert file.path is None
    first = file.verified()
    assert first == VerifiedFile(str(file.path), _CONTENT)
    path = Path(first.path)
    assert path.parent == runtime
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (_CONTENT, 0o644)
    inode = path.stat().st_ino
    assert file.verified() == first
    assert path.stat().st_ino == inode
    file.close()
    assert list(runtime.iterdir()) == []
    with pytest.raises(OSError, match="shutting down"):
        file.verified()


def _append(path: Path) -> None:
    path.write_bytes(_CONTENT + b"another authority\n")


def _replace_by_link(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(_CONTENT)
    path.unlink()
    path.symlink_to(other)


def _replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _make_writable(path: Path) -> None:
    path.chmod(0o666)


def _link(path: Path) -> None:
    os.link(path, path.with_name("other"))


@pytest.mark.parametrize(
    "change", [Path.unlink, _append, _replace_by_link, _replace_by_pipe, _make_writable, _link]
)
def test_a_changed_file_is_written_again(
    file: CertificateFile, change: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    path = Path(file.verified().path)
    change(path)
    assert file.verified() == VerifiedFile(str(path), _CONTENT)
    info = path.lstat()
    assert (info.st_mode, info.st_nlink) == (stat.S_IFREG | 0o644, 1)
    assert path.read_bytes() == _CONTENT
    assert "was changed or removed, and is written again" in caplog.text


def test_a_path_that_is_taken_is_given_up(file: CertificateFile) -> None:
    path = Path(file.verified().path)
    path.unlink()
    path.mkdir()
    (path / "inner").touch()
    again = file.verified()
    assert again.path != str(path)
    assert Path(again.path).read_bytes() == _CONTENT


def test_the_end_without_the_file(file: CertificateFile) -> None:
    Path(file.verified().path).unlink()
    file.close()


def test_places(runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary, home = tmp_path / "temporary", tmp_path / "home"
    for directory in (temporary, home):
        directory.mkdir(0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    (tmp_path / "plain").touch()
    variables = {"XDG_RUNTIME_DIR": str(runtime), "HOME": str(home)}
    cases = [
        (variables, runtime),
        (variables | {"XDG_RUNTIME_DIR": str(open_to_all)}, home / ".cache" / "exec-server"),
        (variables | {"XDG_RUNTIME_DIR": "runtime"}, home / ".cache" / "exec-server"),
        ({"XDG_CACHE_HOME": str(home / "kept")}, home / "kept" / "exec-server"),
        ({"HOME": str(open_to_all)}, temporary),
        ({"HOME": str(tmp_path / "absent")}, temporary),
        ({"XDG_CACHE_HOME": str(tmp_path / "plain" / "x")}, temporary),
        ({}, temporary),
    ]
    for given, place in cases:
        with closing(CertificateFile(_CONTENT, given)) as file:
            assert Path(file.verified().path).parent == place
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(FileNotFoundError):
        CertificateFile(_CONTENT, {}).verified()


@pytest.mark.root
def test_the_place_of_root() -> None:
    with closing(CertificateFile(_CONTENT, {})) as file:
        assert Path(file.verified().path).parent == Path("/run")
