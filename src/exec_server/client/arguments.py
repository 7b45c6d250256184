"""Arguments of callers, paths among them: checked, and turned into members of requests.

A wrong type raises TypeError, a wrong value ValueError or InvalidParams, before anything is sent.
"""

from __future__ import annotations

import math
import os
import posixpath
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Final, TypeVar, cast

from exec_server.errors import InvalidParams, RpcError, StartupError, Unsupported
from exec_server.host.clock import duration
from exec_server.protocol.decoding import Params, decode
from exec_server.protocol.network import CredentialProvider, NetworkProxy, ProxySettings
from exec_server.protocol.paths import PathUri
from exec_server.protocol.process import TtySize
from exec_server.protocol.sandbox import PRESETS, PresetName, Sandbox, preset
from exec_server.protocol.session import Capabilities, EnvironmentInfo

_windows_path = partial(re.match, r"[A-Za-z]:[\\/]")

AnyPath = str | bytes | os.PathLike[str] | os.PathLike[bytes]

T = TypeVar("T")

# The name of a preset policy, or a `sandbox` object of the protocol.
AnySandbox = PresetName | Sandbox | Mapping[str, Any]
# A `networkProxy` object of the protocol, whose `proxy` may leave out what is in PROXY_DEFAULTS.
AnyNetworkProxy = NetworkProxy | Mapping[str, Any]
PROXY_DEFAULTS: Final[Mapping[str, Any]] = {
    "enabled": True,
    "enableSocks5": True,
    "enableSocks5Udp": False,
    "allowUpstreamProxy": False,
    "allowLocalBinding": False,
    "dangerouslyAllowAllUnixSockets": False,
    "mode": "full",
}

# Rows and columns of a terminal: the kernel keeps them in 16 bits.
MAX_TTY_SIZE: Final = 65_535
# Seconds of a retention: it travels as 32 bits, and no server grants a century.
MAX_RETENTION: Final = 2**32 - 1
# Words of a command: a server reads messages of at most 262,144 values, and its answer to a larger
# one does not tell which request it is for, so that the client would wait for another one forever.
MAX_WORDS: Final = 250_000


class PathResolver:
    """Resolves relative paths and `~` on one machine: the caller's notation to URIs, and back."""

    def __init__(self, info: EnvironmentInfo) -> None:
        self.update(info)

    def update(self, info: EnvironmentInfo) -> None:
        """Take the directories of a server that may be another one."""
        self.home = info.user_home_dir and native(info.user_home_dir)
        self.cwd = (info.cwd and native(info.cwd)) or self.home or "/"
        self.temporary = native(info.temp_dir)

    def absolute(self, path: AnyPath, name: str = "path") -> str:
        """The absolute path; `~` at the start is the user's home.

        A URI becomes a path, if the path is one of this platform. It begins with `file://`: other
        texts that begin with `file:` are names. Raises ValueError with the argument's `name` for an
        empty path, which a program gets by mistake and which would be the server's directory.
        """
        text = path_text(path)
        if not text:
            raise ValueError(f'{name} must not be empty: "." is the directory of the server')
        if text.startswith("file://"):
            return native(text)
        if text.startswith("/") or _windows_path(text):
            return text
        if self.home and (text == "~" or text.startswith("~/")):
            return self.home + text[1:]
        if text == ".":
            return self.cwd
        return f"{self.cwd.rstrip('/')}/{text}"

    def uri(self, path: AnyPath, name: str = "path") -> PathUri:
        """The URI of a path; raises InvalidParams if the path is invalid, ValueError if empty."""
        text = self.absolute(path, name)
        if _windows_path(text):
            from urllib.parse import quote

            text = "file:///" + quote(text.replace("\\", "/"), safe="/:")
        try:
            return PathUri.from_text(text)
        except UnicodeEncodeError:
            raise InvalidParams(f"{text!a} has a surrogate that stands for no byte") from None

    def is_above_cwd(self, path: AnyPath) -> bool:
        """Whether a path, however it is spelled, is the server's directory or one above it."""
        whole, cwd = (
            posixpath.normpath(text).strip("/") + "/" for text in (self.absolute(path), self.cwd)
        )
        return whole == "/" or cwd.startswith(whole)


def is_dot(path: AnyPath) -> bool:
    """Whether a path ends in `.` or `..`, and so is a directory without its name."""
    return path_text(path).rstrip("/").rpartition("/")[2] in (".", "..")


def path_text(path: AnyPath, name: str = "a path") -> str:
    """A path, or another text, as text; the TypeError for others has its `name`."""
    try:
        return decoded(path)
    except TypeError:
        raise _not_a_path(path, name) from None


def local_path(path: AnyPath) -> str:
    """A path of this machine as text; raises TypeError if it is none."""
    try:
        return os.fsdecode(path)
    except TypeError:
        raise _not_a_path(path, "a path") from None


def _not_a_path(value: object, name: str) -> TypeError:
    return TypeError(f"{name} must be str, bytes or os.PathLike, not {type(value).__name__}")


def decoded(path: AnyPath) -> str:
    """A path as text, on every system with the slashes and the encoding of a server's machine.

    Raises TypeError. On Windows `Path("a/b")` has a backslash, and os.fsdecode refuses bytes that
    are not UTF-8.
    """
    if hasattr(path, "as_posix"):
        return str(path.as_posix())
    text = os.fspath(path)
    return text.decode(errors="surrogateescape") if isinstance(text, bytes) else text


def encoded(path: str) -> bytes:
    """The bytes of a path on the server's machine: UTF-8, other bytes as surrogates."""
    return path.encode(errors="surrogateescape")


def native(uri: str) -> str:
    """The path of a URI, or the URI if its path is not one of this platform."""
    if uri.startswith("/"):
        return uri
    try:
        return PathUri.from_text(uri).native()
    except (RpcError, UnicodeEncodeError):
        return uri


def argv_list(argv: Iterable[AnyPath]) -> list[str]:
    """The words of a command as texts; raises TypeError for what is no list of words.

    Raises InvalidParams for none, for too many, and for a null character, which no word can have.
    """
    if isinstance(argv, str | bytes | os.PathLike):
        raise TypeError("argv is a list of words; for a text of a shell use env.shell(text)")
    if not isinstance(argv, Iterable):
        raise TypeError(
            f"argv must be a list of words, not {type(argv).__name__}; run_many and run_each take "
            "Command objects"
        )
    words = [path_text(word, f"argv[{number}]") for number, word in enumerate(argv)]
    if not words:
        raise InvalidParams("argv must not be empty")
    if len(words) > MAX_WORDS:
        raise InvalidParams(
            f"argv has {len(words)} words, more than {MAX_WORDS}: send them by input= or in a file"
        )
    for number, word in enumerate(words):
        _check_null(word, f"argv[{number}]")
    return words


def _check_null(text: str, name: str) -> None:
    if "\0" in text:
        raise InvalidParams(f"{name} cannot contain a null character")


def input_bytes(data: bytes | str | None) -> bytes | None:
    """The input of a command, a text in UTF-8, None if there is none; raises TypeError."""
    if isinstance(data, str):
        data = data.encode()
    if data is not None and not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"input must be bytes or str, not {type(data).__name__}")
    return bytes(data) if data else None


def environment_dict(env: Mapping[str, AnyPath] | None) -> dict[str, str]:
    """Variables as texts; raises TypeError, and ValueError for a name that cannot be one."""
    if env is None:
        return {}
    if not isinstance(env, Mapping):
        kind = type(env).__name__
        raise TypeError(f'env must be a mapping like {{"NAME": "value"}}, not {kind}')
    variables = {
        path_text(name, "a name in env"): path_text(value, f"env[{name!r}]")
        for name, value in env.items()
    }
    for name, text in variables.items():
        if not name or "=" in name:
            raise ValueError(f"env has the name {name!r}: a name is not empty and has no =")
        _check_null(name, f"the name {name!r} in env")
        _check_null(text, f"env[{name!r}]")
    return variables


def check_seconds(seconds: float | None, name: str = "timeout") -> None:
    """Raise TypeError for a time that is no number, and ValueError for one below 0."""
    check_number(seconds, name)
    if seconds is not None and not seconds >= 0:  # NaN is not, either
        raise ValueError(f"{name} must be at least 0 seconds, not {seconds:g}")


def retention_seconds(retention: float | str | None) -> int | None:
    """Whole seconds of a retention such as 300 or "8h"; raises StartupError."""
    if retention is None:
        return None
    try:
        seconds = duration(retention) if isinstance(retention, str) else float(retention)
        if not 0 <= seconds <= MAX_RETENTION:
            raise ValueError(retention)
    except (TypeError, ValueError):
        raise StartupError(
            f"retention must be seconds from 0 to {MAX_RETENTION}, or a text such as 30m, 8h or "
            f"1d, not {retention!r}"
        ) from None
    return math.ceil(seconds)


def check_number(seconds: float | None, name: str = "timeout") -> None:
    """Raise TypeError for a time that is no number, before anything is done."""
    if seconds is not None and not isinstance(seconds, int | float):
        raise TypeError(f"{name} must be a number of seconds, not {type(seconds).__name__}")


def checked_count(number: int, name: str) -> int:
    """The number itself; raises TypeError if it is no whole number, and ValueError below 0."""
    if not isinstance(number, int):
        raise TypeError(f"{name} must be a whole number, not {type(number).__name__}")
    if number < 0:
        raise ValueError(f"{name} must not be negative: {number}")
    return number


def tty_size(size: tuple[int, int]) -> TtySize:
    """The size of a terminal; raises InvalidParams."""
    match size:
        case (int(rows), int(columns)) if 0 < rows <= MAX_TTY_SIZE and 0 < columns <= MAX_TTY_SIZE:
            return TtySize(rows, columns)
    limits = f"each from 1 to {MAX_TTY_SIZE}"
    raise InvalidParams(f"size must be rows and columns, {limits}, not {size!r}")


def user_text(capabilities: Capabilities, user: str | int | None) -> str | None:
    """The name or number of a user as text; raises Unsupported if the server cannot act as one."""
    if user is None:
        return None
    if not isinstance(user, str | int) or isinstance(user, bool):
        raise TypeError(f"user must be a name or a number, not {type(user).__name__}")
    if not capabilities.other_users:
        raise Unsupported("otherUsers", "it needs the rights of root, or runs as this user itself")
    return str(user)


def sandbox_object(
    sandbox: AnySandbox | None, paths: PathResolver, cwd: AnyPath | None = None
) -> Sandbox | None:
    """The `sandbox` object of a request; the workspace of a preset is `cwd`."""
    if isinstance(sandbox, str):
        if sandbox not in PRESETS:
            raise InvalidParams(f"unknown sandbox {sandbox!r}: use one of {', '.join(PRESETS)}")
        workspace = str(paths.uri(paths.cwd if cwd is None else cwd, "cwd"))
        sandbox = preset(sandbox, cwd=workspace, roots=[workspace])
    # msgspec encodes a mapping without looking at its members.
    return cast(Sandbox | None, sandbox)


def network_proxy_object(
    value: AnyNetworkProxy | None, capabilities: Capabilities, env: Mapping[str, str]
) -> NetworkProxy | None:
    """The `networkProxy` of a start; raises InvalidParams, Unsupported for rules without effect.

    A server starts the command with the secrets of `env` that no rule masks.
    """
    if value is None:
        return None
    launch = value if isinstance(value, NetworkProxy) else _network_proxy(value)
    rules, has = launch.proxy, capabilities
    missing = {
        "networkProxyLaunch": not has.network_proxy_launch,
        "networkProxyReviewDomains": rules.review_domains and not has.network_proxy_review_domains,
        "credentialMasking": rules.credential_masking and not has.credential_masking,
        "credentialMaskingCustomProviders": rules.credential_providers
        and not has.credential_masking_custom_providers,
    }
    for capability, is_missing in missing.items():
        if is_missing:
            raise Unsupported(capability, "it would run the command without these rules")
    if rules.credential_providers:
        _check_masking(rules, env)
    return launch


def _check_masking(rules: ProxySettings, env: Mapping[str, str]) -> None:
    """Raise InvalidParams if the command would get a secret of a credential provider.

    Raises Unsupported where patterns cannot be matched.
    """
    if not rules.credential_masking:
        raise InvalidParams('credentialProviders need "credentialMasking": True beside them')
    try:
        import regex  # noqa: F401  # the patterns of providers are in its dialect
    except ImportError:
        raise Unsupported(
            "credentialMaskingCustomProviders", "install the package regex, which checks patterns"
        ) from None
    from exec_server.proxy.credentials import CredentialMask, SearchTime, custom_providers

    providers = custom_providers(rules.credential_providers)
    search_time = SearchTime(time.thread_time)
    for name in CredentialMask(env, b"", search_time, providers).unmasked:
        raise InvalidParams(
            f"no pattern of a credential provider matches the value of {name} in env, so the "
            "command would get it unmasked: change the pattern, or leave the variable out of env "
            "of the provider"
        )


def _network_proxy(members: Mapping[str, Any]) -> NetworkProxy:
    rules = members.get("proxy") if isinstance(members, Mapping) else None
    if not isinstance(rules, Mapping):
        raise InvalidParams('network_proxy must be like {"proxy": {"domains": {"a.b": "allow"}}}')
    _check_members(members, NetworkProxy, "network_proxy")
    _check_members(rules, ProxySettings, "the proxy of network_proxy")
    providers = rules.get("credentialProviders")
    for label, provider in providers.items() if isinstance(providers, Mapping) else ():
        if isinstance(provider, Mapping):
            _check_values(CredentialProvider, {}, provider, f"credentialProviders.{label}.")
    _check_values(ProxySettings, PROXY_DEFAULTS, rules, "proxy.")
    _check_values(NetworkProxy, {"proxy": PROXY_DEFAULTS}, {**members, "proxy": PROXY_DEFAULTS}, "")
    return decode(NetworkProxy, {**members, "proxy": {**PROXY_DEFAULTS, **rules}})


def _check_values(
    kind: type[Params], defaults: Mapping[str, Any], members: Mapping[str, Any], place: str
) -> None:
    """Raise InvalidParams for a wrong value, with the name of its member: `decode` names none."""
    for name, value in members.items():
        try:
            decode(kind, {**defaults, name: value})
        except InvalidParams as error:
            raise InvalidParams(f"network_proxy: {place}{name}: {error}") from None


def _check_members(members: Mapping[str, Any], kind: type[Params], name: str) -> None:
    """Raise InvalidParams for an unknown member: servers ignore it, and so the rule that it has."""
    known = kind.__struct_encode_fields__
    for member in members:
        if member not in known:
            raise InvalidParams(f"{name} has no {member!r}, only {', '.join(known)}")


def check_callable(function: object, name: str) -> None:
    """Raise TypeError for what cannot be called back; None is no function."""
    if function is not None and not callable(function):
        raise TypeError(f"{name} must be callable, not {type(function).__name__}")


def check_bytes(data: object, advice: str) -> None:
    """Raise TypeError for data that cannot be the content of a file."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"data must be bytes, not {type(data).__name__}: {advice}")


def checked_mode(mode: int) -> int:
    """The mode itself; raises TypeError or InvalidParams for what cannot be permission bits."""
    if not isinstance(mode, int):
        raise TypeError(f"mode must be an int like 0o755, not {type(mode).__name__}")
    if not 0 <= mode <= 0o7777:
        raise InvalidParams(f"mode must be from 0 to 0o7777, not {mode:#o}")
    return mode


def content_pairs(
    files: Mapping[str, bytes] | Iterable[tuple[AnyPath, bytes]],
) -> Iterator[tuple[AnyPath, bytes]]:
    """Paths and contents of several files; raises TypeError for anything else."""
    for pair in files.items() if isinstance(files, Mapping) else files:
        if isinstance(pair, str | bytes) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise TypeError("files must be a dictionary or pairs: {path: data} or [(path, data)]")
        yield pair[0], pair[1]


def seconds_of(moment: float | datetime | None, name: str) -> float | None:
    """A time in seconds since 1970; raises TypeError if it is none."""
    if isinstance(moment, datetime):
        return moment.timestamp()
    if moment is not None and not isinstance(moment, int | float):
        kind = type(moment).__name__
        raise TypeError(f"{name} must be a number of seconds or a datetime, not {kind}")
    return moment


def path_list(values: Iterable[T], name: str) -> list[T]:
    """The values as a list; a text alone would be taken for its letters."""
    if isinstance(values, str | bytes):
        raise TypeError(f"{name} must be a list of paths, not {type(values).__name__}")
    return list(values)


def pattern_list(values: Iterable[str]) -> list[str]:
    """Patterns as a list; a text alone would be taken for its letters."""
    patterns = [values] if isinstance(values, str | bytes) else list(values)
    if isinstance(values, str | bytes) or not all(isinstance(each, str) for each in patterns):
        raise TypeError("exclude must be a list of patterns, like ['node_modules/', '*.pyc']")
    return patterns


def text_pairs(old: str | Iterable[tuple[str, str]], new: str | None) -> list[tuple[str, str]]:
    """The old and new texts of `Files.edit`."""
    if isinstance(old, str):
        if new is None:
            raise TypeError("edit() needs the new text")
        return [_checked_pair((old, new))]
    if new is not None:
        raise TypeError("edit() takes pairs of old and new texts, or one old and one new text")
    pairs = [_checked_pair(pair) for pair in old]
    if not pairs:
        raise InvalidParams("edit() needs at least one edit")
    return pairs


def _checked_pair(pair: object) -> tuple[str, str]:
    match pair:
        case (str(old), str(new)):
            return old, new
    # Without the values, which are contents of files.
    raise TypeError('edit() takes an old and a new text, or a list of pairs: [("old", "new")]')
