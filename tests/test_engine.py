"""The server answers bad frames with typed errors and goes on serving, this host and others; no host sees another's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zmq
from conftest import DEMO, StartServer
from engine_kit import SOON_S, raw_exchange, set_field, set_slot, unspoilt

from moeoffload import open_model
from moeoffload.transport.stream import StreamHostEnd
from moeoffload.wire import ErrorCode

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
        others = ("the epoch of another host", set_field("epoch", other.links[0]._epoch), ErrorCode.BAD_FRAME, "epoch")
        for name, change, code, words in (*BAD_FRAMES, others):
            got, text, _ = raw_exchange(offloaded.links[0], change)
            assert got == code, name
            assert words in text, name
            assert torch.equal(other.model(prompt).logits, expected)
        assert raw_exchange(offloaded.links[0], unspoilt)[:2] == (0, "")
        assert torch.equal(offloaded.model(prompt).logits, expected)


@pytest.mark.parametrize("transport", ["shared", "stream"])
def test_no_secret_of_a_host_is_in_logs_or_answers_that_others_see(start_server: StartServer, transport: str) -> None:
    server = start_server("--log-level", "debug")
    with (
        open_model(DEMO, experts=[server.address], transport=transport, device="cpu") as first,
        open_model(DEMO, experts=[server.address], transport=transport, device="cpu") as second,
    ):
        link, other = first.links[0], second.links[0]
        channel = link.channel
        secrets = [link.lease.lease_id]
        if isinstance(channel, StreamHostEnd):
            secrets.append(channel._wire.socket.getsockopt(zmq.ROUTING_ID).hex())  # type: ignore[union-attr]
        else:
            secrets += [channel._segment.name, channel.nonce.hex()]  # type: ignore[attr-defined]
        raw_exchange(other, set_field("epoch", link._epoch))
        seen = f"{other.client.stats(SOON_S)} {other.client.describe(SOON_S)} {server.log_text}"
        assert all(secret not in seen for secret in secrets)
