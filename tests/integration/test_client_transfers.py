"""The client's uploads and downloads: files and trees; ours and the reference."""

from __future__ import annotations

import asyncio
import hashlib
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.client import KINDS
from tests.support.client_targets import (
    LOOPS,
    ClientTarget,
    Run,
    bounded,
    machine,
    through_cutting_proxy,
)
from tests.support.trees import make_tree, tree

from exec_server import Environment, NotAllCopied, NotFound, Progress, RpcError, Transfer
from exec_server.client import commands
from exec_server.client.transfer import local_scan
from exec_server.client.transfer import plan as transfer_module
from exec_server.client.transfer.remote_tree import FIND_FORMAT, Listing, RemoteTree
from exec_server.errors import InvalidRequest

MIB = 1_048_576


def fail(path: str, error: OSError) -> None:
    raise error


def part_here(source: Path, target: Path) -> Path:
    """Where a download of this has its content until it is complete."""
    words = ["find", str(source), "-printf", FIND_FORMAT]
    listing = Listing(str(source))
    listing.feed(subprocess.run(words, capture_output=True, check=True).stdout)
    [item] = listing
    return Path(transfer_module.part_path(str(target), item))


def failures(done: Transfer) -> dict[str, str]:
    """What a transfer could not copy, and why; of what is here without the path."""
    return {
        each.path: (each.error.strerror or "")
        if isinstance(each.error, OSError) and not isinstance(each.error, RpcError)
        else str(each.error)
        for each in done.failed
    }


@pytest.mark.quick
def test_a_tree_there_and_back(there: ClientTarget, tmp_path: Path) -> None:
    make_tree(tmp_path / "a")
    seen: list[Progress] = []

    async def scene(env: Environment) -> None:
        sent = await env.files.upload(tmp_path / "a", tmp_path / "b", progress=seen.append)
        assert sent.left_out == ()
        got = await env.files.download(tmp_path / "b", tmp_path / "c")
        assert (got.files, got.directories, got.links) == (sent.files, sent.directories, sent.links)
        assert got.left_out == ()
        assert sent.copied_bytes == got.copied_bytes > transfer_module.SMALL_BYTES
        # Again, over what is there.
        assert (await env.files.download(tmp_path / "b", tmp_path / "c")).left_out == ()

    there.play(scene)
    expected = tree(tmp_path / "a")
    assert tree(tmp_path / "b") == expected
    assert tree(tmp_path / "c") == expected
    assert seen[-1].done_bytes == seen[-1].total_bytes
    assert (
        seen[-1].done_files
        == seen[-1].total_files
        == len([kind for kind, _, _ in expected.values() if kind == "-"])
    )


@pytest.mark.parametrize("size", [3, transfer_module.SMALL_BYTES + 1])
def test_a_single_file(there: ClientTarget, tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    (tmp_path / "a").write_bytes(data)
    (tmp_path / "a").chmod(0o750)
    (tmp_path / "link").symlink_to("a")

    async def scene(env: Environment) -> None:
        await env.files.upload(tmp_path / "link", tmp_path / "b")
        await env.files.download(tmp_path / "b", tmp_path / "c")
        with pytest.raises(NotFound):
            await env.files.download(tmp_path / "none", tmp_path / "d")
        with pytest.raises(FileNotFoundError):
            await env.files.upload(tmp_path / "none", tmp_path / "d")
        (tmp_path / "directory").mkdir()
        with pytest.raises(RpcError, match="Is a directory"):
            await env.files.upload(tmp_path / "a", tmp_path / "directory")
        with pytest.raises(IsADirectoryError):
            await env.files.download(tmp_path / "a", tmp_path / "directory")
        (tmp_path / "directory").rmdir()

    there.play(scene)
    file = ("-", 0o750, hashlib.sha256(data).hexdigest())
    link = ("l", None, "a")
    assert tree(tmp_path) == {"a": file, "b": file, "c": file, "link": link}


def test_what_is_neither_file_nor_directory_is_not_copied(
    there: ClientTarget, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    os.mkfifo(tmp_path / "a" / "fifo")

    async def scene(env: Environment) -> None:
        sent = await env.files.upload(tmp_path / "a", tmp_path / "b", check=False)
        got = await env.files.download(tmp_path / "a", tmp_path / "c", check=False)
        assert failures(sent) == {"fifo": "neither file, directory nor symlink"}
        assert failures(got) == {"fifo": f"{tmp_path}/a/fifo: neither file, directory nor symlink"}
        assert (sent.left_out, got.left_out) == ((), ())
        with pytest.raises(OSError, match=r"neither file.*a/fifo"):
            await env.files.upload(tmp_path / "a" / "fifo", tmp_path / "d")
        with pytest.raises(RpcError, match=r"a/fifo: neither file, directory nor symlink"):
            await env.files.download(tmp_path / "a" / "fifo", tmp_path / "d")

    there.play(scene)
    assert tree(tmp_path / "b") == tree(tmp_path / "c") == {}


def test_machines_without_the_usual_commands(
    ours: ClientTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Content goes through the protocol; only modes and symlinks need commands."""
    make_tree(tmp_path / "a")
    monkeypatch.setattr(commands, "SYSTEM_FIRST", "PATH=/none; ")

    async def scene(env: Environment) -> None:
        run = env.run

        async def bare(argv: list[str], **options: object) -> object:
            return await run(argv, clean_env=True, env={"PATH": "/none"}, **options)  # type: ignore[arg-type]

        async def barer(argv: list[str], **options: object) -> object:
            options.pop("env", None)
            return await bare(argv, **options)

        def start(argv: list[str], **options: object) -> object:
            options["env"] = {"PATH": "/none"}
            return start_ordinarily(argv, clean_env=True, **options)  # type: ignore[arg-type]

        start_ordinarily = env.start
        monkeypatch.setattr(env, "run", barer)
        monkeypatch.setattr(env, "start", start)
        sent = await env.files.upload(tmp_path / "a", tmp_path / "b")
        assert [text.split(":")[0] for text in sent.left_out][:1] == ["symlinks"]
        got = await env.files.download(tmp_path / "a", tmp_path / "c", check=False)
        assert got.left_out == ("modes and symlinks: the machine has no GNU find",)
        # A listing cannot name it.
        assert [each.path for each in got.failed] == ["not-utf8-\ufffd"]

    ours.play(scene)
    expected = {
        path: content for path, (kind, _, content) in tree(tmp_path / "a").items() if kind != "l"
    }
    assert {path: content for path, (_, _, content) in tree(tmp_path / "b").items()} == expected
    readable = {path: content for path, content in expected.items() if "\udcff" not in path}
    assert {path: content for path, (_, _, content) in tree(tmp_path / "c").items()} == readable


def test_a_large_file_goes_on_where_it_ended(there: ClientTarget, tmp_path: Path) -> None:
    """An attempt that was ended leaves a part, and nothing under the final name."""
    data = os.urandom(24 * MIB)
    (tmp_path / "a").write_bytes(data)

    async def scene(env: Environment) -> None:
        for copy, target in ((env.files.upload, "b"), (env.files.download, "c")):
            reached = asyncio.Event()

            def stop(progress: Progress, reached: asyncio.Event = reached) -> None:
                if progress.done_bytes > 10 * MIB:
                    reached.set()

            first = asyncio.get_running_loop().create_task(
                copy(tmp_path / "a", tmp_path / target, progress=stop)
            )
            await reached.wait()
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            assert not (tmp_path / target).exists()
            second = await copy(tmp_path / "a", tmp_path / target)
            assert second.resumed_bytes >= 5 * MIB
            assert second.resumed_bytes + second.copied_bytes == len(data)

    there.play(scene)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "c"}
    assert (tmp_path / "b").read_bytes() == (tmp_path / "c").read_bytes() == data


def test_a_part_of_something_else_is_not_gone_on_with(there: ClientTarget, tmp_path: Path) -> None:
    data = os.urandom(5 * MIB)
    (tmp_path / "a").write_bytes(data)
    [item] = local_scan.scan(str(tmp_path / "a"), fail)
    Path(transfer_module.part_path(str(tmp_path / "b"), item)).write_bytes(bytes(MIB))

    async def scene(env: Environment) -> None:
        sent = await env.files.upload(tmp_path / "a", tmp_path / "b")
        assert sent.resumed_bytes == 0

    there.play(scene)
    assert (tmp_path / "b").read_bytes() == data


@pytest.mark.parametrize("is_damaged", [True, False])
def test_a_damaged_part_is_not_gone_on_with(
    there: ClientTarget, tmp_path: Path, is_damaged: bool
) -> None:
    data = os.urandom(5 * MIB)
    (tmp_path / "a").write_bytes(data)
    part = part_here(tmp_path / "a", tmp_path / "b")
    part.write_bytes(bytes(7) * is_damaged + data[7 * is_damaged : MIB])

    async def scene(env: Environment) -> None:
        got = await env.files.download(tmp_path / "a", tmp_path / "b")
        assert got.resumed_bytes == (0 if is_damaged else MIB)
        assert got.copied_bytes + got.resumed_bytes == len(data)

    there.play(scene)
    assert (tmp_path / "b").read_bytes() == data
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


def test_without_digests_a_download_begins_anew(
    ours: ClientTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(5 * MIB)
    (tmp_path / "a").write_bytes(data)
    part_here(tmp_path / "a", tmp_path / "b").write_bytes(data[:MIB])
    monkeypatch.setattr(transfer_module, "_DIGEST", "exit 127")

    async def scene(env: Environment) -> None:
        got = await env.files.download(tmp_path / "a", tmp_path / "b")
        assert (got.resumed_bytes, got.copied_bytes) == (0, len(data))

    ours.play(scene)
    assert (tmp_path / "b").read_bytes() == data


def test_directories_are_made_above_a_tree_and_not_above_a_file(
    there: ClientTarget, tmp_path: Path
) -> None:
    (tmp_path / "tree" / "inner").mkdir(parents=True)
    (tmp_path / "file").write_bytes(b"x")

    async def scene(env: Environment) -> None:
        for copy, name in ((env.files.upload, "up"), (env.files.download, "down")):
            with pytest.raises(FileNotFoundError):
                await copy(tmp_path / "file", tmp_path / name / "file")
            assert not (tmp_path / name).exists()
            await copy(tmp_path / "tree", tmp_path / name / "tree")
            assert (tmp_path / name / "tree" / "inner").is_dir()

    there.play(scene)


@pytest.mark.parametrize("size", [3, 5 * MIB])
def test_failed_downloads_leave_no_part_without_content(
    there: ClientTarget, tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(bytes(size))
    (tmp_path / "b" / "in the way").mkdir(parents=True)

    async def scene(env: Environment) -> None:
        with pytest.raises(IsADirectoryError) as error:
            await env.files.download(tmp_path / "a", tmp_path / "b")
        assert error.value.filename == str(tmp_path / "b")
        with pytest.raises(FileNotFoundError) as missing:
            await env.files.download(tmp_path / "a", tmp_path / "no" / "c")
        assert missing.value.filename == str(tmp_path / "no" / "c")
        # It is gone when it is to be read.
        scan = RemoteTree.scan

        async def scan_and_remove(*args: object, **options: object) -> object:
            found = await scan(*args, **options)  # type: ignore[arg-type]
            (tmp_path / "a").unlink()
            return found

        monkeypatch.setattr(RemoteTree, "scan", scan_and_remove)
        with pytest.raises(NotFound, match=f"{tmp_path}/a: No such file"):
            await env.files.download(tmp_path / "a", tmp_path / "c")

    there.play(scene)
    assert {path.name for path in tmp_path.iterdir()} == {"b"}


def test_a_file_that_changes_while_it_is_copied(there: ClientTarget, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(24 * MIB))

    def change(progress: Progress) -> None:
        if progress.done_bytes > 10 * MIB:
            with (tmp_path / "a").open("r+b") as file:
                file.write(b"changed")

    async def scene(env: Environment) -> None:
        with pytest.raises(InvalidRequest, match="a: the file was changed while it was copied"):
            await env.files.download(tmp_path / "a", tmp_path / "b", progress=change)
        with pytest.raises(OSError, match=r"the file was changed while it was copied: .*/a'"):
            await env.files.upload(tmp_path / "a", tmp_path / "b", progress=change)

    there.play(scene)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_uris_are_paths_to_transfers_too(there: ClientTarget, tmp_path: Path) -> None:
    make_tree(tmp_path / "a b")
    make_tree(tmp_path / "a%20b")
    (tmp_path / "a b" / "only here").touch()

    async def scene(env: Environment) -> None:
        there_uri, other_uri = f"file://{tmp_path}/c%20d", f"file://{tmp_path}/a%2520b"
        sent = await env.files.upload(tmp_path / "a b", there_uri)
        assert (sent.left_out, sent.failed) == ((), ())
        got = await env.files.download(there_uri, tmp_path / "e")
        assert (got.left_out, got.failed) == ((), ())
        await env.files.download(other_uri, tmp_path / "f")

    there.play(scene)
    assert tree(tmp_path / "c d") == tree(tmp_path / "e") == tree(tmp_path / "a b")
    assert "only here" not in tree(tmp_path / "f")


@pytest.mark.parametrize("kind", KINDS)
def test_transfers_survive_cuts(kind: str, tmp_path: Path) -> None:
    data = os.urandom(16 * MIB)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "large").write_bytes(data)
    (tmp_path / "a" / "small").write_bytes(b"small")

    async def scene(url: str) -> None:
        async with through_cutting_proxy(url, 3, 12 * MIB) as (cutter, env):
            await env.files.upload(tmp_path / "a", tmp_path / "b")
            up = cutter.cuts
            assert up >= 2
            await env.files.download(tmp_path / "b", tmp_path / "c")
            assert cutter.cuts >= up + 2

    with machine(kind) as there:
        bounded(scene(there.url))
    assert tree(tmp_path / "a") == tree(tmp_path / "b") == tree(tmp_path / "c")


def test_nothing_is_written_through_a_link(ours: ClientTarget, tmp_path: Path) -> None:
    (tmp_path / "a" / "d").mkdir(parents=True)
    (tmp_path / "a" / "d" / "f").write_text("x")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "d").symlink_to(tmp_path / "elsewhere")

    async def scene(env: Environment) -> None:
        got = await env.files.download(tmp_path / "a", tmp_path / "b", check=False)
        assert failures(got) == {"d": "it is a symlink, and nothing is written through a symlink"}
        assert (got.files, got.directories) == (0, 1)

    ours.play(scene)
    assert tree(tmp_path / "elsewhere") == {}
    assert tree(tmp_path / "b").keys() == {"d"}


@pytest.mark.parametrize("run", LOOPS)
def test_a_failure_does_not_end_a_transfer(there: ClientTarget, tmp_path: Path, run: Run) -> None:
    """Files where directories should be and the other way round: the rest is copied."""
    make_tree(tmp_path / "a")
    for place in ("b", "c"):
        for name in ("none", "large", "link"):
            (tmp_path / place / name / "in the way").mkdir(parents=True)
        (tmp_path / place / "deep").mkdir()
        (tmp_path / place / "deep" / "er").write_text("in the way")

    async def scene(env: Environment) -> None:
        sent = await env.files.upload(tmp_path / "a", tmp_path / "b", check=False)
        assert failures(sent) == {
            "none": f"{tmp_path}/b/none: Is a directory (os error 21)",
            "large": f"{tmp_path}/b/large: Is a directory",
            "deep/er": f"{tmp_path}/b/deep/er: File exists (os error 17)",
        }
        assert sent.left_out == (f"symlinks: {tmp_path}/b/link: Is a directory",)
        got = await env.files.download(tmp_path / "a", tmp_path / "c", check=False)
        assert failures(got) == {
            "none": "Is a directory",
            "large": "Is a directory",
            "link": "File exists",
            "deep/er": "File exists",
        }
        assert {getattr(each.error, "filename", None) for each in got.failed} == {
            f"{tmp_path}/c/{each.path}" for each in got.failed
        }
        assert got.files == sent.files == 50 + 5
        assert (sent.directories, sent.links, got.links) == (4, 3, 2)

    there.play(scene, run)
    whole = tree(tmp_path / "a")
    lost = {"none", "large", "link", "deep/er", "deep/er/est", "deep/er/est/file"}
    for place in ("b", "c"):
        copied = tree(tmp_path / place)
        for path in whole.keys() - lost:
            assert copied[path] == whole[path]
        assert copied["deep/er"][0] == "-"
        assert os.listdir(tmp_path / place / "link") == ["in the way"]
        assert not [path for path in copied if path.endswith(".part")]


def test_what_is_above_the_failure_is_found(there: ClientTarget, tmp_path: Path) -> None:
    """Directories are made from the deepest on, but the one in the way is named."""
    for leaf in ("x/1/2", "x/3", "y/1"):
        (tmp_path / "a" / leaf).mkdir(parents=True)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x").write_text("in the way")
    (tmp_path / "c").write_text("in the way")

    async def scene(env: Environment) -> None:
        sent = await env.files.upload(tmp_path / "a", tmp_path / "b", check=False)
        assert failures(sent) == {"x": f"{tmp_path}/b/x: File exists (os error 17)"}
        assert sent.directories == 3
        with pytest.raises(RpcError, match="c: File exists"):
            await env.files.upload(tmp_path / "a", tmp_path / "c")
        with pytest.raises(FileExistsError, match="c'"):
            await env.files.download(tmp_path / "a", tmp_path / "c")

    there.play(scene)
    assert tree(tmp_path / "b").keys() == {"x", "y", "y/1"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1000, 3 * MIB])
def test_a_full_disk_ends_a_transfer(kind: str, tmp_path: Path, size: int) -> None:
    (tmp_path / "a").mkdir()
    for number in range(30):
        (tmp_path / "a" / str(number)).write_bytes(os.urandom(size))
    full = tmp_path / "full"
    full.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size * 2}", "none", str(full)], check=True
    )

    async def scene(env: Environment) -> None:
        with pytest.raises(RpcError, match=r"full/b/\d+: No space left on device") as sent:
            await env.files.upload(tmp_path / "a", full / "b")
        assert ".part" not in str(sent.value)
        await env.files.remove(full / "b", recursive=True)
        with pytest.raises(OSError, match="No space left on device") as got:
            await env.files.download(tmp_path / "a", full / "b")
        assert Path(got.value.filename).parent == full / "b"
        assert Path(got.value.filename).name.isdigit()

    try:
        with machine(kind) as there:
            there.play(scene)
    finally:
        subprocess.run(["umount", str(full)], check=True)


MEMORY = """
import asyncio, resource, sys, uvloop
from exec_server import connect

async def main(url, source, target):
    async with connect(url) as env:
        await env.files.upload(source, target)
        await env.files.remove(target)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        await env.files.upload(source + ".large", target + ".large")
        await env.files.download(target + ".large", source + ".back")
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)

uvloop.run(main(*sys.argv[1:]))
"""


@pytest.mark.measured
@pytest.mark.parametrize("kind", KINDS)
def test_memory_stays_flat(kind: str, tmp_path: Path) -> None:
    """256 MiB up and down cost the client hardly more than 8 MiB do."""
    (tmp_path / "a").write_bytes(os.urandom(8 * MIB))
    with (tmp_path / "a.large").open("wb") as file:
        block = os.urandom(MIB)
        for number in range(256):
            file.write(number.to_bytes(4, "big") + block[4:])
    with machine(kind) as there:
        words = [sys.executable, "-c", MEMORY, there.url, str(tmp_path / "a"), str(tmp_path / "b")]
        done = subprocess.run(words, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * 1024 < 32 * MIB
    digests = {
        hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
        for name in ("a.large", "b.large", "a.back")
    }
    assert len(digests) == 1
    for name in ("a.large", "b.large", "a.back"):
        (tmp_path / name).unlink()  # they are large


def test_what_could_not_be_copied_is_raised_at_last(there: ClientTarget, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    os.mkfifo(tmp_path / "a" / "fifo")
    os.mkfifo(tmp_path / "a" / "other")
    (tmp_path / "a" / "file").write_text("x")

    async def scene(env: Environment) -> None:
        for copy, target in ((env.files.upload, "b"), (env.files.download, "c")):
            with pytest.raises(NotAllCopied, match=r"not everything .*, and 1 more") as raised:
                await copy(tmp_path / "a", tmp_path / target)
            transfer = raised.value.transfer
            assert (transfer.files, len(transfer.failed)) == (1, 2)
            assert (tmp_path / target / "file").read_text() == "x"
            assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)

    there.play(scene)
