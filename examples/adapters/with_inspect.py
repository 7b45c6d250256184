"""Inspect AI: samples on a machine, each in a directory of its own.

pip install '.[inspect]'

The model is scripted, so that this runs without a network; give `evaluate` a real one.
"""

import sys
import tempfile

from inspect_ai import Task
from inspect_ai import eval as evaluate
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import bash
from inspect_ai.util import SandboxEnvironmentSpec

from exec_server.adapters.inspect import ExecServerSandboxConfig

target = sys.argv[1] if len(sys.argv) > 1 else None  # None is a server of this machine
task = Task(
    dataset=[Sample("Which system is it?", target="Linux", files={"question": "uname"})],
    solver=[use_tools(bash()), generate()],
    scorer=includes(),
    sandbox=SandboxEnvironmentSpec("exec-server", ExecServerSandboxConfig(target=target)),
)
answers = [
    ModelOutput.for_tool_call("scripted", "bash", {"command": "sh question"}),
    ModelOutput.from_content("scripted", "It is Linux."),
]
for answer in answers:
    answer.usage = ModelUsage()  # without it Inspect downloads a tokenizer to count
model = get_model("mockllm/model", custom_outputs=answers)
with tempfile.TemporaryDirectory() as logs:
    (log,) = evaluate(task, model=model, log_dir=logs, display="none")
    print(log.status, log.results.scores[0].metrics["accuracy"].value)
    for message in log.samples[0].messages[-2:]:
        print(f"{message.role}: {message.text.strip()}")
