"""Copies that keep times and skip files that are equal, in both directions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.support.cli import run_client, stderr_text
from tests.support.client_targets import ClientTarget

from exec_server import Environment


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "sub").mkdir(parents=True)
    (root / "small").write_bytes(b"small")
    (root / "sub/large").write_bytes(bytes(3_000_000))
    for seconds, name in enumerate(("small", "sub/large", "sub", "."), 1_700_000_000):
        os.utime(root / name, ns=(0, seconds * 1_000_000_000 + 123_456_789))
    return root


def _times(root: Path) -> list[int]:
    return [(root / name).stat().st_mtime_ns for name in ("small", "sub/large", "sub", ".")]


def test_times_are_kept_and_equal_files_skipped(
    there: ClientTarget, tree: Path, tmp_path: Path
) -> None:
    far, back = tmp_path / "far", tmp_path / "back"

    async def scene(env: Environment) -> None:
        files = env.files
        done = await files.upload(tree, far, keep_times=True)
        assert (done.files, done.resumed_bytes, _times(far)) == (2, 0, _times(tree))
        await files.download(far, back, keep_times=True)
        assert _times(back) == _times(tree)
        (tree / "small").write_bytes(b"SMALL")
        done = await files.upload(tree, far, sync="time")
        assert (done.copied_bytes, done.resumed_bytes) == (5, 3_000_000)
        done = await files.download(far, back, sync="time")
        assert (done.copied_bytes, (back / "small").read_bytes()) == (5, b"SMALL")
        os.utime(far / "sub/large", (1, 1))
        done = await files.download(far, back, sync="checksum")
        assert (done.copied_bytes, done.resumed_bytes) == (0, 3_000_005)
        (back / "small").write_bytes(b"sm")
        done = await files.upload(back, far, sync="checksum")
        assert (done.copied_bytes, (far / "small").read_bytes()) == (2, b"sm")
        with pytest.raises(ValueError, match="sync must be"):
            await files.upload(tree, far, sync="size")  # type: ignore[arg-type]

    there.play(scene)


def test_the_flags_of_cp(ours: ClientTarget, tree: Path, tmp_path: Path) -> None:
    far = f"{ours.url}:{tmp_path}/far"
    for words in (["-p"], ["--sync"], ["--checksum"]):
        ended = run_client("cp", *words, f"{tree}/.", far)
        assert ended.returncode == 0, stderr_text(ended)
        assert _times(tmp_path / "far") == _times(tree)
