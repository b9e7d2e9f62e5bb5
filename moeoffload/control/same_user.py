"""Which user's process is at the other end of a TCP connection on this machine.

The kernel is asked about the peer's socket, whose own end is what we see the peer under and whose other end is ours
(sock_diag, see sock_diag(7)). Where it cannot be asked, all sockets are looked through in /proc/net/tcp and
/proc/net/tcp6: that takes milliseconds.
"""

from __future__ import annotations

import functools
import os
import socket
import struct
from pathlib import Path
from typing import Final
from urllib.parse import unquote

_TABLES: Final = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED: Final = 1
_LOCALHOST: Final = {4: "127.0.0.1", 16: "::1"}
"""By length of the peer's address."""
_TIMEOUT_S: Final = 1.0

# Of linux/netlink.h, linux/sock_diag.h and linux/inet_diag.h; ports and addresses are in the network's order.
_SOCK_DIAG: Final = 4
_BY_FAMILY: Final = 20
_REQUEST: Final = 1
_NO_COOKIE: Final = b"\xff" * 8
_HEADER: Final = struct.Struct("=IHHII")
"""Length, kind, flags, number, port."""
_QUESTION: Final = struct.Struct("=IHHIIBBBBI2s2s16s16sI8s")
"""The header, and: family, protocol, extensions, padding, states, own port, other port, own address, other address,
interface, cookie."""
_ANSWER: Final = struct.Struct("=xB62xII")
"""State, user and inode; more is between them and follows."""
_MOST_BYTES: Final = 4096
_MAPPED: Final = b"\0" * 10 + b"\xff\xff"


def split_peer(peer: str) -> tuple[str, int] | None:
    """Address and port of what gRPC calls a peer: ``ipv4:127.0.0.1:40000``, ``ipv6:%5B::1%5D:40000``; else None."""
    kind, _, rest = peer.partition(":")
    host, _, port = unquote(rest).rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdigit():
        return None
    return host.strip("[]"), int(port)


def uid_of_peer(host: str, port: int, own_host: str, own_port: int) -> int | None:
    """The user whose process connects from ``host``:``port`` of this machine to us; None if unknown.

    ``own_host`` is the loopback address that we listen on, or localhost.
    """
    peer = _packed(host)
    own = _packed(_LOCALHOST[len(peer)] if own_host == "localhost" else own_host)
    if len(own) != len(peer):
        return None
    return _ask_kernel(peer, port, own, own_port) if _kernel_answers() else _look_through(peer, port, own, own_port)


@functools.cache
def _kernel_answers() -> bool:
    """Whether the kernel can be asked, which is tried on a connection of our own."""
    address = (_LOCALHOST[4], 0)
    try:
        with (
            socket.create_server(address) as listener,
            socket.create_connection(listener.getsockname(), _TIMEOUT_S) as connection,
        ):
            place, own = connection.getsockname(), listener.getsockname()
            return _ask_kernel(_packed(place[0]), place[1], _packed(own[0]), own[1]) == os.geteuid()
    except OSError:
        return False


def _ask_kernel(peer: bytes, port: int, own: bytes, own_port: int) -> int | None:
    """The user; None if there is no such connection, or nobody to ask about it."""
    family = socket.AF_INET6 if len(peer) == 16 else socket.AF_INET
    question = _QUESTION.pack(
        _QUESTION.size, _BY_FAMILY, _REQUEST, 1, 0,
        family, socket.IPPROTO_TCP, 0, 0, 1 << _ESTABLISHED,
        port.to_bytes(2), own_port.to_bytes(2), peer, own, 0, _NO_COOKIE,
    )  # fmt: skip
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as kernel:
        kernel.settimeout(_TIMEOUT_S)
        kernel.send(question)
        answer = kernel.recv(_MOST_BYTES)
    if _HEADER.unpack_from(answer)[1] != _BY_FAMILY:
        return None
    state, uid, inode = _ANSWER.unpack_from(answer, _HEADER.size)
    # A socket that nobody has any more, or not yet, has no inode; older kernels say that it is root's.
    return int(uid) if state == _ESTABLISHED and inode else None


def _look_through(peer: bytes, port: int, own: bytes, own_port: int) -> int | None:
    """As `_ask_kernel`, by the tables of all sockets."""
    for table in _TABLES:
        try:
            lines = table.read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            words = line.split()
            local, remote, state = words[1:4]
            if (
                int(state, 16) == _ESTABLISHED
                and local.endswith(f":{port:04X}")
                and remote.endswith(f":{own_port:04X}")
                and _unmapped(_kernel_address(local)) == peer
                and _unmapped(_kernel_address(remote)) == own
            ):
                return int(words[7]) if words[9] != "0" else None
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
