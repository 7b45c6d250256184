"""Parses unified diffs, as `diff -u` and `git diff` write them.

The counts of a hunk end it, if they are right; otherwise the next hunk or file does, as after a
bare `@@`. Lines of a hunk keep the end CRLF, unless the diff as a whole has it. Without a git
header names follow `---` and `+++`, less `a/` and `b/` if both are there. Binary patches, copies
and changes of the file type are refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from exec_server.errors import PatchDoesNotApply
from exec_server.patching.hunks import FilePatch, Hunk, HunkLine, LineKind

_HUNK: Final = re.compile(r"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@")
_ESCAPE: Final = re.compile(r'\\([abtnvfr"\\]|[0-7]{1,3})')
_ESCAPED: Final = dict(zip("abtnvfr", "\a\b\t\n\v\f\r", strict=True))
_NULL: Final = "/dev/null"
_REFUSED: Final = ("GIT binary patch", "Binary files ", "copy from ")
_REGULAR_FILE: Final = 0o100000
_KINDS: Final[dict[str, LineKind]] = {" ": " ", "-": "-", "+": "+", "": " ", "\r": " "}
_SIGNATURE: Final = "-- "  # below the last hunk of `git format-patch`


@dataclass(slots=True)
class _Header:
    """The lines before the hunks of a file."""

    old: str | None = None
    new: str | None = None
    renamed_from: str | None = None
    renamed_to: str | None = None
    is_new: bool = False
    is_deleted: bool = False
    mode: int | None = None
    git_names: str = ""


def parse(text: str) -> list[FilePatch]:
    """The changes of a diff; raises PatchDoesNotApply with the number of the wrong line."""
    return _Parser(text.removesuffix("\n").split("\n")).files()


class _Parser:
    def __init__(self, lines: list[str]) -> None:
        self._lines = lines
        self._next = 0
        self._is_crlf = False  # the diff itself, and not only lines of the file

    def files(self) -> list[FilePatch]:
        files = []
        while self._find_header():
            files.append(self._file())
        if not files:
            raise PatchDoesNotApply(
                "the text is neither a unified diff ('--- OLD', '+++ NEW', '@@ … @@') nor a patch "
                "that begins with '*** Begin Patch'"
            )
        return files

    def _line(self) -> str | None:
        return self._lines[self._next] if self._next < len(self._lines) else None

    def _find_header(self) -> bool:
        """Skip the text before the next file, like the message of a commit."""
        while (line := self._line()) is not None:
            if line.startswith("diff --git ") or self._is_plain_header():
                return True
            if _HUNK.match(line):
                raise self._failure("a hunk without '--- OLD' and '+++ NEW' before it")
            self._next += 1
        return False

    def _is_plain_header(self) -> bool:
        following = self._lines[self._next : self._next + 2]
        return [line[:4] for line in following] == ["--- ", "+++ "]

    def _file(self) -> FilePatch:
        header = self._header()
        hunks = []
        while (line := self._line()) is not None and line.startswith("@@"):
            hunks.append(self._hunk())
        return self._file_patch(header, tuple(hunks))

    def _header(self) -> _Header:
        header = _Header()
        self._is_crlf = self._lines[self._next].endswith("\r")
        is_git = False
        while (line := self._line()) is not None:
            if line.startswith("diff --git "):
                if is_git:
                    break  # the next file; this one has no hunks
                is_git = True
                header.git_names = line.removeprefix("diff --git ").removesuffix("\r")
            elif self._is_plain_header():
                header.old, header.new = (
                    _file_name(name[4:]) for name in self._lines[self._next : self._next + 2]
                )
                self._next += 2
                break
            elif not is_git or not self._read_git_line(header, line.removesuffix("\r")):
                break
            self._next += 1
        return header

    def _read_git_line(self, header: _Header, line: str) -> bool:
        """Read one line of git's extended header; False if it is none."""
        name, _, value = line.rpartition(" ")
        if line.startswith(_REFUSED):
            raise self._failure(f"'{line}' cannot be applied: only text changes can")
        if line.startswith("rename from "):
            header.renamed_from = _unquoted(line.removeprefix("rename from "))
        elif line.startswith("rename to "):
            header.renamed_to = _unquoted(line.removeprefix("rename to "))
        elif name in ("new file mode", "new mode", "deleted file mode", "old mode"):
            mode = self._mode(value)
            header.is_new = header.is_new or name == "new file mode"
            header.is_deleted = header.is_deleted or name == "deleted file mode"
            if name.startswith("new"):
                header.mode = mode
        else:
            return line.startswith(("index ", "similarity index ", "dissimilarity index "))
        return True

    def _mode(self, text: str) -> int:
        try:
            mode = int(text, 8)
        except ValueError:
            raise self._failure(f"'{text}' is not a mode") from None
        if mode & ~0o777 != _REGULAR_FILE:
            raise self._failure(f"mode {text} is not that of a regular file")
        return mode & 0o777

    def _file_patch(self, header: _Header, hunks: tuple[Hunk, ...]) -> FilePatch:
        old, new = header.renamed_from, header.renamed_to
        if old is None or new is None:
            old, new = self._names(header)
        if header.is_new or (hunks and header.old == _NULL):
            return FilePatch("add", new, hunks, mode=header.mode)
        if header.is_deleted or (hunks and header.new == _NULL):
            return FilePatch("delete", old, hunks)
        if not hunks and old == new and header.mode is None:
            raise self._failure(f"the diff of {old} has no hunk", line=self._next)
        return FilePatch("update", old, hunks, None if old == new else new, header.mode)

    def _names(self, header: _Header) -> tuple[str, str]:
        """The names of the file before and after, without the prefixes `a/` and `b/`."""
        if header.old is None or header.new is None:
            return self._git_names(header.git_names)
        old, new = header.old, header.new
        if old == _NULL:
            old = new if not new.startswith("b/") else f"a/{new[2:]}"
        elif new == _NULL:
            new = old if not old.startswith("a/") else f"b/{old[2:]}"
        if old.startswith("a/") and new.startswith("b/"):
            return old[2:], new[2:]
        # Plain `diff -u OLD NEW`: the file to change has the new name.
        return new, new

    def _git_names(self, names: str) -> tuple[str, str]:
        """The names of `diff --git`, which are the same for a file that is not renamed."""
        if names.startswith('"'):
            quoted, _, _ = names[1:].partition('" ')
            name = _unquoted(f'"{quoted}"')
        else:
            name = names[: len(names) // 2]
        if not name.startswith("a/"):
            raise self._failure("'diff --git' needs names that begin with a/ and b/")
        return name[2:], name[2:]

    def _hunk(self) -> Hunk:
        header = self._lines[self._next]
        self._next += 1
        match = _HUNK.match(header)
        if match is None:  # a bare `@@`, perhaps with a line above the hunk
            anchor = header.removesuffix("\r").strip("@").strip()
            return Hunk(self._loose_lines(), (anchor,) if anchor else (), is_loose=True)
        # Without old lines the number is that of the line before the hunk.
        first = int(match[1]) if match[2] != "0" else int(match[1]) + 1
        begin = self._next
        lines = self._counted_lines(int(match[2] or 1), int(match[4] or 1))
        if lines is not None:
            return Hunk(lines, first_line=first)
        self._next = begin
        lines = self._loose_lines()
        is_insertion = all(line.kind == "+" for line in lines)
        return Hunk(
            lines,
            first_line=first if match[2] == "0" or not is_insertion else None,
            is_loose=not (is_insertion and match[2] == "0"),
        )

    def _counted_lines(self, old: int, new: int) -> tuple[HunkLine, ...] | None:
        """As many lines as the header says; None if the hunk has others."""
        lines: list[HunkLine] = []
        while old or new:
            text = self._line()
            if text is None or self._begins_git_file() or text[:1] not in _KINDS:
                return None
            line = self._hunk_line()
            lines.append(line)
            old -= line.kind != "+"
            new -= line.kind != "-"
            if old < 0 or new < 0:
                return None
            self._mark_missing_newline(lines)
        following = self._line()
        goes_on = following is not None and following[:1] in (" ", "-", "+")
        return None if goes_on and not self._is_end_of_hunk() else tuple(lines)

    def _loose_lines(self) -> tuple[HunkLine, ...]:
        """The lines until the next hunk or file, without empty ones at the end."""
        lines: list[HunkLine] = []
        size = 0
        while (text := self._line()) is not None and not self._is_end_of_hunk():
            lines.append(self._hunk_line())
            self._mark_missing_newline(lines)
            if text not in ("", "\r"):
                size = len(lines)
        if all(line.kind == " " for line in lines):
            raise self._failure("the hunk before it changes nothing")
        return tuple(lines[:size])

    def _is_end_of_hunk(self) -> bool:
        text = self._lines[self._next]
        return (
            text == _SIGNATURE or text.startswith(("@@", "diff --git ")) or self._is_plain_header()
        )

    def _begins_git_file(self) -> bool:
        """Whether the header of another file is here, and no changed lines that look like it."""
        lines = self._lines[self._next : self._next + 3]
        return len(lines) == 3 and all(
            line.startswith(beginning)
            for line, beginning in zip(lines, ("--- a/", "+++ b/", "@@"), strict=True)
        )

    def _hunk_line(self) -> HunkLine:
        text = self._lines[self._next]
        if self._is_crlf:
            text = text.removesuffix("\r")
        kind = _KINDS.get(text[:1])
        if kind is None:
            raise self._failure("each line of a hunk must begin with ' ', '-' or '+'")
        self._next += 1
        return HunkLine(kind, text if text == "\r" else text[1:])

    def _mark_missing_newline(self, lines: list[HunkLine]) -> None:
        following = self._line()
        if following is not None and following.startswith("\\ "):
            lines[-1] = HunkLine(lines[-1].kind, lines[-1].text, has_newline=False)
            self._next += 1

    def _failure(self, reason: str, *, line: int | None = None) -> PatchDoesNotApply:
        return PatchDoesNotApply(
            f"line {self._next + 1 if line is None else line} of the diff: {reason}"
        )


def _file_name(text: str) -> str:
    """A name after `---` or `+++`, without the time that `diff -u` writes behind a tab."""
    return _unquoted(text.removesuffix("\r").partition("\t")[0])


def _unquoted(name: str) -> str:
    if len(name) < 2 or not (name.startswith('"') and name.endswith('"')):
        return name

    def decode(match: re.Match[str]) -> str:
        escape = match[1]
        return chr(int(escape, 8) & 0xFF) if escape.isdigit() else _ESCAPED.get(escape, escape)

    raw = _ESCAPE.sub(decode, name[1:-1])
    try:
        return raw.encode("latin-1").decode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return raw  # it has characters that git would have escaped
