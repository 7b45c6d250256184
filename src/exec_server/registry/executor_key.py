"""The key of an executor in a file of its user, so that its fingerprint survives a restart.

Both halves are in PEM, PKCS #8 without a passphrase: X25519, then the ML-KEM-768 seed (RFC 9935).
Each environment id has its own file, so executors with a common home directory differ.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import tempfile
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Final
from urllib.parse import quote

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from exec_server.errors import StartupError
from exec_server.relay.noise import Identity

# The value of --key-file for a key in memory alone, which is new at each start.
IN_MEMORY: Final = "none"
# Of a key file; a real one has about 350. A larger one is not read.
FILE_BYTES: Final = 65_536
# Of a quoted environment id in a file name; a longer one is replaced by its digest.
_NAME_CHARACTERS: Final = 200

_END: Final = b"-----END PRIVATE KEY-----\n"


def executor_identity(
    key_file: str | None, environment_id: str, environ: Mapping[str, str]
) -> Identity:
    """The key in the file, which is created if it is missing; raises StartupError.

    If the default state directory cannot be used, the key is in memory alone, and stderr says so.
    """
    if key_file == IN_MEMORY:
        return Identity.generate()
    if key_file is not None:
        try:
            return _load_or_create(Path(key_file))
        except OSError as error:
            raise StartupError(_reason(key_file, error)) from None
    path = default_path(environment_id, environ)
    try:
        if not path.is_absolute():  # below the working directory, which may be a workspace
            raise OSError("there is no home directory")
        return _load_or_create(path)
    except OSError as error:
        text = f"Warning: {_reason(path, error)}; the key is new at each start, so clients cannot "
        print(f"{text}pin it: name another file with --key-file", file=sys.stderr, flush=True)
        return Identity.generate()


def default_path(environment_id: str, environ: Mapping[str, str]) -> Path:
    """The file for this environment id below the state directory of the user."""
    state = environ.get("XDG_STATE_HOME", "")
    home = Path(os.path.expanduser("~"))  # relative without a home directory
    base = Path(state) if state.startswith("/") else home / ".local" / "state"
    name = quote(environment_id, safe="")
    if len(name) > _NAME_CHARACTERS:
        name = sha256(environment_id.encode()).hexdigest()
    return base / "exec-server" / "executor-keys" / f"{name}.pem"


def _reason(path: str | Path, error: OSError) -> str:
    return f"cannot keep the key of this executor in {path}: {error.strerror or error}"


def _load_or_create(path: Path) -> Identity:
    """Raises OSError if the file cannot be used, StartupError if it must not be."""
    try:
        return _load(path)
    except FileNotFoundError:
        pass
    for directory in reversed(path.parents):  # each, whatever the umask lets others do
        if not directory.exists():
            directory.mkdir(mode=0o700, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # 0600
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o600)  # a umask may have taken the right to read it again
            file.write(_encode(Identity.generate()))
            file.flush()
            os.fsync(descriptor)
        # Of two executors that start at the same time, both use the key of the first.
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        os.unlink(temporary)
    return _load(path)


def _load(path: Path) -> Identity:
    # O_NONBLOCK: a FIFO must not block the start.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _check(path, os.fstat(descriptor))
        content = os.read(descriptor, FILE_BYTES + 1)
    finally:
        os.close(descriptor)
    try:
        return _decode(content)
    except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: it has a passphrase
        raise StartupError(
            f"the key file {path} is not the key of an executor: remove it for a new key"
        ) from None


def _check(path: Path, info: os.stat_result) -> None:
    """Raise StartupError unless the file is one that no other user can know or change."""
    if not stat.S_ISREG(info.st_mode):
        raise StartupError(f"the key file {path} is not a regular file")
    if info.st_uid != os.geteuid():
        raise StartupError(
            f"the key file {path} belongs to another user, who could know the key: use a file of "
            "your own"
        )
    if stat.S_IMODE(info.st_mode) & 0o077:
        raise StartupError(
            f"others may read or write the key file {path}: run `chmod 600` on it, or remove it "
            "for a new key if others may have read it"
        )


def _encode(identity: Identity) -> bytes:
    form = (Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return identity.x25519.private_bytes(*form) + identity.mlkem768.private_bytes(*form)


def _decode(content: bytes) -> Identity:
    """Raises ValueError unless the content is that of a key file."""
    if len(content) > FILE_BYTES:
        raise ValueError("too large")
    first, end, second = content.partition(_END)
    x25519 = load_pem_private_key(first + end, None)
    mlkem768 = load_pem_private_key(second, None)
    if not isinstance(x25519, X25519PrivateKey) or not isinstance(mlkem768, MLKEM768PrivateKey):
        raise ValueError("other kinds of keys")
    return Identity(x25519, mlkem768)
