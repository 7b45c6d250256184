"""printable and lossy: texts of peers and names of files for terminals, logs and messages. Pure.

The other end of a connection chooses names, error texts and versions. A terminal executes the
control characters in them: they can move the cursor, set the title or the clipboard, and forge
lines of output.
"""

from __future__ import annotations

_FIRST_ESCAPED_BYTE, _LAST_ESCAPED_BYTE = 0xDC80, 0xDCFF


def printable(text: str, *, keep: str = "") -> str:
    r"""Escape all characters that are not printable, except those in `keep`.

    The escapes are those of Python (`\x1b`, `\n`, `\u202e`). A byte of a file name that is not
    UTF-8 is shown as that byte (`\xff`).
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in keep else _escape(character)
        for character in text
    )


def lossy(text: str) -> str:
    """A text that UTF-8 can carry: U+FFFD for each byte of a file name that is not UTF-8.

    Messages to clients have this form, as those of the reference do.
    """
    if text.isascii():
        return text
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    except UnicodeEncodeError:  # half of a surrogate pair, which stands for no byte
        return text.encode("utf-8", "replace").decode()


def _escape(character: str) -> str:
    if _FIRST_ESCAPED_BYTE <= ord(character) <= _LAST_ESCAPED_BYTE:
        return f"\\x{ord(character) & 0xFF:02x}"
    return character.encode("unicode_escape").decode("ascii")
