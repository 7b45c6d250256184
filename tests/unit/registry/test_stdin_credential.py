"""The credentials that come through stdin."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest

from exec_server.errors import RegistryError, StartupError
from exec_server.registry import stdin_credential
from exec_server.registry.stdin_credential import (
    CHATGPT_LINE_BYTES,
    FORMS,
    LINE_BYTES,
    Expected,
    StdinCredential,
)

_TASKS = cast(Any, None)  # this credential has none

_NOW = 1_000_000
_EXECUTOR = "--executor-credential-stdin"
_BEARER = "--registration-bearer-stdin"
_CHATGPT = "--chatgpt-token-stdin"


def _line(**changes: object) -> bytes:
    frame = {"version": 1, "environment_id": "env-1", "token": "t-1", "expires_at": _NOW + 9}
    return json.dumps(frame | changes).encode() + b"\n"


@contextlib.asynccontextmanager
async def _piped(
    now: Callable[[], float] = lambda: _NOW,
    flag: str = _EXECUTOR,
    account_id: str | None = None,
    *,
    until_closed: bool = False,
) -> AsyncIterator[tuple[BinaryIO, StdinCredential]]:
    reading, writing = os.pipe()
    pipe = os.fdopen(writing, "wb", buffering=0)
    expected = Expected("env-1", account_id, now)
    credential = StdinCredential(FORMS[flag], expected, reading, until_closed=until_closed)
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
                await credential.ready(_TASKS)
                await credential.wait_ended()
            except StartupError as error:
                return str(error)
            return None

    return asyncio.run(run())


async def _token(credential: StdinCredential) -> str:
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
    monkeypatch.setattr(stdin_credential, "FIRST_SECONDS", 0.05)

    async def job() -> None:
        async with _piped() as (_, credential):
            with pytest.raises(StartupError) as failed:
                await credential.ready(_TASKS)
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
            await credential.ready(_TASKS)
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
            await credential.wait_ended()
            assert await _token(credential) == "Bearer t-2"

    _run(job())


def test_invalid_line_ends_it_later_too() -> None:
    async def job() -> None:
        async with _piped() as (pipe, credential):
            pipe.write(_line())
            await credential.ready(_TASKS)
            pipe.write(b"x\n")
            with pytest.raises(StartupError, match="invalid exec-server executor credential"):
                await credential.wait_ended()

    _run(job())


def test_nothing_of_a_line_is_shown() -> None:
    refusal = _refusal(_line(token="s3cret x"))
    assert refusal is not None
    assert "s3cret" not in refusal
    assert "t-1" not in repr(StdinCredential(FORMS[_EXECUTOR], Expected("env-1")))


# ---- forms of one line -------------------------------------------------------------------

_NO_BEARER = "expected a newline-terminated registration bearer of at most 16 KiB"
_NO_TOKEN = "expected a bounded, newline-terminated ChatGPT access token"
_INVALID_TOKEN = "invalid ChatGPT access token"


def _segment(value: object) -> str:
    return urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


def _jwt(**account: object) -> str:
    return f"e30.{_segment({'exp': 1, 'https://api.openai.com/auth': account})}.sig"


_TOKEN = _jwt(chatgpt_account_id="acc-1")


def _outcome(flag: str, content: bytes, account_id: str | None = None) -> object:
    """The headers that this content of stdin gives, or its error text."""

    async def run() -> object:
        async with _piped(flag=flag, account_id=account_id) as (pipe, credential):
            pipe.write(content)
            pipe.close()
            try:
                await credential.ready(_TASKS)
            except StartupError as error:
                return str(error)
            return await credential.headers("POST", "https://x", b"")

    return asyncio.run(run())


@pytest.mark.parametrize("content", [b"t-1\n", b"t-1\r\n", b"t-1\nmore", b"t-1\n\n\xff"])
def test_registration_bearer(content: bytes) -> None:
    assert _outcome(_BEARER, content) == [("authorization", "Bearer t-1")]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", _NO_BEARER),
        (b"t-1", _NO_BEARER),
        (b"x" * LINE_BYTES + b"\n", _NO_BEARER),
        (b"x" * (LINE_BYTES - 1) + b"\r\n", _NO_BEARER),
        *(
            (line + b"\n", "invalid registration bearer")
            for line in (
                b"",
                b"\r",
                b"a\rb",
                b"a\r\r",
                b" a",
                b"a ",
                b"a\tb",
                b"a\0",
                b"\xff",
                b"\x7f",
            )
        ),
    ],
)
def test_invalid_registration_bearers(content: bytes, text: str) -> None:
    assert _outcome(_BEARER, content) == text


def test_longest_lines() -> None:
    longest = b"x" * (LINE_BYTES - 1)
    for line in (longest + b"\n", longest[:-1] + b"\r\n"):
        assert _outcome(_BEARER, line) == [("authorization", f"Bearer {line.decode().strip()}")]
    token = _TOKEN + "s" * (CHATGPT_LINE_BYTES - 1 - len(_TOKEN))

    async def run() -> None:
        async with _piped(flag=_CHATGPT) as (pipe, credential):
            async with asyncio.TaskGroup() as tasks:
                # More than a pipe holds.
                tasks.create_task(asyncio.to_thread(pipe.write, token.encode() + b"\n"))
                await credential.ready(_TASKS)
            assert await _token(credential) == f"Bearer {token}"

    asyncio.run(run())
    assert _outcome(_CHATGPT, b"x" * CHATGPT_LINE_BYTES) == _NO_TOKEN


_HEADERS = [("authorization", f"Bearer {_TOKEN}"), ("chatgpt-account-id", "acc-1")]


@pytest.mark.parametrize(
    ("token", "account_id", "headers"),
    [
        (_TOKEN, None, _HEADERS),
        (_TOKEN, "acc-1", _HEADERS),
        (_TOKEN + ".more", None, [("authorization", f"Bearer {_TOKEN}.more"), _HEADERS[1]]),
        (_jwt(), "acc-7", [("authorization", f"Bearer {_jwt()}"), ("chatgpt-account-id", "acc-7")]),
        (
            fed := _jwt(chatgpt_account_id="a", chatgpt_account_is_fedramp=True),
            None,
            [
                ("authorization", f"Bearer {fed}"),
                ("chatgpt-account-id", "a"),
                ("X-OpenAI-Fedramp", "true"),
            ],
        ),
    ],
)
def test_chatgpt_token(token: str, account_id: str | None, headers: object) -> None:
    assert _outcome(_CHATGPT, token.encode() + b"\n", account_id) == headers


@pytest.mark.parametrize(
    ("content", "account_id", "text"),
    [
        (b"", None, _NO_TOKEN),
        (_TOKEN.encode(), None, _NO_TOKEN),
        (b"\n", None, _INVALID_TOKEN),
        (b"abc\n", None, _INVALID_TOKEN),
        (b"a.b\n", None, _INVALID_TOKEN),
        (b"a.b.c\n", None, _INVALID_TOKEN),
        (_TOKEN.encode() + b" \n", None, _INVALID_TOKEN),
        (_TOKEN.removesuffix("sig").encode() + b"\n", None, _INVALID_TOKEN),
        (_TOKEN.removeprefix("e30").encode() + b"\n", None, _INVALID_TOKEN),
        (_jwt(chatgpt_account_id=5).encode() + b"\n", None, _INVALID_TOKEN),
        (b"abc\n", "", _INVALID_TOKEN),
        (_TOKEN.encode() + b"\n", "acc-2", "--chatgpt-account-id does not match the token"),
        (_TOKEN.encode() + b"\n", " acc-1", "--chatgpt-account-id does not match the token"),
        (
            _jwt().encode() + b"\n",
            None,
            "token has no ChatGPT account ID; supply --chatgpt-account-id",
        ),
        (_jwt().encode() + b"\n", "a b", "invalid ChatGPT account ID"),
        (_jwt().encode() + b"\n", "", "invalid ChatGPT account ID"),
        (_jwt(chatgpt_account_id="").encode() + b"\n", None, "invalid ChatGPT account ID"),
        (_jwt(chatgpt_account_id="\u00e9").encode() + b"\n", None, "invalid ChatGPT account ID"),
    ],
)
def test_invalid_chatgpt_tokens(content: bytes, account_id: str | None, text: str) -> None:
    assert _outcome(_CHATGPT, content, account_id) == text


def test_what_follows_the_line_is_not_read() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"t-1\nfor another program\n")
    credential = StdinCredential(FORMS[_BEARER], Expected("env-1"), reading)
    asyncio.run(credential.ready(_TASKS))
    assert credential._thread is not None
    credential._thread.join()
    assert os.read(reading, 100) == b"for another program\n"
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize("until_closed", [False, True])
def test_end_of_stdin_after_the_line(until_closed: bool) -> None:
    async def job() -> None:
        async with _piped(flag=_BEARER, until_closed=until_closed) as (pipe, credential):
            pipe.write(b"t-1\n")
            await credential.ready(_TASKS)
            pipe.write(b"ignored\n" * 10)
            pipe.close()
            assert credential._thread is not None
            await asyncio.to_thread(credential._thread.join)
            if until_closed:
                await credential.wait_ended()
            else:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0):
                        await credential.wait_ended()
            assert await _token(credential) == "Bearer t-1"

    _run(job())


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        (_EXECUTOR, "could not read exec-server executor credential pipe"),
        (_BEARER, "Is a directory (os error 21)"),
        (_CHATGPT, "ChatGPT token stdin must be a pipe or socket"),
    ],
)
def test_a_directory_as_stdin(flag: str, text: str) -> None:
    descriptor = os.open("/", os.O_RDONLY)
    try:
        with pytest.raises(StartupError) as refused:
            asyncio.run(StdinCredential(FORMS[flag], Expected("env-1"), descriptor).ready(_TASKS))
    finally:
        os.close(descriptor)
    assert str(refused.value) == text


def test_a_socket_as_stdin() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(_TOKEN.encode() + b"\n")
        credential = StdinCredential(FORMS[_CHATGPT], Expected("env-1"), ours.fileno())
        asyncio.run(credential.ready(_TASKS))
        assert asyncio.run(_token(credential)) == f"Bearer {_TOKEN}"


def test_a_file_as_stdin(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{_TOKEN}\n")
    for flag in (_BEARER, _CHATGPT):
        with open(tmp_path / "token", "rb") as file:
            credential = StdinCredential(FORMS[flag], Expected("env-1"), file.fileno())
            if flag == _BEARER:
                asyncio.run(credential.ready(_TASKS))
                assert asyncio.run(_token(credential)) == f"Bearer {_TOKEN}"
            else:
                with pytest.raises(StartupError, match="must be a pipe or socket"):
                    asyncio.run(credential.ready(_TASKS))


def test_a_line_that_comes_byte_by_byte() -> None:
    async def job() -> None:
        async with _piped(flag=_BEARER) as (pipe, credential):

            def trickle() -> None:
                for byte in b"t-1\r\n":
                    pipe.write(bytes([byte]))

            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(asyncio.to_thread(trickle))
                await credential.ready(_TASKS)
            assert await _token(credential) == "Bearer t-1"

    _run(job())


def test_a_line_without_an_end_is_not_read_for_ever() -> None:
    with open("/dev/zero", "rb") as endless:
        for flag, text in ((_BEARER, _NO_BEARER), (_EXECUTOR, "exceeds the size limit")):
            credential = StdinCredential(FORMS[flag], Expected("env-1"), endless.fileno())
            with pytest.raises(StartupError, match=text):
                asyncio.run(credential.ready(_TASKS))
