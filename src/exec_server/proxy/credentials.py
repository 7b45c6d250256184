"""Credential masking: secrets of an environment become dummies, and requests get them back.

The process never has a secret: its environment holds a dummy of the same kind. The proxy replaces
the dummy in the header of a request to a URL of the provider, and nowhere else.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import heapq
import hmac
import json
import re
import string
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple
from urllib.parse import unquote_to_bytes, urlsplit

from exec_server.errors import InvalidParams
from exec_server.protocol.network import Authentication, CredentialProvider
from exec_server.protocol.urls import parse_address
from exec_server.proxy import hosts

if TYPE_CHECKING:
    import regex


# Compiling costs memory for each character, with some flags thousands of bytes.
PATTERN_CHARACTERS: Final = 1024
# Parts of a pattern, one in `{n}` or `{n,m}` counted n times: a compiled pattern has them all.
# 4,000 take up to 10 MB and 0.2 s to compile, and time grows faster than their number.
PATTERN_PARTS: Final = 4000
_PATTERN_TOKEN: Final = re.compile(
    r"(?P<repeat>\{(?P<least>[0-9\s]+)(?:,[0-9\s]*)?\})"
    r"|(?P<comment>\(\?#[^)]*\))|(?P<open>\((?:\?(?:[:>|=!]|<[=!]))?)|(?P<close>\))"
    r"|(?P<set>\[\^?\]?(?:\\.|[^\[\]\\])*\])|\\.|(?P<other>.)",
    re.DOTALL,
)
# For all searches and dummies of one start. Searches of usual patterns take microseconds.
SEARCH_SECONDS = 0.5
# For a text of some dozen characters.
_PROBE_SECONDS: Final = 0.1
# Patterns that are kept compiled: a client sends the same ones with each start.
KEPT_PATTERNS: Final = 64
# A dummy with fewer characters of its own could be guessed, or be another text by chance.
OWN_CHARACTERS: Final = 8
# Beginnings of a secret that a dummy may keep, such as `glpat-`.
KEPT_CHARACTERS: Final = 20

# Draws a character of an alphabet.
Draw = Callable[[str], str]
_ALPHABETS: Final = (
    string.ascii_letters + string.digits,
    string.ascii_lowercase + string.digits,
    string.ascii_uppercase + string.digits,
    string.ascii_letters,
    string.ascii_lowercase,
    string.ascii_uppercase,
    string.digits + "abcdef",
    string.digits + "ABCDEF",
    string.digits,
)
# Ordinary values. A pattern that matches a part of one is looked for in the variables that its
# provider names, and not in others, whose meaning it would change.
_ORDINARY: Final = (
    "/usr/local/bin:/usr/bin:/home/user/.local/share/Some-Application_2/config.d",
    "en_US.UTF-8 xterm-256color https://www.example.com:8080/index.html?page=1&size=20#top",
    "0123456789012345 2026-11-17T12:34:56Z 127.0.0.1 ff00:db8::1 DISPLAY=:0.0 a@b.example",
    "/srv/task-fix-the-registry-node-so-that-it-does-not-crash-on-empty-host/bin",
    "abcdefghijklmnop ABCDEFGHIJKLMNOP deadbeef01234567",
)

Scheme = Literal["http", "https"]

_DEFAULT_PORTS: Final[dict[str, int]] = {"http": 80, "https": 443}
# A path that is still escaped after so many decodings is refused.
_DECODINGS: Final = 4
# A segment with these beginnings may lead upwards: servers remove blanks, control characters and
# the parameters after a semicolon (`..;x=y`) before they look for `..`, or cut the path at a null.
_UPWARDS: Final = re.compile(r"(?:^|[/\\])[^!-~]*\.(?![A-Za-z0-9_~-])")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
# Escapes that one server leaves as they are and another one reads (`%u002e`).
_MALFORMED: Final = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_WIDE: Final = re.compile(rb"%u[0-9A-Fa-f]{4}", re.IGNORECASE)


# The providers of one start, and the members of each list of one. Users have a handful.
MAX_PROVIDERS: Final = 32
MAX_ITEMS: Final = 32
# A name of a variable or header, or a prefix of a URL.
MAX_CHARACTERS: Final = 2048

_PREFIX: Final = "invalid network proxy config: "
_is_variable = re.compile(r"[A-Za-z_][A-Za-z0-9_]*").fullmatch
_is_header = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+").fullmatch
# Headers that decide where a request goes or where it ends, so a secret has no business there.
_FRAMING: Final = frozenset({"host", "content-length", "transfer-encoding", "connection"})

_GITHUB_VARIABLES: Final = ("GH_TOKEN", "GITHUB_TOKEN")
_ENTERPRISE_VARIABLES: Final = ("GH_ENTERPRISE_TOKEN", "GITHUB_ENTERPRISE_TOKEN")
_OPENAI_VARIABLES: Final = ("OPENAI_API_KEY",)
_BUILT_IN_VARIABLES: Final = frozenset(
    (*_GITHUB_VARIABLES, *_ENTERPRISE_VARIABLES, *_OPENAI_VARIABLES)
)
_GITHUB_HOSTS: Final = (
    *("github.com", "api.github.com", "uploads.github.com", "gist.github.com"),
    *("codeload.github.com", "raw.githubusercontent.com", "ghcr.io"),
    *("npm.pkg.github.com", "maven.pkg.github.com", "rubygems.pkg.github.com"),
)
# Tokens in any variable, with the lengths of the reference: at least 40 and 51 characters. Keys of
# Anthropic and OpenRouter also begin with `sk-`; they belong to other hosts. The end of a word, as
# in `/srv/task-…`, begins no token; that of an escape, such as `%3D` or `\n`, may precede one.
_START: Final = r"(?:(?<![A-Za-z0-9])|(?<=%[0-9A-Fa-f]{2})|(?<=\\[nrt]))"
_GITHUB_TOKEN: Final = (
    rf"{_START}(?:gh[pousr]_[A-Za-z0-9_-]{{36,}}|github_pat_[A-Za-z0-9_-]{{29,}})"
)
_OPENAI_KEY: Final = rf"{_START}sk-(?!ant-|or-)[A-Za-z0-9_-]{{48,}}"


Header = tuple[bytes, bytes]

# Shorter values are too likely to occur by chance in other variables; they are masked in their own
# variable only.
_SHORTEST_COPY: Final = 8
# Secrets of one environment; one with more has a pattern that matches ordinary text.
MAX_SECRETS: Final = 256
# Random characters of a dummy, which is as long as its secret if possible. The fewest make up the
# 40 characters of a token of GitHub; keys of OpenAI have less than 200 characters.
_FEWEST_RANDOM: Final = 30
_MOST_RANDOM: Final = 256
_ALPHABET: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
# The beginnings by which programs tell the kinds of tokens.
_TOKEN_KIND: Final = re.compile(r"github_pat_|gh[a-z]_|sk-proj-|sk-svcacct-|sk-admin-|sk-")

ACTIVE: Final = "CODEX_NETWORK_PROXY_CREDENTIAL_BROKER_ACTIVE"
BROKERED: Final = "CODEX_NETWORK_PROXY_BROKERED_CREDENTIALS"
# The variables by which programs find the certificates that they trust.
CERTIFICATE_VARIABLES: Final = (
    *("SSL_CERT_FILE", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"),
    *("GIT_SSL_CAINFO", "CARGO_HTTP_CAINFO", "BUNDLE_SSL_CA_CERT", "PIP_CERT"),
    *("npm_config_cafile", "NPM_CONFIG_CAFILE", "CODEX_CA_CERTIFICATE"),
)
# Headers that name another path than the request line, for servers that heed them.
_PATH_HEADERS: Final = frozenset({b"x-original-url", b"x-rewrite-url"})


class UnusablePattern(ValueError):
    """A pattern that cannot be used; the text says why."""


class SearchTime:
    """The time that the searches of one start may take together, beyond which it is refused.

    A client can write an expression that takes exponential time. The module `regex` searches
    without the interpreter lock and stops at a time limit, so other clients do not wait.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._end = clock() + SEARCH_SECONDS

    def limit(self, match: Callable[..., Any], *arguments: Any) -> Any:
        """The result of a search; raises InvalidParams if all of them have taken too long."""
        with contextlib.suppress(TimeoutError, MemoryError):
            if (remaining := self._end - self._clock()) > 0:
                return match(*arguments, timeout=remaining)
        text = f"the patterns of credential providers take more than {SEARCH_SECONDS} s"
        raise InvalidParams(f"{_PREFIX}{text}")


class SecretPatterns:
    """Finds secrets of one provider by a client's patterns, and makes dummies that fit."""

    def __init__(self, patterns: Sequence[str]) -> None:
        """Raises UnusablePattern."""
        self._patterns = [_compiled(each) for each in patterns]

    def find(self, text: str, search_time: SearchTime, *, is_named: bool) -> Iterator[str]:
        """The secrets in the value of a variable, which the provider names or not."""
        for pattern, is_specific in self._patterns:
            start = 0 if is_named or is_specific else len(text)
            while start < len(text):
                match = search_time.limit(pattern.search, text, start)
                if match is None:
                    break
                if match[0]:
                    yield match[0]
                start = max(match.end(), start + 1)

    def dummy(self, value: str, draw: Draw, search_time: SearchTime) -> str | None:
        """A matching text that tells nothing of the secret; None if the pattern has no other."""
        for pattern, _ in self._patterns:
            if search_time.limit(pattern.fullmatch, value):
                for trial in _imitations(value, draw):
                    if search_time.limit(pattern.fullmatch, trial):
                        return trial
        return None


def _imitations(value: str, draw: Draw) -> Iterator[str]:
    """Texts like a value that keep as little of it as possible, the beginning at most."""
    for kept in range(min(KEPT_CHARACTERS, len(value) - OWN_CHARACTERS) + 1):
        for alphabet in _ALPHABETS:
            yield value[:kept] + "".join(draw(alphabet) for _ in value[kept:])
        changed = "".join(_same_kind(character, draw) for character in value[kept:])
        if sum(map(str.isalnum, changed)) >= OWN_CHARACTERS:
            yield value[:kept] + changed


def _same_kind(character: str, draw: Draw) -> str:
    for alphabet in (string.digits, string.ascii_lowercase, string.ascii_uppercase):
        if character in alphabet:
            return draw(alphabet)
    return character


@lru_cache(KEPT_PATTERNS)
def _compiled(text: str) -> tuple[regex.Pattern[str], bool]:
    """A compiled pattern, and whether it matches no ordinary value; raises UnusablePattern."""
    # Imported here: most servers mask nothing.
    import regex

    if len(text) > PATTERN_CHARACTERS:
        raise UnusablePattern(f"is longer than {PATTERN_CHARACTERS} characters")
    if _count_parts(text) > PATTERN_PARTS:
        raise UnusablePattern(f"has more than {PATTERN_PARTS} parts with all repetitions")
    try:
        pattern = regex.compile(text, regex.V1, cache_pattern=False)
    except (regex.error, RecursionError, OverflowError) as error:
        raise UnusablePattern(f"is no regular expression: {error}") from None
    try:
        if pattern.search("", timeout=_PROBE_SECONDS):
            raise UnusablePattern("matches the empty text")
        is_ordinary = any(pattern.search(each, timeout=_PROBE_SECONDS) for each in _ORDINARY)
    except TimeoutError:
        raise UnusablePattern("takes too long for a short text") from None
    return pattern, not is_ordinary


def _count_parts(text: str) -> int:
    """The parts of a pattern with all repetitions, or more where its groups are uncertain.

    After a nested set, and with the flag `x`, a parenthesis may be a character or a comment: a
    repeated group then counts from the pattern's beginning.
    """
    is_verbose = re.search(r"\(\?\w*x", text) is not None
    if is_verbose and re.search(r"\{[\s0-9,]*#", text):
        raise UnusablePattern("has a comment within a repetition")
    is_certain = not is_verbose
    groups: list[int] = []  # the parts before each open one
    parts = position = 0
    last_parts = 1
    while position < len(text):
        token = _PATTERN_TOKEN.match(text, position)
        assert token is not None  # any character is one
        position = token.end()
        match token.lastgroup:
            case "repeat":
                least = int("".join(token["least"].split()) or 0)
                repeated = last_parts * max(least - 1, 0)
                parts += repeated
                last_parts += repeated
            case "close":
                last_parts = parts - (groups.pop() if groups else 0)
            case "comment" if is_certain:
                pass
            case kind:
                if kind == "open" and is_certain:
                    groups.append(parts)
                if kind in ("comment", "set") and not is_certain:
                    position = token.start() + 1
                is_certain &= token[0] != "["
                parts += 1
                if not (is_verbose and token[0][-1].isspace()):
                    last_parts = 1
                elif token[0][-1] == "\n":  # may end a comment between a group and its repetition
                    last_parts = parts
    return parts


class CredentialDestination(NamedTuple):
    """The URLs that may get a secret; a host `*.a.b` stands for all names below `a.b`."""

    scheme: Scheme
    host: str
    port: int
    path: str = "/"

    def has_host(self, scheme: Scheme, host: str, port: int) -> bool:
        if (scheme, port) != (self.scheme, self.port):
            return False
        if self.host.startswith("*"):
            return host.endswith(self.host[1:]) and parse_address(host) is None
        return host == self.host

    def has_path(self, target: bytes | None) -> bool:
        """Whether a request target is below the path, however an origin reads it.

        None: another header may name the target, so it is known to be below `/` only.
        """
        if target is None:
            return self.path == "/"
        raw = target.partition(b"?")[0]
        path = raw.decode("latin-1")
        if not path.startswith(self.path):
            return False
        if not self.path.endswith("/") and path[len(self.path) :][:1] not in ("", "/"):
            return False
        return self.path == "/" or _is_straight(raw)


def _is_straight(path: bytes) -> bool:
    """Whether no segment of a path leads upwards, also after it is decoded.

    Origins may accept overlong UTF-8 (`%c0%ae` for a dot), or map compatible characters to ASCII.
    """
    if _MALFORMED.search(path):
        return False
    for _ in range(_DECODINGS):
        try:
            text = path.decode()
        except UnicodeDecodeError:
            return False
        if _WIDE.search(path) or _CONTROL.search(text):
            return False
        if any(map(_UPWARDS.search, (text, unicodedata.normalize("NFKC", text)))):
            return False
        decoded = unquote_to_bytes(path)
        if decoded == path:
            return True
        path = decoded
    return False


def parse_destination(prefix: str) -> CredentialDestination:
    """The destination of a URL prefix; raises ValueError with the reference's texts."""
    parts = urlsplit(prefix)
    host, port = hosts.normalize(parts.hostname or ""), parts.port
    if not host:
        raise ValueError("credential destination has no hostname")
    if parts.username is not None or "?" in prefix or "#" in prefix:
        raise ValueError(
            "credential destination cannot include user information, a query, or a fragment"
        )
    if (parts.scheme == "http" and not _is_loopback(host)) or parts.scheme not in _DEFAULT_PORTS:
        raise ValueError(
            "credential destination must use HTTPS unless it targets loopback over HTTP"
        )
    if "*" in host:
        rest = host.removeprefix("*.")
        if rest == host or "*" in rest or "." not in rest:
            raise ValueError("credential destination has an invalid wildcard")
    path = parts.path.encode(errors="surrogatepass")
    if not hosts.is_usable(host.removeprefix("*.")) or not _is_straight(path):
        raise ValueError("credential destination must have an exact hostname or scoped wildcard")
    scheme: Scheme = "https" if parts.scheme == "https" else "http"
    return CredentialDestination(scheme, host, port or _DEFAULT_PORTS[scheme], parts.path or "/")


def _is_loopback(host: str) -> bool:
    address = parse_address(host)
    return host == "localhost" if address is None else address.is_loopback


class Usage(NamedTuple):
    """The requests that may contain a secret, and the places in them."""

    destinations: tuple[CredentialDestination, ...]
    schemes: frozenset[bytes]  # of `Authorization`
    header: bytes | None = None  # another header, in lower case
    prefix: bytes = b""  # of its value


class Provider(NamedTuple):
    """Variables with secrets of one service, and the requests that may get them."""

    variables: tuple[str, ...]
    usage: Usage
    patterns: SecretPatterns
    prefix_variable: str | None = None  # names a URL prefix, or a host of the user's own
    is_built_in: bool = False  # then the values of the variables are secrets, whatever they are

    def usage_in(self, env: Mapping[str, str]) -> Usage:
        """The usage with the URL prefix that a variable names; one without a meaning counts not."""
        named = env.get(self.prefix_variable or "", "").strip()
        if not named:
            return self.usage
        # Without a scheme it is https, and for a provider of a client http on loopback.
        schemes = ("https://",) if self.is_built_in else ("http://", "https://")
        for scheme in ("",) if "://" in named else schemes:
            with contextlib.suppress(ValueError):
                further = parse_destination(f"{scheme}{named}")
                return self.usage._replace(destinations=(*self.usage.destinations, further))
        return self.usage


@cache
def built_in_providers() -> tuple[Provider, ...]:
    """The providers of every start; made when they are needed, because they need `regex`."""
    tokens, keys = SecretPatterns([_GITHUB_TOKEN]), SecretPatterns([_OPENAI_KEY])
    return (
        Provider(_GITHUB_VARIABLES, _built_in_usage(*_GITHUB_HOSTS), tokens, None, True),
        Provider(_ENTERPRISE_VARIABLES, _built_in_usage(), tokens, "GH_HOST", True),
        Provider(
            *(_OPENAI_VARIABLES, _built_in_usage("api.openai.com"), keys, "OPENAI_BASE_URL", True)
        ),
    )


def _built_in_usage(*hosts: str) -> Usage:
    destinations = tuple(CredentialDestination("https", host, 443) for host in hosts)
    return Usage(destinations, frozenset({b"bearer", b"token", b"basic"}))


def custom_providers(providers: Mapping[str, CredentialProvider] | None) -> tuple[Provider, ...]:
    """The providers of a client; raises InvalidParams for one that cannot be used.

    The reference ignores such a provider, and gives its secrets to the process.
    """
    if len(providers or {}) > MAX_PROVIDERS:
        raise InvalidParams(f"{_PREFIX}at most {MAX_PROVIDERS} credential providers are supported")
    return tuple(_custom(name, provider) for name, provider in (providers or {}).items())


def _custom(name: str, provider: CredentialProvider) -> Provider:
    if not name:
        raise InvalidParams(f"{_PREFIX}credential provider name must not be empty")
    label = name if len(name) <= 64 else f"{name[:64]}…"
    fault = _fault(provider)
    if fault is not None:
        raise InvalidParams(f"{_PREFIX}credential provider `{label}` {fault}")
    try:
        patterns = SecretPatterns(provider.patterns)
        destinations = tuple(map(parse_destination, provider.url_prefixes))
    except UnusablePattern as error:
        text = f"credential provider `{label}` has a pattern that {error}"
        raise InvalidParams(f"{_PREFIX}{text}") from None
    except ValueError as error:
        raise InvalidParams(f"{_PREFIX}credential provider `{label}`: {error}") from None
    schemes = frozenset(each.encode() for each in _authentication(provider) if each != "header")
    header = None if provider.header is None else provider.header.lower().encode()
    usage = Usage(destinations, schemes, header, (provider.prefix or "").encode())
    return Provider(tuple(provider.env), usage, patterns, provider.url_prefix_from_env)


def _authentication(provider: CredentialProvider) -> Sequence[Authentication]:
    """How requests show the secret; Codex sends an empty list if the user names no way.

    A header without a way is meant. The reference ignores such a provider, and gives its secrets
    to the process.
    """
    return provider.auth or (["bearer"] if provider.header is None else ["header"])


def _fault(provider: CredentialProvider) -> str | None:
    """What is wrong with a provider, in the words of the reference where it has some."""
    lists: Sequence[Sized] = (provider.env, provider.patterns, provider.url_prefixes, provider.auth)
    texts = (*provider.env, *provider.url_prefixes, provider.header or "", provider.prefix or "")
    if max(map(len, lists)) > MAX_ITEMS or max(map(len, texts)) > MAX_CHARACTERS:
        return f"has more than {MAX_ITEMS} items, or one of more than {MAX_CHARACTERS} characters"
    if not provider.env:
        return "has no environment keys"
    if not all(map(_is_variable, provider.env)):
        return "has an invalid environment key"
    if not _BUILT_IN_VARIABLES.isdisjoint(provider.env):
        return "overlaps a built-in credential source"
    if not provider.patterns:
        return "has no credential patterns"
    if provider.url_prefix_from_env is not None and not _is_variable(provider.url_prefix_from_env):
        return "has an invalid host environment key"
    if not provider.url_prefixes and provider.url_prefix_from_env is None:
        return "has no destination URL prefixes"
    return _authentication_fault(provider)


def _authentication_fault(provider: CredentialProvider) -> str | None:
    uses_header = "header" in _authentication(provider)
    if provider.prefix is not None and not uses_header:
        return "requires header authentication to use a header prefix"
    if uses_header != (provider.header is not None):
        return "requires a header name exactly when using header authentication"
    if provider.header is None:
        return None
    prefix = provider.prefix or ""
    if not _is_header(provider.header) or provider.header.lower() in _FRAMING:
        return "has an invalid header name"
    if not prefix.isascii() or (prefix and not prefix.isprintable()):
        return "has an invalid header prefix"
    return None


class _Secret(NamedTuple):
    value: str
    usages: frozenset[int]  # numbers of usages


class CredentialMask:
    """The secrets of one process, by their dummies."""

    def __init__(
        self,
        env: Mapping[str, str],
        key: bytes,
        search_time: SearchTime,
        custom: Sequence[Provider] = (),
    ) -> None:
        """`key` is a secret of the server: equal values get equal dummies as long as it lives.

        Raises InvalidParams if the patterns take too long, or match too many texts.
        """
        self._key = key
        self._secrets: dict[str, _Secret] = {}
        self._usages: list[Usage] = []  # one for each provider with a secret
        self._dummies: dict[str, str] = {}  # of the values
        self._labels: set[tuple[str, str]] = set()  # a variable of its provider for each dummy
        self._holders: set[tuple[str, str]] = set()  # the variables with their secrets
        providers = (*built_in_providers(), *custom)
        values = {value for each in providers for _, value in _named_values(each, env)}
        for provider in providers:
            usage = provider.usage_in(env)
            number = len(self._usages)
            for name, value in _secrets_in(provider, usage, env, values, search_time):
                if number == len(self._usages):
                    self._usages.append(usage)
                dummy = self._dummies.get(value)
                if dummy is None:
                    dummy = self._new_dummy(value, provider, env, search_time)
                known = self._secrets.get(dummy, _Secret(value, frozenset()))
                self._secrets[dummy] = _Secret(value, known.usages | {number})
                label = name if name in provider.variables else provider.variables[0]
                self._labels.add((label, dummy))
                self._holders.add((name, value))
        holders = {name for name, _ in self._holders}
        named = {name for each in custom for name in each.variables if env.get(name, "").strip()}
        # The variables that a client's provider names, and in which no secret was found.
        self.unmasked = sorted(named - holders)

    def _new_dummy(
        self, value: str, provider: Provider, env: Mapping[str, str], search_time: SearchTime
    ) -> str:
        if len(self._secrets) >= MAX_SECRETS:
            text = f"the patterns of credential providers match more than {MAX_SECRETS} texts"
            raise InvalidParams(f"{_PREFIX}{text}")
        draw = _draw(value, self._key)
        dummy = None
        if not provider.is_built_in:
            dummy = provider.patterns.dummy(value, draw, search_time)
        is_taken = dummy is not None and any(dummy in value for value in env.values())
        if dummy is None or dummy in self._secrets or is_taken:
            prefix = _TOKEN_KIND.match(value)
            start = f"{prefix[0] if prefix else ''}masked"
            length = min(max(len(value) - len(start), _FEWEST_RANDOM), _MOST_RANDOM)
            dummy = start + "".join(draw(_ALPHABET) for _ in range(length))
        self._dummies[value] = dummy
        return dummy

    def masked(self, env: Mapping[str, str]) -> dict[str, str]:
        """An environment with dummies for all secrets, wherever they occur in it."""
        common = [value for value in self._dummies if len(value) >= _SHORTEST_COPY]
        own: dict[str, list[str]] = {}
        for name, value in self._holders:
            if len(value) < _SHORTEST_COPY:
                own.setdefault(name, []).append(value)
        result = {}
        for name, text in env.items():
            whole = self._dummies.get(text)
            if whole is None:
                whole = self._replaced(text, [*common, *own.get(name, ())])
            result[name] = whole
        changed = {name: text for name, text in result.items() if text != env[name]}
        brokered = json.dumps(self._brokered(changed), separators=(",", ":"))
        return result | {ACTIVE: "1", BROKERED: brokered}

    def _brokered(self, changed: Mapping[str, str]) -> list[tuple[str, str]]:
        """Names and dummies for programs that look for them: providers' variables and aliases."""
        aliases = {
            (f"@alias:{name}", dummy)
            for name, text in changed.items()
            for dummy in self._secrets
            if dummy in text
        }
        return sorted(self._labels | aliases)

    def _replaced(self, text: str, values: Iterable[str]) -> str:
        """A text with dummies for values, in one pass, the longest of those at the same place.

        One expression of all values would take minutes to compile if they are long.
        """
        places = [(text.find(value), -len(value), value) for value in values if value in text]
        heapq.heapify(places)
        parts, end = [], 0
        while places:
            start, _, value = places[0]
            if start >= end:
                parts += [text[end:start], self._dummies[value]]
                end = start + len(value)
            following = text.find(value, end)
            if following < 0:
                heapq.heappop(places)
            else:
                heapq.heapreplace(places, (following, -len(value), value))
        return "".join([*parts, text[end:]])

    def is_intercepted(self, host: str, port: int) -> bool:
        """Whether TLS to a host has to be opened, because a secret may belong there."""
        return any(
            destination.has_host("https", host, port)
            for usage in self._usages
            for destination in usage.destinations
        )

    def restored(
        self, scheme: Scheme, place: tuple[str, int], path: bytes, headers: Iterable[Header]
    ) -> list[Header]:
        """Request headers with secrets for dummies, except secrets with a line break."""
        headers = list(headers)
        is_known = _PATH_HEADERS.isdisjoint(name.lower() for name, _ in headers)
        known = path if is_known else None
        usages = [
            usage
            for usage in self._usages
            if any(
                one.has_host(scheme, *place) and one.has_path(known) for one in usage.destinations
            )
        ]
        return [(name, self._restored(name.lower(), value, usages)) for name, value in headers]

    def _restored(self, name: bytes, value: bytes, usages: Sequence[Usage]) -> bytes:
        """The value of one header of a request with these usages; `name` is in lower case."""
        text = value.strip()
        for usage in usages:
            if name == usage.header and text.startswith(usage.prefix):
                secret = self._secret(text[len(usage.prefix) :], [usage])
                if secret is not None:
                    return usage.prefix + secret
        if name != b"authorization":
            return value
        scheme, _, rest = text.partition(b" ")
        allowed = [usage for usage in usages if scheme.lower() in usage.schemes]
        if scheme.lower() != b"basic":
            secret = self._secret(rest.strip(), allowed)
            return value if secret is None else scheme + b" " + secret
        try:
            pair = base64.b64decode(rest.strip(), validate=True)
        except binascii.Error:
            return value
        user, colon, password = pair.partition(b":")
        secrets = [self._secret(each, allowed) for each in (user, password)]
        if secrets == [None, None]:
            return value
        pair = (secrets[0] or user) + colon + (secrets[1] or password)
        return scheme + b" " + base64.b64encode(pair)

    def _secret(self, dummy: bytes, usages: Iterable[Usage]) -> bytes | None:
        """The secret of a dummy, if one of the usages is its own and it can be sent."""
        secret = self._secrets.get(dummy.decode("latin-1"))
        if secret is None or not secret.value.isprintable():
            return None
        own = [self._usages[number] for number in secret.usages]
        if not any(usage is each for usage in usages for each in own):
            return None
        return secret.value.encode(errors="surrogateescape")


def _named_values(provider: Provider, env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name in provider.variables if provider.is_built_in else ():
        # Programs ignore blanks around a token, and no header can have a line break.
        if value := env.get(name, "").strip():
            yield name, value


def _secrets_in(
    provider: Provider,
    usage: Usage,
    env: Mapping[str, str],
    named: Collection[str],
    search_time: SearchTime,
) -> Iterator[tuple[str, str]]:
    """The variables with secrets of a provider, and the secrets.

    A token in a built-in provider's variable belongs to that provider alone, whatever it looks
    like. A service of the user's own without a known host has no others.
    """
    yield from _named_values(provider, env)
    if provider.is_built_in and not usage.destinations:
        return
    for name, text in env.items():
        is_named = name in provider.variables
        for value in provider.patterns.find(text, search_time, is_named=is_named):
            if provider.is_built_in and value in named:
                continue
            if is_named or len(value) >= _SHORTEST_COPY:
                yield name, value


def _draw(value: str, key: bytes) -> Draw:
    """Draws characters that depend on the value and tell nothing of it without the key."""
    encoded = value.encode(errors="surrogateescape")
    numbers = _numbers(hmac.digest(key, encoded, hashlib.sha256))
    return lambda alphabet: alphabet[next(numbers) % len(alphabet)]


def _numbers(seed: bytes) -> Iterator[int]:
    count = 0
    while True:
        block = hmac.digest(seed, count.to_bytes(8), hashlib.sha512)
        for start in range(0, len(block), 4):
            yield int.from_bytes(block[start : start + 4])
        count += 1
