"""The loop of a coding agent: streamed commands, edits, a patch, a web server, its port, a REPL.

The model is a script here. A real one gets TOOLS and the messages so far, and answers with the next
call; everything else stays as it is.
"""

import asyncio
import re
import sys
import urllib.request
from collections.abc import Iterator

from exec_server import Chunk, Environment, ExecServerError, Process, connect

APP = """\
import http.server

GREETING = "Hello, Mars"


class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(GREETING.encode())

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    server = http.server.HTTPServer(("127.0.0.1", 0), Page)
    print("listening on port", server.server_port, flush=True)
    server.serve_forever()
"""
PATCH = """\
*** Begin Patch
*** Add File: test_app.py
+import unittest
+
+import app
+
+
+class Greeting(unittest.TestCase):
+    def test_planet(self):
+        self.assertEqual(app.GREETING, "Hello, World")
*** End Patch
"""
# Characters of output for the model.
MAX_OUTPUT = 4000


class Tools:
    """The tools of one conversation; results and errors are texts."""

    def __init__(self, env: Environment, folder: str) -> None:
        self._env = env
        self._folder = folder
        self._server: Process | None = None
        self._repl: Process | None = None

    async def shell(self, command: str) -> str:
        """Run a shell command; the user sees the output while it arrives."""

        def show(chunk: Chunk) -> None:
            for line in chunk.data.decode(errors="replace").splitlines():
                print("   |", line)

        result = await self._env.shell(
            f"exec 2>&1\n{command}", cwd=self._folder, on_output=show, timeout=60
        )
        return f"{result.head_and_tail(MAX_OUTPUT).strip()} (exit code {result.exit_code})"

    async def edit(self, path: str, old: str, new: str) -> str:
        """Replace a text that occurs once in a file."""
        await self._env.files.edit(f"{self._folder}/{path}", old, new)
        return "edited"

    async def patch(self, patch: str) -> str:
        """Apply a patch: a unified diff, or the format of Codex."""
        changes = await self._env.files.apply_patch(patch, root=self._folder)
        return ", ".join(change.kind for change in changes)

    async def serve(self, command: str) -> str:
        """Start a web server in the background, and fetch its page through a forwarded port."""
        self._server = await self._env.start(["sh", "-c", f"exec {command}"], cwd=self._folder)
        ready = await self._server.wait_for_output(re.compile(rb"port \d+\n"), timeout=30)
        async with self._env.forward_port(int(ready.split()[1])) as local:
            return await asyncio.to_thread(_fetch, local.url)

    async def python(self, code: str) -> str:
        """Evaluate a line in a Python REPL that keeps its state."""
        if self._repl is None:
            quiet = {"TERM": "dumb", "PYTHON_BASIC_REPL": "1"}
            self._repl = await self._env.start(
                ["python3", "-q"], cwd=self._folder, tty=True, env=quiet
            )
            await self._repl.read_until(">>> ", timeout=30)
        await self._repl.write(code.encode() + b"\n")
        answer = (await self._repl.read_until(">>> ", timeout=30)).decode()
        return answer.removesuffix(">>> ").partition("\r\n")[2].strip()  # without the echo


def _fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as response:
        return str(response.read().decode())


NAMES = ("shell", "edit", "patch", "serve", "python")
TOOLS = {name: getattr(Tools, name).__doc__ for name in NAMES}  # for the model


def scripted_model() -> Iterator[tuple[str, dict[str, str]]]:
    """A model that knows what to do: names of tools, and their arguments."""
    yield "shell", {"command": "grep -n Hello app.py"}
    yield "edit", {"path": "app.py", "old": "Hello, Venus", "new": "Hello, World"}  # a mistake
    yield "edit", {"path": "app.py", "old": "Hello, Mars", "new": "Hello, World"}
    yield "patch", {"patch": PATCH}
    yield "shell", {"command": "python3 -m unittest 2>&1 | tail -n 1"}
    yield "serve", {"command": "python3 app.py"}
    yield "python", {"code": "import app"}
    yield "python", {"code": "app.GREETING.upper()"}


async def main(target: str | None) -> None:
    async with connect(target) if target else Environment.local() as env:
        folder = (await env.run(["mktemp", "-d"], check=True)).text.strip()
        await env.files.write_text(f"{folder}/app.py", APP)
        tools = Tools(env, folder)
        for name, arguments in scripted_model():
            try:
                answer = await getattr(tools, name)(**arguments)
            except (ExecServerError, TimeoutError) as error:
                answer = f"failed: {error}"  # for the model, which can try again
            print(f"{name}: {answer.replace(folder, 'FOLDER')}")
        await env.files.remove(folder, recursive=True)
    # Leaving the block has killed the web server and the REPL.


asyncio.run(main(*(sys.argv[1:2] or [None])))
