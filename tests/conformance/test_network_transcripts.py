"""Replays the recorded exchanges about the managed network, when they are at hand.

They need more than messages: an origin behind the proxies, and bytes that are sent to the proxies
of a running process. A decision is compared without its time and the port of the process.
"""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.test_transcripts import TRANSCRIPTS, pytestmark  # noqa: F401
from tests.support.client import Client, Server, start_server
from tests.support.network import WebOrigin, exchange, web_origin

Message = dict[str, Any]
_ROOT = "/tmp/exec-demo"
_PORT = re.compile(r"127\.0\.0\.1:(\d{4,5})")

# By choice ours differs from the recording here.
_REFUSED = "a start without a proxy is refused at once instead of ending with exit code 101"
_OUR_SKIPPED: dict[str, dict[int, str]] = {"surface_managed_network": {5: _REFUSED}}
# A port of the client's own proxy keeps its number in the network namespace. In the recording the
# proxy and the origin are the same server, so the origin is found there, too.
# Our refusal of a local address names the address and the switch behind the reference's sentence.
_OUR_OUTPUT = {
    "given-port": [(b"direct 000", b"direct 200")],
    "denied": [
        (b"content-length: 211", b"content-length: 296"),
        (
            b"private network addresses.",
            b"private network addresses. 127.0.0.1 is a local address: "
            b"allowLocalBinding or a rule for exactly it permits it.",
        ),
    ],
}


@pytest.fixture(scope="module")
def origin() -> Iterator[WebOrigin]:
    with web_origin() as running:
        yield running


class NetworkReplay:
    """One transcript against one server."""

    def __init__(self, server: Server, root: Path, origin: WebOrigin, entries: list[Message]):
        self._server = server
        self._entries = _in_order_of_causes(entries)
        self._origin = origin
        self._root = root
        self._recorded_port = _recorded_origin(entries)
        self._clients: dict[int, Client] = {}
        self._sessions: dict[str, str] = {}
        self._proxies: tuple[int, int] = (0, 0)
        self._exchanges: dict[str, tuple[threading.Thread, list[bytes]]] = {}
        self._skipped: set[str] = set()
        self._seen: dict[tuple[int, str], int] = {}

    def play(self, skipped: dict[int, str]) -> None:
        """Send what was sent, and compare what arrives with what arrived."""
        try:
            for index, entry in enumerate(self._entries):
                try:
                    self._step(entry, skipped)
                except AssertionError as problem:
                    shown = json.dumps(entry, ensure_ascii=False)[:600]
                    raise AssertionError(f"line {index + 1}: {shown}\n{problem}") from problem
        finally:
            for client in self._clients.values():
                client.close()
            for thread, _ in self._exchanges.values():
                thread.join()

    def _step(self, entry: Message, skipped: dict[int, str]) -> None:
        number = entry.get("conn", 0)
        if number not in self._clients:
            self._clients[number] = self._server.connect(initialize=False)
        if entry["dir"] == "event":
            self._event(entry)
        elif entry["dir"] == "send":
            message = json.loads(self._mapped(json.dumps(entry["msg"])))
            if message.get("method") == "process/start" and message["id"] in skipped:
                self._skipped |= {message["params"]["processId"], str(message["id"])}
                return
            self._clients[number].send(message)
        else:
            self._receive(entry["msg"], self._clients[number])

    def _mapped(self, text: str) -> str:
        """Text with the folder, the origin and the sessions of this run."""
        for recorded, actual in self._sessions.items():
            text = text.replace(recorded, actual)
        text = text.replace(_ROOT, str(self._root))
        for before in (":", "["):
            text = text.replace(f"{before}{self._recorded_port}", f"{before}{self._origin.port}")
        return text

    # ---- messages ---------------------------------------------------------------------

    def _receive(self, expected: Message, client: Client) -> None:
        if "method" not in expected:
            if str(expected["id"]) not in self._skipped:
                self._compare_answer(expected, client)
        elif expected["params"]["processId"] in self._skipped:
            return
        elif expected["method"] == "network/policyRequest":
            self._question(expected, client)
        elif expected["method"] == "network/policyDecision":
            self._compare_decision(expected["params"], client)
        elif expected["method"] == "process/output":
            self._note_proxies(expected["params"], client)
        elif expected["method"] == "process/closed":
            self._compare_process(expected["params"]["processId"], client)

    def _compare_answer(self, expected: Message, client: Client) -> None:
        actual = client.answer(expected["id"])
        if "sessionId" in expected.get("result", {}):
            self._sessions[expected["result"]["sessionId"]] = actual["result"]["sessionId"]
            capabilities = actual["result"]["environmentInfo"]["capabilities"]
            assert capabilities["networkProxyLaunch"]
            assert capabilities["networkProxyReviewDomains"]
        else:
            assert actual == json.loads(self._mapped(json.dumps(expected)))

    def _question(self, expected: Message, client: Client) -> None:
        """A request of the server; a raw exchange that causes it is recorded after its end."""
        host, port = (expected["params"]["request"][name] for name in ("host", "port"))
        if self._proxies != (0, 0):
            target = host if port == 80 else f"{host}:{self._origin.port}"
            self._begin_exchange(target)
        wanted = json.loads(self._mapped(json.dumps(expected)))
        if wanted["params"]["request"]["port"] == self._recorded_port:
            wanted["params"]["request"]["port"] = self._origin.port
        while wanted not in client.requests:
            client.receive()

    def _compare_decision(self, expected: Message, client: Client) -> None:
        """Decisions about a process are reported in order."""
        process_id = expected["processId"]
        key = (id(client), process_id)
        index = self._seen.get(key, 0)
        self._seen[key] = index + 1

        def found() -> list[Message]:
            return [
                notice["params"]
                for notice in client.notifications
                if notice["method"] == "network/policyDecision"
                and notice["params"]["processId"] == process_id
            ]

        client.wait_for(lambda _: len(found()) > index)
        actual = dict(found()[index])
        assert re.fullmatch(r"[-0-9]{10}T[:0-9]{8}\.[0-9]{3}Z", actual.pop("timestamp"))
        assert re.fullmatch(r"127\.0\.0\.1:\d+", actual.pop("client"))
        wanted = {k: v for k, v in expected.items() if k not in ("timestamp", "client")}
        if wanted["port"] == self._recorded_port:
            wanted["port"] = self._origin.port
        assert actual == wanted

    def _note_proxies(self, params: Message, client: Client) -> None:
        recorded = base64.b64decode(params["chunk"]).decode()
        if re.fullmatch(r"http://\S+ socks5h://\S+\n", recorded) and self._sleeps(params):
            notice = client.notice("process/output", params["processId"])
            ports = _PORT.findall(base64.b64decode(notice["chunk"]).decode())
            self._proxies = (int(ports[0]), int(ports[1]))

    def _sleeps(self, params: Message) -> bool:
        starts = (entry["msg"]["params"] for entry in self._entries if _is_start(entry))
        (argv,) = (start["argv"] for start in starts if start["processId"] == params["processId"])
        return "sleep" in argv[-1]

    def _compare_process(self, process_id: str, client: Client) -> None:
        recorded: dict[str, bytes] = {}
        code = None
        for entry in self._entries:
            message = entry.get("msg", {})
            if message.get("params", {}).get("processId") != process_id:
                continue
            if message.get("method") == "process/output":
                chunk = base64.b64decode(message["params"]["chunk"])
                stream = message["params"]["stream"]
                recorded[stream] = recorded.get(stream, b"") + chunk
            elif message.get("method") == "process/exited":
                code = message["params"]["exitCode"]
        client.notice("process/closed", process_id)
        request_id = f"read {process_id}"  # numbers are those of the recording
        params = {"processId": process_id}
        client.send({"id": request_id, "method": "process/read", "params": params})
        read = client.result(request_id)
        actual: dict[str, bytes] = {}
        for chunk in read["chunks"]:
            data = base64.b64decode(chunk["chunk"])
            actual[chunk["stream"]] = actual.get(chunk["stream"], b"") + data
        assert read["exitCode"] == code
        if self._server.kind == "ours":
            for theirs, own in _OUR_OUTPUT.get(process_id, []):
                recorded["stdout"] = recorded["stdout"].replace(theirs, own)
        assert {name: _plain(data) for name, data in actual.items()} == {
            name: _plain(self._mapped(data.decode()).encode()) for name, data in recorded.items()
        }

    # ---- raw exchanges ----------------------------------------------------------------

    def _event(self, entry: Message) -> None:
        if entry["event"] == "connection-cut":
            self._clients[0].close()
        elif entry["event"] == "socks-exchange":
            sent, received = (bytes.fromhex(entry[name]) for name in ("sentHex", "receivedHex"))
            old, new = (port.to_bytes(2) for port in (self._recorded_port, self._origin.port))
            sent = sent.removesuffix(old) + new if sent.endswith(old) else sent
            answer = exchange(self._proxies[1], sent, until=received[:-2])
            assert answer[: len(received) - 2] == received[:-2]
        elif "sent" in entry:
            sent_text = self._mapped(entry["sent"])
            wanted = self._mapped(entry["received"])
            until = None if wanted.endswith("<EOF>") else b"origin"
            answer = exchange(self._proxies[0], sent_text.encode(), until=until)
            assert _plain(answer) == _plain(re.sub("<.*>$", "", wanted).encode())
        elif "target" in entry:
            target = self._mapped(entry["target"])
            self._begin_exchange(target)
            thread, received_list = self._exchanges.pop(target)
            thread.join()
            wanted = self._mapped(entry["received"]).removesuffix("<EOF>")
            assert _plain(received_list[0]) == _plain(wanted.encode())

    def _begin_exchange(self, target: str) -> None:
        if target in self._exchanges:
            return
        sent = f"GET http://{target}/ HTTP/1.1\r\nHost: {target}\r\nConnection: close\r\n\r\n"
        received: list[bytes] = []
        port = self._proxies[0]
        thread = threading.Thread(
            target=lambda: received.append(exchange(port, sent.encode(), timeout=20))
        )
        thread.start()
        self._exchanges[target] = (thread, received)


def _in_order_of_causes(entries: list[Message]) -> list[Message]:
    """The entries with each raw exchange before its decision, which was recorded first."""
    ordered = list(entries)
    for index in range(len(ordered) - 1):
        decision, event = ordered[index : index + 2]
        is_decision = decision.get("msg", {}).get("method") == "network/policyDecision"
        if is_decision and ("sent" in event or "sentHex" in event):
            ordered[index : index + 2] = event, decision
    return ordered


def _is_start(entry: Message) -> bool:
    return bool(entry["dir"] == "send" and entry["msg"].get("method") == "process/start")


def _recorded_origin(entries: list[Message]) -> int:
    """The port of the recorded origin: the only one that clients or events name."""
    for entry in entries:
        text = entry.get("target", "")
        if _is_start(entry):
            text = entry["msg"]["params"]["argv"][-1]
        if found := _PORT.search(text):
            return int(found[1])
    return 0


def _plain(data: bytes) -> bytes:
    """Text without what varies: dates, ports, thread ids and lines of a source, headers' order."""
    text = re.sub(rb"(?im)^(< )?(date|server|connection): [^\r\n]*\r?\n", b"", data)
    text = re.sub(rb"127\.0\.0\.1:\d+", b"127.0.0.1:PORT", text)
    text = re.sub(rb"thread 'main' \(\d+\)", b"thread", text)
    text = re.sub(rb"\.rs:\d+:\d+:", b".rs:", text)  # differs between two versions
    head, blank, body = text.partition(b"\r\n\r\n")
    if not blank or not head.startswith(b"HTTP/"):
        return b"\n".join(sorted(text.split(b"\n"))) if b"=" in text else text
    first, *headers = head.split(b"\r\n")
    return b"\r\n".join([first, *sorted(line.lower() for line in headers), b"", body])


_NAMES = [
    "35_network_policy_decision",
    "36_network_policy_request",
    "surface_proxy_curl",
    "surface_policy_request",
    "surface_managed_network",
]


@pytest.mark.parametrize("name", _NAMES)
def test_network_transcript(name: str, kind: str, folder: Path, origin: WebOrigin) -> None:
    lines = (TRANSCRIPTS / f"{name}.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    for part in ("net1", "net2", "proxy_curl", "managed_network"):
        (folder / part).mkdir()
    skipped = _OUR_SKIPPED.get(name, {}) if kind == "ours" else {}
    with start_server(kind, cwd=folder) as server:
        NetworkReplay(server, folder, origin, entries).play(skipped)
