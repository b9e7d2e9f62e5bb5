"""Frames: what is written is read back, sizes are exact, and whatever bytes come is within its limits or refused."""

from __future__ import annotations

import struct
import zlib
from typing import Any, cast

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from moeoffload.errors import CapacityError, ProtocolError, ServerError
from moeoffload.payload import PayloadDtype
from moeoffload.text import MAX_TEXT, one_line
from moeoffload.transport.zmq_socket import PIECE_BYTES, UNEXPECTED, FrameSocket, IncomingFrame
from moeoffload.wire import (
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    ErrorCode,
    FrameHeader,
    FrameLayout,
    FrameReader,
    Kind,
    Role,
    SlotViews,
    peek_request_id,
    read_error_text,
    write_error_frame,
)
from moeoffload.wire.layout import MAX_ERROR_TEXT_BYTES
from moeoffload.wire.reader import RULES

u8, u16, u32, u64 = (st.integers(0, 2**bits - 1) for bits in (8, 16, 32, 64))
headers = st.builds(
    FrameHeader, kind=u8, dtype_out=u8, dtype_back=u8, request_id=u64, epoch=u32, layer=u16, top_k=u16, rows=u32,
    flags=u32, body_bytes=u64, timeout_us=u64, queue_us=u32, compute_us=u32, code=u32,
)  # fmt: skip
layouts = st.builds(
    FrameLayout,
    hidden=st.integers(1, 96).map(lambda n: 2 * n),
    top_k=st.integers(1, 9),
    dtype_out=st.sampled_from(PayloadDtype),
    dtype_back=st.sampled_from(PayloadDtype),
    capacity=st.integers(1, 40),
)


@given(headers)
def test_a_header_survives_the_wire(header: FrameHeader) -> None:
    buffer = memoryview(bytearray(HEADER_BYTES))
    header.pack_into(buffer)
    read = FrameHeader()
    read.unpack_from(buffer)
    assert read == header
    assert peek_request_id(buffer) == header.request_id


@given(headers, st.integers(0, HEADER_BYTES * 8 - 1))
def test_every_flipped_bit_of_a_header_is_noticed(header: FrameHeader, bit: int) -> None:
    buffer = memoryview(bytearray(HEADER_BYTES))
    header.pack_into(buffer)
    buffer[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError):
        FrameHeader().unpack_from(buffer)


@given(layouts, st.data())
def test_views_cover_a_dispatch_body_exactly_and_share_its_memory(layout: FrameLayout, data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, layout.capacity))
    frame = memoryview(bytearray(layout.request_bytes))
    views = layout.dispatch_views(frame, rows)
    assert sum(view.nbytes for view in views) == rows * layout.dispatch_row_bytes
    for value, view in enumerate(views, start=1):
        view.fill_(value)
    body = frame[HEADER_BYTES : HEADER_BYTES + rows * layout.dispatch_row_bytes]
    again = layout.dispatch_views(memoryview(bytearray(HEADER_BYTES) + bytes(body)), rows)
    assert all(bool((view == value).all()) for value, view in enumerate(again, start=1))
    assert not any(frame[HEADER_BYTES + len(body) :])


def test_the_largest_layouts_stay_below_the_frame_limit() -> None:
    layout = FrameLayout(16_384, 8, PayloadDtype.F32, PayloadDtype.F32, 4096)
    assert layout.request_bytes <= MAX_FRAME_BYTES


@given(st.text(max_size=4000))
def test_error_text_is_cut_to_what_fits_and_never_read_beyond_its_frame(text: str) -> None:
    layout = FrameLayout(2, 1, PayloadDtype.F16, PayloadDtype.F16, 1)
    frame = memoryview(bytearray(layout.reply_bytes))
    header = FrameHeader()
    n_bytes = write_error_frame(header, frame, 7, ErrorCode.INTERNAL, text)
    assert n_bytes == HEADER_BYTES + header.body_bytes <= layout.reply_bytes
    read = read_error_text(frame, header.body_bytes)
    assert one_line(text, MAX_ERROR_TEXT_BYTES).startswith(read.rstrip("\N{REPLACEMENT CHARACTER}."))


def test_views_that_are_used_again_are_made_once() -> None:
    layout = FrameLayout(4, 2, PayloadDtype.F32, PayloadDtype.F32, 200)
    views = SlotViews(layout, *(memoryview(bytearray(layout.request_bytes)) for _ in range(2)))
    for rows in [*range(1, 201), 1, 2, 3, 4]:
        assert views.dispatch(rows) is views.dispatch(rows)
        assert views.combine(rows % 2 + 1) is views.combine(rows % 2 + 1)
    assert views.n_created == 204 + 2


def test_a_view_that_is_made_while_the_channel_closes_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = FrameLayout(64, 2, PayloadDtype.F32, PayloadDtype.F32, 40)
    make = FrameLayout.combine_view

    def slowly(self: FrameLayout, buffer: memoryview, n_rows: int) -> torch.Tensor:
        views.drop()  # another thread closes the lease
        return make(self, buffer, n_rows)

    monkeypatch.setattr(FrameLayout, "combine_view", slowly)
    memory = bytearray(layout.reply_bytes)
    views = SlotViews(layout, memoryview(bytearray(layout.request_bytes)), memoryview(memory))
    assert views.combine(30).shape == (30, 64)
    memory.append(0)  # not possible as long as somebody has a view on it


def test_views_of_a_closed_channel_are_an_error_of_the_server() -> None:
    layout = FrameLayout(64, 2, PayloadDtype.F32, PayloadDtype.F32, 4)
    views = SlotViews(layout, memoryview(bytearray(layout.request_bytes)), memoryview(bytearray(layout.reply_bytes)))
    assert views.combine(1).shape == (1, 64)
    views.drop()
    with pytest.raises(ServerError, match="closed meanwhile"):
        views.combine(2)
    with pytest.raises(ServerError, match="closed meanwhile"):
        views.dispatch(1)


LAYOUT = FrameLayout(6, 2, PayloadDtype.F16, PayloadDtype.BF16, 5)
# Values that are near to something: limits, signs, sizes of the layout.
numbers = st.one_of(
    st.integers(0, 64),
    st.sampled_from([2**k + d for k in (7, 8, 15, 16, 30, 31, 32, 62, 63) for d in (-1, 0, 1)]),
    st.integers(0, 2**64 - 1),
)
layout_numbers = st.one_of(st.integers(-3, 80), st.integers(-(2**70), 2**70))


def dispatch_frame(rows: int = 3) -> bytearray:
    frame = bytearray(LAYOUT.request_bytes)
    header = FrameHeader(
        Kind.DISPATCH, LAYOUT.dtype_out, LAYOUT.dtype_back, request_id=7, epoch=1, top_k=LAYOUT.top_k, rows=rows,
        body_bytes=rows * LAYOUT.dispatch_row_bytes,
    )  # fmt: skip
    header.pack_into(memoryview(frame))
    return frame[: HEADER_BYTES + header.body_bytes]


def seal(frame: bytearray) -> None:
    """Makes the checksum right again, as somebody would who means harm."""
    frame[60:64] = struct.pack("<I", zlib.crc32(frame[:60]))


@given(st.data())
def test_a_changed_frame_is_refused_or_stays_within_its_limits(data: st.DataObject) -> None:
    frame = dispatch_frame()
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, HEADER_BYTES - 1))
        frame[at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        seal(frame)
    length = data.draw(st.integers(0, len(frame)) | st.just(len(frame)))
    header = FrameHeader()
    try:
        FrameReader(Role.SERVER, LAYOUT, 1).read(header, memoryview(frame)[:length], length)
    except (ProtocolError, CapacityError):
        return
    assert 1 <= header.rows <= LAYOUT.capacity
    views = LAYOUT.dispatch_views(memoryview(frame), header.rows)
    assert HEADER_BYTES + sum(view.nbytes for view in views) == length


AGREED = {
    Kind.DISPATCH: {
        "epoch": 9, "dtype_out": int(LAYOUT.dtype_out), "dtype_back": int(LAYOUT.dtype_back), "top_k": LAYOUT.top_k,
        "rows": 3, "body_bytes": 3 * LAYOUT.dispatch_row_bytes,
    },
    Kind.COMBINE: {
        "epoch": 9, "dtype_back": int(LAYOUT.dtype_back), "rows": 3, "body_bytes": 3 * LAYOUT.combine_row_bytes,
    },
    Kind.ERROR: {},
}  # fmt: skip
"""Fields of a frame of each kind that must be as they are here."""


def read(role: Role, kind: int, fields: dict[str, int], more_bytes: int = 0) -> None:
    header = FrameHeader(kind, **fields)
    frame = memoryview(bytearray(HEADER_BYTES))
    header.pack_into(frame)
    FrameReader(role, LAYOUT, 9).read(FrameHeader(), frame, HEADER_BYTES + header.body_bytes + more_bytes)


@pytest.mark.parametrize("role", Role)
def test_each_side_takes_the_kinds_of_its_table_and_every_agreed_field_counts(role: Role) -> None:
    """Enumerates the table: a kind that is not in it is refused, and so is each field that differs, by its name."""
    for kind in range(256):
        if kind not in RULES[role]:
            with pytest.raises(ProtocolError, match=f"frame kind is {kind}"):
                read(role, kind, AGREED[Kind.DISPATCH])
            continue
        good = AGREED[Kind(kind)]
        read(role, kind, good)
        for name, value in good.items():
            with pytest.raises(CapacityError if name == "rows" else ProtocolError, match=name):
                read(role, kind, {**good, name: value + 5})
        for more_bytes in (-1, 1) if good else ():
            with pytest.raises(ProtocolError, match="bytes"):
                read(role, kind, good, more_bytes)
        if good:
            with pytest.raises(ProtocolError, match="rows is 0"):
                read(role, kind, {**good, "rows": 0, "body_bytes": 0})


@given(*[layout_numbers] * 3, st.sampled_from(PayloadDtype), st.sampled_from(PayloadDtype))
def test_a_layout_is_refused_or_its_frames_stay_below_the_limit(
    hidden: int, top_k: int, capacity: int, out: PayloadDtype, back: PayloadDtype
) -> None:
    try:
        layout = FrameLayout(hidden, top_k, out, back, capacity)
    except ProtocolError:
        return
    assert 0 < layout.request_bytes <= MAX_FRAME_BYTES
    assert 0 < layout.reply_bytes <= MAX_FRAME_BYTES


@given(st.binary(max_size=3000), numbers)
@example(b"x" * 3000, 2**63)
def test_the_text_of_an_error_is_one_printable_line(body: bytes, claimed: int) -> None:
    frame = memoryview(bytes(HEADER_BYTES) + body)
    text = read_error_text(frame, claimed)
    assert text.isprintable()
    assert len(text) <= min(claimed, MAX_ERROR_TEXT_BYTES)


@given(st.text(st.characters(), max_size=600), st.integers(0, MAX_TEXT))
def test_text_of_the_other_side_becomes_one_line(text: str, limit: int) -> None:
    line = one_line(text, limit)
    assert len(line) <= max(limit, 3)
    assert line.isprintable()
    line.encode()  # no halves of surrogate pairs
    if text.isprintable() and len(text) <= limit:
        assert line == text


REQUEST_BYTES = 2 * PIECE_BYTES + 1000
tags = st.tuples(
    st.sampled_from([5, 6, 7, 8, 9, 2**64 - 1]),
    st.sampled_from([0, 1, PIECE_BYTES - 1, PIECE_BYTES, 2 * PIECE_BYTES, 3 * PIECE_BYTES, 2**32 - 1]),
    st.sampled_from(
        [0, 63, 64, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES, REQUEST_BYTES, REQUEST_BYTES + 1, 2**32 - 1]
    ),
    st.sampled_from([0, 1, 64, 1000, PIECE_BYTES - 1, PIECE_BYTES]),
)


class OneMessage:
    """What an `IncomingFrame` uses of a socket: the piece of one message."""

    def __init__(self, piece: bytes | memoryview) -> None:
        self._piece = piece
        self.room = 0
        """Bytes of the place that it was received into; 0 if it was not received."""

    def receive_piece(self, buffer: memoryview) -> int:
        self.room = len(buffer)
        n_bytes = min(len(buffer), len(self._piece))
        buffer[:n_bytes] = self._piece[:n_bytes]
        return len(self._piece)

    def skip(self) -> None:
        """Nothing follows."""


def received(incoming: IncomingFrame, message: OneMessage, request_id: int, at: int, frame_bytes: int) -> int | None:
    return incoming.receive(cast("FrameSocket", message), request_id, at, frame_bytes)


@given(st.lists(tags, max_size=12))
def test_pieces_in_any_order_never_leave_their_buffer(pieces: list[tuple[int, int, int, int]]) -> None:
    memory = memoryview(bytearray(REQUEST_BYTES))
    incoming = IncomingFrame(memory)
    at_end = 0
    for request_id, at, frame_bytes, n_bytes in pieces:
        message = OneMessage(bytes(n_bytes))
        result = received(incoming, message, request_id, at, frame_bytes)
        if not message.room:
            assert result == (UNEXPECTED if at else frame_bytes)
            assert at or not HEADER_BYTES <= frame_bytes <= REQUEST_BYTES
            continue
        assert HEADER_BYTES <= frame_bytes <= REQUEST_BYTES
        assert at == 0 or at == at_end
        at_end = at + PIECE_BYTES
        expected = min(PIECE_BYTES, frame_bytes - at)
        assert expected <= message.room <= PIECE_BYTES
        if n_bytes != expected:
            assert result == 0
        else:
            assert result == (frame_bytes if at + n_bytes == frame_bytes else None)
        if result is not None:
            assert received(incoming, OneMessage(b"x"), request_id, at_end, frame_bytes) == UNEXPECTED


@given(st.integers(HEADER_BYTES, REQUEST_BYTES), st.randoms())
def test_a_frame_cut_into_pieces_comes_together_in_order_and_only_then(n_bytes: int, random: Any) -> None:
    sent = memoryview(random.randbytes(min(n_bytes, 3000)).ljust(REQUEST_BYTES, b"."))
    memory = memoryview(bytearray(REQUEST_BYTES))
    incoming = IncomingFrame(memory)
    done: int | None = None
    for at in range(0, n_bytes, PIECE_BYTES):
        assert done is None
        message = OneMessage(sent[at : min(at + PIECE_BYTES, n_bytes)])
        assert received(incoming, message, 3, at + PIECE_BYTES, n_bytes) == UNEXPECTED
        assert at == 0 or received(incoming, message, 4, at, n_bytes) == UNEXPECTED
        done = received(incoming, message, 3, at, n_bytes)
    assert done == n_bytes
    assert memory[:n_bytes] == sent[:n_bytes]


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES + 200))
def test_views_never_reach_beyond_the_bytes_that_are_there(data: bytes) -> None:
    frame = memoryview(bytearray(data))
    for rows in range(1, LAYOUT.capacity + 1):
        if HEADER_BYTES + rows * LAYOUT.dispatch_row_bytes <= len(frame):
            assert isinstance(LAYOUT.dispatch_views(frame, rows).slots, torch.Tensor)
        else:
            with pytest.raises(ValueError, match="buffer"):
                LAYOUT.dispatch_views(frame, rows)
