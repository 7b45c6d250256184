"""The table of detached commands, and attaching with a helpful error."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any, cast

import pytest
from tests.support.client_targets import TARGET, FakeEnvironment, listed

from exec_server.cli.commands.detached_commands import END, as_json, as_table, attached
from exec_server.cli.commands.errors import CommandError


def test_the_table() -> None:
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(0))
    rows = [
        listed(),
        listed("build", running=False, exit_code=3, attached=0, argv=["sh", "-c", "x" * 80]),
        listed("old", running=False, exit_code=143, ended_by="idleTimeout", argv=["\x1b[m"]),
    ]
    long = f"sh -c {'x' * 53}…"
    assert as_table(rows) == (
        f"NAME   STATUS                     {'STARTED':19}  CLIENTS  COMMAND\n"
        f"web    running                    {started}  1        node app.js\n"
        f"build  exited 3                   {started}  0        {long}\n"
        f"old    exited 143 (idle timeout)  {started}  1        '\\x1b[m'\n"
    )
    assert "  running  ?        1  " in as_table([listed(started_at_ms=-(10**30))])
    assert as_table([]) == "NAME  STATUS  STARTED  CLIENTS  COMMAND\n"


def test_json_has_the_names_of_the_protocol() -> None:
    [web] = json.loads(as_json([listed()]))
    assert (web["name"], web["nextSeq"], web["endedBy"]) == ("web", 4, None)


def test_attaching() -> None:
    environment = FakeEnvironment(listed())

    async def scene() -> None:
        async with attached(cast(Any, environment), TARGET, "web", after=END) as process:
            assert process.name == "web"
        with pytest.raises(CommandError) as raised:
            async with attached(cast(Any, environment), TARGET, "nothing"):
                raise AssertionError
        text = "box: unknown detached process nothing\n`exec-server ps box` lists the names"
        assert str(raised.value) == text

    asyncio.run(scene())
    [process] = environment.opened
    assert (process.after, process.calls) == (END, ["aclose"])
