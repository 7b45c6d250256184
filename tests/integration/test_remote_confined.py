"""An executor confined as a whole: `exec-server sandbox run … -- exec-server --remote …`."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.relay_service import ThreadedRelayService
from tests.support.client import Client, Server, server_command, uri
from tests.support.relay import connect, remote_flags, wait_attached
from tests.support.sandbox import workspace_write

KEY = f"confined-{secrets.token_hex(8)}"


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    """Of an executor that may write `tmp_path` alone; /tmp as a whole is no root here."""
    policy = tmp_path.parent / "policy.json"
    special = '{"path": {"type": "special", "value": {"kind": "%s"}}, "access": "%s"}'
    entries = ", ".join(special % row for row in (("root", "read"), ("project_roots", "write")))
    policy.write_text(
        '{"type": "managed", "network": "enabled", '
        f'"file_system": {{"type": "restricted", "entries": [{entries}]}}}}'
    )
    words = ["sandbox", "run", "--policy", str(policy), "--root", str(tmp_path)]
    words += ["--cwd", str(tmp_path), "--", *server_command("ours"), "--key-file", "none"]
    with ThreadedRelayService() as service:
        executor = Server("ours", [*words, *remote_flags(service)], env={"CODEX_API_KEY": KEY})
        try:
            wait_attached(service, executor)
            with connect(service) as connected:
                yield connected
            executor.stop()
        finally:
            executor.kill()
            executor.release()


def test_commands_without_a_sandbox_are_confined(client: Client, tmp_path: Path) -> None:
    outside = tmp_path.parent / "outside"
    script = f"touch {tmp_path}/inside; touch {outside}"
    assert client.run(["/bin/sh", "-c", script]).exit_code != 0
    assert (tmp_path / "inside").exists()
    assert not outside.exists()
    written = {"path": uri(outside), "dataBase64": ""}
    assert "Read-only file system" in client.failure("fs/writeFile", written)[1]


def test_the_key_is_out_of_reach(client: Client) -> None:
    look = "env; cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n'"
    shown = client.run(["/bin/sh", "-c", look]).stdout
    assert b"--environment-id" in shown
    assert KEY.encode() not in shown


def test_a_sandbox_of_the_client_is_refused(client: Client, tmp_path: Path) -> None:
    """The outer sandbox has network and limited files, and so no namespaces inside."""
    start = {"processId": "p", "argv": ["true"], "cwd": uri(tmp_path), "env": {}, "tty": False}
    _, text = client.failure("process/start", {**start, "sandbox": workspace_write(tmp_path)})
    assert "the requested sandbox is not available on this machine" in text
    assert "cannot create namespaces: Operation not permitted" in text
