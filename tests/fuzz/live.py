"""Sends requests of the grammar to a real server, over several connections.

Every request is answered exactly once, by a result or an error with a documented code. No error
is the generic internal error, which stands for an exception that the server did not expect. At
the end the server answers a ping, its memory is flat, and nothing of it is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.engine import Finding
from tests.fuzz.grammar import NAMES, Grammar, all_calls
from tests.support.barriers import start_server_as, user_id
from tests.support.client import Client, Disconnected, NothingArrived, Server, descendants, uri

_CODES = frozenset({-32700, -32600, -32601, -32602, -32603, -32004, -32001, -32000})
_CONNECTIONS = 3
_BATCH = 12
# A request takes milliseconds; a machine may pause.
_ANSWER_SECONDS = 30.0
# Bounded caches and fragmentation; a leak of a kilobyte for each request exceeds it in a minute.
GROWTH_BYTES = 64 * 1024 * 1024
_INTERNAL = "internal error"


@dataclass
class LiveRun:
    """The result of one run."""

    name: str
    requests: int = 0
    results: int = 0
    findings: list[Finding] = field(default_factory=list)


def fuzz_server(random: Random, seconds: float, *, is_confined: bool) -> LiveRun:
    """Send requests until the time is over."""
    run = LiveRun("methods-confined" if is_confined else "methods")
    with _scratch() as folder, _origin() as origin:

        def make_grammar() -> Grammar:
            return Grammar(all_calls(), uri(folder), origin, is_confined=is_confined)

        family = {}
        environment = {"HOME": str(folder), "TMPDIR": str(folder)}
        try:
            # As an ordinary user: a mistake of the grammar must not harm the machine.
            with start_server_as("ours", "ordinary", env=environment) as server:
                _Traffic(server, folder, make_grammar, random, run).go(seconds)
                family = {pid: _command(pid) for pid in descendants(server.process.pid)}
                if "Traceback" in server.stderr():
                    _record(run, "", f"a traceback on stderr: {server.stderr()[-1500:]}")
        except AssertionError as error:
            _record(run, "", f"the server did not end cleanly: {error}, of {family}")
    return run


def _record(run: LiveRun, request: str, text: str) -> None:
    run.findings.append(Finding(run.name, request.encode(errors="replace"), text))


class _Traffic:
    """Connections to one server and the requests on them."""

    def __init__(
        self,
        server: Server,
        folder: Path,
        make_grammar: Callable[[], Grammar],
        random: Random,
        run: LiveRun,
    ) -> None:
        self._server = server
        self._folder = folder
        self._random = random
        self._run = run
        # Whatever the others do, this one must not notice.
        self._bystander = server.connect()
        self._bystander.start(["sleep", "1000"], process_id="sleep")
        self._clients = [_connect(server) for _ in range(_CONNECTIONS)]
        self._grammars = [make_grammar() for _ in self._clients]  # each knows its own ids

    def go(self, seconds: float) -> None:
        """Send batches until the time is over, then check that the server is well."""
        self._batch()
        before = _resident(self._server.process.pid)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._run.findings:
            self._batch()
        for client in self._clients:
            client.close()
        with self._server.connect() as client, self._bystander as bystander:
            client.call("environment/status", {})
            (listed,) = bystander.call("process/list", {})["processes"]
            if not listed["running"]:
                _record(self._run, "", "the process of another client has ended")
        growth = _resident(self._server.process.pid) - before
        if growth > GROWTH_BYTES:
            _record(self._run, "", f"memory grew by {growth / 1e6:.0f} MB")

    def _batch(self) -> None:
        """Several requests at once on one connection, then all of their answers."""
        random = self._random
        if random.random() < 0.3:
            _plant(self._folder)
        index = random.randrange(_CONNECTIONS)
        client, grammar = self._clients[index], self._grammars[index]
        sent: dict[int, str] = {}
        for _ in range(random.randint(1, _BATCH)):
            method, params = grammar.request(random)
            sent[client.request(method, params)] = json.dumps([method, params])
            self._run.requests += 1
        try:
            # Processes that would run on, or be read or written forever, are killed.
            for process_id in [*grammar.recent, "\u00e9"]:
                client.request("process/terminate", {"processId": process_id})
            for number, request in sent.items():
                self._judge(request, client.answer(number, _ANSWER_SECONDS))
            client.call("environment/status", {})
        except (NothingArrived, Disconnected) as error:
            _record(self._run, "\n".join(sent.values()), f"no answer: {error!r}")
            return
        client.messages.clear()
        client.notifications.clear()
        client.raw.clear()
        if random.random() < 0.05:
            self._replace(index)

    def _judge(self, request: str, answer: dict[str, Any]) -> None:
        if "result" in answer:
            self._run.results += 1
            return
        error = answer["error"]
        if error["code"] not in _CODES or error["message"] == _INTERNAL:
            _record(self._run, request, f"answered with {error}")

    def _replace(self, index: int) -> None:
        """Cut a connection; another one takes its session or a new one."""
        old = self._clients[index]
        old.websocket.abort()
        resume = old.session_id if self._random.random() < 0.5 else None
        for _ in range(100):
            try:
                self._clients[index] = _connect(self._server, resume)
                return
            except Exception:
                time.sleep(0.05)  # the server has not noticed the cut yet
        _record(self._run, "", "a session could not be resumed")


def _connect(server: Server, resume: str | None = None) -> Client:
    client = server.connect(resume=resume)
    client.websocket.takes_binary = True
    return client


# ---- the surroundings -----------------------------------------------------------------


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """A folder that belongs to the user of the server."""
    folder = Path(tempfile.mkdtemp(prefix="exec-server-fuzz-", dir="/var/tmp"))
    try:
        folder.chmod(0o755)
        (folder / "work").mkdir()
        if os.geteuid() == 0:
            os.chown(folder / "work", user_id("ordinary"), user_id("ordinary"))
        yield folder / "work"
    finally:
        for path in [*folder.rglob("*")]:
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o700)
        shutil.rmtree(folder)


def _plant(folder: Path) -> None:
    """Restore the entries that paths of the grammar name, with their modes."""
    owner = folder.stat().st_uid
    with contextlib.suppress(OSError):
        folder.chmod(0o755)
        shutil.rmtree(folder / "dir", ignore_errors=True)
        (folder / "dir" / "inner").mkdir(parents=True, exist_ok=True)
        for path in (folder / "a", folder / "b", folder / "dir" / "inner" / "file"):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            if not path.is_symlink():
                path.touch()
                path.chmod(0o644)
                path.write_text("hello\n")
        for name in NAMES:
            for parent in (folder, folder / "dir"):
                Path(os.fsdecode(os.fsencode(parent) + b"/" + name)).write_text("hello\n")
        if not (folder / "link").is_symlink():
            (folder / "link").symlink_to("dir")
        if os.geteuid() == 0:
            for path in folder.rglob("*"):
                os.chown(path, owner, owner, follow_symlinks=False)


class _Handler(BaseHTTPRequestHandler):
    """GET /FORM/SEED/SIZE: a body of that size, chunked or cut off as the form says."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        form, size = self.path.split("/")[1], int(self.path.split("/")[3])
        self.send_response(200)
        if form == "chunked":
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"%x\r\n%b\r\n0\r\n\r\n" % (size, bytes(size)))
        else:
            self.send_header("content-length", str(size))
            self.end_headers()
            self.wfile.write(bytes(size if form == "length" else size // 2))
            self.close_connection = form == "cut"

    do_POST = do_GET  # noqa: N815 - the name that the base class calls

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Stay silent."""


@contextlib.contextmanager
def _origin() -> Iterator[str]:
    """An HTTP server on loopback; gives its URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        server.daemon_threads = True
        server.handle_error = lambda *_: None  # type: ignore[method-assign]
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "ended"


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
