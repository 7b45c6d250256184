"""A registry of ours as a process, executors that register with it, and clients of it."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from exec_server.relay.frames import Frame, decode, encode
from exec_server.relay.noise import Identity, PublicKey
from tests.support.cli import run_client, stderr_text
from tests.support.client import (
    BINARY,
    CLOSE,
    PING,
    PONG,
    Disconnected,
    HttpReply,
    Server,
    http,
    scaled,
)
from tests.support.relay import ConnectionBundle, dial, key_object
from tests.support.server_internals import eventually

ENVIRONMENT = "env-1"


@dataclass(frozen=True)
class Site:
    """Where the nodes of a registry keep their data, and the tokens of its first start."""

    where: tuple[str, ...]
    executor_token: str
    client_token: str

    def admin(self, *words: str) -> Any:
        """A verb of `exec-server registry` with --json."""
        ended = run_client("registry", *words, *self.where, "--json")
        assert ended.returncode == 0, stderr_text(ended)
        return json.loads(ended.stdout)

    def token(self, *scopes: str, tenant: str = "default", **flags: str) -> str:
        """A new token."""
        return str(self.create_token(*scopes, tenant=tenant, **flags)["token"])

    def create_token(self, *scopes: str, tenant: str = "default", **flags: str) -> dict[str, Any]:
        words = [word for scope in scopes for word in ("--scope", scope)]
        words += [word for name, value in flags.items() for word in (f"--{name}", value)]
        answer: dict[str, Any] = self.admin("token", "create", "--tenant", tenant, *words)
        return answer


class Node:
    """One running node."""

    def __init__(
        self,
        where: tuple[str, ...],
        *flags: str,
        site: Site | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        listen = () if "--listen" in flags else ("--listen", "127.0.0.1:0")
        words = ["registry", *listen, "--print-json", *where, *flags]
        self.server = Server("ours", words, env=env)
        try:
            self.server.read_url()
        except BaseException:
            self.server.kill()
            self.server.release()
            raise
        self.facts = json.loads(self.server.url)
        self.url = str(self.facts["url"])
        scheme = "wss" if "--tls-cert" in flags else "http"
        self.own_url = f"{scheme}://{self.facts['listen']}"
        if site is None:
            tokens = (self.facts.get("executor_token", ""), self.facts.get("client_token", ""))
            site = Site(where, *tokens)
        self.site = site

    @property
    def port(self) -> int:
        return int(self.facts["listen"].rpartition(":")[2])

    def kill(self) -> None:
        """With SIGKILL, as a machine dies."""
        self.server.process.kill()
        self.server.process.wait()

    def stop(self) -> None:
        self.server.process.send_signal(signal.SIGTERM)
        code = self.server.process.wait(scaled(40))
        text = self.server.stderr()
        assert code == 0, text
        assert "Traceback" not in text, text

    # ---- requests -----------------------------------------------------------------------

    def request(self, head: str, body: bytes = b"") -> HttpReply:
        """Raw: the request line and headers, without the empty line."""
        return http(self.own_url, f"{head}\r\n\r\n".encode("latin-1") + body)

    def get(self, target: str) -> HttpReply:
        return self.request(f"GET {target} HTTP/1.1\r\nhost: registry")

    def post(self, path: str, body: Any, token: str | None) -> HttpReply:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [f"POST {path} HTTP/1.1", "host: registry", f"content-length: {len(content)}"]
        if token is not None:
            lines.append(f"authorization: Bearer {token}")
        return self.request("\r\n".join(lines), content)

    def ask(self, verb: str, body: Any, token: str | None, name: str = ENVIRONMENT) -> HttpReply:
        return self.post(f"/cloud/environment/{name}/{verb}", body, token)

    def register(self, token: str | None = None, name: str = ENVIRONMENT) -> dict[str, Any]:
        """Register an executor that is not there."""
        key = key_object(Identity.generate().public)
        body = {"security_profile": "noise_hybrid_ik_v1", "executor_public_key": key}
        reply = self.ask("register", body, token or self.site.executor_token, name)
        assert reply.status == 200, reply
        answer: dict[str, Any] = json.loads(reply.body)
        return answer

    def connect(
        self, identity: Identity, token: str | None = None, name: str = ENVIRONMENT
    ) -> ConnectionBundle:
        body = {"harness_public_key": key_object(identity.public)}
        reply = self.ask("connect", body, token or self.site.client_token, name)
        assert reply.status == 200, reply
        return bundle(reply)

    def metric(self, name: str, token: str = "") -> int:
        """The value of a metric, with its labels in the name."""
        head = f"GET /metrics HTTP/1.1\r\nhost: registry\r\nauthorization: Bearer {token}"
        text = self.request(head).body.decode()
        for line in text.splitlines():
            if line.startswith(f"exec_server_registry_{name} "):
                return int(line.rpartition(" ")[2])
        return 0

    def wait_online(self, name: str = ENVIRONMENT, token: str | None = None) -> None:
        body = {"harness_public_key": key_object(Identity.generate().public)}
        token = token or self.site.client_token

        def is_online() -> bool:
            if self.ask("connect", body, token, name).status == 200:
                return True
            time.sleep(0.1)  # the token's next client has a part of its 20 handshakes per second
            return False

        eventually(f"{name} is online", is_online, 30)


def bundle(reply: HttpReply) -> ConnectionBundle:
    """The answer to `connect`."""
    answer = json.loads(reply.body)
    executor = answer["executor_public_key"]
    return ConnectionBundle(
        answer["url"],
        answer["executor_registration_id"],
        PublicKey(
            base64.b64decode(executor["x25519_public_key"]),
            base64.b64decode(executor["mlkem768_public_key"]),
        ),
        answer["harness_key_authorization"],
    )


@contextlib.contextmanager
def start_node(
    where: Path | tuple[str, ...],
    *flags: str,
    site: Site | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[Node]:
    """A node with SQLite in a directory, or with other flags for its database."""
    place = ("--data", str(where)) if isinstance(where, Path) else where
    node = Node(place, *flags, site=site, env=env)
    try:
        yield node
    except BaseException:
        node.server.kill()
        raise
    else:
        if node.server.process.poll() is None:
            node.stop()
    finally:
        node.server.release()


@contextlib.contextmanager
def start_executor(
    node: Node,
    name: str = ENVIRONMENT,
    *,
    kind: str = "ours",
    token: str | None = None,
    env: Mapping[str, str] | None = None,
    url: str | None = None,
) -> Iterator[Server]:
    """An executor ("ours" or "reference") that is online."""
    flags = ["--remote", url or node.url, "--environment-id", name]
    key = token or node.site.executor_token
    variables = {"CODEX_API_KEY": key, **(env or {})}
    if kind == "ours":
        flags += ["--registry-auth", "api-key"]
        variables["EXEC_SERVER_API_KEY"] = key
    executor = Server(kind, flags, env=variables)
    try:
        node.wait_online(name)
        yield executor
    except BaseException:
        executor.kill()
        raise
    else:
        if executor.process.poll() is None:
            executor.stop()
    finally:
        executor.release()


def upgrade(url: str, **headers: str) -> HttpReply:
    """The answer to an upgrade that is expected to be refused."""
    parts = urlsplit(url)
    sent = {
        "host": "registry",
        "connection": "upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": base64.b64encode(os.urandom(16)).decode(),
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    target = parts.path + (f"?{parts.query}" if parts.query else "")
    head = [f"GET {target} HTTP/1.1", *(f"{name}: {value}" for name, value in sent.items())]
    return http(f"http://{parts.netloc}", "\r\n".join([*head, "", ""]).encode("latin-1"))


def at_once(count: int, work: Any) -> list[Any]:
    """The results of as many calls at the same time."""
    with ThreadPoolExecutor(count) as threads:
        return [task.result() for task in [threads.submit(work) for _ in range(count)]]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RawEnd:
    """A socket of the rendezvous on which a test sends and receives any frames."""

    def __init__(self, url: str) -> None:
        self.socket = dial(url)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, frame: Frame | bytes) -> None:
        self.socket.send_binary(frame if isinstance(frame, bytes) else encode(frame))

    def receive(self, seconds: float = 10.0) -> Frame:
        """The next relay frame; raises Disconnected with the code of a close frame."""
        while True:
            found = self.socket.receive_frame(scaled(seconds))
            if found.opcode == CLOSE:
                raise Disconnected(int.from_bytes(found.payload[:2], "big"))
            if found.opcode == PING:
                self.socket.send_frame(PONG, found.payload)
            elif found.opcode == BINARY:
                return decode(found.payload)

    def closed(self, seconds: float = 10.0) -> int | None:
        """Read on until the socket is closed; the code, None without a close frame."""
        try:
            while True:
                self.receive(seconds)
        except Disconnected as end:
            return end.close_code
        except OSError:
            return None


class RawExecutor(RawEnd):
    """An executor that registers and connects, and does nothing by itself."""

    def __init__(self, node: Node, name: str = ENVIRONMENT, token: str | None = None) -> None:
        self.key = key_object(Identity.generate().public)
        body = {"security_profile": "noise_hybrid_ik_v1", "executor_public_key": self.key}
        reply = node.ask("register", body, token or node.site.executor_token, name)
        assert reply.status == 200, reply
        answer = json.loads(reply.body)
        self.registration_id = str(answer["executor_registration_id"])
        self.url = str(answer["url"])
        super().__init__(self.url)


class RawClient(RawEnd):
    """A client's socket."""

    def __init__(self, node: Node, name: str = ENVIRONMENT, token: str | None = None) -> None:
        self.bundle = node.connect(Identity.generate(), token, name)
        super().__init__(self.bundle.url)
