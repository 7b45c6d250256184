"""Replays a recorded transcript: sends the recorded requests, compares the answers.

Answers are compared by id. What a process says is compared as a story: the bytes of each
stream put together by `seq`, the exit code, and that the numbers have no gap and end with
the close. Chunk boundaries, and where notifications fall between answers, are free.
"""

from __future__ import annotations

import base64
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.client import Client, Server, scaled

Message = dict[str, Any]
RECORDED_ROOT = "/tmp/exec-demo"
_PEER = re.compile(r"127\.0\.0\.1:\d+")
# The words of a JSON decoder, which servers choose themselves.
_DECODER_WORDS = re.compile(r"(?<=PEER: |tdio: ).* at line \d+ column \d+$")
# Before these are sent, the events that the recording shows before their answer must have happened:
# the recorder waited a while, which left no trace of its own.
_DEPENDS_ON_THE_PAST = ("process/read", "process/signal", "process/terminate")


@dataclass
class Rules:
    """How one server may differ from the recording; every entry has its reason where it is set."""

    skipped_ids: frozenset[Any] = frozenset()
    # Capabilities that the recorded server did not know.
    extensions: frozenset[str] = frozenset()
    # Process id to the exit code that is right instead.
    exit_codes: Mapping[str, int] = field(default_factory=dict)
    # Connections that stay open and answer with id -1 where the recording was cut.
    kept_connections: frozenset[int] = frozenset()
    normalize_output: Callable[[bytes], bytes] = bytes
    # Recorded directories beside RECORDED_ROOT, and those of this run.
    places: Mapping[str, str] = field(default_factory=dict)
    # Methods whose answers vary: a function is applied to the recorded and to the actual one.
    normalize_answers: Mapping[str, Callable[[Message], Message]] = field(default_factory=dict)
    # Steps before which something happened that the recording does not show.
    hooks: Mapping[tuple[int, Any], Callable[[Path], None]] = field(default_factory=dict)


@dataclass
class _Story:
    """The events of one process so far, by sequence number."""

    chunks: dict[int, tuple[str, bytes]] = field(default_factory=dict)
    exit: tuple[int, int] | None = None
    closed: int | None = None

    def take(self, notice: Message) -> None:
        params = notice["params"]
        if notice["method"] == "process/output":
            data = base64.b64decode(params["chunk"], validate=True)
            self.chunks[params["seq"]] = (params["stream"], data)
        elif notice["method"] == "process/exited":
            assert params["sandboxDenied"] is False
            self.exit = (params["seq"], params["exitCode"])
        elif notice["method"] == "process/closed":
            self.closed = params["seq"]

    def take_read(self, result: Message) -> None:
        for chunk in result["chunks"]:
            data = base64.b64decode(chunk["chunk"], validate=True)
            self.chunks[chunk["seq"]] = (chunk["stream"], data)

    def streams(self) -> dict[str, bytes]:
        joined: dict[str, bytes] = {}
        for _, (stream, data) in sorted(self.chunks.items()):
            joined[stream] = joined.get(stream, b"") + data
        return joined


def _bytes_of(result: Message) -> dict[str, bytes]:
    story = _Story()
    story.take_read(result)
    return story.streams()


class Replay:
    """One transcript against one server."""

    def __init__(self, server: Server, root: Path, rules: Rules, stdio: Client | None) -> None:
        self._server = server
        self._root = root
        self._rules = rules
        self._stdio = stdio
        self._clients: dict[int, Client] = {}
        self._taken: dict[int, int] = {}
        self._sessions: dict[str, str] = {}
        self._recorded: dict[str, _Story] = {}
        self._actual: dict[str, _Story] = {}
        self._requests: dict[tuple[int, str], Message] = {}
        self._skipped: set[tuple[int, str]] = set()
        self._untold: set[str] = set()

    def play(self, entries: list[Message]) -> None:
        if not any(entry.get("event") == "connected" for entry in entries):
            self._clients[0] = self._stdio or self._server.connect(initialize=False)
        try:
            for index, entry in enumerate(entries):
                try:
                    self._step(entry, entries[index + 1 :])
                except AssertionError as problem:
                    shown = json.dumps(entry, ensure_ascii=False)[:600]
                    raise AssertionError(f"line {index + 1}: {shown}\n{problem}") from problem
        finally:
            for client in self._clients.values():
                if self._stdio is None:
                    client.close()

    def _step(self, entry: Message, rest: list[Message]) -> None:
        number = entry.get("conn", 0)
        if entry["dir"] == "event":
            self._event(entry, number)
        elif entry["dir"] == "send":
            self._send(entry, number, rest)
        elif (number, repr(entry["msg"].get("id"))) not in self._skipped:
            self._receive(entry["msg"], number)

    # Sending

    def _send(self, entry: Message, number: int, rest: list[Message]) -> None:
        client = self._clients[number]
        if "raw" in entry:
            if self._stdio is not None:
                client.link.send_bytes(entry["raw"].encode())  # type: ignore[attr-defined]
            else:
                client.link.send_text(entry["raw"])
            return
        if "binaryBase64" in entry:
            client.websocket.send_binary(base64.b64decode(entry["binaryBase64"]))
            return
        message = self._mapped(entry["msg"])
        key = (number, repr(message.get("id")))
        if self._is_skipped(message):
            self._skipped.add(key)
            return
        hook = self._rules.hooks.get((number, message.get("id")))
        if hook is not None:
            hook(self._root)
        if "id" in message:
            self._requests[key] = message
        if message.get("method") == "process/start" and isinstance(message["params"], dict):
            self._begin_story(message["params"].get("processId"))
            self._untold.discard(message["params"].get("processId"))
        self._await_the_past(message, number, rest)
        client.send(message)

    def _is_skipped(self, message: Message) -> bool:
        if "method" not in message or message.get("id") not in self._rules.skipped_ids:
            return False
        if message["method"] == "process/start":
            # A process that was not started has no events.
            self._untold.add(message["params"]["processId"])
        return True

    def _begin_story(self, process_id: Any) -> None:
        """An id may be used again once its process has been forgotten."""
        known = self._actual.get(process_id)
        if known is not None and known.closed is not None:
            self._recorded.pop(process_id, None)
            self._actual.pop(process_id)

    def _await_the_past(self, message: Message, number: int, rest: list[Message]) -> None:
        params = message.get("params")
        if message.get("method") not in _DEPENDS_ON_THE_PAST or not isinstance(params, dict):
            return
        if params.get("waitMs"):
            return
        for entry in rest:
            if entry["dir"] != "recv" or entry.get("conn", 0) != number:
                return
            if "method" not in entry["msg"]:
                return
            if entry["msg"]["params"].get("processId") == params.get("processId"):
                self._notice(entry["msg"], self._clients[number], number)

    def _mapped(self, value: Any) -> Any:
        """The message with this run's folder and session ids in place of the recorded ones."""
        text = json.dumps(value, ensure_ascii=False).replace(RECORDED_ROOT, str(self._root))
        for recorded, actual in self._rules.places.items():
            text = text.replace(recorded, actual)
        for recorded, actual in self._sessions.items():
            text = text.replace(recorded, actual)
        return json.loads(text)

    # Receiving

    def _receive(self, expected: Message, number: int) -> None:
        client = self._clients[number]
        if "method" in expected:
            self._notice(expected, client, number)
            return
        actual = client.answer(expected["id"])
        self._take_notices(number)
        request = self._requests.get((number, repr(expected["id"])), {})
        method = request.get("method")
        if method == "initialize" and "result" in expected:
            self._compare_initialize(expected, actual)
        elif method == "environment/info" and "result" in expected:
            self._compare_info(expected["result"], actual["result"])
        elif method == "process/read" and "result" in expected:
            self._compare_read(request["params"], expected, actual)
        else:
            self._compare_answer(method, expected, actual)

    def _compare_initialize(self, expected: Message, actual: Message) -> None:
        assert "result" in actual, actual
        recorded = expected["result"]["sessionId"]
        if recorded in self._sessions:
            assert actual["result"]["sessionId"] == self._sessions[recorded]
        self._sessions[recorded] = actual["result"]["sessionId"]
        self._compare_info(
            expected["result"]["environmentInfo"], actual["result"]["environmentInfo"]
        )

    def _compare_info(self, expected: Message, actual: Message) -> None:
        assert expected.keys() <= actual.keys(), actual
        for name in ("cwd", "userHomeDir", "platformOs", "temporaryDirectories", "tempDir"):
            assert actual[name] == self._mapped(expected[name]), name
        assert actual["shell"].keys() == expected["shell"].keys()
        recorded = expected["capabilities"]
        # A server may offer less than the reference; additional members are listed.
        offered = {name for name, on in actual["capabilities"].items() if on}
        assert all(recorded.get(name) for name in offered - self._rules.extensions)

    def _compare_read(self, params: Message, expected: Message, actual: Message) -> None:
        assert "result" in actual, actual
        told, got = expected["result"], actual["result"]
        self._story(self._recorded, params["processId"]).take_read(told)
        self._story(self._actual, params["processId"]).take_read(got)
        if told == got:
            return
        assert got.keys() == told.keys()
        assert (got["failure"], got["sandboxDenied"]) == (None, False)
        # The process may have got further than it had in the recording, not less far.
        assert got["exited"] or not told["exited"], got
        # A poll that ends with the exit may or may not find the close as well.
        polled = bool(params.get("waitMs")) and got["exited"]
        assert got["closed"] or not told["closed"] or polled, got
        if told["exited"]:
            assert got["exitCode"] == self._exit_code(params["processId"], told["exitCode"])
        for stream, data in _bytes_of(told).items():
            have = _bytes_of(got).get(stream, b"")
            if params.get("maxBytes") is not None or told["closed"]:
                assert have == self._output(data), got
            else:
                shorter, longer = sorted((have, self._output(data)), key=len)
                assert longer.startswith(shorter), got

    def _compare_answer(self, method: str | None, expected: Message, actual: Message) -> None:
        expected = self._mapped(expected)
        if expected.get("id") == -1:
            expected, actual = (
                json.loads(_PEER.sub("PEER", json.dumps(message))) for message in (expected, actual)
            )
            words = _DECODER_WORDS.search(expected["error"]["message"])
            if words is not None:
                for message in (expected, actual):
                    message["error"]["message"] = message["error"]["message"][: words.start()]
        normalize = self._rules.normalize_answers.get(method or "")
        if normalize is not None:
            expected, actual = normalize(expected), normalize(actual)
        if method == "fs/getMetadata" and "result" in expected and "result" in actual:
            self._forgive_metadata(expected["result"], actual["result"])
        if method == "fs/readDirectory" and "result" in expected and "result" in actual:
            for message in (expected, actual):
                message["result"]["entries"].sort(key=lambda entry: entry["fileName"])
        assert actual == expected, f"got {json.dumps(actual)}"

    @staticmethod
    def _forgive_metadata(expected: Message, actual: Message) -> None:
        """Varying fields: birth times, sizes of folders, and times that no request has set."""
        if expected["createdAtMs"] != 0:
            actual["createdAtMs"] = expected["createdAtMs"]
        if not expected["isFile"]:
            for name in ("size", "modifiedAtMs"):
                actual[name] = expected[name]

    # Processes

    @staticmethod
    def _story(stories: dict[str, _Story], process_id: str) -> _Story:
        return stories.setdefault(process_id, _Story())

    def _take_notices(self, number: int) -> None:
        notices = self._clients[number].notifications
        for notice in notices[self._taken.get(number, 0) :]:
            if "processId" in notice["params"]:
                self._story(self._actual, notice["params"]["processId"]).take(notice)
        self._taken[number] = len(notices)

    def _wait(self, number: int, happened: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + scaled(10)
        self._take_notices(number)
        while not happened():
            assert time.monotonic() < deadline, what
            self._clients[number].receive(deadline - time.monotonic())
            self._take_notices(number)

    def _notice(self, expected: Message, client: Client, number: int) -> None:
        if expected["method"] == "fs/missingChanged":
            client.wait_for(lambda notice: notice == expected)
            return
        process_id = expected["params"]["processId"]
        if process_id in self._untold:
            return
        told = self._story(self._recorded, process_id)
        got = self._story(self._actual, process_id)
        told.take(expected)
        if expected["method"] == "process/output":
            self._await_bytes(expected["params"]["stream"], told, got, number)
        elif expected["method"] == "process/exited":
            self._wait(number, lambda: got.exit is not None, f"{process_id} did not exit")
            assert told.exit is not None
            assert got.exit is not None
            assert got.exit[1] == self._exit_code(process_id, told.exit[1]), got.exit
        else:
            self._wait(number, lambda: got.closed is not None, f"{process_id} did not close")
            self._compare_stories(told, got)

    def _await_bytes(self, stream: str, told: _Story, got: _Story, number: int) -> None:
        wanted = len(self._output(told.streams()[stream]))
        self._wait(
            number,
            lambda: len(self._output(got.streams().get(stream, b""))) >= wanted,
            f"only {got.streams()} of {told.streams()}",
        )

    def _output(self, data: bytes) -> bytes:
        mapped = data.replace(RECORDED_ROOT.encode(), os.fsencode(self._root))
        return self._rules.normalize_output(mapped)

    def _exit_code(self, process_id: str, recorded: int) -> int:
        return self._rules.exit_codes.get(process_id, recorded)

    def _compare_stories(self, told: _Story, got: _Story) -> None:
        streams = {name: self._output(data) for name, data in got.streams().items()}
        assert streams == {name: self._output(data) for name, data in told.streams().items()}
        assert got.exit is not None, "closed without an exit"
        numbers = sorted([*got.chunks, got.exit[0], got.closed or 0])
        assert numbers == list(range(1, len(numbers) + 1)), f"a gap in {numbers}"
        assert numbers[-1] == got.closed, "something came after the close"

    # Events

    def _event(self, entry: Message, number: int) -> None:
        hook = self._rules.hooks.get((number, entry["event"]))
        if hook is not None:
            hook(self._root)
        path = Path(entry.get("path", "").replace(RECORDED_ROOT, str(self._root)))
        match entry["event"]:
            case "connected":
                self._clients[number] = self._server.connect(initialize=False)
            case "closed-by-client":
                self._clients[number].close()
                # The server needs a moment to notice before the session is free again.
                time.sleep(0.1)
            case "disconnected" if number in self._rules.kept_connections:
                assert self._clients[number].answer(-1)["error"]["code"] == -32600
            case "disconnected":
                self._clients[number].wait_closed()
            case "time" | "summary":
                pass
            case "sleep":
                time.sleep(entry["seconds"])
            case "create-file" | "modify-file" if "note" in entry:
                pass  # a hook does it
            case "create-file" | "modify-file":
                path.write_text("changed")
            case "create-directory":
                path.mkdir()
            case "stdin-closed":
                self._clients[number].close()
                assert self._server.process.wait(scaled(10)) == entry["exitCode"]
            case unknown:
                raise AssertionError(f"unknown event {unknown}")
