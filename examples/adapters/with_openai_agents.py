"""OpenAI Agents SDK: an agent in a sandbox. pip install '.[openai-agents]'

The model is scripted, so that this runs without a network; give `SandboxAgent` a real one.
"""

import asyncio
import sys

from agents import RunConfig, Runner, set_tracing_disabled
from agents.sandbox import SandboxAgent, SandboxRunConfig
from agents.testing import ScriptedModel, assistant_message, function_call

from exec_server.adapters.openai_agents import (
    ExecServerSandboxClient,
    ExecServerSandboxClientOptions,
)

target = sys.argv[1] if len(sys.argv) > 1 else None  # None is a server of this machine
set_tracing_disabled(True)
command = {"cmd": "uname -s; pwd >&2", "login": False}
model = ScriptedModel(
    [[function_call("exec_command", command, call_id="1")], [assistant_message("It is Linux.")]]
)
sandbox = SandboxRunConfig(
    client=ExecServerSandboxClient(), options=ExecServerSandboxClientOptions(target=target)
)
agent = SandboxAgent("engineer", model=model)
done = asyncio.run(Runner.run(agent, "Which system is it?", run_config=RunConfig(sandbox=sandbox)))
output = done.new_items[-2].output
print("Process exited with code 0" in output, "Linux" in output)
print(done.final_output)
