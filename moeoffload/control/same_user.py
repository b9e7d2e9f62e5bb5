"""Which user's process is at the other end of a TCP connection on this machine.

The kernel lists every socket with its owner in /proc/net/tcp and /proc/net/tcp6. The peer's socket is the one whose own
port is the one we see it under, and whose other end is our port.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path
from typing import Final
from urllib.parse import unquote

_TABLES: Final = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED: Final = "01"
_MAPPED: Final = b"\0" * 10 + b"\xff\xff"


def split_peer(peer: str) -> tuple[str, int] | None:
    """Address and port of what gRPC calls a peer: ``ipv4:127.0.0.1:40000``, ``ipv6:%5B::1%5D:40000``; else None."""
    kind, _, rest = peer.partition(":")
    host, _, port = unquote(rest).rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdigit():
        return None
    return host.strip("[]"), int(port)


def uid_of_peer(host: str, port: int, own_port: int) -> int | None:
    """The user whose process connects from ``host``:``port`` of this machine to our ``own_port``; None if unknown."""
    wanted = _packed(host)
    for table in _TABLES:
        try:
            lines = table.read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            words = line.split()
            local, remote, state = words[1:4]
            if state != _ESTABLISHED or not local.endswith(f":{port:04X}") or not remote.endswith(f":{own_port:04X}"):
                continue
            if _unmapped(_kernel_address(local)) == wanted:
                return int(words[7])
    return None


def is_own_user(uid: int) -> bool:
    """Whether processes of this user may do what this process may: its own user's, and root's."""
    return uid in (0, os.geteuid())


def _packed(host: str) -> bytes:
    address = host.partition("%")[0]
    return _unmapped(socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address))


def _kernel_address(text: str) -> bytes:
    """The address of ``0100007F:C350``: words of 32 bits, each printed in this machine's byte order."""
    digits = text.partition(":")[0]
    words = [int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)]
    return struct.pack(f"={len(words)}I", *words)


def _unmapped(address: bytes) -> bytes:
    return address[12:] if address.startswith(_MAPPED) else address
