"""mkdir, mv, tail, grep, watch, put, get, ls --json, and the newer forms of cp."""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
from pathlib import Path

import pytest
from tests.support.cli import next_line, run_client, start_client, stderr_text
from tests.support.client_targets import ClientTarget


@pytest.fixture
def box(ours: ClientTarget, tmp_path: Path) -> str:
    """The prefix of paths in a folder of the target."""
    (tmp_path / "far").mkdir()
    return f"{ours.url}:{tmp_path}/far"


def _run(*words: str, code: int = 0, **options: object) -> str:
    ended = run_client(*words, **options)  # type: ignore[arg-type]
    assert ended.returncode == code, stderr_text(ended)
    return ended.stdout.decode() if not code else stderr_text(ended)


def test_directories_and_names(box: str, tmp_path: Path) -> None:
    far = tmp_path / "far"
    _run("mkdir", f"{box}/a", f"{box}/b")
    assert "File exists" in _run("mkdir", f"{box}/a", code=1)
    assert "No such file" in _run("mkdir", f"{box}/c/d", code=1)
    _run("mkdir", "-p", f"{box}/c/d", f"{box}/a")
    _run("mv", f"{box}/a", f"{box}/b", f"{box}/c/")
    assert sorted(os.listdir(far / "c")) == ["a", "b", "d"]
    (far / "f").write_text("f")
    (far / "g").write_text("g")
    text = f"exec-server: {box}/f: cannot move it to {far}/g: File exists\n"
    assert _run("mv", "-n", f"{box}/f", f"{box}/g", code=1) == text
    _run("mv", f"{box}/f", f"{box}/g")
    assert (far / "g").read_text() == "f"
    assert "not a directory" in _run("mv", f"{box}/g", f"{box}/new/", code=1)
    assert "no destination" in _run("mv", f"{box}/g", code=2)
    assert "two targets" in _run("mv", f"{box}/g", "other:x", code=2)
    listed = json.loads(_run("ls", "--json", f"{box}/c", f"{box}/g"))
    assert [(each["name"], each["kind"], each["size"]) for each in listed if each["size"] == 1] == [
        ("g", "file", 1)
    ]
    assert {each["name"] for each in listed} == {"a", "b", "d", "g"}


def test_the_end_of_a_file_is_followed(box: str, tmp_path: Path) -> None:
    log = tmp_path / "far/log"
    log.write_text("".join(f"{number}\n" for number in range(20)))
    assert _run("tail", "-n", "2", f"{box}/log") == "18\n19\n"
    (tmp_path / "far/b").write_text("b\n")
    text = _run("tail", "-n", "1", f"{box}/log", f"{box}/b")
    assert text == f"==> {tmp_path}/far/log <==\n19\n\n==> {tmp_path}/far/b <==\nb\n"
    assert "must not be negative" in _run("tail", "-n", "-1", f"{box}/log", code=2)
    assert "one file" in _run("tail", "-f", f"{box}/log", f"{box}/log", code=2)
    with start_client("tail", "-n", "1", "-f", f"{box}/log") as following:
        assert next_line(following) == b"19\n"
        with log.open("a") as file:
            file.write("more\n")
        assert next_line(following) == b"more\n"
        for text in ("same size\n", "size same\n"):
            (tmp_path / "far/new").write_text(text)
            (tmp_path / "far/new").rename(log)
            assert next_line(following) == text.encode()
        log.write_text("overwritten\n")
        assert next_line(following) == b"overwritten\n"
        following.send_signal(signal.SIGINT)
        assert following.wait() == 130
    assert "No such file" in _run("tail", f"{box}/later", code=1)
    with start_client("tail", "-f", f"{box}/later") as following:
        assert following.stderr is not None
        assert b"waiting for it" in following.stderr.readline()
        (tmp_path / "far/later").write_text("first\n")
        assert next_line(following) == b"first\n"
        following.send_signal(signal.SIGINT)
        assert following.wait() == 130


def test_lines_are_found(box: str, tmp_path: Path) -> None:
    (tmp_path / "far/a.py").write_text("one\ntwo\n")
    (tmp_path / "far/b.txt").write_text("two\n")
    far = f"{tmp_path}/far"
    assert _run("grep", "t.o", box) == f"{far}/a.py:2:two\n{far}/b.txt:1:two\n"
    text = _run("grep", "-iF", "TWO", "-B", "1", f"{box}/a.py", f"{box}/b.txt")
    assert text == f"{far}/a.py-1-one\n{far}/a.py:2:two\n--\n{far}/b.txt:1:two\n"
    matches = [json.loads(line) for line in _run("grep", "--json", "^o", box).splitlines()]
    assert [(each["path"], each["line"]) for each in matches] == [("a.py", 1)]
    assert _run("grep", "none", box, code=1) == ""
    (tmp_path / "far/c").write_text("two\ntwofold\n")
    assert _run("grep", "-lw", "-g", "*.{py,txt}", "two", box) == f"{far}/a.py\n{far}/b.txt\n"
    assert _run("grep", "-c", "two", box) == f"{far}/a.py:1\n{far}/b.txt:1\n{far}/c:2\n"
    assert _run("grep", "-cvw", "two", f"{box}/c") == f"{far}/c:1\n"
    assert _run("grep", "-v", "-A1", "o", box, code=1) == ""
    assert _run("grep", "-v", "e", f"{box}/c") == f"{far}/c:1:two\n{far}/c:2:twofold\n"
    [count] = map(json.loads, _run("grep", "-l", "--json", "fold", box).splitlines())
    assert (count["path"], count["count"]) == ("c", 1)
    assert _run("grep", "-l", "none", box, code=1) == ""
    assert "regular expression" in _run("grep", "-c", "(", box, code=2)
    assert "further matches" in stderr_text(run_client("grep", "-lm", "1", "two", box))
    assert "regular expression" in _run("grep", "(", box, code=2)
    assert "further matches" in stderr_text(run_client("grep", "-m", "1", "two", box))


def test_changes_are_printed(box: str, tmp_path: Path) -> None:
    with start_client("watch", "--json", f"{box}") as watching:
        assert watching.stdout is not None
        # The first change that is seen tells that the watch has begun.
        for number in itertools.count():
            (tmp_path / f"far/{number}").touch()
            if select.select([watching.stdout], [], [], 0.05)[0]:
                break
        assert json.loads(next_line(watching))["kind"] == "created"
        watching.send_signal(signal.SIGINT)
        assert watching.wait() == 130


def test_short_forms_and_patterns(box: str, tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    for name in ("a.gz", "b.gz", "c.txt"):
        (here / name).write_text(name)
    _run("put", *map(str, sorted(here.iterdir())), box)
    assert sorted(os.listdir(tmp_path / "far")) == ["a.gz", "b.gz", "c.txt"]
    there = tmp_path / "there"
    there.mkdir()
    _run("get", f"{box}/*.gz", cwd=there)
    assert sorted(os.listdir(there)) == ["a.gz", "b.gz"]
    _run("get", "-r", f"{box}/c.txt", str(there / "d"))
    assert (there / "d").read_text() == "c.txt"
    assert "no path matches" in _run("cp", f"{box}/*.zip", str(there), code=1)
    (tmp_path / "far/.hidden").touch()
    _run("rm", f"{box}/*")
    assert os.listdir(tmp_path / "far") == [".hidden"]
    assert "`get` copies" in _run("put", f"{box}/a.gz", str(there), code=2)
    assert "`put` copies" in _run("get", str(here), box, code=2)
    text = _run("put", str(here), f"{box}/no/such/place", code=1)
    assert "is not a directory; create it with exec-server mkdir -p" in text
    text = _run("get", f"{box}/a.gz", str(tmp_path / "no/such/place"), code=1)
    assert "create it with mkdir -p" in text


def test_standard_streams(box: str, tmp_path: Path) -> None:
    data = os.urandom(300_000)
    _run("cp", "-", f"{box}/stream", input=data)
    assert (tmp_path / "far/stream").read_bytes() == data
    ended = run_client("cp", f"{box}/stream", "-")
    assert ended.stdout == data
    assert "No such file" in _run("cp", f"{box}/missing", "-", code=1)
    assert "one copy" in _run("cp", "-", f"{box}/a", f"{box}/b", code=2)
