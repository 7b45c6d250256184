"""`exec-server up`: its key outlives it, and a registry that is away is waited for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tests.support.cli import run_client
from tests.support.client import DEFAULT_TIMEOUT, Server, scaled
from tests.support.registry import Node, free_port, start_executor, start_node
from tests.support.relay import QUICK_BACKOFF, prepared, wait_logged

FINGERPRINT = "The fingerprint of its key, for --executor-key: "


@contextlib.contextmanager
def start_up(folder: Path, *flags: str) -> Iterator[Server]:
    variables = {"XDG_CONFIG_HOME": str(folder), "XDG_STATE_HOME": str(folder / "state")}
    with prepared(QUICK_BACKOFF):
        server = Server("ours", ["up", "--environment-id", "box", *flags], env=variables)
    try:
        yield server
    except BaseException:
        server.kill()
        raise
    else:
        if server.process.poll() is None:
            server.stop()
    finally:
        server.release()


def log_in(folder: Path, url: str, token: str) -> None:
    variables = {"XDG_CONFIG_HOME": str(folder)}
    done = run_client("login", url, env=variables, input=token.encode())
    assert done.returncode == 0, done


def fingerprint(up: Server) -> str:
    """What `up` prints when it is reachable."""
    assert up.process.stdout is not None
    for line in iter(up.process.stdout.readline, b""):
        if line.decode().startswith(FINGERPRINT):
            return line.decode().removeprefix(FINGERPRINT).strip()
    raise AssertionError(up.stderr())


def run_pinned(node: Node, folder: Path, key: str) -> tuple[int, bytes]:
    words = ("exec", "--executor-key", key, f"relay:{node.url}/box", "--", "echo", "hello")
    ended = run_client(*words, env={"XDG_CONFIG_HOME": str(folder)})
    return ended.returncode, ended.stdout


def test_a_pin_survives_a_restart(tmp_path: Path) -> None:
    with start_node(tmp_path / "data") as node:
        log_in(tmp_path, node.url, node.site.executor_token)
        log_in(tmp_path, node.url, node.site.client_token)
        keys = []
        for _ in range(2):
            with start_up(tmp_path) as up:
                keys.append(fingerprint(up))
                assert run_pinned(node, tmp_path, keys[0]) == (0, b"hello\n")
        assert keys[0] == keys[1]
        with start_up(tmp_path, "--key-file", "none") as up:
            assert fingerprint(up) != keys[0]
            assert run_pinned(node, tmp_path, keys[0])[0] == 255


def test_up_waits_for_a_registry_that_is_away_and_not_for_one_that_refuses(tmp_path: Path) -> None:
    listen = ("--listen", f"127.0.0.1:{free_port()}")
    with start_node(tmp_path / "data", *listen) as node:
        log_in(tmp_path, node.url, node.site.executor_token)
    with start_up(tmp_path) as up:
        wait_logged(up, "environment registry request failed: Connection refused", 3)
        assert "; trying again in " in up.stderr()
        with start_node(tmp_path / "data", *listen, site=node.site) as again:
            fingerprint(up)
            [token] = [
                each["id"]
                for each in again.site.admin("token", "list")["tokens"]
                if each["scopes"] == ["executor:*"]
            ]
    with start_up(tmp_path) as up:
        wait_logged(up, "trying again in ", 2)
        node.site.admin("token", "revoke", token)
        with start_node(tmp_path / "data", *listen, site=node.site):
            assert up.process.wait(scaled(DEFAULT_TIMEOUT)) == 1
        assert "authentication failed (401 Unauthorized)" in up.stderr()


def test_two_executors_on_one_machine_have_two_keys(tmp_path: Path) -> None:
    variables = {"XDG_STATE_HOME": str(tmp_path / "state")}
    with (
        start_node(tmp_path / "data") as node,
        start_executor(node, "one", env=variables),
        start_executor(node, "two", env=variables),
    ):
        pass
    files = list((tmp_path / "state" / "exec-server" / "executor-keys").iterdir())
    assert sorted(file.name for file in files) == ["one.pem", "two.pem"]
    assert len({file.read_bytes() for file in files}) == 2
