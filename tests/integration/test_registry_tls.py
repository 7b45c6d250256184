"""A registry with a self-signed certificate: login, up, `--remote` and relay targets pin it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.cli import run_client
from tests.support.client import DEFAULT_TIMEOUT, Server, scaled
from tests.support.registry import Node, start_node

from exec_server.net.self_signed import read_facts
from exec_server.sync import connect


def _stop(server: Server) -> None:
    server.process.terminate()
    try:
        assert server.process.wait(scaled(DEFAULT_TIMEOUT)) == 0, server.stderr()
    except subprocess.TimeoutExpired:
        server.kill()
        raise
    finally:
        server.release()


def test_pins_replace_the_issuer_everywhere(tmp_path: Path) -> None:
    made = run_client("tls-init", str(tmp_path / "tls"))
    assert made.returncode == 0, made.stderr
    certificate = tmp_path / "tls" / "cert.pem"
    pin = read_facts(certificate.read_bytes()).fingerprint
    files = ("--tls-cert", str(certificate), "--tls-key", str(tmp_path / "tls" / "key.pem"))
    with start_node(tmp_path / "data", *files) as node:
        _check(node, tmp_path, pin, str(certificate))


def _check(node: Node, tmp_path: Path, pin: str, certificate: str) -> None:
    assert node.url.startswith("https://127.0.0.1:")
    assert (node.get("/metrics").status, node.get("/readyz").status) == (403, 200)
    variables = {"XDG_CONFIG_HOME": str(tmp_path)}
    executor, client = (t.encode() for t in (node.site.executor_token, node.site.client_token))
    refused = run_client("login", node.url, env=variables, input=executor)
    assert (refused.returncode, refused.stdout) == (1, b"")
    assert b"certificate" in refused.stderr
    login = ("login", node.url, "--ca-file", certificate)
    assert run_client(*login, env=variables, input=executor).returncode == 0
    login = ("login", node.url, "--pin", pin)
    assert run_client(*login, env=variables, input=client).returncode == 0
    up = Server("ours", ["up", "--environment-id", "box"], env=variables)
    try:
        up.read_url()
        target = f"relay:{node.url}/box"
        ended = run_client("exec", target, "--", "echo", "one", env=variables)
        assert (ended.returncode, ended.stdout) == (0, b"one\n"), ended
        other = "sha256:" + "00" * 32
        wrong = run_client("exec", "--pin", other, target, "true", env=variables)
        assert wrong.returncode == 255
        assert b"is not pinned" in wrong.stderr
        facts = {"registry": node.url, "environment_id": "box", "token": client.decode()}
        with connect(**facts, pin=pin) as env:  # type: ignore[arg-type]
            assert env.run(["echo", "two"]).stdout == b"two\n"
    finally:
        _stop(up)
    remote = ["--remote", node.url, "--environment-id", "box", "--registry-auth", "api-key"]
    variables = {"EXEC_SERVER_API_KEY": executor.decode(), "XDG_STATE_HOME": str(tmp_path)}
    refused = run_client(*remote, "--pin", other, env=variables)
    assert refused.returncode == 1
    assert b"is not pinned" in refused.stderr
    assert executor not in refused.stderr
