"""A double of OpenAI's Agents API, built from the types of the `openai` package, and the service.

The double answers questions about sessions and signs webhooks. The service is the example program,
with a container program of the test's choice.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import itertools
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from openai.types.beta.agent_session import AgentSession
from openai.types.webhooks.agent_environment_expired_webhook_event import (
    AgentEnvironmentExpiredWebhookEvent,
)
from openai.types.webhooks.agent_environment_failed_webhook_event import (
    AgentEnvironmentFailedWebhookEvent,
)
from openai.types.webhooks.agent_session_action_required_webhook_event import (
    AgentSessionActionRequiredWebhookEvent,
)
from openai.types.webhooks.agent_session_failed_webhook_event import AgentSessionFailedWebhookEvent
from openai.types.webhooks.agent_session_idle_webhook_event import AgentSessionIdleWebhookEvent

from tests.support.client import HttpReply, descendants, http, scaled, survivors
from tests.support.server_internals import eventually

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/cloud_agents"
APPLICATION_KEY, EXECUTOR_KEY = "the-applications-key", "the-executors-key"
WORKSPACE = "/workspace"
PAGE = 20
_AGENT = {
    "id": "agent_1",
    "model": "scripted",
    "multi_agent": {"enabled": False},
    "reasoning": {},
    "service_tier": "auto",
    "text": {"format": {"type": "text"}, "verbosity": "medium"},
    "tools": [],
}
_ACTION = "agent.session.action_required"
# Takes the key as an executor does, writes a line and stays until its stdin is closed.
CONTAINER = """#!/bin/sh
folder=$(dirname "$0")
IFS= read -r key
for word in "$@"; do case "$word" in --environment-id=*) id=${word#*=} ;; esac; done
echo "$id $key" >>"$folder/starts"
if [ -e "$folder/broken" ]; then echo "it is broken" >&2; exit 3; fi
case "$id" in *stubborn) exec sleep 1000 ;; esac
cat >/dev/null
echo "$id" >>"$folder/ends"
"""


class Api:
    """The double: sessions by id, and the secret of its webhooks."""

    def __init__(self) -> None:
        self.sessions: dict[str, AgentSession] = {}
        self.questions: list[str] = []
        self.is_away = False
        self.nonsense: bytes | None = None  # instead of a session
        self.is_misrouted = False  # 404 for everything
        self.missing: set[str] = set()  # sessions that are listed, but not found
        self.listed: bytes | None = None  # instead of the list
        self.states: dict[str, str] = {}  # of environments that are not connected
        self.url = ""
        self.secret = "whsec_" + base64.b64encode(secrets.token_bytes(24)).decode()
        self._numbers = itertools.count(1)

    def open_session(
        self, session_id: str, remote_url: str, *, directory: str = WORKSPACE
    ) -> AgentSession:
        """A session that waits for its environment."""
        environment_id = f"env-{session_id}"
        facts = {
            "id": session_id,
            "object": "agent.session",
            "agent": _AGENT,
            "created_at": 1,
            "last_active_at": 1,
            "metadata": {},
            "vault_ids": [],
            "status": "requires_action",
            "required_actions": [
                {"type": "environment_connection", "environment_id": environment_id}
            ],
            "environment": {
                "type": "self_hosted",
                "id": environment_id,
                "remote_url": remote_url,
                "workspace_directory": directory,
                "capability_directories": [],
            },
        }
        session: AgentSession = AgentSession.model_validate(facts)
        self.sessions[session_id] = session
        return session

    # ---- webhooks -------------------------------------------------------------------------

    def connection_event(self, session_id: str) -> bytes:
        data = {"id": session_id, "required_action": {"type": "environment_connection"}}
        return self._event(AgentSessionActionRequiredWebhookEvent, _ACTION, data)

    def failed_event(self, session_id: str) -> bytes:
        data = {"id": session_id, "environment_type": "self_hosted"}
        return self._event(AgentSessionFailedWebhookEvent, "agent.session.failed", data)

    def idle_event(self, session_id: str) -> bytes:
        data = {"id": session_id, "environment_type": "self_hosted"}
        return self._event(AgentSessionIdleWebhookEvent, "agent.session.idle", data)

    def expired_event(self, environment_id: str) -> bytes:
        kind = "agent.environment.expired"
        return self._event(AgentEnvironmentExpiredWebhookEvent, kind, {"id": environment_id})

    def environment_failed_event(self, environment_id: str) -> bytes:
        kind = "agent.environment.failed"
        return self._event(AgentEnvironmentFailedWebhookEvent, kind, {"id": environment_id})

    def _event(self, model: Any, kind: str, data: Mapping[str, Any]) -> bytes:
        facts = {"id": f"evt_{next(self._numbers)}", "object": "event", "created_at": 1}
        event = model.model_validate({**facts, "type": kind, "data": data})
        text: str = event.model_dump_json(exclude_unset=True)
        return text.encode()

    def signed(self, body: bytes, *, age: float = 0, secret: str = "") -> dict[str, str]:
        """The headers of a webhook, as https://www.standardwebhooks.com has them."""
        key = base64.b64decode((secret or self.secret).removeprefix("whsec_"))
        name, stamp = f"wh_{next(self._numbers)}", str(int(time.time() - age))
        mac = hmac.new(key, f"{name}.{stamp}.".encode() + body, hashlib.sha256).digest()
        signature = f"v1,{base64.b64encode(mac).decode()}"
        return {"webhook-id": name, "webhook-timestamp": stamp, "webhook-signature": signature}

    # ---- questions ------------------------------------------------------------------------

    def answer(self, path: str) -> tuple[int, bytes]:
        """Status and body of the answer to a question."""
        kind, _, name = path.removeprefix("/v1/agents/").partition("/")
        self.questions.append(name or path)
        if self.is_away:
            return 503, b"{}"
        if self.is_misrouted:
            return 404, b"<html>"
        if kind.startswith("sessions?"):
            return 200, self._page(path) if self.listed is None else self.listed
        if kind == "environments":
            return self._environment(name)
        if self.nonsense is not None:
            return 200, self.nonsense
        session = None if name in self.missing else self.sessions.get(name)
        if session is None:
            return 404, b'{"error": {"message": "no such session"}}'
        return 200, session.model_dump_json(by_alias=True).encode()

    def _page(self, path: str) -> bytes:
        """A page of the list, smaller than the service wants."""
        query = dict(parse_qsl(urlsplit(path).query))
        names = list(self.sessions)
        first = names.index(query["after"]) + 1 if "after" in query else 0
        shown, left = names[first : first + PAGE], len(names) - first - PAGE
        data = [self.sessions[name].model_dump(by_alias=True) for name in shown]
        return as_json({"object": "list", "data": data, "has_more": left > 0})

    def _environment(self, name: str) -> tuple[int, bytes]:
        if name.removeprefix("env-") not in self.sessions or self.states.get(name) == "missing":
            return 404, b'{"error": {"message": "no such environment"}}'
        state = self.states.get(name, "connected")
        facts = {"id": name, "object": "agent.environment", "status": state, "type": "self_hosted"}
        return 200, as_json({**facts, "files": [], "plugins": [], "skills": []})


@contextlib.contextmanager
def start_api() -> Iterator[Api]:
    api = Api()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.headers["authorization"] == f"Bearer {APPLICATION_KEY}"
            assert self.headers["openai-beta"] == "agents=v1"
            self._reply(*api.answer(self.path))

        def _reply(self, status: int, body: bytes) -> None:
            self.send_response(status)
            kind = "text/html" if body.startswith(b"<") else "application/json"
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            # The package would wait longer before it repeats a request.
            self.send_header("retry-after-ms", "1")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Logs nothing, to keep the output of the tests clean."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        api.url = f"http://127.0.0.1:{server.server_port}/v1"
        try:
            yield api
        finally:
            server.shutdown()
            thread.join()


class Service:
    """The running example."""

    def __init__(
        self, api: Api, folder: Path, container: Path | str, *flags: str, key: str = EXECUTOR_KEY
    ) -> None:
        self.api, self.folder = api, folder
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop()
        words = ["--folder", str(folder), "--listen", "127.0.0.1:0", "--bwrap", str(container)]
        words += ["--allow-root"] if os.geteuid() == 0 else []
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", str(EXAMPLE / "service.py"), *words, *flags],
            env={
                "PATH": os.environ["PATH"],
                "OPENAI_BASE_URL": api.url,
                "OPENAI_API_KEY": APPLICATION_KEY,
                "OPENAI_WEBHOOK_SECRET": api.secret,
                "OPENAI_EXECUTOR_API_KEY": key,
            },
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().decode().strip()
        assert self.url, self.log()

    def log(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def send(self, body: bytes, headers: Mapping[str, str] | None = None) -> int:
        """Deliver a webhook; signed as it should be, unless there are headers."""
        headers = self.api.signed(body) if headers is None else headers
        lines = ["POST /webhook HTTP/1.1", "host: hooks", f"content-length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return self.request("\r\n".join([*lines, "", ""]).encode("latin-1") + body).status

    def request(self, request: bytes) -> HttpReply:
        return http(self.url.removesuffix("/webhook"), request)

    def dial(self) -> socket.socket:
        host, _, port = self.url.removeprefix("http://").partition("/")[0].partition(":")
        return socket.create_connection((host, int(port)), scaled(20))

    def places(self, session_id: str = "") -> list[Path]:
        """The directories of a session, or of all."""
        quoted = f'"{session_id}"'
        records = self.folder.glob("*/session.json")
        return [path.parent for path in records if not session_id or quoted in path.read_text()]

    def wait_logged(self, text: str, times: int = 1) -> None:
        eventually(f"{text!r} is logged", lambda: self.log().count(text) >= times, 20)

    def stop(self, number: int = signal.SIGTERM) -> str:
        """End the service; returns its log. No process may be left."""
        family = descendants(self.process.pid)
        self.process.send_signal(number)
        code = self.process.wait(scaled(20))
        text = self.log()
        eventually("no process is left", lambda: not survivors(family), 20)
        assert code == (0 if number == signal.SIGTERM else -number), text
        assert "Traceback" not in text, text
        return text

    def release(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._errors.close()


@contextlib.contextmanager
def start_service(
    api: Api, folder: Path, container: Path | str, *flags: str, key: str = EXECUTOR_KEY
) -> Iterator[Service]:
    service = Service(api, folder, container, *flags, key=key)
    try:
        yield service
        if service.process.poll() is None:
            service.stop()
    finally:
        service.release()


class Container:
    """A container program that only notes its starts and ends."""

    def __init__(self, folder: Path) -> None:
        self.program = folder / "bwrap"
        self.program.write_text(CONTAINER)
        self.program.chmod(0o755)

    def starts(self, session_id: str = "") -> list[str]:
        """A line for each start: the environment and the key; of one session, or of all."""
        return self._lines("starts", session_id)

    def ends(self, session_id: str = "") -> list[str]:
        return self._lines("ends", session_id)

    def _lines(self, name: str, session_id: str) -> list[str]:
        path = self.program.with_name(name)
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if not session_id or line.split()[0] == f"env-{session_id}"]

    def wait_started(self, count: int, session_id: str = "") -> None:
        what = f"{count} executors have started"
        eventually(what, lambda: len(self.starts(session_id)) >= count, 30)

    def wait_ended(self, count: int, session_id: str = "") -> None:
        what = f"{count} executors have ended"
        eventually(what, lambda: len(self.ends(session_id)) >= count, 30)


def deep_json(depth: int) -> bytes:
    """Arrays in arrays."""
    return b"[" * depth + b"]" * depth


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()
