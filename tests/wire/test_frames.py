"""Frames: what is written is read back, damage is named, sizes are exactly what the format says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moeoffload.errors import ProtocolError, ServerError
from moeoffload.payload import PayloadDtype
from moeoffload.text import one_line
from moeoffload.wire import (
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    FrameHeader,
    FrameLayout,
    SlotViews,
    peek_request_id,
    read_error_text,
    write_error_text,
)
from moeoffload.wire.layout import MAX_ERROR_TEXT_BYTES

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
    assert sum(view.nbytes for view in views) == layout.dispatch_body_bytes(rows)
    for value, view in enumerate(views, start=1):
        view.fill_(value)
    body = frame[HEADER_BYTES : HEADER_BYTES + layout.dispatch_body_bytes(rows)]
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
    n_bytes = write_error_text(frame, text)
    assert n_bytes <= layout.reply_bytes - HEADER_BYTES
    read = read_error_text(frame, n_bytes)
    assert one_line(text, MAX_ERROR_TEXT_BYTES).startswith(read.rstrip("\N{REPLACEMENT CHARACTER}."))
    assert read.isprintable()
    assert len(read_error_text(frame, 2**63)) <= MAX_ERROR_TEXT_BYTES


def test_views_of_few_rows_are_made_once_and_no_others_are_kept() -> None:
    layout = FrameLayout(4, 2, PayloadDtype.F32, PayloadDtype.F32, 200)
    views = SlotViews(layout, *(memoryview(bytearray(layout.request_bytes)) for _ in range(2)))
    decode = views.dispatch(1)
    for rows in range(1, 201):
        views.dispatch(rows)
        assert views.combine(rows % 2 + 1) is views.combine(rows % 2 + 1)
    assert views.dispatch(1) is decode
    assert views.n_created == 16 + 2


@pytest.mark.parametrize("rows", [1, 30])
def test_a_view_that_is_made_while_the_channel_closes_is_let_go(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = FrameLayout(64, 2, PayloadDtype.F32, PayloadDtype.F32, 40)
    memory = bytearray(layout.reply_bytes)
    views = SlotViews(layout, memoryview(bytearray(layout.request_bytes)), memoryview(memory))
    make = layout.combine_view

    def slowly(buffer: memoryview, n_rows: int) -> torch.Tensor:
        views.drop()  # another thread closes the lease
        return make(buffer, n_rows)

    monkeypatch.setattr(views._combine, "_make", slowly)
    with pytest.raises(ServerError, match="closed meanwhile") as caught:
        views.combine(rows)
    caught.value.__traceback__ = None
    del caught
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
