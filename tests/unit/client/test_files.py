"""Files of an environment, with a server that is the test."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Coroutine
from typing import Any
from unittest import mock

import pytest
from tests.support.memory_session import GREETING, OURS, Message, Scene, in_environment, outcome

from exec_server.client import files as module
from exec_server.client import tree_walk
from exec_server.client.engine.server_features import ServerFeatures
from exec_server.client.environment import Environment
from exec_server.client.exceptions import PermissionDenied, SandboxDenied
from exec_server.client.results import Entry, Stat
from exec_server.errors import InternalError, InvalidRequest, MalformedAnswer, RpcError, Unsupported

FILE = {
    "isDirectory": False,
    "isFile": True,
    "isSymlink": False,
    "size": 3,
    "createdAtMs": 0,
    "modifiedAtMs": 1500,
}
DIRECTORY = FILE | {"isDirectory": True, "isFile": False}


async def exchange(
    scene: Scene, work: Coroutine[Any, Any, Any], *answers: tuple[str, Any]
) -> tuple[Any, list[Message]]:
    """The outcome of a call and the params of its requests, answered or refused in turn."""
    received: list[Message] = []
    async with asyncio.TaskGroup() as tasks:
        calling = tasks.create_task(outcome(work))
        for method, answer in answers:
            request = await scene.stream.next(method)
            received.append(request["params"])
            if isinstance(answer, RpcError):
                scene.stream.refuse(request, answer.code, answer.message, answer.data)
            else:
                scene.stream.answer(request, answer)
    assert scene.stream.is_quiet
    return calling.result(), received


@in_environment
async def test_metadata_of_a_path(scene: Scene) -> None:
    stat, params = await exchange(scene, scene.env.files.stat("a"), ("fs/getMetadata", FILE))
    assert stat == Stat(False, True, False, 3, 1.5, None)
    assert params[0]["path"] == "file:///home/a"
    born = FILE | {"createdAtMs": 2500}
    looking = scene.env.files.stat("a", follow_links=False)
    stat, params = await exchange(scene, looking, ("fs/getMetadata", born))
    assert (stat.created, params[0]["followSymlinks"]) == (2.5, False)


@in_environment
async def test_a_small_file_is_read_and_written_by_one_request(scene: Scene) -> None:
    content = base64.b64encode(b"abc").decode()
    read = scene.env.files.read("a")
    assert (
        await exchange(
            scene, read, ("fs/getMetadata", FILE), ("fs/readFile", {"dataBase64": content})
        )
    )[0] == b"abc"
    large = bytes(module.WHOLE_BYTES + 1)  # this server has no open files for writing
    for data in (b"abc", large):
        _, [params] = await exchange(scene, scene.env.files.write("a", data), ("fs/writeFile", {}))
        assert base64.b64decode(params["dataBase64"]) == data


@in_environment
async def test_errors_name_the_path(scene: Scene) -> None:
    denied = InternalError("Permission denied (os error 13)")
    error, _ = await exchange(scene, scene.env.files.list("a"), ("fs/readDirectory", denied))
    assert type(error) is PermissionDenied
    assert str(error) == "a: Permission denied (os error 13)"
    confined = scene.env.files.sandboxed("read-only")
    error, [params] = await exchange(scene, confined.list("a"), ("fs/readDirectory", denied))
    assert params["sandbox"] is not None
    assert type(error) is SandboxDenied
    assert str(error) == "a: Permission denied (os error 13)"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InternalError("Not a directory (os error 20)"), False),
        (InternalError("Symbolic link loop (os error 40)"), False),
        (InternalError("Permission denied (os error 13)"), PermissionDenied),
    ],
)
def test_whether_a_path_exists(error: RpcError, expected: Any) -> None:
    @in_environment
    async def test(scene: Scene) -> None:
        found, _ = await exchange(scene, scene.env.files.exists("a"), ("fs/getMetadata", error))
        assert found is expected or type(found) is expected

    test()


def walked(*names: str, is_truncated: bool = False, errors: Any = ()) -> Message:
    entries = [
        {
            "path": f"file:///home/{name.rstrip('/')}",
            "kind": "directory" if name.endswith("/") else "file",
        }
        for name in names
    ]
    return {"entries": entries, "errors": list(errors), "truncated": is_truncated}


async def walk(scene: Scene, told: list[str]) -> list[Entry]:
    def on_error(error: RpcError) -> None:
        told.append(str(error))

    return [entry async for entry in scene.env.files.walk(".", on_error=on_error)]


@in_environment
async def test_a_walk_reports_unreadable_entries(scene: Scene) -> None:
    told: list[str] = []
    unreadable = {"path": "file:///home/d", "message": "no access"}
    found, _ = await exchange(
        scene, walk(scene, told), ("fs/walk", walked("d/", "f", errors=[unreadable]))
    )
    assert found == [Entry("/home/d", True, False), Entry("/home/f", False, True)]
    assert told == ["/home/d: no access"]


@in_environment
async def test_a_large_tree_is_walked_by_directories(scene: Scene) -> None:
    found, requests = await exchange(
        scene,
        walk(scene, []),
        ("fs/walk", walked("x", is_truncated=True)),
        ("fs/walk", walked("d/", "f")),
        ("fs/walk", walked("d/g")),
    )
    assert [entry.path for entry in found] == ["/home/d", "/home/f", "/home/d/g"]
    assert [params["path"] for params in requests] == ["file:///home"] * 2 + ["file:///home/d"]


@in_environment
async def test_a_file_is_not_copied_onto_itself(scene: Scene) -> None:
    same = ("fs/canonicalize", {"path": "file:///home/a"})
    error, _ = await exchange(scene, scene.env.files.copy("a", "b"), same, same)
    assert isinstance(error, InvalidRequest)
    assert str(error) == "a to b: they are the same file"


@in_environment
async def test_a_file_is_copied(scene: Scene) -> None:
    missing = InternalError("No such file or directory (os error 2)")
    _, requests = await exchange(
        scene, scene.env.files.copy("a", "b"), ("fs/canonicalize", missing), ("fs/copy", {})
    )
    assert requests[1]["sourcePath"] == "file:///home/a"
    assert requests[1]["destinationPath"] == "file:///home/b"


@in_environment
async def test_a_directory_may_exist(scene: Scene) -> None:
    exists = ("fs/createDirectory", InternalError("File exists (os error 17)"))
    mkdir = scene.env.files.mkdir
    assert (await exchange(scene, mkdir("d"), exists))[0].message.endswith("(os error 17)")
    answers = (exists, ("fs/getMetadata", DIRECTORY))
    assert (await exchange(scene, mkdir("d", exist_ok=True), *answers))[0] is None
    answers = (exists, ("fs/getMetadata", FILE))
    error, _ = await exchange(scene, mkdir("d", exist_ok=True), *answers)
    assert isinstance(error, FileExistsError)
    error, _ = await exchange(scene, mkdir("d", parents=True), ("fs/getMetadata", DIRECTORY))
    assert str(error) == "d: File exists (os error 17)"


@pytest.mark.parametrize("greeting", [GREETING, OURS], ids=["reference", "ours"])
def test_a_file_is_opened_to_read_or_to_replace(greeting: Message) -> None:
    async def test(scene: Scene) -> None:
        with pytest.raises(ValueError, match="mode must be 'r', 'w', 'a' or 'x' with"):
            scene.env.files.open("a", "q")
        for mode in ("rb", "wb", "ab", "xb", "r", "w", "a", "x"):
            assert not scene.env.files.open("a", mode).is_open

    in_environment(test, greeting)()


@in_environment
async def test_large_data_without_open_files_and_without_confined_commands_is_refused(
    scene: Scene,
) -> None:
    scene.env.session.features = ServerFeatures(confines_commands=False)
    confined = scene.env.files.sandboxed("read-only")
    with pytest.raises(Unsupported, match="fileWriteStreaming: write the whole file"):
        confined.open("a", "wb")


# ---- answers that cannot be right -----------------------------------------------------


@pytest.mark.parametrize(
    "wrong", [{"size": -1}, {"size": 2**63}, {"modifiedAtMs": 2**63}, {"createdAtMs": -(2**63) - 1}]
)
def test_impossible_metadata_is_an_error(wrong: dict[str, int]) -> None:
    @in_environment
    async def scene(scene: Scene) -> None:
        stat = scene.env.files.stat("a")
        error, _ = await exchange(scene, stat, ("fs/getMetadata", FILE | wrong))
        assert isinstance(error, MalformedAnswer)

    scene()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc", "a\0"])
def test_an_entry_that_is_not_a_name_is_an_error(name: str) -> None:
    @in_environment
    async def scene(scene: Scene) -> None:
        entries = [{"fileName": name, "isDirectory": False, "isFile": True}]
        answer = ("fs/readDirectory", {"entries": entries})
        error, _ = await exchange(scene, scene.env.files.list("/d"), answer)
        assert isinstance(error, MalformedAnswer)
        assert str(error).startswith("/d: the server lists an entry")

    scene()


@pytest.mark.parametrize("path", ["file:///etc", "file:///dx", "/d/x", "file:///d/" + "x" * 20_000])
def test_an_entry_outside_of_a_walked_tree_is_an_error(path: str) -> None:
    @in_environment
    async def scene(scene: Scene) -> None:
        entries = [{"path": path, "kind": "file"}]
        answer = {"entries": entries, "errors": [], "truncated": False}
        error, _ = await exchange(scene, _walked(scene.env, "/d"), ("fs/walk", answer))
        assert isinstance(error, MalformedAnswer)

    scene()


async def _walked(env: Environment, path: str) -> list[Entry]:
    return [entry async for entry in env.files.walk(path)]


@in_environment
async def test_the_directories_of_a_walk_have_a_limit(scene: Scene) -> None:
    entries = [{"path": f"file:///d/{name}", "kind": "directory"} for name in "abc"]
    answer = {"entries": entries, "errors": [], "truncated": True}
    with mock.patch.object(tree_walk, "MAX_DIRECTORIES", 2):
        walking = _walked(scene.env, "/d")
        error, _ = await exchange(scene, walking, ("fs/walk", answer), ("fs/walk", answer))
    assert isinstance(error, InvalidRequest)
    assert "more than 2 directories" in str(error)


@in_environment
async def test_a_file_above_the_limit_is_not_read(scene: Scene) -> None:
    large = FILE | {"size": 11}
    error, _ = await exchange(scene, scene.env.files.read("a", limit=10), ("fs/getMetadata", large))
    assert "file is too large to read: limit is 10 bytes" in str(error)
    content = ("fs/readFile", {"dataBase64": base64.b64encode(bytes(11)).decode()})
    error, _ = await exchange(
        scene, scene.env.files.read("a", limit=10), ("fs/getMetadata", FILE), content
    )
    assert isinstance(error, InvalidRequest)


@in_environment
async def test_a_change_of_the_empty_path_is_refused_by_its_argument(scene: Scene) -> None:
    files = scene.env.files
    for work, name in (
        (files.remove("", recursive=True), "path"),
        (files.write(b"", b"1"), "path"),
        (files.mkdir("", parents=True, exist_ok=True), "path"),
        (files.copy("", "b", recursive=True), "source"),
        (files.copy("a", ""), "target"),
        (files.rename("a", ""), "new"),
        (files.upload("a", ""), "remote"),
        (files.apply_patch("", ""), "root"),
        (files.write_tar(b"", ""), "directory"),
        (scene.env.run(["true"], cwd=""), "cwd"),
    ):
        with pytest.raises(ValueError, match=f"^{name} must not be empty"):
            await work
    assert scene.stream.is_quiet


@in_environment
async def test_the_working_directory_is_not_removed(scene: Scene) -> None:
    hidden = ("file:///home/%2E%2E", "file:///home/d/..%2F..", "file:///home/x/..\\..")
    plain = (".", "./", "..", "a/..", "/home", "../home/", "/", "//home", "/home/a/../")
    for path in (*plain, *hidden):
        with pytest.raises(InvalidRequest, match=r"are not removed"):
            await scene.env.files.remove(path, recursive=True, missing_ok=True)
    assert scene.stream.is_quiet
