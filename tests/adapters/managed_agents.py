"""A double of the API of Claude Managed Agents: the queue of work, sessions and their events.

Its answers are built from the types of the package `anthropic`, whose own worker asks for them. A
test is the agent: it calls a tool and waits for the result that the worker posts.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import itertools
import json
import re
import tarfile
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from anthropic import AsyncAnthropic
from anthropic.lib.environments import EnvironmentWorker
from anthropic.types.beta import BetaManagedAgentsSession
from anthropic.types.beta.beta_managed_agents_user_tool_result_event import (
    BetaManagedAgentsUserToolResultEvent,
)
from anthropic.types.beta.environments import (
    BetaSelfHostedWork,
    BetaSelfHostedWorkHeartbeatResponse,
)
from anthropic.types.beta.sessions import (
    BetaManagedAgentsAgentToolUseEvent,
    BetaManagedAgentsSessionStatusIdleEvent,
    BetaManagedAgentsSessionStatusTerminatedEvent,
)
from anthropic.types.beta.skills import BetaSkillVersion

from tests.support.client import scaled
from tests.support.server_internals import eventually

ENVIRONMENT, ENVIRONMENT_KEY = "env_double", "the-environment-key"
# The worker takes one credential for a session from its work item.
SESSION_TOKEN = "the-token-of-the-session"
# Heartbeats of the worker come after half of it, and not more often than each second.
LEASE_SECONDS: Final = 2
_TIME = "2026-11-01T12:00:00Z"
_AGENT = {
    "id": "agent_1",
    "execution_identity": {"type": "service_account"},
    "mcp_servers": [],
    "model": {"id": "scripted"},
    "name": "scripted",
    "skills": [],
    "tools": [],
    "type": "agent",
    "version": 1,
}

# The queue of an environment.
_WORK = r"/v1/environments/(\w+)/work"


class Api:
    """The double; its methods may be called in any thread."""

    def __init__(self) -> None:
        self.url = ""
        self.queue: list[str] = []
        self.sessions: dict[str, dict[str, Any]] = {}
        self.events: dict[str, list[dict[str, Any]]] = {}
        self.stopped: list[str] = []
        self.polls = 0  # of workers that have nothing else to do
        self.lost: set[str] = set()  # work items whose lease another worker has
        self.stopping: set[str] = set()
        self.skills: dict[str, bytes] = {}
        self.authorizations: set[str] = set()
        self.changed = threading.Condition()
        self._numbers = itertools.count(1)

    # ---- the agent ----------------------------------------------------------------------------

    def open_session(self, session_id: str, **facts: Any) -> str:
        """A session with a work item in the queue; `facts` replace those of the session."""
        agent = _AGENT | facts.pop("agent", {})
        whole = {
            "id": session_id,
            "agent": agent,
            "created_at": _TIME,
            "environment_id": ENVIRONMENT,
            "metadata": {},
            "outcome_evaluations": [],
            "resources": [],
            "stats": {},
            "status": "running",
            "type": "session",
            "updated_at": _TIME,
            "usage": {},
            "vault_ids": [],
        }
        with self.changed:
            self.sessions[session_id] = whole | facts
            self.events.setdefault(session_id, [])
            self.queue.append(session_id)
        return session_id

    def begin(self, session_id: str, tool: str, **values: Any) -> str:
        """Let the agent call a tool; returns the id of the call."""
        event = {
            **self._event_facts("agent.tool_use"),
            "input": values,
            "name": tool,
            "evaluated_permission": "allow",
        }
        self._add(session_id, BetaManagedAgentsAgentToolUseEvent.model_validate(event))
        return str(event["id"])

    def result(self, session_id: str, call_id: str) -> tuple[bool, list[dict[str, Any]]]:
        """Wait for the result of a call: whether it is an error, and its content."""

        def posted() -> dict[str, Any] | None:
            return next(
                (e for e in self.events[session_id] if e.get("tool_use_id") == call_id), None
            )

        with self.changed:
            found = self.changed.wait_for(posted, scaled(30))
        assert found, f"{call_id} has no result"
        return bool(found["is_error"]), found["content"]

    def has_result(self, session_id: str, call_id: str) -> bool:
        return any(e.get("tool_use_id") == call_id for e in self.events[session_id])

    async def call(self, session_id: str, tool: str, **values: Any) -> tuple[bool, str]:
        """Call a tool: whether its result is an error, and the text."""
        call_id = self.begin(session_id, tool, **values)
        is_error, content = await asyncio.to_thread(self.result, session_id, call_id)
        return is_error, "".join(block.get("text", f"<{block['type']}>") for block in content)

    async def ok(self, session_id: str, tool: str, **values: Any) -> str:
        is_error, text = await self.call(session_id, tool, **values)
        assert not is_error, text
        return text

    async def error(self, session_id: str, tool: str, **values: Any) -> str:
        is_error, text = await self.call(session_id, tool, **values)
        assert is_error, text
        return text

    def end_turn(self, session_id: str) -> None:
        """The agent is idle: the worker leaves the session after `max_idle`."""
        facts = self._event_facts("session.status_idle") | {"stop_reason": {"type": "end_turn"}}
        if self.sessions[session_id]["status"] == "running":
            self.sessions[session_id]["status"] = "idle"
        self._add(session_id, BetaManagedAgentsSessionStatusIdleEvent.model_validate(facts))

    def terminate(self, session_id: str) -> None:
        facts = self._event_facts("session.status_terminated")
        self.sessions[session_id]["status"] = "terminated"
        self._add(session_id, BetaManagedAgentsSessionStatusTerminatedEvent.model_validate(facts))

    def _event_facts(self, kind: str) -> dict[str, Any]:
        return {"id": f"sevt_{next(self._numbers)}", "processed_at": _TIME, "type": kind}

    def _add(self, session_id: str, event: Any) -> None:
        with self.changed:
            self.events[session_id].append(json.loads(event.model_dump_json()))
            self.changed.notify_all()

    # ---- what the worker asks -----------------------------------------------------------------

    def answer(self, method: str, url: str, body: Any) -> tuple[int, Any]:
        """The status and the answer to a request."""
        path, query = urlsplit(url).path, parse_qs(urlsplit(url).query)
        if found := re.fullmatch(_WORK + r"/(\w+)(?:/(\w+))?", path):
            return self._answer_work(found[2], found[3] or "", query)
        if found := re.fullmatch(r"/v1/sessions/([^/]+)(/events)?", path):
            return self._answer_session(found[1], method, body, has_events=bool(found[2]))
        if path.startswith("/v1/memory_stores/"):
            return 200, {"data": [], "next_page": None}
        if found := re.fullmatch(r"/v1/skills/(\w+)/versions/\w+", path):
            return 200, self._skill_version(found[1])
        return 404, {"error": {"type": "not_found_error", "message": path}}

    def _answer_work(self, work_id: str, verb: str, query: Mapping[str, Any]) -> tuple[int, Any]:
        if work_id == "poll":
            with self.changed:
                self.polls += 1
                return 200, self.work(self.queue.pop(0)) if self.queue else None
        session_id = work_id.removeprefix("work_")
        if verb == "heartbeat":
            if work_id in self.lost:
                return 412, {"error": {"type": "invalid_request_error", "message": "lost"}}
            state = "stopping" if work_id in self.stopping else "active"
            facts = {
                "last_heartbeat": _TIME,
                "lease_extended": True,
                "state": state,
                "ttl_seconds": LEASE_SECONDS,
                "type": "work_heartbeat",
            }
            return 200, _json(BetaSelfHostedWorkHeartbeatResponse, facts)
        if verb == "stop":
            with self.changed:
                self.stopped.append(work_id)
                self.changed.notify_all()
        return 200, self.work(session_id)

    def _answer_session(
        self, session_id: str, method: str, body: Any, *, has_events: bool
    ) -> tuple[int, Any]:
        if session_id not in self.sessions:
            return 404, {"error": {"type": "not_found_error", "message": "no such session"}}
        if not has_events:
            return 200, _json(BetaManagedAgentsSession, self.sessions[session_id])
        if method == "GET":
            return 200, {"data": self.events[session_id], "next_page": None}
        for each in body["events"]:
            facts = self._event_facts("user.tool_result") | each
            self._add(session_id, BetaManagedAgentsUserToolResultEvent.model_validate(facts))
        return 200, {"data": []}

    def work(self, session_id: str) -> Any:
        """The work item of a session."""
        secret = json.dumps({"sessions_token": SESSION_TOKEN}).encode()
        facts = {
            "id": f"work_{session_id}",
            "created_at": _TIME,
            "data": {"id": session_id, "type": "session"},
            "environment_id": ENVIRONMENT,
            "metadata": {},
            "secret": base64.urlsafe_b64encode(secret).decode(),
            "state": "queued",
            "type": "work",
        }
        return _json(BetaSelfHostedWork, facts)

    def add_skill(self, name: str, files: Mapping[str, str]) -> dict[str, Any]:
        """A skill whose archive has these files; returns its entry in an agent."""
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w:gz") as tar:
            for path, text in files.items():
                member = tarfile.TarInfo(f"{name}/{path}")
                member.size, member.mode = len(text.encode()), 0o755
                tar.addfile(member, io.BytesIO(text.encode()))
        self.skills[name] = archive.getvalue()
        return {"skill_id": name, "type": "custom", "version": "1"}

    def _skill_version(self, name: str) -> Any:
        facts = {
            "id": "1",
            "created_at": _TIME,
            "description": "a skill",
            "name": name,
            "skill_id": name,
            "type": "skill_version",
        }
        return _json(BetaSkillVersion, facts)

    # ---- the worker ---------------------------------------------------------------------------

    def worker(self, workdir: Path, tools: Any, **options: Any) -> EnvironmentWorker:
        """The package's own worker; `workdir` is its directory on this machine."""
        client = AsyncAnthropic(api_key="the-applications-key", base_url=self.url)
        options = {"max_idle": 0.05, "memory_sync_interval": None} | options
        return EnvironmentWorker(
            client,
            environment_id=ENVIRONMENT,
            environment_key=ENVIRONMENT_KEY,
            workdir=workdir,
            tools=tools,
            **options,
        )

    @contextlib.asynccontextmanager
    async def working(self, workdir: Path, tools: Any, **options: Any) -> AsyncIterator[None]:
        """A worker that polls the queue; at the end it is cancelled."""
        worker = self.worker(workdir, tools, **options)
        running = asyncio.get_running_loop().create_task(worker.run())
        try:
            yield
        finally:
            running.cancel()
            await asyncio.wait({running})
            await worker._client.close()
        assert running.cancelled(), running.exception()

    async def wait_polled(self, polls: int) -> None:
        """Wait until there were more polls than that: the worker has left its session."""
        await asyncio.to_thread(eventually, "the worker polls", lambda: self.polls > polls, 30)

    async def wait_stopped(self, session_id: str) -> None:
        """Wait until the worker has finished with a session."""
        await asyncio.to_thread(
            eventually, "the work is stopped", lambda: f"work_{session_id}" in self.stopped, 30
        )


def _json(model: Any, facts: Mapping[str, Any]) -> Any:
    return json.loads(model.model_validate(facts).model_dump_json(by_alias=True))


def _is_longer(events: list[Any], count: int) -> bool:
    return len(events) > count


@contextlib.contextmanager
def start_api() -> Iterator[Api]:
    api = Api()
    is_over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if found := re.fullmatch(r"/v1/sessions/([^/]+)/events/stream.*", self.path):
                self._stream(api.events[found[1]])
            elif found := re.fullmatch(r"/v1/skills/(\w+)/versions/\w+/content.*", self.path):
                self._reply(200, api.skills[found[1]], "application/gzip")
            else:
                self._answer(None)

        def do_POST(self) -> None:
            size = int(self.headers.get("content-length") or 0)
            self._answer(json.loads(self.rfile.read(size) or b"null"))

        def _answer(self, body: Any) -> None:
            api.authorizations.add(self.headers["authorization"])
            status, answer = api.answer(self.command, self.path, body)
            self._reply(status, json.dumps(answer).encode(), "application/json")

        def _reply(self, status: int, body: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _stream(self, events: list[dict[str, Any]]) -> None:
            """The events from now on, and pings, so that a client that has left is noticed."""
            self.close_connection = True
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("connection", "close")
            self.end_headers()
            sent = len(events)
            with contextlib.suppress(OSError):
                while not is_over.is_set():
                    with api.changed:
                        api.changed.wait_for(partial(_is_longer, events, sent), 0.1)
                        news, sent = events[sent:], len(events)
                    text = "".join(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in news)
                    self.wfile.write((text or "event: ping\ndata: {}\n\n").encode())

        def log_message(self, *_: object) -> None:
            """Logs nothing, to keep the output of the tests clean."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        api.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield api
        finally:
            is_over.set()
            server.shutdown()
            thread.join()
