"""Opens the NaCl sealed box in which a registry may send an agent's task id.

PyNaCl is an extra of its own, loaded here only: most registries send the id in the clear.
"""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from exec_server.errors import StartupError

# A task id has a few dozen characters; a longer box is not one.
BOX_BYTES = 4096


def open_sealed(box: bytes, key: Ed25519PrivateKey) -> bytes:
    """Decrypt a box for the Curve25519 form of a signing key.

    Raises ValueError for a box that cannot be opened, StartupError without PyNaCl.
    """
    if len(box) > BOX_BYTES:
        raise ValueError("sealed box is too long")
    try:
        from nacl.exceptions import CryptoError
        from nacl.public import SealedBox
        from nacl.signing import SigningKey
    except ModuleNotFoundError:
        raise StartupError(
            "the registry encrypted the task id; install PyNaCl with "
            "`pip install '.[agent-identity]'` in a checkout of exec-server"
        ) from None
    private = SigningKey(key.private_bytes_raw()).to_curve25519_private_key()
    try:
        return SealedBox(private).decrypt(box)
    except (CryptoError, TypeError, ValueError):
        raise ValueError("sealed box is not for this key") from None
