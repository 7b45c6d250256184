"""Names of the internet that lead to a double on loopback, with TLS: GitHub, a mirror, web pages.

As a program it is a server whose proxies find every name there: `internet.py PORT WORDS`. Look-ups
and connections of the proxies are replaced; all that they decide is the product's own.
"""

from __future__ import annotations

import base64
import io
import json
import ssl
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ADDRESS = "140.82.112.3"  # any public address; nothing is ever sent to it
HOSTS = (
    *("api.github.com", "github.com", "packages.example.com"),
    *("files.example.org", "tracker.example.net"),
)


def main() -> None:
    """Serve with the words of the command line after the port of the double."""
    from exec_server.cli.main import main as run_command
    from exec_server.proxy.resources import ProxyResources
    from exec_server.proxy.stream import SocketStream

    port, *words = sys.argv[1:]
    connect = SocketStream.connect

    async def resolve(self: ProxyResources, host: str) -> Sequence[str]:
        if host not in HOSTS:
            raise OSError(f"no such name: {host}")
        return (ADDRESS,)

    async def redirect(address: str, number: int) -> SocketStream:
        assert (address, number) == (ADDRESS, 443)
        return await connect("127.0.0.1", int(port))

    ProxyResources.resolve = resolve  # type: ignore[method-assign]
    SocketStream.connect = redirect  # type: ignore[method-assign,assignment]
    sys.argv = ["exec-server", *words]
    run_command()


@dataclass
class Internet:
    """The double: its port, its files, the secrets that it wants, and the requests it got."""

    port: int = 0
    pages: dict[str, bytes] = field(default_factory=dict)  # by host and path
    secrets: dict[str, str] = field(default_factory=dict)  # of the hosts that want one
    requests: list[tuple[str, str, str]] = field(default_factory=list)  # host, path, secret

    def add_repository(self, host: str, path: str, folder: Path) -> None:
        """A repository with one commit, for git's protocol of plain files."""
        source, bare = folder / "source", folder / "bare"
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
        for words in (
            ["init", "-q", str(source)],
            ["-C", str(source), *identity, "commit", "-q", "--allow-empty", "-m", "first"],
            ["clone", "-q", "--bare", str(source), str(bare)],
            ["-C", str(bare), "update-server-info"],
        ):
            subprocess.run(["git", *words], check=True, capture_output=True)
        for file in bare.rglob("*"):
            if file.is_file():
                self.pages[f"{host}{path}/{file.relative_to(bare)}"] = file.read_bytes()

    def add_packages(self, host: str) -> None:
        """The package `demo` for pip and for npm."""
        wheel = "demo-1.0-py3-none-any.whl"
        self.pages[f"{host}/simple/demo/"] = f'<a href="/files/{wheel}">{wheel}</a>'.encode()
        self.pages[f"{host}/files/{wheel}"] = _wheel()
        self.pages[f"{host}/npm/demo-1.0.0.tgz"] = _tarball()
        dist = {"tarball": f"https://{host}/npm/demo-1.0.0.tgz"}
        version = {"name": "demo", "version": "1.0.0", "dist": dist}
        document = {
            "name": "demo",
            "dist-tags": {"latest": "1.0.0"},
            "versions": {"1.0.0": version},
        }
        self.pages[f"{host}/npm/demo"] = json.dumps(document).encode()


def _wheel() -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as wheel:
        wheel.writestr("demo.py", "")
        name = "demo-1.0.dist-info"
        wheel.writestr(f"{name}/METADATA", "Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n")
        wheel.writestr(f"{name}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{name}/RECORD", "")
    return data.getvalue()


def _tarball() -> bytes:
    data, content = io.BytesIO(), b'{"name": "demo", "version": "1.0.0"}'
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        entry = tarfile.TarInfo("package/package.json")
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
    return data.getvalue()


def _secret(authorization: str) -> str:
    """The secret of an `Authorization` header; empty without one."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "basic":
        return base64.b64decode(value).decode().partition(":")[2]
    return value


@contextmanager
def internet(certificate: Path, key: Path) -> Iterator[Internet]:
    """Run the double with a certificate for HOSTS."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            host, path = self.headers["Host"], self.path.partition("?")[0]
            secret = _secret(self.headers.get("Authorization", ""))
            double.requests.append((host, path, secret))
            page = double.pages.get(host + path)
            if secret != double.secrets.get(host, secret):
                self._answer(401, b"who are you?")
            else:
                self._answer(404 if page is None else 200, page or b"")

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            if status == 401:
                self.send_header("WWW-Authenticate", 'Basic realm="double"')
            if self.path.startswith("/simple/"):
                self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    # The handshake is made by the thread of the connection, not by the one that accepts.
    server.socket = context.wrap_socket(server.socket, True, do_handshake_on_connect=False)
    double = Internet(server.server_port)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield double
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


if __name__ == "__main__":
    main()
