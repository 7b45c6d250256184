"""The sign-in that `codex login` stores in a file, read again when the file changes."""

from __future__ import annotations

import os
from base64 import urlsafe_b64decode
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from exec_server.errors import RegistryError
from exec_server.registry.destination import Destinations

# Far more than the tokens of one user need; a longer file is invalid.
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
    """The headers of a sign-in file."""

    headers: tuple[tuple[str, str], ...]
    is_api_key: bool


class StoredSignIn:
    """The API key or account tokens in the file; the program that signed in refreshes them."""

    hides_responses = False

    def __init__(self, path: Path) -> None:
        self._path = path
        self._version: tuple[int, ...] = ()
        self._latest: SignIn | None = None
        first = self._read()
        self.is_usable = first is not None
        # The destination is checked once, for this kind; a later change of the kind is an error.
        self._is_api_key = first is not None and first.is_api_key

    @property
    def destinations(self) -> Destinations:
        return Destinations.OWN_HOSTS if self._is_api_key else Destinations.ANYWHERE

    async def ready(self) -> None:
        """Return at once: the file was read before."""

    async def headers(self, method: str, url: str, body: bytes) -> list[tuple[str, str]]:
        """Return the headers of the file; raises RegistryError if they are gone or changed kind."""
        latest = self._read()
        if latest is None or latest.is_api_key != self._is_api_key:
            raise RegistryError(
                "environment registry authentication error: the stored sign-in is gone or of "
                "another kind; restart the server"
            )
        return list(latest.headers)

    def _read(self) -> SignIn | None:
        """Parse the file if it has changed; small and local, so it is read on the loop."""
        try:
            with open(self._path, "rb") as file:
                status = os.fstat(file.fileno())
                version = (status.st_ino, status.st_size, status.st_mtime_ns)
                if version == self._version:
                    return self._latest
                content = file.read(FILE_BYTES)
        except OSError:
            return None
        try:
            self._latest = parse(content)
        except msgspec.DecodeError:
            return self._latest  # not JSON: the file is being written
        self._version = version
        return self._latest


def file_path(environ: Mapping[str, str]) -> Path:
    """The path of the sign-in file."""
    home = environ.get("CODEX_HOME") or Path(environ.get("HOME") or "/") / ".codex"
    return Path(home) / "auth.json"


def parse(content: bytes) -> SignIn | None:
    """The sign-in in a file, None if of no known kind; raises msgspec.DecodeError if not JSON."""
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
