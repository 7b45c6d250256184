"""docs/credentials.md: its recipes run as printed, with doubles of the services on loopback."""

from __future__ import annotations

import builtins
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support import internet as module
from tests.support.certificates import make_pair
from tests.support.client import Server, start_server
from tests.support.internet import HOSTS, Internet, internet

_TEXT = (Path(__file__).resolve().parents[2] / "docs" / "credentials.md").read_text()
_RECIPES = dict(re.findall(r"^## ([^\n]*)\n[^#]*?^```python\n(.*?)^```", _TEXT, re.M | re.S))
_GITHUB, _MIRROR = "ghp_" + "Ab3dEf6hIj9l" * 3, "mirror-" + "Ab3dEf6hIj9l" * 2


@pytest.fixture
def double(tmp_path: Path) -> Iterator[Internet]:
    authority = make_pair(tmp_path, "authority")
    pair = make_pair(tmp_path, "double", *HOSTS, issuer=authority)
    with internet(pair.certificate, pair.key) as running:
        yield running


@pytest.fixture
def server(double: Internet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    program = Path(module.__file__).resolve()
    monkeypatch.setenv("EXEC_SERVER_COMMAND", f"{sys.executable} {program} {double.port}")
    (tmp_path / "workspace").mkdir()
    variables = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "SSL_CERT_FILE": str(tmp_path / "authority.pem"),
        "PIP_CONFIG_FILE": "/dev/null",
    }
    with start_server("ours", env=variables, cwd=tmp_path / "workspace") as running:
        yield running


def _run(title: str, server: Server) -> None:
    exec(_RECIPES[title].replace("ws://127.0.0.1:7700", server.url), {"__name__": "__main__"})


def test_the_recipes() -> None:
    assert list(_RECIPES) == [
        "A GitHub token that no command holds",
        "A private package mirror",
        "A program that is asked about new hosts",
    ]


def test_a_github_token(
    server: Server,
    double: Internet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    double.secrets |= dict.fromkeys(("api.github.com", "github.com"), _GITHUB)
    double.pages["api.github.com/user"] = b'{"login": "octocat"}'
    double.add_repository("github.com", "/example/demo.git", tmp_path)
    monkeypatch.setenv("GH_TOKEN", _GITHUB)
    _run("A GitHub token that no command holds", server)
    _run("A GitHub token that no command holds", server)  # replaces its clone
    assert capsys.readouterr().out == '{"login": "octocat"}\nfirst\n\n' * 2
    assert {secret for _, _, secret in double.requests} == {_GITHUB, ""}  # git asks without first
    config = (tmp_path / "workspace" / "demo" / ".git" / "config").read_text()
    assert "ghp_masked" in config
    assert _GITHUB not in config


@pytest.mark.skipif(shutil.which("npm") is None, reason="this machine has no npm")
def test_a_package_mirror(
    server: Server, double: Internet, monkeypatch: pytest.MonkeyPatch
) -> None:
    double.secrets["packages.example.com"] = _MIRROR
    double.add_packages("packages.example.com")
    monkeypatch.setenv("MIRROR_TOKEN", _MIRROR)
    _run("A private package mirror", server)
    paths = [path for _, path, secret in double.requests if secret == _MIRROR]
    assert {"/simple/demo/", "/npm/demo"} <= set(paths)
    assert {host for host, _, _ in double.requests} == {"packages.example.com"}


def test_questions_about_hosts(
    server: Server,
    double: Internet,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    double.pages["files.example.org/data"] = b"some data"
    questions = []

    def answer(question: str) -> str:
        questions.append(question)
        return "y" if "files.example.org" in question else ""

    monkeypatch.setattr(builtins, "input", answer)
    _run("A program that is asked about new hosts", server)
    assert capsys.readouterr().out == (
        "https://files.example.org/data some data\nhttps://tracker.example.net/ refused\n"
    )
    assert questions == [
        "allow files.example.org:443? [y/N] ",
        "allow tracker.example.net:443? [y/N] ",
    ]
    assert {host for host, _, _ in double.requests} == {"files.example.org"}


def test_a_question_that_nobody_answers(
    server: Server, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def answer(question: str) -> str:
        raise EOFError

    monkeypatch.setattr(builtins, "input", answer)
    _run("A program that is asked about new hosts", server)
    shown = capfd.readouterr()
    assert shown.out == (
        "https://files.example.org/data refused\nhttps://tracker.example.net/ refused\n"
    )
    assert "Traceback" not in shown.err
