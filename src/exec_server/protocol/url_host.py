"""Hosts of URLs by the WHATWG's rules, as browsers and the reference read them.

International names are mapped by UTS 46 with the tables of the `idna` package. Its `encode`
follows IDNA 2008, which refuses names that browsers accept (`☃.net`, `a_b.example`), so the
mapping is taken from it and the label checks that the WHATWG asks for are made here.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Final

# A name that DNS can resolve has at most 253 characters. Punycode takes quadratic time, so much
# longer international names are refused before it.
MAX_CHARACTERS: Final = 1_024

INVALID_NAME: Final = "invalid international domain name"
INVALID_IPV4: Final = "invalid IPv4 address"
INVALID_IPV6: Final = "invalid IPv6 address"

_ACE_PREFIX: Final = "xn--"
_JOINERS: Final = "\u200c\u200d"
_RIGHT_TO_LEFT: Final = frozenset({"R", "AL", "AN"})
# The longest spelling of 32 bits: eleven octal digits, with leading zeros to spare.
_MAX_NUMBER_CHARACTERS: Final = 64

# Compiled at the first use, to keep the start of the server short.
_has_forbidden = partial(re.search, r"[\x00-\x20#%/:<>?@\[\\\]^|\x7f]")
_is_number = partial(re.fullmatch, r"[0-9]+|0[xX][0-9a-fA-F]*")


def parse_host(text: str) -> str:
    """The host as it is compared and sent; raises ValueError with the reference's text.

    Names are lower case ASCII, IPv4 addresses dotted decimal, IPv6 addresses in brackets.
    """
    if text.startswith("["):
        return _ipv6(text)
    from urllib.parse import unquote_to_bytes

    try:
        name = unquote_to_bytes(text).decode()
    except UnicodeDecodeError:
        raise ValueError(INVALID_NAME) from None
    name = domain_to_ascii(name)
    if not name:
        raise ValueError("empty host")
    if _has_forbidden(name):
        raise ValueError(INVALID_NAME)
    if _is_number(name.removesuffix(".").rpartition(".")[2]):
        return _ipv4(name)
    return name


def domain_to_ascii(name: str) -> str:
    """The name in lower case, its international labels in Punycode; raises ValueError."""
    if name.isascii() and _ACE_PREFIX not in (lower := name.lower()):
        return lower
    if len(name) > MAX_CHARACTERS:
        raise ValueError(INVALID_NAME)
    # Imported here: the tables take tens of milliseconds to load, and most hosts are ASCII.
    import idna

    try:
        mapped = idna.uts46_remap(name, std3_rules=False)
        labels = [_decoded(label) for label in mapped.split(".")]
        if any(_is_right_to_left(label) for label in labels):
            for label in filter(None, labels):
                idna.check_bidi(label, check_ltr=True)
    except UnicodeError:  # IDNAError is one
        raise ValueError(INVALID_NAME) from None
    return ".".join([_encoded(label) for label in labels])


def _decoded(label: str) -> str:
    """The Unicode form of a mapped label; raises UnicodeError unless it is a valid one."""
    import idna

    if label.startswith(_ACE_PREFIX):
        ascii_form = label
        label = label.removeprefix(_ACE_PREFIX).encode("ascii").decode("punycode")
        # Only the form that mapping and encoding would give is accepted.
        remapped = idna.uts46_remap(label, std3_rules=False)
        is_canonical = remapped == label and _encoded(label) == ascii_form
        if label.isascii() or label.startswith(_ACE_PREFIX) or not is_canonical:
            raise UnicodeError("not a valid Punycode label")
    if not label.isascii():
        idna.check_initial_combiner(label)
        for position, character in enumerate(label):
            if character in _JOINERS and not idna.valid_contextj(label, position):
                raise UnicodeError("joiner without its context")
    return label


def _encoded(label: str) -> str:
    return label if label.isascii() else _ACE_PREFIX + label.encode("punycode").decode("ascii")


def _is_right_to_left(label: str) -> bool:
    import unicodedata

    return any(unicodedata.bidirectional(character) in _RIGHT_TO_LEFT for character in label)


def _ipv6(text: str) -> str:
    from ipaddress import IPv6Address

    try:
        # Python accepts a zone (`%eth0`), which the WHATWG excludes from URLs.
        if not text.endswith("]") or "%" in text:
            raise ValueError
        return f"[{IPv6Address(text[1:-1])}]"
    except ValueError:
        raise ValueError(INVALID_IPV6) from None


def _ipv4(name: str) -> str:
    """The dotted decimal form of an address in any of its old spellings, such as `0x7f.1`."""
    parts = name.removesuffix(".").split(".")
    try:
        if len(parts) > 4:
            raise ValueError
        *high, low = map(_ipv4_number, parts)
        if any(number > 255 for number in high) or low >= 256 ** (5 - len(parts)):
            raise ValueError
    except ValueError:
        raise ValueError(INVALID_IPV4) from None
    from ipaddress import IPv4Address

    return str(IPv4Address(low + sum(n << 8 * (3 - index) for index, n in enumerate(high))))


def _ipv4_number(text: str) -> int:
    if not _is_number(text) or len(text) > _MAX_NUMBER_CHARACTERS:
        raise ValueError
    if text[:2] in ("0x", "0X"):
        return int(text[2:] or "0", 16)
    return int(text, 8 if text.startswith("0") else 10)
