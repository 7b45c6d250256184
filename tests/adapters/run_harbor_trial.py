"""A trial of Harbor: its agent Terminus 2 with a scripted model, and a verifier.

The agent types into a tmux of the machine. Harbor works in directories of the root, such as /logs,
so the server has a root of its own.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harbor.agents.terminus_2.terminus_2 import Terminus2
from harbor.llms.base import BaseLLM, LLMResponse
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.trial.trial import Trial

from tests.adapters.coding_task import EDIT, NEVER_ENDS, NUMBER, READ, RUN_TESTS, make_repository
from tests.support.client import Server, descendants, start_server
from tests.support.server_internals import eventually

FOLDER = Path(__file__).parent
# Seconds for the terminal to show what a command has printed, on a busy machine too.
TYPING_SECONDS = 1.0


class ScriptedModel(BaseLLM):
    """Types one line after the other, and says at last that the task is done."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = [*lines, "", ""]  # Terminus asks twice whether the task is done
        self.seen = ""

    async def call(self, prompt: str, **_: Any) -> LLMResponse:
        self.seen += prompt
        line = self._lines.pop(0)
        commands = [{"keystrokes": f"{line}\n", "duration": TYPING_SECONDS}] if line else []
        answer = {"analysis": "", "plan": "", "commands": commands, "task_complete": not line}
        return LLMResponse(content=json.dumps(answer))

    def get_model_context_limit(self) -> int:
        return 1_000_000

    def get_model_output_limit(self) -> int | None:
        return None


class ScriptedTerminus(Terminus2):
    """Terminus 2 with a model that the configuration has the lines of."""

    def __init__(self, *arguments: Any, lines: list[str], **options: Any) -> None:
        self._lines = lines
        super().__init__(*arguments, record_terminal_session=False, **options)

    def _init_llm(self, *_: Any, **__: Any) -> BaseLLM:
        return ScriptedModel(self._lines)

    def _count_total_tokens(self, chat: Any) -> int:
        return 0


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server with a root of its own, and tmux with sockets of its own."""
    root = tmp_path / "root"
    root.mkdir()
    words = ["sh", str(FOLDER / "private_root.sh"), str(root), sys.executable, "-m", "exec_server"]
    monkeypatch.setenv("EXEC_SERVER_COMMAND", shlex.join(words))
    flags = ("--session-retention", "1")  # until what a trial has left behind is killed
    with start_server("ours", *flags, env={"TMUX_TMPDIR": str(tmp_path)}) as started:
        yield started


def trial_config(server: Server, folder: Path, lines: list[str]) -> TrialConfig:
    """A trial in a repository of `folder`, whose verifier runs the tests again."""
    project = folder / "project"
    project.mkdir()
    make_repository(project)
    task = folder / "task"
    for name in ("environment", "tests"):
        (task / name).mkdir(parents=True)
    (task / "instruction.md").write_text("Repair the program.\n")
    (task / "task.toml").write_text('schema_version = "1.4"\n')
    (task / "tests/test.sh").write_text(
        f"cd {project} && {RUN_TESTS} && echo 1 >/logs/verifier/reward.txt\n"
    )
    module = "tests.adapters.run_harbor_trial:ScriptedTerminus"
    return TrialConfig(
        task=TaskConfig(path=task),
        trial_name="trial",
        trials_dir=folder / "trials",
        agent=AgentConfig(import_path=module, model_name="scripted", kwargs={"lines": lines}),
        environment=EnvironmentConfig(
            import_path="exec_server.adapters.harbor:ExecServerEnvironment",
            kwargs={"target": server.url, "workdir": str(project)},
        ),
    )


def test_a_trial(server: Server, tmp_path: Path) -> None:
    config = trial_config(server, tmp_path, [READ, RUN_TESTS, EDIT, RUN_TESTS])

    async def scene() -> Any:
        trial = await Trial.create(config)
        return await trial.run()

    result = asyncio.run(scene())
    assert result.exception_info is None, result.exception_info
    assert result.verifier_result.rewards == {"reward": 1}
    seen = (tmp_path / "trials/trial/agent/trajectory.json").read_text()
    assert "AssertionError: -1" in seen
    assert "all tests pass" in seen


def test_a_cancelled_trial(server: Server, tmp_path: Path) -> None:
    config = trial_config(server, tmp_path, [f"touch {tmp_path}/begun; {NEVER_ENDS}"])

    async def scene() -> None:
        trial = await Trial.create(config)
        running = asyncio.get_running_loop().create_task(trial.run())
        await asyncio.to_thread(eventually, "it begins", (tmp_path / "begun").exists, 60)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(scene())
    eventually("nothing is left", lambda: not _left(server))


def _left(server: Server) -> list[str]:
    """The processes of the trial below the server."""
    lines = []
    for pid in descendants(server.process.pid):
        try:
            lines.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return [line for line in lines if NUMBER in line or "tmux" in line]
