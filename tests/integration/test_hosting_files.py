"""The files of examples/hosting, run by the real programs, with our executor and our client."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pytest
from tests.support.cli import run_client
from tests.support.client import scaled
from tests.support.client_targets import bounded
from tests.support.postgres import programs, start_postgres
from tests.support.registry import Node, RawExecutor, free_port, start_executor, start_node
from tests.support.server_internals import eventually

from exec_server import connect

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "hosting"
_NAME = "registry.example.net"


def is_installed(program: str) -> bool:
    return shutil.which(program, path=_path()) is not None


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin"


@contextlib.contextmanager
def start_proxy(
    file: str, directory: Path, nodes: Sequence[int], certificate: Path, key: Path
) -> Iterator[int]:
    """Run the proxy of a file for these nodes; yields its port."""
    port = free_port()
    text = (FOLDER / file).read_text()
    found = re.findall(r"(?:127\.0\.0\.1|node-\d):78\d\d", _code(text))
    for address, node in zip(found, nodes, strict=True):
        text = text.replace(address, f"127.0.0.1:{node}")
    make = _nginx if file.startswith("nginx") else _caddy
    command = make(text, directory, port, certificate, key)
    log = directory / "proxy.log"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            command,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=stderr,
            stderr=stderr,
            env={**os.environ, "PATH": _path(), "HOME": str(directory)},
            start_new_session=True,
        )
    try:
        eventually(f"{file} listens", lambda: _listens(port, process, log), 20)
        yield port
    finally:
        process.terminate()
        process.wait(scaled(10))


def _code(text: str) -> str:
    """The text without its comments, which show commands."""
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))


def _listens(port: int, process: subprocess.Popen[bytes], log: Path) -> bool:
    assert process.poll() is None, log.read_text()
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _nginx(text: str, directory: Path, port: int, certificate: Path, key: Path) -> list[str]:
    text = text.replace("listen 443 ssl;", f"listen 127.0.0.1:{port} ssl;")
    text = text.replace("/etc/ssl/registry/cert.pem", str(certificate))
    text = text.replace("/etc/ssl/registry/key.pem", str(key))
    # Its files are below the directory of the test instead of /var, with the default access log.
    text = text.replace("/var/log/nginx/", f"{directory}/")
    places = "".join(
        f"    {name}_temp_path {directory}/{name};\n"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    text = text.replace("http {\n", f"http {{\n    access_log {directory}/access.log;\n{places}", 1)
    # The worker must be able to enter the directory of the test.
    user = "user root;\n" if os.geteuid() == 0 else ""
    file = directory / "nginx.conf"
    file.write_text(f"{user}pid {directory}/nginx.pid;\nerror_log {directory}/error.log;\n{text}")
    return ["nginx", "-c", str(file), "-p", str(directory), "-g", "daemon off;"]


def _caddy(text: str, directory: Path, port: int, certificate: Path, key: Path) -> list[str]:
    settings = "\n{\n\tadmin off\n\tauto_https off\n"
    text = text.replace("\n{\n", settings, 1) if "\n{\n" in text else f"{settings}}}\n{text}"
    # With the access log that an administrator would add.
    text = text.replace(
        f"{_NAME} {{\n", f"https://127.0.0.1:{port} {{\n\tlog\n\ttls {certificate} {key}\n"
    )
    file = directory / "Caddyfile"
    file.write_text(text)
    return ["caddy", "run", "--adapter", "caddyfile", "--config", str(file)]


yaml = pytest.importorskip("yaml")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tls")
    assert run_client("tls-init", str(directory)).returncode == 0
    return directory / "cert.pem"


def _check(node: Node, port: int, certificate: Path) -> None:
    """A command and a file through the proxy, by an executor that came through it too."""
    url = f"https://127.0.0.1:{port}"

    async def scene() -> None:
        facts = {"registry": url, "environment_id": "box", "token": node.site.client_token}
        async with connect(**facts, ca_file=str(certificate)) as env:  # type: ignore[arg-type]
            assert (await env.run(["echo", "there"])).stdout == b"there\n"
            result = await env.run(["head", "-c", "3000000", "/dev/zero"])
            assert len(result.stdout) == 3_000_000

    flags = {"SSL_CERT_FILE": str(certificate)}
    with start_executor(node, "box", url=url, env=flags):
        bounded(scene())


@pytest.mark.parametrize("file", ["nginx.conf", "Caddyfile"])
def test_one_node_works_behind_a_proxy(file: str, certificate: Path, tmp_path: Path) -> None:
    if not is_installed(file.partition(".")[0].removesuffix("file").lower()):
        pytest.skip("the proxy is not installed")
    port = free_port()
    public = ("--public-url", "https://127.0.0.1:{}", "--trust-forwarded", "127.0.0.1/32")
    with start_proxy(
        file, tmp_path, [port], certificate, certificate.with_name("key.pem")
    ) as front:
        words = [word.format(front) for word in public]
        flags = ("--listen", f"127.0.0.1:{port}", *words)
        with start_node(tmp_path / "data", *flags) as node:
            _check(node, front, certificate)
            assert node.get("/metrics").status == 200


@pytest.mark.skipif(programs() is None, reason="needs the package postgresql")
@pytest.mark.parametrize("file", ["nginx-several.conf", "Caddyfile.several"])
def test_several_nodes_work_behind_a_proxy(file: str, certificate: Path, tmp_path: Path) -> None:
    if not is_installed(re.split(r"[-.]", file)[0].removesuffix("file").lower()):
        pytest.skip("the proxy is not installed")
    ports = [free_port(), free_port()]
    with contextlib.ExitStack() as stack:
        database = stack.enter_context(start_postgres())
        key = certificate.with_name("key.pem")
        front = stack.enter_context(start_proxy(file, tmp_path, ports, certificate, key))
        public = ("--public-url", f"https://127.0.0.1:{front}")
        first = stack.enter_context(
            start_node(database.where, "--listen", f"127.0.0.1:{ports[0]}", *public)
        )
        second = ("--listen", f"127.0.0.1:{ports[1]}", *public)
        stack.enter_context(start_node(database.where, *second, site=first.site))
        for _ in range(2):  # the balancer takes the nodes in turns
            _check(first, front, certificate)


# ---- logs -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "file", ["nginx.conf", "nginx-several.conf", "Caddyfile", "Caddyfile.several"]
)
def test_no_log_of_a_proxy_has_a_signed_address(
    file: str, certificate: Path, tmp_path: Path
) -> None:
    """Of the streams, of a node that dies under them, and of requests while no node answers."""
    program, count = PROXIES[file]
    if not is_installed(program):
        pytest.skip("the proxy is not installed")
    nodes = [free_port() for _ in range(count)]  # of several, all but the first are dead
    directory = tmp_path / "proxy"
    directory.mkdir()
    with contextlib.ExitStack() as stack:
        key = certificate.with_name("key.pem")
        front = stack.enter_context(start_proxy(file, directory, nodes, certificate, key))
        url = f"https://127.0.0.1:{front}"
        words = ("--listen", f"127.0.0.1:{nodes[0]}", "--public-url", url)
        node = stack.enter_context(start_node(tmp_path / "data", *words))
        _check(node, front, certificate)
        executor = RawExecutor(node, "raw")
        address = urlsplit(executor.url)
        node.kill()
        executor.closed()
        executor.socket.close()
        target = f"{address.path}?{address.query}"
        headers = {"Connection": "upgrade", "Upgrade": "websocket"}
        assert _ask(front, certificate, "GET", target, headers=headers)[0] == 502
        assert _register(front, certificate) == TRY_AGAIN
    logs = {path.name: path.read_text() for path in directory.glob("*.log")}
    found = [name for name, text in logs.items() if "sig=" in text or "nonce=" in text]
    assert found == [], logs
    # They say that there was such a request, and what became of it.
    lines = [line for text in logs.values() for line in text.splitlines()]
    seen = [line for line in lines if f"{address.path}" in line]
    assert any("502" in line for line in seen), logs
    assert any("/cloud/environment/box/register" in line for line in lines), logs


# ---- nodes that do not answer -----------------------------------------------------------

PROXIES = {
    "nginx.conf": ("nginx", 1),
    "nginx-several.conf": ("nginx", 2),
    "Caddyfile": ("caddy", 1),
    "Caddyfile.several": ("caddy", 2),
    "Caddyfile.compose": ("caddy", 2),
}
TRY_AGAIN = (502, "authentication_service_unavailable")


def _register(port: int, certificate: Path) -> tuple[int, str]:
    return _ask(port, certificate, "POST", "/cloud/environment/box/register", content=b" " * 2000)


def _ask(
    port: int,
    certificate: Path,
    method: str,
    target: str,
    *,
    content: bytes = b"",
    headers: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """The status and the code of an answer through the proxy."""
    tls = ssl.create_default_context(cafile=str(certificate))
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=tls, timeout=scaled(10))
    with contextlib.closing(connection):
        connection.request(method, target, content, dict(headers or {}))
        answer = connection.getresponse()
        body = json.loads(answer.read() or b"{}")
    return answer.status, body.get("error", {}).get("code", "")


@pytest.mark.parametrize("file", PROXIES)
def test_a_proxy_without_a_node_asks_executors_to_try_again(
    file: str, certificate: Path, tmp_path: Path
) -> None:
    program, count = PROXIES[file]
    if not is_installed(program):
        pytest.skip("the proxy is not installed")
    nodes = [free_port() for _ in range(count)]
    key = certificate.with_name("key.pem")
    with start_proxy(file, tmp_path, nodes, certificate, key) as front:
        assert _register(front, certificate) == TRY_AGAIN


class _Node(http.server.BaseHTTPRequestHandler):
    """Is ready, reads requests, and answers them unless it dies."""

    dies: ClassVar[bool] = False

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if not self.dies:
            self._answer()

    def _answer(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_args: object) -> None:
        pass


class _DyingNode(_Node):
    dies = True


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("nginx-several.conf", {(200, "")}),  # repeats the request on the other node
        ("Caddyfile.several", {(200, ""), TRY_AGAIN}),
    ],
)
def test_a_node_that_ends_without_an_answer_ends_no_executor(
    file: str, expected: set[tuple[int, str]], certificate: Path, tmp_path: Path
) -> None:
    if not is_installed(PROXIES[file][0]):
        pytest.skip("the proxy is not installed")
    key = certificate.with_name("key.pem")
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(_serve(kind)) for kind in (_DyingNode, _Node)]
        front = stack.enter_context(start_proxy(file, tmp_path, ports, certificate, key))

        def is_ready() -> bool:
            return _register(front, certificate)[0] == 200

        eventually("a node is known to be ready", is_ready)
        assert {_register(front, certificate) for _ in range(6)} <= expected


@contextlib.contextmanager
def _serve(kind: type[_Node]) -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


# ---- compose.yaml -----------------------------------------------------------------------


def _compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    return loaded


def test_the_compose_file_names_only_what_there_is() -> None:
    compose = _compose()
    assert set(compose) == {"services", "secrets", "volumes"}
    services = compose["services"]
    assert set(services) == {"database", "node-1", "node-2", "balancer"}
    for name, service in services.items():
        assert ("image" in service) != ("build" in service), name
        assert set(service.get("secrets", [])) <= set(compose["secrets"]), name
        assert set(service.get("depends_on", [])) <= set(services), name
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            is_known = source in compose["volumes"] or (FOLDER / source).is_file()
            assert is_known, f"{name}: {source}"
    build = services["node-1"]["build"]
    assert (FOLDER / build["context"] / build["dockerfile"]).is_file()


@pytest.mark.skipif(programs() is None, reason="needs the package postgresql")
@pytest.mark.skipif(not is_installed("caddy"), reason="needs the package caddy")
def test_the_commands_of_the_compose_file_run(certificate: Path, tmp_path: Path) -> None:
    services = _compose()["services"]
    ports = {name: free_port() for name in ("node-1", "node-2")}
    with contextlib.ExitStack() as stack:
        database = stack.enter_context(start_postgres())
        secret = tmp_path / "database-url"
        secret.write_text(database.url + "\n")
        key = certificate.with_name("key.pem")
        nodes = list(ports.values())
        front = stack.enter_context(
            start_proxy("Caddyfile.compose", tmp_path, nodes, certificate, key)
        )
        running: list[Node] = []
        for name, port in ports.items():
            program, verb, *words = services[name]["command"]
            assert (program, verb) == ("exec-server", "registry")
            replaced = [
                word.replace(f"{name}:7800", f"127.0.0.1:{port}")
                .replace("0.0.0.0:7800", f"127.0.0.1:{port}")
                .replace("registry.example.net", f"127.0.0.1:{front}")
                .replace("/run/secrets/database-url", str(secret))
                for word in words
            ]
            listen = next(word for word in replaced if word.startswith("--listen="))
            replaced.remove(listen)
            flags = ("--listen", listen.partition("=")[2], *replaced)
            site = running[0].site if running else None
            running.append(stack.enter_context(start_node((), *flags, site=site)))
        _check(running[0], front, certificate)
