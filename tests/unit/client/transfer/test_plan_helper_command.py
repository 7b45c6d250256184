"""HelperCommand: output, messages and exit code of a command that the test plays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, cast

import pytest

from exec_server.client.results import Chunk
from exec_server.client.transfer.plan import HelperCommand
from exec_server.errors import ConnectionLost


class Commands:
    """Starts one process, which is this object too."""

    def __init__(self, *chunks: Chunk) -> None:
        self._chunks = chunks
        self.options: dict[str, Any] = {}

    def start(self, argv: list[str], **options: Any) -> Commands:
        self.options = {"argv": argv, **options}
        return self

    async def __aenter__(self) -> Commands:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.options["has_ended"] = True

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        for chunk in self._chunks:
            yield chunk

    async def wait(self) -> int:
        return 3


def _output(helper: HelperCommand) -> bytes:
    async def read() -> bytes:
        return b"".join([data async for data in helper.stdout(["find"], "the list")])

    return asyncio.run(read())


def test_messages_are_kept_apart_up_to_their_limit() -> None:
    words = [Chunk("stderr", b"one"), Chunk("stdout", b"a"), Chunk("stderr", b"two")]
    commands = Commands(*words, Chunk("stderr", b"three"), Chunk("stdout", b"b"))
    helper = HelperCommand(cast(Any, commands), "confined", error_bytes=4)
    assert _output(helper) == b"ab"
    assert (bytes(helper.errors), helper.exit_code) == (b"onetwo", 3)
    assert commands.options["sandbox"] == "confined"
    assert commands.options["has_ended"]


def test_a_lost_part_is_named() -> None:
    commands = Commands(Chunk("stdout", b"a"), Chunk("stdout", b"b", lost_before=1))
    helper = HelperCommand(cast(Any, commands), None, error_bytes=4)
    with pytest.raises(ConnectionLost, match="the list was lost"):
        _output(helper)
