"""What `exec-server cp` says and does when something cannot be copied; ours and the reference."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from tests.support.cli import Ended, client_environment, run_client, stderr_text
from tests.support.client import KINDS, scaled, server_command
from tests.support.client_targets import ClientTarget, bounded
from tests.support.process_limits import LIMITED, limited_server

from exec_server import connect
from exec_server.errors import InternalError


def run_limited(*words: str, cwd: Path | None = None) -> Ended:
    """A client to whom permissions mean something."""
    prefix = LIMITED if os.geteuid() == 0 else []
    return subprocess.run(
        [*prefix, *server_command("ours"), *words],
        env=client_environment(None),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=scaled(30),
        check=False,
    )


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Path]:
    """A tree in which some things may not be read."""
    top = tmp_path / "tree"
    (top / "closed" / "below").mkdir(parents=True)
    for name in ("a", "secret", "z", "closed/inside"):
        (top / name).write_text(name)
    (top / "large").write_bytes(bytes(3_000_000))
    for name in ("secret", "large", "closed"):
        (top / name).chmod(0)
    yield top
    (top / "closed").chmod(0o700)


@pytest.mark.quick
def test_one_file_that_cannot_be_read_does_not_end_an_upload(
    there: ClientTarget, guarded: Path, tmp_path: Path
) -> None:
    ended = run_limited("cp", "tree", f"{there.url}:{tmp_path}/copy", cwd=tmp_path)
    assert ended.returncode == 1
    assert sorted(stderr_text(ended).splitlines()) == [
        f"exec-server: tree/{name}: Permission denied" for name in ("closed", "large", "secret")
    ]
    assert {path.name for path in (tmp_path / "copy").rglob("*")} == {"a", "z"}


@pytest.mark.parametrize("kind", KINDS)
def test_one_file_that_cannot_be_read_does_not_end_a_download(
    kind: str, guarded: Path, tmp_path: Path
) -> None:
    with limited_server(kind, tmp_path) as url:
        ended = run_client("cp", f"{url}:{guarded}", "copy", cwd=tmp_path)
        top = run_client("cp", f"{url}:{guarded}/closed", "other", cwd=tmp_path)
    assert ended.returncode == 1
    assert sorted(stderr_text(ended).splitlines()) == [
        f"exec-server: {url}:{guarded}/{name}: Permission denied"
        for name in ("closed", "large", "secret")
    ]
    assert {path.name for path in (tmp_path / "copy").rglob("*")} == {"a", "z", "closed"}
    assert (top.returncode, stderr_text(top)) == (
        1,
        f"exec-server: {url}:{guarded}/closed: Permission denied\n",
    )


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_read_is_known_without_commands(
    kind: str, guarded: Path, tmp_path: Path
) -> None:
    async def scene(url: str) -> None:
        async with connect(url) as env:

            def start(*args: object, **options: object) -> None:
                raise InternalError("there are none")

            with mock.patch.object(env, "start", start):
                got = await env.files.download(guarded, tmp_path / "copy", check=False)
            assert sorted(each.path for each in got.failed) == ["closed", "large", "secret"]
            for each in got.failed:
                assert str(each.error).startswith(f"{guarded}/{each.path}: Permission denied")
            assert got.left_out == ("modes and symlinks: the machine has no GNU find",)

    with limited_server(kind, tmp_path) as url:
        bounded(scene(url))
    assert {path.name for path in (tmp_path / "copy").rglob("*")} == {"a", "z", "closed"}


def test_what_is_no_file_is_no_success(there: ClientTarget, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for words, name in (
        (["fifo", f"{there.url}:{tmp_path}/x"], "fifo"),
        ([f"{there.url}:/dev/null", "x"], f"{there.url}:/dev/null"),
    ):
        ended = run_client("cp", *words, cwd=tmp_path)
        text = f"exec-server: {name}: neither file, directory nor symlink\n"
        assert (ended.returncode, stderr_text(ended)) == (1, text)
    assert [path.name for path in tmp_path.iterdir()] == ["fifo"]


def test_a_file_is_not_copied_onto_itself(there: ClientTarget, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("content")
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "hard").hardlink_to(tmp_path / "a")
    place = f"{there.url}:{tmp_path}"
    for name in ("a", "link", "hard", "."):
        ended = run_client("cp", f"{place}/a", f"{place}/{name}")
        shown = "./a" if name == "." else name
        text = f"exec-server: {place}/a to {place}/{shown}: they are the same file\n"
        assert (ended.returncode, stderr_text(ended)) == (1, text)
    assert (tmp_path / "a").read_text() == "content"
    copied = run_client("cp", f"{place}/a", f"{place}/b")
    assert (copied.returncode, (tmp_path / "b").read_text()) == (0, "content")


@pytest.mark.parametrize("size", [3, 3_000_000])
def test_errors_name_the_side_and_no_file_of_ours(
    there: ClientTarget, tmp_path: Path, size: int
) -> None:
    (tmp_path / "f").write_bytes(bytes(size))
    (tmp_path / "d" / "f").mkdir(parents=True)
    place = f"{there.url}:{tmp_path}"
    missing = "No such file or directory"
    for words, text in (
        ([f"{place}/f", "d"], "d/f: Is a directory"),
        (["f", f"{place}/d"], f"{place}/d/f: Is a directory"),
        ([f"{place}/f", "/proc/f"], f"/proc/f: {missing}"),
        (["none", f"{place}/d"], f"none: {missing}"),
        ([f"{place}/none", "d"], f"{place}/none: {missing}"),
        ([f"{place}/none", f"{place}/d"], f"{place}/none: {missing}"),
    ):
        ended = run_client("cp", *words, cwd=tmp_path)
        assert (ended.returncode, stderr_text(ended)) == (1, f"exec-server: {text}\n")
    for words, text in (
        ([f"{place}/f", "no/sub/f"], "no/sub is not a directory; create it with mkdir -p"),
        (
            ["f", f"{place}/no/sub/f"],
            f"{place}/no/sub is not a directory; "
            f"create it with exec-server mkdir -p {place}/no/sub",
        ),
        ([f"{place}/f", "f/"], "f/ is not a directory"),
        (["f", f"{place}/f/"], f"{place}/f/ is not a directory"),
    ):
        ended = run_client("cp", *words, cwd=tmp_path)
        assert (ended.returncode, stderr_text(ended)) == (1, f"Error: {text}\n")
    assert {path.name for path in tmp_path.rglob("*")} == {"f", "d"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_full_disk_is_named_and_ends_it(there: ClientTarget, tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / str(number)).write_bytes(os.urandom(3_000_000))
    full = tmp_path / "full"
    full.mkdir()
    options = ["-t", "tmpfs", "-o", "size=2m", "none", str(full)]
    subprocess.run(["mount", *options], check=True)
    try:
        sent = run_client("cp", "0", "1", "2", f"{there.url}:{full}", cwd=tmp_path)
        for part in full.iterdir():
            part.unlink()
        sources = [f"{there.url}:{tmp_path}/{number}" for number in range(3)]
        got = run_client("cp", *sources, "full", cwd=tmp_path)
    finally:
        subprocess.run(["umount", str(full)], check=True)
    text = "full/0: No space left on device\n"
    assert (sent.returncode, stderr_text(sent)) == (1, f"Error: {there.url}:{tmp_path}/{text}")
    assert (got.returncode, stderr_text(got)) == (1, f"Error: {text}")
