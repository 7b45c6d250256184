"""File operations under policies: denied paths are refused, granted ones work."""

from __future__ import annotations

import base64
import itertools
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support.client import Client, RpcFailure, b64, scaled, uri
from tests.support.sandbox import (
    BASE_STEPS,
    MARKER,
    PROTECTED,
    Json,
    Stage,
    entry,
    guarded,
    policy,
    run,
    special,
)

_READ_ONLY = (-32603, "Read-only file system (os error 30)")
_DENIED = (-32600, "Permission denied (os error 13)")
_ABSENT = (-32004, "No such file or directory (os error 2)")
_WALK = {"maxDepth": 9, "maxDirectories": 99, "maxEntries": 999}

# More blocks than a socket buffers at once, so that a worker gets many requests.
_BLOCKS = 40


def _params(stage: Stage, name: str, method: str, path: str) -> Json:
    """A request that would create or change a path."""
    place = uri(stage.base / path)
    requests: dict[str, Json] = {
        "fs/writeFile": {"path": place, "dataBase64": b64("new")},
        "fs/open": {"path": place, "handleId": "handle", "mode": "replace"},
        "fs/createDirectory": {"path": place},
        "fs/copy": {
            "sourcePath": uri(stage.ws / (".git/config" if path == "ws/a.txt" else "a.txt")),
            "destinationPath": place,
            "recursive": False,
        },
        "fs/remove": {"path": place, "recursive": True, "force": False},
    }
    return requests[method] | {"sandbox": stage.policy(name)}


def _answer(client: Client, method: str, params: Json) -> Any:
    """The result, or the text of the error."""
    try:
        return client.call(method, params)
    except RpcFailure as failure:
        return failure.code, failure.message


_MAKERS = ("fs/writeFile", "fs/open", "fs/createDirectory", "fs/copy")
_WAYS = [
    "ws/{name}",
    "ws/{name}/inside",
    "ws/./{name}",
    "ws//{name}/",
    "ws/sub/../{name}",
    "ws/alias/{name}",
    "ws/alias/{name}/inside",
    "ws/sub/up/{name}",
    "ws/dangling{name}",
    "ws/absolute{name}",
    "ws/chain{name}",
    "ws/deeper{name}",
    "way/{name}",
]


@pytest.mark.parametrize("policy_name", ["WW", "MINW"])
@pytest.mark.parametrize("method", _MAKERS)
def test_no_way_leads_to_a_protected_name(
    stage: Stage, client: Client, method: str, policy_name: str
) -> None:
    steps: list[Json] = [
        {"symlink": [".", "ws/alias"]},
        {"symlink": ["..", "ws/sub/up"]},
        {"symlink": ["ws", "way"]},
    ]
    for name in PROTECTED:
        steps += [
            {"symlink": [name, f"ws/dangling{name}"]},
            {"symlink": [str(stage.ws / name), f"ws/absolute{name}"]},
            {"symlink": [f"dangling{name}", f"ws/chain{name}"]},
            {"symlink": [f"{name}/inside", f"ws/deeper{name}"]},
        ]
    stage.scratch.apply(steps)
    before = guarded(stage.base)
    answers = {}
    for way, name in itertools.product(_WAYS, PROTECTED):
        path = way.format(name=name)
        answers[path] = _answer(client, method, _params(stage, policy_name, method, path))
        assert guarded(stage.base) == before, path
    assert [path for path, answer in answers.items() if not isinstance(answer, tuple)] == []


@pytest.mark.parametrize("method", [*_MAKERS, "fs/remove"])
@pytest.mark.parametrize(
    "case",
    [
        ("RO", "ws/a.txt", _READ_ONLY),
        ("WW", "outside/o.txt", _READ_ONLY),
        ("WW", "ws/.git/config", _READ_ONLY),
        ("WW", "ws/.git/new", _READ_ONLY),
        ("RODEEP", "ws/sub/deep/d.txt", _READ_ONLY),
        ("DENYSUB", "ws/sub/s.txt", _DENIED),
        ("REREAD", "ws/sub/deep/d.txt", _DENIED),
        ("MINR", "ws/a.txt", _READ_ONLY),
        ("FILEROOT", "ws/sub/s.txt", _READ_ONLY),
    ],
    ids=lambda case: f"{case[0]}-{case[1]}",
)
def test_changes_are_refused(
    stage: Stage, client: Client, method: str, case: tuple[str, str, tuple[int, str]]
) -> None:
    name, path, error = case
    more = ("a.txt", "sub")
    before = guarded(stage.base, *more)
    answer = _answer(client, method, _params(stage, name, method, path))
    assert guarded(stage.base, *more) == before
    exists = method == "fs/createDirectory" and (stage.base / path).exists()
    missing = method == "fs/remove" and not (stage.base / path).exists()
    if exists and error == _READ_ONLY:
        error = (-32603, "File exists (os error 17)")
    assert answer == (_ABSENT if missing else error)


@pytest.mark.quick
@pytest.mark.parametrize("name", ["WW", "MINW", "RODEEP", "DENYFILE"])
def test_changes_that_are_allowed_work(stage: Stage, client: Client, name: str) -> None:
    sandbox = stage.policy(name)
    old, new = uri(stage.ws / "sub/s.txt"), uri(stage.ws / "made/deep/n.txt")
    directory = {"path": uri(stage.ws / "made/deep"), "recursive": True, "sandbox": sandbox}
    assert client.call("fs/createDirectory", directory) == {}
    write = {"path": new, "dataBase64": b64("written"), "sandbox": sandbox}
    assert client.call("fs/writeFile", write) == {}
    assert client.call("fs/readFile", {"path": new, "sandbox": sandbox}) == {
        "dataBase64": b64("written")
    }
    copy = {"sourcePath": new, "destinationPath": old, "recursive": False, "sandbox": sandbox}
    assert client.call("fs/copy", copy) == {}
    assert (stage.ws / "sub/s.txt").read_text() == "written"
    assert (stage.ws / "made/deep/n.txt").stat().st_uid == stage.scratch.owner
    tree = {"path": uri(stage.ws / "made"), "recursive": True, "sandbox": sandbox}
    assert client.call("fs/remove", tree) == {}
    assert not (stage.ws / "made").exists()


@pytest.mark.parametrize("name", ["WW", "MINW", "FILEROOT"])
def test_a_file_is_replaced_block_by_block(stage: Stage, client: Client, name: str) -> None:
    inode = (stage.ws / "a.txt").stat().st_ino
    path = {"path": uri(stage.ws / "a.txt"), "sandbox": stage.policy(name)}
    client.call("fs/open", path | {"handleId": "w", "mode": "replace"})
    block = os.urandom(4096)
    for number in range(_BLOCKS):
        params = {"handleId": "w", "offset": number * 4096, "chunk": b64(block)}
        assert client.call("fs/writeBlock", params) == {}
    client.call("fs/close", {"handleId": "w"})
    assert (stage.ws / "a.txt").read_bytes() == block * _BLOCKS
    assert (stage.ws / "a.txt").stat().st_ino == inode
    client.call("fs/open", path | {"handleId": "r"})
    params = {"handleId": "r", "offset": 4096 * (_BLOCKS - 1), "len": 8192}
    assert client.call("fs/readBlock", params) == {"chunk": b64(block), "eof": True}
    client.call("fs/close", {"handleId": "r"})


def test_a_handle_reads_what_it_was_opened_for(stage: Stage, client: Client) -> None:
    for name in ("WW", "RO", "MINR", "DENYSUB"):
        path = {"path": uri(stage.ws / "a.txt"), "sandbox": stage.policy(name)}
        client.call("fs/open", path | {"handleId": name})
        params = {"handleId": name, "offset": 1, "len": 3}
        assert client.call("fs/readBlock", params)["chunk"] == b64("ell")
        write = {"handleId": name, "offset": 0, "chunk": b64("x")}
        assert client.failure("fs/writeBlock", write)
        client.call("fs/close", {"handleId": name})
    assert (stage.ws / "a.txt").read_text() == "hello"


_READERS = ("fs/readFile", "fs/getMetadata", "fs/canonicalize", "fs/open", "fs/readDirectory")


@pytest.mark.parametrize(
    ("name", "path", "error"),
    [
        ("DENYFILE", "ws/a.txt", _DENIED),
        ("DENYFILE", "ws/to_a", _DENIED),
        ("DENYFILE", "ws/alias/a.txt", _DENIED),
        ("DENYSUB", "ws/sub/s.txt", _DENIED),
        ("DENYSUB", "ws/to_s", _DENIED),
        ("DENYSUB", "ws/alias/sub/s.txt", _DENIED),
        ("DENYSUB", "ws/sub/none", _DENIED),
        ("DENYSUB", "way/sub/s.txt", _DENIED),
        ("REREAD", "ws/sub/deep/d.txt", _DENIED),
        ("REOPEN", "ws/sub/s.txt", _ABSENT),
        ("GLOB", "ws/sub/deep/z.key", _DENIED),
        ("GLOB", "ws/to_key", _DENIED),
        ("GLOB", "ws/alias/sub/deep/z.key", _DENIED),
        ("MINR", "outside/o.txt", _ABSENT),
        ("MINR", "ws/out", _ABSENT),
        ("MINR", "ws/../outside/o.txt", _ABSENT),
    ],
)
def test_reading_is_refused(
    stage: Stage, client: Client, name: str, path: str, error: tuple[int, str]
) -> None:
    stage.scratch.apply(
        [
            {"write": ["ws/sub/deep/z.key", "secret"]},
            {"symlink": [".", "ws/alias"]},
            {"symlink": ["ws", "way"]},
            {"symlink": ["a.txt", "ws/to_a"]},
            {"symlink": ["sub/s.txt", "ws/to_s"]},
            {"symlink": [str(stage.ws / "sub/deep/z.key"), "ws/to_key"]},
            {"symlink": [str(stage.base / "outside/o.txt"), "ws/out"]},
        ]
    )
    sandbox = stage.policy(name)
    content = {"path": uri(stage.base / path), "sandbox": sandbox}
    assert _answer(client, "fs/readFile", content) == error
    assert _answer(client, "fs/open", content | {"handleId": "h"}) == error
    # The name of a denied file may be visible, but nothing below a denied folder.
    if error == _ABSENT or "sub/s" in path or "none" in path:
        assert _answer(client, "fs/getMetadata", content) == error
        assert _answer(client, "fs/canonicalize", content) == error
    if name == "MINR" or (stage.base / path).is_symlink():
        return  # nothing may be written; a symbolic link is copied as a link
    copy = {"sourcePath": content["path"], "destinationPath": uri(stage.ws / "copied")}
    assert _answer(client, "fs/copy", copy | {"recursive": False, "sandbox": sandbox}) == error
    assert not (stage.ws / "copied").exists() or (stage.ws / "copied").read_bytes() == b""


def test_a_walk_shows_what_may_be_seen(stage: Stage, client: Client) -> None:
    stage.scratch.apply([{"symlink": [str(stage.base / "outside"), "ws/out"]}])

    def walk(name: str, path: str, *, follow: bool) -> tuple[set[str], list[str]]:
        options = _WALK | {"followDirectorySymlinks": follow}
        params = {"path": uri(stage.base / path), "options": options}
        result = client.call("fs/walk", params | {"sandbox": stage.policy(name)})
        start = len(uri(stage.base)) + 1
        return (
            {item["path"][start:] for item in result["entries"]},
            [item["path"][start:] for item in result["errors"]],
        )

    everything, _ = walk("WW", "ws", follow=False)
    assert {"ws/sub/s.txt", "ws/sub/deep/d.txt", "ws/.git/config"} <= everything
    seen, errors = walk("DENYSUB", "ws", follow=False)
    placeholders = {f"ws/{name}" for name in PROTECTED}
    assert seen - placeholders == {path for path in everything if not path.startswith("ws/sub/")}
    assert errors == ["ws/sub"]
    followed, _ = walk("WW", "ws", follow=True)
    assert any(path.endswith("o.txt") for path in followed)
    hidden, _ = walk("MINR", "ws", follow=True)
    assert not any(path.endswith("o.txt") for path in hidden)
    assert walk("MINR", "", follow=False)[0] == {"ws"} | everything


def test_a_tree_with_carve_outs_is_not_removed_beyond_them(stage: Stage, client: Client) -> None:
    for name, kept in (("WW", [".git"]), ("DENYSUB", [".git", "sub"]), ("RODEEP", ["sub/deep"])):
        stage.scratch.reset(BASE_STEPS)
        before = guarded(stage.base, *kept)
        params = {"path": uri(stage.ws), "recursive": True, "force": True}
        code, _ = client.failure("fs/remove", params | {"sandbox": stage.policy(name)})
        assert code in (-32603, -32600)
        assert guarded(stage.base, *kept) == before, name


def test_a_copied_tree_brings_no_protected_name(stage: Stage, client: Client) -> None:
    steps: list[Json] = [{"mkdir": "ws/source"}, {"write": ["ws/source/plain", "p"]}]
    steps += [{"write": [f"ws/source/{name}/x", "x"]} for name in PROTECTED]
    steps += [{"write": ["ws/source/.git/config", "forged"]}]
    stage.scratch.apply(steps)
    before = guarded(stage.base)
    for target in (stage.ws, stage.ws / "sub/.."):
        params = {"sourcePath": uri(stage.ws / "source"), "destinationPath": uri(target)}
        _answer(client, "fs/copy", params | {"recursive": True, "sandbox": stage.policy("WW")})
        assert guarded(stage.base) == before
    deeper = {"sourcePath": uri(stage.ws / "source"), "destinationPath": uri(stage.ws / "copy")}
    client.call("fs/copy", deeper | {"recursive": True, "sandbox": stage.policy("WW")})
    assert (stage.ws / "copy/.codex/x").read_text() == "x"


def test_a_copied_tree_has_nothing_that_is_denied(stage: Stage, client: Client) -> None:
    stage.scratch.apply([{"write": ["ws/sub/deep/z.key", "secret"]}])
    for name, hidden in (("DENYSUB", "sub/s.txt"), ("DENYFILE", "a.txt"), ("GLOB", "z.key")):
        target = stage.base / "ws/copy"
        params = {"sourcePath": uri(stage.ws), "destinationPath": uri(target), "recursive": True}
        _answer(client, "fs/copy", params | {"sandbox": stage.policy(name)})
        contents = {path.read_bytes() for path in target.rglob("*") if path.is_file()}
        secret = {"sub/s.txt": b"sub", "a.txt": b"hello", "z.key": b"secret"}[hidden]
        assert secret not in contents
        stage.scratch.reset([*BASE_STEPS, {"write": ["ws/sub/deep/z.key", "secret"]}])


_PROCESS_FILES = (
    "/proc/self/environ",
    "/proc/thread-self/environ",
    "/proc/{pid}/environ",
    "/proc/{pid}/task/{pid}/environ",
    "/proc/self/root/proc/self/environ",
    "/proc/self/cwd/../proc/self/environ",
    "{ws}/environ",
    "{ws}/process/environ",
    "{ws}/folder/../environ",
)


@pytest.mark.parametrize("name", ["RO", "WW", "MINR", "DENYSUB"])
def test_no_read_gives_what_the_server_has_in_proc(stage: Stage, client: Client, name: str) -> None:
    stage.scratch.apply(
        [
            {"symlink": ["/proc/self/environ", "ws/environ"]},
            {"symlink": ["/proc/self", "ws/process"]},
            {"symlink": ["sub/deep/..", "ws/folder"]},
        ]
    )
    for pattern in _PROCESS_FILES:
        path = pattern.format(pid=stage.server.process.pid, ws=stage.ws)
        params = {"path": uri(path), "sandbox": stage.policy(name)}
        for follow in ({}, {"followSymlinks": False}):
            answer = _answer(client, "fs/readFile", params | follow)
            if isinstance(answer, dict):
                assert MARKER.encode() not in base64.b64decode(answer["dataBase64"]), path
        if isinstance(_answer(client, "fs/open", params | {"handleId": path}), dict):
            block = {"handleId": path, "offset": 0, "len": 65536}
            chunk = _answer(client, "fs/readBlock", block)
            if isinstance(chunk, dict):
                assert MARKER.encode() not in base64.b64decode(chunk["chunk"]), path
    where = {"path": uri("/proc/self"), "sandbox": stage.policy(name)}
    assert str(stage.server.process.pid) not in str(_answer(client, "fs/canonicalize", where))
    listed = _answer(client, "fs/readDirectory", where | {"path": uri("/proc")})
    if isinstance(listed, dict):
        names = {item["fileName"] for item in listed["entries"]}
        assert str(stage.server.process.pid) not in names


def test_a_directory_that_matches_a_glob_is_hidden_with_its_contents(
    stage: Stage, client: Client
) -> None:
    stage.scratch.apply(
        [
            {"write": ["ws/sub/d.key/deep/f.txt", "secret"]},
            {"symlink": ["sub/d.key/deep", "ws/way"]},
        ]
    )
    sandbox = {"sandbox": stage.policy("GLOB")}
    hidden = stage.ws / "sub/d.key"
    for path in (hidden / "deep/f.txt", stage.ws / "way/f.txt"):
        for method in ("fs/readFile", "fs/getMetadata", "fs/remove"):
            assert _answer(client, method, {"path": uri(path)} | sandbox) == _DENIED
        written = {"path": uri(path), "dataBase64": b64("x")}
        assert _answer(client, "fs/writeFile", written | sandbox) == _DENIED
    for path in (hidden, hidden / "deep", stage.ws / "way"):
        for method in ("fs/readDirectory", "fs/getMetadata"):
            assert _answer(client, method, {"path": uri(path)} | sandbox) == _DENIED
        new = {"path": uri(path / "new"), "recursive": False}
        assert _answer(client, "fs/createDirectory", new | sandbox) == _DENIED
    options = _WALK | {"followDirectorySymlinks": True, "pruneHiddenDirectories": False}
    walked = client.call("fs/walk", {"path": uri(stage.ws), "options": options} | sandbox)
    assert "f.txt" not in str(walked)
    found = client.call("fs/grep", {"path": uri(stage.ws), "pattern": "secret"} | sandbox)
    assert found["matches"] == []
    found = client.call("fs/glob", {"path": uri(stage.ws), "pattern": "**/f.txt"} | sandbox)
    assert found["paths"] == []
    for source, target in ((hidden, stage.ws / "open"), (stage.ws / "sub", stage.ws / "n.key")):
        moved = {"sourcePath": uri(source), "destinationPath": uri(target)}
        assert isinstance(_answer(client, "fs/rename", moved | sandbox), tuple)
        _answer(client, "fs/copy", moved | sandbox | {"recursive": True})
        assert not (target / "deep").exists()
    client.call("fs/createDirectory", {"path": uri(stage.ws / "plain")} | sandbox)
    (stage.ws / "plain").rename(stage.ws / "late.key")  # by a program of the host
    listed = {"path": uri(stage.ws / "late.key")} | sandbox
    assert _answer(client, "fs/readDirectory", listed) == _DENIED
    assert (hidden / "deep/f.txt").read_text() == "secret"


_WORKER_FILES = ("mem", "environ", "fdinfo/3", "task/1/mem", "root/proc/self/mem")


@pytest.mark.parametrize("name", ["MINW", "GLOB", "ROOTW"])
def test_no_request_reaches_the_process_of_its_worker(
    stage: Stage, client: Client, name: str
) -> None:
    """A client could read requests of others in its memory, and write code into it."""
    sandbox = stage.policy(name)
    stage.scratch.apply([{"symlink": ["/proc/self", "ws/process"]}])
    for directory in ("/proc/self", "/proc/1", f"{stage.ws}/process"):
        for file in _WORKER_FILES:
            params = {"path": uri(f"{directory}/{file}"), "sandbox": sandbox}
            assert isinstance(_answer(client, "fs/readFile", params), tuple), params
            assert isinstance(_answer(client, "fs/getMetadata", params), tuple), params
            for mode in ("read", "replace"):
                opened = _answer(client, "fs/open", params | {"handleId": "h", "mode": mode})
                assert isinstance(opened, tuple), params
        for stream in ("fd/0", "fd/1", "fd/2"):
            params = {"path": uri(f"{directory}/{stream}"), "sandbox": sandbox}
            assert isinstance(_answer(client, "fs/readFile", params), tuple), params
        params = {"path": uri(directory), "sandbox": sandbox}
        assert isinstance(_answer(client, "fs/readDirectory", params), tuple), params
    about_all = {"path": uri("/proc/version"), "sandbox": sandbox}
    assert isinstance(_answer(client, "fs/readFile", about_all), dict)


def test_nothing_blocks_on_what_is_not_a_file(stage: Stage, client: Client) -> None:
    stage.scratch.apply([{"fifo": "ws/fifo"}])
    stage.scratch.listen("ws/socket", socket.SOCK_STREAM)
    stage.scratch.give_away()

    def answer(method: str, params: Json) -> Any:
        began = time.monotonic()
        result = _answer(client, method, params)
        assert time.monotonic() - began < scaled(5.0), (method, params)
        return result

    for name in ("WW", "MINW", "RO"):
        for path in (stage.ws / "fifo", stage.ws / "socket", "/dev/tty", "/dev/ptmx"):
            params = {"path": uri(path), "sandbox": stage.policy(name)}
            data = {"dataBase64": b64("x")}
            copy = {"sourcePath": uri(path), "destinationPath": uri(stage.ws / "c")}
            back = {"sourcePath": uri(stage.ws / "a.txt"), "destinationPath": uri(path)}
            answer("fs/writeFile", params | data)
            assert isinstance(answer("fs/readFile", params), tuple)
            for copied in (copy, back):
                sandbox = {"recursive": False, "sandbox": params["sandbox"]}
                answer("fs/copy", copied | sandbox)
            for mode in ("read", "replace"):
                answer("fs/open", params | {"mode": mode, "handleId": f"{path}{mode}"})
                answer("fs/close", {"handleId": f"{path}{mode}"})


def test_a_file_that_is_a_root_is_all_that_can_be_written(stage: Stage, client: Client) -> None:
    sandbox = stage.policy("FILEROOT")
    write = {"path": uri(stage.ws / "a.txt"), "dataBase64": b64("new"), "sandbox": sandbox}
    inode = (stage.ws / "a.txt").stat().st_ino
    assert client.call("fs/writeFile", write) == {}
    assert ((stage.ws / "a.txt").read_text(), (stage.ws / "a.txt").stat().st_ino) == ("new", inode)
    script = "echo more >> a.txt; mv a.txt b.txt; rm a.txt; echo x > n; echo x > sub/s.txt; exit 0"
    stage.shell(client, "FILEROOT", script)
    assert (stage.ws / "a.txt").read_text() == "newmore\n"
    assert sorted(path.name for path in stage.ws.iterdir()) == [".git", "a.txt", "sub"]
    assert (stage.ws / "sub/s.txt").read_text() == "sub"


def test_a_reopened_folder_in_a_denied_one_works(stage: Stage, client: Client) -> None:
    sandbox = stage.policy("REOPEN")
    write = {"path": uri(stage.ws / "sub/deep/n"), "dataBase64": b64("n"), "sandbox": sandbox}
    assert client.call("fs/writeFile", write) == {}
    listing = {"path": uri(stage.ws / "sub"), "sandbox": sandbox}
    assert _answer(client, "fs/readDirectory", listing) == _DENIED
    script = "cat sub/deep/d.txt; ls sub; cat sub/s.txt; echo x > sub/new; mv sub away; exit 0"
    outcome = stage.shell(client, "REOPEN", script)
    assert outcome.stdout == "deep"
    assert sorted(os.listdir(stage.ws / "sub")) == ["deep", "s.txt"]
    assert (stage.ws / "sub/deep/n").read_text() == "n"


def test_a_grant_on_a_symbolic_link_is_one_on_its_target(stage: Stage, client: Client) -> None:
    stage.scratch.apply([{"mkdir": "real"}, {"symlink": ["real", "link"]}])
    sandbox = policy(special("root", "read"), entry(stage.base / "link", "write"))
    for name, folder in (("one", "link"), ("two", "real")):
        path = uri(stage.base / folder / name)
        write = {"path": path, "dataBase64": b64(name), "sandbox": sandbox}
        assert client.call("fs/writeFile", write) == {}
        assert (stage.base / "real" / name).read_text() == name
    for name in PROTECTED:
        made = {"path": uri(stage.base / "link" / name), "sandbox": sandbox}
        assert isinstance(_answer(client, "fs/createDirectory", made), tuple)
        assert not (stage.base / "real" / name).exists()


def test_a_policy_beside_a_native_path_confines(stage: Stage, client: Client) -> None:
    """As in the server of 0.120, whose clients had native paths."""
    path = str(stage.ws / "a.txt")
    policy = {"sandboxPolicy": {"type": "read-only"}}
    assert client.call("fs/readFile", {"path": path} | policy)["dataBase64"] == b64("hello")
    write = {"path": path, "dataBase64": b64("new")}
    assert isinstance(_answer(client, "fs/writeFile", write | policy), tuple)
    assert isinstance(_answer(client, "fs/remove", {"path": path} | policy), tuple)
    copy = {"sourcePath": path, "destinationPath": f"{path}.copy", "recursive": False}
    assert isinstance(_answer(client, "fs/copy", copy | policy), tuple)
    assert sorted(each.name for each in stage.ws.glob("a.txt*")) == ["a.txt"]
    assert (stage.ws / "a.txt").read_text() == "hello"


@pytest.mark.parametrize("method", ["fs/writeFile", "fs/readFile", "process/start"])
def test_a_policy_in_the_place_of_long_ago_is_not_ignored(
    stage: Stage, client: Client, method: str
) -> None:
    params: Json = {"path": uri(stage.ws / "a.txt"), "dataBase64": b64("new")}
    if method == "process/start":
        script = ["/bin/sh", "-c", "echo x > a.txt"]
        params = {"processId": "old", "argv": script, "cwd": uri(stage.ws), "env": {}, "tty": False}
    assert client.failure(method, params | {"sandboxPolicy": {"type": "read-only"}})[0] == -32602
    assert (stage.ws / "a.txt").read_text() == "hello"


def test_landlock_of_the_old_kind_is_refused(stage: Stage, client: Client) -> None:
    sandbox = (stage.policy("WW") or {}) | {"useLegacyLandlock": True}
    write = {"path": uri(stage.ws / "a.txt"), "dataBase64": b64("new"), "sandbox": sandbox}
    assert client.failure("fs/writeFile", write)[0] == -32603
    assert (stage.ws / "a.txt").read_text() == "hello"


def test_everything_but_a_part_may_be_written(stage: Stage, client: Client) -> None:
    """The root itself is writable; narrower entries and kernel settings are not."""
    sandbox = policy(
        special("root", "write"),
        entry(stage.base / "outside", "read"),
        entry(stage.ws / "sub", "deny"),
    )

    def write(path: Path) -> Json:
        params = {"path": uri(path), "dataBase64": b64("new"), "sandbox": sandbox}
        return client.answer(client.request("fs/writeFile", params))

    assert "result" in write(stage.ws / "new")
    assert "error" in write(stage.base / "outside/o.txt")
    assert "error" in write(stage.ws / "sub/s.txt")
    script = (
        "echo made > made && cat sub/s.txt; echo x > ../outside/o.txt; "
        "( : <> /sys/kernel/uevent_seqnum ) && echo OPENED; ( : <> /proc/sys/vm/swappiness ) && "
        "echo OPENED; exit 0"
    )
    argv = ["/bin/sh", "-c", script]
    outcome = run(client, sandbox, argv, cwd=uri(stage.ws))
    assert outcome.exit_code == 0, outcome
    assert "OPENED" not in outcome.stdout
    assert "sub" not in outcome.stdout
    assert (stage.ws / "made").read_text() == "made\n"
    assert (stage.base / "outside/o.txt").read_text() == "outside"
