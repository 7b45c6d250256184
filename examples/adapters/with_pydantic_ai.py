"""Pydantic AI: an agent with a workspace on a machine. pip install '.[pydantic-ai]'

The model is scripted, so that this runs without a network; give `Agent` a real one.
"""

import asyncio
import sys

from pydantic_ai import Agent, RunContext
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

from exec_server.adapters.pydantic_ai import ExecServerWorkspace

target = sys.argv[1] if len(sys.argv) > 1 else None  # None is a server of this machine


def scripted(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
    if len(messages) == 1:
        return ModelResponse([ToolCallPart("shell", {"command": "uname -s"})])
    return ModelResponse([TextPart(f"It is {messages[-1].parts[0].content}.")])


agent = Agent(FunctionModel(scripted))


@agent.tool
async def shell(context: RunContext[None], command: str) -> str:
    """Run a command in the workspace."""
    return (await context.workspace.run(command, shell=True)).stdout.strip()


async def main() -> None:
    workspace = ExecServerWorkspace(target)
    done = await agent.run("Which system is it?", workspace=workspace)
    print(done.output)
    await workspace.destroy()


asyncio.run(main())
