"""Copies that delete at their destination what the source has not, and dry runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.support.client_targets import ClientTarget
from tests.support.trees import tree, write_files

from exec_server import Environment, NotAllCopied, Planned, Transfer, sync
from exec_server.client.transfer import download
from exec_server.client.transfer.remote_tree import RemoteTree
from exec_server.errors import InvalidRequest, Unsupported

MIRROR: dict[str, Any] = {"sync": "time", "delete": True}


@pytest.fixture(params=["upload", "download"])
def direction(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_files(tmp_path / "a", {"x": "x", "d/y": "y", "was_file/z": "z", "was_dir": "f"})
    (tmp_path / "a/link").symlink_to("x")
    return tmp_path / "a"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A copy of an older state, with files that are kept and others that are not."""
    write_files(tmp_path / "outside", {"precious": "p"})
    top = tmp_path / "b"
    write_files(
        top,
        {
            "x": "old x",
            "was_file": "f",
            "was_dir/deep/z": "z",
            "old/very/file": "o",
            "cache/kept": "k",
            "old/cache/kept": "k",
            "new\nline": "n",
            ".env": "secret",
            os.fsdecode(b"\xff/\xfe"): "bytes",
        },
    )
    (top / "way_out").symlink_to(tmp_path / "outside")
    (top / "old/way_out").symlink_to("../../outside")
    (top / "was_link").symlink_to("nowhere")
    os.mkfifo(top / "fifo")
    return top


def paths_below(top: Path) -> set[str]:
    return {str(path.relative_to(top)) for path in top.rglob("*")}


@pytest.mark.quick
def test_a_mirror_is_equal_but_for_excluded_entries(
    there: ClientTarget, direction: str, source: Path, target: Path, tmp_path: Path
) -> None:
    done: list[Transfer] = []

    async def scene(env: Environment) -> None:
        copy = getattr(env.files, direction)
        options = MIRROR | {"exclude": ["cache/", ".env"], "keep_times": True}
        before = tree(target)
        plan = await copy(source, target, **options, dry_run=True)
        assert tree(target) == before
        done.append(await copy(source, target, **options))
        assert (plan.files, plan.copied_bytes) == (done[0].files, done[0].copied_bytes)
        assert {each.path for each in plan.planned if each.action == "delete"} == set(
            done[0].deleted
        )
        assert {each.path for each in plan.planned if each.action == "copy"} == {
            *("x", "d/y", "was_file/z", "was_dir", "link")
        }
        for top in (source, target):
            (top / "empty").mkdir()
        again = await copy(source, target, **options, dry_run=True)
        assert Planned("skip", "empty") in again.planned
        assert {each.action for each in again.planned if each.path != "link"} == {"skip"}
        assert not (await copy(source, target, **MIRROR | {"exclude": ["x"]})).failed

    there.play(scene)
    assert "x" in paths_below(target)  # excluded the second time
    assert paths_below(target) == paths_below(source)
    assert paths_below(tmp_path / "outside") == {"precious"}
    assert len(done[0].deleted) == len(set(done[0].deleted))
    kept = {"old", "old/cache", "cache", ".env"}
    assert not kept & set(done[0].deleted)
    assert {"old/very", "old/very/file", "way_out", "fifo", "was_dir/deep/z"} <= set(
        done[0].deleted
    )


def test_nothing_is_deleted_unless_everything_was_read_and_copied(
    there: ClientTarget, direction: str, source: Path, target: Path
) -> None:
    before = paths_below(target)

    async def scene(env: Environment) -> None:
        copy = getattr(env.files, direction)
        os.mkfifo(source / "fifo2")
        with pytest.raises(NotAllCopied) as caught:
            await copy(source, target, **MIRROR)
        text = "deletions: none, because a part of the source could not be read"
        assert text in caught.value.transfer.left_out
        (source / "fifo2").unlink()
        # An excluded entry keeps the directory that is in the way.
        done = await copy(source, target, **MIRROR, exclude=["deep"], check=False)
        assert [each.path for each in done.failed] == ["was_dir"]
        assert done.left_out == ("deletions: none, because not everything could be copied",)
        assert done.deleted == ("was_file",)

    there.play(scene)
    assert before - paths_below(target) == set()
    assert (target / "was_file/z").exists()


def test_deletions_that_are_refused(
    there: ClientTarget, direction: str, source: Path, tmp_path: Path
) -> None:
    async def scene(env: Environment) -> None:
        copy = getattr(env.files, direction)
        with pytest.raises(ValueError, match="delete needs sync"):
            await copy(source, tmp_path / "b", delete=True)
        with pytest.raises(InvalidRequest, match="nothing is deleted in the root directory"):
            await copy(source, "/", **MIRROR, dry_run=True)
        # A file has nothing that could be extra; a missing or other target neither.
        await copy(source / "x", tmp_path / "file", **MIRROR)
        done = await copy(source, tmp_path / "new", **MIRROR, dry_run=True)
        assert not (tmp_path / "new").exists()
        assert Planned("copy", "d/y", 1) in done.planned
        with pytest.raises((InvalidRequest, OSError)):
            await copy(source, tmp_path / "file", **MIRROR)

    there.play(scene)


def test_a_mirror_needs_find(
    ours: ClientTarget, direction: str, source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_find(self: RemoteTree, *_: object) -> None:
        raise Unsupported("find", "none")

    monkeypatch.setattr(RemoteTree, "_scan_with_find", no_find)
    before = tree(target)

    async def scene(env: Environment) -> None:
        with pytest.raises(Unsupported, match="GNU find"):
            await getattr(env.files, direction)(source, target, **MIRROR)

    ours.play(scene)
    assert tree(target) == before


def test_ignore_files_decide_what_is_kept(
    there: ClientTarget, direction: str, source: Path, target: Path
) -> None:
    """Those of the source; in directories that it lacks, those of the target."""
    write_files(source, {".gitignore": "cache/\n"})
    write_files(target, {"gone/.gitignore": "*.o\n", "gone/a.o": "", "d/.gitignore": "b.o"})
    write_files(target, {"d/b.o": ""})

    async def scene(env: Environment) -> None:
        await getattr(env.files, direction)(source, target, **MIRROR, gitignore=True)

    there.play(scene)
    kept = {"cache", "cache/kept", "old", "old/cache", "old/cache/kept", "gone", "gone/a.o"}
    assert paths_below(target) == paths_below(source) | kept


def test_a_file_of_another_spelling_may_be_the_copied_one(
    ours: ClientTarget, source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "IGNORES_CASE", True)
    write_files(target, {"X": "x", "Other": "o"})

    async def scene(env: Environment) -> None:
        done = await env.files.download(source, target, **MIRROR, check=False)
        assert "Other" in done.deleted

    ours.play(scene)
    assert (target / "X").exists()


def test_the_same_without_async(ours: ClientTarget, source: Path, target: Path) -> None:
    with sync.connect(ours.url) as env:
        plan = env.files.upload(source, target, dry_run=True, exclude=["d"])
        assert Planned("exclude", "d") in plan.planned
        done = env.files.upload(source, target, sync="checksum", delete=True)
    assert "old/very/file" in done.deleted
    assert paths_below(target) == paths_below(source)
