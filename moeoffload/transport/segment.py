"""The memory and the semaphores that a host and a server share, and their names.

Layout: a control area, then the request areas and the reply areas, one of each per slot, all aligned to 4096 bytes::

    0    magic, version, slots, bytes of a request, of a reply and of the whole segment, nonce
    128  the server closed the channel        192  the host closed the channel
    256  one 64-byte line per request in flight: slot, bytes, request id, bell (a ring; a semaphore counts its entries)
    ...  one 64-byte line per slot: bytes, request id, bell of its reply (one semaphore per slot); and, written by the
         host, the id of a request whose reply it no longer waits for

The ring entry is written before the semaphore is posted, under a lock of the host, and read after a token was taken:
the n-th token belongs to the n-th entry, and the semaphore orders memory on every architecture. The bell is written
after the post, for a reader that spins instead of sleeping: the number of the ring entry, counted from 1, or the
request id of the reply. No two lines share a cache line.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import secrets
import struct
import time
from contextlib import suppress
from typing import Final

import posix_ipc

from moeoffload.errors import ProtocolError, ServerError
from moeoffload.transport.base import ChannelSizes, page_aligned

MAGIC: Final = b"MOEXSHM\0"
VERSION: Final = 1
NONCE_BYTES: Final = 16
SHM_FOLDER: Final = "/dev/shm"

_HEAD: Final = struct.Struct("<8sIIQQQ16s")
_WORD: Final = 8
_LINE_WORDS: Final = 64 // _WORD
SERVER_CLOSED: Final = 128 // _WORD
HOST_CLOSED: Final = 192 // _WORD
_RING: Final = 256 // _WORD

_NAME: Final = re.compile(r"/moeoffload-[1-9][0-9]*-[0-9a-f]{32}")
_FILE: Final = re.compile(r"(sem\.)?(moeoffload-([1-9][0-9]*)-[0-9a-f]{32}(-q|-r[0-9]+)?)")


class Segment:
    """One side's mapping of the shared memory, with its semaphores. `create` or `open` it; ``close`` once.

    Attributes:
        words: the control area as 64-bit words.
        ring_at: by request modulo slots, the index of the first word of its line: slot, bytes, request id, bell.
        reply_at: by slot, the index of the first word of its reply line: bytes, request id, bell, cancelled request id.
        nonce: 16 random bytes, the same on both sides.
        buffers: the areas of all slots, see `ChannelSizes.buffers`.
        request_semaphore, reply_semaphores: see the module's docstring.
    """

    def __init__(self, name: str, sizes: ChannelSizes, fd: int, *, create: bool) -> None:
        self.name = name
        self._sizes = sizes
        n, control = sizes.n_slots, _control_bytes(sizes)
        memory = memoryview(mmap.mmap(fd, segment_bytes(sizes)))
        head = (MAGIC, VERSION, n, sizes.request_bytes, sizes.reply_bytes, len(memory))
        if create:
            _HEAD.pack_into(memory, 0, *head, secrets.token_bytes(NONCE_BYTES))
        found = _HEAD.unpack_from(memory)
        if found[:-1] != head:
            raise ProtocolError(f"shared memory {name} starts with {found[:-1]}, expected {head}")
        self.nonce: bytes = found[-1]
        self.words = memory[:control].cast("Q")
        lines = range(_RING, _RING + 2 * n * _LINE_WORDS, _LINE_WORDS)
        self.ring_at, self.reply_at = tuple(lines[:n]), tuple(lines[n:])
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.buffers = memory[control:]
        flags = posix_ipc.O_CREX if create else 0
        semaphores: list[posix_ipc.Semaphore] = []
        try:
            for semaphore in _semaphore_names(name, n):
                semaphores.append(posix_ipc.Semaphore(semaphore, flags, mode=0o600))
        except BaseException:
            for opened in semaphores:
                opened.close()
            raise
        self.request_semaphore, *self.reply_semaphores = semaphores

    @classmethod
    def create(cls, sizes: ChannelSizes) -> Segment:
        """Creates a segment with a random name and reserves all of its memory.
        Raises ServerError: /dev/shm has too little room; the message says how much is needed and available."""
        name = f"/moeoffload-{os.getpid()}-{secrets.token_hex(16)}"
        needed = max(segment_bytes(sizes), sizes.shared_bytes)
        # Checked first: a reservation that fails would first fill memory that other processes need.
        if needed > shared_room():
            raise _no_room(needed)
        shm = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600)
        try:
            os.posix_fallocate(shm.fd, 0, needed)  # otherwise a full /dev/shm would cause a SIGBUS later
            return cls(name, sizes, shm.fd, create=True)
        except BaseException as error:
            unlink(name, sizes.n_slots)
            # Not a lack of file descriptors, for which posix_ipc may set no errno.
            if isinstance(error, OSError) and error.errno not in (None, errno.EMFILE, errno.ENFILE):
                raise _no_room(needed) from error
            raise
        finally:
            shm.close_fd()

    @classmethod
    def open(cls, name: str, sizes: ChannelSizes) -> Segment:
        """Opens a segment that the server created and removes its names, so that a killed process leaves nothing.
        Raises ServerError: there is no such segment on this host, or it was not created by this user's server."""
        if not _NAME.fullmatch(name):
            raise ProtocolError(f"{name!r} is not the name of a shared-memory channel")
        try:
            shm = posix_ipc.SharedMemory(name)
        except posix_ipc.ExistentialError:
            raise ServerError(f"shared memory {name} is not on this host") from None
        except posix_ipc.PermissionsError:
            raise ServerError(f"shared memory {name} belongs to another user") from None
        try:
            stat = os.fstat(shm.fd)
            if stat.st_uid != os.geteuid() or stat.st_mode & 0o077:
                raise ServerError(
                    f"shared memory {name} has owner {stat.st_uid} and mode {stat.st_mode & 0o777:o}, "
                    f"expected {os.geteuid()} and 600"
                )
            if stat.st_size < segment_bytes(sizes):
                raise ProtocolError(f"shared memory {name} has {stat.st_size} bytes, expected {segment_bytes(sizes)}")
            segment = cls(name, sizes, shm.fd, create=False)
        except (posix_ipc.ExistentialError, FileNotFoundError):
            raise ServerError(f"the semaphores of {name} are not on this host") from None
        finally:
            shm.close_fd()
        unlink(name, sizes.n_slots)
        return segment

    def address_of(self, word: int) -> int:
        """Returns the address of a word in this process; valid as long as there is a view of the memory."""
        return self._address + word * _WORD

    def close(self) -> None:
        """Frees the names, if no host has opened the segment, and the semaphores. No thread may still use them.

        The memory itself (and the descriptor that Python keeps for it) is freed when the last view of it is dropped:
        unmapping it under a tensor would crash the process.
        """
        unlink(self.name, self._sizes.n_slots)
        for semaphore in (self.request_semaphore, *self.reply_semaphores):
            semaphore.close()


def segment_bytes(sizes: ChannelSizes) -> int:
    """Returns the size of a whole segment in bytes."""
    return _control_bytes(sizes) + sizes.buffer_bytes


def _control_bytes(sizes: ChannelSizes) -> int:
    return page_aligned(_RING * _WORD + 2 * sizes.n_slots * 64)


def unlink(name: str, n_slots: int) -> None:
    """Removes the names of a segment and of its semaphores, as far as they exist; open mappings stay usable."""
    for semaphore in _semaphore_names(name, n_slots):
        with suppress(posix_ipc.ExistentialError):
            posix_ipc.unlink_semaphore(semaphore)
    with suppress(posix_ipc.ExistentialError):
        posix_ipc.unlink_shared_memory(name)


def sweep_stale_segments(min_age_s: float = 60.0) -> int:
    """Removes what this user's servers left behind that were killed before a host opened their segment.

    Removes only names whose process is dead and that are older than ``min_age_s`` seconds, since a process in another
    container looks dead from here. Returns how many names were removed.
    """
    n_removed = 0
    youngest = time.time() - min_age_s
    for entry in os.scandir(SHM_FOLDER):
        match = _FILE.fullmatch(entry.name)
        if not match or os.path.exists(f"/proc/{match[3]}"):
            continue
        try:
            stat = entry.stat(follow_symlinks=False)
            if stat.st_uid == os.geteuid() and stat.st_ctime <= youngest:
                os.unlink(entry.path)
                n_removed += 1
        except FileNotFoundError:
            pass  # another process swept it
    return n_removed


def _semaphore_names(name: str, n_slots: int) -> list[str]:
    return [f"{name}-q", *(f"{name}-r{i}" for i in range(n_slots))]


def shared_room() -> int:
    """Returns the free shared memory of this machine in bytes."""
    room = os.statvfs(SHM_FOLDER)
    return room.f_bavail * room.f_frsize


def _no_room(needed: int) -> ServerError:
    return ServerError(
        f"a shared-memory channel needs {needed} bytes in {SHM_FOLDER}, available are {shared_room()} bytes"
    )
