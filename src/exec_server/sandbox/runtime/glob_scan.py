"""The search on the disk for files that match deny globs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Final

from exec_server.errors import InternalError, os_error_text
from exec_server.sandbox.policy.globs import matches_below
from exec_server.sandbox.policy.model import Glob

# Each match becomes a mount of its own. The reference gives up at the same number.
MAX_MATCHES: Final = 8192
# Directory entries examined for one policy. Searching a larger tree takes seconds, which is too
# long for a request; the error asks for a narrower pattern.
MAX_ENTRIES: Final = 2_000_000
# Characters of a path in an error: paths of directories can be longer than those of open(2).
_SHOWN_PATH: Final = 400


def scan(globs: Sequence[Glob]) -> list[str]:
    """The files that match one of the globs, sorted; links and directories are left out.

    The roots must be free of links (see `layout.resolve_globs`). Raises InternalError for too
    many matches, and for a directory that cannot be searched but that a confined process could
    open or pass through.
    """
    found: set[str] = set()
    budget = _Budget()
    for root in dict.fromkeys(glob.root for glob in globs):
        of_root = [glob for glob in globs if glob.root == root]
        for below in _files(root, _max_depth(of_root), budget):
            if any(matches_below(glob, below) for glob in of_root):
                found.add(f"{root.rstrip('/')}/{below}")
                if len(found) > MAX_MATCHES:
                    raise InternalError(
                        f"unreadable globs match more than {MAX_MATCHES} files; "
                        "deny a directory instead"
                    )
    return sorted(found)


class _Budget:
    """Counts down the directory entries that may still be examined."""

    def __init__(self) -> None:
        self._left = MAX_ENTRIES

    def spend(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise InternalError(
                f"unreadable globs would search more than {MAX_ENTRIES} files; "
                "use a longer directory prefix"
            )


def _max_depth(globs: Sequence[Glob]) -> int | None:
    depths = [glob.max_depth for glob in globs]
    limits = [depth for depth in depths if depth is not None]
    return max(limits) if len(limits) == len(depths) else None


def _files(root: str, max_depth: int | None, budget: _Budget) -> Iterator[str]:
    """The relative paths of all files down to `max_depth`; links are not followed."""
    pending = [("", 1)]
    while pending:
        below, depth = pending.pop()
        for name, is_directory in _entries(f"{root}/{below}"):
            budget.spend()
            if not is_directory:
                yield below + name
            elif max_depth is None or depth < max_depth:
                pending.append((f"{below}{name}/", depth + 1))


def _entries(path: str) -> Iterator[tuple[str, bool]]:
    """The entries of a directory but links; none if no confined process can find an entry."""
    try:
        with os.scandir(path) as listing:
            for entry in listing:
                if not entry.is_symlink():
                    yield entry.name, entry.is_dir(follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        if not isinstance(error, PermissionError) or _is_reachable(path):
            raise _unsearchable(path, error) from None


def _unsearchable(path: str, error: OSError) -> InternalError:
    path = path.rstrip("/")
    if len(path) > _SHOWN_PATH:
        path = f"{path[:_SHOWN_PATH]}…"
    return InternalError(
        f"unreadable globs cannot be enforced: {path} cannot be searched: {os_error_text(error)}"
    )


def _is_reachable(path: str) -> bool:
    """Whether a confined process could open files in a closed directory.

    Its owner can change its mode, and other users can pass through it if they know a name.
    """
    directory = path
    while True:
        directory = os.path.dirname(directory)
        try:
            owner = os.lstat(directory).st_uid
        except (FileNotFoundError, NotADirectoryError):
            return False
        except PermissionError:
            continue
        except OSError as error:
            raise _unsearchable(directory, error) from None
        return owner == os.geteuid() or _is_passable(path)


def _is_passable(path: str) -> bool:
    """Whether an entry of a directory, whose path ends with a slash, can be reached by name."""
    try:
        os.stat(f"{path}.")
    except PermissionError:
        return False
    except OSError as error:
        raise _unsearchable(path, error) from None
    return True
