"""The frames that each side may receive.

`RULES` lists the kinds that each side accepts and the fields that must be as agreed; only `FrameReader` checks them.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from moeoffload.errors import CapacityError, ProtocolError
from moeoffload.wire.header import HEADER_BYTES, FrameHeader, Kind
from moeoffload.wire.layout import FrameLayout


class Role(Enum):
    """The side that reads a frame."""

    HOST = "host"
    SERVER = "server"


RULES: Final[dict[Role, dict[Kind, tuple[str, ...]]]] = {
    Role.SERVER: {Kind.DISPATCH: ("epoch", "dtype_out", "dtype_back", "top_k")},
    Role.HOST: {Kind.COMBINE: ("epoch", "dtype_back"), Kind.ERROR: ()},
}
"""By reader and kind: the fields that must be as agreed at attach. An error frame's body may have any length.
Cancellations are handled by the transports, see `is_cancel`."""


class FrameReader:
    """Reads the frames of one lease for one side, and checks them before anything is allocated for them."""

    def __init__(self, role: Role, layout: FrameLayout, epoch: int) -> None:
        """``layout`` and ``epoch`` are what was agreed at attach."""
        self._capacity = layout.capacity
        row_bytes = {Kind.DISPATCH: layout.dispatch_row_bytes, Kind.COMBINE: layout.combine_row_bytes}
        self._rules = {
            int(kind): (
                kind.name.lower(),
                tuple((name, int(epoch if name == "epoch" else getattr(layout, name))) for name in agreed),
                row_bytes.get(kind, 0),
            )
            for kind, agreed in RULES[role].items()
        }

    def read(self, header: FrameHeader, frame: memoryview, n_bytes: int) -> None:
        """Reads the header of the frame in the first ``n_bytes`` of ``frame`` into ``header``.
        Raises CapacityError: more rows than agreed; ProtocolError: any other violation of `RULES`; the message names
        the field."""
        header.unpack_from(frame)
        rule = self._rules.get(header.kind)
        if rule is None:
            raise ProtocolError(f"frame kind is {header.kind}, expected {' or '.join(map(str, self._rules))}")
        kind, agreed, row_bytes = rule
        for name, value in agreed:
            if getattr(header, name) != value:
                raise ProtocolError(f"{kind} frame: {name} is {getattr(header, name)}, expected {value}")
        if not row_bytes:
            return
        rows = header.rows
        if rows > self._capacity:
            raise CapacityError(f"{kind} frame has {rows} rows, at most {self._capacity} are taken")
        if not rows:
            raise ProtocolError(f"{kind} frame: rows is 0, expected at least 1")
        if header.body_bytes != rows * row_bytes:
            raise ProtocolError(f"{kind} frame: body_bytes is {header.body_bytes}, expected {rows * row_bytes}")
        if n_bytes != HEADER_BYTES + header.body_bytes:
            raise ProtocolError(f"{kind} frame has {n_bytes} bytes, expected {HEADER_BYTES + header.body_bytes}")
