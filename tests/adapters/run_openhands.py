"""The OpenHands SDK with a scripted model, whose tool runs commands in our workspace."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from openhands.sdk import Agent, Conversation, Tool
from openhands.sdk.llm import Message, MessageToolCall, TextContent
from openhands.sdk.testing import TestLLM
from openhands.sdk.tool import Action, Observation, ToolDefinition, ToolExecutor, register_tool

from exec_server.adapters.openhands import ExecServerWorkspace
from tests.adapters.coding_task import (
    COUNT_LEFT,
    EDIT,
    FIXED,
    NEVER_ENDS,
    READ,
    RUN_TESTS,
    make_repository,
)
from tests.adapters.interrupts import nothing_is_left
from tests.support.server_internals import eventually


class RunAction(Action):
    command: str


class RunObservation(Observation):
    pass


class RunExecutor(ToolExecutor[RunAction, RunObservation]):
    def __init__(self, workspace: ExecServerWorkspace) -> None:
        self.workspace = workspace

    def __call__(self, action: RunAction, conversation: Any = None) -> RunObservation:
        done = conversation.workspace.execute_command(action.command)
        text = f"{done.stdout}{done.stderr}(exit code {done.exit_code})"
        return RunObservation(content=[TextContent(text=text)])

    def interrupt(self) -> None:
        """Called by `conversation.interrupt` while a command runs; closing kills it."""
        self.workspace.close()


class RunTool(ToolDefinition[RunAction, RunObservation]):
    @classmethod
    def create(cls, conv_state: Any, **_: Any) -> Sequence[ToolDefinition[Any, Any]]:
        return [
            cls(
                description="Runs a command.",
                action_type=RunAction,
                observation_type=RunObservation,
                executor=RunExecutor(conv_state.workspace),
            )
        ]


@pytest.fixture
def workspace(server_url: str, tmp_path: Path) -> Iterator[ExecServerWorkspace]:
    folder = make_repository(tmp_path)
    with ExecServerWorkspace(working_dir=folder, target=server_url) as made:
        yield made


def _call(number: int, command: str) -> Message:
    arguments = json.dumps({"command": command})
    call = MessageToolCall(
        id=f"call-{number}", name=RunTool.name, arguments=arguments, origin="completion"
    )
    return Message(role="assistant", content=[TextContent(text="")], tool_calls=[call])


def test_an_agent_repairs_a_program(workspace: ExecServerWorkspace, tmp_path: Path) -> None:
    register_tool(RunTool.name, RunTool)
    commands = [READ, RUN_TESTS, EDIT, RUN_TESTS]
    steps = [_call(number, command) for number, command in enumerate(commands)]
    steps.append(Message(role="assistant", content=[TextContent(text="repaired")]))
    agent = Agent(llm=TestLLM.from_messages(steps), tools=[Tool(name=RunTool.name)])
    conversation = Conversation(agent=agent, workspace=workspace, visualizer=None)
    conversation.send_message("Repair the program.")
    conversation.run()
    seen = "".join(event.model_dump_json() for event in conversation.state.events)
    assert "AssertionError: -1" in seen
    assert "all tests pass" in seen
    assert (tmp_path / "app.py").read_text() == FIXED


def test_an_interrupted_agent(
    workspace: ExecServerWorkspace, server_url: str, tmp_path: Path
) -> None:
    """The run is paused, the command is killed, and the workspace goes on."""
    register_tool(RunTool.name, RunTool)
    steps = [_call(1, f"touch begun; {NEVER_ENDS}")]
    agent = Agent(llm=TestLLM.from_messages(steps), tools=[Tool(name=RunTool.name)])
    conversation = Conversation(agent=agent, workspace=workspace, visualizer=None)
    conversation.send_message("Repair the program.")

    async def scene() -> None:
        running = asyncio.get_running_loop().create_task(conversation.arun())
        await asyncio.to_thread(eventually, "it begins", (tmp_path / "begun").exists)
        conversation.interrupt()
        async with asyncio.timeout(60):
            await running

    asyncio.run(scene())
    assert conversation.state.execution_status.value == "paused"
    assert nothing_is_left(server_url)
    assert workspace.execute_command("echo again").stdout == "again\n"


def test_commands_and_files(workspace: ExecServerWorkspace, tmp_path: Path) -> None:
    late = workspace.execute_command(NEVER_ENDS, timeout=1)
    assert (late.stdout, late.exit_code, late.timeout_occurred) == ("begun\n", -1, True)
    assert workspace.execute_command(COUNT_LEFT).stdout == "0\n"
    done = workspace.file_upload(tmp_path / "app.py", "a/copy.py")
    assert (done.success, done.destination_path) == (True, f"{tmp_path}/a/copy.py")
    back = workspace.file_download("a/copy.py", tmp_path / "back/app.py")
    assert (back.success, (tmp_path / "back/app.py").exists()) == (True, True)
    missing = workspace.file_download("missing", tmp_path / "x")
    assert not missing.success
    assert "No such file" in str(missing.error)


def test_git(workspace: ExecServerWorkspace, tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    workspace.execute_command(f"{EDIT}; rm test_app.py; touch new.py")
    changes = {str(change.path): change.status.value for change in workspace.git_changes(".")}
    assert changes == {"app.py": "UPDATED", "test_app.py": "DELETED", "new.py": "ADDED"}
    diff = workspace.git_diff("app.py")
    assert (diff.modified, "a - b" in str(diff.original)) == (FIXED, True)
    assert workspace.git_diff("new.py").original is None
    folder = tmp_path / "sub/deep"
    folder.mkdir(parents=True)
    (folder / "latin1.txt").write_bytes(b"caf\xe9\n")
    subprocess.run([*git, "mv", "app.py", "sub/app.py"], check=True)
    below = {str(change.path): change.status.value for change in workspace.git_changes("sub")}
    assert below == {"app.py": "ADDED", "deep/latin1.txt": "ADDED"}
    assert workspace.git_diff("sub/deep/latin1.txt").modified == "caf\ufffd\n"


def test_a_stored_workspace_connects_again(workspace: ExecServerWorkspace) -> None:
    stored = workspace.model_dump_json()
    again = ExecServerWorkspace.model_validate_json(stored)
    assert again.execute_command("echo $PWD").stdout == f"{workspace.working_dir}\n"
    again.close()
