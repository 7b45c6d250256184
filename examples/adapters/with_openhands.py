"""OpenHands SDK: an agent whose tool runs commands on a machine.

pip install '.[openhands]'

The model is scripted, so that this runs without a network; give `Agent` a real one.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

from openhands.sdk import Agent, Conversation, Tool
from openhands.sdk.llm import Message, MessageToolCall, TextContent
from openhands.sdk.testing import TestLLM
from openhands.sdk.tool import Action, Observation, ToolDefinition, ToolExecutor, register_tool

from exec_server.adapters.openhands import ExecServerWorkspace


class RunAction(Action):
    command: str


class RunObservation(Observation):
    pass


class RunExecutor(ToolExecutor[RunAction, RunObservation]):
    def __init__(self, workspace: ExecServerWorkspace) -> None:
        self.workspace = workspace

    def __call__(self, action: RunAction, conversation: Any = None) -> RunObservation:
        done = self.workspace.execute_command(action.command)
        print(f"{action.command}: {done.stdout.strip()}")
        return RunObservation(content=[TextContent(text=done.stdout + done.stderr)])

    def interrupt(self) -> None:
        self.workspace.close()  # kills the running command


class RunTool(ToolDefinition[RunAction, RunObservation]):
    @classmethod
    def create(cls, conv_state: Any, **_: Any) -> Sequence[ToolDefinition[Any, Any]]:
        tool = cls(
            description="Runs a command.",
            action_type=RunAction,
            observation_type=RunObservation,
            executor=RunExecutor(conv_state.workspace),
        )
        return [tool]


target = sys.argv[1] if len(sys.argv) > 1 else None  # None is a server of this machine
register_tool(RunTool.name, RunTool)
call = MessageToolCall(
    id="1", name=RunTool.name, arguments=json.dumps({"command": "uname -s"}), origin="completion"
)
script = [
    Message(role="assistant", content=[TextContent(text="")], tool_calls=[call]),
    Message(role="assistant", content=[TextContent(text="It is Linux.")]),
]
agent = Agent(llm=TestLLM.from_messages(script), tools=[Tool(name=RunTool.name)])
with ExecServerWorkspace(working_dir="/tmp", target=target) as workspace:
    conversation = Conversation(agent=agent, workspace=workspace, visualizer=None)
    conversation.send_message("Which system is it?")
    conversation.run()
    print(conversation.state.execution_status.value)
