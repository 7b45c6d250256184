"""The credential that comes through a pipe."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import BinaryIO

import pytest

from exec_server.errors import RegistryError, StartupError
from exec_server.registry import executor_credential
from exec_server.registry.executor_credential import LINE_BYTES, ExecutorCredential

_NOW = 1_000_000


def _line(**changes: object) -> bytes:
    frame = {"version": 1, "environment_id": "env-1", "token": "t-1", "expires_at": _NOW + 9}
    return json.dumps(frame | changes).encode() + b"\n"


@contextlib.asynccontextmanager
async def _piped(
    now: Callable[[], float] = lambda: _NOW,
) -> AsyncIterator[tuple[BinaryIO, ExecutorCredential]]:
    reading, writing = os.pipe()
    pipe = os.fdopen(writing, "wb", buffering=0)
    credential = ExecutorCredential("env-1", reading, now)
    try:
        yield pipe, credential
    finally:
        pipe.close()  # which ends the thread
        if credential._thread is not None:
            await asyncio.to_thread(credential._thread.join)
        os.close(reading)


def _refusal(content: bytes) -> str | None:
    """What is wrong with what the pipe carries until it closes; None if nothing is."""

    async def run() -> str | None:
        async with _piped() as (pipe, credential):
            pipe.write(content)
            pipe.close()
            try:
                await credential.ready()
                await credential.wait_closed()
            except StartupError as error:
                return str(error)
            return None

    return asyncio.run(run())


async def _token(credential: ExecutorCredential) -> str:
    return (await credential.headers("POST", "https://x", b""))[0][1]


@pytest.mark.parametrize(
    "line",
    [
        _line(),
        _line()[:-1] + b"\r\n",
        b"  " + _line(),
        _line(expires_at=2**63),
        _line(token="!" + "~" * 30),
        _line() + _line(token="t-2"),
    ],
)
def test_good_lines(line: bytes) -> None:
    assert _refusal(line) is None


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"x\n",
        b"[]\n",
        b"null\n",
        b"[" * 9000 + b"\n",
        b'{"version":1,"environment_id":"env-1","token":"t"}\n',
        _line(version=2),
        _line(version=1.0),
        _line(version=True),
        _line(more=1),
        _line(environment_id=1),
        _line(token=""),
        _line(token="a b"),
        _line(token="é"),
        _line(token=5),
        _line(expires_at=_NOW + 1.0),
        _line(expires_at="9"),
        _line(expires_at=-1),
        _line(expires_at=2**64),
        _line(expires_at=True),
        _line().replace(b'"version": 1', b'"version": 1, "version": 1'),
        _line().decode().encode("utf-16"),
        _line()[:-1],
        _line() + b"\n",
        _line() + b'{"ver',
    ],
)
def test_invalid_lines(line: bytes) -> None:
    assert _refusal(line) == "invalid exec-server executor credential frame"


def test_another_environment() -> None:
    other = "exec-server executor credential is for a different environment"
    assert _refusal(_line(environment_id=" env-1 ")) == other
    assert _refusal(_line() + _line(environment_id="env-2")) == other


def test_expired_line() -> None:
    expired = "exec-server executor credential is expired"
    assert _refusal(_line(expires_at=_NOW)) == expired
    assert _refusal(_line() + _line(expires_at=_NOW - 1)) == expired


def test_length_of_a_line() -> None:
    room = LINE_BYTES - len(_line(token=""))
    too_long = "exec-server executor credential frame exceeds the size limit"
    assert _refusal(_line(token="a" * room)) is None
    assert _refusal(_line(token="a" * (room + 1))) == too_long
    assert _refusal(b"a" * (LINE_BYTES + 1)) == too_long


def test_pipe_that_closes_at_once() -> None:
    assert _refusal(b"") == "exec-server executor credential pipe closed"


def _run(job: Awaitable[None]) -> None:
    async def run() -> None:
        await job

    asyncio.run(run())


def test_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_credential, "FIRST_SECONDS", 0.05)

    async def job() -> None:
        async with _piped() as (_, credential):
            with pytest.raises(StartupError) as failed:
                await credential.ready()
        assert str(failed.value) == (
            "timed out waiting for the initial exec-server executor credential"
        )

    _run(job())


def test_newest_credential_is_used_until_it_expires() -> None:
    clock = [float(_NOW)]

    async def job() -> None:
        async with _piped(lambda: clock[0]) as (pipe, credential):
            pipe.write(_line()[:20])
            pipe.write(_line()[20:])
            await credential.ready()
            assert await _token(credential) == "Bearer t-1"
            clock[0] = _NOW + 9
            with pytest.raises(RegistryError) as unsigned:
                await _token(credential)
            assert str(unsigned.value) == (
                "environment registry authentication error: failed to resolve environment "
                "registry authentication: request auth build error: exec-server executor "
                "credential is expired"
            )
            pipe.write(_line(token="t-2", expires_at=_NOW + 20))
            pipe.close()
            await credential.wait_closed()
            assert await _token(credential) == "Bearer t-2"

    _run(job())


def test_invalid_line_ends_it_later_too() -> None:
    async def job() -> None:
        async with _piped() as (pipe, credential):
            pipe.write(_line())
            await credential.ready()
            pipe.write(b"x\n")
            with pytest.raises(StartupError, match="invalid exec-server executor credential"):
                await credential.wait_closed()

    _run(job())


def test_nothing_of_a_line_is_shown() -> None:
    refusal = _refusal(_line(token="s3cret x"))
    assert refusal is not None
    assert "s3cret" not in refusal
    assert "t-1" not in repr(ExecutorCredential("env-1"))
