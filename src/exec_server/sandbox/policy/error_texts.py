"""Texts of the errors that a sandbox causes, in English and in other languages. Pure."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping
from typing import Final

# Errors of the mounts of a view: EROFS for changes, EACCES for masked paths, EBUSY for renaming
# and removing mount points. EPERM is the error of the system call filter.
ERRORS: Final = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)
_ENGLISH: Final = {
    "permission denied": errno.EACCES,
    "operation not permitted": errno.EPERM,
    "read-only file system": errno.EROFS,
    "device or resource busy": errno.EBUSY,
    "failed to write file": errno.EROFS,  # of tools that do not print the error itself
}


class ErrorTexts:
    """The texts of one language beside the English ones; immutable."""

    def __init__(self, translations: Mapping[str, int]) -> None:
        self._errors = _ENGLISH | {text.lower(): number for text, number in translations.items()}
        # For text as bytes in which only the ASCII letters are lower-cased.
        self.phrases = tuple(text.encode().lower() for text in (*_ENGLISH, *translations))
        self._pattern = re.compile("|".join(map(re.escape, self._errors)), re.IGNORECASE)

    def find(self, line: str) -> tuple[int, int] | None:
        """The position and the error number of the first text in a line."""
        match = self._pattern.search(line)
        if match is None:
            return None
        # A text of another case than in the catalogue, in an alphabet where that is ambiguous.
        return match.start(), self._errors.get(match[0].lower(), errno.EPERM)


ENGLISH: Final = ErrorTexts({})
