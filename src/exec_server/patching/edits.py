"""Exact edits of a text: each old text is replaced where it occurs, which must be once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from exec_server.patching.hunks import UNBOUNDED, Effort, PatchFailed

# A few edits of a small text could make one that fills the memory.
MAX_CHARACTERS: Final = 8 * 1_048_576
# Each edit reads the whole text.
MAX_EDITS: Final = 1_000
# In a longer text the reason of a failure is not looked for: each word would be an object.
_HINT_CHARACTERS: Final = 1_048_576


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace `old` by `new`: its only occurrence, or `all` of them."""

    old: str
    new: str
    all: bool = False


def apply_edits(text: str, edits: Sequence[Edit], effort: Effort = UNBOUNDED) -> tuple[str, int]:
    """The text after all edits, one after the other, and the number of replacements.

    Raises PatchFailed if an old text is empty, is missing, or is not unique, or at a limit.
    """
    if len(edits) > MAX_EDITS:
        raise PatchFailed(f"at most {MAX_EDITS} edits may be made at once: split them")
    replaced = 0
    for number, edit in enumerate(edits, 1):
        which = f"edit {number} of {len(edits)}: " if len(edits) > 1 else ""
        effort.check()
        if not edit.old:
            raise PatchFailed(f"{which}the old text must not be empty")
        count = text.count(edit.old)
        if count == 0:
            hint = _hint(text, edit.old)
            raise PatchFailed(f"{which}the old text does not occur{hint}")
        if count > 1 and not edit.all:
            raise PatchFailed(
                f"{which}the old text occurs {count} times: add lines around it until it is "
                "unique, or replace all of them"
            )
        if len(text) + count * (len(edit.new) - len(edit.old)) > MAX_CHARACTERS:
            raise PatchFailed(
                f"{which}the new text would have more than {MAX_CHARACTERS} characters"
            )
        text = text.replace(edit.old, edit.new)
        replaced += count
    return text, replaced


def _hint(text: str, old: str) -> str:
    """The usual reasons for which an old text is not found."""
    if len(text) > _HINT_CHARACTERS:
        return ""
    if "\r\n" in text and "\r\n" not in old and old.replace("\n", "\r\n") in text:
        return ": its lines end with CRLF"
    if " ".join(old.split()) in " ".join(text.split()):
        return ", except with other spaces or line breaks"
    return ""
