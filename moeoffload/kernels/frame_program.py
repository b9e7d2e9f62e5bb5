"""Frames in shared memory as compiled code sees them: header words, their checksum, bells, semaphores.

See `moeoffload.wire.header` and `moeoffload.transport.segment` for what lies where.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic

from moeoffload.kernels.phases import view
from moeoffload.kernels.vector_ir import I32, I64

# Words of a header.
KIND: Final = 0
"""Magic, version, kind, payload dtypes."""
REQUEST_ID: Final = 1
WHERE: Final = 2
"""Epoch in the low half, then layer and top_k."""
ROWS: Final = 3
"""Rows in the low half, flags in the high one."""
BODY_BYTES: Final = 4
TIMEOUT: Final = 5
TIMES: Final = 6
"""Queue in the low half, compute in the high one; microseconds."""
CHECK: Final = 7
"""Code in the low half, checksum in the high one."""
HEADER_WORDS: Final = 8
HEADER_BYTES: Final = 64
LOW: Final = 0xFFFF_FFFF
SHORT: Final = 0xFFFF
_CHECKED_BYTES: Final = 60

# Of the lines that announce requests and replies.
LINE_BYTES: Final = 64
BELL: Final = 24
REPLY_BELL: Final = 16


def _crc_table() -> Any:
    """What a byte contributes to the CRC-32 of zlib (reflected polynomial EDB88320)."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(0xEDB88320), table >> 1)
    return table


_CRC: Final = _crc_table()


@njit(nogil=True)
def header_crc(header: int) -> Any:
    """CRC-32 of the first 60 bytes at an address."""
    data = view(header, np.uint8, _CHECKED_BYTES)
    crc = np.uint32(LOW)
    for byte in data:
        crc = np.uint32(_CRC[np.uint8(crc) ^ byte] ^ (crc >> np.uint32(8)))
    return np.int64(crc ^ np.uint32(LOW))


def c_call(n_arguments: int, result: Any) -> Any:
    """An intrinsic that calls the C function at its first argument with int64 arguments."""
    kind = {types.void: ir.VoidType(), types.int32: I32, types.int64: I64}[result]

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        function = ir.FunctionType(kind, [I64] * n_arguments)
        returned = builder.call(builder.inttoptr(values[0], function.as_pointer()), list(values[1:]))
        return context.get_dummy_value() if result is types.void else returned

    return result(*[types.int64] * (n_arguments + 1)), generate


@intrinsic
def of_semaphore(typing_context: Any, function: Any, semaphore: Any) -> Any:
    """``sem_trywait`` or ``sem_post``."""
    del typing_context, function, semaphore
    return c_call(1, types.int32)


@intrinsic
def ring_bell(typing_context: Any, bell: Any, value: Any) -> Any:
    """Writes the int64 at an address after everything that this thread has written."""
    del typing_context, bell, value

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        builder.store_atomic(values[1], builder.inttoptr(values[0], I64.as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate
