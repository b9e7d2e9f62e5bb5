"""The token of a server that serves its own user only: a file readable by this user only, one per listening address.

The server writes it; hosts of the same user on this machine find it by the address that they call. It is in
``$XDG_RUNTIME_DIR/moeoffload`` (or ``/run/user/UID/moeoffload``), else in ``moeoffload-UID`` in the folder for
temporary files. Folders and files that other users own or can access are not used.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from pathlib import Path
from typing import Final

from moeoffload.errors import SystemLimitError

_MOST_BYTES: Final = 256


class UserToken:
    """The token file of a server that listens at ``host``:``port``. Created by `write`; `remove` it at the end."""

    def __init__(self, path: Path, token: str) -> None:
        self.path = path
        self._token = token

    @classmethod
    def write(cls, host: str, port: int, token: str) -> UserToken:
        """Writes the file; replaces one that an earlier server at this address has left.
        Raises SystemLimitError: there is no folder that only this user can access, and that has room for the file."""
        problems = []
        for folder in _folders():
            path = folder / _name(host, port)
            scratch = folder / f".{path.name}.{os.getpid()}"
            try:
                folder.mkdir(mode=0o700, exist_ok=True)
                if not _is_own_folder(folder):
                    problems.append(f"{folder} belongs to somebody else, or others can access it")
                    continue
                descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
                with os.fdopen(descriptor, "w") as file:
                    file.write(token)
                scratch.replace(path)
            except OSError as error:
                problems.append(f"{folder} cannot be written ({error.strerror})")
                with contextlib.suppress(OSError):
                    scratch.unlink()
            else:
                return cls(path, token)
        raise SystemLimitError(
            f"no folder for the token of this user's hosts: {'; '.join(problems)}; set XDG_RUNTIME_DIR to a folder of "
            "your own, or give --token-file"
        )

    def remove(self) -> None:
        """Deletes the file, unless another server at this address has replaced it. Idempotent."""
        if _read(self.path) == self._token:
            self.path.unlink(missing_ok=True)


def user_tokens(host: str, port: int) -> list[str]:
    """Returns the tokens that a host of this user has for a server at loopback ``host``:``port``; usually one."""
    tokens = (_read(folder / _name(host, port)) for folder in _folders() if _is_own_folder(folder))
    return [token for token in tokens if token]


def new_token() -> str:
    """Returns 256 random bits as hex digits."""
    return secrets.token_hex(32)


def _name(host: str, port: int) -> str:
    return f"{numeric_loopback(host)}-{port}.token"


def numeric_loopback(host: str) -> str:
    """Returns ``host``, with localhost as its IPv4 address, so that no token reaches a listener on the IPv6 one."""
    return "127.0.0.1" if host == "localhost" else host


def _folders() -> list[Path]:
    """Returns the folders for tokens; the first usable one is written, all are read: environments may differ."""
    uid = os.geteuid()
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{uid}")
    fallback = Path(tempfile.gettempdir()) / f"moeoffload-{uid}"
    try:
        own = runtime.is_absolute() and runtime.stat().st_uid == uid
    except OSError:
        own = False
    return [runtime / "moeoffload", fallback] if own else [fallback]


def _is_own_folder(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and _is_own(status)


def _is_own(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & 0o077


def _read(path: Path) -> str | None:
    """Returns the token in ``path``; None if there is none, or another user could have written or read it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or not _is_own(status):
            return None
        token = os.read(descriptor, _MOST_BYTES).decode("ascii", "replace").strip()
    finally:
        os.close(descriptor)
    return token if token.isalnum() else None
