"""No server imports a module of the directory in which it was started, whatever starts it.

The directory of an agent is its workspace. A server that imported `regex` from there would run code
of a confined command without confinement.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jwt
import pytest
from tests.support import hostile_directory
from tests.support.client import start_server
from tests.support.client_targets import bounded
from tests.support.hostile_directory import Trap
from tests.support.network import SETTINGS, WebOrigin, web_origin
from tests.support.sandbox import read_only
from tests.support.trees import write_files

from exec_server import Environment, serve, sync
from exec_server.adapters import target as adapter_target
from exec_server.client.engine.stdio import StdioDialer
from exec_server.client.targets import find_target
from exec_server.host import interpreter
from exec_server.notebook.remote_cell import NotebookConnections
from exec_server.protocol import codex
from exec_server.protocol.paths import PathUri

_STDIO = ("--listen", "stdio")
_SCRIPT = Path(sys.executable).with_name("exec-server")
_SECRET = "demo-" + "s" * 20
_MASKING = {
    "proxy": SETTINGS
    | {
        "domains": {"*": "allow"},
        "credentialMasking": True,
        "credentialProviders": {
            "demo": {
                "env": ["DEMO_TOKEN"],
                "patterns": ["demo-[a-z]{6,}"],
                "url_prefixes": ["https://custom.test/v1/"],
            }
        },
    }
}


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trap:
    """An empty directory, which is that of this process, too."""
    folder = tmp_path / "workspace"
    folder.mkdir()
    home = tmp_path / "home"
    write_files(
        home,
        {
            "skills/good/SKILL.md": "---\nname: good\ndescription: a skill\n---\n",
            "config.toml": "model = 'one'\n",
        },
    )
    monkeypatch.setenv("CODEX_HOME", str(home))
    monkeypatch.chdir(folder)
    return Trap(folder, tmp_path / "mark")


@pytest.fixture
def origin() -> Iterator[WebOrigin]:
    with web_origin() as running:
        yield running


def _program(*words: str) -> sync.Environment:
    return sync.Environment(lambda: Environment(StdioDialer([*words, *_STDIO])), has_children=True)


def _notebook() -> sync.Environment:
    words = shlex.join([sys.executable, "-P", "-m", "exec_server", *_STDIO])
    return NotebookConnections().get(find_target(f"stdio:{words}"))


_WAYS: dict[str, Callable[[], sync.Environment]] = {
    "library": lambda: sync.Environment(Environment.local, has_children=True),
    "sync": sync.Environment.local,
    "adapter": lambda: adapter_target.open_environment(None, {}),
    "async adapter": lambda: sync.Environment(
        lambda: adapter_target.make_environment(None, {}), has_children=True
    ),
    "unit": lambda: _program(*interpreter.server_words(os.environ)),
    "script": lambda: _program(str(_SCRIPT)),
    "notebook": _notebook,
}
_TYPED = [sys.executable, "-m", "exec_server"]


def _use(env: sync.Environment, folder: Path) -> None:
    """Requests for which a server imports a module."""
    (folder / "text.md").write_text("one two\n")
    assert len(env.files.grep("one(?= two)", folder, glob="*.md")) == 1
    variables = {"DEMO_TOKEN": _SECRET}
    shown = env.run(["/usr/bin/env"], env=variables, network_proxy=_MASKING).text
    assert "DEMO_TOKEN=demo-" in shown
    assert _SECRET not in shown


def _use_all(env: sync.Environment, folder: Path, origin: WebOrigin) -> None:
    """All kinds of requests with imports of their own."""
    _use(env, folder)
    assert env.run(["/bin/echo", "confined"], sandbox=read_only()).text == "confined\n"
    cwd = PathUri.from_text("/")
    found = env.call(codex.DISCOVER, codex.DiscoverParams(cwd))
    assert [skill.name for skill in found.skills] == ["good"]
    config = env.call(codex.READ_CONFIG, codex.ReadConfigParams(cwd, [["model"]], []))
    assert [layer.toml for layer in config.config.layers] == ['model = "one"\n']
    assert env.http("GET", origin.url).status == 200
    assert len(env.files.sandboxed(read_only()).grep("one", folder, glob="*.md")) == 1
    env.files.edit(folder / "text.md", [("one", "three")])


@pytest.mark.parametrize("way", _WAYS)
def test_no_way_to_start_a_server_imports_from_its_directory(trap: Trap, way: str) -> None:
    trap.set()
    with _WAYS[way]() as env:
        _use(env, trap.folder)
    assert trap.names == []


def test_serve(trap: Trap) -> None:
    trap.set()

    async def scene() -> None:
        async with serve(cwd=trap.folder) as server:
            await asyncio.to_thread(_use_server, server.url, trap.folder)

    bounded(scene())
    assert trap.names == []


def _use_server(url: str, folder: Path) -> None:
    with sync.connect(url) as env:
        _use(env, folder)


@pytest.mark.parametrize("is_late", [False, True], ids=["before", "after"])
def test_a_server_that_a_person_has_started_by_m(
    trap: Trap, origin: WebOrigin, *, is_late: bool
) -> None:
    """The package itself cannot be protected from a package of its name in the directory."""
    if not is_late:
        trap.set(hostile_directory.names_after_start())
    with _program(*_TYPED) as env:
        if is_late:
            trap.set()
        _use_all(env, trap.folder, origin)
    assert trap.names == []


@pytest.mark.parametrize("value", [".", ":", "{}/below"])
def test_a_pythonpath_is_not_for_servers(
    trap: Trap, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    """It is for programs of the user, which inherit it."""
    trap.set()
    below = Trap(trap.folder / "below", trap.folder.parent / "mark")
    below.folder.mkdir()
    below.set()
    value = value.format(trap.folder)
    monkeypatch.setenv("PYTHONPATH", value)
    with sync.Environment.local() as env:
        _use(env, trap.folder)
        assert env.run(["/bin/sh", "-c", 'echo "$PYTHONPATH"']).text == f"{value}\n"
    assert trap.names == []


@pytest.mark.parametrize("value", [".", "{}"])
def test_a_pythonpath_of_a_server_that_a_person_has_started(
    trap: Trap, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    """What is there at its start is imported before the server can prevent it."""
    monkeypatch.setenv("PYTHONPATH", value.format(trap.folder))
    with _program(str(_SCRIPT)) as env:
        trap.set()
        _use(env, trap.folder)
    assert trap.names == []


def test_signed_tokens(trap: Trap) -> None:
    secret = "s" * 40
    (trap.folder / "secret").write_text(secret)
    flags = ("--ws-auth", "signed-bearer-token", "--ws-shared-secret-file", "secret")
    token = jwt.encode({"exp": int(time.time()) + 60}, secret, "HS256")
    with start_server("ours", *flags, cwd=trap.folder) as server:
        trap.set()
        with server.connect(headers=[("Authorization", f"Bearer {token}")]) as client:
            assert client.call("environment/status") == {"status": "ready"}
    assert trap.names == []


def test_commands_of_a_person(trap: Trap) -> None:
    """`exec-server mcp` is one that runs for long; its framework is missing here."""
    trap.set([*hostile_directory.names_after_start(), "mcp"])
    done = subprocess.run(
        [*_TYPED, "mcp", "ws://127.0.0.1:1"], capture_output=True, text=True, check=False
    )
    assert "needs mcp (extra `mcp`): pip install" in done.stderr
    assert trap.names == []


def test_bytecode_comes_from_nowhere_else(trap: Trap, monkeypatch: pytest.MonkeyPatch) -> None:
    """A PYTHONPYCACHEPREFIX below /tmp is open to confined commands."""
    cache = trap.folder / "cache"
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(cache))
    with sync.Environment.local() as env:
        trap.forge_bytecode("regex", cache)
        _use(env, trap.folder)
    assert trap.names == []
