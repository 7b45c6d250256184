"""The files of examples/hosting with the real nginx and Caddy, on free ports of loopback."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.client import scaled
from tests.support.registry import free_port
from tests.support.server_internals import eventually

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
