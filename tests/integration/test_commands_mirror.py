"""`exec-server cp` with exclusions, deletions, dry runs and names."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.cli import run_client, start_client, stderr_text
from tests.support.client import scaled, start_server
from tests.support.client_targets import ClientTarget
from tests.support.server_internals import eventually
from tests.support.trees import tree, write_files

# From a place to a place: made of a target's URL and a path.
WAYS: dict[str, tuple[Callable[[str, str], str], Callable[[str, str], str]]] = {
    "up": (lambda url, path: path, lambda url, path: f"{url}:{path}"),
    "down": (lambda url, path: f"{url}:{path}", lambda url, path: path),
    "within": (lambda url, path: f"{url}:{path}", lambda url, path: f"{url}:{path}"),
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    top = tmp_path / "a"
    write_files(
        top,
        {"x": "xx", "d/y": "y", "d/z.o": "z", ".git/HEAD": "h", "n/i": "i", ".gitignore": "*.o"},
    )
    (top / "link").symlink_to("x")
    (top / "d/y").chmod(0o755)
    write_files(tmp_path / "b", {"x": "old", "gone/f": "f", "n/kept": "k"})
    return top


@pytest.mark.parametrize("way", WAYS)
def test_a_mirror(there: ClientTarget, project: Path, tmp_path: Path, way: str) -> None:
    source, target = (make(there.url, str(tmp_path)) for make in WAYS[way])
    words = ["--sync", "--delete", "--exclude-vcs", "--gitignore", "--exclude", "n/"]
    before = tree(tmp_path)
    dry = run_client("cp", "-n", *words, f"{source}/a/.", f"{target}/b")
    assert (dry.returncode, stderr_text(dry)) == (0, "")
    assert tree(tmp_path) == before
    lines = {
        *(f"exclude {source}/a/{name}" for name in (".git", "d/z.o", "n")),
        *(f"copy    {target}/b/{name}" for name in (".gitignore", "x", "d/y", "link")),
        *(f"delete  {target}/b/{name}" for name in ("gone", "gone/f")),
    }
    assert set(dry.stdout.decode().splitlines()) == lines
    done = run_client("cp", "-v", *words, f"{source}/a/.", f"{target}/b")
    assert (done.returncode, stderr_text(done)) == (0, "")
    told = {line for line in lines if not line.startswith("exclude") and "link" not in line}
    assert set(done.stdout.decode().splitlines()) == told
    copy = tree(tmp_path / "b")
    assert set(copy) == {".gitignore", "x", "d", "d/y", "link", "n", "n/kept"}
    original = tree(project)
    assert {name: copy[name] for name in ("x", "d/y", "link")} == {
        name: original[name] for name in ("x", "d/y", "link")
    }
    again = run_client("cp", "-v", "--checksum", *words[1:], f"{source}/a/.", f"{target}/b")
    assert (again.returncode, again.stdout, stderr_text(again)) == (0, b"", "")
    for name in ("a", "b"):
        (tmp_path / name / "empty").mkdir()
    dry = run_client("cp", "-n", *words, f"{source}/a/.", f"{target}/b")
    assert f"skip    {target}/b/empty\n" in dry.stdout.decode()
    assert "copy " not in dry.stdout.decode().replace(f"copy    {target}/b/link\n", "")


@pytest.mark.parametrize("way", WAYS)
def test_a_mirror_follows_no_link(there: ClientTarget, tmp_path: Path, way: str) -> None:
    write_files(tmp_path, {"a/f": "new", "a/g": "same", "a/none": "x", "a/d/e": "e"})
    write_files(tmp_path, {"outside/f": "old", "outside/g": "same", "b/h": ""})
    for name, place in (("f", "f"), ("g", "g"), ("none", "nowhere"), ("d", "")):
        (tmp_path / "b" / name).symlink_to(f"../outside/{place}")
    source, target = (make(there.url, str(tmp_path)) for make in WAYS[way])
    words = ["--checksum", "--delete", f"{source}/a/.", f"{target}/b"]
    dry = run_client("cp", "-n", *words)
    lines = dry.stdout.decode().replace("/./", "/").replace(f"{target}/b/", "").splitlines()
    assert {tuple(line.split()) for line in lines} == {
        *(("delete", name) for name in ("d", "f", "g", "h", "none")),
        *(("copy", name) for name in ("d/e", "f", "g", "none")),
    }
    done = run_client("cp", *words)
    assert (done.returncode, stderr_text(done)) == (0, "")
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
    assert set(tree(tmp_path / "outside")) == {"f", "g"}
    assert (tmp_path / "outside/f").read_text() == "old"


def test_between_targets(ours: ClientTarget, project: Path, tmp_path: Path) -> None:
    with start_server("ours") as other:
        words = ["--sync", "--delete", "--exclude", "n/", "--exclude", ".git"]
        place = f"{other.url}:{tmp_path}/b"
        dry = run_client("cp", "-n", *words, f"{ours.url}:{project}/.", place)
        assert "old" in (tmp_path / "b/x").read_text()
        assert {line for line in dry.stdout.decode().splitlines() if "delete" in line} == {
            *(f"delete  {place}/gone", f"delete  {place}/gone/f")
        }
        done = run_client("cp", *words, f"{ours.url}:{project}/.", place)
        assert (done.returncode, done.stdout, stderr_text(done)) == (0, b"", "")
        os.mkfifo(project / "fifo")
        write_files(tmp_path, {"b/d/extra": "e"})
        done = run_client("cp", *words, f"{ours.url}:{project}/.", place)
        assert done.returncode == 1
        assert f"{place}: nothing is deleted: not everything was copied" in stderr_text(done)
        (tmp_path / "b/d/extra").unlink()
    assert set(tree(tmp_path / "b")) == {
        *(".gitignore", "x", "d", "d/y", "d/z.o", "link", "n", "n/kept")
    }


def test_patterns_from_a_file(ours: ClientTarget, project: Path, tmp_path: Path) -> None:
    (tmp_path / "rules").write_text("# comment\n*\n!d/\n")
    words = ["--exclude-from", "rules", "--exclude", "!y"]
    done = run_client("get", *words, f"{ours.url}:{project}", cwd=tmp_path / "b")
    assert (done.returncode, stderr_text(done)) == (
        2,
        "Error: argument --exclude-from: rules: No such file or directory\n\n"
        "For more information, try 'exec-server get -h'.\n",
    )
    done = run_client("get", *words, f"{ours.url}:{project}", "c", cwd=tmp_path)
    assert (done.returncode, set(tree(tmp_path / "c"))) == (0, {"d", "d/y"})


def test_what_is_refused(ours: ClientTarget, project: Path, tmp_path: Path) -> None:
    place = f"{ours.url}:{tmp_path}"
    write_files(tmp_path, {"other/a/x": "x"})
    for words, text in (
        (["--delete", "a", f"{place}/b"], "--delete needs --sync or --checksum"),
        (["-n", "-", f"{place}/b"], "--delete and --dry-run are for files and directories"),
        (["--sync", "--delete", "a", "other/a", f"{place}/b"], "each would delete the other"),
        (["--sync", "--delete", "a/.", "other", f"{place}/b"], "each would delete the other"),
    ):
        ended = run_client("cp", *words, cwd=tmp_path)
        assert ended.returncode == 2
        assert text in stderr_text(ended)
    for words in ([f"{place}/a/.", f"{place}"], [f"{place}/.", f"{place}/a"]):
        ended = run_client("cp", "--sync", "--delete", *words)
        assert ended.returncode == 1
        assert "one of them contains the other: nothing is deleted there" in stderr_text(ended)
    for words in ([f"{place}/a/.", "/"], ["a/.", f"{ours.url}:/"]):
        ended = run_client("cp", "-n", "--sync", "--delete", *words, cwd=tmp_path)
        assert ended.returncode == 1
        assert "nothing is deleted in the root directory" in stderr_text(ended)
    assert (project / "d/y").exists()


def test_a_copy_that_a_restart_has_ended_can_be_resumed(tmp_path: Path) -> None:
    source, there = tmp_path / "source", tmp_path / "there"
    there.mkdir()
    with source.open("wb") as file:
        file.truncate(2 << 30)  # sparse: what is copied takes seconds, and space as it is written
    with (
        start_server("ours") as server,
        start_client("cp", str(source), f"{server.url}:{there}/copy") as client,
    ):
        eventually("a partial file", lambda: os.listdir(there))
        server.kill()
        with start_server("ours", "--listen", server.url):
            assert client.wait(scaled(20)) == 1
        assert client.stderr is not None
        text = client.stderr.read().decode()
    assert "the server was probably restarted\nRun it again to resume.\n" in text
    assert [name.endswith(".part") for name in os.listdir(there)] == [True]


@pytest.mark.parametrize("way", WAYS)
def test_an_interrupted_deletion_leaves_nothing_behind(
    ours: ClientTarget, project: Path, tmp_path: Path, way: str
) -> None:
    source, target = (make(ours.url, str(tmp_path)) for make in WAYS[way])
    write_files(tmp_path / "b", {f"many/{number}": "" for number in range(2500)})
    words = ["cp", "--sync", "--delete", f"{source}/a/.", f"{target}/b"]
    with start_client(*words) as client:
        eventually("a deletion", lambda: len(os.listdir(tmp_path / "b/many")) < 2500)
        client.send_signal(signal.SIGINT)
        assert client.wait(scaled(10)) == 130
        assert client.stderr is not None
        assert client.stderr.read() == b"exec-server: interrupted; run it again to resume\n"
    assert 0 < len(os.listdir(tmp_path / "b/many")) < 2500
    assert not list(tmp_path.rglob("*.part"))
    done = run_client(*words)
    assert (done.returncode, stderr_text(done)) == (0, "")
    assert set(tree(tmp_path / "b")) == set(tree(project))
