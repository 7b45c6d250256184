"""Batches of small files: which files are in one, and what becomes of the answers."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from msgspec import Raw

from exec_server.client.transfer import batches
from exec_server.client.transfer.batches import (
    BATCH_BYTES,
    BATCH_FILES,
    BATCH_TEXT_BYTES,
    FILE_BYTES,
    FileBatch,
    batches_of,
    is_small,
)
from exec_server.client.transfer.mirror import Item
from exec_server.errors import InternalError, MalformedAnswer
from exec_server.protocol.files import WriteFilesResult
from exec_server.protocol.jsonrpc import Attached
from exec_server.protocol.paths import PathUri


def _item(path: str, size: int = 1, kind: str = "f") -> Item:
    return Item(path, kind, 0o644, size, "1 1")


class Session:
    """A server with one answer."""

    def __init__(self, answer: object) -> None:
        self.answer = answer
        self.params: Any = None

    async def call(self, call: object, params: object, *, is_retryable: bool) -> Any:
        assert is_retryable
        self.params = params
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


BATCH = FileBatch([_item("a"), _item("b"), _item("c")], [PathUri.from_text(f"/{x}") for x in "abc"])


def test_small_files_are_those_of_a_batch() -> None:
    assert is_small(_item("a", FILE_BYTES))
    assert not is_small(_item("a", FILE_BYTES + 1))
    assert not is_small(_item("a", kind="d"))
    assert not is_small(_item("x" * BATCH_TEXT_BYTES))


@pytest.mark.parametrize(
    ("items", "counts"),
    [
        ([], []),
        ([_item(str(number)) for number in range(BATCH_FILES + 1)], [BATCH_FILES, 1]),
        ([_item(str(number), FILE_BYTES) for number in range(17)], [BATCH_BYTES // FILE_BYTES, 1]),
        ([_item(f"{number:0>1000}") for number in range(30)], [22, 8]),
    ],
)
def test_batches_are_limited(items: list[Item], counts: list[int]) -> None:
    made = list(batches_of(items, "/top"))
    assert [len(batch.items) for batch in made] == counts
    assert [item for batch in made for item in batch.items] == items
    assert all(
        path.native() == f"/top/{item.path}"
        for batch in made
        for item, path in zip(*batch, strict=True)
    )


def _write(answer: object, contents: list[bytes | None]) -> tuple[set[int], Any]:
    session = Session(answer)
    return asyncio.run(batches.write(cast(Any, session), BATCH, contents)), session.params


def test_written_files_are_counted_by_position() -> None:
    written, request = _write(WriteFilesResult([1, 7]), [b"a", None, b"ccc"])
    assert written == {0}
    assert request.data == b"accc"
    assert [(file.path.native(), file.size, file.mode) for file in request.value.files] == [
        ("/a", 1, 0o644),
        ("/c", 3, 0o644),
    ]
    assert _write(InternalError("no"), [b"a", b"b", b"c"])[0] == set()


def _read(answer: object) -> list[memoryview | None]:
    return asyncio.run(batches.read(cast(Any, Session(answer)), BATCH))


def test_contents_are_cut_out_of_the_data() -> None:
    answer = Attached(Raw(b'{"sizes":[2,null,0]}'), memoryview(b"ab"))
    assert _read(answer) == [b"ab", None, b""]
    assert _read(InternalError("no")) == [None, None, None]


@pytest.mark.parametrize("sizes", [b"[2,0]", b"[1,0,0]", b"[3,0,-1]", b'["x",1,1]'])
def test_sizes_that_do_not_fit_are_malformed(sizes: bytes) -> None:
    with pytest.raises(MalformedAnswer):
        _read(Attached(Raw(b'{"sizes":%b}' % sizes), memoryview(b"ab")))
