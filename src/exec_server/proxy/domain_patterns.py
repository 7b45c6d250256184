"""Domain patterns: `a.b` itself, `*.a.b` all below, `**.a.b` both, `*` and `?` inside. Pure.

Requests name hosts in ASCII, so international names are encoded by IDNA, as browsers do it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from exec_server.errors import InvalidParams
from exec_server.protocol.urls import HOST_CHARACTERS, domain_to_ascii
from exec_server.proxy.hosts import is_usable, normalize

# Patterns of one process, and the characters of one: clients have a few dozen short ones. More
# are refused, because each request of the process is compared with all of them.
MAX_PATTERNS: Final = 4096
PATTERN_CHARACTERS: Final = 1024
# The longest label of DNS. Encoding takes quadratic time, so longer ones are refused before it.
LABEL_CHARACTERS: Final = 63

_PREFIX: Final = "invalid network proxy config: "
_ANY: Final = "*"


class DomainPatterns:
    """A set of patterns; names without wildcards are found without comparing them all."""

    def __init__(self, patterns: Iterable[str], *, denied: bool = False) -> None:
        """Raises InvalidParams; `denied` patterns must not match everything."""
        given = list(patterns)
        if len(given) > MAX_PATTERNS or max(map(len, given), default=0) > PATTERN_CHARACTERS:
            raise InvalidParams(
                f"{_PREFIX}at most {MAX_PATTERNS} domain patterns of {PATTERN_CHARACTERS} "
                "characters are supported"
            )
        self._exact: set[str] = set()
        self._expressions: list[re.Pattern[str]] = []
        for pattern in given:
            self._add(pattern, denied=denied)

    def _add(self, pattern: str, *, denied: bool) -> None:
        below, itself, rest = _parse(pattern)
        if denied and rest == _ANY and (itself or not below):
            raise InvalidParams(
                f"{_PREFIX}invalid value for network.denied_domains: {pattern} (allowed exact "
                "hosts or scoped wildcards like *.example.com or **.example.com)"
            )
        if not below and not _has_wildcard(rest):
            self._exact.add(rest)
            return
        expression = _expression(rest)
        if below:
            expression = rf"(?:.+\.)?{expression}" if itself else rf".+\.{expression}"
        self._expressions.append(re.compile(expression, re.DOTALL))

    def names(self, host: str) -> bool:
        """Whether a pattern without wildcards is this host."""
        return host in self._exact

    def match(self, host: str) -> bool:
        """Whether a pattern matches this host, which is in its normal form."""
        return host in self._exact or any(each.fullmatch(host) for each in self._expressions)


def _parse(pattern: str) -> tuple[bool, bool, str]:
    """Whether hosts below match, whether the rest itself matches, and the rest in normal form."""
    text = pattern.strip()
    if not text:
        raise InvalidParams(f"{_PREFIX}domain pattern is empty")
    if re.search(r"[\s/\\{}]", text):
        raise InvalidParams(f"{_PREFIX}unsupported domain pattern syntax: {pattern}")
    if "[" in text or "]" in text:
        inner = re.fullmatch(r"\[([0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*|\*)\](?::[0-9]*)?", text)
        if inner is None:
            raise InvalidParams(
                f"{_PREFIX}brackets are only supported for IPv6 literals or [*]: {pattern}"
            )
        return False, True, normalize(inner[1]) if inner[1] != _ANY else _ANY
    below, itself = False, True
    if text.startswith("**."):
        below, text = True, text[3:]
    elif text.startswith("*."):
        below, itself, text = True, False, text[2:]
    if "**" in text:
        raise InvalidParams(f"{_PREFIX}unsupported repeated wildcard: {pattern}")
    rest = normalize(text)
    if not rest.isascii():
        rest = _ascii(rest, pattern)
    if not rest:
        raise InvalidParams(f"{_PREFIX}domain pattern is empty")
    return below, itself, rest


def _ascii(text: str, pattern: str) -> str:
    """The rest of a pattern with international labels in the form in which requests name them."""
    # A longer one matches no host, and encoding thousands of them would take a minute.
    labels = text.split(".") if len(text) <= HOST_CHARACTERS else [text]
    encoded = [label if label.isascii() else _encoded(label) for label in labels]
    if None in encoded:
        raise InvalidParams(
            f"{_PREFIX}domain pattern has no ASCII form: {pattern} (a label with other letters "
            "must be a valid international name without wildcards; write it as xn--…)"
        )
    return normalize(".".join(label or "" for label in encoded))


def _encoded(label: str) -> str | None:
    """An international label in ASCII; None if it has no such form."""
    if len(label) > LABEL_CHARACTERS or _has_wildcard(label):
        return None
    try:
        encoded = domain_to_ascii(label)
    except ValueError:
        return None
    return encoded if is_usable(encoded) else None


def _has_wildcard(text: str) -> bool:
    return "*" in text or "?" in text


def _expression(text: str) -> str:
    """A pattern as an expression whose time is at most that of comparing each two characters."""
    first, *others = (
        "".join("." if character == "?" else re.escape(character) for character in part)
        for part in text.split("*")
    )
    if not others:
        return first
    # The first match of each text between two stars is as good as any later one, so the group is
    # atomic: without that, many stars take exponential time.
    between = "".join(f"(?>.*?{part})" for part in others[:-1])
    return f"{first}{between}.*{others[-1]}"
