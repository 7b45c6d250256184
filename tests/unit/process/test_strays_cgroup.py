"""The cgroup of a server: where it is created, and its end. With the kernel where it allows it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from exec_server.process import strays
from exec_server.process.strays import Cgroup, is_inside, own_directory

_V2 = "31 23 0:28 {root} {point} rw,relatime shared:1 - cgroup2 cgroup2 rw,nsdelegate\n"
_V1 = "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n"


@pytest.mark.parametrize(
    ("path", "root", "point", "expected"),
    [
        ("/", "/", "/sys/fs/cgroup", "/sys/fs/cgroup"),
        ("/a.slice/b", "/", "/sys/fs/cgroup", "/sys/fs/cgroup/a.slice/b"),
        ("/docker/1", "/docker/1", "/sys/fs/cgroup", "/sys/fs/cgroup"),
        ("/docker/1/x", "/docker/1", "/cg\\040roup", "/cg roup/x"),
        ("/docker/12", "/docker/1", "/sys/fs/cgroup", None),
        ("/../other", "/", "/sys/fs/cgroup", None),
    ],
)
def test_own_directory_is_below_the_mount(
    path: str, root: str, point: str, expected: str | None
) -> None:
    cgroups = f"4:memory:/elsewhere\n0::{path}\n"
    found = own_directory(cgroups, _V1 + _V2.format(root=root, point=point))
    assert (found and os.path.normpath(found)) == expected


def test_without_cgroup2_there_is_no_directory() -> None:
    assert own_directory("4:memory:/\n", _V2.format(root="/", point="/x")) is None
    assert own_directory("0::/\n", _V1) is None


def test_inside_is_a_matter_of_whole_names() -> None:
    assert is_inside("/a/b", "/")
    assert is_inside("/a/b", "/a/b")
    assert is_inside("/a/b/c", "/a/b")
    assert not is_inside("/a/bc", "/a/b")
    assert not is_inside("/", "/a")


def test_processes_in_the_cgroup_are_killed_and_it_is_removed() -> None:
    with (
        subprocess.Popen(["/bin/sleep", "1000"]) as one,
        subprocess.Popen(["/bin/sleep", "1000"]) as two,
    ):
        created = Cgroup.create_for(one.pid)
        if created is None:
            one.kill()
            two.kill()
            pytest.skip("no cgroup can be created")
        directory = Path(created._directory)
        (directory / "below").mkdir()
        (directory / "below/cgroup.procs").write_text(str(two.pid))
        created.kill()
        assert one.wait(10) == two.wait(10) == -9
        created.remove()
        assert not directory.exists()
        created.kill()  # it is gone
        created.remove()


def test_cgroup_that_cannot_be_created_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(strays, "own_directory", lambda *_: None)
    assert Cgroup.create_for(os.getpid()) is None
    monkeypatch.setattr(strays, "own_directory", lambda *_: str(tmp_path / "missing"))
    assert Cgroup.create_for(os.getpid()) is None
    monkeypatch.setattr(strays, "own_directory", lambda *_: str(tmp_path))
    assert Cgroup.create_for(os.getpid()) is None  # not a cgroup: it has no cgroup.procs
    assert list(tmp_path.iterdir()) == []


def test_cgroups_of_dead_servers_are_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    missing = 2**22 + 1  # above the largest pid
    dead, living = f"exec-server.{missing}.ab12", f"exec-server.{os.getpid()}.ab12"
    others = {
        "x",
        f"other.{missing}.ab12",
        f"exec-server.{missing}",
        f"exec-server.{missing}.",
        f"exec-server.{missing}.wxyz",
        "exec-server.missing.ab12",
    }
    for name in (dead, living, *others):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(strays, "own_directory", lambda *_: str(tmp_path))
    Cgroup.create_for(os.getpid())
    assert {entry.name for entry in tmp_path.iterdir()} == {living, *others}


def test_kill_waits_no_longer_than_its_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(strays, "END_SECONDS", 0.02)
    (tmp_path / "cgroup.kill").touch()
    (tmp_path / "cgroup.events").write_text("populated 1\nfrozen 0\n")
    Cgroup(str(tmp_path)).kill()
    assert (tmp_path / "cgroup.kill").read_text() == "1"
