"""A small MCP server over HTTP, with one tool that returns its text and the caller's token."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Message = dict[str, Any]


def _result(request: Message, authorization: str) -> Message:
    if request["method"] == "initialize":
        return {
            "protocolVersion": request["params"]["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "echo", "version": "1"},
        }
    if request["method"] == "tools/list":
        schema = {"type": "object", "properties": {"text": {"type": "string"}}}
        return {"tools": [{"name": "echo", "description": "Echoes.", "inputSchema": schema}]}
    text = f"{request['params']['arguments']['text']} {authorization}"
    return {"content": [{"type": "text", "text": text}]}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if "id" not in request:
            self._reply(202, b"")
            return
        result = _result(request, self.headers.get("authorization", "nobody"))
        answer = {"jsonrpc": "2.0", "id": request["id"], "result": result}
        self._reply(200, json.dumps(answer).encode())

    def do_GET(self) -> None:
        self._reply(405, b"")

    def do_DELETE(self) -> None:
        self._reply(405, b"")

    def _reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Logs nothing, to keep the output of the tests clean."""


@contextlib.contextmanager
def serve_mcp() -> Iterator[str]:
    """Runs the server on a free loopback port; yields its URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/mcp"
        finally:
            server.shutdown()
            thread.join()
