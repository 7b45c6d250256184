"""mini-swe-agent: an agent that works on a machine. pip install '.[mini-swe-agent]'

The model is scripted, so that this runs without a network. A configuration file has the same
options in its `environment:`.
"""

import sys

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments import get_environment
from minisweagent.models.test_models import DeterministicModel, make_output

target = sys.argv[1] if len(sys.argv) > 1 else None  # None is a server of this machine
environment = get_environment(
    {
        "environment_class": "exec_server.adapters.mini_swe_agent.ExecServerEnvironment",
        "target": target,
        "cwd": "/tmp",
    }
)
commands = ["uname -s", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; uname -s"]
model = DeterministicModel(outputs=[make_output("", [{"command": text}]) for text in commands])
agent = DefaultAgent(
    model,
    environment,
    system_template="You work in {{cwd}} on {{system}}.",
    instance_template="{{task}}",
)
print(agent.run("Which system is it?"))
environment.close()
