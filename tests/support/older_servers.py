"""Older versions of the reference: where they are installed, and their recorded handshakes.

`python -m tests.support.older_servers VERSION ...` records the answers of installed versions to
`initialize`, `environment/info` and all probes into tests/vectors/handshakes.json.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from exec_server.client.engine.messages import Failure
from exec_server.client.engine.server_features import PROBES, Answer
from tests.support.client import (
    Client,
    RpcFailure,
    WebSocketLink,
    descendants,
    server_environment,
    survivors,
)

# The first version that the client supports.
_FIRST = [0, 121, 0]
# Stands for the home of the user who recorded.
_HOME = "file:///home/demo"
HANDSHAKES = Path(__file__).resolve().parents[1] / "vectors" / "handshakes.json"


def cache() -> Path:
    """The folder with one folder for each installed version."""
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "exec-server-versions"


def older_binary(version: str) -> Path | None:
    """The program of a version, None if that is not installed."""
    pattern = "node_modules/@openai/codex*/vendor/*/*/codex"
    return next(iter(sorted((cache() / version).glob(pattern))), None)


def installed_versions() -> list[str]:
    """The installed versions that the client supports, oldest first.

    The variable EXEC_SERVER_OLDER_VERSIONS names those to use; by default all of them are used.
    """
    chosen = os.environ.get("EXEC_SERVER_OLDER_VERSIONS", "").split()
    names = chosen or [each.name for each in cache().glob("*.*.*")]
    folders = [name for name in names if older_binary(name) is not None]
    return sorted((each for each in folders if _age(each) >= _FIRST), key=_age)


def _age(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def recorded() -> dict[str, dict[str, Any]]:
    """The recordings by version, oldest first."""
    found: dict[str, dict[str, Any]] = json.loads(HANDSHAKES.read_text())
    return found


def answers(recording: dict[str, Any]) -> list[Answer]:
    """The recorded answers to the probes, as the client decodes them."""
    return [_answer(answer) for answer in recording["probes"]]


def _answer(answer: dict[str, Any]) -> Answer:
    if "error" in answer:
        return msgspec.convert(answer["error"], Failure).exception()
    return msgspec.Raw(json.dumps(answer["result"]).encode())


@contextmanager
def start_older_server(version: str) -> Iterator[str]:
    """The URL of a server of an installed version, which is killed at the end.

    The oldest ones do not end on SIGTERM.
    """
    with _running(version, "--listen", "ws://127.0.0.1:0") as process:
        assert process.stdout is not None
        yield process.stdout.readline().decode().strip()


@contextmanager
def start_older_executor(version: str, registry: str, environment_id: str) -> Iterator[None]:
    """An executor of an installed version, with each credential that some version asks for."""
    name = "--executor-id" if _age(version) < [0, 133] else "--environment-id"
    variables = {"CODEX_EXEC_SERVER_REMOTE_BEARER_TOKEN": "token"}
    # From then on a key takes precedence over the sign-in; before, it was refused.
    if _age(version) >= [0, 136]:
        variables["CODEX_API_KEY"] = "key"
    with tempfile.TemporaryDirectory(dir=cache()) as home:
        (Path(home) / "auth.json").write_text(json.dumps(_sign_in()))
        variables["CODEX_HOME"] = home
        flags = ("--remote", registry, name, environment_id)
        with _running(version, *flags, variables=variables):
            yield


def _sign_in() -> dict[str, Any]:
    """A stored sign-in that is fresh."""
    account = {"chatgpt_account_id": "acc-9", "chatgpt_plan_type": "pro"}
    claims = {"email": "a@example.net", "https://api.openai.com/auth": account}
    parts: list[Any] = [{"alg": "none"}, claims, {}]
    texts = (base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in parts)
    token = b".".join(texts).decode()
    tokens = {"id_token": token, "access_token": "access", "refresh_token": "refresh"}
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"OPENAI_API_KEY": None, "tokens": tokens | {"account_id": "acc-9"}, "last_refresh": now}


@contextmanager
def _running(
    version: str, *flags: str, variables: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    binary = older_binary(version)
    assert binary is not None, f"{version} is not installed"
    process = subprocess.Popen(
        [str(binary), "exec-server", *flags],
        env=server_environment("reference") | (variables or {}),
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    try:
        yield process
    finally:
        below = descendants(process.pid)
        for pid in [process.pid, *below]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        assert not survivors(below)


def record(version: str) -> dict[str, Any]:
    """Ask a server of this version as the client does."""
    with start_older_server(version) as url, Client(WebSocketLink(url)) as client:
        greeting = _ask(client, "initialize", {"clientName": "test", "resumeSessionId": None})
        client.notify("initialized", {})
        return {
            "initialize": greeting,
            "environment/info": _ask(client, "environment/info", None),
            "probes": [_ask(client, probe.method, probe.params) for probe in PROBES],
        }


def _ask(client: Client, method: str, params: Any) -> dict[str, Any]:
    try:
        return {"result": client.call(method, params)}
    except RpcFailure as failure:
        return {"error": {"code": failure.code, "message": failure.message}}


def main(versions: list[str]) -> None:
    recordings = recorded() if HANDSHAKES.exists() else {}
    recordings |= {version: record(version) for version in versions}
    by_age = sorted(recordings, key=_age)
    lines = ",\n".join(
        f"{json.dumps(version)}:{json.dumps(recordings[version])}" for version in by_age
    )
    home = f"file://{Path.home()}"
    HANDSHAKES.write_text(
        f"{{\n{lines}\n}}\n".replace(f"file://{cache()}", "file:///versions").replace(home, _HOME)
    )


if __name__ == "__main__":
    main(sys.argv[1:])
