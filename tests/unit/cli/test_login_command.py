"""`exec-server login` and `logout` against a server that answers like a registry."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.http_server import HttpServer, answer, serving

from exec_server.cli import login, main
from exec_server.client.logins import load_logins

Run = Callable[..., tuple[int, str, str]]


class _Registry:
    """An HTTP server in a thread of its own: the command has an event loop too."""

    def __init__(self, *statuses: int) -> None:
        self._statuses = statuses
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self.server: HttpServer
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=[self._serve()])

    async def _serve(self) -> None:
        async with serving(*(answer(status, {}) for status in self._statuses)) as self.server:
            self._ready.set()
            await self._stop.wait()

    def __enter__(self) -> str:
        self._thread.start()
        self._ready.wait()
        return self.server.url

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(login, "has_keyring", lambda: False)

    def run(*words: str, stdin: str = "") -> tuple[int, str, str]:
        path = tmp_path / "stdin"
        path.write_text(stdin)
        with path.open() as file:
            monkeypatch.setattr("sys.stdin", file)
            before = os.dup(0)
            os.dup2(file.fileno(), 0)
            try:
                code = main.run_client(words[0], list(words[1:]))
            finally:
                os.dup2(before, 0)
                os.close(before)
        shown = capfd.readouterr()
        return code, shown.out, shown.err

    return run


def test_a_token_is_stored_for_what_it_is_for(run: Run) -> None:
    with _Registry(403, 400, 400, 403) as url:
        code, out, err = run("login", url, stdin="client-secret\n")
        assert (code, err) == (0, "")
        assert f"exec-server exec relay:{url}/ID" in out
        assert "exec-server up" not in out
        code, out, _ = run("login", f"{url}/", stdin="executor-secret")
        assert code == 0
        assert "exec-server up" in out
        assert "secret" not in out
        tokens = {"client": "client-secret", "executor": "executor-secret"}
        assert load_logins()[url].tokens == tokens
        assert run("login", "--list") == (0, f"{url}  client, executor\n", "")
        listed = json.loads(run("login", "--list", "--json")[1])
        assert listed == [{"url": url, "roles": ["client", "executor"]}]
        assert run("logout", url) == (0, f"Logged out of {url}.\n", "")
        code, _, err = run("logout", url)
        assert (code, err) == (
            1,
            f"Error: there is no login for {url}; `exec-server login --list` lists them\n",
        )


def test_a_token_for_certain_environments_is_used_for_both(run: Run) -> None:
    with _Registry(403, 403) as url:
        _, out, _ = run("login", url, stdin="secret")
    assert "for certain environments only" in out
    assert set(load_logins()[url].tokens) == {"client", "executor"}


def test_a_refused_token_is_not_stored(run: Run) -> None:
    with _Registry(401) as url:
        code, out, err = run("login", url, stdin="secret")
    assert (code, out) == (1, "")
    assert "does not accept this token" in err
    assert load_logins() == {}


@pytest.mark.parametrize(
    ("words", "stdin", "text"),
    [
        ((), "", "login needs the URL of a registry, or --list"),
        (("https://r", "--json"), "", "--json goes with --list"),
        (("https://r",), "", "the token is empty"),
        (("https://r",), "two words", "contains characters that no token has"),
        (("https://r",), "x" * 20_000, "more than 16384 bytes"),
        (("https://r", "--token-file", "f", "--token-env", "E"), "", "exclude each other"),
        (("https://r", "--token-env", "NO_SUCH"), "", "NO_SUCH holds no token"),
        (("https://r", "--ca-file", "f", "--pin", "p"), "t", "exclude each other"),
        (("https://r", "--pin", "p"), "t", "the pin `p` is not sha256:"),
        (("http://127.0.0.1:1", "--pin", "ab" * 32), "t", "a pin is for https:// registries"),
        (("http://registry.example.net",), "t", "requires https for non-loopback"),
        (("nonsense",), "t", "`nonsense` is not a URL: write https://nonsense"),
    ],
)
def test_wrong_arguments_are_named(run: Run, words: tuple[str, ...], stdin: str, text: str) -> None:
    code, out, err = run("login", *words, stdin=stdin)
    assert (code, out) == (2, "")
    assert text in err
    assert run("logout", "nonsense")[0] == 2


def test_a_terminal_is_asked_without_showing_the_token(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def ask(prompt: str) -> str:
        asked.append(prompt)
        if len(asked) > 1:
            raise EOFError
        return " typed "

    monkeypatch.setattr(os, "isatty", lambda descriptor: True)
    monkeypatch.setattr("getpass.getpass", ask)
    with _Registry(400, 403) as url:
        assert run("login", url, "--store", "file")[0] == 0
        assert load_logins()[url].read_token("executor") == "typed"
        assert run("login", url)[0] == 2
    assert asked[0] == f"Token for {url} (not shown): "


def test_the_place_of_a_token_can_be_chosen(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[str] = []
    monkeypatch.setattr(login, "save_login", lambda login, place: saved.append(place))
    with _Registry(400, 400) as url:
        assert "the keyring" in run("login", url, "--store", "keyring", stdin="t")[1]
        assert run("login", url, "--store", "file", stdin="t")[0] == 0
        monkeypatch.setattr(login, "has_keyring", lambda: True)
        assert run("login", url, stdin="t")[0] == 0
    assert saved == ["keyring", "file", "keyring"]
