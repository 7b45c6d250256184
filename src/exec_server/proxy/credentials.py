"""Credential masking: secrets of an environment become dummies, and requests get them back.

The process never has a secret: its environment holds a dummy of the same kind. The proxy replaces
the dummy in the header of a request to a URL of the provider, and nowhere else.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import heapq
import hmac
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from exec_server.proxy.credential_destinations import Scheme
from exec_server.proxy.credential_patterns import Draw, SearchTime
from exec_server.proxy.credential_providers import Provider, Usage, built_in_providers

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
_PREFIX: Final = re.compile(r"github_pat_|gh[a-z]_|sk-proj-|sk-svcacct-|sk-admin-|sk-")

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


class TooManySecrets(Exception):
    """The patterns of a client match too many texts."""


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

        Raises PatternsTooSlow and TooManySecrets.
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
            for name, value in _found(provider, usage, env, values, search_time):
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

    def _new_dummy(
        self, value: str, provider: Provider, env: Mapping[str, str], search_time: SearchTime
    ) -> str:
        if len(self._secrets) >= MAX_SECRETS:
            raise TooManySecrets
        draw = _draw(value, self._key)
        dummy = None
        if not provider.is_built_in:
            dummy = provider.patterns.dummy(value, draw, search_time)
        if dummy is None or dummy in self._secrets or _occurs(dummy, env.values()):
            prefix = _PREFIX.match(value)
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

        An expression of all values would take minutes to compile if they are long.
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

    # ---- requests ---------------------------------------------------------------------

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
        """The headers of a request to a host and port with secrets for dummies.

        A secret with a line break stays a dummy: it cannot be sent.
        """
        given = list(headers)
        is_known = _PATH_HEADERS.isdisjoint(name.lower() for name, _ in given)
        known = path if is_known else None
        usages = [usage for usage in self._usages if _has(usage, scheme, place, known)]
        if not usages:
            return given
        return [(name, self._restored(name.lower(), value, usages)) for name, value in given]

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
    """The values of the variables of a built-in provider, which are secrets as they are."""
    for name in provider.variables if provider.is_built_in else ():
        # Programs ignore blanks around a token, and no header can have a line break.
        if value := env.get(name, "").strip():
            yield name, value


def _found(
    provider: Provider,
    usage: Usage,
    env: Mapping[str, str],
    named: Collection[str],
    search_time: SearchTime,
) -> Iterator[tuple[str, str]]:
    """The variables with secrets of a provider, and the secrets.

    A token that a variable of a built-in provider names belongs to that one alone, even if it looks
    like a token of another. A service of the user's own without a known host has no others.
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


def _has(usage: Usage, scheme: Scheme, place: tuple[str, int], path: bytes | None) -> bool:
    """Whether a request goes to a destination of a usage."""
    return any(each.has_host(scheme, *place) and each.has_path(path) for each in usage.destinations)


def _occurs(text: str, values: Iterable[str]) -> bool:
    return any(text in value for value in values)


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
