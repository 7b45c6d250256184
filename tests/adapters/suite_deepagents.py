"""LangChain's suite for sandboxes, unmodified, with deepagents."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_tests.integration_tests import SandboxIntegrationTests

from exec_server.adapters import deepagents
from exec_server.adapters.deepagents import ExecServerSandbox
from exec_server.client.commands import OutputLimit
from tests.adapters.coding_task import NEVER_ENDS
from tests.adapters.interrupts import nothing_is_left
from tests.support.server_internals import eventually

# The suite works here and leaves its files.
FOLDER = "/tmp/test_sandbox_ops"


class TestSandbox(SandboxIntegrationTests):
    @pytest.fixture(scope="class")
    def sandbox(self, server_url: str) -> Iterator[Any]:
        # The tools of BaseSandbox run `python3`: this interpreter, not a slow wrapper of it.
        path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
        with ExecServerSandbox(server_url, env={"PATH": path}) as sandbox:
            sandbox.execute(f"rm -rf {FOLDER}")  # of a run that was killed
            yield sandbox
            sandbox.execute(f"rm -rf {FOLDER}")


def test_a_cancelled_coroutine_kills_its_command(server_url: str, tmp_path: Path) -> None:
    """As an agent that uses asyncio is cancelled; the sandbox goes on."""

    async def scene(sandbox: ExecServerSandbox) -> None:
        work = sandbox.aexecute(f"touch begun; {NEVER_ENDS}")
        running = asyncio.get_running_loop().create_task(work)
        await asyncio.to_thread(eventually, "it begins", (tmp_path / "begun").exists)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert (await sandbox.aexecute("echo again")).output == "again\n"
        late = await sandbox.aexecute(NEVER_ENDS, timeout=1)
        assert (late.exit_code, "killed after 1 s" in late.output) == (124, True)

    with ExecServerSandbox(server_url, cwd=str(tmp_path)) as sandbox:
        asyncio.run(scene(sandbox))
        assert nothing_is_left(server_url)


def test_cut_output_of_a_timeout_is_truncated(
    server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deepagents, "OUTPUT", OutputLimit(head=2, tail=2))
    with ExecServerSandbox(server_url) as sandbox:
        short = sandbox.execute("echo 12; sleep 600", timeout=1)
        long = sandbox.execute("echo 123456789; sleep 600", timeout=1)
    assert (short.exit_code, short.truncated) == (124, False)
    assert (long.exit_code, long.truncated) == (124, True)


def test_a_path_that_is_none_spoils_no_other_one(server_url: str, tmp_path: Path) -> None:
    good = [str(tmp_path / "a"), str(tmp_path / "new/b")]
    bad = [f"{tmp_path}/nul\0", f"{tmp_path}/lone\ud800", "relative"]
    paths = [good[0], *bad, good[1]]
    with ExecServerSandbox(server_url) as sandbox:
        written = sandbox.upload_files([(path, b"text") for path in paths])
        read = sandbox.download_files(paths)
    errors = [None, *["invalid_path"] * 3, None]
    assert [each.error for each in written] == errors
    assert [(each.error, each.content) for each in read] == [
        (error, None if error else b"text") for error in errors
    ]
