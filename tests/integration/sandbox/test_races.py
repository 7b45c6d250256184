"""The tree changes while requests run under a policy: guarded files never change.

A second thread, or a process where the GIL would slow it down, swaps links, folders and names
while requests run. Each request may succeed or fail; the test checks the files of the host
afterwards.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.barriers import User, in_private_mounts, mount, unmount
from tests.support.client import Client, b64, uri
from tests.support.sandbox import MARKER, PROTECTED, USERS, Json, Stage, guarded, start_stage

# Enough for thousands of changes by the other side, and about a second per test.
_REQUESTS = 300
# Requests that find another tree each time, so that each needs a new worker.
_REBUILDS = 40
# Seconds between two new trees: shorter than building a worker, and few folders.
_MOMENT = 0.001
_MOUNTS = 20


@contextlib.contextmanager
def _repeating(action: Callable[[], None], *, pause: float = 0.0) -> Iterator[None]:
    """Repeat an action in a thread; its exception fails the test."""
    over = threading.Event()
    trouble: list[BaseException] = []

    def work() -> None:
        try:
            while not over.wait(pause):
                action()
        except BaseException as error:  # reported by the test's own thread
            trouble.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert not trouble, trouble


def _point(link: Path, *targets: str) -> Callable[[], None]:
    """Point a symbolic link at one target after the other; it is never missing."""
    spare = link.with_name(f"{link.name}.spare")

    def action() -> None:
        for target in targets:
            spare.symlink_to(target)
            spare.replace(link)

    action()
    return action


_EXCHANGER = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
one, other = (os.fsencode(name) for name in sys.argv[1:3])
while True:
    libc.renameat2(-100, one, -100, other, 2)
"""


@contextlib.contextmanager
def _exchanging(one: Path, other: Path) -> Iterator[None]:
    """A process that exchanges two names with each other as fast as it can."""
    argv = [sys.executable, "-I", "-S", "-c", _EXCHANGER, str(one), str(other)]
    with subprocess.Popen(argv) as process:
        try:
            yield
        finally:
            process.send_signal(signal.SIGKILL)


def _requests(stage: Stage, path: Path, name: str = "WW") -> list[tuple[str, Json]]:
    """One request of every kind that creates an entry at a path."""
    place, sandbox = uri(path), {"sandbox": stage.policy(name)}
    copy = {"sourcePath": uri(stage.ws / "a.txt"), "destinationPath": place, "recursive": False}
    return [
        ("fs/writeFile", {"path": place, "dataBase64": b64("new")} | sandbox),
        ("fs/createDirectory", {"path": place, "recursive": True} | sandbox),
        ("fs/createDirectory", {"path": place, "recursive": False} | sandbox),
        ("fs/copy", copy | sandbox),
        ("fs/open", {"path": place, "handleId": "race", "mode": "replace"} | sandbox),
        ("fs/remove", {"path": place, "recursive": True, "force": True} | sandbox),
    ]


def _race(
    stage: Stage, client: Client, requests: list[tuple[str, Json]], *names: str
) -> dict[str, int]:
    """Send requests in rotation; returns the number of successes of each."""
    before = guarded(stage.base, *names)
    successes: dict[str, int] = {}
    for number in range(_REQUESTS):
        method, params = requests[number % len(requests)]
        answer = client.answer(client.request(method, params))
        if "result" in answer:
            successes[method] = successes.get(method, 0) + 1
            if method == "fs/open":
                client.call("fs/close", {"handleId": params["handleId"]})
        assert guarded(stage.base, *names) == before, (method, answer)
    return successes


def test_a_protected_name_behind_a_link_that_turns(stage: Stage, client: Client) -> None:
    """`flip` alternates between the workspace, where .codex is protected, and another folder."""
    action = _point(stage.ws / "flip", ".", "sub")
    with _repeating(action):
        for name in (".codex", ".codex/inside"):
            successes = _race(stage, client, _requests(stage, stage.ws / "flip" / name))
            assert successes.get("fs/writeFile" if name == ".codex" else "fs/remove"), "no race"


def test_a_dangling_link_that_turns_to_a_protected_name(stage: Stage, client: Client) -> None:
    action = _point(stage.ws / "flip", ".codex", "sub/plain")
    with _repeating(action):
        successes = _race(stage, client, _requests(stage, stage.ws / "flip")[:5])
    assert successes.get("fs/writeFile"), "no race"


def test_a_dangling_link_that_turns_to_the_outside(stage: Stage, client: Client) -> None:
    action = _point(stage.ws / "flip", str(stage.base / "outside/new"), "sub/plain")
    with _repeating(action):
        successes = _race(stage, client, _requests(stage, stage.ws / "flip")[:5])
    assert successes.get("fs/writeFile"), "no race"


@pytest.mark.parametrize("target", ["outside/dir", "ws/.git"])
def test_a_folder_link_that_turns(stage: Stage, client: Client, target: str) -> None:
    action = _point(stage.ws / "flip", str(stage.base / target), "sub")
    with _repeating(action):
        for name in ("x.txt", "config", "new/deeper"):
            _race(stage, client, _requests(stage, stage.ws / "flip" / name))


@pytest.mark.parametrize("name", ["RODEEP", "DENYSUB"])
def test_a_link_that_turns_to_a_carve_out(stage: Stage, client: Client, name: str) -> None:
    stage.scratch.apply([{"mkdir": "ws/free"}])
    kept = "sub/deep" if name == "RODEEP" else "sub"
    action = _point(stage.ws / "flip", kept, "free")
    with _repeating(action):
        for file in ("d.txt", "s.txt", "new"):
            _race(stage, client, _requests(stage, stage.ws / "flip" / file, name), kept)


def test_folders_that_change_places(stage: Stage, client: Client) -> None:
    """A folder of the workspace and a link to the outside exchange their names."""
    stage.scratch.apply(
        [{"mkdir": "ws/one/dir"}, {"symlink": [str(stage.base / "outside"), "ws/two"]}]
    )
    with _exchanging(stage.ws / "one", stage.ws / "two"):
        for name in ("dir/x.txt", "o.txt", "dir/new"):
            _race(stage, client, _requests(stage, stage.ws / "one" / name))


def _replacing(stage: Stage, name: str, content: tuple[str, str]) -> Callable[[], None]:
    """Moves the entry at a name of the workspace away and creates a new folder there."""
    count = itertools.count()
    (stage.base / "new").mkdir()
    (stage.base / "old").mkdir()

    def action() -> None:
        number = str(next(count))
        fresh = stage.base / "new" / number
        fresh.mkdir()
        (fresh / content[0]).write_text(content[1])
        for path in (fresh, fresh / content[0]):
            os.chown(path, stage.scratch.owner, stage.scratch.owner)
        (stage.ws / name).rename(stage.base / "old" / number)
        fresh.rename(stage.ws / name)

    stage.scratch.give_away()
    action()
    return action


@pytest.mark.parametrize(("name", "policy"), [(".git", "WW"), ("sub", "DENYSUB"), ("sub", "ROSUB")])
def test_a_carve_out_that_is_replaced(stage: Stage, client: Client, name: str, policy: str) -> None:
    """No folder that ever had the name is written to, before or after it was moved away."""
    action = _replacing(stage, name, ("s.txt", "sub"))
    with _repeating(action, pause=_MOMENT):
        for number in range(_REBUILDS):
            path = stage.ws / name / ("s.txt", "forged")[number % 2]
            requests = _requests(stage, path, policy)
            client.answer(client.request(*requests[number % len(requests)]))
            client.answer(client.request("fs/close", {"handleId": "race"}))
    # The first folder that was moved away is the original, which has other contents.
    moved = (folder for folder in (stage.base / "old").iterdir() if folder.name != "0")
    found = [path for folder in (stage.ws / name, *moved) for path in folder.iterdir()]
    assert {path.name for path in found} == {"s.txt"}
    assert {path.read_text() for path in found} == {"sub"}


def test_a_denied_folder_that_is_replaced_is_not_read(stage: Stage, client: Client) -> None:
    action = _replacing(stage, "sub", ("s.txt", "secret"))
    params = {"path": uri(stage.ws / "sub/s.txt"), "sandbox": stage.policy("DENYSUB")}
    with _repeating(action, pause=_MOMENT):
        for _ in range(_REBUILDS):
            answer = client.answer(client.request("fs/readFile", params))
            assert "result" not in answer
            opened = client.answer(client.request("fs/open", params | {"handleId": "r"}))
            assert "result" not in opened


@pytest.mark.quick
def test_the_workspace_changes_places_with_the_outside(stage: Stage, client: Client) -> None:
    """The policy names a path: the entry there before the request is granted."""
    stage.scratch.apply([{"mkdir": "spare/dir"}, {"write": ["spare/o.txt", "spare"]}])
    with _exchanging(stage.ws, stage.base / "spare"):
        for _ in range(_REBUILDS):
            params = {"path": uri(stage.ws / "../outside/o.txt"), "dataBase64": b64("new")}
            client.answer(client.request("fs/writeFile", params | {"sandbox": stage.policy("WW")}))
            assert (stage.base / "outside/o.txt").read_text() == "outside"


def test_protected_names_come_and_go(stage: Stage, client: Client) -> None:
    """An entry that the host creates at a protected name is not changed through the server."""
    forged: list[str] = []

    def action() -> None:
        for name in PROTECTED:
            if os.path.lexists(stage.ws / name):
                forged.append(name)
                return
            (stage.ws / name).mkdir()
            (stage.ws / name / "config").write_text("host")
        for name in PROTECTED:
            if os.listdir(stage.ws / name) != ["config"]:
                forged.append(name)
                return
            (stage.ws / name / "config").unlink()
            (stage.ws / name).rmdir()

    with _repeating(action):
        for number in range(_REBUILDS):
            name = PROTECTED[number % len(PROTECTED)]
            method, params = _requests(stage, stage.ws / name / "forged")[number % 5]
            answer = client.answer(client.request(method, params))
            assert "error" in answer, (method, answer)
    assert forged == []


def test_a_denied_file_behind_a_link_that_turns_is_not_read(stage: Stage, client: Client) -> None:
    secret = b64("sub")
    action = _point(stage.ws / "flip", "sub", "../outside/dir")
    stage.scratch.apply([{"write": ["outside/dir/s.txt", "open"]}])
    path = uri(stage.ws / "flip/s.txt")
    with _repeating(action):
        for _ in range(_REQUESTS):
            params = {"path": path, "sandbox": stage.policy("DENYSUB")}
            answer = client.answer(client.request("fs/readFile", params))
            assert answer.get("result", {}).get("dataBase64") != secret
            opened = client.answer(client.request("fs/open", params | {"handleId": "r"}))
            if "result" in opened:
                block = {"handleId": "r", "offset": 0, "len": 64}
                assert client.call("fs/readBlock", block)["chunk"] == b64("open")
                client.call("fs/close", {"handleId": "r"})


def test_the_server_is_not_read_behind_a_link_that_turns(stage: Stage, client: Client) -> None:
    action = _point(stage.ws / "flip", "/proc/self/environ", "a.txt")
    with _repeating(action):
        for number in range(_REQUESTS):
            params = {
                "path": uri(stage.ws / "flip"),
                "sandbox": stage.policy(("RO", "WW")[number % 2]),
            }
            answer = client.answer(client.request("fs/readFile", params))
            data = base64.b64decode(answer.get("result", {}).get("dataBase64", ""))
            assert MARKER.encode() not in data
            opened = client.answer(client.request("fs/open", params | {"handleId": "r"}))
            if "result" in opened:
                block = {"handleId": "r", "offset": 0, "len": 65536}
                read = client.answer(client.request("fs/readBlock", block))
                chunk = base64.b64decode(read.get("result", {}).get("chunk", ""))
                assert MARKER.encode() not in chunk
                client.call("fs/close", {"handleId": "r"})


def test_a_command_starts_while_its_workspace_is_rearranged(stage: Stage, client: Client) -> None:
    """A command may be refused or find any tree, but never writes guarded files."""
    action = _point(stage.ws / "flip", ".", "sub")
    script = "echo x > .git/new; mkdir .codex; echo x > .codex/f; echo x > flip/.codex/f; exit 0"
    stage.scratch.apply([{"mkdir": "ws/one"}, {"mkdir": "ws/two"}])
    before = guarded(stage.base)
    with _repeating(action), _exchanging(stage.ws / "one", stage.ws / "two"):
        for _ in range(20):
            stage.shell(client, "WW", script)
            assert guarded(stage.base) == before


@pytest.mark.parametrize("user", USERS)
def test_mounts_that_come_and_go(user: User) -> None:
    """A mount outside is read-only from its first moment, one inside is ordinary workspace."""

    def race() -> None:
        with start_stage(user) as stage, stage.server.connect() as client:
            stage.scratch.apply([{"mkdir": "outside/mnt"}, {"mkdir": "ws/mnt"}])
            sandbox = {"sandbox": stage.policy("WW"), "dataBase64": b64("new")}
            for _ in range(_MOUNTS):
                for folder in ("outside/mnt", "ws/mnt", "ws/.git"):
                    mount("tmpfs", stage.base / folder, "tmpfs")
                    os.chown(stage.base / folder, stage.scratch.owner, stage.scratch.owner)
                    path = stage.base / folder / "n"
                    answer = client.answer(
                        client.request("fs/writeFile", {"path": uri(path)} | sandbox)
                    )
                    done = folder == "ws/mnt"
                    assert (path.exists(), "result" in answer) == (done, done), answer
                    code = stage.shell(client, "WW", f"echo x > {path}").exit_code
                    assert (code == 0) == done, folder
                    unmount(stage.base / folder)
                    client.answer(client.request("fs/writeFile", {"path": uri(path)} | sandbox))
                    assert path.exists() == done
                    path.unlink(missing_ok=True)

    in_private_mounts(race)
