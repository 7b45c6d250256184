"""CapabilityCache: answers of capabilities/discoverV2, kept while their directories do not change.

Theory of operation. A thread first watches every directory below the roots, then reads the files:
a change after its directory was watched is reported, and one before it is read. Of a root that does
not exist, the nearest directory above is watched for its name. Files behind links may lie
elsewhere, and a network file system reports nothing, so an answer is never older than some seconds.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from exec_server.errors import RpcError
from exec_server.filesystem.inotify import DirectoryListener, Inotify
from exec_server.filesystem.watch import is_unreliable
from exec_server.protocol.files import WalkOptions
from exec_server.protocol.paths import PathUri

if TYPE_CHECKING:  # slow imports stay out of start-up
    from exec_server.codex.capability_files import Files

# A change that no watch reports shows up after this time; the reference takes as long.
MAX_AGE_SECONDS: Final = 10.0
# Answers for different sandboxes: clients have a few. The one that was not used for the longest
# time is dropped.
MAX_ANSWERS: Final = 8
# A longer answer is not kept.
ANSWER_BYTES: Final = 4 * 1_048_576
# Directories that are watched for one answer. If there are more, it is not kept.
MAX_WATCHED: Final = 2048

_TREE: Final = WalkOptions(
    max_depth=9, max_directories=MAX_WATCHED, max_entries=50_000, follow_directory_symlinks=True
)


class TreeListener(DirectoryListener):
    """Notices any change of some directories."""

    def __init__(self) -> None:
        super().__init__()
        self.is_changed = False
        self._trees: set[int] = set()  # descriptors of directories in which every name matters
        self._names: dict[int, set[bytes]] = {}  # in others these do

    # ---- in a thread ------------------------------------------------------------------

    def watch(self, uris: list[str], files: Files, inotify: Inotify) -> bool:
        """Watch the directories at and below some paths; False if not all can be. Blocking."""
        try:
            return all(self._watch_tree(PathUri.from_text(uri), files, inotify) for uri in uris)
        except (OSError, RpcError):
            return False

    def _watch_tree(self, root: PathUri, files: Files, inotify: Inotify) -> bool:
        path = root.native()
        above = path
        while not os.path.isdir(above):
            above, name = os.path.split(above)
            if os.path.isdir(above):
                descriptor = inotify.listen(self, above, "")
                self._names.setdefault(descriptor, set()).add(os.fsencode(name))
        if above != path:
            return not os.path.isdir(path)  # it may have been created before it was watched
        self._trees.add(inotify.listen(self, path, ""))
        found = files.walk(root, _TREE)
        for entry in found.entries:
            if entry.kind == "directory":
                directory = PathUri.from_text(entry.path).native()
                self._trees.add(inotify.listen(self, directory, ""))
        return not found.truncated and not is_unreliable(path)

    # ---- in the event loop ------------------------------------------------------------

    def on_event(self, descriptor: int, mask: int, name: bytes) -> None:
        is_known = name and descriptor not in self._trees
        if not is_known or name in self._names.get(descriptor, ()):
            self.is_changed = True

    def on_overflow(self) -> None:
        self.is_changed = True


class CapabilityCache:
    """For the event loop, except `discover`."""

    def __init__(self) -> None:
        self._answers: OrderedDict[bytes, tuple[float, bytes, TreeListener]] = OrderedDict()

    def get(self, key: bytes, inotify: Inotify) -> bytes | None:
        """The JSON text of an answer that is still right."""
        if key not in self._answers:
            return None
        inotify.read_events()  # of a change that the client has made before its request
        made, text, listener = self._answers[key]
        if listener.is_changed or time.monotonic() - made > MAX_AGE_SECONDS:
            self._drop(key, inotify)
            return None
        self._answers.move_to_end(key)
        return text

    def put(self, key: bytes, text: bytes, listener: TreeListener, inotify: Inotify) -> None:
        """Keep an answer while its listener notices no change."""
        if key in self._answers:
            self._drop(key, inotify)
        if len(text) > ANSWER_BYTES:
            inotify.remove_listener_later(listener)
            return
        self._answers[key] = time.monotonic(), text, listener
        if len(self._answers) > MAX_ANSWERS:
            self._drop(next(iter(self._answers)), inotify)

    def _drop(self, key: bytes, inotify: Inotify) -> None:
        _, _, listener = self._answers.pop(key)
        inotify.remove_listener_later(listener)


def discover(
    variables: Mapping[str, str], files: Files, inotify: Inotify, listener: TreeListener
) -> tuple[bytes, bool]:
    """The JSON text of an answer, and whether the listener notices all changes. Blocking."""
    from exec_server.codex import installed

    skill_roots, cache = installed.roots(variables)
    is_watched = listener.watch([*(uri for _, uri in skill_roots), cache], files, inotify)
    return msgspec.json.encode(installed.discover(variables, files)), is_watched
