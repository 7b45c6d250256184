"""The stored sign-in: its file, its forms, its changes, its refresh."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import stat
from base64 import urlsafe_b64encode
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest

from exec_server.errors import RegistryError, RegistryUnavailable
from exec_server.host.event_loop import GuardedTasks
from exec_server.registry import sign_in
from exec_server.registry.destination import Destinations
from exec_server.registry.http import CompleteResponse, HttpFailed
from exec_server.registry.sign_in import FILE_BYTES, PAUSE_SECONDS, StoredSignIn, load

T = TypeVar("T")
_NOW = 1_800_000_000.25

Headers = list[tuple[str, str]]


def _id_token(**account: object) -> str:
    claims = {"email": "a@b.c", "https://api.openai.com/auth": account}
    return f"e30.{urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip('=')}.sig"


def _tokens(**changes: object) -> dict[str, object]:
    user = _id_token(chatgpt_user_id="u-1")
    tokens = {"id_token": user, "access_token": "access", "refresh_token": "r"}
    return tokens | {"account_id": "acc-1"} | changes


def _write(path: Path, content: Any) -> None:
    """As a sign-in is refreshed: a new file in place of the old one."""
    new = path.with_suffix(".new")
    new.write_text(content if isinstance(content, str) else json.dumps(content))
    os.replace(new, path)


class _Hold:
    """Delays an answer."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.released = asyncio.Event()


class _Issuer:
    """Answers refreshes in order; an HttpClient."""

    def __init__(self, *answers: CompleteResponse | HttpFailed | Callable[[], None] | _Hold):
        self.answers = list(answers)
        self.requests: list[Any] = []

    async def request(
        self, method: str, url: str, headers: Headers, body: bytes, *, repeatable: bool
    ) -> CompleteResponse:
        assert (method, url, repeatable) == ("POST", "http://localhost/token", False)
        assert ("content-type", "application/json") in headers
        self.requests.append(json.loads(body))
        answer = self.answers.pop(0)
        if isinstance(answer, _Hold):
            answer.asked.set()
            await answer.released.wait()
            answer = self.answers.pop(0)
        elif callable(answer):  # something happens meanwhile
            answer()
            answer = self.answers.pop(0)
        await asyncio.sleep(0)
        if isinstance(answer, HttpFailed):
            raise answer
        assert isinstance(answer, CompleteResponse)
        return answer


class _Server:
    """The tasks of a server, for one event loop after the other; GuardedTasks."""

    tasks: GuardedTasks

    def create_task(self, job: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self.tasks.create_task(job)

    def run(self, job: Awaitable[T]) -> T:
        async def run() -> T:
            async with asyncio.timeout(20), asyncio.TaskGroup() as group:
                self.tasks = GuardedTasks(group)
                try:
                    return await job
                except RegistryError as error:  # as itself, not in a group
                    failure = error
                finally:
                    await self.tasks.finish(10)
            raise failure

        return asyncio.run(run())


_SERVER = _Server()
_run = _SERVER.run


class _Clock:
    def __init__(self) -> None:
        self.now = _NOW

    def __call__(self) -> float:
        return self.now


def _stored(
    path: Path, issuer: _Issuer | None = None, clock: Callable[[], float] = lambda: _NOW
) -> StoredSignIn:
    http = cast(Any, issuer or _Issuer())
    stored = StoredSignIn(path, http, "http://localhost/token", clock)
    _run(stored.ready(cast(Any, _SERVER)))
    return stored


def _headers(stored: StoredSignIn) -> Headers:
    return _run(stored.headers("POST", "http://localhost", b""))


def _access(left: float, name: str = "") -> str:
    claims = {"exp": _NOW + left, "name": name}
    return f"e30.{urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip('=')}.sig"


_CHATGPT: Headers = [("authorization", "Bearer access"), ("chatgpt-account-id", "acc-1")]
_KEY: Headers = [("authorization", "Bearer sk-x")]


@pytest.mark.parametrize(
    ("content", "headers", "destinations"),
    [
        ({"auth_mode": "apikey", "OPENAI_API_KEY": "sk-x"}, _KEY, Destinations.OWN_HOSTS),
        ({"OPENAI_API_KEY": "sk-x", "tokens": _tokens()}, _KEY, Destinations.OWN_HOSTS),
        (
            {"auth_mode": "apikey", "OPENAI_API_KEY": "sk-x", "tokens": _tokens()},
            _KEY,
            Destinations.OWN_HOSTS,
        ),
        (
            {"OPENAI_API_KEY": None, "tokens": _tokens(), "last_refresh": "x"},
            _CHATGPT,
            Destinations.ANYWHERE,
        ),
        (
            {"auth_mode": "chatgpt", "OPENAI_API_KEY": "sk-x", "tokens": _tokens()},
            _CHATGPT,
            Destinations.ANYWHERE,
        ),
        ({"auth_mode": "chatgptAuthTokens", "tokens": _tokens()}, _CHATGPT, Destinations.ANYWHERE),
        ({"tokens": _tokens(account_id=None)}, _CHATGPT[:1], Destinations.ANYWHERE),
        (
            {"tokens": _tokens(id_token=_id_token(chatgpt_account_is_fedramp=True))},
            [*_CHATGPT, ("X-OpenAI-Fedramp", "true")],
            Destinations.ANYWHERE,
        ),
    ],
)
def test_forms(
    tmp_path: Path, content: object, headers: Headers, destinations: Destinations
) -> None:
    _write(tmp_path / "auth.json", content)
    stored = _stored(tmp_path / "auth.json")
    assert stored.is_usable
    assert stored.destinations is destinations
    assert _headers(stored) == headers


@pytest.mark.parametrize(
    "content",
    [
        "nope",
        '{"more": ' + "[" * 200_000,
        "[]",
        "{}",
        {"auth_mode": "zzz", "OPENAI_API_KEY": "sk-x"},
        {"auth_mode": "apikey", "OPENAI_API_KEY": None, "tokens": _tokens()},
        {"auth_mode": "chatgpt", "OPENAI_API_KEY": "sk-x"},
        {"OPENAI_API_KEY": ""},
        {"OPENAI_API_KEY": "sk-x\n"},
        {"tokens": _tokens(access_token="a\r\nX: y")},
        {"tokens": _tokens(access_token="")},
        {"tokens": _tokens(account_id="é")},
        {"OPENAI_API_KEY": 5},
        {"tokens": {"access_token": "access"}},
        {"tokens": _tokens(id_token="x")},
        {"tokens": _tokens(id_token="x.!.y")},
        {"tokens": _tokens(id_token="x.bm8.y")},
    ],
)
def test_files_without_a_sign_in(tmp_path: Path, content: object) -> None:
    _write(tmp_path / "auth.json", content)
    assert not _stored(tmp_path / "auth.json").is_usable


def test_files_that_are_no_files(tmp_path: Path) -> None:
    path = tmp_path / "auth.json"
    assert not _stored(path).is_usable
    os.mkfifo(path)
    assert not _stored(path).is_usable
    path.unlink()
    path.mkdir()
    assert not _stored(path).is_usable


def test_newer_tokens_are_used(tmp_path: Path) -> None:
    path = tmp_path / "auth.json"
    _write(path, {"tokens": _tokens(access_token="one")})
    stored = _stored(path)
    before = path.stat()
    # Neither size nor time tell that the content is another.
    path.write_text(path.read_text().replace('"one"', '"two"'))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert _headers(stored)[0] == ("authorization", "Bearer two")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "was removed"),
        ("{}", "holds no sign-in any more"),
        ("[]", "holds no sign-in any more"),
        ({"OPENAI_API_KEY": "sk-x"}, "holds an API key now"),
        ({"OPENAI_API_KEY": "sk-x", "tokens": _tokens()}, "holds an API key now"),
        ({"tokens": _tokens(account_id="acc-2")}, "is of another account now"),
        ({"tokens": _tokens(account_id=None)}, "is of another account now"),
        ({"tokens": _tokens(id_token=_id_token(chatgpt_user_id="u-2"))}, "is of another user now"),
        ({"tokens": _tokens(id_token=_id_token())}, "is of another user now"),
    ],
)
def test_another_sign_in_ends_the_server(tmp_path: Path, content: object, reason: str) -> None:
    # Neither may another user answer for the executor, nor may an API key go where only the tokens
    # were allowed to.
    path = tmp_path / "auth.json"
    _write(path, {"tokens": _tokens()})
    stored = _stored(path)

    async def run() -> list[str]:
        texts = []
        async with asyncio.TaskGroup() as tasks:
            ended = tasks.create_task(_error(stored.wait_ended()))
            await asyncio.sleep(0)
            if content is None:
                path.unlink()
            else:
                _write(path, content)
            texts.append(await _error(stored.headers("POST", "http://localhost", b"")))
            texts.append(await ended)
        _write(path, {"tokens": _tokens()})  # too late
        texts.append(await _error(stored.headers("POST", "http://localhost", b"")))
        texts.append(await _error(stored.renew([])))
        return texts

    text = (
        f"environment registry authentication error: the sign-in of this executor, {path}, "
        f"{reason}; start the server again to register anew"
    )
    assert asyncio.run(run()) == [text] * 4


async def _error(job: Awaitable[object]) -> str:
    with pytest.raises(RegistryError) as failed:
        await job
    return str(failed.value)


def test_account_tokens_do_not_replace_an_api_key(tmp_path: Path) -> None:
    path = tmp_path / "auth.json"
    _write(path, {"OPENAI_API_KEY": "sk-x"})
    stored = _stored(path)
    _write(path, {"OPENAI_API_KEY": "sk-y"})
    assert _headers(stored) == [("authorization", "Bearer sk-y")]
    _write(path, {"tokens": _tokens()})
    assert "holds account tokens now" in _run(_error(stored.headers("POST", "u", b"")))


def _make_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda path: path.write_text(""), "it is not JSON"),
        (lambda path: path.write_text('{"tokens": {"id_token": "'), "it is not JSON"),
        (lambda path: path.write_bytes(b'{"auth_mode": "\xff"}'), "it is not JSON"),
        (lambda path: path.write_text('{"more": ' + "[" * 200_000), "it is not JSON"),
        (lambda path: path.write_bytes(b" " * (FILE_BYTES + 1)), "it has more than 1048576 bytes"),
        (lambda path: _write(path, {"tokens": _tokens(access_token="a b")}), "visible ASCII"),
        (_make_fifo, "it is not a regular file"),
        (lambda path: (path.unlink(), path.mkdir()), "Is a directory (os error 21)"),
        (lambda path: (path.unlink(), path.symlink_to(path)), "(os error 40)"),
    ],
)
def test_an_unreadable_file_fails_one_request(
    tmp_path: Path, spoil: Callable[[Path], object], reason: str
) -> None:
    path = tmp_path / "auth.json"
    _write(path, {"tokens": _tokens()})
    stored = _stored(path)
    spoil(path)
    with pytest.raises(RegistryUnavailable) as failed:
        _headers(stored)
    assert str(failed.value).startswith(f"cannot read {path}: ")
    assert reason in str(failed.value)
    if path.is_dir():
        path.rmdir()
    _write(path, {"tokens": _tokens()})
    assert _headers(stored) == _CHATGPT


# ---- refresh -------------------------------------------------------------------------------


def _answer(status: int = 200, **tokens: object) -> CompleteResponse:
    return CompleteResponse(status, "", [], json.dumps(tokens).encode())


def _refreshable(
    path: Path, *answers: Any, left: float = 3600.0, clock: Callable[[], float] = lambda: _NOW
) -> tuple[StoredSignIn, _Issuer]:
    issuer = _Issuer(*answers)
    _write(path, {"tokens": _tokens(access_token=_access(left), refresh_token="r-1"), "more": [1]})
    return _stored(path, issuer, clock), issuer


def _asked(reason: str, token: str = "r-1") -> dict[str, str]:
    return {
        "client_id": "app_EMoamEEZ73f0CkXaXp7hrann",
        "grant_type": "refresh_token",
        "refresh_reason": reason,
        "refresh_token": token,
    }


@pytest.mark.parametrize("left", [-5.0, 0.0, 299.0])
def test_a_token_that_expires_soon_is_refreshed_before_it_is_sent(
    tmp_path: Path, left: float
) -> None:
    path = tmp_path / "auth.json"
    new = {
        "id_token": _id_token(chatgpt_user_id="u-1", chatgpt_plan_type="pro"),
        "access_token": _access(3600, "new"),
        "refresh_token": "r-2",
    }
    stored, issuer = _refreshable(path, _answer(200, **new, more="not stored"), left=left)
    path.chmod(0o644)
    for _ in range(2):
        assert _headers(stored)[0] == ("authorization", f"Bearer {new['access_token']}")
    assert issuer.requests == [_asked("proactive_expiry")]
    assert json.loads(path.read_text()) == {
        "tokens": {**new, "account_id": "acc-1"},
        "more": [1],
        "last_refresh": "2027-01-15T08:00:00.250000Z",
    }
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["auth.json"]


def test_a_token_with_time_left_is_not_refreshed(tmp_path: Path) -> None:
    stored, issuer = _refreshable(tmp_path / "auth.json", left=301)
    assert _headers(stored)[0] == ("authorization", f"Bearer {_access(301)}")
    assert issuer.requests == []


def test_a_rejected_token_is_refreshed(tmp_path: Path) -> None:
    stored, issuer = _refreshable(tmp_path / "auth.json", _answer(access_token="new"))
    rejected = _headers(stored)
    assert _run(stored.renew(rejected))
    assert issuer.requests == [_asked("forced")]
    assert _headers(stored)[0] == ("authorization", "Bearer new")
    # A request that was on its way with the old token needs no other refresh.
    assert _run(stored.renew(rejected))
    assert len(issuer.requests) == 1


def test_requests_at_the_same_time_refresh_once(tmp_path: Path) -> None:
    stored, issuer = _refreshable(
        tmp_path / "auth.json", _answer(access_token=_access(9999, "new")), left=1
    )

    async def run() -> list[Headers]:
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(stored.headers("POST", "u", b"")) for _ in range(5)]
        return [task.result() for task in asked]

    assert {headers[0][1] for headers in _run(run())} == {f"Bearer {_access(9999, 'new')}"}
    assert len(issuer.requests) == 1


@pytest.mark.parametrize("reason", ["proactive_expiry", "forced"])
def test_a_refresh_survives_the_requests_that_wait_for_it(tmp_path: Path, reason: str) -> None:
    path, hold = tmp_path / "auth.json", _Hold()
    left = 100 if reason == "proactive_expiry" else 3600
    stored, issuer = _refreshable(
        path, hold, _answer(access_token="new", refresh_token="r-2"), left=left
    )

    async def run() -> None:
        used = _access(left)
        rejected = [("authorization", f"Bearer {used}"), ("chatgpt-account-id", "acc-1")]
        waits = stored.headers("POST", "u", b"") if left == 100 else stored.renew(rejected)
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(waits)
            await hold.asked.wait()
            asked.cancel()
        assert asked.cancelled()
        hold.released.set()

    _run(run())
    tokens = json.loads(path.read_text())["tokens"]
    assert (tokens["access_token"], tokens["refresh_token"]) == ("new", "r-2")
    assert issuer.requests == [_asked(reason)]


def test_an_issuer_that_hangs_does_not_hold_up_requests_with_a_valid_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, hold = tmp_path / "auth.json", _Hold()
    stored, issuer = _refreshable(path, hold, _answer(access_token="new"), left=100)
    monkeypatch.setattr(sign_in, "WAIT_SECONDS", 0.01)

    async def run() -> None:
        for _ in range(2):
            async with asyncio.TaskGroup() as tasks:
                asked = [tasks.create_task(stored.headers("POST", "u", b"")) for _ in range(3)]
            used = {task.result()[0][1] for task in asked}
            assert used == {f"Bearer {_access(100)}"}
        hold.released.set()

    _run(run())
    assert issuer.requests == [_asked("proactive_expiry")]
    assert _headers(stored)[0] == ("authorization", "Bearer new")


def test_requests_with_an_expired_token_wait_for_the_refresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = _Hold()
    stored, issuer = _refreshable(
        tmp_path / "auth.json", hold, _answer(access_token="new"), left=-1
    )
    monkeypatch.setattr(sign_in, "WAIT_SECONDS", 0.0)

    async def run() -> Headers:
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(stored.headers("POST", "u", b""))
            await hold.asked.wait()
            rejected = tasks.create_task(stored.renew(_CHATGPT))
            hold.released.set()
        assert rejected.result()
        return asked.result()

    assert _run(run())[0] == ("authorization", "Bearer new")
    assert issuer.requests == [_asked("proactive_expiry")]


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (_answer(500, error="s3cret"), "the response has status 500"),
        (_answer(400, error="s3cret"), "the response has status 400"),
        (CompleteResponse(200, "", [], b"s3cret"), "the response has no tokens"),
        (CompleteResponse(200, "", [], b"[]"), "the response has no tokens"),
        (
            CompleteResponse(200, "", [], b'{"more": ' + b"[" * 200_000),
            "the response has no tokens",
        ),
        (_answer(access_token=5), "the response has no tokens"),
        *(
            (
                _answer(**cast(Any, {"access_token": "x", name: "s3cret\r\nX: y"})),
                "the response has a token with other characters than visible ASCII",
            )
            for name in ("id_token", "access_token", "refresh_token")
        ),
        (
            _answer(id_token=_id_token(chatgpt_user_id="u-2"), access_token="x"),
            "the response is for another account or user",
        ),
        (_answer(id_token="s3cret"), "the response is for another account or user"),
        (HttpFailed("timed out"), "timed out"),
    ],
)
def test_after_a_failed_refresh_the_old_token_is_used(
    tmp_path: Path, answer: Any, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, clock = tmp_path / "auth.json", _Clock()
    stored, issuer = _refreshable(path, answer, answer, left=1, clock=clock)
    before = path.read_text()
    with caplog.at_level(logging.DEBUG):
        headers = _headers(stored)
        assert headers[0] == ("authorization", f"Bearer {_access(1)}")
        clock.now += PAUSE_SECONDS
        assert not _run(stored.renew(headers))
    assert issuer.requests == [_asked("proactive_expiry"), _asked("forced")]
    assert path.read_text() == before
    assert f"the sign-in in {path} could not be refreshed: {text}" in caplog.text
    assert "s3cret" not in caplog.text
    assert "r-1" not in caplog.text


def test_an_answer_without_a_new_token_is_no_reason_to_ask_again(tmp_path: Path) -> None:
    stored, _ = _refreshable(tmp_path / "auth.json", _answer())
    assert not _run(stored.renew(_headers(stored)))


def test_a_token_that_was_just_refreshed_is_not_refreshed_again(tmp_path: Path) -> None:
    # A registry that rejects every token would cause a rotation for each client.
    clock = _Clock()
    answers = [_answer(access_token=name, refresh_token=name) for name in ("r-2", "r-3")]
    stored, issuer = _refreshable(tmp_path / "auth.json", *answers, clock=clock)
    assert [_run(stored.renew(_headers(stored))) for _ in range(6)] == [True] + [False] * 5
    clock.now += PAUSE_SECONDS
    assert [_run(stored.renew(_headers(stored))) for _ in range(6)] == [True] + [False] * 5
    assert issuer.requests == [_asked("forced"), _asked("forced", "r-2")]


def test_a_failed_refresh_is_not_repeated_at_once(tmp_path: Path) -> None:
    clock = _Clock()
    answers = [HttpFailed("timed out"), HttpFailed("timed out"), _answer(access_token="new")]
    stored, issuer = _refreshable(tmp_path / "auth.json", *answers, left=100, clock=clock)
    old = ("authorization", f"Bearer {_access(100)}")
    for _ in range(2):
        for _ in range(3):
            assert _headers(stored)[0] == old
            assert not _run(stored.renew(_headers(stored)))
        clock.now += PAUSE_SECONDS
    assert len(issuer.requests) == 2
    clock.now -= 1000.0  # a clock that is set back does not prolong the pause
    assert _run(stored.renew(_headers(stored)))


def test_a_rejected_refresh_token_is_not_sent_again(tmp_path: Path) -> None:
    path, clock = tmp_path / "auth.json", _Clock()
    stored, issuer = _refreshable(path, _answer(401), _answer(access_token="new"), clock=clock)
    for _ in range(2):
        assert not _run(stored.renew(_headers(stored)))
        clock.now += PAUSE_SECONDS
    assert len(issuer.requests) == 1
    _write(path, {"tokens": _tokens(access_token="old", refresh_token="r-2")})
    assert _run(stored.renew(_headers(stored)))
    assert issuer.requests[1] == _asked("forced", "r-2")


@pytest.mark.parametrize(
    "content",
    [
        {"tokens": _tokens(refresh_token=None)},
        {"tokens": _tokens(refresh_token="")},
        {"auth_mode": "chatgptAuthTokens", "tokens": _tokens()},
        {"OPENAI_API_KEY": "sk-x"},
    ],
)
def test_sign_ins_that_are_not_refreshed(tmp_path: Path, content: object) -> None:
    _write(tmp_path / "auth.json", content)
    issuer = _Issuer()
    stored = _stored(tmp_path / "auth.json", issuer)
    assert not _run(stored.renew(_headers(stored)))
    assert issuer.requests == []


def test_tokens_that_another_program_has_refreshed_meanwhile_stay(tmp_path: Path) -> None:
    path = tmp_path / "auth.json"
    other = {"tokens": _tokens(access_token="theirs", refresh_token="r-9")}
    stored, _ = _refreshable(path, lambda: _write(path, other), _answer(access_token="ours"))
    assert _run(stored.renew(_headers(stored)))
    assert _headers(stored)[0] == ("authorization", "Bearer theirs")
    assert json.loads(path.read_text()) == other


def test_executors_on_one_machine_refresh_once(tmp_path: Path) -> None:
    path, link = tmp_path / "auth.json", tmp_path / "elsewhere" / "link.json"
    link.parent.mkdir()
    link.symlink_to(path)
    hold = _Hold()
    first, issuer = _refreshable(path, hold, _answer(access_token="new", refresh_token="r-2"))
    other_issuer = _Issuer()
    second = _stored(link, other_issuer)
    rejected = _headers(first)

    async def run() -> list[bool]:
        async with asyncio.TaskGroup() as tasks:
            renewed = [tasks.create_task(first.renew(rejected))]
            await hold.asked.wait()
            locked, wait_lock = asyncio.Event(), asyncio.sleep

            async def sleep(seconds: float) -> None:
                locked.set()
                await wait_lock(0)

            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(asyncio, "sleep", sleep)
                renewed.append(tasks.create_task(second.renew(rejected)))
                await locked.wait()
            hold.released.set()
        return [task.result() for task in renewed]

    assert _run(run()) == [True, True]
    assert _headers(second)[0] == ("authorization", "Bearer new")
    assert (len(issuer.requests), other_issuer.requests) == (1, [])
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["auth.json", "elsewhere"]


def _holding(directory: Path) -> int:
    descriptor = os.open(directory, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


@pytest.mark.parametrize(
    ("content", "outcome"),
    [
        ({"tokens": _tokens(access_token="theirs", refresh_token="r-2")}, True),
        ({"tokens": _tokens(access_token=_access(3600), refresh_token=None)}, False),
        ("nope", "it is not JSON"),
    ],
)
def test_the_file_is_read_again_under_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: object, outcome: object
) -> None:
    path = tmp_path / "auth.json"
    stored, issuer = _refreshable(path)
    rejected = _headers(stored)
    lock = sign_in._lock

    def change_then_lock(directory: int) -> bool:
        _write(path, content)
        return lock(directory)

    monkeypatch.setattr(sign_in, "_lock", change_then_lock)
    if isinstance(outcome, str):
        assert outcome in _run(_error(stored.renew(rejected)))
    else:
        assert _run(stored.renew(rejected)) is outcome
    assert issuer.requests == []


def test_a_lock_that_is_never_released_does_not_prevent_a_refresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, _ = _refreshable(tmp_path / "auth.json", _answer(access_token="new"))
    monkeypatch.setattr(sign_in, "LOCK_SECONDS", 0.003)
    monkeypatch.setattr(sign_in, "LOCK_RETRY_SECONDS", 0.001)
    descriptor = _holding(tmp_path)
    try:
        assert _run(stored.renew(_headers(stored)))
    finally:
        os.close(descriptor)


def test_the_lock_is_released(tmp_path: Path) -> None:
    stored, _ = _refreshable(tmp_path / "auth.json", _answer(500))
    _run(stored.renew(_headers(stored)))
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)


def test_refreshes_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(9, "Bad file descriptor")

    stored, _ = _refreshable(tmp_path / "auth.json", _answer(access_token="new"))
    monkeypatch.setattr(fcntl, "flock", fail)
    assert _run(stored.renew(_headers(stored)))


def test_refreshes_in_a_directory_that_cannot_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    stored, _ = _refreshable(tmp_path / "auth.json", _answer(access_token="new"))
    monkeypatch.setattr(sign_in, "_open_directory", fail)
    assert _run(stored.renew(_headers(stored)))


def test_a_sign_out_during_a_refresh_counts(tmp_path: Path) -> None:
    path = tmp_path / "auth.json"
    stored, _ = _refreshable(path, path.unlink, _answer(access_token="ours"))
    assert "was removed" in _run(_error(stored.renew(_headers(stored))))
    assert not path.exists()


def test_members_of_other_programs_are_copied(tmp_path: Path) -> None:
    path = tmp_path / "auth.json"
    others = '"large": 123456789012345678901234567890, "infinite": 1e999'
    _write(path, json.dumps({"tokens": _tokens()})[:-1] + f", {others}}}")
    stored = _stored(path, _Issuer(_answer(access_token="new")))
    assert _run(stored.renew(_headers(stored)))
    assert "".join(path.read_text().split()).find("".join(others.split())) > 0


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    path, target = tmp_path / "auth.json", tmp_path / "elsewhere" / "real.json"
    target.parent.mkdir()
    _refreshable(target)
    path.symlink_to(target)
    stored = _stored(path, _Issuer(_answer(access_token="new")))
    assert _run(stored.renew(_headers(stored)))
    assert path.is_symlink()
    assert json.loads(target.read_text())["tokens"]["access_token"] == "new"


def test_tokens_that_cannot_be_stored_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    path = tmp_path / "auth.json"
    stored, issuer = _refreshable(
        path, _answer(access_token=_access(9999, "new"), refresh_token="r-2"), left=1
    )
    before = path.read_text()
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fail)
        for _ in range(2):
            assert _headers(stored)[0] == ("authorization", f"Bearer {_access(9999, 'new')}")
    assert len(issuer.requests) == 1
    assert path.read_text() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["auth.json"]
    assert f"new tokens cannot be written to {path}" in caplog.text
    # A program that signs in again replaces them.
    _write(path, {"tokens": _tokens()})
    assert _headers(stored) == _CHATGPT


def test_tokens_that_could_not_be_stored_are_stored_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    path, clock = tmp_path / "auth.json", _Clock()
    stored, issuer = _refreshable(
        path,
        _answer(access_token="second", refresh_token="r-2"),
        _answer(access_token="third", refresh_token="r-3"),
        clock=clock,
    )
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fail)
        assert _run(stored.renew(_headers(stored)))
    clock.now += PAUSE_SECONDS
    assert _run(stored.renew(_headers(stored)))
    assert issuer.requests[1] == _asked("forced", "r-2")
    assert json.loads(path.read_text())["tokens"]["refresh_token"] == "r-3"


def test_readers_see_whole_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "auth.json"
    stored, _ = _refreshable(path, _answer(access_token="new"))
    old = path.read_text()
    rename, seen = os.replace, []

    def observed(source: str, target: Path) -> None:
        seen.append((path.read_text(), json.loads(Path(source).read_text())["tokens"]))
        rename(source, target)

    monkeypatch.setattr(os, "replace", observed)
    assert _run(stored.renew(_headers(stored)))
    [(before, tokens)] = seen
    assert before == old
    assert tokens["access_token"] == "new"


def test_the_file_belongs_to_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "auth.json"
    stored, _ = _refreshable(path, _answer(access_token="new"))
    info = path.stat()
    owners: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "geteuid", lambda: info.st_uid + 1)
    monkeypatch.setattr(os, "fchown", lambda _, user, group: owners.append((user, group)))
    assert _run(stored.renew(_headers(stored)))
    assert owners == [(info.st_uid, info.st_gid)]


def test_where_it_is(tmp_path: Path) -> None:
    (tmp_path / ".codex").mkdir()
    for place in (tmp_path, tmp_path / ".codex"):
        _write(place / "auth.json", {"tokens": _tokens()})
    http = cast(Any, _Issuer())
    found = load({"CODEX_HOME": str(tmp_path), "HOME": "/nonexistent"}, http)
    assert found._path == tmp_path / "auth.json"
    found = load({"CODEX_HOME": "", "HOME": str(tmp_path)}, http)
    assert found._path == tmp_path / ".codex" / "auth.json"
    assert found._refresh_url == sign_in.REFRESH_URL == "https://auth.openai.com/oauth/token"
    found = load({"HOME": str(tmp_path), sign_in.REFRESH_VARIABLE: "http://[::1]:5/t"}, http)
    assert found._refresh_url == "http://[::1]:5/t"
