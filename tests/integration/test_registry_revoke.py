"""`token revoke --kill`: the commands of a client end with its token, those of others do not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.cli import client_environment, start_client
from tests.support.client import scaled
from tests.support.registry import ENVIRONMENT, Node, start_executor, start_node
from tests.support.server_internals import eventually


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _command(node: Node, token: str, file: Path, *, is_away: bool = False) -> Iterator[int]:
    """The pid of a command on the executor, whose client may have died since."""
    words = ("exec", "--token-env", "TOKEN", f"relay:{node.url}/{ENVIRONMENT}", "--")
    script = f"echo $$ > {file}.new; mv {file}.new {file}; exec sleep 1000"
    environment = client_environment(None, {"TOKEN": token})
    with start_client(*words, "sh", "-c", script, env=environment) as client:
        try:
            eventually("the command runs", file.exists)
            if is_away:
                client.kill()
                client.wait(scaled(10))
            yield int(file.read_text())
        finally:
            client.kill()


@pytest.mark.parametrize("is_away", [False, True], ids=["connected", "away"])
def test_commands_of_a_revoked_client_end_before_their_session_expires(
    tmp_path: Path, is_away: bool
) -> None:
    with start_node(tmp_path / "data") as node, start_executor(node):
        made = node.site.create_token("connect:*")
        revoked = _command(node, made["token"], tmp_path / "revoked", is_away=is_away)
        with _command(node, node.site.client_token, tmp_path / "kept") as kept, revoked as pid:
            assert _is_running(pid)
            answer = node.site.admin("token", "revoke", made["id"], "--kill")
            assert answer == {"id": made["id"], "revoked": True, "killed": True}
            # Its session alone would live for 80 s.
            eventually("the command is killed", lambda: not _is_running(pid), 15)
            assert _is_running(kept)
