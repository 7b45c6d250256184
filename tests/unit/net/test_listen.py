"""Listen URLs, bound sockets, and the files of unix sockets."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from exec_server.errors import StartupError
from exec_server.net.listen import Address, BoundSocket, TcpAddress, UnixAddress, parse_listen_url
from exec_server.protocol.urls import MAX_UNIX_PATH_BYTES

# ---- URLs -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "address", "written"),
    [
        ("stdio", None, ""),
        ("stdio://", None, ""),
        ("ws://127.0.0.1:0", TcpAddress("ws", "127.0.0.1", 0), "ws://127.0.0.1:0"),
        ("wss://0.0.0.0:65535", TcpAddress("wss", "0.0.0.0", 65_535), "wss://0.0.0.0:65535"),
        ("ws://[0:0::1]:7", TcpAddress("ws", "::1", 7), "ws://[::1]:7"),
        ("ws://localhost:7", TcpAddress("ws", "127.0.0.1", 7), "ws://127.0.0.1:7"),
        ("wss://localhost:7", TcpAddress("wss", "127.0.0.1", 7), "wss://127.0.0.1:7"),
        # A name of this machine, with the address that the resolver of the test gives it.
        ("wss://box.test:7", TcpAddress("wss", "192.0.2.7", 7, "box.test"), "wss://box.test:7"),
        ("unix:/run/s:1", UnixAddress("/run/s:1"), "unix:/run/s:1"),
        ("unix:///run/s", UnixAddress("/run/s"), "unix:/run/s"),
    ],
)
def test_listen_urls(
    url: str, address: Address | None, written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.7", 7))]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: found)
    assert parse_listen_url(url) == address
    assert address is None or address.url == written


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("http://127.0.0.1:1", "unsupported --listen URL `http://127.0.0.1:1`; expected `ws://IP"),
        ("WSS://127.0.0.1:1", "unsupported --listen URL"),
        ("", "unsupported --listen URL ``"),
        ("127.0.0.1:1", "or `wss://IP:PORT` or `unix:/PATH`"),
        ("ws://host:1", "invalid websocket --listen URL `ws://host:1`; expected `ws://IP:PORT`"),
        ("wss://host:1", "expected `wss://IP:PORT`"),
        ("wss://host.invalid:1", "expected `wss://IP:PORT`, or a name that has an address"),
        ("wss://localhost.:99999", "or a name that has an address"),
        ("wss://-a:1", "expected `wss://IP:PORT`"),
        ("wss://127.0.0.1", "expected `wss://IP:PORT`"),
        ("ws://127.0.0.1:65536", "invalid websocket"),
        ("ws://127.0.0.256:1", "invalid websocket"),
        ("unix:", "expected `unix:/PATH`"),
        ("unix:s", "expected `unix:/PATH`"),
        ("unix:/run/", "expected `unix:/PATH`"),
        ("unix:/" + "s" * MAX_UNIX_PATH_BYTES, "at most 107 bytes, this one has 108"),
    ],
)
def test_other_urls_are_refused(url: str, text: str) -> None:
    with pytest.raises(StartupError) as refused:
        parse_listen_url(url)
    assert text in str(refused.value)


def test_addresses_of_this_machine() -> None:
    assert TcpAddress("ws", "127.0.0.9", 1).is_loopback
    assert TcpAddress("ws", "::1", 1).is_loopback
    assert not TcpAddress("ws", "0.0.0.0", 1).is_loopback


# ---- sockets --------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_of_the_kernel_is_in_the_url(host: str) -> None:
    try:
        bound = BoundSocket(TcpAddress("wss", host, 0))
    except StartupError:
        pytest.skip("this machine has no IPv6 loopback")
    port = bound.socket.getsockname()[1]
    assert bound.url == TcpAddress("wss", host, port).url
    assert bound.is_tls
    with pytest.raises(StartupError, match="Address in use") as taken:
        BoundSocket(TcpAddress("ws", host, port))
    assert str(taken.value).startswith(f"cannot listen on {TcpAddress('ws', host, port).url}: ")
    bound.close()
    bound.remove_file()


def test_a_unix_socket_is_private_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    umask = os.umask(0)
    try:
        bound = BoundSocket(UnixAddress(str(path)))
        assert os.umask(0) == 0
    finally:
        os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (bound.url, bound.is_tls) == (f"unix:{path}", False)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        accepted, _ = bound.socket.accept()
        accepted.close()
    bound.close()
    assert not path.exists()
    bound.close()


def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(path)
    bound = BoundSocket(UnixAddress(path))
    bound.close()


def test_other_files_and_servers_are_left_alone(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("content")
    link.symlink_to(file)
    for path in (file, link):
        with pytest.raises(StartupError, match="the file exists and is not a socket"):
            BoundSocket(UnixAddress(str(path)))
    assert file.read_text() == "content"
    first = BoundSocket(UnixAddress(str(tmp_path / "s")))
    with pytest.raises(StartupError, match="another server listens there"):
        BoundSocket(UnixAddress(str(tmp_path / "s")))
    first.close()
    with socket.socket(socket.AF_UNIX) as full:
        full.bind(str(tmp_path / "s"))
        full.listen(0)
        with socket.socket(socket.AF_UNIX) as waiting:
            waiting.connect(str(tmp_path / "s"))
            with pytest.raises(StartupError, match="another server listens there"):
                BoundSocket(UnixAddress(str(tmp_path / "s")))
    with pytest.raises(StartupError, match=f"on unix:{tmp_path}/none/s: No such file"):
        BoundSocket(UnixAddress(str(tmp_path / "none" / "s")))


def test_the_socket_of_another_server_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    first = BoundSocket(UnixAddress(str(path)))
    path.rename(tmp_path / "t")
    second = BoundSocket(UnixAddress(str(path)))
    first.close()
    assert path.exists()
    path.unlink()
    second.close()
