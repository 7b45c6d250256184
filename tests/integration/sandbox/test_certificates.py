"""The certificates of masked commands: no command changes what another one trusts.

Once the file was in /tmp, where every workspace-write command could add an authority to it.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from tests.support.barriers import User
from tests.support.client import Client
from tests.support.network import network_proxy
from tests.support.raw_links import b64
from tests.support.sandbox import (
    USERS,
    Outcome,
    Stage,
    entry,
    policy,
    read_only,
    run,
    special,
    start_stage,
    workspace_write,
)

Json = dict[str, Any]

_MASKED = network_proxy(domains={"*": "allow"}, credentialMasking=True)
_SHOW = 'echo "$SSL_CERT_FILE"; cat "$SSL_CERT_FILE"'
# Each way to change a file, or what is at its path.
_CHANGES = (
    "echo forged >> {0}",
    "rm -f {0}",
    "mv {0} {0}.away",
    "ln -sf /etc/passwd {0}",
    "chmod 666 {0}",
    "rm -f {0} && mkdir {0}",
    "mv {1} {1}.away",
)


def _masked(client: Client, sandbox: Json | None, script: str = _SHOW) -> Outcome:
    return run(client, sandbox, ["/bin/sh", "-c", script], networkProxy=_MASKED)


def _host_file(client: Client) -> tuple[Path, str]:
    """The path that unconfined commands have, and its content as they see it."""
    shown = _masked(client, None)
    assert shown.exit_code == 0, shown.output
    path, _, content = shown.stdout.partition("\n")
    assert content.count("BEGIN CERTIFICATE") >= 1
    return Path(path), content


def _policies(stage: Stage) -> dict[str, Json]:
    return {
        "workspace": workspace_write(stage.ws),
        "temporary": workspace_write(
            stage.ws, special("slash_tmp", "write"), entry("/tmp", "write")
        ),
        # Without the second entry files would not be limited at all.
        "everything": policy(special("root", "write"), entry(stage.ws / "sub", "deny")),
    }


@pytest.mark.parametrize("name", ["workspace", "temporary", "everything"])
def test_a_confined_command_cannot_change_the_file_of_others(
    stage: Stage, client: Client, name: str
) -> None:
    path, content = _host_file(client)
    for change in _CHANGES[:-1]:
        script = change.format(shlex.quote(str(path)))
        attacked = run(client, _policies(stage)[name], ["/bin/sh", "-c", script])
        assert attacked.exit_code != 0, script
        assert path.read_text() == content
    assert _host_file(client) == (path, content)


@pytest.mark.parametrize("name", ["read-only", "workspace", "everything", "granted alone"])
def test_a_masked_command_reads_a_file_of_its_own_view(
    stage: Stage, client: Client, name: str
) -> None:
    _, content = _host_file(client)
    policies = _policies(stage) | {
        "read-only": read_only(),
        # In an empty root the file of the host would not be there.
        "granted alone": policy(special("minimal", "read"), entry(stage.ws, "write")),
    }
    shown = _masked(client, policies[name])
    assert shown.stdout == f"/dev/exec-server-ca/certificates.pem\n{content}"
    for change in _CHANGES:
        script = change.format('"$SSL_CERT_FILE"', '"$(dirname "$SSL_CERT_FILE")"')
        attacked = _masked(client, policies[name], f"({script}); code=$?; {_SHOW}; exit $code")
        assert attacked.exit_code != 0, script
        assert attacked.stdout == shown.stdout
    assert _masked(client, policies[name]).stdout == shown.stdout


def test_a_change_by_a_file_operation_lasts_until_the_next_masked_start(
    stage: Stage, client: Client
) -> None:
    """A policy that grants the directory grants it to file operations: docs/security.md says so."""
    path, content = _host_file(client)
    grants = policy(special("root", "read"), entry(path.parent, "write"))
    params = {"path": path.as_uri(), "dataBase64": b64("forged"), "sandbox": grants}
    assert client.call("fs/writeFile", params) == {}
    assert path.read_text() == "forged"
    assert _host_file(client) == (path, content)


def test_views_without_masked_credentials_have_no_such_file(stage: Stage, client: Client) -> None:
    shown = run(client, workspace_write(stage.ws), ["/bin/sh", "-c", "ls -d /dev/exec-server*"])
    assert shown.exit_code != 0


@pytest.mark.parametrize("user", USERS)
def test_a_lost_file_costs_nothing(user: User) -> None:
    """An unconfined command may do anything to the file."""
    with start_stage(user) as stage, stage.server.connect() as client:
        first, content = _host_file(client)
        paths = {first}
        for change in _CHANGES[:-1]:
            path, _ = _host_file(client)
            script = change.format(shlex.quote(str(path)))
            assert run(client, None, ["/bin/sh", "-c", script]).exit_code == 0
            again, restored = _host_file(client)
            paths.add(again)
            assert restored == content
            shown = _masked(client, workspace_write(stage.ws))
            assert shown.stdout.endswith(f"\n{content}")
        again.unlink()
        stage.server.stop()
        assert "Traceback" not in stage.server.stderr()
        # What commands have put there instead is theirs.
        for path in paths:
            if path.is_dir():
                path.rmdir()
            path.with_name(f"{path.name}.away").unlink(missing_ok=True)
        assert not any(path.exists() for path in paths)
