"""The sign-in that `codex login` stores in a file, read for each request and refreshed in time.

Theory of operation: an executor is bound to the account and the user that were in the file when it
started. Each request reads the file. Newer tokens of the same user are used at once. Another user,
an API key or no sign-in ends the server, because the registry knows the executor by the first one.
A file that cannot be read or is not JSON fails one request only: it may be in the middle of a
write. An access token that expires soon, or that the registry has rejected, is refreshed; the new
tokens go back into the file for all programs that use it. After a failed refresh the old token is
used.

A refresh token works once: its successor is lost unless the answer is awaited and written. So an
attempt is a task of the server, shared by all requests and cancelled with none of them. Attempts of
several executors on one machine exclude each other by a lock, and have a pause between them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import stat
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from exec_server.errors import RegistryError, RegistryUnavailable, StartupError, os_error_text
from exec_server.host.event_loop import GuardedTasks
from exec_server.registry.chatgpt_token import account_claims, expiry, is_visible, token_headers
from exec_server.registry.decoding import decode_json
from exec_server.registry.destination import Credential, Destinations, is_encrypted
from exec_server.registry.http import CompleteResponse, HttpClient, HttpFailed

# Far more than the tokens of one user need; a longer file is invalid.
FILE_BYTES = 1_048_576
# A token with less time left is refreshed before it is sent.
REFRESH_SECONDS = 300.0
# From the start of an attempt, requests wait this long for it if the token is still valid: an
# answer usually takes less than a second, and clients give up on a handshake after 10 s.
WAIT_SECONDS = 2.0
# After an attempt, for the next one: an issuer that hangs or fails is not asked by each client, and
# a token that is rejected at once would be replaced in vain at each handshake.
PAUSE_SECONDS = 30.0
# For the lock of another executor, which holds it for one request. Beyond it a refresh goes on
# without the lock, which any program of the user may hold for ever.
LOCK_SECONDS = 15.0
# Between two tries to get the lock: a refresh itself takes longer.
LOCK_RETRY_SECONDS = 0.1

REFRESH_URL = "https://auth.openai.com/oauth/token"
REFRESH_VARIABLE = "CODEX_REFRESH_TOKEN_URL_OVERRIDE"
# The public name of the program that signed in, which the refresh token belongs to.
_CLIENT_ID = "app_EMoamEEZ73f0CkXaXp7hrann"
# The reasons for a refresh, which the issuer is told.
_PROACTIVE = "proactive_expiry"
_FORCED = "forced"
_PREFIX = "environment registry authentication error: the sign-in of this executor, "

log = logging.getLogger(__name__)


class _Tokens(msgspec.Struct, frozen=True):
    id_token: str
    access_token: str
    account_id: str | None = None
    refresh_token: str | None = None


class _State(msgspec.Struct, frozen=True):
    auth_mode: str | None = None
    api_key: str | None = msgspec.field(default=None, name="OPENAI_API_KEY")
    tokens: _Tokens | None = None


class _Refreshed(msgspec.Struct, frozen=True):
    id_token: str | None = None
    access_token: str | None = None
    refresh_token: str | None = None


class SignIn(NamedTuple):
    """The usable content of a sign-in file."""

    headers: tuple[tuple[str, str], ...]
    is_api_key: bool
    account_id: str | None = None
    user_id: str | None = None
    expires_at: float | None = None
    refresh_token: str | None = None  # only if this program may refresh the tokens


class _Snapshot(NamedTuple):
    stored: bytes  # in the file
    content: bytes  # other than stored if newer tokens could not be written
    sign_in: SignIn


class _Attempt(NamedTuple):
    task: asyncio.Task[None]
    began: float  # on the clock of the event loop

    async def wait(self) -> None:
        """Wait for its end; it goes on if the waiting request is cancelled."""
        if not self.task.done():
            await asyncio.wait([self.task])


class StoredSignIn(Credential):
    """The API key or the account tokens in the file."""

    def __init__(
        self,
        path: Path,
        http: HttpClient,
        refresh_url: str = REFRESH_URL,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`http` is for the refresh; its owner closes it."""
        self._path = path
        self._http = http
        self._refresh_url = refresh_url
        self._now = now
        self._bound: SignIn | None = None
        with contextlib.suppress(OSError, ValueError):
            self._bound = parse(_read(path))
        # The destination is checked once, for this kind; a later change of the kind is an error.
        is_api_key = self._bound is not None and self._bound.is_api_key
        self.destinations = Destinations.OWN_HOSTS if is_api_key else Destinations.ANYWHERE
        self._tasks: GuardedTasks | None = None
        self._attempt: _Attempt | None = None  # the newest
        self._attempt_ended = -math.inf
        self._rejected_token: str | None = None  # a refresh token that is of no use any more
        # The content of a file that could not be written, and the content that it should have.
        self._unsaved: tuple[bytes, bytes] | None = None
        self._loss: RegistryError | None = None
        self._lost = asyncio.Event()

    @property
    def is_usable(self) -> bool:
        return self._bound is not None

    async def ready(self, tasks: GuardedTasks) -> None:
        """Make the refreshes tasks of the server, which awaits them at its end."""
        self._tasks = tasks

    async def headers(self, method: str, url: str, body: bytes) -> list[tuple[str, str]]:
        """Return the headers of the file.

        Raises RegistryUnavailable for an unreadable file, RegistryError if its sign-in is another.
        """
        current = await self._load()
        expires_at = current.sign_in.expires_at
        left = math.inf if expires_at is None else expires_at - self._now()
        if left < REFRESH_SECONDS and (attempt := self._newest_attempt(current, _PROACTIVE)):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(attempt.began + WAIT_SECONDS if left > 0 else None):
                    await attempt.wait()
            current = await self._load()
        return list(current.sign_in.headers)

    async def renew(self, rejected: Sequence[tuple[str, str]]) -> bool:
        """Refresh the token unless the file has a newer one; False if there is no other token."""
        current = await self._load()
        is_newest = list(current.sign_in.headers) == list(rejected)
        if is_newest and (attempt := self._newest_attempt(current, _FORCED)):
            await attempt.wait()
            current = await self._load()
        return list(current.sign_in.headers) != list(rejected)

    async def wait_ended(self) -> None:
        """Wait until the file has another sign-in, then raise RegistryError."""
        await self._lost.wait()
        assert self._loss is not None
        raise self._loss

    async def _load(self) -> _Snapshot:
        """Read the file; raises RegistryError."""
        assert self._bound is not None, "the file had no sign-in"
        if self._loss is not None:
            raise self._loss
        try:
            # In a thread, because the home directory may be on a network.
            stored = content = await asyncio.to_thread(_read, self._path)
            if self._unsaved is not None and stored == self._unsaved[0]:
                content = self._unsaved[1]
            found = parse(content)
        except FileNotFoundError:
            raise self._lose("was removed") from None
        except OSError as error:
            raise RegistryUnavailable(f"cannot read {self._path}: {os_error_text(error)}") from None
        except ValueError as error:
            raise RegistryUnavailable(f"cannot read {self._path}: {error}") from None
        if reason := _difference(self._bound, found):
            raise self._lose(reason)
        assert found is not None
        return _Snapshot(stored, content, found)

    def _lose(self, reason: str) -> RegistryError:
        """The error that ends the server: the registration belongs to a sign-in that is gone."""
        self._loss = RegistryError(
            f"{_PREFIX}{self._path}, {reason}; start the server again to register anew"
        )
        self._lost.set()
        return self._loss

    def _newest_attempt(self, used: _Snapshot, reason: str) -> _Attempt | None:
        """The attempt to refresh that is under way, was just made or begins now, if any."""
        now = asyncio.get_running_loop().time()
        since = self._now() - self._attempt_ended
        # A clock that was set back ends the pause.
        if self._attempt is not None and (
            not self._attempt.task.done() or 0 <= since < PAUSE_SECONDS
        ):
            return self._attempt
        if used.sign_in.refresh_token in (None, self._rejected_token):
            return None
        assert self._tasks is not None, "headers() before ready()"
        self._attempt = _Attempt(self._tasks.create_task(self._refresh(used, reason)), now)
        return self._attempt

    async def _refresh(self, used: _Snapshot, reason: str) -> None:
        """Replace the tokens in the file, unless another program has done so."""
        try:
            async with _refresh_lock(self._path):
                current = await self._load()
                if current.sign_in.headers == used.sign_in.headers:
                    await self._replace_tokens(current, reason)
        except RegistryError:
            pass  # of the file, which each request reads and reports
        finally:
            self._attempt_ended = self._now()

    async def _replace_tokens(self, current: _Snapshot, reason: str) -> None:
        token = current.sign_in.refresh_token
        if token is None:
            return
        try:
            content = await self._request(current, token, reason)
        except (ValueError, HttpFailed) as error:
            log.warning("the sign-in in %s could not be refreshed: %s", self._path, error)
            return
        try:
            await asyncio.to_thread(_replace, self._path, current.stored, content)
        except OSError as error:
            self._unsaved = (current.stored, content)
            text = os_error_text(error)
            log.error("new tokens cannot be written to %s: %s", self._path, text)

    async def _request(self, current: _Snapshot, token: str, reason: str) -> bytes:
        """The content of the file after a refresh; raises ValueError, which shows no secret."""
        body = {
            "client_id": _CLIENT_ID,
            "grant_type": "refresh_token",
            "refresh_reason": reason,
            "refresh_token": token,
        }
        headers = [("content-type", "application/json"), ("accept", "*/*")]
        # A refresh token works once, so the request is not repeated.
        response = await self._http.request(
            "POST", self._refresh_url, headers, msgspec.json.encode(body), repeatable=False
        )
        if response.status == 401:
            self._rejected_token = token
        content = _with_new_tokens(current.content, response, self._now())
        if _difference(current.sign_in, parse(content)):
            raise ValueError("the response is for another account or user")
        return content


def load(environ: Mapping[str, str], http: HttpClient) -> StoredSignIn:
    """The stored sign-in of the user, perhaps unusable; raises StartupError."""
    home = environ.get("CODEX_HOME") or Path(environ.get("HOME") or "/") / ".codex"
    url = environ.get(REFRESH_VARIABLE) or REFRESH_URL
    if not is_encrypted(url):
        raise StartupError(f"{REFRESH_VARIABLE} must be an https URL, or http on this machine")
    return StoredSignIn(Path(home) / "auth.json", http, url)


def parse(content: bytes) -> SignIn | None:
    """The sign-in in a file, None if of no known kind; raises ValueError if it is damaged."""
    try:
        state = decode_json(content, _State)
    except msgspec.ValidationError:
        return None
    except msgspec.DecodeError:
        raise ValueError("it is not JSON") from None
    mode = state.auth_mode
    if mode in (None, "apikey") and state.api_key:
        _check_sendable(state.api_key)
        return SignIn((("authorization", f"Bearer {state.api_key}"),), is_api_key=True)
    if mode not in (None, "chatgpt", "chatgptAuthTokens") or state.tokens is None:
        return None
    # The tokens of the third mode belong to a program that refreshes them itself.
    return _account_sign_in(state.tokens, may_refresh=mode != "chatgptAuthTokens")


def _account_sign_in(tokens: _Tokens, *, may_refresh: bool) -> SignIn | None:
    try:
        claims = account_claims(tokens.id_token)
    except ValueError:
        return None
    _check_sendable(tokens.access_token)
    _check_sendable(tokens.account_id or "-")
    return SignIn(
        tuple(token_headers(tokens.access_token, tokens.account_id, claims)),
        is_api_key=False,
        account_id=tokens.account_id,
        user_id=claims.user,
        expires_at=expiry(tokens.access_token),
        refresh_token=(tokens.refresh_token or None) if may_refresh else None,
    )


def _check_sendable(text: str) -> None:
    if not is_visible(text):
        raise ValueError("its key, token or account has other characters than visible ASCII")


def _difference(bound: SignIn, found: SignIn | None) -> str:
    """Why this is not the sign-in of the executor; empty if it is."""
    if found is None:
        return "holds no sign-in any more"
    if found.is_api_key != bound.is_api_key:
        return f"holds {'an API key' if found.is_api_key else 'account tokens'} now"
    if found.account_id != bound.account_id:
        return "is of another account now"
    return "is of another user now" if found.user_id != bound.user_id else ""


def _with_new_tokens(content: bytes, response: CompleteResponse, now: float) -> bytes:
    """The content of the file with the tokens of a response; all other members stay."""
    if not 200 <= response.status < 300:
        raise ValueError(f"the response has status {response.status}")
    try:
        refreshed = decode_json(response.body, _Refreshed)
    except msgspec.DecodeError:
        raise ValueError("the response has no tokens") from None
    new_tokens = {name: v for name, v in msgspec.structs.asdict(refreshed).items() if v}
    if not all(map(is_visible, new_tokens.values())):
        raise ValueError("the response has a token with other characters than visible ASCII")
    # Raw: what this program need not understand, such as a number beyond 64 bits, is copied.
    state = decode_json(content, dict[str, msgspec.Raw])
    tokens: dict[str, object] = {**decode_json(state["tokens"], dict[str, msgspec.Raw])}
    tokens |= new_tokens
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))
    last_refresh = f"{moment}.{int(now % 1 * 1_000_000):06}Z"
    new = state | {"tokens": tokens, "last_refresh": last_refresh}
    return msgspec.json.format(msgspec.json.encode(new), indent=2)


def _read(path: Path) -> bytes:
    """The content of a file; raises OSError, ValueError for one that is too large or special."""
    # O_NONBLOCK: a FIFO must not block the server.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is not a regular file")
        content = file.read(FILE_BYTES + 1)
    if len(content) > FILE_BYTES:
        raise ValueError(f"it has more than {FILE_BYTES} bytes")
    return content


@contextlib.asynccontextmanager
async def _refresh_lock(path: Path) -> AsyncIterator[None]:
    """Exclude the refreshes of other executors, if the file system has locks.

    The lock is on the directory: the file is replaced, and a lock file would stay behind.
    """
    try:
        directory = await asyncio.to_thread(_open_directory, path)
    except OSError:
        yield  # the file is gone, or nobody can list its directory
        return
    try:
        for _ in range(round(LOCK_SECONDS / LOCK_RETRY_SECONDS)):
            if _lock(directory):
                break
            await asyncio.sleep(LOCK_RETRY_SECONDS)
        yield
    finally:
        _unlock(directory)
        os.close(directory)


def _open_directory(path: Path) -> int:
    return os.open(_target(path).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _lock(directory: int) -> bool:
    """Lock without waiting; False if another program has the lock."""
    import fcntl  # of the systems that executors run on

    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks, or NFS, which does not lock what is open for reading
    return True


def _unlock(directory: int) -> None:
    """Unlock; the close would not, if a forked worker has a copy of the descriptor."""
    import fcntl

    with contextlib.suppress(OSError):
        fcntl.flock(directory, fcntl.LOCK_UN)


def _target(path: Path) -> Path:
    """Where links lead to; raises OSError. A link stays a link."""
    return Path(os.path.realpath(path, strict=True))


def _replace(path: Path, old: bytes, new: bytes) -> None:
    """Write a file that still has its old content, so that readers see either whole content."""
    target = _target(path)
    if _read(target) != old:
        return  # another program has changed it, and its tokens count
    info = target.stat()
    descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o600)  # whatever the umask is
            if (info.st_uid, info.st_gid) != (os.geteuid(), os.getegid()):
                os.fchown(descriptor, info.st_uid, info.st_gid)  # its owner must still read it
            file.write(new)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
