"""fs/*: params in all their forms, and results on the wire."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from exec_server.errors import InvalidParams
from exec_server.protocol import files
from exec_server.protocol.decoding import Base64, Params, Result, decode
from exec_server.protocol.files import HandleId
from exec_server.protocol.paths import PathUri

A, B = PathUri.from_wire("/a"), PathUri.from_wire("/b")
PATH = {"path": "file:///a"}
OPTIONS = {"maxDepth": 1, "maxDirectories": 2, "maxEntries": 3, "followDirectorySymlinks": True}


@pytest.mark.parametrize(
    ("kind", "value", "params"),
    [
        (files.ReadFileParams, PATH, files.ReadFileParams(A)),
        (files.ReadFileParams, {"path": "/a"}, files.ReadFileParams(A)),
        (files.ReadFileParams, ["/a", False, None], files.ReadFileParams(A, False)),
        (files.WriteFileParams, PATH | {"dataBase64": "!"}, files.WriteFileParams(A, "!")),
        (files.OpenParams, PATH | {"handleId": "h"}, files.OpenParams(HandleId("h"), A)),
        (
            files.OpenParams,
            PATH | {"handleId": "h", "mode": "replace", "sandbox": None},
            files.OpenParams(HandleId("h"), A, "replace"),
        ),
        (
            files.ReadBlockParams,
            {"handleId": "h", "offset": 2**64 - 1, "len": 0},
            files.ReadBlockParams(HandleId("h"), 2**64 - 1, 0),
        ),
        (
            files.WriteBlockParams,
            {"handleId": "h", "offset": 1, "chunk": "eA=="},
            files.WriteBlockParams(HandleId("h"), 1, Base64(b"x")),
        ),
        (files.CloseParams, ["h"], files.CloseParams(HandleId("h"))),
        (
            files.CreateDirectoryParams,
            PATH | {"recursive": False},
            files.CreateDirectoryParams(A, False),
        ),
        (files.GetMetadataParams, PATH, files.GetMetadataParams(A)),
        (files.CanonicalizeParams, ["/a", None], files.CanonicalizeParams(A)),
        (files.ReadDirectoryParams, PATH, files.ReadDirectoryParams(A)),
        (
            files.WalkParams,
            PATH | {"options": OPTIONS},
            files.WalkParams(A, files.WalkOptions(1, 2, 3, True)),
        ),
        (files.RemoveParams, PATH | {"force": True}, files.RemoveParams(A, None, True)),
        (
            files.CopyParams,
            {"sourcePath": "/a", "destinationPath": "/b", "recursive": True},
            files.CopyParams(A, B, True),
        ),
        (
            files.WatchMissingParams,
            {"watchId": 7, "missing": ["/a", "file:///b"]},
            files.WatchMissingParams(7, [A, B]),
        ),
    ],
)
def test_params(kind: type[Params], value: object, params: Params) -> None:
    assert decode(kind, value) == params


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        (files.ReadFileParams, {}, "missing field `path`"),
        (files.ReadFileParams, {"path": 5}, "invalid type: number, expected a string"),
        (files.ReadFileParams, {"path": "a"}, "invalid URI: relative URL without a base"),
        (files.OpenParams, PATH, "missing field `handleId`"),
        (
            files.OpenParams,
            PATH | {"handleId": "h", "mode": "append"},
            "unknown variant `append`, expected `read` or `replace`",
        ),
        (files.ReadBlockParams, {"handleId": "h", "offset": -1, "len": 1}, "invalid number"),
        (
            files.WriteBlockParams,
            {"handleId": "h", "offset": 0, "chunk": "!"},
            "Invalid symbol 33, offset 0.",
        ),
        (files.WalkParams, PATH | {"options": {}}, "missing field `maxDepth`"),
        (
            files.CopyParams,
            ["/a"],
            "invalid length 1, expected struct WireFsCopyParams with 4 elements",
        ),
    ],
)
def test_params_of_the_wrong_shape(kind: type[Params], value: object, text: str) -> None:
    with pytest.raises(InvalidParams) as caught:
        decode(kind, value)
    assert caught.value.message == text


@pytest.mark.parametrize(
    ("result", "written"),
    [
        (files.Done(), {}),
        (files.ReadFileResult(b"x"), {"dataBase64": "eA=="}),
        (files.OpenResult(HandleId("h")), {"handleId": "h"}),
        (files.ReadBlockResult(b"", True), {"chunk": "", "eof": True}),
        (files.CanonicalizeResult("file:///a"), {"path": "file:///a"}),
        (
            files.ReadDirectoryResult([files.DirectoryEntry("n", False, True)]),
            {"entries": [{"fileName": "n", "isDirectory": False, "isFile": True}]},
        ),
        (
            files.WalkResult(
                [files.WalkEntry("file:///a", "file")], [files.WalkError("file:///b", "no")], False
            ),
            {
                "entries": [{"path": "file:///a", "kind": "file"}],
                "errors": [{"path": "file:///b", "message": "no"}],
                "truncated": False,
            },
        ),
        (files.WatchMissingResult(True), {"watching": True}),
    ],
)
def test_result_on_the_wire(result: Result, written: dict[str, Any]) -> None:
    assert msgspec.json.decode(msgspec.json.encode(result)) == written
