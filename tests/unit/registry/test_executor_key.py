"""The key file of an executor: where it is, how it is made, and which ones are refused."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
)

from exec_server.errors import StartupError
from exec_server.registry.executor_key import IN_MEMORY, default_path, executor_identity
from exec_server.relay.noise import PublicKey


def key(path: Path | None, environment_id: str = "box", state: Path | None = None) -> PublicKey:
    environ = {} if state is None else {"XDG_STATE_HOME": str(state)}
    return executor_identity(None if path is None else str(path), environment_id, environ).public


def test_key_is_made_once_for_each_environment_id(tmp_path: Path) -> None:
    first = key(None, state=tmp_path)
    assert key(None, state=tmp_path) == first
    assert key(None, "another", state=tmp_path) != first
    folder = tmp_path / "exec-server" / "executor-keys"
    assert sorted(path.name for path in folder.iterdir()) == ["another.pem", "box.pem"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "box.pem").stat().st_mode) == 0o600
    assert (folder / "box.pem").read_text().count("BEGIN PRIVATE KEY") == 2


@pytest.mark.parametrize("mask", [0, 0o077, 0o477])
def test_umask_does_not_matter(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask & 0o077)
    try:
        (tmp_path / "a").mkdir(mode=0o755)
        key(tmp_path / "a" / "b" / "c" / "first.pem")
        os.umask(mask)
        key(tmp_path / "a" / "key.pem")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a" / "key.pem").stat().st_mode) == 0o600
    for folder in ("a/b", "a/b/c"):
        assert stat.S_IMODE((tmp_path / folder).stat().st_mode) == 0o700


def test_without_a_home_directory_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The working directory may be a workspace, whose commands could replace the key."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert key(None) != key(None)
    assert list(tmp_path.iterdir()) == []
    assert "there is no home directory; the key is new at each start" in capsys.readouterr().err


def test_key_with_a_passphrase_is_refused(tmp_path: Path) -> None:
    form = (Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    (tmp_path / "key.pem").write_bytes(X25519PrivateKey.generate().private_bytes(*form))
    (tmp_path / "key.pem").chmod(0o600)
    with pytest.raises(StartupError, match="is not the key of an executor"):
        key(tmp_path / "key.pem")


def test_file_can_be_named_or_done_without(tmp_path: Path) -> None:
    first = key(tmp_path / "key.pem")
    assert key(tmp_path / "key.pem", "another") == first
    (tmp_path / "link").symlink_to("key.pem")
    assert key(tmp_path / "link") == first
    memory = Path(IN_MEMORY)
    assert key(memory, state=tmp_path) != key(memory, state=tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["key.pem", "link"]


@pytest.mark.parametrize("name", ["..", "a/b", "ä b", "x" * 999])
def test_any_environment_id_is_one_file_name(name: str) -> None:
    path = default_path(name, {"XDG_STATE_HOME": "/state"})
    assert path.parent == Path("/state/exec-server/executor-keys")
    assert len(path.name) <= 255


def test_default_path_is_in_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/demo")
    expected = Path("/home/demo/.local/state/exec-server/executor-keys/box.pem")
    for state in ({}, {"XDG_STATE_HOME": ""}, {"XDG_STATE_HOME": "relative"}):
        assert default_path("box", state) == expected


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o644])
def test_file_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key.pem"
    first = key(path)
    path.chmod(mode)
    with pytest.raises(StartupError, match=r"others may read or write the key file .*key\.pem"):
        key(path)
    path.chmod(0o600)
    assert key(path) == first


def test_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key.pem"
    key(path)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(StartupError, match="belongs to another user"):
        key(path)


def test_other_contents_are_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    key(path)
    good = path.read_bytes()
    half = good[: len(good) // 2]
    for content in (b"", b"garbage", half, good[len(half) :], good * 400, good[:119] * 2):
        path.write_bytes(content)
        with pytest.raises(StartupError, match="is not the key of an executor: remove it"):
            key(path)
        assert path.read_bytes() == content


def test_other_kinds_of_files_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(StartupError, match="is not a regular file"):
        key(tmp_path / "fifo")
    (tmp_path / "directory").mkdir()
    with pytest.raises(StartupError, match="is not a regular file"):
        key(tmp_path / "directory")


def test_default_directory_that_cannot_be_used_is_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert key(None, state=tmp_path / "file") != key(None, state=tmp_path / "file")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("Warning: cannot keep the key of this executor in ")
    assert "clients cannot pin it: name another file with --key-file" in lines[0]


def test_named_file_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartupError, match=r"cannot keep the key .* Not a directory"):
        key(tmp_path / "file" / "key.pem")


def test_executors_that_start_at_once_have_one_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "key.pem"
    link = os.link
    first: list[PublicKey] = []

    def overtaken(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "link", link)
        first.append(key(path))
        link(source, target)

    monkeypatch.setattr(os, "link", overtaken)
    assert key(path) == first[0]
    assert os.listdir(tmp_path) == ["key.pem"]
