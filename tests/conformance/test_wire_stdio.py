"""The stdio transport where a data file cannot say it: ends, limits, raw lines."""

from __future__ import annotations

import contextlib
import json
import time

import pytest

from tests.support.client import Disconnected, StdioLink, run_command, scaled, start_stdio

pytestmark = pytest.mark.quick

_STATUS = b'{"id":9,"method":"environment/status"}'


def _link(client: object) -> StdioLink:
    link = client.link  # type: ignore[attr-defined]
    assert isinstance(link, StdioLink)
    return link


@pytest.mark.parametrize("url", ["stdio", "stdio://"])
def test_nothing_is_printed_without_a_question(kind: str, url: str) -> None:
    ended = run_command(kind, "--listen", url)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_unterminated_last_line_gets_no_answer(kind: str) -> None:
    with start_stdio(kind) as (_, client):
        client.initialize()
        _link(client).send_bytes(_STATUS)
        client.close()
        # The reference reads the line and sometimes still has time to answer it.
        if kind == "reference":
            return
        with pytest.raises(Disconnected):
            client.receive()


def test_answers_are_lines(kind: str) -> None:
    with start_stdio(kind) as (_, client):
        client.initialize()
        _link(client).send_bytes(_STATUS + b"\n" + _STATUS + b"\r\n")
        for _ in range(2):
            assert client.link.receive(scaled(5)) == b'{"id":9,"result":{"status":"ready"}}'


@pytest.mark.parametrize("line", [b'{"id":"\xff"}\n', b"\xff\xfe\n"])
def test_invalid_utf_8_ends_the_connection(kind: str, line: bytes) -> None:
    with start_stdio(kind) as (_, client):
        client.initialize()
        _link(client).send_bytes(line)
        time.sleep(0.2)
        with contextlib.suppress(BrokenPipeError):
            _link(client).send_bytes(_STATUS + b"\n")
        with contextlib.suppress(Disconnected):
            client.silence(0.3)


def test_line_of_64_mib(kind: str) -> None:
    limit = 64 * 1024 * 1024
    with start_stdio(kind) as (_, client):
        client.initialize()
        _link(client).send_bytes(_STATUS + b" " * (limit - len(_STATUS)) + b"\n")
        assert json.loads(client.link.receive(scaled(30)))["result"] == {"status": "ready"}


def test_session_cannot_be_resumed(kind: str) -> None:
    with start_stdio(kind) as (_, client):
        session = client.initialize()["sessionId"]
    with start_stdio(kind) as (_, client):
        params = {"clientName": "x", "resumeSessionId": session}
        assert client.failure("initialize", params) == (-32600, f"unknown session id {session}")
