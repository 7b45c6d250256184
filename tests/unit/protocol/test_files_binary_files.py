"""Structs of the methods with binary messages."""

from __future__ import annotations

import pytest

from exec_server.errors import InvalidParams
from exec_server.protocol.decoding import Params, decode, decode_value
from exec_server.protocol.files import NewFile, ReadFilesParams, WriteFilesParams
from exec_server.protocol.paths import PathUri


def test_files_to_write() -> None:
    files = [{"path": "/a", "size": 1, "mode": 0o640}, {"path": "file:///b%20c", "size": 0}]
    assert decode_value(WriteFilesParams, {"files": files}) == WriteFilesParams(
        [NewFile(PathUri.from_text("/a"), 1, 0o640), NewFile(PathUri.from_text("/b c"), 0)]
    )
    with pytest.raises(InvalidParams):
        decode_value(WriteFilesParams, {"files": [{"path": "/a", "size": -1}]})


def test_files_to_read() -> None:
    paths = decode_value(ReadFilesParams, {"paths": ["/a"]}).paths
    assert paths == [PathUri.from_text("/a")]
    with pytest.raises(InvalidParams):
        decode_value(ReadFilesParams, {"paths": ["relative"]})


@pytest.mark.parametrize("member", ["sandbox", "sandboxPolicy", "user"])
@pytest.mark.parametrize(
    ("kind", "params"), [(ReadFilesParams, {"paths": ["/a"]}), (WriteFilesParams, {"files": []})]
)
def test_a_limit_is_refused_and_not_ignored(
    kind: type[Params], params: dict[str, object], member: str
) -> None:
    assert decode(kind, params | {member: None}) == decode(kind, params)
    for value in ({}, {"type": "read-only"}, "nobody", 0):
        with pytest.raises(InvalidParams, match=f"takes no `{member}`"):
            decode(kind, params | {member: value})
