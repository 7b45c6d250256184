"""Plays one case: creates its files, sends requests, and compares the answers."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

from tests.conformance.matching import Variables, build, mismatch
from tests.support.client import Client, Disconnected, ProcessRun, Server, StdioLink, scaled, uri

Step = dict[str, Any]
_SOCKET_PREFIX = "failed to parse websocket JSON-RPC message from exec-server websocket {peer}: "
_STDIO_PREFIX = "failed to parse JSON-RPC message from exec-server stdio: "


def place(folder: Path, files: Mapping[str, Any]) -> None:
    """Creates, changes or removes files: a text, or an object for other kinds."""
    for name, content in files.items():
        path = Path(os.fsdecode(os.path.join(os.fsencode(folder), unquote_to_bytes(name))))
        options = content if isinstance(content, dict) else {"text": content}
        if options.get("remove"):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            path.mkdir(exist_ok=True)
        elif "link" in options:
            path.symlink_to(options["link"].replace("{dir}", str(folder)))
        elif "fifo" in options:
            os.mkfifo(path)
        elif "hex" in options:
            path.write_bytes(bytes.fromhex(options["hex"]))
        elif "size" in options:
            path.write_bytes(b"x" * options["size"])
        elif options.get("text") is not None:
            path.write_text(options["text"].replace("{dir}", str(folder)))
        if "mode" in options:
            path.chmod(int(options["mode"], 8))
        if "mtime" in options:
            os.utime(path, ns=(0, int(options["mtime"] * 1000) * 1_000_000))


class Scene:
    """One case on one server: its folder, its connections, its variables."""

    def __init__(self, server: Server, folder: Path, *, stdio: Client | None = None) -> None:
        self.server = server
        self.folder = folder
        self.variables: Variables = {"dir": str(folder), "uri": uri(folder)}
        self._stdio = stdio
        self._clients: dict[str, Client] = {}
        self._met: set[int] = set()

    def play(self, case: Mapping[str, Any], steps: list[Step]) -> None:
        """Runs the steps in order; the first that fails is named with its number."""
        place(self.folder, case.get("files", {}))
        try:
            self._connect("main", initialize=case.get("initialize", True))
            for number, step in enumerate(steps, 1):
                try:
                    self._perform(step)
                except (AssertionError, Disconnected) as problem:
                    text = json.dumps(step, ensure_ascii=False)[:400]
                    raise AssertionError(f"step {number} {text}\n{problem!r}") from problem
        finally:
            self._end()

    def _end(self) -> None:
        # Processes that a case leaves would run on for the session's 80 seconds.
        for client in self._clients.values():
            for notice in list(client.messages):
                process_id = notice.get("result", {}).get("processId") if "id" in notice else None
                if isinstance(process_id, str):
                    with contextlib.suppress(OSError, ValueError):
                        client.request("process/terminate", {"processId": process_id})
            if self._stdio is None:
                client.close()

    def _connect(self, name: str, *, initialize: bool, resume: str | None = None) -> None:
        client = self._stdio or self.server.connect(initialize=False)
        self._clients[name] = client
        if initialize:
            client.initialize(resume)

    def _perform(self, step: Step) -> None:
        client = self._clients.get(step.get("on", "main"))
        if client is not None and not isinstance(client.link, StdioLink):
            with contextlib.suppress(OSError):
                host, port = client.websocket.sock.getsockname()[:2]
                self.variables["peer"] = f"{host}:{port}"
        action = next(name for name in _ACTIONS if name in step)
        _ACTIONS[action](self, client, step)

    def _compare(self, expected: Any, actual: Any) -> None:
        reason = mismatch(expected, actual, self.variables)
        assert reason is None, reason

    def _answer(self, client: Client, step: Step, request_id: Any) -> None:
        answer = client.answer(request_id, step.get("within", 10))
        if "malformed" in step:
            prefix = _STDIO_PREFIX if self._stdio else _SOCKET_PREFIX
            tail = step["malformed"]
            message = {"$regex": prefix + ".+"} if tail is True else prefix + tail
            self._compare({"error": {"code": -32600, "message": message}, "id": -1}, answer)
        elif "error" in step:
            code, message = step["error"]
            self._compare({"error": {"code": code, "message": message}, "id": request_id}, answer)
        elif "denied" in step:
            code, message = step["denied"]
            error = {"$has": {"code": code, "message": message}}
            self._compare({"error": error, "id": request_id}, answer)
        else:
            self._compare({"id": request_id, "result": step.get("result", {})}, answer)

    def _call(self, client: Client, step: Step) -> None:
        request_id = client.request(step["call"], build(step.get("params"), self.variables))
        if "later" in step:
            self.variables[step["later"]] = str(request_id)
            return
        began = time.monotonic()
        self._answer(client, step, request_id)
        if "at_least" in step:
            assert time.monotonic() - began >= step["at_least"], "answered too early"

    def _finish(self, client: Client, step: Step) -> None:
        self._answer(client, step, int(self.variables[step["finish"]]))

    def _errors(self, client: Client, step: Step) -> None:
        problems = []
        for method, params, code, message in step["errors"]:
            request_id = client.request(method, build(params, self.variables))
            try:
                self._answer(client, {"error": [code, message]}, request_id)
            except AssertionError as problem:
                problems.append(f"{method} {json.dumps(params)}: {problem}")
        assert not problems, "\n".join(problems)

    def _send(self, client: Client, step: Step) -> None:
        message = build(step["send"], self.variables)
        client.send(message)
        if "answer" in step:
            self._compare(step["answer"], client.answer(message.get("id", -1)))

    def _text(self, client: Client, step: Step) -> None:
        client.link.send_text(build(step["text"], self.variables))
        self._raw_answer(client, step)

    def _binary(self, client: Client, step: Step) -> None:
        client.websocket.send_binary(base64.b64decode(build(step["binary"], self.variables)))
        self._raw_answer(client, step)

    def _raw_answer(self, client: Client, step: Step) -> None:
        if "malformed" in step:
            self._answer(client, step, -1)
        elif "answer" in step:
            self._compare(step["answer"], client.answer(step["answer"]["id"]))

    def _notify(self, client: Client, step: Step) -> None:
        client.notify(step["notify"], build(step.get("params"), self.variables))

    def _expect(self, client: Client, step: Step) -> None:
        def is_new_and_fits(notice: Any) -> bool:
            fits = mismatch(step["expect"], notice, dict(self.variables)) is None
            return fits and id(notice) not in self._met

        self._met.add(id(client.wait_for(is_new_and_fits)))

    def _start(self, client: Client, step: Step) -> None:
        params = {"cwd": "{uri}"} | step.get("with", {})
        client.start(
            build(step["start"], self.variables),
            process_id=step.get("id"),
            **build(params, self.variables),
        )

    def _run(self, client: Client, step: Step) -> None:
        params = {"cwd": "{uri}"} | step.get("with", {})
        argv = build(step["run"], self.variables)
        built = build(params, self.variables)
        self._check_run(client.run(argv, process_id=step.get("id"), **built), step)

    def _collect(self, client: Client, step: Step) -> None:
        self._check_run(client.collect(step["collect"], step.get("within", 10)), step)

    def _check_run(self, run: ProcessRun, step: Step) -> None:
        for stream in ("stdout", "stderr", "pty"):
            text = run.output.get(stream, b"").decode("utf-8", "surrogateescape")
            self._compare(step.get(stream, "" if "exit" in step else {"$any": "string"}), text)
        assert run.sandbox_denied is False
        self._compare(step.get("exit", 0), run.exit_code)

    def _silence(self, client: Client, step: Step) -> None:
        client.silence(step["silence"])

    def _wait(self, _client: Client, step: Step) -> None:
        time.sleep(step["wait"])

    def _open(self, _client: Client, step: Step) -> None:
        resume = build(step.get("resume"), self.variables)
        self._connect(step["connect"], initialize=step.get("initialize", True), resume=resume)

    def _drop(self, _client: Client, step: Step) -> None:
        self._clients[step["disconnect"]].close()

    def _dropped(self, _client: Client, step: Step) -> None:
        code = self._clients[step["disconnected"]].wait_closed()
        self._compare(step.get("code", {"$one_of": [code]}), code)

    def _change(self, _client: Client, step: Step) -> None:
        place(self.folder, step["change"])

    def _check(self, _client: Client, step: Step) -> None:
        for name, wanted in step["check"].items():
            path = self.folder / name
            if wanted is None:
                assert not os.path.lexists(path), f"{name} exists"
                continue
            options = wanted if isinstance(wanted, dict) else {"text": wanted}
            if "text" in options:
                assert path.read_text() == options["text"], f"{name}: {path.read_text()!r}"
            if "link" in options:
                self._compare(options["link"], os.readlink(path))
            if "mode" in options:
                mode = stat.S_IMODE(path.stat().st_mode)
                assert mode == int(options["mode"], 8), f"{name}: mode {mode:o}"
            if "directory" in options:
                assert path.is_dir(), f"{name} is no directory"

    def _gone(self, _client: Client, step: Step) -> None:
        """A file whose process wrote its pid: that process must be gone."""
        pid = int((self.folder / step["gone"]).read_text())
        deadline = time.monotonic() + scaled(5)
        while _alive(pid):
            assert time.monotonic() < deadline, f"process {pid} is still alive"
            time.sleep(0.01)

    def _await_file(self, _client: Client, step: Step) -> None:
        path = self.folder / step["await_file"]
        deadline = time.monotonic() + scaled(5)
        while not (path.exists() and path.stat().st_size):
            assert time.monotonic() < deadline, f"{path.name} was never written"
            time.sleep(0.01)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# A step is recognised by the first of these members that it has.
_ACTIONS: dict[str, Callable[[Scene, Any, Step], None]] = {
    "call": Scene._call,
    "finish": Scene._finish,
    "errors": Scene._errors,
    "send": Scene._send,
    "text": Scene._text,
    "binary": Scene._binary,
    "notify": Scene._notify,
    "expect": Scene._expect,
    "start": Scene._start,
    "run": Scene._run,
    "collect": Scene._collect,
    "silence": Scene._silence,
    "wait": Scene._wait,
    "connect": Scene._open,
    "disconnect": Scene._drop,
    "disconnected": Scene._dropped,
    "change": Scene._change,
    "check": Scene._check,
    "gone": Scene._gone,
    "await_file": Scene._await_file,
}
