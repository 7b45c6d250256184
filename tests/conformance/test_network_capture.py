"""Replays the recorded traffic of a client with a managed network, line by line, when at hand.

The client is the newest Codex with `network_proxy` switched on: what it sends before and around a
command, and the command itself in its sandbox with the proxies as the only network.
"""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.test_transcripts import TRANSCRIPTS
from tests.support.client import Client, start_server

Message = dict[str, Any]
_CAPTURE = TRANSCRIPTS.parent / "captures" / "network_proxy.jsonl"
_ROOT = "/tmp/exec-demo"

pytestmark = pytest.mark.skipif(not _CAPTURE.is_file(), reason=f"no capture {_CAPTURE}")


class CaptureReplay:
    """The recorded lines against one server."""

    def __init__(self, client: Client, root: Path, *, has_placeholders: bool) -> None:
        self._client = client
        self._root = root
        self._has_placeholders = has_placeholders
        self._methods: dict[int, str] = {}
        self._output = b""
        self._decisions = 0

    def play(self, lines: list[str]) -> None:
        for number, line in enumerate(lines, 1):
            entry = json.loads(line)
            if entry["kind"] != "text":
                continue
            try:
                if entry["dir"] == "c2s":
                    self._send(entry["msg"])
                else:
                    self._receive(entry["msg"])
            except AssertionError as problem:
                raise AssertionError(f"line {number}: {line[:600]}\n{problem}") from problem

    def _send(self, recorded: Message) -> None:
        text = json.dumps(recorded)
        for folder in (_ROOT, "/tmp", ""):
            # The client looks for a repository in all parents; those of this run may be in one.
            text = text.replace(f"file://{folder}/.git", f"file://{self._root}{folder}/.git")
        message = json.loads(text.replace(_ROOT, str(self._root)))
        if "id" in message:
            self._methods[message["id"]] = message["method"]
        self._client.send(message)

    def _receive(self, recorded: Message) -> None:
        if "method" not in recorded:
            self._compare_answer(recorded)
        elif recorded["method"] == "process/output":
            self._compare_output(recorded["params"])
        elif recorded["method"] == "network/policyDecision":
            self._compare_decision(recorded["params"])
        elif recorded["method"] == "fs/missingChanged":
            # The sandbox of the reference creates the protected names for a moment.
            if self._has_placeholders:
                self._client.wait_for(lambda notice: notice == recorded)
        else:
            self._compare_end(recorded)

    def _compare_answer(self, recorded: Message) -> None:
        actual = self._client.answer(recorded["id"])
        method = self._methods[recorded["id"]]
        if method == "initialize":
            wanted = recorded["result"]["environmentInfo"]
            info = actual["result"]["environmentInfo"]
            assert info.keys() == wanted.keys()
            assert wanted["capabilities"].items() <= info["capabilities"].items()
        elif method == "environmentConfig/read":
            # Other members name this machine.
            for name in ("config", "requirements"):
                assert actual["result"][name].keys() == recorded["result"][name].keys()
        else:
            assert actual == recorded

    def _compare_output(self, params: Message) -> None:
        """Chunks may be cut in other places, so the bytes so far are compared."""
        self._output += base64.b64decode(params["chunk"])
        process_id = params["processId"]

        def received() -> bytes:
            notices = [
                notice["params"]
                for notice in self._client.notifications
                if notice["method"] == "process/output"
                and notice["params"]["processId"] == process_id
            ]
            notices.sort(key=lambda each: each["seq"])
            assert {each["stream"] for each in notices} <= {"stdout"}
            data = b"".join(base64.b64decode(each["chunk"]) for each in notices)
            return re.sub(rb"127\.0\.0\.1:\d+", b"127.0.0.1:PORT", data)

        if len(received()) < len(self._output):
            self._client.wait_for(lambda _: len(received()) >= len(self._output))
        assert received()[: len(self._output)] == self._output

    def _compare_decision(self, recorded: Message) -> None:
        found = self._client.wait_for(lambda each: each["method"] == "network/policyDecision")
        actual = dict(found["params"])
        assert re.fullmatch(r"[-0-9]{10}T[:0-9]{8}\.[0-9]{3}Z", actual.pop("timestamp"))
        assert re.fullmatch(r"127\.0\.0\.1:\d+", actual.pop("client"))
        wanted = {k: v for k, v in recorded.items() if k not in ("timestamp", "client")}
        assert actual == wanted
        self._decisions += 1

    def _compare_end(self, recorded: Message) -> None:
        """An end of the process; its number depends on how the output was cut."""
        params = recorded["params"]
        actual = dict(self._client.notice(recorded["method"], params["processId"]))
        chunks = sum(each["method"] == "process/output" for each in self._client.notifications)
        place = {"process/exited": 1, "process/closed": 2}[recorded["method"]]
        assert actual == params | {"seq": chunks + place}


def test_network_capture(kind: str, folder: Path) -> None:
    (folder / "network_proxy" / "ws").mkdir(parents=True)
    home = folder / "home"  # without files that a login shell would run
    home.mkdir()
    with (
        start_server(kind, cwd=folder, env={"HOME": str(home)}) as server,
        server.connect(initialize=False) as client,
    ):
        replay = CaptureReplay(client, folder, has_placeholders=kind == "reference")
        replay.play(_CAPTURE.read_text().splitlines())
