"""Modules, streams, programs and secret variables that this process takes from its surroundings.

Modules are never imported from the directory where the server was started: a confined command may
write to the workspace, and what the server imports is not confined. It imports from the
interpreter's directories, that of this package, and others (PYTHONPATH, .pth files) only for a
needed package that is nowhere else.
"""

from __future__ import annotations

import os
import sys
from stat import S_ISREG, S_IWGRP, S_IWOTH
from typing import Final

TYPE_CHECKING = False  # not that of typing, whose import takes long
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


# The modules of our dependencies, and those that they import themselves. A directory that holds one
# of them counts if the others do not hold it.
NEEDED: Final = (
    *("_cffi_backend", "ada_url", "aiohappyeyeballs", "cryptography", "h11", "jwt", "msgspec"),
    *("pybase64", "regex", "tomli", "tomli_w", "uvloop", "websockets", "yaml"),
)

_UTF8_MODE: Final = ("-X", "utf8")

# The owner of files whose user the namespace of the server does not know, such as root.
_UNMAPPED_USER: Final = 65_534
_PACKAGE: Final = __name__.partition(".")[0]
# The package is found where this process has found it, whatever else has its name. `importlib`, the
# only module that its __init__ imports, is loaded before.
_HELPER: Final = (
    "import sys, importlib; sys.path[:] = sys.argv[1:]; import exec_server; del sys.path[0]; "
)

SERVER_NEEDS_LINUX: Final = (
    "the server needs Linux: run it there, in a container or a virtual machine, "
    "and connect to it from here"
)
COMMANDS_NEED_POSIX: Final = (
    "the commands of exec-server need Linux or macOS: use WSL, "
    "or the library exec_server, which runs on Windows"
)

# Where distributions and administrators put programs.
SYSTEM_DIRECTORIES: Final = ("/usr/local/bin", "/usr/bin", "/bin")


# Credentials of the server or of its parent: kept from children and from HTTP requests.
STRIPPED_NAMES: Final = frozenset(
    {
        *("CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN", "NODE_REPL_AUTH_TOKEN"),
        *("OPENAI_FEDERATION_RULE_ID", "OPENAI_IDENTITY_TOKEN_FILE"),
        "CODEX_GUARDIAN_DECISIONS_API_KEY",
        *("OPENAI_WORKLOAD_IDENTITY_CONTEXT", "CODEX_EXEC_SERVER_EXIT_ON_STDIN_CLOSE"),
    }
)
# Credentials for a registry, which the environment of a machine may hold whether or not its server
# uses a registry, and the default target of a user's commands, which would be another machine for
# the commands of a server. Children do not inherit them and HTTP requests cannot name them. A
# client may still pass such a variable of its own to a command.
REGISTRY_NAMES: Final = frozenset(
    {"EXEC_SERVER_API_KEY", "CODEX_EXEC_SERVER_REMOTE_BEARER_TOKEN", "EXEC_SERVER_TARGET"}
)
# Never passed on to children in remote mode. The server removes them from its own environment
# after the credential is chosen, because botocore reads its keys there.
SECRET_NAMES: Final = REGISTRY_NAMES | {
    *("CODEX_API_KEY", "CODEX_ACCESS_TOKEN", "CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN"),
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN"),
}


def drop_script_directory() -> None:
    """Remove the first entry, that of a script's directory; with `-P` and `-I` there is none."""
    if not sys.flags.safe_path and sys.path:
        script = os.path.dirname(os.path.realpath(sys.argv[0]))
        if sys.path[0] == script and script not in _interpreter_directories():
            del sys.path[0]


def freeze() -> None:
    """Import only from trusted directories from now on, and no bytecode from elsewhere."""
    sys.path[:] = trusted()
    sys.pycache_prefix = None  # PYTHONPYCACHEPREFIX may be below /tmp


def trusted() -> list[str]:
    """The entries of `sys.path` that a server and its helper processes import from."""
    own = {*_interpreter_directories(), package_home()}
    present = [entry for entry in dict.fromkeys(sys.path) if _is_present(entry)]
    others = [entry for entry in present if entry not in own and not _is_open_to_others(entry)]
    needed = _with_needed_modules(others, [entry for entry in present if entry in own])
    return [entry for entry in present if entry in own or entry in needed]


def package_home() -> str:
    """The directory that holds this package."""
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def helper_words(code: str) -> list[str]:
    """The words of an interpreter that runs this code: isolated, without `site`, with our paths."""
    words = [sys.executable, *_mode(), "-I", "-S", "-c", _HELPER + code, package_home()]
    return [*words, *trusted()]


def server_words(variables: Mapping[str, str]) -> list[str]:
    """The words that start this program again, in any directory, with these variables.

    A PYTHONPATH is for the programs of the user, unless this package was found through it: it may
    name the workspace, whose `sitecustomize` would run at once. Commands inherit it all the same.
    """
    value = variables.get("PYTHONPATH", "")
    is_ours = package_home() in map(os.path.abspath, value.split(os.pathsep))
    ignored = ["-E"] if value and not is_ours else []
    return [sys.executable, *_mode(), "-P", *ignored, "-m", _PACKAGE]


def start_again_in_utf8() -> None:
    """Replace this process by one in the UTF-8 mode if the locale has another encoding.

    Names and words are UTF-8 on the wire and, whatever the locale says, on disks. The encoding of
    an interpreter cannot be changed; a variable for it would be inherited by all commands.
    """
    if sys.getfilesystemencoding() != "utf-8" and sys.executable and not _mode():
        os.execv(sys.executable, [sys.executable, *_UTF8_MODE, *sys.orig_argv[1:]])


def _mode() -> tuple[str, ...]:
    return _UTF8_MODE if "utf8" in sys._xoptions else ()


def _is_present(entry: str) -> bool:
    """Whether an entry names a directory or an archive, from any working directory."""
    return os.path.isabs(entry) and os.path.exists(entry)


def _interpreter_directories() -> set[str]:
    """The standard library, and where installers put packages."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    libraries = (
        os.path.dirname(os.path.abspath(os.__file__)),
        os.path.join(sys.base_exec_prefix, sys.platlibdir, version),
    )
    directories = {*libraries, *(os.path.join(library, "lib-dynload") for library in libraries)}
    site = sys.modules.get("site")  # None with -S
    if site is not None:
        directories.update(site.getsitepackages())
        if site.ENABLE_USER_SITE:
            directories.add(site.USER_SITE)
    return directories


def _is_open_to_others(entry: str) -> bool:
    status = os.stat(entry)
    return bool(status.st_mode & S_IWOTH) or status.st_uid not in (0, os.geteuid(), _UNMAPPED_USER)


def _with_needed_modules(others: Sequence[str], own: Sequence[str]) -> set[str]:
    """Those of the other directories with a module that we need and that no own one has."""
    if not others:
        return set()
    missing = [name for name in NEEDED if not _holds(own, name)]
    return {entry for entry in others if any(_holds([entry], name) for name in missing)}


def _holds(entries: Sequence[str], name: str) -> bool:
    from importlib.machinery import PathFinder

    spec = PathFinder.find_spec(name, entries)
    return spec is not None and spec.origin is not None  # a mere directory has no origin


def has_server() -> bool:
    """Whether a server can run here: it needs namespaces, Landlock and signalfd."""
    return sys.platform == "linux"


def has_commands() -> bool:
    """Whether the client commands can run here: they need terminals and signals of POSIX."""
    return sys.platform != "win32"


def open_missing() -> None:
    """Open /dev/null as 0, 1 and 2 where closed; raises OSError.

    Otherwise the next socket would be the stderr of every program that this process starts. A
    started program inherits the descriptors, so it has all three too. Nothing is imported that
    could open a descriptor: it would get the number of a closed stream.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
            os.set_inheritable(descriptor, True)
    # Python has None for a closed stream, and print(file=None) prints to stdout.
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - open until the process ends
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def flush() -> bool:
    """Flush stdout and stderr; False if one of them cannot be written to."""
    is_flushed = True
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            is_flushed = False
    return is_flushed


def find_system_program(name: str) -> str | None:
    """The path of a program that only root can replace; None if there is none.

    Such programs run without confinement. A PATH may begin with directories of a project, such as
    `.venv/bin`, where a confined command may write. Where a server runs as root such a directory
    belongs to root as well, so that its owner says nothing: the names of the directories do.
    """
    for directory in SYSTEM_DIRECTORIES:
        path = os.path.realpath(os.path.join(directory, name))
        try:
            is_program = S_ISREG(os.stat(path).st_mode) and os.access(path, os.X_OK)
            if is_program and _belongs_to_root(path):
                return path
        except OSError:
            continue  # it is missing
    return None


def _belongs_to_root(path: str) -> bool:
    """Whether only root can change a file and the directories above it. Raises OSError."""
    while True:
        status = os.stat(path)
        is_shared = status.st_mode & S_IWOTH or (status.st_mode & S_IWGRP and status.st_gid != 0)
        if status.st_uid != 0 or is_shared:
            return False
        if path == "/":
            return True
        path = os.path.dirname(path)
