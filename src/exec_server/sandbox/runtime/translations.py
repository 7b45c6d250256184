"""The texts of errors in the language of a command, from the catalogues of the C library."""

from __future__ import annotations

import gettext
import os
import re
import struct
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from exec_server.sandbox.policy.error_texts import ENGLISH, ERRORS, ErrorTexts

_CATALOGUES: Final = "/usr/share/locale"
# Languages in the cache, each with four short texts. The least recently used one is dropped.
_CACHED: Final = 16
# The languages of LANGUAGE that are tried.
_MAX_LANGUAGES: Final = 4
# de, pt_BR.UTF-8, sr@latin. Nothing else becomes part of a path.
_locale = re.compile(r"([a-z]{2,3}(?:_[A-Z]{2})?)(?:\.[\w-]{1,20})?(@[a-z]{1,20})?").fullmatch


def error_texts(env: Mapping[str, str]) -> ErrorTexts:
    """The texts that a command with this environment prints. Blocking: may read a catalogue."""
    name = next(filter(None, map(env.get, ("LC_ALL", "LC_MESSAGES", "LANG"))), "C")
    if name in ("C", "C.UTF-8", "POSIX"):
        return ENGLISH
    preferred = env.get("LANGUAGE", "").split(":")[:_MAX_LANGUAGES]
    return _translated(tuple(filter(_locale, (*preferred, name))))


@lru_cache(_CACHED)
def _translated(names: tuple[str, ...]) -> ErrorTexts:
    """The texts of the first language that has a catalogue."""
    for name in names:
        match = _locale(name)
        assert match is not None
        if match[1].startswith("en"):
            return ENGLISH
        path = gettext.find("libc", _CATALOGUES, [match[1] + (match[2] or "")])
        if path is None:
            continue
        try:
            with open(path, "rb") as file:
                catalogue = gettext.GNUTranslations(file)
        except (OSError, ValueError, LookupError, struct.error):
            continue  # a damaged catalogue
        return ErrorTexts({catalogue.gettext(os.strerror(number)): number for number in ERRORS})
    return ENGLISH
