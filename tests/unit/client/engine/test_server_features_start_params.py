"""The params of a start: defaults, shells in place of capabilities, refused arguments."""

from __future__ import annotations

import base64
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from tests.support.network import launch

from exec_server.client.arguments import PathResolver, argv_list, sandbox_object
from exec_server.client.engine.server_features import (
    ARGUMENT_CHARACTERS,
    ARGUMENT_INPUT_BYTES,
    DEFAULT_PATH,
    INHERIT_ALL,
    ServerFeatures,
    StartParamsBuilder,
)
from exec_server.errors import InvalidParams, Unsupported
from exec_server.protocol.paths import PathUri
from exec_server.protocol.process import ProcessId, StartParams, TtySize
from exec_server.protocol.sandbox import preset
from exec_server.protocol.session import Capabilities, EnvironmentInfo

INFO = msgspec.convert(
    {
        "shell": {"name": "sh", "path": "/bin/sh"},
        "cwd": "file:///home",
        "executorVersion": "",
        "providerId": "",
        "userHomeDir": None,
        "platformOs": "",
        "prependPathDirs": [],
        "temporaryDirectories": [],
        "tempDir": "/tmp",
        "capabilities": {},
    },
    EnvironmentInfo,
)
PATHS = PathResolver(INFO)
ALL = Capabilities(process_close_stdin=True, process_resize=True)


def build(
    capabilities: Capabilities = ALL, features: ServerFeatures | None = None, **options: Any
) -> StartParams:
    defaults: dict[str, Any] = {
        "cwd": None,
        "env": None,
        "clean_env": False,
        "tty": False,
        "sandbox": None,
    }
    features = features or ServerFeatures(capabilities=capabilities)
    return StartParamsBuilder(PATHS, features).build(["a", "b"], **(defaults | options))


PLAIN = StartParams(
    process_id=ProcessId(""),
    argv=["a", "b"],
    cwd=PathUri.from_wire("/home"),
    env_policy=INHERIT_ALL,
    env={},
    tty=False,
    pipe_stdin=False,
)


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({}, {}),
        ({"cwd": "sub"}, {"cwd": PathUri.from_wire("/home/sub")}),
        ({"env": {"A": Path("/b")}, "clean_env": True}, {"env": {"A": "/b"}, "env_policy": None}),
        ({"stdin": True}, {"pipe_stdin": True}),
        ({"data": b""}, {"pipe_stdin": True}),
        ({"tty": True, "stdin": True}, {"tty": True, "env": {"TERM": "xterm-256color"}}),
        ({"tty": True, "env": {"TERM": "dumb"}}, {"tty": True, "env": {"TERM": "dumb"}}),
        (
            {"tty": True, "size": (3, 4), "env": {"TERM": "x"}},
            {"tty": True, "tty_size": TtySize(3, 4), "env": {"TERM": "x"}},
        ),
    ],
)
def test_options_become_members(options: dict[str, Any], changes: dict[str, Any]) -> None:
    assert build(**options) == msgspec.structs.replace(PLAIN, **changes)


def test_a_shell_replaces_a_missing_capability() -> None:
    piped = build(Capabilities(), data=b"1234567")
    assert piped.argv[:2] == ["/bin/sh", "-c"]
    assert piped.argv[3:] == ["sh", "7", "a", "b"]
    assert piped.pipe_stdin
    sized = build(Capabilities(), tty=True, size=(3, 4))
    assert sized.argv[3:] == ["sh", "3", "4", "a", "b"]
    assert sized.tty_size is None


def test_input_without_a_pipe_is_in_the_arguments() -> None:
    features = ServerFeatures(has_stdin_pipes=False)
    data = bytes(range(256)) * 500
    params = build(features=features, data=data)
    assert not params.pipe_stdin
    *words, command, argument = params.argv
    assert words[:2] == ["/bin/sh", "-c"]
    assert (command, argument) == ("a", "b")
    count, *pieces = words[4:]
    assert int(count) == len(pieces) == 2
    assert max(map(len, pieces)) == ARGUMENT_CHARACTERS
    assert base64.b64decode("".join(pieces)) == data
    with pytest.raises(Unsupported, match="pipeStdin in process/start: input may have 1048576"):
        build(features=features, data=bytes(ARGUMENT_INPUT_BYTES + 1))
    with pytest.raises(Unsupported, match="pipeStdin in process/start: use run"):
        build(features=features, stdin=True)
    assert build(features=features, stdin=True, tty=True).tty


def test_a_server_that_passes_on_no_environment_is_given_the_usual_one() -> None:
    features = ServerFeatures(has_environment_policies=False)
    assert build(features=features).env == {"PATH": DEFAULT_PATH, "HOME": "/"}
    assert build(features=features, env={"PATH": "/b"}).env["PATH"] == "/b"
    assert build(features=features, clean_env=True).env == {}


def test_a_command_is_not_started_without_its_sandbox() -> None:
    features = ServerFeatures(confines_commands=False)
    with pytest.raises(Unsupported, match="it would run the command without the sandbox"):
        build(features=features, sandbox="read-only")
    assert build(features=features).sandbox is None


PROXIES = Capabilities(network_proxy_launch=True)


def test_a_network_proxy_has_defaults_and_is_enforced_in_a_sandbox() -> None:
    given = {"proxy": {"domains": {"a.b": "allow"}}, "policyDecisionTimeoutMs": 9}
    params = build(PROXIES, network_proxy=given)
    assert params.network_proxy == launch(timeout=9, domains={"a.b": "allow"})
    assert b"null" not in msgspec.json.encode(params.network_proxy)  # which the reference refuses
    assert not params.enforce_managed_network
    assert build(PROXIES, network_proxy=given, sandbox="read-only").enforce_managed_network
    assert not build(PROXIES, sandbox="read-only").enforce_managed_network
    assert build(PROXIES, network_proxy=launch()).network_proxy == launch()


@pytest.mark.parametrize(
    ("members", "capability"),
    [
        ({"reviewDomains": ["a.b"]}, "networkProxyReviewDomains"),
        ({"credentialMasking": True}, "credentialMasking"),
        ({"credentialProviders": {"a": {}}}, "credentialMaskingCustomProviders"),
    ],
)
def test_a_command_is_not_started_without_its_network_rules(
    members: dict[str, Any], capability: str
) -> None:
    with pytest.raises(Unsupported, match="networkProxyLaunch: it would run the command without"):
        build(network_proxy=launch())
    with pytest.raises(Unsupported, match=f"{capability}: it would run the command without"):
        build(PROXIES, network_proxy={"proxy": members})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"domains": {"a.b": "allow"}}, 'must be like {"proxy"'),
        ("a.b", 'must be like {"proxy"'),
        ({"proxy": {"allowedDomains": ["a.b"]}}, "the proxy of network_proxy has no 'allowedDom"),
        ({"proxy": {}, "timeout": 1}, "network_proxy has no 'timeout', only proxy, "),
        ({"proxy": {"domains": {"a.b": "block"}}}, "network_proxy: proxy.domains: unknown variant"),
        ({"proxy": {}, "policyDecisionTimeoutMs": -1}, "network_proxy: policyDecisionTimeoutMs: "),
        ({"proxy": {"credentialProviders": []}}, "proxy.credentialProviders: invalid type"),
        ({"proxy": {"credentialProviders": {"a": 1}}}, "proxy.credentialProviders: invalid type"),
        (
            {"proxy": {"credentialProviders": {"mine": {"auth": "bearer"}}}},
            'credentialProviders.mine.auth: invalid type: string "bearer", expected a sequence',
        ),
    ],
)
def test_wrong_network_rules_are_refused(given: Any, message: str) -> None:
    with pytest.raises(InvalidParams, match=message):
        build(PROXIES, network_proxy=given)


MASKING = replace(PROXIES, credential_masking=True, credential_masking_custom_providers=True)
PROVIDER = {
    "env": ["TOKEN", "OTHER"],
    "patterns": ["tok_[a-z]{9,}"],
    "url_prefixes": ["https://a.b/"],
}


def _masked(env: dict[str, str], *, masking: bool = True, **members: Any) -> StartParams:
    rules = {"credentialMasking": masking, "credentialProviders": {"mine": PROVIDER | members}}
    return build(MASKING, env=env, network_proxy={"proxy": rules})


@pytest.mark.parametrize("value", ["tok_abcdefghi", "a b:tok_abcdefghi@c", "", " "])
def test_the_secrets_of_a_credential_provider_are_masked(value: str) -> None:
    params = _masked({"TOKEN": value, "FURTHER": "text"})
    assert params.env["TOKEN"] == value
    assert params.network_proxy is not None
    assert params.network_proxy.proxy.credential_masking


def test_a_secret_that_no_pattern_matches_is_not_sent() -> None:
    with pytest.raises(InvalidParams, match="matches the value of OTHER in env, so the comm") as e:
        _masked({"TOKEN": "tok_abcdefghi", "OTHER": "tok_short"})
    assert "tok_" not in str(e.value)


def test_a_credential_provider_without_effect_is_refused() -> None:
    with pytest.raises(InvalidParams, match='need "credentialMasking": True'):
        _masked({}, masking=False)
    with pytest.raises(InvalidParams, match="credential provider `mine` has no credential pat"):
        _masked({}, patterns=[])


def test_patterns_that_cannot_be_matched_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "regex", None)
    with pytest.raises(Unsupported, match="install the package regex"):
        _masked({"TOKEN": "tok_abcdefghi"})


@pytest.mark.parametrize("size", [(0, 1), (1, 65_536), (1,), "80x24", (1.0, 2)])
def test_a_wrong_size_is_refused(size: Any) -> None:
    with pytest.raises(InvalidParams, match="rows and columns, each from 1 to 65535, not"):
        build(tty=True, size=size)


def test_a_sandbox_is_a_name_or_an_object() -> None:
    workspace = str(PathUri.from_wire("/home/sub"))
    named: Any = preset("workspace-write", cwd=workspace, roots=[workspace])
    assert sandbox_object("workspace-write", PATHS, "sub") == named
    assert build(sandbox="workspace-write", cwd="sub").sandbox == named
    anything: Any = {"any": 1}
    assert sandbox_object(anything, PATHS) is anything
    assert sandbox_object(None, PATHS) is None
    with pytest.raises(InvalidParams, match="unknown sandbox 'open': use one of read-only, "):
        sandbox_object("open", PATHS)  # type: ignore[arg-type]


def test_words_are_texts_or_paths() -> None:
    assert argv_list(word for word in ("a", Path("/b"))) == ["a", "/b"]
    with pytest.raises(InvalidParams, match="argv must not be empty"):
        argv_list([])
    for text in ("ls -l", b"ls", Path("ls")):
        with pytest.raises(TypeError, match="argv is a list of words"):
            argv_list(text)  # type: ignore[arg-type]
    assert argv_list(["a", b"b"]) == ["a", "b"]
    with pytest.raises(TypeError, match=r"argv\[1\] must be str, bytes or os.PathLike, not int"):
        argv_list(["a", 1])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"env\['A'\] must be str, bytes or os.PathLike, not int"):
        build(env={"A": 1})
