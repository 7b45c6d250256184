"""One HTTP request on a client's behalf: what may be asked, redirects, and whole bodies.

Who speaks HTTP is not known here: `Fetch` says what is needed of it.
"""

from __future__ import annotations

import asyncio
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from exec_server.core import http_url
from exec_server.core.command import STRIPPED_NAMES
from exec_server.core.http_url import HttpUrl, InvalidUrl, OtherScheme
from exec_server.errors import ExecServerError, InternalError, InvalidParams
from exec_server.protocol.http import AnswerHeader, Header, RequestParams

# As many as the reference follows.
MAX_REDIRECTS = 10
# The reference's limit; what is longer no server takes.
URL_BYTES = 65_534
# Of an answer that is not streamed: with it, in base64, the message stays below the 64 MiB that
# our clients read. Larger ones are refused.
BODY_BYTES = 47 * 1_048_576
# Bodies that are held for answers, of all clients together. Beyond it requests fail.
HELD_BYTES = 256 * 1_048_576

# Credentials of the server's starter that no client may send anywhere.
_FORBIDDEN_NAMES = STRIPPED_NAMES | {
    "OPENAI_API_KEY",
    "CODEX_API_KEY",
    "CODEX_ACCESS_TOKEN",
    "CODEX_CONNECTORS_TOKEN",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AZURE_CLIENT_SECRET",
    "AZURE_FEDERATED_TOKEN_FILE",
    "GOOGLE_APPLICATION_CREDENTIALS",
}
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_NO_VALUE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_TEXT = re.compile(r"[\t\x20-\x7e]*")
_MAX_NAME = 65_535

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
# RFC 9110 lets these be sent again when a connection broke under them.
_REPEATABLE = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"})
# What is for one server only.
_CREDENTIALS = frozenset(
    {"authorization", "cookie", "cookie2", "proxy-authorization", "www-authenticate", "host"}
)
_OF_BODY = frozenset(
    {"content-type", "content-length", "content-encoding", "content-language", "transfer-encoding"}
)


class Answer(Protocol):
    """The head of an answer, and its body as it comes."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Sequence[tuple[str, str]]:
        """Names in lower case; the bytes of values as the characters of Latin-1."""
        ...

    async def read(self) -> bytes:
        """The next piece, nothing at the end; raises ExecServerError, its args say why."""
        ...

    def close(self) -> None:
        """Let go, whether or not all of it was read."""
        ...


class Fetch(Protocol):
    """Who speaks HTTP."""

    async def open(
        self,
        method: str,
        url: str,
        headers: Sequence[tuple[str, str]],
        body: bytes,
        *,
        repeatable: bool,
    ) -> Answer:
        """Ask once; raises ExecServerError, its args say why."""
        ...


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be asked; `secret` names the headers that came from our environment."""

    method: str
    url: HttpUrl
    headers: tuple[tuple[str, str], ...]
    body: bytes
    follow: bool
    secret: frozenset[str] = field(default=frozenset(), repr=False)


def checked(params: RequestParams, variables: Mapping[str, str]) -> Request:
    """The request that a client wants made; raises InvalidParams."""
    if not _TOKEN.fullmatch(params.method):
        raise InvalidParams("http/request method is invalid: invalid HTTP method")
    try:
        url = http_url.parse(params.url)
    except OtherScheme as error:
        text = f"http/request only supports http and https URLs, got {error.scheme}"
        raise InvalidParams(text) from None
    except InvalidUrl as error:
        raise InvalidParams(f"http/request url is invalid: {error}") from None
    headers = [(header.name.lower(), _value(header, variables)) for header in params.headers]
    secret = frozenset(
        header.name.lower() for header in params.headers if header.value_env_var is not None
    )
    names = {name for name, _ in headers}
    if (url.user or url.password) and "authorization" not in names:
        credentials = b64encode(url.user + b":" + url.password).decode()
        headers.append(("authorization", f"Basic {credentials}"))
    if "accept" not in names:
        headers.append(("accept", "*/*"))
    follow = params.redirect_policy == "follow"
    body = params.body_base64 or b""
    return Request(params.method, url, tuple(headers), body, follow, secret)


def _value(header: Header, variables: Mapping[str, str]) -> str:
    if not _TOKEN.fullmatch(header.name) or len(header.name) > _MAX_NAME:
        raise InvalidParams("http/request header name is invalid: invalid HTTP header name")
    value = header.value
    if header.value_env_var is not None:
        value += _variable(header.name, header.value_env_var, variables)
    if _NO_VALUE.search(value):
        text = f"http/request header value is invalid for {header.name}"
        raise InvalidParams(f"{text}: failed to parse header value")
    return value.strip(" \t")  # blanks at the ends mean nothing, and some servers mind them


def _variable(header: str, name: str, variables: Mapping[str, str]) -> str:
    """The value of a variable of the server's."""
    text = f"http/request header {header}"
    if name.upper() in _FORBIDDEN_NAMES:
        raise InvalidParams(f"{text} cannot use executor environment variable {name}")
    value = variables.get(name)
    if value is None or not _is_unicode(value):
        raise InvalidParams(f"{text} requires executor environment variable {name}")
    if not value:
        raise InvalidParams(f"{text} requires a non-empty executor environment variable {name}")
    return value


def _is_unicode(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def answer_headers(answer: Answer) -> list[AnswerHeader]:
    """The headers as the client gets them: by name, and without those that are no text."""
    grouped: dict[str, list[str]] = {}
    for name, value in answer.headers:
        if _TEXT.fullmatch(value):
            grouped.setdefault(name, []).append(value)
    return [AnswerHeader(name, value) for name, values in grouped.items() for value in values]


# ---- asking ---------------------------------------------------------------------------


@dataclass(slots=True)
class Means:
    """What the requests of all clients share: who speaks HTTP, and room for whole bodies."""

    fetch: Fetch
    room: int = HELD_BYTES


async def send(fetch: Fetch, request: Request, deadline: float | None) -> Answer:
    """The answer to a request, or to where it was redirected; raises InternalError.

    The deadline is one of the loop's clock.
    """
    for _ in range(MAX_REDIRECTS + 1):
        answer = await _ask(fetch, request, deadline)
        try:
            following = _redirected(request, answer) if request.follow else None
        except BaseException:
            answer.close()
            raise
        if following is None:
            return answer
        answer.close()
        request = following
    raise InternalError("http/request failed: too many redirects")


async def _ask(fetch: Fetch, request: Request, deadline: float | None) -> Answer:
    if len(str(request.url)) > URL_BYTES:
        raise InternalError(f"http/request failed: builder error for url ({request.url})")
    text = f"http/request failed: error sending request for url ({request.url})"
    try:
        async with asyncio.timeout_at(deadline):
            return await fetch.open(
                request.method,
                request.url.resource,
                request.headers,
                request.body,
                repeatable=request.method in _REPEATABLE,
            )
    except (ExecServerError, TimeoutError) as error:
        raise _failure(text, error) from None


def _failure(text: str, error: ExecServerError | TimeoutError) -> InternalError:
    """The reference's text, and beside it what has really happened."""
    failure = InternalError(text)
    causes = error.args[1:] if isinstance(error, ExecServerError) else ("operation timed out",)
    failure.data = {"causes": list(causes)}
    return failure


def _redirected(request: Request, answer: Answer) -> Request | None:
    """The request that an answer asks for instead, if it does; raises InternalError."""
    location = next((value for name, value in answer.headers if name == "location"), None)
    if answer.status not in _REDIRECTS or location is None or not _TEXT.fullmatch(location):
        return None
    try:
        url = http_url.parse(location, request.url)
    except OtherScheme as error:
        text = "http/request failed: redirect target uses unsupported URL scheme"
        raise InternalError(f"{text}: {error.scheme}") from None
    except InvalidUrl:
        return None
    method, body = request.method, request.body
    dropped = {"referer"}
    if answer.status == 303 or (answer.status in (301, 302) and method == "POST"):
        method = "HEAD" if method == "HEAD" else "GET"
        body = b""
        dropped |= _OF_BODY
    if url.origin != request.url.origin:
        # Also what our own environment holds: the client named it for one server only.
        dropped |= _CREDENTIALS | request.secret
    headers = [line for line in request.headers if line[0] not in dropped]
    referer = _referer(request.url, url)
    if referer is not None:
        headers.append(("referer", referer))
    return replace(request, method=method, url=url, headers=tuple(headers), body=body)


def _referer(source: HttpUrl, target: HttpUrl) -> str | None:
    """Where a redirect came from: all of it only for the same server, nothing without TLS."""
    if source.origin == target.origin:
        return source.resource
    return None if (source.scheme, target.scheme) == ("https", "http") else source.root


# ---- bodies ---------------------------------------------------------------------------

# What the reference says of every body that breaks off.
BROKEN = "error decoding response body"


class Body:
    """A whole body; gives its room back when the last piece of code lets go of it."""

    __slots__ = ("_means", "data")

    def __init__(self, means: Means) -> None:
        self._means = means
        self.data = bytearray()

    async def fill(self, answer: Answer, deadline: float | None) -> None:
        """Read all of an answer; raises InternalError."""
        try:
            async with asyncio.timeout_at(deadline):
                while piece := await answer.read():
                    self._add(piece)
        except InternalError:
            raise
        except (ExecServerError, TimeoutError) as error:
            raise _failure(_reading(BROKEN), error) from None

    def _add(self, piece: bytes) -> None:
        if len(self.data) + len(piece) > BODY_BYTES:
            text = f"it exceeds {BODY_BYTES} bytes, ask for it with streamResponse"
            raise InternalError(_reading(text))
        if len(piece) > self._means.room:
            raise InternalError(_reading("too much is being read for others"))
        self._means.room -= len(piece)
        self.data += piece

    def __del__(self) -> None:
        self._means.room += len(self.data)


def _reading(what: str) -> str:
    return f"failed to read http/request response body: {what}"
