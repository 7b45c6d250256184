"""`exec-server targets`: the list, and changes of the file."""

from __future__ import annotations

import errno
import json
import stat
from pathlib import Path

import pytest

from exec_server.cli import main, named_targets
from exec_server.cli.info import build_parser
from exec_server.cli.named_targets import without_table
from exec_server.client.targets import AccessOptions, load_targets


def test_targets_are_listed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    file = tmp_path / "exec-server" / "targets.toml"
    assert main.run_client("targets", []) == 0
    out, err = capfd.readouterr()
    assert (out, err) == (
        "",
        f"exec-server: {file} defines no targets; see `exec-server targets -h`\n",
    )
    file.parent.mkdir()
    file.write_text('[b]\nurl = "ws://h"\n[long]\nstdio = "x y"\n')
    assert main.run_client("targets", []) == 0
    assert capfd.readouterr().out == "b     ws://h\nlong  stdio:x y\n"
    assert main.run_client("targets", ["--names"]) == 0
    assert capfd.readouterr().out == "b\nlong\n"
    assert main.run_client("targets", ["--json"]) == 0
    assert json.loads(capfd.readouterr().out) == [
        {"name": "b", "address": "ws://h"},
        {"name": "long", "address": "stdio:x y"},
    ]
    assert main.run_client("targets", ["--json", "--names"]) == 2
    capfd.readouterr()
    assert main.run_client("targets", ["list"]) == 2
    assert "; without a verb the targets are listed\n" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("entry", "shown"),
    [
        ('url = "wss://me:pass@h:1/a?token=abc&x=1"', "wss://***@h:1/a?token=***&x=***"),
        ('url = "wss://pass@h"', "wss://***@h"),
        ('url = "wss://me:p@ s@h/"', "wss://***@h/"),
        ('url = "wss://h?abc#def"', "wss://h?***#***"),
        ('url = "wss://h:80/a@b"', "wss://h:80/a@b"),
        ('url = "unix:/run/a?b=c"', "unix:/run/a?b=c"),
        ('url = "relay:https://me:pass@r/e"', "relay:https://***@r/e"),
        ('stdio = ["go", "wss://me:pass@h?a=b", "c?d=e"]', "stdio:go 'wss://***@h?a=***' 'c?d=e'"),
    ],
)
def test_secrets_in_addresses_are_not_shown(
    entry: str,
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "exec-server").mkdir()
    (tmp_path / "exec-server/targets.toml").write_text(f"[b]\n{entry}\n")
    assert main.run_client("targets", []) == 0
    assert capfd.readouterr().out == f"b  {shown}\n"
    assert main.run_client("targets", ["--json"]) == 0
    assert json.loads(capfd.readouterr().out) == [{"name": "b", "address": shown}]


# ---- changes --------------------------------------------------------------------------

_WRITTEN = """\
# my machines

[build]  # the big one
url = "wss://build.example.net:7700"
pin = [
  "sha256:00",
]
# until spring

# behind the lab's door
[ "lab.1" ]
stdio = "ssh lab"
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where targets.toml belongs; it is not there yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "config" / "exec-server" / "targets.toml"


def _add(*words: str) -> int:
    return main.run_client("targets", ["add", *words])


def test_a_first_target_is_added(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert _add("build", "ws://127.0.0.1:7700") == 0
    assert capfd.readouterr().out == (
        f"Added build to {file}. Try it:\n"
        "  exec-server info build\n"
        "  exec-server exec build -- uname -a\n"
    )
    assert file.read_text() == '[build]\nurl = "ws://127.0.0.1:7700"\n'
    assert [stat.S_IMODE(path.stat().st_mode) for path in (file, file.parent)] == [0o600, 0o700]


def test_flags_become_keys(file: Path, tmp_path: Path) -> None:
    (tmp_path / "t").write_text("secret\n")
    pin, other = f"sha256:{'ab' * 32}", f"sha256:{'cd' * 32}"
    flags = ("--token-file", "t", "--pin", pin, "--wait", "30")
    assert _add("build", "wss://h:7700", *flags) == 0
    assert _add("b.2", "ws://h", "--token-env", "T", "--allow-insecure-token") == 0
    assert _add("far", "relay:https://r/e", "--pin", pin, "--pin", other) == 0
    assert _add("lab", "stdio:ssh 'a b' exec-server --listen stdio") == 0
    known = load_targets()
    assert known["build"].access == AccessOptions(
        token_file=str(tmp_path / "t"), pin=(pin,), wait=30
    )
    assert known["b.2"].access == AccessOptions(token_env="T", allow_insecure_token=True)
    assert (known["far"].registry, known["far"].access.pin) == ("https://r", (pin, other))
    assert known["lab"].argv == ("ssh", "a b", "exec-server", "--listen", "stdio")


def test_a_target_is_added_below_the_others(file: Path) -> None:
    file.parent.mkdir(parents=True)
    file.write_text(_WRITTEN)
    file.chmod(0o640)
    assert _add("new", "ws://h") == 0
    assert file.read_text() == f'{_WRITTEN}\n[new]\nurl = "ws://h"\n'
    assert stat.S_IMODE(file.stat().st_mode) == 0o640


def test_a_target_is_replaced_in_its_place_and_only_on_request(
    file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file.parent.mkdir(parents=True)
    file.write_text(_WRITTEN)
    assert _add("build", "ws://h") == 2
    assert f"{file} has a target `build` already; --force replaces it" in capfd.readouterr().err
    assert file.read_text() == _WRITTEN
    assert _add("--force", "build", "ws://h") == 0
    start, end = _WRITTEN.index("[build]"), _WRITTEN.index("# until")
    assert file.read_text() == f'{_WRITTEN[:start]}[build]\nurl = "ws://h"\n{_WRITTEN[end:]}'


@pytest.mark.parametrize(
    ("names", "left"),
    [
        (["build"], '# my machines\n\n# until spring\n\n# behind the lab\'s door\n[ "lab.1" ]\n'),
        (["lab.1"], "# until spring\n\n# behind the lab's door\n"),
        (
            ["build", "lab.1", "build"],
            "# my machines\n\n# until spring\n\n# behind the lab's door\n",
        ),
    ],
)
def test_targets_are_removed_and_comments_stay(
    names: list[str], left: str, file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file.parent.mkdir(parents=True)
    file.write_text(_WRITTEN)
    assert main.run_client("targets", ["remove", *names]) == 0
    text = file.read_text()
    assert left in text
    assert not set(names) & set(load_targets())
    assert capfd.readouterr().out == f"Removed {', '.join(dict.fromkeys(names))} from {file}.\n"


def test_blank_lines_do_not_pile_up() -> None:
    text = '[a]\nurl = "x"\n\n[b]\nurl = "x"\n\n[c]\nurl = "x"\n'
    assert without_table(text, "b") == '[a]\nurl = "x"\n\n[c]\nurl = "x"\n'
    assert without_table(text, "a") == '[b]\nurl = "x"\n\n[c]\nurl = "x"\n'
    assert without_table(text, "c") == '[a]\nurl = "x"\n\n[b]\nurl = "x"\n'
    assert without_table("[a]\r\nurl = 'x'\r\n", "a") == ""
    assert without_table(text, "d") == text
    with_list = '[a]\nstdio = [\n  "x", # [\n[\n'  # not TOML any more, and no heading
    assert without_table(f"{with_list}", "a") == ""


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("a b", "ws://h"), "`a b`: a name begins with a letter or digit"),
        (("relay", "ws://h"), "`relay`: a name begins with"),
        (("a", "h:7700"), "did you mean ws://h:7700?"),
        (("a", "http://h"), "did you mean ws://h?"),
        (("a", "known"), "`known` is the name of a target; write an address"),
        (("a", "ws://"), "invalid exec-server URL"),
        (("a", "stdio:"), "no command after stdio"),
        (("a", "relay:x"), "write relay:https://REGISTRY/ENVIRONMENT"),
        (("a", "ws://h", "--pin", "x"), "the pin `x` is not sha256:"),
        (("a", "ws://192.0.2.1", "--token-env", "T"), "a token is sent only to wss:// URLs"),
        (("a", "ws://h", "--executor-key", "x"), "executor_key requires registry"),
        (("a", "ws://h", "--retention", "8x"), "retention must be seconds from 0 to"),
        (("a", "stdio:x", "--token-env", "T"), "token_env is not used with stdio"),
        (("a", "wss://h", "--token-file", "none"), "cannot read the token file"),
        (("a", "wss://h", "--token-file", "two"), "has 2 lines, and must have one: the token"),
        (("a", "wss://h", "--token", "secret-1"), "use --token-file FILE or --token-env NAME"),
    ],
)
def test_useless_targets_are_not_added(
    words: tuple[str, ...], text: str, file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file.parent.mkdir(parents=True)
    file.write_text('[known]\nurl = "ws://h"\n')
    Path("two").write_text("one\ntwo\n")
    assert _add(*words) == 2
    error = capfd.readouterr().err
    assert text in error
    assert "secret-1" not in error
    assert file.read_text() == '[known]\nurl = "ws://h"\n'


@pytest.mark.parametrize(
    "text",
    [
        'a = {url = "ws://h"}\n',
        'a.url = "ws://h"\n',
        '[b]\nstdio = """x\n[a]\n"""\n[a]\nurl = "ws://h"\n',
    ],
)
def test_what_cannot_be_changed_as_a_text_stays(
    text: str, file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file.parent.mkdir(parents=True)
    file.write_text(text)
    for words in (["remove", "a"], ["add", "--force", "a", "unix:/run/s"]):
        assert main.run_client("targets", words) == 1
        assert "was not changed: a is not written as a table" in capfd.readouterr().err
    assert file.read_text() == text


def test_a_target_that_is_not_there_is_not_removed(
    file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main.run_client("targets", ["remove", "a"]) == 1
    assert f"there is no target `a`; {file} defines no targets" in capfd.readouterr().err
    assert main.run_client("targets", ["--json", "remove", "a"]) == 2
    assert _add("b", "ws://h") == 0
    assert main.run_client("targets", ["remove", "b", "a"]) == 1
    assert f"there is no target `a`; {file} defines b\n" in capfd.readouterr().err
    assert file.read_text() == '[b]\nurl = "ws://h"\n'


def test_a_link_stays_a_link(file: Path, tmp_path: Path) -> None:
    file.parent.mkdir(parents=True)
    file.symlink_to(tmp_path / "dotfiles" / "targets.toml")
    assert _add("a", "ws://h") == 0
    assert file.is_symlink()
    assert (tmp_path / "dotfiles" / "targets.toml").read_text() == '[a]\nurl = "ws://h"\n'


def test_a_file_that_is_full_or_cannot_be_written_stays(
    file: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert _add("a", "ws://h") == 0
    with monkeypatch.context() as patch:
        patch.setattr(named_targets, "MAX_FILE_BYTES", 10)
        assert _add("b", "ws://h") == 1
    monkeypatch.setattr(named_targets, "write_private_file", _fail)
    assert _add("b", "ws://h") == 1
    errors = capfd.readouterr().err
    assert f"{file} would have more than 10 bytes" in errors
    assert f"cannot write {file}: No space" in errors
    assert list(load_targets()) == ["a"]


def _fail(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space")


@pytest.mark.parametrize(
    "words", [["info", "--token", "x", "b"], ["login", "--token=x", "https://r"]]
)
def test_a_token_is_no_argument(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main.run_client(words[0], words[1:]) == 2
    assert "use --token-file FILE or --token-env NAME" in capfd.readouterr().err
    assert main.run_client("exec", ["--token", "x", "b", "ls"]) == 2
    assert "--token " not in build_parser().format_help()
