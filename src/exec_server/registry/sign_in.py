"""The sign-in that `codex login` keeps in a file, read anew whenever that file changes."""

from __future__ import annotations

import os
from base64 import urlsafe_b64decode
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from exec_server.errors import RegistryError
from exec_server.registry.destination import Reach

# Far more than the tokens of one person take; a longer file is not what it should be.
FILE_BYTES = 1_048_576


class _Tokens(msgspec.Struct, frozen=True):
    id_token: str
    access_token: str
    account_id: str | None = None


class _State(msgspec.Struct, frozen=True):
    auth_mode: str | None = None
    api_key: str | None = msgspec.field(default=None, name="OPENAI_API_KEY")
    tokens: _Tokens | None = None


class _Account(msgspec.Struct, frozen=True):
    chatgpt_account_is_fedramp: bool = False


class _IdClaims(msgspec.Struct, frozen=True):
    account: _Account = msgspec.field(default_factory=_Account, name="https://api.openai.com/auth")


class SignIn(NamedTuple):
    """What a file says: headers to send."""

    headers: tuple[tuple[str, str], ...]
    is_api_key: bool


class StoredSignIn:
    """An API key or the tokens of a ChatGPT account, whatever the file holds.

    Tokens expire and are refreshed by whoever signed in; here they are only read.
    """

    hides_answers = False

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, ...] = ()
        self._latest: SignIn | None = None
        first = self._read()
        self.usable = first is not None
        # Where a secret may go is decided once, so it stays of the kind that it was then.
        self._is_api_key = first is not None and first.is_api_key

    @property
    def reach(self) -> Reach:
        return Reach.OWN_HOSTS if self._is_api_key else Reach.ANYWHERE

    async def ready(self) -> None:
        """It is, if it is usable."""

    async def headers(self, method: str, url: str, body: bytes) -> list[tuple[str, str]]:
        """What proves who we are; raises RegistryError if the file no longer says so."""
        latest = self._read()
        if latest is None or latest.is_api_key != self._is_api_key:
            raise RegistryError(
                "environment registry authentication error: the stored sign-in is gone or of "
                "another kind; start again"
            )
        return list(latest.headers)

    def _read(self) -> SignIn | None:
        """What the file says; it is small, local, and hardly ever another one."""
        try:
            with open(self._path, "rb") as file:
                status = os.fstat(file.fileno())
                seen = (status.st_ino, status.st_size, status.st_mtime_ns)
                if seen == self._seen:
                    return self._latest
                content = file.read(FILE_BYTES)
        except OSError:
            return None
        try:
            self._latest = parse(content)
        except msgspec.DecodeError:
            return self._latest  # no JSON: it is just being written
        self._seen = seen
        return self._latest


def path_of(environ: Mapping[str, str]) -> Path:
    """Where the sign-in is kept."""
    home = environ.get("CODEX_HOME") or Path(environ.get("HOME") or "/") / ".codex"
    return Path(home) / "auth.json"


def parse(content: bytes) -> SignIn | None:
    """The sign-in in a file, None if there is none of a kind that we know.

    Raises msgspec.DecodeError if it is no JSON at all.
    """
    try:
        state = msgspec.json.decode(content, type=_State)
    except (msgspec.ValidationError, UnicodeDecodeError):
        return None
    mode = state.auth_mode
    if mode in (None, "apikey") and state.api_key:
        return SignIn((("authorization", f"Bearer {state.api_key}"),), is_api_key=True)
    if mode not in (None, "chatgpt", "chatgptAuthTokens") or state.tokens is None:
        return None
    return _chatgpt(state.tokens)


def _chatgpt(tokens: _Tokens) -> SignIn | None:
    try:
        payload = tokens.id_token.split(".")[1]
        claims = msgspec.json.decode(urlsafe_b64decode(payload + "=" * 3), type=_IdClaims)
    except (IndexError, ValueError, msgspec.MsgspecError):
        return None
    headers = [("authorization", f"Bearer {tokens.access_token}")]
    if tokens.account_id is not None:
        headers.append(("chatgpt-account-id", tokens.account_id))
    if claims.account.chatgpt_account_is_fedramp:
        headers.append(("X-OpenAI-Fedramp", "true"))
    return SignIn(tuple(headers), is_api_key=False)
