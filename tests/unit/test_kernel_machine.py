"""The parts of `make test-kernel` that need no virtual machine."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from tests.kernel import archive, machine, packages


def test_an_archive_has_the_files_of_its_trees(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "folder").mkdir(parents=True)
        (tmp_path / name / "folder" / name).write_text(name)
    (tmp_path / "one/program").write_bytes(b"#!" + bytes(1001))
    (tmp_path / "one/program").chmod(0o750)
    (tmp_path / "one/link").symlink_to("folder/one")
    image = io.BytesIO()
    for name in ("one", "two"):
        archive.add_tree(image, tmp_path / name)
    archive.add_end(image)
    found = _entries(image.getvalue())
    assert found == {
        "folder": (0o40755, b""),
        "folder/one": (0o100644, b"one"),
        "folder/two": (0o100644, b"two"),
        "link": (0o120777, b"folder/one"),
        "program": (0o100750, b"#!" + bytes(1001)),
    }


def _entries(data: bytes) -> dict[str, tuple[int, bytes]]:
    """The mode and content of each file, as the kernel reads them (initramfs buffer format)."""
    found: dict[str, tuple[int, bytes]] = {}
    position = 0
    while True:
        assert data[position : position + 6] == b"070701"
        fields = [
            int(data[position + start : position + start + 8], 16) for start in range(6, 110, 8)
        ]
        mode, size, length = fields[1], fields[6], fields[11]
        name = data[position + 110 : position + 110 + length].rstrip(b"\0").decode()
        position += -(-(110 + length) // 4) * 4
        if name == "TRAILER!!!":
            assert position == len(data)
            return found
        found[name] = (mode, data[position : position + size])
        position += -(-size // 4) * 4


@pytest.mark.parametrize(
    ("console", "status"),
    [
        ("1 passed\r\n\r\nexec-server-kernel: status 0\r\n", 0),
        ("exec-server-kernel: status 1\n[ 9.1] reboot: Power down\n", 1),
        ("says exec-server-kernel: status 0\n", None),
        ("[ 3.2] Kernel panic\n", None),
    ],
)
def test_the_status_is_in_a_line_of_its_own(console: str, status: int | None) -> None:
    output = io.StringIO()
    assert machine.pass_on(io.StringIO(console, newline=""), output) == status
    assert "\r" not in output.getvalue()


@pytest.mark.parametrize(
    ("program", "status", "text"),
    [
        ("echo exec-server-kernel: status 0", 0, ""),
        ("echo exec-server-kernel: status 3", 3, ""),
        ("echo panic", 1, "ended without a status"),
        ("exec sleep 60", 1, "stopped after its time"),
    ],
)
def test_a_machine_without_a_status_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, status: int, text: str
) -> None:
    qemu = tmp_path / "qemu"
    qemu.write_text(f"#!/bin/sh\n{program}\n")
    qemu.chmod(0o755)
    monkeypatch.setattr(machine, "QEMU", str(qemu))
    output = io.StringIO()
    seconds = 0.2 if "sleep" in program else 60
    paths = (tmp_path / "kernel", tmp_path / "image")
    assert machine.boot(*paths, accel="tcg", seconds=seconds, output=output) == status
    assert text in output.getvalue()


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "QEMU", str(tmp_path / "qemu"))
    with pytest.raises(packages.Unavailable, match="qemu is not installed"):
        machine.boot(tmp_path, tmp_path, accel="tcg", seconds=1, output=io.StringIO())


def test_requirements_are_those_of_the_tests() -> None:
    root = Path(__file__).parents[2]
    found = packages._requirements(root / "pyproject.toml")
    assert any(each.startswith("pytest>=") for each in found)
    assert any(each.startswith("msgspec>=") for each in found)
    assert not [each for each in found if ";" in each or each.startswith(("mypy", "ruff"))]
