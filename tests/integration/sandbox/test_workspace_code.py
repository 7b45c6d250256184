"""A confined command leaves modules and programs in the workspace, where the server was started.

Whatever the server imported or ran from there would be out of the sandbox: it would leave its mark
beside the workspace, where the policy allows nothing to be written.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.barriers import User, start_server_as, user_id
from tests.support.client import Client, uri
from tests.support.hostile_directory import Trap
from tests.support.network import PATH, network_proxy
from tests.support.sandbox import USERS, Scratch, run, workspace_write

from exec_server.host.interpreter import NEEDED

_PROVIDER = {
    "env": ["DEMO_TOKEN"],
    "patterns": ["demo-[a-z]{6,}"],
    "url_prefixes": ["https://custom.test/v1/"],
}
_MASKING = network_proxy(
    domains={"*": "allow"}, credentialMasking=True, credentialProviders={"demo": _PROVIDER}
)
_MODULES = (*NEEDED, "exec_server", "json", "shlex", "sitecustomize")


@pytest.fixture(params=USERS)
def scratch(request: pytest.FixtureRequest) -> Iterator[tuple[Scratch, User]]:
    user: User = request.param
    with Scratch(user_id(user)) as made:
        made.apply([{"mkdir": "ws"}, {"mkdir": "ws/bin"}, {"write": ["ws/a.txt", "one two\n"]}])
        yield made, user


def _plant(client: Client, ws: Path, trap: Trap) -> None:
    """Write the modules and a program by a confined command."""
    files = {ws / f"{name}.py": trap.text(name) for name in _MODULES if name != "exec_server"}
    files[ws / "exec_server" / "__init__.py"] = trap.text("exec_server")
    files[ws / "bin" / "rg"] = f"#!/bin/sh\necho rg >> {ws.parent / 'mark'}\n"
    script = 'mkdir -p exec_server; while [ $# -gt 0 ]; do printf %s "$2" > "$1"; shift 2; done'
    words = [word for path, text in files.items() for word in (str(path), text)]
    argv = ["/bin/sh", "-c", f"{script}; chmod +x bin/rg", "sh", *words]
    outcome = run(client, workspace_write(ws), argv, cwd=uri(ws))
    assert outcome.exit_code == 0, outcome
    assert (ws / "exec_server" / "__init__.py").read_text() == trap.text("exec_server")


def test_what_a_confined_command_writes_is_not_run_outside(scratch: tuple[Scratch, User]) -> None:
    made, user = scratch
    ws = made.base / "ws"
    trap = Trap(ws, made.base / "mark")
    path = f"{ws / 'bin'}:{PATH}"
    with (
        start_server_as("ours", user, cwd=ws, env={"PATH": path}) as server,
        server.connect() as client,
    ):
        _plant(client, ws, trap)
        found = client.call("fs/grep", {"path": uri(ws), "pattern": "one", "glob": "*.txt"})
        assert [match["path"] for match in found["matches"]] == ["a.txt"]
        ended = client.run(
            ["/usr/bin/env"],
            env={"PATH": PATH, "DEMO_TOKEN": "demo-" + "s" * 20},
            networkProxy=_MASKING,
        )
        assert b"DEMO_TOKEN=demo-" in ended.stdout
        assert run(client, workspace_write(ws), ["/bin/true"], cwd=uri(ws)).exit_code == 0
    assert trap.names == []
