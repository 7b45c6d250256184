"""Floods of garbage handshakes through a registry: other tokens do not notice them."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.cli import run_client
from tests.support.registry import ENVIRONMENT, Node, RawEnd, bundle, start_executor, start_node
from tests.support.relay import key_object
from tests.support.server_internals import eventually

from exec_server.relay.frames import Frame, Kind
from exec_server.relay.noise import FIRST_BYTES, Identity


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with start_node(tmp_path_factory.mktemp("data")) as running, start_executor(running):
        yield running


class Flood:
    """Sends garbage handshakes with one token for as long as the registry lets it."""

    def __init__(self, node: Node, token: str) -> None:
        self._node = node
        self._token = token
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.resets = 0

    def __enter__(self) -> Flood:
        self._thread.start()
        # More than the eight failures after which the reference refuses all handshakes.
        eventually("the flood has begun", lambda: self.resets >= 12)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        key = {"harness_public_key": key_object(Identity.generate().public)}
        while not self._is_over.is_set():
            reply = self._node.ask("connect", key, self._token)
            if reply.status == 429:
                self._is_over.wait(0.05)
                continue
            with contextlib.suppress(OSError), RawEnd(bundle(reply).url) as end:
                end.send(Frame("garbage", Kind.HANDSHAKE, os.urandom(FIRST_BYTES + 60)))
                if end.receive().kind is Kind.RESET:
                    self.resets += 1


def test_garbage_of_one_token_locks_no_other_token_out(node: Node, tmp_path: Path) -> None:
    command = ("exec", "--token-env", "TOKEN", f"relay:{node.url}/{ENVIRONMENT}")
    variables = {"TOKEN": node.site.client_token}
    with Flood(node, node.site.token(f"connect:{ENVIRONMENT}")):
        ended = run_client(*command, "--", "echo", "hello", env=variables)
    assert (ended.returncode, ended.stdout) == (0, b"hello\n"), ended
    assert ended.stderr == b""
