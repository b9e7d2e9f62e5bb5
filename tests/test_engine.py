"""The server answers bad frames with typed errors and goes on serving, this host and others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import DEMO

from moeoffload import OffloadedModel, open_model
from moeoffload.wire import HEADER_BYTES, ErrorCode, FrameHeader, Kind, read_error_text


def raw_exchange(offloaded: OffloadedModel, change: Callable[[FrameHeader, memoryview], None]) -> tuple[int, str]:
    """Sends one dispatch of a row that ``change`` has spoilt; returns the error code of the reply and its text."""
    link = offloaded.links[0]
    channel, layout = link._channel, link.layout
    slot = channel.acquire(10)
    try:
        views = layout.dispatch_views(slot.request, 1)
        views.rows.fill_(0.5)
        views.weights.fill_(0.1)
        views.slots.zero_()
        header = FrameHeader(
            kind=Kind.DISPATCH,
            dtype_out=layout.dtype_out,
            dtype_back=layout.dtype_back,
            request_id=channel.next_id(slot),
            epoch=link._epoch,
            layer=0,
            top_k=layout.top_k,
            rows=1,
            body_bytes=layout.dispatch_body_bytes(1),
        )
        n_bytes = HEADER_BYTES + header.body_bytes
        change(header, slot.request)
        header.pack_into(slot.request)
        channel.send(slot, n_bytes)
        channel.wait(slot, 30)
        header.unpack_from(slot.reply)
        if header.kind != Kind.ERROR:
            return 0, ""
        return header.code, read_error_text(slot.reply, header.body_bytes)
    finally:
        channel.release(slot)


def set_slot(value: int) -> Callable[[FrameHeader, memoryview], None]:
    def change(header: FrameHeader, frame: memoryview) -> None:
        frame[HEADER_BYTES + header.body_bytes - 2 : HEADER_BYTES + header.body_bytes] = value.to_bytes(
            2, "little", signed=True
        )

    return change


def set_field(name: str, value: int) -> Callable[[FrameHeader, memoryview], None]:
    return lambda header, frame: setattr(header, name, value)


BAD_FRAMES: list[tuple[str, Any, ErrorCode, str]] = [
    ("more rows than the cap", set_field("rows", 65), ErrorCode.CAPACITY, "65 rows, at most 64"),
    ("2^32 - 1 rows", set_field("rows", 2**32 - 1), ErrorCode.CAPACITY, "rows"),
    ("no rows", set_field("rows", 0), ErrorCode.BAD_FRAME, ""),
    ("a body length that lies", set_field("body_bytes", 2**60), ErrorCode.BAD_FRAME, "body_bytes"),
    ("another top-k", set_field("top_k", 3), ErrorCode.BAD_FRAME, "top_k"),
    ("another payload dtype", set_field("dtype_out", 1), ErrorCode.BAD_FRAME, "dtype_out"),
    ("a kind that is no request", set_field("kind", 77), ErrorCode.BAD_FRAME, "kind"),
    ("a layer beyond the model", set_field("layer", 60_000), ErrorCode.BAD_FRAME, "layer"),
    ("an old epoch", set_field("epoch", 999_999), ErrorCode.BAD_FRAME, "epoch"),
    ("a slot beyond the table", set_slot(32), ErrorCode.BAD_SLOT, "slots"),
    ("a slot below -1", set_slot(-2), ErrorCode.BAD_SLOT, "slots"),
]


@pytest.mark.parametrize("transport", ["shared", "stream"])
def test_bad_frames_get_typed_errors_and_the_server_goes_on(three_servers: list[str], transport: str) -> None:
    prompt = torch.tensor([[7, 8, 9, 10]])
    with (
        open_model(DEMO, experts=three_servers[:1], device="cpu") as other,
        open_model(DEMO, experts=three_servers[:1], batch_capacity=64, transport=transport, device="cpu") as offloaded,
        torch.inference_mode(),
    ):
        expected = other.model(prompt).logits
        for name, change, code, words in BAD_FRAMES:
            got, text = raw_exchange(offloaded, change)
            assert got == code, name
            assert words in text, name
            assert torch.equal(other.model(prompt).logits, expected)
        assert raw_exchange(offloaded, lambda header, frame: None) == (0, "")
        assert torch.equal(offloaded.model(prompt).logits, expected)
