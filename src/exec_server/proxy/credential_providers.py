"""Provider: a service with secrets, its own variables and the requests that may contain them.

Providers of clients are checked with the reference's rules. It ignores one that breaks them, and
the process gets the secrets; here the start is refused.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from functools import cache
from typing import Final, NamedTuple

from exec_server.errors import InvalidParams
from exec_server.protocol.network import CredentialProvider
from exec_server.proxy.credential_destinations import Destination, parse_destination
from exec_server.proxy.credential_patterns import SecretPatterns, UnusablePattern

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


class Usage(NamedTuple):
    """The requests that may contain a secret, and the places in them."""

    destinations: tuple[Destination, ...]
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
    destinations = tuple(Destination("https", host, 443) for host in hosts)
    return Usage(destinations, frozenset({b"bearer", b"token", b"basic"}))


def custom_providers(given: Mapping[str, CredentialProvider] | None) -> tuple[Provider, ...]:
    """The providers of a client; raises InvalidParams for one that cannot be used."""
    if given is None:
        return ()
    if len(given) > MAX_PROVIDERS:
        raise InvalidParams(f"{_PREFIX}at most {MAX_PROVIDERS} credential providers are supported")
    return tuple(_custom(name, provider) for name, provider in given.items())


def _custom(name: str, given: CredentialProvider) -> Provider:
    if not name:
        raise InvalidParams(f"{_PREFIX}credential provider name must not be empty")
    shown = name if len(name) <= 64 else f"{name[:64]}…"
    fault = _fault(given)
    if fault is not None:
        raise InvalidParams(f"{_PREFIX}credential provider `{shown}` {fault}")
    try:
        patterns = SecretPatterns(given.patterns)
        destinations = tuple(map(parse_destination, given.url_prefixes))
    except UnusablePattern as error:
        text = f"credential provider `{shown}` has a pattern that {error}"
        raise InvalidParams(f"{_PREFIX}{text}") from None
    except ValueError as error:
        raise InvalidParams(f"{_PREFIX}credential provider `{shown}`: {error}") from None
    # Codex sends an empty list if the user names none.
    schemes = frozenset(each.encode() for each in given.auth or ["bearer"] if each != "header")
    header = None if given.header is None else given.header.lower().encode()
    usage = Usage(destinations, schemes, header, (given.prefix or "").encode())
    return Provider(tuple(given.env), usage, patterns, given.url_prefix_from_env)


def _fault(given: CredentialProvider) -> str | None:
    """What is wrong with a provider, in the words of the reference where it has some."""
    items = max(len(given.env), len(given.patterns), len(given.url_prefixes), len(given.auth))
    texts = (*given.env, *given.url_prefixes, given.header or "", given.prefix or "")
    if items > MAX_ITEMS or max(map(len, texts)) > MAX_CHARACTERS:
        return f"has more than {MAX_ITEMS} items, or one of more than {MAX_CHARACTERS} characters"
    if not given.env:
        return "has no environment keys"
    if not all(map(_is_variable, given.env)):
        return "has an invalid environment key"
    if not _BUILT_IN_VARIABLES.isdisjoint(given.env):
        return "overlaps a built-in credential source"
    if not given.patterns:
        return "has no credential patterns"
    if given.url_prefix_from_env is not None and not _is_variable(given.url_prefix_from_env):
        return "has an invalid host environment key"
    if not given.url_prefixes and given.url_prefix_from_env is None:
        return "has no destination URL prefixes"
    return _authentication_fault(given)


def _authentication_fault(given: CredentialProvider) -> str | None:
    uses_header = "header" in given.auth
    if given.prefix is not None and not uses_header:
        return "requires header authentication to use a header prefix"
    if uses_header != (given.header is not None):
        return "requires a header name exactly when using header authentication"
    if given.header is None:
        return None
    prefix = given.prefix or ""
    if not _is_header(given.header) or given.header.lower() in _FRAMING:
        return "has an invalid header name"
    if not prefix.isascii() or (prefix and not prefix.isprintable()):
        return "has an invalid header prefix"
    return None
