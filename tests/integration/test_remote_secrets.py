"""Secrets of an executor: rotated on stdin, sent only where they belong, seen by nobody else."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.relay_service import Endpoint, ThreadedRelayService
from tests.support.client import Server, descendants, uri
from tests.support.raw_servers import make_certificate
from tests.support.relay import (
    ENVIRONMENT,
    QUICK_BACKOFF,
    RelayLink,
    connect,
    exit_code,
    is_served,
    run_executor,
    start_executor,
    wait_attached,
    wait_logged,
)
from tests.support.sandbox import workspace_write
from tests.support.server_internals import eventually, own_processes

from exec_server.host.interpreter import SECRET_NAMES, STRIPPED_NAMES

CREDENTIAL = "--executor-credential-stdin"
NO_KEY = {"CODEX_API_KEY": None}
READY = {"status": "ready"}
# No test here is about the pause after failed handshakes.
NO_PAUSE = {"relay.multiplexer.BURST_FAILURES": 1_000_000}

_AS_NOBODY = """
import ctypes, os
# Nobody may not read the files of the interpreter, so everything is loaded before.
import encodings.idna, shutil, exec_server.cli.main, exec_server.cli.serve.watchdog
import exec_server.cli.serve.command, exec_server.cli.serve.run, exec_server.cli.serve.remote
import exec_server.sandbox.commands, exec_server.sandbox.files
from exec_server.filesystem.operations import load_all; load_all()
import exec_server.net.stdio, exec_server.net.websocket.server, exec_server.net.port_socket
import exec_server.server.shell_snapshots, http, urllib.parse
from exec_server.registry import agent_identity, sign_in, sigv4, stdin_credential
from exec_server.server import methods; methods.load_all()
from exec_server.relay.noise import Identity, Initiator, Responder, prologue
identity, context = Identity.generate(), prologue("e", "r", "s")
initiator, responder = Initiator(identity, identity.public, context), Responder(identity, context)
responder.read_first(initiator.write_first(b"")); initiator.read_second(responder.write_second()[0])
os.setgroups([]); os.setgid(65534); os.setuid(65534)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # dumpable, as every program of a user is at its start
"""


def _line(token: str | None, expires_in: float = 3600, **changes: Any) -> bytes:
    """A credential as a supervisor writes it; None leaves a member out."""
    members = {
        "version": 1,
        "environment_id": ENVIRONMENT,
        "token": token,
        "expires_at": int(time.time() + expires_in),
        **changes,
    }
    kept = {name: value for name, value in members.items() if value is not None}
    return json.dumps(kept).encode() + b"\n"


def _write(executor: Server, line: bytes) -> None:
    assert executor.process.stdin is not None
    executor.process.stdin.write(line)
    executor.process.stdin.flush()


@pytest.fixture
def service() -> Iterator[ThreadedRelayService]:
    with ThreadedRelayService() as running:
        yield running


def _start(service: ThreadedRelayService, *flags: str, **options: Any) -> Any:
    options.setdefault("attached", False)
    return start_executor(service, CREDENTIAL, *flags, env=NO_KEY, stdin=subprocess.PIPE, **options)


# ---- the credential on stdin ------------------------------------------------------------


@pytest.mark.quick
def test_each_request_carries_the_newest_credential(service: ThreadedRelayService) -> None:
    with _start(service) as executor:
        _write(executor, _line("token-1").replace(b"\n", b"\r\n"))
        wait_attached(service, executor)
        assert is_served(service)
        _write(executor, _line("token-2") + _line("token-3"))
        eventually("the newest is used", lambda: _validated_with(service, "token-3"))
        service.until(lambda: service.service.executor(ENVIRONMENT) is not None)
        assert executor.process.stdin is not None
        executor.process.stdin.close()
        assert exit_code(executor) == 0
        sent = {request.header("authorization") for request in service.requests_to(_VALIDATE)}
        assert sent <= {"Bearer token-1", "Bearer token-2", "Bearer token-3"}


_VALIDATE = Endpoint.VALIDATE


def _validated_with(service: ThreadedRelayService, token: str) -> bool:
    assert is_served(service)
    return service.requests_to(_VALIDATE)[-1].header("authorization") == f"Bearer {token}"


@pytest.mark.parametrize(
    "line", [b"\n", _line("late", environment_id="env-2")], ids=["no JSON", "another environment"]
)
def test_a_wrong_credential_ends_the_executor_at_any_time(
    service: ThreadedRelayService, line: bytes
) -> None:
    with _start(service) as executor:
        _write(executor, _line("good"))
        wait_attached(service, executor)
        with connect(service) as client:
            client.start(["sleep", "600"])
            _write(executor, line)
            assert exit_code(executor) == 1
        assert executor.stderr().startswith("Error: ")
        assert "late" not in executor.stderr()


def test_a_supervisor_that_says_nothing_ends_the_executor(service: ThreadedRelayService) -> None:
    constants = {"registry.stdin_credential.FIRST_SECONDS": 0.2}
    with _start(service, constants=constants) as executor:
        assert exit_code(executor) == 1
        text = "timed out waiting for the initial exec-server executor credential"
        assert executor.stderr() == f"Error: {text}\n"


# The clock of the executor is two hours fast while a file exists.
_CLOCK = """
import os, time
import exec_server.registry.stdin_credential as module
def now():
    return time.time() + (7200 if os.path.exists({path!r}) else 0)
account_id, _ = module.Expected.__new__.__defaults__
module.Expected.__new__.__defaults__ = (account_id, now)
"""


def test_an_expired_credential_cannot_register_again(
    service: ThreadedRelayService, tmp_path: Path
) -> None:
    later = tmp_path / "later"
    clock = _CLOCK.format(path=str(later))
    with _start(service, preparation=QUICK_BACKOFF + clock) as executor:
        _write(executor, _line("short", expires_in=3600))
        wait_attached(service, executor)
        later.touch()
        service.faults.http.reject(Endpoint.EXECUTOR_SOCKET, 401, "expired")
        service.executor(ENVIRONMENT).abort()
        assert exit_code(executor) == 1
        assert (
            executor.stderr()
            .splitlines()[-1]
            .endswith("request auth build error: exec-server executor credential is expired")
        )


def test_an_answer_that_repeats_the_credential_is_refused(service: ThreadedRelayService) -> None:
    service.faults.http.rewrite(Endpoint.REGISTER, lambda answer: {**answer, "x": "a token-1 b"})
    with _start(service) as executor:
        _write(executor, _line("token-1"))
        assert exit_code(executor) == 1
        assert "invalid environment registry executor registration" in executor.stderr()
        assert service.requests_to(Endpoint.EXECUTOR_SOCKET) == []


def test_a_signal_ends_an_executor_that_waits_for_its_credential(
    service: ThreadedRelayService,
) -> None:
    with _start(service) as executor:
        # It reads, so it is past its start.
        eventually("it reads", lambda: len(os.listdir(f"/proc/{executor.process.pid}/task")) > 1)
        executor.process.send_signal(signal.SIGTERM)
        assert exit_code(executor) == 0


def test_the_executor_can_end_with_its_stdin(service: ThreadedRelayService) -> None:
    flag = "--exit-on-stdin-close"
    with (
        start_executor(service, flag, stdin=subprocess.PIPE) as executor,
        connect(service) as client,
    ):
        client.start(["sleep", "600"])
        assert executor.process.stdin is not None
        executor.process.stdin.close()
        assert exit_code(executor) == 0


# ---- who can see them -------------------------------------------------------------------

_POLICY = {
    "inherit": "all",
    "ignoreDefaultExcludes": True,
    "exclude": [],
    "set": {},
    "includeOnly": [],
}
_SECRET_NAMES = (
    "EXEC_SERVER_API_KEY",
    "CODEX_API_KEY",
    "CODEX_ACCESS_TOKEN",
    "CODEX_EXEC_SERVER_REMOTE_BEARER_TOKEN",
    "CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
)


def _secret_variables() -> dict[str, str]:
    return {name: f"{name.lower()}-{secrets.token_hex(8)}" for name in _SECRET_NAMES}


def test_children_inherit_everything_but_secrets(service: ThreadedRelayService) -> None:
    variables = _secret_variables()
    with start_executor(service, env={**variables, "HARMLESS": "yes"}), connect(service) as client:
        run = client.run(["/usr/bin/env"], envPolicy=_POLICY, env={})
        assert b"HARMLESS=yes" in run.stdout
        for name, value in variables.items():
            assert name.encode() not in run.stdout
            assert value.encode() not in run.stdout


# Prints what the kernel shows of processes and their threads, each name before its content.
_SHOW = """
for file in $(ls -d /proc/{pid}/environ /proc/{pid}/cmdline /proc/{pid}/task/*/environ); do
    echo "$file"; cat "$file"; echo
done
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may read the files of its processes")
def test_children_of_root_find_no_secret_of_the_server_in_proc(
    service: ThreadedRelayService, tmp_path: Path
) -> None:
    """Neither those that it uses nor those that it only keeps from children."""
    hidden = {name: f"hush-{secrets.token_hex(8)}" for name in STRIPPED_NAMES | SECRET_NAMES}
    # The credential that is used, and a name that counts in any case.
    hidden |= {"EXEC_SERVER_API_KEY": service.token, "Node_Repl_Auth_Token": "hush-mixed"}
    with (
        start_executor(service, env={**hidden, "HARMLESS": "yes"}) as executor,
        connect(service) as client,
    ):
        sandbox = workspace_write(tmp_path)
        assert client.run(["true"], sandbox=sandbox).exit_code == 0
        written = {"path": uri(tmp_path / "file"), "dataBase64": "", "sandbox": sandbox}
        assert client.call("fs/writeFile", written) == {}
        family = [executor.process.pid, *descendants(executor.process.pid)]
        names = {Path(f"/proc/{pid}/comm").read_text().strip() for pid in family}
        assert {"exec-guardian", "exec-launcher", "exec-worker"} <= names
        for pid in family:
            shown = client.run(["/bin/sh", "-c", _SHOW.format(pid=pid)]).stdout
            assert f"/proc/{pid}/task/{pid}/environ".encode() in shown
            if pid == executor.process.pid:
                assert b"HARMLESS=yes" in shown
            assert [name for name, value in hidden.items() if value.encode() in shown] == []


def test_the_log_at_its_loudest_tells_no_secret(service: ThreadedRelayService) -> None:
    variables = _secret_variables()
    canary = f"canary-{secrets.token_hex(16)}"
    token = variables["EXEC_SERVER_API_KEY"]
    with start_executor(
        service, "--log-level", "debug", env=variables, preparation=QUICK_BACKOFF
    ) as executor:
        hidden = [*variables.values(), canary]
        with connect(service) as client:
            hidden.append(client.link.bundle.authorization)  # type: ignore[attr-defined]
            run = client.run(["echo", canary], envPolicy=_POLICY)
            assert run.stdout.decode() == f"{canary}\n"
            assert client.failure("fs/readFile", {"path": f"file:///{canary}"})[0] == -32004
        # Whatever goes wrong is told too, and must not repeat anything either.
        service.faults.http.answer(_VALIDATE, 500, token.encode())
        with RelayLink(service, handshake=False) as link:
            hidden.append(link.bundle.authorization)
            link.begin()
            link.wait_reset()
        service.faults.http.answer(
            Endpoint.EXECUTOR_SOCKET, 503, token.encode(), headers=[("x-echo", token)]
        )
        service.executor(ENVIRONMENT).close(4000, "because")
        wait_logged(executor, "backoff", times=2)
        wait_attached(service, executor)
        service.faults.http.reject(Endpoint.EXECUTOR_SOCKET, 404)
        service.faults.http.answer(Endpoint.REGISTER, 500, f"no: {token}".encode())
        service.executor(ENVIRONMENT).abort()
        assert exit_code(executor) == 1
        told = executor.stderr()
        assert "this executor's key is" in told
        assert "has session" in told
        shown = [text for text in hidden if text in told]
        assert shown == []
        # A URL is a secret of the rendezvous: whoever has it may take our place.
        for request in service.requests_to(Endpoint.EXECUTOR_SOCKET):
            assert request.query not in told
    for frame in service.frames:
        assert canary.encode() not in frame.data
        assert not any(value.encode() in frame.data for value in variables.values())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_children_of_the_same_user_cannot_look_into_the_executor(
    service: ThreadedRelayService,
) -> None:
    with start_executor(
        service,
        CREDENTIAL,
        env=NO_KEY,
        preparation=_AS_NOBODY,
        stdin=subprocess.PIPE,
        attached=False,
    ) as executor:
        _write(executor, _line("secret-token"))
        wait_attached(service, executor)
        with connect(service) as client:
            own = own_processes(executor)
            assert len(own) == 2  # and its watchdog
            for pid in own:
                status = client.run(["/bin/cat", f"/proc/{pid}/status"]).stdout.decode()
                assert int(status.split("Uid:")[1].split()[0]) == 65534
                for name in ("environ", "mem", "maps"):
                    run = client.run(["/usr/bin/head", "-c", "1", f"/proc/{pid}/{name}"])
                    assert (run.stdout, run.exit_code) == (b"", 1), name
                assert client.run(["/bin/ls", f"/proc/{pid}/fd"]).exit_code != 0
            # The pipe that brings credentials is in nobody else's hands.
            pipe = os.readlink(f"/proc/{executor.process.pid}/fd/0")
            assert pipe.startswith("pipe:")
            for pid in own[1:]:
                assert pipe not in _descriptors(pid)
            shown = client.run(["/bin/ls", "-l", "/proc/self/fd"]).stdout.decode()
            assert pipe not in shown


# Everything that a command finds of other processes: their variables and words.
_LOOK = """
env
for process in {places}; do
    cat "$process/environ" "$process"/task/*/environ "$process/cmdline"
done 2>/dev/null | tr '\\0' '\\n'
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("user", ["root", "ordinary"])
@pytest.mark.parametrize("words", [["/bin/sh", "-c"], ["/usr/bin/setsid", "-w", "/bin/sh", "-c"]])
def test_a_drop_in_keeps_its_key_from_children(
    service: ThreadedRelayService, user: str, words: list[str]
) -> None:
    """Started as the page of the Agents API says: with CODEX_API_KEY and two flags."""
    preparation = _AS_NOBODY if user == "ordinary" else ""
    key = f"drop-in-{secrets.token_hex(8)}"
    variables = {"CODEX_API_KEY": key, "HARMLESS": "yes"}
    with start_executor(service, env=variables, preparation=preparation) as executor:
        assert service.requests[0].header("authorization") == f"Bearer {key}"
        with connect(service) as client:
            family = [executor.process.pid, *descendants(executor.process.pid)]
            script = _LOOK.format(places=" ".join(f"/proc/{pid}" for pid in family))
            shown = client.run([*words, script], envPolicy=_POLICY, env={}).stdout
    assert b"HARMLESS=yes" in shown
    assert key.encode() not in shown


def _descriptors(pid: int) -> list[str]:
    folder = f"/proc/{pid}/fd"
    return [os.readlink(f"{folder}/{name}") for name in os.listdir(folder)]


# ---- where they may go ------------------------------------------------------------------


def _own_address() -> str | None:
    """An address of this machine that is not loopback; asking for it sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("198.51.100.1", 9))
        except OSError:
            return None
        address = str(sock.getsockname()[0])
    return None if address.startswith("127.") else address


_ADDRESS = _own_address()
_needs_address = pytest.mark.skipif(_ADDRESS is None, reason="this machine has only a loopback")
_RESTRICTED = (
    "Error: remote exec-server API-key authentication is restricted to HTTPS openai.com and "
    "openai.org hosts and subdomains or loopback hosts"
)


@pytest.mark.parametrize(
    ("url", "flags"),
    [
        ("http://registry.invalid", ()),
        ("https://registry.invalid", ()),
        ("https://openai.com.invalid", ()),
        ("http://api.openai.com", ()),
        ("http://registry.invalid", ("--registry-auth", "api-key")),
    ],
)
def test_an_api_key_is_sent_to_its_own_hosts_only(
    service: ThreadedRelayService, url: str, flags: tuple[str, ...]
) -> None:
    ended = run_executor(service, "--remote", url, "--environment-id", "e", *flags)
    assert ended.returncode == 1
    assert ended.stderr.startswith(_RESTRICTED)


@pytest.fixture
def encrypted(tmp_path: Path) -> Iterator[tuple[ThreadedRelayService, str]]:
    """A service that is reached by the network only, and the root that it can be trusted by."""
    assert _ADDRESS is not None
    roots, context = make_certificate(tmp_path, _ADDRESS)
    with ThreadedRelayService(host=_ADDRESS, tls=context) as service:
        yield service, roots


@_needs_address
def test_an_api_key_goes_to_a_registry_of_ones_own_when_told_so(
    encrypted: tuple[ThreadedRelayService, str],
) -> None:
    service, roots = encrypted
    env = {"SSL_CERT_FILE": roots}
    ended = run_executor(service, env=env)
    assert ended.returncode == 1
    assert ended.stderr.startswith(_RESTRICTED)
    assert "use --registry-auth api-key" in ended.stderr
    assert service.requests == []
    with start_executor(service, "--registry-auth", "api-key", env=env):
        upgrade = service.requests_to(Endpoint.EXECUTOR_SOCKET)[0]
        assert upgrade.header("authorization") is None
        assert service.requests[0].header("authorization") == f"Bearer {service.token}"


@_needs_address
def test_whom_to_trust_is_told_for_requests_and_sockets(
    encrypted: tuple[ThreadedRelayService, str],
) -> None:
    service, roots = encrypted
    flags = ("--registry-auth", "api-key")
    ended = run_executor(service, *flags)
    assert ended.returncode == 1
    assert "certificate verify failed" in ended.stderr
    # This variable is for requests alone.
    env: Mapping[str, str | None] = {"CODEX_CA_CERTIFICATE": roots}
    with start_executor(
        *(service, *flags, "--log-level", "warning"),
        env=env,
        preparation=QUICK_BACKOFF,
        attached=False,
    ) as executor:
        wait_logged(executor, "TLS error: certificate verify failed")
        assert len(service.requests_to(Endpoint.REGISTER)) == 1
        assert service.requests_to(Endpoint.EXECUTOR_SOCKET) == []


@_needs_address
def test_a_credential_of_stdin_is_not_sent_in_clear_text() -> None:
    with ThreadedRelayService(host=_ADDRESS) as service, _start(service) as executor:
        _write(executor, _line("token-1"))
        assert exit_code(executor) == 1
        assert executor.stderr() == (
            "Error: environment registry configuration error: remote transport requires https "
            "for non-loopback endpoints\n"
        )
        assert service.requests == []


def test_a_secret_that_no_header_can_carry_is_not_shown(service: ThreadedRelayService) -> None:
    ended = run_executor(service, env={"CODEX_API_KEY": "two words\x01"})
    assert ended.returncode == 1
    assert ended.stderr.startswith("Error: ")
    assert "words" not in ended.stderr


def test_a_slow_supervisor_is_waited_for(service: ThreadedRelayService) -> None:
    """A line may come in pieces."""
    with _start(service) as executor:
        line = _line("token-1")
        for start in range(0, len(line), 16):
            _write(executor, line[start : start + 16])
        wait_attached(service, executor)
        assert service.requests[0].header("authorization") == "Bearer token-1"
