"""What TARGET means, and the file with the names."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from exec_server.client import configuration, targets
from exec_server.client.targets import AccessOptions, Target, find_target
from exec_server.errors import StartupError

_NAMED = """\
[build]
url = "wss://build.example.net:7700"
token_file = "build.token"
ca_file = "/etc/ca.pem"

[pinned]
url = "wss://192.0.2.1:7700"
pin = "sha256:00"

[rotating]
url = "wss://192.0.2.1:7700"
pin = ["sha256:00", "sha256:11"]

[trusted-network]
url = "ws://192.0.2.1:7700"
token_env = "T"
allow_insecure_token = true

[lab]
stdio = "ssh lab 'exec-server' --listen stdio"

[words]
stdio = ["a b", "c"]

[behind-nat]
registry = "https://registry.example.net/base"
environment_id = "build-7"
token_env = "REGISTRY_TOKEN"
executor_key = "sha256:00"
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where targets.toml belongs; it is not there yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "exec-server").mkdir()
    return tmp_path / "exec-server" / "targets.toml"


# ---- targets without a name -----------------------------------------------------------


def test_urls_programs_and_relays(file: Path) -> None:
    assert find_target("ws://h:1") == Target(label="ws://h:1", url="ws://h:1")
    assert find_target("unix:/run/s") == Target(label="unix:/run/s", url="unix:/run/s")
    assert find_target("stdio:a 'b c'").argv == ("a", "b c")
    relayed = find_target("relay:https://r.net/base/build-7")
    assert (relayed.registry, relayed.environment_id) == ("https://r.net/base", "build-7")


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("ws://h:1/p?token=SECRET", "ws://h:1/p?token=***"),
        ("wss://u:SECRET@h", "wss://***@h"),
        ("relay:https://u:SECRET@r/e", "relay:https://***@r/e"),
        ("stdio:curl https://u:SECRET@h", "stdio:curl https://***@h"),
    ],
)
def test_labels_are_without_secrets(text: str, label: str) -> None:
    target = find_target(text)
    assert target.label == label
    assert "SECRET" in f"{target.url}{target.registry}{target.argv}"


@pytest.mark.parametrize("text", ["stdio:a 'https://u:SECRET@h", "relay:https://r?SECRET"])
def test_errors_are_without_secrets(text: str) -> None:
    with pytest.raises(StartupError) as caught:
        find_target(text)
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("stdio:", "no command"),
        ("stdio:'", "cannot parse the command after stdio"),
        ("relay:", "relay:https://REGISTRY/ENVIRONMENT"),
        ("relay:https://r.net", "relay:https://REGISTRY/ENVIRONMENT"),
        ("", "neither a URL"),
        ("nobody", "unknown target `nobody`"),
        ("localhost:7733", r"did you mean ws://localhost:7733\?"),
        ("[::1]:7733", r"did you mean ws://\[::1\]:7733\?"),
    ],
)
def test_invalid_targets_name_a_valid_form(file: Path, text: str, error: str) -> None:
    with pytest.raises(StartupError, match=error):
        find_target(text)


# ---- the file -------------------------------------------------------------------------


def test_a_missing_file_has_no_targets(file: Path) -> None:
    assert targets.load_targets() == {}
    with pytest.raises(StartupError, match=f"{file} defines no targets"):
        find_target("build")


def test_the_file_is_below_the_home_without_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for unset in ("", "relative"):
        monkeypatch.setenv("XDG_CONFIG_HOME", unset)
        assert configuration.targets_file() == Path("/home/me/.config/exec-server/targets.toml")


def test_every_kind_of_entry(file: Path) -> None:
    file.write_text(_NAMED)
    known = targets.load_targets()
    build = known["build"]
    assert build.url == "wss://build.example.net:7700"
    assert build.access.token_file == str(file.parent / "build.token")
    assert build.access.ca_file == "/etc/ca.pem"
    assert known["lab"].argv == ("ssh", "lab", "exec-server", "--listen", "stdio")
    assert known["words"].argv == ("a b", "c")
    assert known["pinned"].access.pin == ("sha256:00",)
    assert known["rotating"].access.pin == ("sha256:00", "sha256:11")
    assert known["trusted-network"].access.allow_insecure_token
    assert not build.access.allow_insecure_token
    relayed = known["behind-nat"]
    assert (relayed.registry, relayed.environment_id) == (
        "https://registry.example.net/base",
        "build-7",
    )
    assert relayed.access.executor_key == "sha256:00"
    assert [known[name].address for name in ("build", "words", "behind-nat")] == [
        "wss://build.example.net:7700",
        "stdio:'a b' c",
        "relay:https://registry.example.net/base/build-7",
    ]


def test_a_url_may_be_that_of_a_relay_target(file: Path) -> None:
    file.write_text('[b]\nurl = "relay:https://r.example/base/build-7"\nexecutor_key = "sha256:00"')
    target = find_target("b")
    assert (target.url, target.registry) == (None, "https://r.example/base")
    assert target.environment_id == "build-7"
    assert target.access.executor_key == "sha256:00"


def test_an_unknown_name_lists_the_known_ones(file: Path) -> None:
    file.write_text(_NAMED)
    with pytest.raises(
        StartupError, match=f"unknown target `nope`; {file} defines behind-nat, build, lab, "
    ):
        find_target("nope")


@pytest.mark.parametrize("host", ["nope", "build.example.net", "10.0.0.5", "localhost", "[::1]"])
def test_a_host_is_told_how_to_become_a_url(file: Path, host: str) -> None:
    with pytest.raises(StartupError) as caught:
        find_target(host)
    assert f"; a host is written ws://{host}:7700" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("http://h:7700", "ws://h:7700"),
        ("HTTPS://h/base", "wss://h/base"),
        ("https://me:secret@h?token=x", "wss://***@h?token=***"),
    ],
)
def test_a_url_of_the_web_names_the_one_that_is_meant(file: Path, text: str, meant: str) -> None:
    with pytest.raises(StartupError, match="is not a target") as caught:
        find_target(text)
    assert f"did you mean {meant}? ws:// is for a server without TLS" in str(caught.value)
    assert "secret" not in str(caught.value)


# ---- the default target ---------------------------------------------------------------


@pytest.mark.parametrize("text", [None, ":"])
def test_the_default_target_is_in_a_variable(
    file: Path, text: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(_NAMED)
    monkeypatch.setenv("EXEC_SERVER_TARGET", "pinned")
    assert find_target(text) == targets.load_targets()["pinned"]
    assert find_target(text, AccessOptions(pin=("sha256:11",))).access.pin == ("sha256:11",)
    monkeypatch.setenv("EXEC_SERVER_TARGET", "unix:/run/s")
    assert find_target(text) == Target(label="unix:/run/s", url="unix:/run/s")


@pytest.mark.parametrize("value", ["", None])
def test_without_a_default_target_one_is_named(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EXEC_SERVER_TARGET", raising=False)
    if value is not None:
        monkeypatch.setenv("EXEC_SERVER_TARGET", value)
    with pytest.raises(StartupError, match="no target: name one, such as ws://127"):
        find_target(None)


@pytest.mark.parametrize("value", ["nobody", ":", "stdio:"])
def test_an_error_of_the_variable_names_it(
    file: Path, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXEC_SERVER_TARGET", value)
    with pytest.raises(StartupError, match=r"^EXEC_SERVER_TARGET: "):
        find_target(None)


def test_a_command_without_its_target_is_told_of_the_default(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXEC_SERVER_TARGET", "unix:/run/s")
    with pytest.raises(StartupError, match=r"; the target of EXEC_SERVER_TARGET is written `:`$"):
        find_target("make")


@pytest.mark.parametrize("text", ["", ":/path"])
def test_an_empty_target_is_not_the_default(
    file: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXEC_SERVER_TARGET", "unix:/run/s")  # "$UNSET" must not lead there
    with pytest.raises(StartupError, match="is neither a URL"):
        find_target(text)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("x", "is not TOML"),
        ('a = "b"', "`a` is not a table"),
        ('[a]\nurl = "ws://h"\nport = 1', "unknown key `port`"),
        ("[a]\nurl = 1", "`url` must be a string"),
        ("[a]", "exactly one of url, stdio and registry"),
        ('[a]\nurl = "ws://h"\nstdio = "x"', "exactly one of url, stdio and registry"),
        ('[a]\nregistry = "https://r"', "require each other"),
        ('[a]\nurl = "ws://h"\nenvironment_id = "e"', "require each other"),
        ('[a]\nurl = "ws://h"\ntoken_file = "f"\ntoken_env = "E"', "exclude each other"),
        ('[a]\nstdio = "x"\ntoken_env = "E"', "token_env is not used with stdio"),
        ('[a]\nstdio = "x"\nca_file = "f"', "ca_file is not used with stdio"),
        ('[a]\nurl = "ws://h"\nexecutor_key = "k"', "executor_key requires registry"),
        ('[a]\nurl = "relay:https://r"', "names no environment"),
        ('[a]\nurl = "relay:https://r/e"\nregistry = "https://r"', "has no registry beside it"),
        ('[a]\nstdio = "x"\npin = "p"', "pin is not used with stdio"),
        ('[a]\nurl = "wss://h"\npin = "p"\nca_file = "f"', "ca_file and pin exclude"),
        ('[a]\nurl = "wss://h"\npin = 1', "`pin` must be a string or a list of strings"),
        ('[a]\nurl = "ws://h"\nallow_insecure_token = 1', "must be true or false"),
        ('[a]\nurl = "ws://h"\nallow_insecure_token = true', "requires a token"),
        ('[a]\nurl = "ws://h"\nretention = true', "must be a string such as 8h, or seconds"),
        ('[a]\nurl = "ws://h"\nwait = -1', "`wait` must be a number of seconds"),
        ('[a]\nurl = "ws://h"\nwait = true', "`wait` must be a number of seconds"),
        ('[a]\nurl = "ws://h"\nwait = "9"', "`wait` must be a number of seconds"),
        ('[a]\nstdio = "x"\nwait = 1', "wait is not used with stdio"),
        ("[a]\nstdio = []", "a list of strings"),
        ("[a]\nstdio = [1]", "a list of strings"),
        ('[stdio]\nurl = "ws://h"', "a name begins with"),
        ('["a:b"]\nurl = "ws://h"', "a name begins with"),
    ],
)
def test_errors_in_the_file_are_named(file: Path, text: str, error: str) -> None:
    file.write_text(text)
    with pytest.raises(StartupError, match=error) as caught:
        targets.load_targets()
    assert str(file) in str(caught.value)


def test_a_file_that_is_too_large_or_no_text(file: Path) -> None:
    file.write_bytes(b"#" * configuration.MAX_FILE_BYTES)
    assert targets.load_targets() == {}
    file.write_bytes(b"#" * (configuration.MAX_FILE_BYTES + 1))
    with pytest.raises(StartupError, match="more than"):
        targets.load_targets()
    file.write_bytes(b"\xff")
    with pytest.raises(StartupError, match="is not TOML"):
        targets.load_targets()
    file.unlink()
    file.mkdir()
    with pytest.raises(StartupError, match="Is a directory"):
        targets.load_targets()


def test_a_token_in_the_file_is_for_its_owner_only(file: Path) -> None:
    file.write_text('[a]\nurl = "wss://h"\ntoken = "secret-1"\n')
    file.chmod(0o640)
    with pytest.raises(StartupError, match="chmod 600") as caught:
        targets.load_targets()
    assert "secret-1" not in str(caught.value)
    file.chmod(0o600)
    target = targets.load_targets()["a"]
    assert target.access.read_token() == "secret-1"
    assert "secret-1" not in repr(target)


@pytest.mark.skipif(os.name != "posix", reason="files have no modes")
@pytest.mark.parametrize("mode", [0o666, 0o664, 0o620, 0o602])
def test_a_file_that_others_can_write_is_refused(
    file: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    monkeypatch.setattr(configuration, "_is_own_group", lambda _: False)
    file.write_text('[a]\nstdio = "x"\n')
    file.chmod(0o700)
    file.parent.chmod(0o700)
    for path in (file, file.parent):
        path.chmod(mode | 0o100)
        with pytest.raises(StartupError) as caught:
            targets.load_targets()
        assert str(caught.value) == f"{path} is writable by other users: run `chmod go-w {path}`"
        path.chmod(0o700)
    assert targets.load_targets()["a"].argv == ("x",)


@pytest.mark.skipif(os.name != "posix", reason="there are no groups")
def test_a_group_of_the_user_alone_can_write(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import grp
    import pwd

    me, other = pwd.struct_passwd(("me", "", 7, 70, "", "", "")), ("it", "", 8, 80, "", "", "")
    members: list[str] = []
    users = [me, pwd.struct_passwd(other)]
    monkeypatch.setattr(pwd, "getpwuid", lambda _: me)
    monkeypatch.setattr(pwd, "getpwall", lambda: users)
    monkeypatch.setattr(grp, "getgrgid", lambda gid: grp.struct_group(("g", "", gid, members)))
    assert configuration._is_own_group(70)
    assert not configuration._is_own_group(80)
    members[:] = ["me", "root"]
    assert configuration._is_own_group(70)
    members[:] = ["me", "it"]
    assert not configuration._is_own_group(70)
    monkeypatch.setattr(grp, "getgrgid", {}.__getitem__)
    assert not configuration._is_own_group(70)
    monkeypatch.setattr(configuration, "_is_own_group", lambda _: True)
    file.touch()
    file.chmod(0o660)
    assert targets.load_targets() == {}


def _owned(uid: int) -> os.stat_result:
    return os.stat_result((stat.S_IFREG | 0o644, 1, 1, 1, uid, uid, 1, 1, 1, 1))


@pytest.mark.skipif(os.name != "posix", reason="files have no owners")
@pytest.mark.parametrize("user", [0, 1000])
def test_a_file_of_another_user_is_refused(
    file: Path, monkeypatch: pytest.MonkeyPatch, user: int
) -> None:
    file.touch()
    monkeypatch.setattr(os, "geteuid", lambda: user)
    for owner in (0, user):
        monkeypatch.setattr(os, "fstat", lambda _, owner=owner: _owned(owner))
        monkeypatch.setattr(Path, "stat", lambda _, owner=owner: _owned(owner))
        assert targets.load_targets() == {}
    with monkeypatch.context() as other:
        other.setattr(os, "fstat", lambda _: _owned(1001))
        with pytest.raises(StartupError, match=rf"{file} belongs to another user \(uid 1001\)"):
            targets.load_targets()
    monkeypatch.setattr(Path, "stat", lambda _: _owned(1001))
    with pytest.raises(StartupError, match=rf"{file.parent} belongs to another user \(uid 1001\)"):
        targets.load_targets()


def test_modes_of_other_systems_say_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configuration, "_HAS_MODES", False)
    file.write_text('[a]\nurl = "wss://h"\ntoken = "t"\n')
    file.chmod(0o666)
    assert targets.load_targets()["a"].access.token == "t"


def test_the_place_that_a_link_leads_to_is_for_the_user_alone_too(
    file: Path, tmp_path: Path
) -> None:
    dotfiles = tmp_path / "dotfiles"
    dotfiles.mkdir()
    (dotfiles / "targets.toml").write_text(_NAMED)
    file.symlink_to(dotfiles / "targets.toml")
    assert "build" in targets.load_targets()
    dotfiles.chmod(0o777)
    with pytest.raises(StartupError, match=f"{dotfiles} is writable by other users"):
        targets.load_targets()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no FIFOs")
def test_a_fifo_is_not_waited_for(file: Path) -> None:
    os.mkfifo(file)
    with pytest.raises(StartupError, match="is not a regular file"):
        targets.load_targets()


@pytest.mark.parametrize("text", ["a = " + "[" * 50_000, "a = " + "{b=" * 50_000])
def test_deep_nesting_is_an_error_in_the_file(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(StartupError, match=f"{file} is nested too deeply"):
        targets.load_targets()


# ---- tokens ---------------------------------------------------------------------------


def test_tokens_come_from_files_and_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text(" abc\n")
    monkeypatch.setenv("MY_TOKEN", "xyz ")
    assert AccessOptions(token_file=str(tmp_path / "token")).read_token() == "abc"
    assert AccessOptions(token_env="MY_TOKEN").read_token() == "xyz"
    assert AccessOptions().read_token() is None


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b" \n", "is empty"),
        (b"one\ntwo\n", "has 2 lines, and must have one: the token"),
        ("ü".encode(), "ASCII"),
        (b"x" * (targets.MAX_TOKEN_BYTES + 1), "more than"),
        (None, "No such file"),
    ],
)
def test_unusable_token_files(tmp_path: Path, content: bytes | None, error: str) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StartupError, match=error):
        AccessOptions(token_file=str(path)).read_token()


def test_a_missing_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_TOKEN", raising=False)
    with pytest.raises(StartupError, match="MY_TOKEN"):
        AccessOptions(token_env="MY_TOKEN").read_token()


def test_a_variable_with_several_lines_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "one\ntwo\n")
    with pytest.raises(StartupError, match="MY_TOKEN has 2 lines, and must have one: the token"):
        AccessOptions(token_env="MY_TOKEN").read_token()


def test_flags_override_the_file(file: Path) -> None:
    file.write_text(_NAMED)
    given = AccessOptions(token_env="OTHER", ca_file="mine.pem")
    access = find_target("build", given).access
    assert (access.token_file, access.token_env, access.ca_file) == (None, "OTHER", "mine.pem")
    kept = find_target("build", AccessOptions(executor_key="k")).access
    assert kept.token_file == str(file.parent / "build.token")
    assert kept.executor_key == "k"
    assert find_target("build", AccessOptions(executor_key="")).access.executor_key == ""


def test_a_table_waits_for_its_server(file: Path) -> None:
    file.write_text('[a]\nurl = "ws://h"\nwait = 30\nretention = 300\n')
    assert find_target("a").access.retention == 300
    assert find_target("a").access.wait == 30
    assert find_target("a", AccessOptions(wait=0)).access.wait == 0


# ---- texts ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("ws://h:1/p", "ws://h:1/p"),
        ("wss://me:secret@h:1/p", "wss://***@h:1/p"),
        ("wss://[h", "wss://[h"),
        ("unix:/run/s", "unix:/run/s"),
        ("stdio:ssh -o Secret=x host", "stdio:ssh"),
        ("relay:https://u:p@r/x/box", "environment box of https://***@r/x"),
    ],
)
def test_a_place_has_no_secrets(text: str, place: str) -> None:
    assert find_target(text).place == place
