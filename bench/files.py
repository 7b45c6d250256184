"""Workloads about files."""

import base64
import os

from bench.client import uri
from bench.stage import Stage, expect, sample, shared_file

SMALL_BYTES = 1024
LARGE_BYTES = 32 * 1024 * 1024
BLOCK_BYTES = 1024 * 1024
DIRECTORY_ENTRIES = 2000
WALK_FOLDERS = 50
WALK_FILES = 99  # in each folder, so that the walk finds 5,000 entries


def read_small(stage: Stage) -> list[float]:
    """One small file, again and again."""
    path = shared_file(stage, "small", SMALL_BYTES)
    return _repeat(stage, "fs/readFile", {"path": uri(path)}, SMALL_BYTES * 4 // 3)


def metadata(stage: Stage) -> list[float]:
    """The metadata of one file."""
    path = shared_file(stage, "small", SMALL_BYTES)
    return _repeat(stage, "fs/getMetadata", {"path": uri(path)}, 60)


def read_large(stage: Stage) -> list[float]:
    """A large file in one answer; in bytes per second."""
    path = shared_file(stage, "large", LARGE_BYTES)
    taken = _repeat(stage, "fs/readFile", {"path": uri(path)}, LARGE_BYTES * 4 // 3)
    return [LARGE_BYTES / seconds for seconds in taken]


def directory(stage: Stage) -> list[float]:
    """The entries of one large directory."""
    folder = os.path.join(stage.shared, "directory")
    if not os.path.exists(folder):
        _fill(folder, DIRECTORY_ENTRIES)
    return _repeat(stage, "fs/readDirectory", {"path": uri(folder)}, DIRECTORY_ENTRIES * 40)


def walk(stage: Stage) -> list[float]:
    """A tree of folders and files."""
    folder = os.path.join(stage.shared, "walk")
    if not os.path.exists(folder):
        os.mkdir(folder)
        for number in range(WALK_FOLDERS):
            _fill(os.path.join(folder, f"folder-{number:03}"), WALK_FILES)
    options = {
        "maxDepth": 8,
        "maxDirectories": 10_000,
        "maxEntries": 50_000,
        "followDirectorySymlinks": False,
    }
    entries = WALK_FOLDERS * (WALK_FILES + 1)
    return _repeat(stage, "fs/walk", {"path": uri(folder), "options": options}, entries * 60)


def _fill(folder: str, count: int) -> None:
    os.mkdir(folder)
    for number in range(count):
        with open(os.path.join(folder, f"file-{number:04}.txt"), "wb"):
            pass


def _repeat(stage: Stage, method: str, params: dict[str, object], minimum: int) -> list[float]:
    """Times one request sent over and over, and checks that its answers are long enough."""
    connection = stage.connection
    calls = [connection.prepare(method, params) for _ in range(stage.samples)]
    shortest = connection.call(method, params)

    def operation(number: int) -> None:
        nonlocal shortest
        length = connection.exchange(*calls[number])
        shortest = min(shortest, length)

    taken = sample(stage, operation)
    expect(shortest >= minimum, f"{method} answered with {shortest} bytes only")
    return taken


def write_over(stage: Stage) -> list[float]:
    """A small file written again in place of its old content."""
    path = os.path.join(stage.folder, "over")
    params = [_write_params(path)] * stage.samples
    return _write(stage, params)


def write_new(stage: Stage) -> list[float]:
    """A small file that did not exist before; it stays until the end of the run.

    Before ext4 reuses an inode it looks at each one that was removed within minutes. If the files
    of a turn were removed, the next turn would measure that, several times as long as a request.
    """
    paths = [os.path.join(stage.folder, stage.fresh_name("new")) for _ in range(stage.samples)]
    taken = _write(stage, [_write_params(path) for path in paths])
    for path in paths[: len(taken)]:
        expect(os.path.getsize(path) == SMALL_BYTES, f"{path} is not complete")
    return taken


def _write_params(path: str) -> dict[str, object]:
    return {"path": uri(path), "dataBase64": base64.b64encode(bytes(SMALL_BYTES)).decode()}


def _write(stage: Stage, params: list[dict[str, object]]) -> list[float]:
    connection = stage.connection
    calls = [connection.prepare("fs/writeFile", each) for each in params]
    return sample(stage, lambda number: connection.exchange(*calls[number]))


def read_blocks(stage: Stage) -> list[float]:
    """A large file in blocks, each asked for after the one before; in bytes per second."""
    connection = stage.connection
    path = shared_file(stage, "large", LARGE_BYTES)
    blocks = []
    for offset in range(0, LARGE_BYTES, BLOCK_BYTES):
        params = {"handleId": "blocks", "offset": offset, "len": BLOCK_BYTES}
        blocks.append(connection.prepare("fs/readBlock", params))
    connection.call("fs/open", {"handleId": "blocks", "path": uri(path)})

    def operation(_: int) -> None:
        for request, prefix in blocks:
            connection.exchange(request, prefix)

    taken = sample(stage, operation)
    connection.call("fs/close", {"handleId": "blocks"})
    return [LARGE_BYTES / seconds for seconds in taken]
