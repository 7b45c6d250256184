"""http/request without a socket (see `HttpTransport`): checks, redirects and buffered bodies."""

from __future__ import annotations

import asyncio
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
from msgspec.structs import replace

from exec_server.errors import ExecServerError, InternalError, InvalidParams, lossy
from exec_server.host.interpreter import REGISTRY_NAMES, STRIPPED_NAMES
from exec_server.protocol.http import Header, RequestParams, ResponseHeader
from exec_server.protocol.urls import HttpUrl, InvalidUrl, OtherScheme, parse_http_url

# As many as the reference follows.
MAX_REDIRECTS = 10
# The reference's limit; servers refuse longer ones.
URL_BYTES = 65_534
# The body of a response that is not streamed: in base64 the message stays below the 64 MiB that
# the client of this package reads. Larger bodies are refused.
BODY_BYTES = 47 * 1_048_576
# Buffered bodies of all clients together. Above this requests fail.
BUFFERED_BYTES = 256 * 1_048_576

# The text of the reference for every body that ends early.
BODY_ERROR = "error decoding response body"

# Credentials of the server's parent that no client may send.
FORBIDDEN_NAMES = {
    *(*STRIPPED_NAMES, *REGISTRY_NAMES, "OPENAI_API_KEY", "CODEX_API_KEY", "CODEX_ACCESS_TOKEN"),
    *("CODEX_CONNECTORS_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
    *("AZURE_CLIENT_SECRET", "AZURE_FEDERATED_TOKEN_FILE", "GOOGLE_APPLICATION_CREDENTIALS"),
}
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_INVALID_VALUE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_TEXT = re.compile(r"[\t\x20-\x7e]*")
_NAME_BYTES = 65_535

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
# RFC 9110, 9.2.2: idempotent methods may be sent again after a broken connection.
_REPEATABLE = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"})
# Headers that a redirect to another origin drops.
_CREDENTIALS = frozenset(
    {"authorization", "cookie", "cookie2", "proxy-authorization", "www-authenticate", "host"}
)
_BODY_HEADERS = frozenset(
    {"content-type", "content-length", "content-encoding", "content-language", "transfer-encoding"}
)


class HttpResponse(Protocol):
    """The head of a response, and its body as a stream."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Sequence[tuple[str, str]]:
        """Lower-case names; values decoded as Latin-1."""
        ...

    async def read(self) -> bytes:
        """The next piece of the body, empty at the end; raises ExecServerError with the causes."""
        ...

    def close(self) -> None:
        """Release the connection, whether or not the body was read to its end."""
        ...


class HttpTransport(Protocol):
    """Sends one request."""

    async def open(
        self,
        method: str,
        url: str,
        headers: Sequence[tuple[str, str]],
        body: bytes,
        *,
        repeatable: bool,
    ) -> HttpResponse:
        """Send the request; raises ExecServerError, whose args after the first are the causes."""
        ...


class HttpRequest(msgspec.Struct, frozen=True):
    """A checked request; `secret_headers` got their values from the server's environment."""

    method: str
    url: HttpUrl
    headers: tuple[tuple[str, str], ...]
    body: bytes
    follow_redirects: bool
    secret_headers: frozenset[str] = frozenset()


def build_request(params: RequestParams, variables: Mapping[str, str]) -> HttpRequest:
    """Check the params of a client's http/request; raises InvalidParams."""
    if not _TOKEN.fullmatch(params.method):
        raise InvalidParams("http/request method is invalid: invalid HTTP method")
    try:
        url = parse_http_url(params.url)
    except OtherScheme as error:
        text = f"http/request only supports http and https URLs, got {error.scheme}"
        raise InvalidParams(text) from None
    except InvalidUrl as error:
        raise InvalidParams(f"http/request url is invalid: {error}") from None
    headers = [(header.name.lower(), _value(header, variables)) for header in params.headers]
    secret_headers = frozenset(
        header.name.lower() for header in params.headers if header.value_env_var is not None
    )
    names = {name for name, _ in headers}
    if (url.user or url.password) and "authorization" not in names:
        credentials = b64encode(url.user + b":" + url.password).decode()
        headers.append(("authorization", f"Basic {credentials}"))
    if "accept" not in names:
        headers.append(("accept", "*/*"))
    follow_redirects = params.redirect_policy == "follow"
    body = params.body_base64 or b""
    return HttpRequest(params.method, url, tuple(headers), body, follow_redirects, secret_headers)


def _value(header: Header, variables: Mapping[str, str]) -> str:
    if not _TOKEN.fullmatch(header.name) or len(header.name) > _NAME_BYTES:
        raise InvalidParams("http/request header name is invalid: invalid HTTP header name")
    value = header.value
    if header.value_env_var is not None:
        value += _variable(header.name, header.value_env_var, variables)
    if _INVALID_VALUE.search(value):
        text = f"http/request header value is invalid for {header.name}"
        raise InvalidParams(f"{text}: failed to parse header value")
    return value.strip(" \t")  # insignificant, and some servers reject it


def _variable(header: str, name: str, variables: Mapping[str, str]) -> str:
    text = f"http/request header {header}"
    if name.upper() in FORBIDDEN_NAMES:
        raise InvalidParams(f"{text} cannot use executor environment variable {name}")
    value = variables.get(name)
    if value is None or lossy(value) != value:  # one that is not Unicode counts as missing
        raise InvalidParams(f"{text} requires executor environment variable {name}")
    if not value:
        raise InvalidParams(f"{text} requires a non-empty executor environment variable {name}")
    return value


def response_headers(response: HttpResponse) -> list[ResponseHeader]:
    """The headers for the client: grouped by name, without values that are not visible ASCII."""
    grouped: dict[str, list[str]] = {}
    for name, value in response.headers:
        if _TEXT.fullmatch(value):
            grouped.setdefault(name, []).append(value)
    return [ResponseHeader(name, value) for name, values in grouped.items() for value in values]


class HttpResources(msgspec.Struct):
    """Shared by the requests of all clients: the transport and the budget of buffered bodies."""

    transport: HttpTransport
    free_body_bytes: int = BUFFERED_BYTES


async def send(
    transport: HttpTransport, request: HttpRequest, deadline: float | None
) -> HttpResponse:
    """The response after redirects, by a deadline of the loop's clock; raises InternalError."""
    for _ in range(MAX_REDIRECTS + 1):
        response = await _send_once(transport, request, deadline)
        try:
            next_request = _redirect(request, response) if request.follow_redirects else None
        except BaseException:
            response.close()
            raise
        if next_request is None:
            return response
        response.close()
        request = next_request
    raise InternalError("http/request failed: too many redirects")


async def _send_once(
    transport: HttpTransport, request: HttpRequest, deadline: float | None
) -> HttpResponse:
    if len(str(request.url)) > URL_BYTES:
        raise InternalError(f"http/request failed: builder error for url ({request.url})")
    text = f"http/request failed: error sending request for url ({request.url})"
    try:
        async with asyncio.timeout_at(deadline):
            return await transport.open(
                request.method,
                request.url.resource,
                request.headers,
                request.body,
                repeatable=request.method in _REPEATABLE,
            )
    except (ExecServerError, TimeoutError) as error:
        raise _internal_error(text, error) from None


def _internal_error(text: str, error: ExecServerError | TimeoutError) -> InternalError:
    """An error with the text of the reference, and the actual causes in its data."""
    failure = InternalError(text)
    causes = error.args[1:] if isinstance(error, ExecServerError) else ("operation timed out",)
    failure.data = {"causes": list(causes)}
    return failure


def _redirect(request: HttpRequest, response: HttpResponse) -> HttpRequest | None:
    location = next((value for name, value in response.headers if name == "location"), None)
    if response.status not in _REDIRECTS or location is None or not _TEXT.fullmatch(location):
        return None
    try:
        url = parse_http_url(location, request.url)
    except OtherScheme as error:
        text = "http/request failed: redirect target uses unsupported URL scheme"
        raise InternalError(f"{text}: {error.scheme}") from None
    except InvalidUrl:
        return None
    method, body = request.method, request.body
    dropped = {"referer"}
    if response.status == 303 or (response.status in (301, 302) and method == "POST"):
        method = "HEAD" if method == "HEAD" else "GET"
        body = b""
        dropped |= _BODY_HEADERS
    if url.root != request.url.root:
        # Secrets of the server's environment too: the client named them for one server only.
        dropped |= _CREDENTIALS | request.secret_headers
    headers = [line for line in request.headers if line[0] not in dropped]
    referer = _referer(request.url, url)
    if referer is not None:
        headers.append(("referer", referer))
    return replace(request, method=method, url=url, headers=tuple(headers), body=body)


def _referer(source: HttpUrl, target: HttpUrl) -> str | None:
    """The referer of a redirect: the full URL within an origin, nothing from https to http."""
    if source.root == target.root:
        return source.resource
    return None if (source.scheme, target.scheme) == ("https", "http") else source.root


class ResponseBody:
    """A buffered body; returns its bytes to the shared budget when it is garbage-collected."""

    __slots__ = ("_resources", "data")

    def __init__(self, resources: HttpResources) -> None:
        self._resources = resources
        self.data = bytearray()

    async def fill(self, response: HttpResponse, deadline: float | None) -> None:
        """Read a response to its end; raises InternalError."""
        try:
            async with asyncio.timeout_at(deadline):
                while piece := await response.read():
                    self._add(piece)
        except InternalError:
            raise
        except (ExecServerError, TimeoutError) as error:
            raise _internal_error(_body_error_text(BODY_ERROR), error) from None

    def _add(self, piece: bytes) -> None:
        if len(self.data) + len(piece) > BODY_BYTES:
            text = f"it exceeds {BODY_BYTES} bytes, set streamResponse to receive it"
            raise InternalError(_body_error_text(text))
        if len(piece) > self._resources.free_body_bytes:
            raise InternalError(_body_error_text("too many bodies are buffered, try again later"))
        self._resources.free_body_bytes -= len(piece)
        self.data += piece

    def __del__(self) -> None:
        self._resources.free_body_bytes += len(self.data)


def _body_error_text(reason: str) -> str:
    return f"failed to read http/request response body: {reason}"
