"""Claude Managed Agents: a worker, or only its tools. pip install '.[claude-managed-agents]'"""

import asyncio
import os
import sys
import tempfile

from anthropic import AsyncAnthropic
from anthropic.lib.environments import EnvironmentWorker
from anthropic.lib.tools.agent_toolset import AgentToolContext

from exec_server.adapters.claude_managed_agents import ExecServerTools

target = sys.argv[1] if len(sys.argv) > 1 else None  # None is a server of this machine


async def work(tools: ExecServerTools, folder: str) -> None:
    """Serve the sessions of an environment until Ctrl-C."""
    worker = EnvironmentWorker(
        AsyncAnthropic(api_key="not used by a worker"),
        environment_id=os.environ["ANTHROPIC_ENVIRONMENT_ID"],
        environment_key=os.environ["ANTHROPIC_ENVIRONMENT_KEY"],
        workdir=folder,  # skills are downloaded to it
        memory_sync_interval=None,
        tools=tools,
    )
    await worker.run()


async def try_out(tools: ExecServerTools, folder: str) -> None:
    """Call some tools as the worker does for a session."""
    made = tools(AgentToolContext(workdir=folder, session_id="sesn_example"))
    named = {tool.name: tool for tool in made}
    try:
        print(await named["bash"].call({"command": "uname -s"}))
        print(await named["write"].call({"file_path": "greeting.txt", "content": "hello\n"}))
        print(await named["bash"].call({"command": "cat greeting.txt"}))
    finally:
        await named["bash"].close()  # the worker does so at the end of a session


with tempfile.TemporaryDirectory() as folder:
    if "ANTHROPIC_ENVIRONMENT_KEY" in os.environ:
        asyncio.run(work(ExecServerTools(target), folder))
    else:
        tools = ExecServerTools(target, root=f"{folder}/sessions", keep_files=False)
        asyncio.run(try_out(tools, folder))
