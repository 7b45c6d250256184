"""Characters and lines over blocks of bytes, as the built-in `open` gives them."""

from __future__ import annotations

import asyncio
import contextlib
import io
import random
from collections.abc import Coroutine
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exec_server.client.handle import Handle
from exec_server.client.transfer import open_file as open_module
from exec_server.client.transfer import text_file as module
from exec_server.client.transfer.open_file import FileAppender
from exec_server.client.transfer.text_file import TextFormat, TextReader, TextWriter
from exec_server.errors import InvalidRequest


class Blocks(Handle):
    """A file to read whose blocks have a size."""

    path = "f"

    def __init__(self, data: bytes, size: int) -> None:
        super().__init__()
        self._blocks = [data[start : start + size] for start in range(0, len(data), size)]

    async def _open(self) -> None: ...

    async def _close(self) -> None: ...

    def __aiter__(self) -> Blocks:
        return self

    async def __anext__(self) -> bytes:
        if not self._blocks:
            raise StopAsyncIteration
        return self._blocks.pop(0)


class Written(Handle):
    """A file to write that keeps its data, or is left as it was."""

    path = "f"

    def __init__(self) -> None:
        super().__init__()
        self.data = b""
        self.was_left_by_error = False
        self.flushed = 0

    async def _open(self) -> None: ...

    async def _close(self) -> None: ...

    async def __aexit__(self, *error: object) -> None:
        self.was_left_by_error = error[0] is not None
        await self.aclose()

    async def write(self, data: bytes) -> None:
        self.data += data

    async def flush(self) -> None:
        self.flushed += 1


def reader(data: bytes, size: int = 3, **text: Any) -> TextReader:
    return TextReader(cast(Any, Blocks(data, size)), TextFormat(**text))


def play(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scene)


@given(
    st.lists(st.sampled_from(["a", "é", "\r", "\n", "\r\n", "\u2028", "€"]), max_size=12),
    st.integers(1, 5),
    st.sampled_from([None, "", "\n", "\r", "\r\n"]),
)
def test_lines_are_those_of_the_built_in_open(
    parts: list[str], size: int, newline: str | None
) -> None:
    data = "".join(parts).encode()

    async def scene() -> None:
        wanted = list(io.TextIOWrapper(io.BytesIO(data), "utf-8", newline=newline))
        async with reader(data, size, newline=newline) as file:
            assert [line async for line in file] == wanted
        async with reader(data, size, newline=newline) as file:
            taken = []
            while lines := await file.take_lines():
                taken += lines
            assert taken == wanted
        async with reader(data, size, newline=newline) as file:
            assert await file.readline() + await file.read() == "".join(wanted)

    play(scene())


def random_data(numbers: random.Random, encoding: str) -> bytes:
    parts = ("a", "b", "\r", "\n", "\r\n", "\u2028", "\x85", "é", "€", "😀")
    text = "".join(numbers.choices(parts, k=numbers.randint(0, 30)))
    return text.encode(encoding, "replace")


@pytest.mark.parametrize("newline", [None, "", "\n", "\r", "\r\n"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "latin-1"])
def test_reads_of_any_size_are_those_of_the_built_in_open(
    encoding: str, newline: str | None
) -> None:
    """Blocks of all sizes, so that line ends and characters are divided, or in one block."""
    numbers = random.Random(1)

    async def scene() -> None:
        for _ in range(100):
            data = random_data(numbers, encoding)
            built_in = io.TextIOWrapper(io.BytesIO(data), encoding, newline=newline)
            size = numbers.choice([1, 2, 3, 5, 8, 100])
            async with reader(data, size, encoding=encoding, newline=newline) as file:
                for _ in range(12):
                    count = numbers.choice([None, None, 0, 1, 2, 7])
                    wanted = built_in.readline() if count is None else built_in.read(count)
                    read = await (file.readline() if count is None else file.read(count))
                    assert read == wanted
                assert [line async for line in file] == list(built_in)

    play(scene())


def test_the_last_line_may_lack_the_line_end() -> None:
    async def scene() -> None:
        async with reader(b"one\r\ntwo\r\nthree", 100, newline="\r\n") as file:
            assert await file.take_lines() == ["one\r\n", "two\r\n"]
            assert await file.take_lines() == ["three"]
            assert await file.take_lines() == []

    play(scene())


def test_characters_are_read() -> None:
    async def scene() -> None:
        async with reader("grün und blau".encode(), 3) as file:
            assert await file.read(3) == "grü"
            assert await file.read(0) == ""
            assert await file.read(5) == "n und"
            assert await file.read(None) == " blau"
            assert await file.read(5) == ""
        async with reader("ä\n".encode("utf-16"), 3, encoding="utf-16") as file:
            assert await file.read() == "ä\n"
        async with reader(b"a\xff", 3, errors="replace") as file:
            assert await file.readline() == "a\ufffd"
        with pytest.raises(UnicodeDecodeError):
            async with reader(b"a\xff") as file:
                await file.read()

    play(scene())


def test_lines_that_were_taken_can_be_put_back() -> None:
    async def scene() -> None:
        async with reader(b"a\nb\nc\nd", 4) as file:
            assert await file.take_lines() == ["a\n", "b\n"]
            file.put_back("b\n")
            assert await file.readline() == "b\n"
            assert await file.read() == "c\nd"

    play(scene())


def test_a_file_that_is_not_open_is_not_read() -> None:
    async def scene() -> None:
        file = reader(b"a")
        for work in (file.read, file.readline):
            with pytest.raises(RuntimeError, match="f is not open"):
                await work()

    play(scene())


def test_lines_and_texts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINE_CHARACTERS", 4)
    monkeypatch.setattr(module, "READ_BYTES", 4)

    async def scene() -> None:
        async with reader(b"abcdefgh") as file:
            with pytest.raises(InvalidRequest, match="f: a line has more than 4 characters"):
                await file.readline()
        async with reader(b"abcdefgh") as file:
            with pytest.raises(InvalidRequest, match="f"):
                await file.read()

    play(scene())


def test_text_is_encoded_with_its_line_ends() -> None:
    async def scene() -> None:
        for newline, expected in ((None, b"a\nb"), ("", b"a\nb"), ("\r\n", b"a\r\nb")):
            file = Written()
            text = TextFormat(newline=newline)
            async with TextWriter(cast(Any, file), text) as writer:
                assert await writer.write("a\nb") == 3
                await writer.flush()
            assert (file.data, file.flushed, file.was_left_by_error) == (expected, 1, False)
        file = Written()
        async with TextWriter(cast(Any, file), TextFormat("iso2022_jp")) as writer:
            await writer.write("日")
        assert file.data == "日".encode("iso2022_jp")  # with its end
        with pytest.raises(TypeError, match="text must be str, not bytes: open the file with 'b'"):
            await writer.write(cast(Any, b"x"))

    play(scene())


def test_an_exception_abandons_the_file() -> None:
    async def scene() -> None:
        file = Written()
        with pytest.raises(UnicodeEncodeError):
            async with TextWriter(cast(Any, file), TextFormat("ascii")) as writer:
                await writer.write("ä")
        assert file.was_left_by_error
        assert not file.is_open

    play(scene())


class Appended:
    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    async def append(self, data: bytes) -> None:
        await asyncio.sleep(0)
        self.pieces.append(data)


def test_appended_data_is_sent_in_pieces_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_module, "WRITE_BYTES", 4)

    async def scene() -> None:
        appended = Appended()
        file = FileAppender(appended.append, "f")
        with pytest.raises(RuntimeError, match="f is not open"):
            await file.write(b"x")
        async with file:
            with pytest.raises(TypeError, match="encode a text"):
                await file.write(cast(Any, "x"))
            await file.write(b"ab")
            assert appended.pieces == [b""]  # makes the file
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(file.write(b"cdefgh"))
                tasks.create_task(file.write(b"ijkl"))
            await file.write(b"m")
            await file.flush()
            await file.write(b"n")
        assert appended.pieces == [b"", b"abcd", b"efgh", b"ijkl", b"m", b"n"]
        assert file.written == 14

    play(scene())


def test_what_was_written_before_an_exception_is_appended() -> None:
    async def scene() -> None:
        appended = Appended()
        with contextlib.suppress(RuntimeError):
            async with TextWriter(FileAppender(appended.append, "f"), TextFormat()) as writer:
                await writer.write("text")
                raise RuntimeError
        assert appended.pieces == [b"", b"text"]

    play(scene())


def test_no_byte_order_mark_is_appended() -> None:
    file = FileAppender(Appended().append, "f")
    with pytest.raises(ValueError, match="utf-16 begins with a byte order mark"):
        TextWriter(file, TextFormat("utf-16"))
    assert not TextWriter(file, TextFormat("utf-16-le")).is_open
