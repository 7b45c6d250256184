"""The manual pages; roff itself checks them where it is installed."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from exec_server.cli.help import pages
from exec_server.cli.table import COMMANDS

PAGES = pages()


def test_every_visible_command_has_a_page() -> None:
    expected = {f"exec-server-{each.name}.1" for each in COMMANDS.values() if each.is_visible}
    assert expected | {"exec-server.1", "exec-server-sandbox-run.1"} <= set(PAGES)
    assert "exec-server-complete-path.1" not in PAGES


@pytest.mark.parametrize("name", PAGES)
def test_pages_have_the_usual_sections(name: str) -> None:
    text = PAGES[name]
    assert text.isascii()
    sections = re.findall(r"^\.SH (.*)$", text, re.MULTILINE)
    assert sections[:3] == ["NAME", "SYNOPSIS", "DESCRIPTION"]
    title = name.removesuffix(".1").replace("-", r"\-")
    assert text.startswith(f".TH {title.upper()} 1 ")
    assert f"\n{title} \\- " in text


def test_text_is_printed_as_it_is() -> None:
    text = PAGES["exec-server-exec.1"]
    assert r"\-\-sandbox POLICY" in text
    assert r"\(aqecho $HOME; exit 3\(aq" in text
    assert "\n.SH EXAMPLES\n.nf\n" in text


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_roff_has_no_warnings() -> None:
    for name, text in PAGES.items():
        ended = subprocess.run(
            ["groff", "-man", "-Tutf8", "-ww"], input=text.encode(), capture_output=True, check=True
        )
        assert ended.stderr == b"", name
        assert b"SYNOPSIS" in re.sub(rb"\x1b\[[0-9;]*m|.\x08", b"", ended.stdout)
