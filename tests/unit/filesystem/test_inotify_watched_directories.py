"""WatchedDirectories: names by descriptor, and those below a directory."""

from __future__ import annotations

import pytest

from exec_server.filesystem.inotify import WatchedDirectories, remove_below

pytestmark = pytest.mark.quick

_NAMES = ["", "a/", "a/b/", "a/b/c/", "a-b/", "a.b/", "a0/", "ab/", "\udcff/", "\udcff/x/"]


def _directories(names: list[str]) -> WatchedDirectories:
    directories = WatchedDirectories()
    for descriptor, name in enumerate(names):
        directories.add(descriptor, name)
    return directories


@pytest.mark.parametrize("name", [*_NAMES[1:], "missing/", "a/missing/"])
def test_those_below_a_directory_are_removed(name: str) -> None:
    below = [each for each, other in enumerate(_NAMES) if other.startswith(name)]
    rest = sorted(other for other in _NAMES if not other.startswith(name))
    directories = _directories(_NAMES)
    assert sorted(directories.remove_below(name)) == below
    assert (directories.names(), len(directories)) == (rest, len(rest))
    assert [directories.get(each) for each in below] == [None] * len(below)
    names = sorted(_NAMES)
    remove_below(names, name)
    assert names == rest


def test_a_directory_gets_another_name() -> None:
    directories = _directories(["", "a/"])
    directories.add(1, "b/")
    assert (directories.get(1), directories.names()) == ("b/", ["", "b/"])
    directories.remove(1)
    directories.remove(1)
    assert directories.names() == [""]


def test_two_directories_have_had_one_name() -> None:
    directories = _directories(["", "a/", "a/"])
    assert directories.remove_below("a/") == [1, 2]
    assert directories.names() == [""]


class _Counted(str):
    """A name that counts its comparisons."""

    comparisons = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        _Counted.comparisons += 1
        return str.__eq__(self, other)

    def __lt__(self, other: str) -> bool:
        _Counted.comparisons += 1
        return str.__lt__(self, other)

    def __gt__(self, other: str) -> bool:
        _Counted.comparisons += 1
        return str.__gt__(self, other)


def test_one_of_many_directories_is_found_without_a_look_at_all() -> None:
    directories = _directories([_Counted(f"{index:04}/") for index in range(4096)])
    _Counted.comparisons = 0
    assert directories.remove_below("2000/") == [2000]
    assert directories.get(2001) == "2001/"
    assert 0 < _Counted.comparisons < 100
