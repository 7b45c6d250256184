"""Patterns in paths of a target, such as `logs/*.gz`; the server looks for the paths that match."""

from __future__ import annotations

import posixpath
import re
import shlex
from typing import TYPE_CHECKING, Final

from exec_server.cli.errors import CommandError
from exec_server.errors import Unsupported

if TYPE_CHECKING:
    from exec_server.client.files import Files


# Paths of one pattern: as many as the server finds.
MAX_MATCHES: Final = 10_000
_PATTERN: Final = r"[*?\[{]"
# A name of a pattern, or an alternative in it, that begins with a dot.
_NAMES_HIDDEN: Final = r"(^|[{,/])\."


def is_pattern(path: str) -> bool:
    """Whether a path has wildcards, if there is no file of this name."""
    return re.search(_PATTERN, path) is not None


async def find_matches(files: Files, path: str) -> list[str]:
    """The paths that a path of the command line means; raises CommandError and RpcError.

    A path that exists is no pattern, whatever characters it has. There may be no match. As in a
    shell, wildcards do not match names that begin with a dot.
    """
    if not is_pattern(path) or await files.exists(path):
        return [path]
    root, pattern = split_pattern(path)
    try:
        found = await files.glob(pattern, root, limit=MAX_MATCHES)
    except Unsupported:
        raise CommandError(
            f"{path}: this server cannot look for patterns (it has no fsGlob); name each path, or "
            "let a shell of the target find them: exec-server exec TARGET -- sh -c "
            + shlex.quote(f"ls -d {path}")
        ) from None
    if found.truncated:
        raise CommandError(f"{path}: more than {MAX_MATCHES} paths match")
    return [posixpath.join(root, each) for each in found if not _is_hidden(each, pattern)]


def _is_hidden(match: str, pattern: str) -> bool:
    """Whether only a wildcard has matched a name with a leading dot.

    With `**` and alternatives that have slashes, names cannot be compared one by one; then a dot
    anywhere in the pattern suffices.
    """
    names, wanted = match.split("/"), pattern.split("/")
    if "**" in pattern or len(names) != len(wanted):
        wanted = [pattern] * len(names)
    return any(
        name.startswith(".") and not re.search(_NAMES_HIDDEN, want)
        for name, want in zip(names, wanted, strict=True)
    )


def split_pattern(path: str) -> tuple[str, str]:
    """The directory before the first name with a wildcard, and the pattern below it."""
    names = path.split("/")
    first = next(index for index, name in enumerate(names) if is_pattern(name))
    root = "/".join(names[:first]) or ("/" if path.startswith("/") else ".")
    return root, "/".join(names[first:])
