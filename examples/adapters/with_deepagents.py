"""deepagents: an agent whose tools work on a machine. pip install '.[deepagents]'

The model is scripted, so that this runs without a network; give `create_deep_agent` a real one.
"""

import sys
from typing import Any

from deepagents import create_deep_agent
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage

from exec_server.adapters.deepagents import ExecServerSandbox


class ScriptedModel(GenericFakeChatModel):
    def bind_tools(self, tools: Any, **options: Any) -> Any:
        return self


target = sys.argv[1] if len(sys.argv) > 1 else None  # None is a server of this machine
call = {"name": "execute", "args": {"command": "uname -s"}, "id": "1"}
model = ScriptedModel(messages=iter([AIMessage("", tool_calls=[call]), AIMessage("It is Linux.")]))

with ExecServerSandbox(target) as sandbox:
    agent = create_deep_agent(model=model, backend=sandbox)
    done = agent.invoke({"messages": [{"role": "user", "content": "Which system is it?"}]})
    for message in done["messages"][-2:]:
        print(f"{message.type}: {message.text.splitlines()[0]}")
