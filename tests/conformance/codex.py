"""The real Codex as a client: `codex exec` with a scripted model, or its `app-server`.

The client gets a configuration folder of its own, which is removed at the end, and a
configuration in which nothing but the model and the server under test is asked.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conformance import model
from tests.conformance.model import ToolCall
from tests.support.client import (
    DEFAULT_TIMEOUT,
    Client,
    StdioLink,
    descendants,
    reference_binary,
    scaled,
    server_environment,
    survivors,
)

# The name only selects the tools that the client offers: plain calls and free-form patches.
MODEL = "gpt-5.5"
_CONFIGURATION = """
model = "{name}"
model_provider = "scripted"
approval_policy = "never"
sandbox_mode = "{sandbox}"
web_search = "disabled"
check_for_update_on_startup = false
[analytics]
enabled = false

[history]
persistence = "none"

[features]
apps = false
plugins = false
remote_plugin = false
{features}

[model_providers.scripted]
name = "scripted"
base_url = "{model}"
wire_api = "responses"
env_key = "MODEL_KEY"
request_max_retries = 0
stream_max_retries = 0
supports_websockets = false
"""

_REPORT = re.compile(
    r"Chunk ID: \w+\n"
    r"Wall time: [\d.]+ seconds\n"
    r"Process (?:exited with code (?P<code>-?\d+)|running with session ID (?P<session>\d+))\n"
    r"(?:Original token count: (?P<tokens>\d+)\n)?"
    r"Output:\n(?P<text>.*)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Report:
    """The client's report to the model about a command, without ids and times."""

    exit_code: int | None
    text: str
    session: int | None = None
    tokens: int | None = None


def report(output: str) -> Report:
    """Takes the text for the model apart."""
    match = _REPORT.fullmatch(output)
    assert match is not None, f"not a report about a command: {output!r}"
    code, session, tokens = (
        None if match[name] is None else int(match[name]) for name in ("code", "session", "tokens")
    )
    return Report(code, match["text"], session, tokens)


def command(call_id: str, text: str, **options: Any) -> ToolCall:
    """A shell command, waited for until it ends unless `yield_time_ms` says less."""
    return ToolCall(call_id, "exec_command", {"cmd": text, "yield_time_ms": 10_000} | options)


def write(
    call_id: str, running: str, chars: str, **options: Any
) -> Callable[[dict[str, str]], list[ToolCall]]:
    """A step that types into the command which an earlier call left running."""

    def step(outputs: dict[str, str]) -> list[ToolCall]:
        arguments = {"session_id": report(outputs[running]).session, "chars": chars}
        return [ToolCall(call_id, "write_stdin", arguments | {"yield_time_ms": 10_000} | options)]

    return step


def patch(call_id: str, *lines: str) -> ToolCall:
    """A patch in the client's own format."""
    return ToolCall(
        call_id, "apply_patch", "\n".join(["*** Begin Patch", *lines, "*** End Patch", ""])
    )


def _variables(home: Path, more: Mapping[str, str]) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "TMPDIR": str(home / "scratch"),
        "CODEX_HOME": str(home),
        "MODEL_KEY": "unused",
        **more,
    }


class Codex:
    """A running `codex exec`."""

    def __init__(
        self, scripted: model.Model, home: Path, workspace: Path, variables: Mapping[str, str]
    ) -> None:
        binary = reference_binary()
        assert binary is not None
        self.model = scripted
        # The processes of the client, listed at every request to the model.
        self._family: dict[int, str] = {}
        scripted.observer = lambda: self._family.update(descendants(self.process.pid))
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by release()
        flags = ["--json", "--skip-git-repo-check", "--ephemeral", "-C", str(workspace)]
        self.process = subprocess.Popen(
            [str(binary), "exec", *flags, "go on"],
            env=_variables(home, variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )

    def completed(self) -> model.Model:
        """Waits for an end without a fault; returns the report to the model."""
        events = self.finish()
        assert self.process.returncode == 0, self.errors()
        assert events[-1]["type"] == "turn.completed", events[-1]
        return self.model

    def interrupt(self) -> None:
        """Interrupt the client as Ctrl-C does."""
        self.process.send_signal(signal.SIGINT)

    def finish(self, timeout: float = 18.0) -> list[dict[str, Any]]:
        """Waits for the client's end; returns the events that it printed."""
        try:
            printed, _ = self.process.communicate(timeout=scaled(timeout))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the client did not end: {self.errors()}") from None
        left = survivors(self._family)
        assert not left, f"processes left behind: {left}"
        return [json.loads(line) for line in printed.splitlines()]

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def release(self) -> None:
        """Ends the rest of the client after a failure, and closes its pipes."""
        if self.process.poll() is None:
            for pid in [*descendants(self.process.pid), self.process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._errors.close()


@contextlib.contextmanager
def start_codex(
    script: Sequence[model.Step],
    workspace: Path,
    *,
    url: str = "",
    environments: str = "",
    variables: Mapping[str, str] | None = None,
    mcp: str = "",
    sandbox: str = "danger-full-access",
    features: Sequence[str] = (),
    name: str = MODEL,
) -> Iterator[Codex]:
    """Runs the client with the server at `url`, those of an environments.toml, or by variables.

    `features` are switched on, `mcp` is appended to the configuration, `name` is that of the model.
    """
    variables = {"CODEX_EXEC_SERVER_URL": url} if variables is None else variables
    with _home() as home:
        if environments:
            (home / "environments.toml").write_text(environments)
        with model.serve(script) as scripted:
            switched = "\n".join(f"{feature} = true" for feature in features)
            configuration = _CONFIGURATION.format(
                model=scripted.url, sandbox=sandbox, features=switched, name=name
            )
            (home / "config.toml").write_text(configuration + mcp)
            client = Codex(scripted, home, workspace, variables)
            try:
                yield client
            finally:
                client.release()


@contextlib.contextmanager
def start_app_server(
    variables: Mapping[str, str],
    *,
    url: str = "http://127.0.0.1:9",
    sandbox: str = "read-only",
    features: Sequence[str] = (),
) -> Iterator[Client]:
    """Runs the client as a server for editors, on its standard streams, past its handshake.

    `url` is that of a model, if one is asked.
    """
    binary = reference_binary()
    assert binary is not None
    with _home() as home:
        switched = "\n".join(f"{each} = true" for each in features if each != "plugins")
        text = _CONFIGURATION.format(model=url, sandbox=sandbox, features=switched, name=MODEL)
        if "plugins" in features:
            text = text.replace("\nplugins = false", "\nplugins = true")
        (home / "config.toml").write_text(text)
        process = subprocess.Popen(
            [str(binary), "app-server"],
            env=_variables(home, variables),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        with process:
            client = Client(StdioLink(process))
            try:
                client.call(
                    "initialize",
                    {
                        "clientInfo": {"name": "tests", "version": "1"},
                        "capabilities": {"experimentalApi": True},
                    },
                )
                client.notify("initialized")
                yield client
                client.close()
                assert process.wait(scaled(DEFAULT_TIMEOUT)) == 0
            finally:
                process.kill()


@contextlib.contextmanager
def _home() -> Iterator[Path]:
    """A folder for the client's configuration and its other files."""
    # Below a temporary directory the client does without its helper programs.
    cache = Path(server_environment("reference")["CODEX_HOME"]).parent
    home = Path(tempfile.mkdtemp(prefix="client-", dir=cache))
    try:
        (home / "scratch").mkdir()
        yield home
    finally:
        shutil.rmtree(home)


def environment(**members: Any) -> str:
    """An environments.toml with one environment, the default."""
    lines = ['default = "remote"', "include_local = false", "[[environments]]", 'id = "remote"']
    return "\n".join([*lines, *(f"{name} = {_toml(value)}" for name, value in members.items())])


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_toml(v)}" for name, v in value.items()) + " }"
    return json.dumps(value, ensure_ascii=False)


def appears(path: Path, timeout: float = 10.0) -> None:
    """Waits for a file that a command creates to show its progress."""
    deadline = time.monotonic() + scaled(timeout)
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not appear"
        time.sleep(0.01)
