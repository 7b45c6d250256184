"""A root file system and a kernel, made of packages of Debian, in the cache.

apt-get runs with lists and a state of its own, so the machine can have another release and nothing
is installed on it; any user can do so. Packages are only unpacked: none of their scripts runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from tests.kernel import archive

# The release of the root, for its Python; the kernel can be of another one.
RELEASE: Final = "bookworm"
_PYTHON: Final = "3.11"
_KERNEL: Final = "linux-image-cloud-amd64"
_MIRROR: Final = os.environ.get("EXEC_SERVER_DEBIAN_MIRROR", "http://deb.debian.org")
_KEYS: Final = "/usr/share/keyrings/debian-archive-keyring.gpg"
# What a policy, a case or a test of the sandbox runs, and what the first process needs.
_PROGRAMS: Final = (
    *("base-files", "bash", "coreutils", "curl", "dash", "findutils", "git", "grep", "libc-bin"),
    *("mawk", "mount", "procps", "python3", "sed", "util-linux"),
)
# Dependencies that only scripts of packages need, or parts of git that no test uses.
_LEFT_OUT: Final = re.compile(r"(adduser|debconf|dpkg|git-man|lib\w+-perl|libperl|perl|usrmerge)")
_NOT_COPIED: Final = ("usr/share/doc", "usr/share/locale", "usr/share/man", "usr/share/zoneinfo")
# Tools for developers that run on the host alone, and large parts of other tests.
_NOT_INSTALLED: Final = ("botocore", "httpcore", "mypy", "protobuf", "ruff")
_USER: Final = 1000
_ACCOUNTS: Final = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534::/nonexistent:/bin/false\n"
    f"tester:x:{_USER}:{_USER}:tester:/home/tester:/bin/bash\n",
    "group": f"root:x:0:\ntty:x:5:\nnogroup:x:65534:\ntester:x:{_USER}:\n",
    "hostname": "exec-server\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}


_Words = list[str | Path]


class Unavailable(Exception):
    """Something that the virtual machine needs cannot be had here."""


def cache() -> Path:
    """The folder of everything that is fetched or made."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "exec-server-kernel"


# ---- apt ------------------------------------------------------------------------------


class _Apt:
    """apt-get for one release, with its state in a folder."""

    def __init__(self, folder: Path, release: str) -> None:
        for name in ("lists/partial", "archives/partial"):
            (folder / name).mkdir(parents=True)
        (folder / "status").touch()
        suite = release.partition("-")[0]
        releases = [("debian", suite), ("debian-security", f"{suite}-security")]
        if release != suite:  # for example bookworm-backports
            releases.append(("debian", release))
        lines = [f"deb [signed-by={_KEYS}] {_MIRROR}/{path} {name} main" for path, name in releases]
        (folder / "sources.list").write_text("\n".join(lines) + "\n")
        self.archives = folder / "archives"
        self._release = release
        # Otherwise the newest of all, which can be in the security suite.
        self._wanted = () if release == suite else ("-t", release)
        settings = {
            "Dir::State": folder,
            "Dir::State::status": folder / "status",
            "Dir::Cache": folder,
            "Dir::Etc::sourcelist": folder / "sources.list",
            "Dir::Etc::sourceparts": "/dev/null",
            "APT::Architecture": "amd64",
            "APT::Sandbox::User": "",
            "Acquire::Languages": "none",
            "Debug::NoLocking": "1",
        }
        self._settings = [f"-o{name}={value}" for name, value in settings.items()]
        self("apt-get", "update")

    def __call__(self, program: str, *words: str) -> str:
        return _run([program, "-q", *self._settings, *words], cwd=self.archives)

    def download(self, names: Sequence[str]) -> None:
        """Put packages with all dependencies into `archives`."""
        self("apt-get", "install", "--download-only", "-y", "--no-install-recommends", *names)

    def download_kernel(self) -> Path:
        """The package with the newest kernel of the release."""
        depends = self("apt-cache", "depends", *self._wanted, _KERNEL)
        found = re.search(r"Depends: (linux-image-\d\S+)", depends)
        if found is None:
            raise Unavailable(f"{self._release} has no {_KERNEL}")
        self("apt-get", "download", *self._wanted, found[1])
        return next(self.archives.glob("linux-image-*.deb"))


def _run(command: _Words, **options: Any) -> str:
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, **options)
    except FileNotFoundError as error:
        raise Unavailable(f"{command[0]} is not installed") from error
    if done.returncode != 0:
        raise Unavailable(f"{command[0]}: {(done.stderr or done.stdout).strip()[-600:]}")
    return str(done.stdout)


def _unpack(package: Path, folder: Path, *names: str) -> None:
    """Unpack a package, or some files of it, into a folder in which /bin is a link."""
    reader: _Words = ["dpkg-deb", "--fsys-tarfile", package]
    writer: _Words = ["tar", "-x", "--keep-directory-symlink", "--no-same-owner", "-C", folder]
    writer += ["--wildcards", *names]
    try:
        with subprocess.Popen(reader, stdout=subprocess.PIPE) as source:
            _run(writer, stdin=source.stdout)
    except FileNotFoundError as error:
        raise Unavailable("dpkg-deb is not installed") from error
    if source.returncode != 0:
        raise Unavailable(f"dpkg-deb cannot read {package.name}")


# ---- the kernel -----------------------------------------------------------------------


def kernel(release: str) -> Path:
    """The kernel of a release of Debian, for example `bookworm` or `bookworm-backports`."""
    folder = cache() / f"kernel-{release}"
    if not folder.exists():
        with _made(folder) as made, tempfile.TemporaryDirectory() as temporary:
            package = _Apt(Path(temporary, "apt"), release).download_kernel()
            _unpack(package, Path(temporary), "./boot/vmlinuz-*")
            image = next(Path(temporary, "boot").iterdir())
            shutil.copy(image, made / image.name)
    return next(folder.iterdir())


@contextlib.contextmanager
def _made(folder: Path) -> Iterator[Path]:
    """A new folder that gets its name when it is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".made-", dir=folder.parent))
    try:
        yield made
        with contextlib.suppress(FileExistsError, OSError):
            made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


# ---- the root -------------------------------------------------------------------------


class Root:
    """The root file system without our sources: `tree` unpacked, `image` as a cpio archive."""

    def __init__(self, folder: Path) -> None:
        self.tree = folder / "tree"
        self.image = folder / "root.cpio"

    def compile(self, folder: Path, visible_as: str) -> None:
        """Compile the Python files of a folder with the Python of the root."""
        libraries = self.tree / "usr/lib/x86_64-linux-gnu"
        command: _Words = [libraries / "ld-linux-x86-64.so.2", "--library-path", libraries]
        command += [self.tree / f"usr/bin/python{_PYTHON}", "-S", "-m", "compileall", "-q"]
        command += ["-j", "2", "--invalidation-mode", "unchecked-hash"]
        command += ["-s", folder, "-p", visible_as, folder]
        _run(command, env={"PYTHONHOME": str(self.tree / "usr"), "LC_ALL": "C.UTF-8"})


def root(python: Path, project: Path) -> Root:
    """The root with the requirements of the project, which pip of `python` installs."""
    requirements = _requirements(project / "pyproject.toml")
    recipe = [RELEASE, _PROGRAMS, _LEFT_OUT.pattern, _NOT_COPIED, _ACCOUNTS, requirements]
    digest = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:16]
    folder = cache() / f"root-{digest}"
    if not folder.exists():
        with _made(folder) as made:
            _make_root(Root(made), python, requirements)
        for other in cache().glob("root-*"):
            if other != folder:
                shutil.rmtree(other)  # of earlier requirements
    return Root(folder)


def _requirements(path: Path) -> list[str]:
    project = tomllib.loads(path.read_text())["project"]
    listed = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    # The markers of the list are true here, and false for pip, which runs on another machine.
    plain = [requirement.partition(";")[0].strip() for requirement in listed]
    return sorted(each for each in plain if not each.startswith(_NOT_INSTALLED))


def _make_root(made: Root, python: Path, requirements: list[str]) -> None:
    tree = made.tree
    for name in ("usr/bin", "usr/sbin", "usr/lib", "usr/lib64", "etc", "home/tester"):
        (tree / name).mkdir(parents=True, exist_ok=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (tree / name).symlink_to(f"usr/{name}")
    with tempfile.TemporaryDirectory() as temporary:
        apt = _Apt(Path(temporary, "apt"), RELEASE)
        apt.download(_PROGRAMS)
        for package in sorted(apt.archives.glob("*.deb")):
            if not _LEFT_OUT.match(package.name):
                _unpack(package, tree)
    for name in _NOT_COPIED:
        shutil.rmtree(tree / name, ignore_errors=True)
    for name, text in _ACCOUNTS.items():
        (tree / "etc" / name).write_text(text)
    (tree / "usr/bin/awk").symlink_to("mawk")
    if not (tree / "usr/bin/sh").exists():
        (tree / "usr/bin/sh").symlink_to("dash")
    _install(python, tree / f"usr/local/lib/python{_PYTHON}/dist-packages", requirements)
    made.compile(tree / f"usr/lib/python{_PYTHON}", f"/usr/lib/python{_PYTHON}")
    made.compile(tree / "usr/local/lib", "/usr/local/lib")
    with made.image.open("wb") as image:
        archive.add_tree(image, tree)


def _install(python: Path, folder: Path, requirements: list[str]) -> None:
    """Install wheels for the Python of the root with pip of the host, which knows its index."""
    newest = 36  # glibc of the release
    words: _Words = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    words += ["--target", folder, "--no-compile", "--only-binary", ":all:"]
    words += ["--python-version", _PYTHON, "--implementation", "cp"]
    for minor in range(newest, 4, -1):
        words += ["--platform", f"manylinux_2_{minor}_x86_64"]
    for name in ("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"):
        words += ["--platform", name]
    _run([*words, *requirements])
