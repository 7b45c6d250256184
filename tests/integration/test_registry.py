"""`exec-server registry` with our executor and our client: from the first start to the drain."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import secrets
import signal
import socket
import sqlite3
import ssl
import stat
from base64 import b64encode
from pathlib import Path

import pytest
from tests.support.balancer import start_balancer
from tests.support.certificates import make_pair
from tests.support.cli import run_client, start_client, stderr_text
from tests.support.client import scaled
from tests.support.client_targets import COUNTED, Recorder, bounded
from tests.support.registry import (
    ENVIRONMENT,
    Node,
    RawClient,
    RawExecutor,
    free_port,
    start_executor,
    start_node,
)
from tests.support.server_internals import eventually

from exec_server import connect
from exec_server.client.engine.relay import RelayDialer
from exec_server.client.engine.session import ClientSession
from exec_server.protocol.session import STATUS
from exec_server.relay.frames import Frame, Kind


def dialer(node: Node, name: str = ENVIRONMENT) -> RelayDialer:
    return RelayDialer(node.url, name, token=node.site.client_token)


@pytest.mark.quick
def test_from_nothing_to_a_command_on_the_machine(tmp_path: Path) -> None:
    async def scene(node: Node) -> None:
        token = node.site.client_token
        async with connect(registry=node.url, environment_id=ENVIRONMENT, token=token) as env:
            assert (await env.run(["printf", "%s", "there"])).stdout == b"there"
            await env.files.write(tmp_path / "file", b"content" * 9000)
            assert await env.files.read(tmp_path / "file") == b"content" * 9000

    with start_node(tmp_path / "data") as node:
        assert node.facts == {
            "event": "listening",
            "version": 1,
            "url": node.own_url,
            "listen": node.facts["listen"],
            "node": node.facts["node"],
            "first_start": True,
            "tenant": "default",
            "executor_token": node.site.executor_token,
            "client_token": node.site.client_token,
        }
        with start_executor(node):
            bounded(scene(node))
            command = ("exec", "--token-env", "TOKEN", f"relay:{node.url}/{ENVIRONMENT}")
            variables = {"TOKEN": node.site.client_token}
            ended = run_client(*command, "--", "echo", "hello", env=variables)
            assert (ended.returncode, ended.stdout) == (0, b"hello\n"), ended
            [environment] = node.site.admin("status")["environments"]
            assert environment["online"] is True
            assert environment["node"] == node.facts["node"]
    directory = tmp_path / "data"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in directory.iterdir()} == {0o600}


def test_no_start_of_a_service_prints_a_token(tmp_path: Path) -> None:
    """Its stdout and stderr are a log; `registry init` shows the tokens, also beside a node."""
    where = ("--data", str(tmp_path / "data"))
    words = ("registry", "--listen", "127.0.0.1:0", *where, "--log-level", "debug")
    texts = []
    for number in range(2):
        shown = tmp_path / f"shown-{number}"
        with (
            shown.open("wb") as output,
            start_client(*words, stdout=output, stderr=output) as process,
        ):
            eventually("it listens", lambda file=shown: "listening on" in file.read_text())  # type: ignore[misc]
            if number == 0:
                made = run_client("registry", "init", *where)
                assert (made.returncode, made.stdout.count(b"esr_")) == (0, 2)
                again = run_client("registry", "init", *where)
                assert (again.returncode, again.stdout) == (1, b"")
            process.send_signal(signal.SIGTERM)
            assert process.wait(scaled(20)) == 0
        texts.append(shown.read_text())
    assert "`exec-server registry init`" in texts[0]
    assert "registry init" not in texts[1]
    assert "esr_" not in "".join(texts)


@pytest.mark.parametrize("how", ["drain", "kill"])
def test_a_restart_of_the_node_costs_no_output(tmp_path: Path, how: str) -> None:
    port = free_port()
    flags = ("--listen", f"127.0.0.1:{port}", "--drain-seconds", "1")
    first = Node(("--data", str(tmp_path)), *flags)
    nodes = [first]

    async def restart() -> None:
        await asyncio.to_thread(first.stop if how == "drain" else first.kill)
        nodes.append(
            await asyncio.to_thread(Node, ("--data", str(tmp_path)), *flags, site=first.site)
        )
        restarted.set()

    restarted = asyncio.Event()

    async def scene() -> None:
        async with ClientSession(dialer(first)) as session, asyncio.TaskGroup() as tasks:
            recorder = Recorder(session, tasks)

            def cut() -> None:
                recorder.on_output = lambda: None
                tasks.create_task(restart())

            recorder.on_output = cut
            await recorder.count()
            await recorder.complete.wait()
            await restarted.wait()
            # A call waits until the session is resumed.
            assert (await session.call(STATUS, None, is_retryable=True)).status == "ready"
            assert recorder.output == COUNTED
            assert recorder.resumed >= 1

    try:
        with start_executor(first):
            bounded(scene(), patience=6)
    finally:
        assert len(nodes) == 2
        assert nodes[1].facts["first_start"] is False
        assert "executor_token" not in nodes[1].facts
        nodes[1].stop()
        for node in nodes:
            node.server.release()


def test_tokens_are_made_listed_and_revoked(tmp_path: Path) -> None:
    with start_node(tmp_path) as node:
        site = node.site
        made = site.create_token("executor:a-*", "connect:b", tenant="ops", name="n", expires="2h")
        assert made["tenant"] == "ops"
        assert made["scopes"] == ["executor:a-*", "connect:b"]
        [listed] = site.admin("token", "list", "--tenant", "ops")["tokens"]
        assert listed == {
            "id": made["id"],
            "name": "n",
            "tenant": "ops",
            "scopes": ["executor:a-*", "connect:b"],
            "created_at": made["expires_at"] - 7200,
            "expires_at": made["expires_at"],
            "last_used_at": None,
        }
        assert len(site.admin("token", "list")["tokens"]) == 3
        # Flags may stand before the verb, and the token is nowhere in the database.
        revoked = run_client("registry", *site.where, "--json", "token", "revoke", made["id"])
        assert json.loads(revoked.stdout) == {"id": made["id"], "revoked": True}
        again = run_client("registry", "token", "revoke", made["id"], *site.where)
        assert again.returncode == 1
        assert "there is no token" in stderr_text(again)
        for file in tmp_path.iterdir():
            assert made["token"].encode() not in file.read_bytes()
        assert node.ask("connect", {}, made["token"], "b").status == 401


def test_a_credential_line_is_what_executors_read(tmp_path: Path) -> None:
    words = ("registry", "token", "create", "--data", str(tmp_path), "--credential", "box")
    ended = run_client(*words, "--expires", "12h")
    line = json.loads(ended.stdout)
    assert set(line) == {"version", "environment_id", "token", "expires_at"}
    assert (line["version"], line["environment_id"]) == (1, "box")
    refused = run_client(*words)
    assert refused.returncode == 2
    assert "--credential needs --expires" in stderr_text(refused)


def test_limits_of_a_tenant_are_changed_in_the_database(tmp_path: Path) -> None:
    with start_node(tmp_path) as node:
        limits = node.site.admin("tenant", "limit", "default", "--environments", "1")
        assert limits == {
            "tenant": "default",
            "environments": 1,
            "sockets": 2000,
            "bytes_per_second": 50_000_000,
            "handshakes_per_second": 20,
        }
        node.register(name="one")
        node.register(name="one")
        key = {"security_profile": "noise_hybrid_ik_v1"}
        reply = node.ask("register", key, node.site.executor_token, "two")
        assert reply.status == 400
        with pytest.raises(AssertionError, match="registration_conflict"):
            node.register(name="two")
        removed = node.site.admin("environment", "remove", "one")["removed"]
        assert removed == [{"tenant": "default", "environment_id": "one"}]
        node.register(name="two")
        ended = run_client("registry", "tenant", "limit", "nobody", *node.site.where)
        assert ended.returncode == 1


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--listen", "0.0.0.0:0"), "without TLS"),
        (("--listen", "nowhere"), "expected IP:PORT"),
        (("--node-url", "http://0.0.0.0:1"), "cannot connect to it"),
        (("--public-url", "ftp://x"), "--public-url"),
        (("--tls-cert", "x"), "belong together"),
        (("--trust-forwarded", "x"), "--trust-forwarded"),
        (("--database", "mysql://secret@x"), "postgresql://"),
        (("token", "create"), "--scope"),
        (("token", "create", "--scope", "all:*"), "invalid scope"),
        (("token", "create", "--scope", "connect:x", "--tenant", "a/b"), "--tenant"),
        (("token", "fly"), "unknown words"),
        (("status", "--print-json"), "use --json"),
        (("--database-url-file", "/nonexistent"), "--database-url-file"),
    ],
)
def test_wrong_arguments_are_explained(tmp_path: Path, flags: tuple[str, ...], text: str) -> None:
    ended = run_client("registry", "--data", str(tmp_path), *flags)
    assert ended.returncode == 2
    assert text in stderr_text(ended)
    assert "secret" not in stderr_text(ended)
    assert "Traceback" not in stderr_text(ended)
    assert ended.stdout == b""


def test_no_plaintext_and_no_secret_reaches_the_service(tmp_path: Path) -> None:
    canary = secrets.token_hex(16)

    async def scene(url: str, token: str) -> None:
        async with connect(registry=url, environment_id=ENVIRONMENT, token=token) as env:
            result = await env.run(["printf", "%s\n", canary])
            assert result.stdout == f"{canary}\n".encode()

    with start_balancer() as balancer:
        balancer.captured = []
        flags = ("--public-url", balancer.url, "--log-level", "debug")
        with start_node(tmp_path / "data", *flags) as node:
            balancer.nodes = [node.port]
            site = node.site
            with start_executor(node, url=balancer.url):
                bounded(scene(balancer.url, site.client_token))
            log = node.server.stderr().encode()
            metrics = node.get("/metrics").body
            arguments = Path(f"/proc/{node.server.process.pid}/cmdline").read_bytes()
        traffic = b"".join(balancer.captured)
    stored = b"".join(file.read_bytes() for file in (tmp_path / "data").iterdir())
    assert len(traffic) > 10_000
    assert log.count(b"\n") > 3
    for place in (traffic, stored, log, metrics, arguments):
        for text in (canary, b64encode(f"{canary}\n".encode()).decode(), "process/start"):
            assert text.encode() not in place
    # Tokens are sent to the service, and are in no place where it keeps or shows anything.
    [authorization] = set(re.findall(rb'"harness_key_authorization": "([^"]+)"', traffic))
    signatures = set(re.findall(rb"sig=([0-9a-f]{64})", traffic))
    assert len(signatures) == 2
    tokens = {site.executor_token.encode(), site.client_token.encode()}
    for secret in {authorization, *signatures, *tokens}:
        assert secret in traffic
        for place in (stored, log, metrics, arguments):
            assert secret not in place


@pytest.mark.parametrize("words", [("--listen", "127.0.0.1:0"), ("status",)])
def test_the_list_of_processes_shows_no_password(words: tuple[str, ...]) -> None:
    pytest.importorskip("asyncpg")
    with socket.create_server(("127.0.0.1", 0)) as database:
        database.settimeout(scaled(20))
        url = f"postgresql://me:hush@127.0.0.1:{database.getsockname()[1]}/x"
        with start_client("registry", *words, f"--database={url}") as process:
            connection, _ = database.accept()
            shown = Path(f"/proc/{process.pid}/cmdline").read_bytes()
            connection.close()
            assert process.wait(scaled(20)) == 1
    assert b"registry" in shown
    assert b"hush" not in shown


def test_tls_of_its_own_is_read_again_on_sighup(tmp_path: Path) -> None:
    first = make_pair(tmp_path, "first", "127.0.0.1")
    second = make_pair(tmp_path, "second", "127.0.0.1")
    with start_node(tmp_path / "data", *first.flags) as node:
        assert node.url.startswith("https://")

        def fingerprint() -> str:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            with (
                socket.create_connection(("127.0.0.1", node.port)) as plain,
                context.wrap_socket(plain) as link,
            ):
                certificate = link.getpeercert(binary_form=True)
                assert certificate is not None
                return f"sha256:{hashlib.sha256(certificate).hexdigest()}"

        assert fingerprint() == first.fingerprint
        with RawExecutor(node) as executor, RawClient(node) as client:
            for size in (1, 70_000, 262_000):
                frame = Frame("s", Kind.DATA, b"x" * size)
                client.send(frame)
                assert executor.receive() == frame
                executor.send(frame)
                assert client.receive() == frame
            first.certificate.write_bytes(second.certificate.read_bytes())
            first.key.write_bytes(second.key.read_bytes())
            node.server.process.send_signal(signal.SIGHUP)
            eventually("the new certificate", lambda: fingerprint() == second.fingerprint)
            client.send(frame)
            assert executor.receive() == frame
            first.certificate.write_bytes(b"garbage")
            node.server.process.send_signal(signal.SIGHUP)
            eventually("an error", lambda: "stays in use" in node.server.stderr())
            assert fingerprint() == second.fingerprint


def test_a_database_of_a_newer_program_is_refused(tmp_path: Path) -> None:
    with start_node(tmp_path):
        pass
    with contextlib.closing(sqlite3.connect(tmp_path / "registry.db")) as database:
        database.execute("UPDATE meta SET version = 99")
        database.commit()
    ended = run_client("registry", "--data", str(tmp_path), "--listen", "127.0.0.1:0")
    assert ended.returncode == 1
    assert "the database has version 99" in stderr_text(ended)
