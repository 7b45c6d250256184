"""Older versions of the reference: where they are installed, recorded handshakes, one in memory.

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
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from exec_server.client.arguments import PathResolver
from exec_server.client.engine.messages import Failure
from exec_server.client.engine.server_features import PROBES, Answer, ServerFeatures
from exec_server.client.polyfills import Polyfills
from exec_server.client.results import Result
from exec_server.errors import NotFound
from exec_server.protocol import files as wire
from exec_server.protocol.decoding import Call
from tests.support.client import (
    Client,
    RpcFailure,
    WebSocketLink,
    descendants,
    reference_cache,
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
    found = sorted((cache() / version).glob(pattern))
    manifest = reference_cache() / "node_modules/@openai/codex/package.json"
    if not found and manifest.exists() and json.loads(manifest.read_text())["version"] == version:
        found = sorted(reference_cache().glob(pattern))
    return next(iter(found), None)


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


_ENOENT = "No such file or directory"


class OlderMachine:
    """`contents` are the files, `links` the symlinks with their absolute targets."""

    def __init__(
        self,
        features: ServerFeatures,
        contents: dict[str, bytes],
        links: dict[str, str] | None = None,
    ) -> None:
        info = SimpleNamespace(user_home_dir=None, cwd="file:///w", temp_dir="file:///tmp")
        paths = PathResolver(cast(Any, info))
        self.contents = dict(contents)
        self.links = links or {}
        self.unreadable: set[str] = set()
        self.asked: list[str] = []
        self.ran: list[list[str]] = []
        self.sandboxes: list[Any] = []
        # The end of the next commands.
        self.lost_bytes = 0
        self.failure: str | None = None
        self.exit_code = 1
        self.session = cast(
            Any, SimpleNamespace(features=features, call_server=self._call_server, call=self._call)
        )
        self.commands = cast(Any, SimpleNamespace(run=self._run))
        self._missing = features.missing_methods
        self.polyfills = Polyfills(self.session, paths, self.commands).table

    # ---- methods ----------------------------------------------------------------------

    async def _call(self, call: Call[Any, Any], params: Any, **_: Any) -> Any:
        if call.name in self._missing:
            return await self.polyfills[call.name](params)
        return await self._call_server(call, params)

    async def _call_server(self, call: Call[Any, Any], params: Any, **_: Any) -> Any:
        self.asked.append(call.name)
        answer = getattr(self, "_" + call.name.partition("/")[2])
        return answer(params)

    def _getMetadata(self, params: wire.GetMetadataParams) -> wire.GetMetadataResult:  # noqa: N802
        named = params.path.native()
        path = self._resolved(named)
        if path not in self.contents and not self._is_directory(path):
            raise NotFound(f"{_ENOENT} (os error 2)")
        is_file = path in self.contents
        return wire.GetMetadataResult(not is_file, is_file, named in self.links, 0, 1, 2)

    def _canonicalize(self, params: wire.CanonicalizeParams) -> wire.CanonicalizeResult:
        return wire.CanonicalizeResult(self._resolved(params.path.native()))

    def _readDirectory(  # noqa: N802
        self, params: wire.ReadDirectoryParams
    ) -> wire.ReadDirectoryResult:
        path = params.path.native().rstrip("/")
        if path in self.unreadable:
            raise NotFound(f"{_ENOENT} (os error 2)")
        below = [*self.contents, *self.links]
        inside = [each[len(path) + 1 :] for each in below if each.startswith(f"{path}/")]
        names = {each.split("/")[0] for each in inside}
        entries = []
        for name in names:
            found = self._resolved(f"{path}/{name}")
            is_file = found in self.contents
            entries.append(wire.DirectoryEntry(name, not is_file, is_file))
        return wire.ReadDirectoryResult(entries)

    def _readFile(self, params: wire.ReadFileParams) -> wire.ReadFileResult:  # noqa: N802
        return wire.ReadFileResult(self.contents[params.path.native()])

    def _writeFile(self, params: wire.WriteFileParams) -> wire.Done:  # noqa: N802
        assert params.data_base64 == ""
        self.contents[params.path.native()] = b""
        return wire.Done()

    def _open(self, params: wire.OpenParams) -> wire.OpenResult:
        self._opened = params.path.native()
        return wire.OpenResult(params.handle_id)

    def _readBlock(self, params: wire.ReadBlockParams) -> wire.ReadBlockResult:  # noqa: N802
        data = self.contents[self._opened][params.offset : params.offset + params.len]
        return wire.ReadBlockResult(data, len(data) < params.len)

    def _close(self, params: wire.CloseParams) -> wire.Done:
        return wire.Done()

    def _resolved(self, path: str) -> str:
        for link, target in self.links.items():
            if path == link or path.startswith(f"{link}/"):
                return self._resolved(target + path[len(link) :])
        return path

    def _is_directory(self, path: str) -> bool:
        return path == "/" or any(each.startswith(f"{path}/") for each in self.contents)

    # ---- commands ---------------------------------------------------------------------

    async def _run(
        self,
        argv: list[str],
        *,
        sandbox: Any,
        input: bytes | None = None,  # noqa: A002 - the name in Environment.run
        **_: Any,
    ) -> Result:
        self.ran.append(argv)
        self.sandboxes.append(sandbox)
        data = input or b""
        program = argv[2].split()[0].lstrip("{[") if argv[0] == "/bin/sh" else argv[0]
        words = argv[4:] if argv[0] == "/bin/sh" else argv[1:]
        if self.failure is not None:
            return self._result(argv, b"", self.failure.encode(), self.exit_code)
        if "tail" in argv[2]:
            return self._tail(argv, *words)
        if program == "dd":
            path, size, count = words
            offset = int(size) * int(count)
            old = self.contents[path].ljust(offset, b"\0")
            self.contents[path] = old[:offset] + data + old[offset + len(data) :]
            return self._result(argv)
        if program == "stat":
            return self._result(argv, b"%d\n" % len(self.contents[self._resolved(words[-1])]))
        path = self._resolved(words[0])  # readlink
        exists = path in self.contents or self._is_directory(path)
        return self._result(argv, path.encode() if exists else b"", b"", 0 if exists else 4)

    def _tail(self, argv: list[str], path: str, start: str, size: str) -> Result:
        if path not in self.contents:
            return self._result(argv, b"", f"sh: {path}: {_ENOENT}\n".encode(), 2)
        begin = int(start) - 1
        return self._result(argv, self.contents[path][begin : begin + int(size)])

    def _result(
        self, argv: list[str], stdout: bytes = b"", stderr: bytes = b"", exit_code: int = 0
    ) -> Result:
        return Result(tuple(argv), stdout, stderr, exit_code, 0.0, lost_bytes=self.lost_bytes)
