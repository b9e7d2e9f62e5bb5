"""The key of a lane whose frames are sealed: what the key pairs of an attach agree on (X25519, by libsodium).

ZeroMQ's CURVE (https://rfc.zeromq.org/spec/26/) never uses the key that these two pairs agree on, only ones that
involve its short-lived pairs, so nothing is sealed twice under one nonce. The host's pair is new with each attach, and
an attach has one lane.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Final

from zmq.utils import z85

KEY_BYTES: Final = 32
_NAMES: Final = ("crypto_box_easy_afternm", "crypto_box_open_easy_afternm")


@functools.cache
def _sodium() -> Any:
    """The libsodium of ZeroMQ's CURVE; None where it cannot be reached, and there are no sealed lanes then."""
    try:
        from zmq.backend.cython import _zmq

        library = ctypes.CDLL(_zmq.__file__)  # names are looked up in what it depends on, too
        return library if all(hasattr(library, name) for name in (*_NAMES, "crypto_box_beforenm")) else None
    except (ImportError, OSError):
        return None


class LaneKey:
    """One side's. Made by `agree`.

    Attributes:
        address: of the key.
        side: 0 for the host, 1 for the server.
        functions: addresses of what seals a frame, and opens it.
    """

    def __init__(self, library: Any, key: Any, side: int) -> None:
        self._kept = (library, key)
        self.address = ctypes.addressof(key)
        self.side = side
        self.functions = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in _NAMES]

    @classmethod
    def agree(cls, secret: str, public: str, *, server: bool) -> LaneKey | None:
        """The key of one side's secret and the other side's public key, Z85 text that was checked.

        None where there is no libsodium, or the public key is one with which nobody can agree on a secret.
        """
        library = _sodium()
        if library is None:
            return None
        key = (ctypes.c_ubyte * KEY_BYTES)()
        if library.crypto_box_beforenm(key, bytes(z85.decode(public)), bytes(z85.decode(secret))) != 0:
            return None
        return cls(library, key, int(server))
