"""The user at the other end of a unix socket, and the servers of other users."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest

from exec_server.errors import ConnectFailed
from exec_server.net import socket_options
from exec_server.net.socket_options import check_server_user, peer_user, reset_on_close


def test_both_ends_know_each_other(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(path)
        server.listen()
        client.connect(path)
        assert peer_user(client) == os.geteuid()
        check_server_user(client, path)
        accepted, _ = server.accept()
        assert peer_user(accepted) == os.geteuid()
        accepted.close()


@pytest.mark.parametrize("uid", [0, 5])
def test_root_and_this_user_are_no_strangers(uid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_options, "peer_user", lambda _: uid)
    monkeypatch.setattr(os, "geteuid", lambda: 5)
    with socket.socket(socket.AF_UNIX) as client:
        check_server_user(client, "/s")


def test_another_user_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "the server at the unix socket /s is run by uid 6, which is neither this user (uid 5)"
    monkeypatch.setattr(socket_options, "peer_user", lambda _: 6)
    monkeypatch.setattr(os, "geteuid", lambda: 5)
    with (
        socket.socket(socket.AF_UNIX) as client,
        pytest.raises(ConnectFailed, match=re.escape(text)),
    ):
        check_server_user(client, "/s")


def test_the_owner_of_the_file_counts_without_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(socket, "SO_PEERCRED")
    owner = tmp_path.stat().st_uid
    with socket.socket(socket.AF_UNIX) as client:
        check_server_user(client, str(tmp_path))
        if owner == 0:
            os.chown(tmp_path, 65_534, 65_534)
            with pytest.raises(ConnectFailed, match="uid 65534"):
                check_server_user(client, str(tmp_path))


def test_closing_resets_the_connection_and_a_closed_socket_is_ignored() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    with other:
        reset_on_close(one)
        one.close()
        with pytest.raises(ConnectionResetError):
            other.recv(1)
    reset_on_close(one)
