"""`exec-server cp`, `ls`, `cat` and `rm`, from their words to the files, against both servers."""

from __future__ import annotations

import contextlib
import grp
import json
import os
import pwd
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.cli import client_environment, run_client, start_client, stderr_text
from tests.support.client import DEFAULT_TIMEOUT, KINDS, scaled, server_command, start_server
from tests.support.client_targets import ClientTarget
from tests.support.server_internals import eventually


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small tree with everything that is easily lost."""
    root = tmp_path / "tree"
    (root / "sub" / "empty").mkdir(parents=True)
    (root / "program").write_bytes(b"#!/bin/sh\n")
    (root / "program").chmod(0o755)
    (root / "sub" / "name with spaces żółć").write_bytes(b"")
    (root / "large").write_bytes(os.urandom(5_000_000))
    (root / "link").symlink_to("program")
    return root


# ---- cp -------------------------------------------------------------------------------


def _picture(root: Path) -> dict[str, object]:
    """What a tree consists of, for comparison."""
    found: dict[str, object] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_dir():
            found[name] = None
        else:
            found[name] = (path.stat().st_mode & 0o777, path.read_bytes())
    return found


def test_trees_go_there_and_back(there: ClientTarget, tree: Path, tmp_path: Path) -> None:
    copy, back = tmp_path / "there", tmp_path / "back"
    ended = run_client("cp", str(tree), f"{there.url}:{copy}")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")
    assert _picture(copy) == _picture(tree)
    assert run_client("cp", f"{there.url}:{copy}", str(back)).returncode == 0
    assert _picture(back) == _picture(tree)


def test_into_a_directory_things_go_under_their_names(
    there: ClientTarget, tree: Path, tmp_path: Path
) -> None:
    place = tmp_path / "there"
    place.mkdir()
    words = [str(tree / "program"), str(tree / "sub") + "/", f"{there.url}:{place}"]
    assert run_client("cp", *words).returncode == 0
    assert sorted(path.name for path in place.iterdir()) == ["program", "sub"]
    assert run_client("cp", f"{there.url}:{place}/program", ".", cwd=tmp_path).returncode == 0
    assert (tmp_path / "program").read_bytes() == b"#!/bin/sh\n"
    # The content of a directory, as with cp.
    assert run_client("cp", f"{there.url}:{tree}/.", str(place)).returncode == 0
    assert (place / "large").exists()


def test_between_paths_of_one_target_and_of_two(
    ours: ClientTarget, there: ClientTarget, tree: Path, tmp_path: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    assert run_client("cp", f"{there.url}:{tree}", f"{there.url}:{one}").returncode == 0
    assert _picture(one).keys() == _picture(tree).keys()
    assert run_client("cp", f"{there.url}:{tree}", f"{ours.url}:{two}").returncode == 0
    assert _picture(two) == _picture(tree)
    assert not list(Path(os.environ.get("TMPDIR", "/tmp")).glob("exec-server-cp-*"))


def test_mistakes_of_copies(there: ClientTarget, tree: Path, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    for words, code, text in (
        ([str(tree), str(missing)], 2, "both sides are local"),
        ([str(tree)], 2, "no destination"),
        ([str(tree), there.url], 2, f"names no path; write {there.url}:/PATH"),
        ([str(tree), f"{there.url}/tmp/x"], 2, f"names no path; write {there.url}:/tmp/x"),
        ([str(tree), str(tree), f"{there.url}:{missing}"], 1, "is not a directory"),
        ([str(tree), f"{there.url}:{missing}/"], 1, f"mkdir -p {there.url}:{missing}/"),
        ([str(missing), f"{there.url}:{tmp_path}"], 1, f"{missing}: No such file"),
        ([f"{there.url}:{missing}", str(tmp_path)], 1, f"{missing}: No such file"),
    ):
        ended = run_client("cp", *words)
        assert ended.returncode == code, words
        assert text in stderr_text(ended)
        assert "Traceback" not in stderr_text(ended)
    # The others are copied all the same.
    (tmp_path / "there").mkdir()
    words = [str(missing), str(tree / "program"), f"{there.url}:{tmp_path / 'there'}"]
    assert run_client("cp", *words).returncode == 1
    assert (tmp_path / "there" / "program").exists()


def _begins(directory: Path) -> Callable[[], bool]:
    """Whether a file in the directory has some content by now."""
    return lambda: any(path.stat().st_size > 1_048_576 for path in directory.iterdir())


@pytest.mark.parametrize("goes_up", [True, False])
def test_an_interrupted_copy_has_no_final_name_and_goes_on(
    ours: ClientTarget, tmp_path: Path, goes_up: bool
) -> None:
    source, there = tmp_path / "source", tmp_path / "there"
    there.mkdir()
    with source.open("wb") as file:
        file.write(os.urandom(1_048_576))
        file.truncate(256 * 1_048_576)
    target = f"{ours.url}:{there / 'copy'}" if goes_up else str(there / "copy")
    origin = str(source) if goes_up else f"{ours.url}:{source}"
    with start_client("cp", origin, target) as client:
        eventually("begun", _begins(there))
        client.send_signal(signal.SIGINT)
        assert client.wait(scaled(DEFAULT_TIMEOUT)) == 130
    assert not (there / "copy").exists()
    assert run_client("cp", origin, target).returncode == 0
    assert (there / "copy").read_bytes() == source.read_bytes()
    assert [path.name for path in there.iterdir()] == ["copy"]


def test_progress_is_shown_on_a_terminal(there: ClientTarget, tree: Path, tmp_path: Path) -> None:
    for flags, is_shown in (((), True), (("-q",), False)):
        master, slave = os.openpty()
        words = ("cp", *flags, str(tree), f"{there.url}:{tmp_path / 'there'}")
        with start_client(*words, stderr=slave) as client:
            os.close(slave)
            code = client.wait(scaled(DEFAULT_TIMEOUT))
        drawn = b""
        with contextlib.suppress(OSError):  # the end of a terminal
            while data := os.read(master, 65_536):
                drawn += data
        os.close(master)
        assert code == 0
        assert (b"100%" in drawn) == is_shown
        assert drawn.endswith(b"\x1b[K\r\n" if is_shown else b"")


# ---- ls, cat, rm ----------------------------------------------------------------------


def test_directories_are_listed(there: ClientTarget, tree: Path) -> None:
    (tree / ".hidden").write_bytes(b"")
    place = f"{there.url}:{tree}"
    assert run_client("ls", place).stdout.decode() == "large\nlink\nprogram\nsub\n"
    assert run_client("ls", "-a", place).stdout.decode().splitlines()[0] == ".hidden"
    long = [line.split() for line in run_client("ls", "-l", place).stdout.decode().splitlines()]
    if there.kind == "ours":
        owner = [pwd.getpwuid(os.getuid()).pw_name, grp.getgrgid(os.getgid()).gr_name]
        assert long[0][:4] == ["-rw-r--r--", *owner, "5000000"]
        modes = ["-rw-r--r--", "lrwxrwxrwx", "-rwxr-xr-x", "drwxr-xr-x"]
        names = ["large", "program", "program", "sub"]
    else:
        assert long[0][:4] == ["-?????????", "?", "?", "5000000"]
        modes = [kind + "?" * 9 for kind in "-l-d"]
        names = ["large", "link", "program", "sub"]
    assert [words[0] for words in long] == modes
    assert [words[-1] for words in long] == names
    both = run_client("ls", f"{place}/sub", f"{place}/program").stdout.decode()
    assert both == f"{place}/sub:\nempty\nname with spaces żółć\n{tree}/program\n"


def test_a_listing_of_many_files_asks_in_turns(ours: ClientTarget, tmp_path: Path) -> None:
    for number in range(1100):
        (tmp_path / f"{number:04}").touch()
    lines = run_client("ls", "-l", f"{ours.url}:{tmp_path}").stdout.decode().splitlines()
    assert [line[-4:] for line in lines] == [f"{number:04}" for number in range(1100)]


@pytest.mark.quick
def test_files_are_printed_as_they_are(there: ClientTarget, tree: Path) -> None:
    words = (f"{there.url}:{tree}/large", f"{there.url}:{tree}/program")
    ended = run_client("cat", *words)
    assert ended.stdout == (tree / "large").read_bytes() + b"#!/bin/sh\n"
    missing = f"{there.url}:{tree}/missing"
    ended = run_client("cat", missing, words[1])
    assert (ended.returncode, ended.stdout) == (1, b"#!/bin/sh\n")
    assert stderr_text(ended) == f"exec-server: {missing}: No such file or directory\n"


def test_files_are_removed(there: ClientTarget, tree: Path) -> None:
    place = f"{there.url}:{tree}"
    assert run_client("rm", f"{place}/program").returncode == 0
    assert not (tree / "program").exists()
    again = run_client("rm", f"{place}/program")
    assert (again.returncode, "No such file" in stderr_text(again)) == (1, True)
    assert run_client("rm", "-f", f"{place}/program").returncode == 0
    assert run_client("rm", f"{place}/sub").returncode == 1
    assert (tree / "sub").exists()
    for name in (".", "sub/..", "sub/./"):
        refused = run_client("rm", "-rf", f"{place}/{name}")
        assert refused.returncode == 2
        assert "refusing to remove" in stderr_text(refused)
    assert run_client("rm", "-r", place).returncode == 0
    assert not tree.exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["ls", "/tmp"], "write TARGET:/tmp"),
        (["cat", "ws://127.0.0.1:1"], "names no file; write ws://127.0.0.1:1:/PATH"),
        (["cat", "ws://127.0.0.1:1:"], "names no file; write ws://127.0.0.1:1:/PATH"),
        (["cat", "stdio:x"], "names no file; write stdio:x:/PATH"),
        (["cat", "relay:https://r/e"], "names no file; write relay:https://r/e:/PATH"),
        (["cat", "build"], "names no file; write build:PATH"),
        (["rm", "build:"], "names no file; write build:PATH"),
        (["rm", "-r", "ws://127.0.0.1:1:."], "a path after ws://127.0.0.1:1 begins with / or ~"),
        (["ls", "wss://host:a/b"], "a path after wss://host begins with / or ~"),
        (["cp", "x", "ws://[::1]:1:a"], "a path after ws://[::1]:1 begins with / or ~"),
    ],
)
def test_mistakes_about_places(words: list[str], text: str) -> None:
    ended = run_client(*words)
    assert (ended.returncode, ended.stdout) == (2, b"")
    assert text in stderr_text(ended)


def test_everything_is_not_removed(ours: ClientTarget) -> None:
    ended = run_client("rm", "-r", f"{ours.url}:///")
    assert ended.returncode == 2
    assert "is the root directory" in stderr_text(ended)


# ---- what fails -----------------------------------------------------------------------


def test_who_cannot_write_to_stdout_says_so(there: ClientTarget, tree: Path) -> None:
    for words in (
        *(["ls", f"{there.url}:{tree}"], ["ls", "-l", f"{there.url}:{tree}"]),
        *(["cat", f"{there.url}:{tree}/large"], ["info", there.url], ["completion", "bash"]),
    ):
        with open("/dev/full", "wb") as full, start_client(*words, stdout=full) as client:
            assert client.stderr is not None
            said = client.stderr.read().decode()
            assert client.wait(scaled(DEFAULT_TIMEOUT)) == 1
        assert said == "Error: cannot write to stdout: No space left on device\n", words


@pytest.mark.parametrize("name", ["HUP", "INT"])
def test_a_signal_that_our_starter_ignores_is_ignored(
    there: ClientTarget, tree: Path, name: str
) -> None:
    words = [*server_command("ours"), "cat", f"{there.url}:{tree}/large"]
    with subprocess.Popen(
        ["sh", "-c", f"trap '' {name}; exec \"$@\"", "sh", *words],
        env=client_environment(None),
        stdout=subprocess.PIPE,
        bufsize=0,  # `communicate` knows nothing of what is in a buffer
    ) as client:
        try:
            assert client.stdout is not None
            first = client.stdout.read(1)
            client.send_signal(getattr(signal, f"SIG{name}"))
            rest = client.communicate(timeout=scaled(DEFAULT_TIMEOUT))[0]
        finally:
            client.kill()
    assert (client.returncode, first + rest) == (0, (tree / "large").read_bytes())


# A client that is less patient with a server that does not come back.
_IMPATIENT = """
from exec_server.client.engine import session
session.RECOVERY_SECONDS = 3.0
from exec_server.cli.main import main
main()
"""


def _start_impatient(*words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", _IMPATIENT, *words],
        env=client_environment(None),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("command", ["cat", "cp"])
def test_a_lost_connection_is_told_of_and_named(kind: str, command: str, tmp_path: Path) -> None:
    source, here = tmp_path / "source", tmp_path / "here"
    here.mkdir()
    with source.open("wb") as file:
        file.truncate(1024 * 1_048_576)
    with start_server(kind) as server:
        place = f"{server.url}:{source}"
        words = [place] if command == "cat" else ["-q", place, str(here / "copy")]
        with _start_impatient(command, *words) as client:
            try:
                assert client.stdout is not None
                assert client.stderr is not None
                if command == "cat":
                    assert client.stdout.read(1) == b"\0"
                else:
                    eventually("begun", _begins(here))
                server.process.kill()
                server.process.wait()
                told = client.stderr.readline().decode()
                rest = client.communicate(timeout=scaled(3 * DEFAULT_TIMEOUT))[1].decode()
            finally:
                client.kill()
        assert told.startswith(f"exec-server: connection to {server.url} lost 1 s ago (")
        assert told.endswith("; trying again for 2 s\n")
        assert rest.startswith(f"Error: connection lost: {server.url}: ")
        assert "Connection refused" in rest
        assert "os error" not in rest
        hints = [] if command == "cat" else ["Run it again to resume."]
        assert rest.splitlines()[1:] == hints
        assert client.returncode == 1


def test_a_lost_connection_under_a_long_listing(tmp_path: Path) -> None:
    """Many questions at a time fail with it; the user hears of it once."""
    for number in range(5000):
        (tmp_path / f"{number:04}").touch()
    with start_server("ours") as server:
        # A line is shown as soon as the first turn is over, and the pipe is soon full.
        words = ("ls", "-l", f"{server.url}:{tmp_path}", f"{server.url}:{tmp_path}")
        with _start_impatient(*words) as client:
            try:
                assert client.stdout is not None
                assert client.stdout.readline()
                server.process.kill()
                server.process.wait()
                said = client.communicate(timeout=scaled(3 * DEFAULT_TIMEOUT))[1].decode()
            finally:
                client.kill()
    assert f"Error: connection lost: {server.url}: " in said
    assert "Traceback" not in said
    assert client.returncode == 1


# ---- patterns and links ---------------------------------------------------------------


def test_patterns_are_expanded_by_the_target(ours: ClientTarget, tmp_path: Path) -> None:
    for name in ("a1", "a2", "b*"):
        (tmp_path / name).write_text(name)
    (tmp_path / "ad").mkdir()
    place = f"{ours.url}:{tmp_path}"
    listed = run_client("ls", f"{place}/a*").stdout.decode()
    assert listed == f"{tmp_path}/a1\n{tmp_path}/a2\n{place}/ad:\n"
    assert run_client("cat", f"{place}/a?", f"{place}/b*").returncode == 1  # ad is a directory
    assert run_client("cat", f"{place}/a[12]", f"{place}/b*").stdout == b"a1a2b*"
    missing = run_client("cat", f"{place}/z*")
    assert (missing.returncode, stderr_text(missing)) == (
        1,
        f"exec-server: {place}/z*: no path matches\n",
    )
    assert run_client("rm", f"{place}/z*").returncode == 1
    assert run_client("rm", "-f", f"{place}/z*").returncode == 0
    assert run_client("rm", f"{place}/b*").returncode == 0  # a file of this name, no pattern
    assert run_client("rm", "-r", f"{place}/a*").returncode == 0
    assert not list(tmp_path.iterdir())


def test_links_that_lead_nowhere_are_listed(ours: ClientTarget, tmp_path: Path) -> None:
    (tmp_path / "lost").symlink_to("nowhere")
    (tmp_path / "there").symlink_to("file")
    (tmp_path / "file").touch()
    place = f"{ours.url}:{tmp_path}"
    assert run_client("ls", place).stdout == b"file\nlost\nthere\n"
    long = [line.split() for line in run_client("ls", "-l", place).stdout.decode().splitlines()]
    assert (long[1][0], long[1][-3:]) == ("lrwxrwxrwx", ["lost", "->", "nowhere"])
    entries = json.loads(run_client("ls", "--json", place).stdout)
    kinds = [(entry["name"], entry["kind"], entry["target"]) for entry in entries]
    assert kinds == [
        ("file", "file", None),
        ("lost", "other", "nowhere"),
        ("there", "file", "file"),
    ]
    operand = run_client("ls", "-l", f"{place}/lost").stdout.decode().split()
    assert (operand[0], operand[-3:]) == ("lrwxrwxrwx", [f"{tmp_path}/lost", "->", "nowhere"])


@pytest.mark.parametrize("flag", ["-p", "--sync", "--checksum"])
def test_times_are_kept_within_one_target(
    flag: str, ours: ClientTarget, tree: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    for number, path in enumerate([*tree.rglob("*"), tree], 1):
        os.utime(path, (0, number * 1000.5), follow_symlinks=False)

    def times(root: Path) -> list[float]:
        found = sorted([root, *root.rglob("*")])
        return [path.stat().st_mtime for path in found if not path.is_symlink()]

    words = ("cp", flag, f"{ours.url}:{tree}/.", f"{ours.url}:{copy}")
    copy.mkdir()
    assert stderr_text(run_client(*words)) == ""
    assert _picture(copy) == _picture(tree)
    assert times(copy) == times(tree)
    if flag == "-p":
        return
    # An equal copy is not written again; one that differs only by its content is a matter of -c.
    kept = (copy / "large").stat().st_ino
    changed = (copy / "program").stat()
    (copy / "program").write_bytes(b"#!/bin/ls\n")
    os.utime(copy / "program", (0, changed.st_mtime))
    (tree / "other").symlink_to("sub")
    (copy / "link").unlink()
    (copy / "link").symlink_to("elsewhere")
    (copy / "extra").touch()
    assert stderr_text(run_client(*words)) == ""
    assert (copy / "large").stat().st_ino == kept
    is_copied = (copy / "program").read_bytes() == (tree / "program").read_bytes()
    assert is_copied is (flag == "--checksum")
    assert (os.readlink(copy / "other"), os.readlink(copy / "link")) == ("sub", "program")
    assert (copy / "extra").exists()
