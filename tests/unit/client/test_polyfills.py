"""Polyfills on a machine that is a dictionary: which are needed, and that they answer alike."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import pytest
from tests.support.older_servers import OlderMachine, answers, recorded

from exec_server.client.engine.server_features import METHODS, ServerFeatures, judge
from exec_server.errors import InternalError, InvalidRequest, NotFound
from exec_server.protocol import files as wire
from exec_server.protocol.decoding import Call
from exec_server.protocol.paths import PathUri
from exec_server.protocol.session import STATUS, Capabilities, EnvironmentStatus

P = TypeVar("P")
R = TypeVar("R")

FILES = {"/d/f": b"abc", "/d/sub/g": b"", "/other/h": b"1"}
LINKS = {"/d/link": "/other", "/d/file": "/d/f"}
SANDBOX: Any = {"permissions": {}}
OPENING = {"fs/open", "fs/readBlock", "fs/writeBlock", "fs/close"}
OLDEST = {"environment/status", "fs/getMetadata", "fs/canonicalize", "fs/walk", *OPENING}
EXTENSIONS = {name for name, feature in METHODS.items() if feature.startswith("capabilities.")}
NEEDED = {
    "0.121.0": OLDEST,
    "0.133.0": OLDEST,
    "0.137.0": OLDEST - {"fs/canonicalize"},
    "0.141.0": OLDEST - {"fs/canonicalize"},
    "0.143.0": {"environment/status", "fs/getMetadata", *OPENING},
    "0.145.0": {"fs/getMetadata", *OPENING},
    "0.160.0": OPENING,
    "0.166.0": set(),
    "0.169.0": set(),
}


def machine(**lacking: Any) -> OlderMachine:
    return OlderMachine(ServerFeatures(**lacking), FILES, LINKS)


def call(there: OlderMachine, method: Call[P, R], params: P) -> R:
    """The result of a polyfill, whether the server lacks the method or not."""
    result: R = asyncio.run(there.polyfills[method.name](params))
    return result


def uri(path: str) -> PathUri:
    return PathUri.from_text(path)


@pytest.mark.parametrize("version", NEEDED)
def test_the_polyfills_of_each_generation(version: str) -> None:
    recording = recorded()[version]
    told = recording["environment/info"].get("result", {}).get("capabilities", {})
    flags = Capabilities(
        file_write_streaming=told.get("fileWriteStreaming", False),
        sandboxed_file_streaming=told.get("sandboxedFileStreaming", False),
    )
    features = judge(answers(recording), flags, has_sessions=True)
    assert features.missing_methods == NEEDED[version] | EXTENSIONS


def test_each_method_that_a_server_may_lack_has_a_row() -> None:
    assert machine().polyfills.keys() == METHODS.keys()


def test_a_server_that_answers_is_ready() -> None:
    there = machine(has_status=False)
    assert call(there, STATUS, None) == EnvironmentStatus("ready")
    assert there.asked == ["fs/getMetadata"]


# ---- metadata -------------------------------------------------------------------------


def metadata(there: OlderMachine, path: str, **options: Any) -> wire.GetMetadataResult:
    params = wire.GetMetadataParams(uri(path), **options)
    return call(there, wire.GET_METADATA, params)


def test_the_size_of_a_file_is_that_of_stat() -> None:
    there = machine(has_file_sizes=False)
    assert metadata(there, "/d/f") == wire.GetMetadataResult(False, True, False, 3, 1, 2)
    assert metadata(there, "/d/file") == wire.GetMetadataResult(False, True, True, 3, 1, 2)
    assert metadata(there, "/d") == wire.GetMetadataResult(True, False, False, 0, 1, 2)
    assert there.ran == [["stat", "-L", "-c", "%s", "--", path] for path in ("/d/f", "/d/file")]
    with pytest.raises(NotFound):
        metadata(there, "/none")


def test_the_size_of_a_confined_file_is_that_of_its_content() -> None:
    there = machine(has_file_sizes=False, confines_commands=False)
    assert metadata(there, "/d/f", sandbox=SANDBOX).size == 3
    assert there.ran == []
    there = machine(has_file_sizes=False)
    assert metadata(there, "/d/f", sandbox=SANDBOX).size == 3
    assert there.sandboxes == [SANDBOX]


def test_a_machine_without_stat() -> None:
    there = machine(has_file_sizes=False)
    there.failure, there.exit_code = "", 0
    with pytest.raises(InternalError, match="the size of the file is unknown: its machine has no"):
        metadata(there, "/d/f")
    there.failure, there.exit_code = "stat: not today", 1
    with pytest.raises(InternalError, match="not today"):
        metadata(there, "/d/f")


def test_symlinks_are_refused_by_their_canonical_path() -> None:
    there = machine(refuses_symlinks=False)
    for path in ("/d/file", "/d/link/h"):
        assert metadata(there, path).is_file
        with pytest.raises(InvalidRequest, match="path contains a symbolic link"):
            metadata(there, path, follow_symlinks=False)
    assert metadata(there, "/d/f", follow_symlinks=False).is_file


# ---- canonical paths ------------------------------------------------------------------


def test_a_canonical_path_is_that_of_readlink() -> None:
    there = machine(has_canonicalize=False)
    params = wire.CanonicalizeParams(uri("/d/link/h"), SANDBOX)
    assert call(there, wire.CANONICALIZE, params).path == "/other/h"
    assert there.sandboxes == [SANDBOX]
    with pytest.raises(NotFound, match=r"No such file or directory \(os error 2\)"):
        call(there, wire.CANONICALIZE, wire.CanonicalizeParams(uri("/none")))


# ---- walks ----------------------------------------------------------------------------


def walked(
    there: OlderMachine,
    *,
    depth: int = 9,
    directories: int = 9,
    entries: int = 9,
    follow: bool = False,
) -> wire.WalkResult:
    options = wire.WalkOptions(depth, directories, entries, follow)
    params = wire.WalkParams(uri("/d"), options)
    return call(there, wire.WALK, params)


def names(found: wire.WalkResult) -> list[str]:
    marks = {"directory": "/", "file": ""}
    return [each.path.removeprefix("file:///d/") + marks[each.kind] for each in found.entries]


def test_a_walk_leaves_out_symlinks() -> None:
    found = walked(machine(has_walk=False))
    assert names(found) == ["f", "sub/", "sub/g"]
    assert (found.errors, found.truncated) == ([], False)


def test_a_walk_follows_symlinks() -> None:
    assert names(walked(machine(), follow=True, depth=0)) == ["f", "file", "link/", "sub/"]


def test_the_limits_of_a_walk() -> None:
    assert names(walked(machine(), depth=0)) == ["f", "sub/"]
    assert walked(machine(), directories=1).truncated
    found = walked(machine(), entries=2)
    assert (names(found), found.truncated) == (["f", "sub/"], True)
    assert not walked(machine(), entries=3).truncated


def test_what_cannot_be_walked_is_reported() -> None:
    there = machine()
    there.unreadable = {"/d/sub"}
    there.links["/d/gone"] = "/nowhere"
    found = walked(there)
    assert names(found) == ["f", "sub/"]
    told = sorted(error.path for error in found.errors)
    assert told == ["file:///d/gone", "file:///d/sub"]
    there.unreadable = {"/d"}
    with pytest.raises(NotFound):
        walked(there)
