"""Programs on their standard streams, where the event loop cannot start any."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

import pytest

from exec_server.client.engine.stdio import StdioDialer
from exec_server.errors import ConnectFailed, StartupError

pytestmark = pytest.mark.quick


class _Loop(asyncio.SelectorEventLoop):
    """A loop like asyncio.SelectorEventLoop on Windows."""

    async def subprocess_exec(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError


def test_a_loop_that_starts_no_programs_is_named() -> None:
    async def scene() -> None:
        with pytest.raises(ConnectFailed, match=r"cannot start ssh: this event loop .*Proactor"):
            await StdioDialer(["ssh"]).open(lambda stream: NotImplemented)

    with asyncio.Runner(loop_factory=_Loop) as runner:
        runner.run(scene())


def test_a_program_needs_a_name() -> None:
    with pytest.raises(StartupError, match="no program"):
        StdioDialer([])
