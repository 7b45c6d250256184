"""Several listeners of one server, unix sockets, and the errors of binding."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.certificates import Pair, make_pair
from tests.support.cli import run_client, stderr_text
from tests.support.client import Server, run_command, scaled, start_server
from tests.support.server_internals import eventually, start_unprivileged

from exec_server import ConnectFailed, StartupError
from exec_server.sync import connect


@dataclass(frozen=True)
class Everywhere:
    """One server on a TLS port, a unix socket and a plain port."""

    server: Server
    pair: Pair
    wss: str
    unix: str
    ws: str

    def access(self, url: str) -> tuple[str, ...]:
        """The flags of commands for one of its URLs."""
        return ("--pin", self.pair.fingerprint) if url == self.wss else ()


@pytest.fixture(scope="module")
def everywhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Everywhere]:
    directory = tmp_path_factory.mktemp("listeners")
    pair = make_pair(directory, "server", "127.0.0.1")
    path = f"unix:{directory}/s"
    listen = ("--listen", "wss://127.0.0.1:0", "--listen", path, "--listen", "ws://localhost:0")
    with start_server("ours", *listen, *pair.flags) as server:
        assert server.urls[1] == path
        yield Everywhere(server, pair, *server.urls)
    assert not Path(path.removeprefix("unix:")).exists()


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that other users can reach."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        os.chmod(path, 0o755)
        yield Path(path)


@pytest.mark.quick
def test_urls_are_printed_in_order(everywhere: Everywhere) -> None:
    assert everywhere.wss.startswith("wss://127.0.0.1:")
    assert everywhere.unix.startswith("unix:/")
    assert everywhere.ws.startswith("ws://127.0.0.1:")


@pytest.mark.parametrize("kind", ["wss", "unix"])
def test_every_command_speaks_it(everywhere: Everywhere, tmp_path: Path, kind: str) -> None:
    url = getattr(everywhere, kind)
    access = everywhere.access(url)
    data = os.urandom(3_000_000)
    (tmp_path / "a").write_bytes(data)

    def run(name: str, *words: str, **options: object) -> bytes:
        ended = run_client(name, *access, *words, **options)  # type: ignore[arg-type]
        assert ended.returncode == 0, stderr_text(ended)
        return ended.stdout

    assert run("exec", url, "--", "cat", input=data) == data
    run("cp", "-q", str(tmp_path / "a"), f"{url}:{tmp_path}/b")
    run("cp", "-q", f"{url}:{tmp_path}/b", str(tmp_path / "c"))
    assert (tmp_path / "c").read_bytes() == data
    assert run("cat", f"{url}:{tmp_path}/b") == data
    assert run("ls", f"{url}:{tmp_path}") == b"a\nb\nc\n"
    run("rm", f"{url}:{tmp_path}/b")
    assert not (tmp_path / "b").exists()
    assert url.encode() in run("info", url)
    assert run("shell", url, input=b"echo $0-$((6 * 7))").endswith(b"-42\n")
    run("exec", "-d", "--name", f"{kind}-work", url, "--", "sh", "-c", "echo out; exec sleep 600")
    assert f"{kind}-work".encode() in run("ps", url)
    eventually("the output", lambda: run("logs", url, f"{kind}-work") == b"out\n")
    run("kill", url, f"{kind}-work")


def test_sessions_belong_to_the_server_not_to_a_listener(everywhere: Everywhere) -> None:
    with connect(everywhere.wss, pin=everywhere.pair.fingerprint) as secure:
        assert secure.run(["echo", "hi"]).stdout == b"hi\n"
    with connect(everywhere.unix) as local, connect(everywhere.ws) as plain:
        assert local.info == plain.info


def test_localhost_is_a_target(everywhere: Everywhere) -> None:
    with connect(everywhere.ws.replace("127.0.0.1", "localhost"), token="unused") as env:
        assert env.run(["true"]).exit_code == 0


# ---- unix sockets ---------------------------------------------------------------------


def test_the_socket_is_for_its_user_only(everywhere: Everywhere) -> None:
    path = everywhere.unix.removeprefix("unix:")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


_AS_NOBODY = """
import http, os, sys, urllib.parse  # imported later by the client, when this user may not read them
from exec_server.client.engine import dialers, session, recovery  # not readable for nobody later
from exec_server import ConnectFailed
from exec_server.sync import connect
os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    connect(sys.argv[1]).close()
except ConnectFailed as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused_by_mode_and_by_credentials(open_directory: Path) -> None:
    path = open_directory / "s"

    def attempt() -> str:
        ended = subprocess.run(
            [sys.executable, "-c", _AS_NOBODY, f"unix:{path}"],
            capture_output=True,
            text=True,
            timeout=scaled(30),
            check=False,
        )
        return ended.stdout + ended.stderr

    with start_server("ours", "--listen", f"unix:{path}") as server:
        assert "IO error: Permission denied (os error 13); only the user of" in attempt()
        path.chmod(0o666)
        assert "HTTP error: 403 Forbidden; only the user of" in attempt()
        with connect(server.url) as env:
            assert env.run(["id", "-u"]).stdout == b"0\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_the_client_of_root_is_no_client_of_another_user(open_directory: Path) -> None:
    os.chown(open_directory, 65534, 65534)
    refused = pytest.raises(ConnectFailed, match=r"is run by uid 65534, .* nothing was sent to it")
    with start_unprivileged("--listen", f"unix:{open_directory}/s") as server, refused:
        connect(server.url, token="secret")


def test_a_killed_server_leaves_a_socket_that_the_next_one_replaces(tmp_path: Path) -> None:
    listen = ("--listen", f"unix:{tmp_path}/s")
    with start_server("ours", *listen) as server:
        ended = run_command("ours", *listen)
        assert (ended.returncode, ended.stdout) == (1, "")
        assert (
            ended.stderr == f"Error: cannot listen on {server.url}: another server listens there\n"
        )
        server.kill()
    assert (tmp_path / "s").exists()
    with pytest.raises(ConnectFailed, match="Connection refused"):
        connect(server.url)
    with start_server("ours", *listen) as server, connect(server.url) as env:
        assert env.run(["true"]).exit_code == 0
    assert not (tmp_path / "s").exists()


def test_a_token_is_required_on_a_unix_socket_too(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("right-token")
    flags = ("--ws-auth", "capability-token", "--ws-token-file", str(tmp_path / "token"))
    with start_server("ours", "--listen", f"unix:{tmp_path}/s", *flags) as server:
        with pytest.raises(ConnectFailed, match="401"):
            connect(server.url)
        with connect(server.url, token="right-token") as env:
            assert env.run(["true"]).exit_code == 0


# ---- errors ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["unix:relative"], "invalid --listen URL `unix:relative`; expected `unix:/PATH`"),
        (["unix:/" + "x" * 107], "the path of a unix socket has at most 107 bytes"),
        (["unix:/nonexistent/s"], "cannot listen on unix:/nonexistent/s: No such file"),
        (["stdio", "ws://127.0.0.1:0"], "--listen stdio and other --listen URLs exclude each"),
        (["wss://127.0.0.1:0"], "--listen wss:// requires --tls-cert and --tls-key; `exec-server"),
        (
            ["unix:/tmp/s", "wss://0.0.0.0:0"],
            "refusing to listen on 0.0.0.0 without authentication",
        ),
    ],
)
def test_errors_name_the_address(flags: list[str], text: str) -> None:
    ended = run_command("ours", *(word for url in flags for word in ("--listen", url)))
    assert (ended.returncode, ended.stdout) == (1, "")
    assert text in ended.stderr


def test_a_failing_address_leaves_nothing_of_the_others(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        url = f"ws://127.0.0.1:{holder.getsockname()[1]}"
        ended = run_command("ours", "--listen", f"unix:{tmp_path}/s", "--listen", url)
    assert ended.returncode == 1
    assert ended.stderr == f"Error: cannot listen on {url}: Address in use (os error 98)\n"
    assert not (tmp_path / "s").exists()


def test_targets_of_unix_sockets_have_a_path() -> None:
    with pytest.raises(StartupError, match="the path of a unix socket must begin with /"):
        connect("unix:relative")
    with pytest.raises(ConnectFailed, match="No such file or directory"):
        connect("unix:/nonexistent/s")
    ended = run_client("info", "unix:/nonexistent/s")
    assert "Check that the server is running and the path is right" in stderr_text(ended)
