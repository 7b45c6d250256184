"""A scripted model: a local HTTP server that speaks enough of the Responses API for Codex.

Each request of the client is answered with the next step of a script, as a stream of
server-sent events; what the client reports about the calls of a step is kept by call id.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Item = dict[str, Any]


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool the client offers; `arguments` is a text for free-form tools."""

    id: str
    tool: str
    arguments: dict[str, Any] | str
    namespace: str | None = None

    def item(self) -> Item:
        """The output item the model would have streamed."""
        named = {"id": f"item-{self.id}", "call_id": self.id, "name": self.tool}
        if self.namespace is not None:
            named["namespace"] = self.namespace
        if isinstance(self.arguments, str):
            return {"type": "custom_tool_call", "input": self.arguments, **named}
        return {"type": "function_call", "arguments": json.dumps(self.arguments), **named}


# A step may depend on an earlier report of the client, such as the id of a running command.
Step = Sequence[ToolCall] | Callable[[dict[str, str]], Sequence[ToolCall]]


@dataclass
class Model:
    """The script, and the requests of the client."""

    script: list[Step]
    url: str = ""
    outputs: dict[str, str] = field(default_factory=dict)
    images: dict[str, str] = field(default_factory=dict)
    tools: list[str] = field(default_factory=list)
    instructions: str = ""
    observer: Callable[[], None] = lambda: None
    requests: int = 0
    failure: Exception | None = None

    def answer(self, request: Item) -> list[Item]:
        """Takes in a request and returns the items of the next step."""
        self.tools = [tool.get("name", tool["type"]) for tool in request.get("tools", [])]
        self.observer()
        if not self.requests:
            self.instructions = json.dumps(request["input"])
        for item in request["input"]:
            if item["type"] in ("function_call_output", "custom_tool_call_output"):
                self._take(item["call_id"], item["output"])
        step = self.script[self.requests] if self.requests < len(self.script) else ()
        self.requests += 1
        calls = step(self.outputs) if callable(step) else step
        if calls:
            return [call.item() for call in calls]
        text = {"type": "output_text", "text": "done", "annotations": []}
        return [{"type": "message", "id": "item-end", "role": "assistant", "content": [text]}]

    def _take(self, call_id: str, output: str | list[Item]) -> None:
        if isinstance(output, str):
            self.outputs[call_id] = output
            return
        texts = [part["text"] for part in output if part["type"] == "input_text"]
        self.outputs[call_id] = "".join(texts)
        for part in output:
            if part["type"] == "input_image":
                self.images[call_id] = part["image_url"]


def _events(items: Sequence[Item], number: int) -> bytes:
    """The stream of one whole response."""
    response = {"id": f"response-{number}"}
    usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
    events: list[Item] = [{"type": "response.created", "response": response}]
    for index, item in enumerate(items):
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    events.append({"type": "response.completed", "response": response | {"usage": usage}})
    lines = (f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)
    return "".join(lines).encode()


@contextlib.contextmanager
def serve(script: Sequence[Step]) -> Iterator[Model]:
    """Runs a model on a free loopback port; a fault in the script is raised at the end."""
    model = Model(list(script))
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            try:
                with lock:
                    events = _events(model.answer(json.loads(body)), model.requests)
            except Exception as error:
                model.failure = error
                self.send_error(400)
                return
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            self.wfile.write(events)

        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            """Logs nothing, to keep the output of the tests clean."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        model.url = f"http://127.0.0.1:{server.server_port}/v1"
        try:
            yield model
        finally:
            server.shutdown()
            thread.join()
    if model.failure is not None:
        raise model.failure
