"""The way of a decode step over shared memory or a lane, without the experts, for `round_trips`.

A row of 4 KiB is checked, packed and sent, found on the other side, checked, summed over no expert at all, encoded and
sent back: the compiled code of both sides, and the Python around it on the host's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, Final

import torch
from transformers import CONFIG_MAPPING
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from moeoffload.expert_server.calibrate import Pace
from moeoffload.expert_server.engine import Engine
from moeoffload.expert_server.requests import ActiveHost, SlotContext
from moeoffload.expert_server.turnaround import Turnaround
from moeoffload.expert_server.workspace import Workspace
from moeoffload.host.exchange import Exchange
from moeoffload.kernels import prepare_layer
from moeoffload.kernels.pack import RowPacker
from moeoffload.payload import PayloadDtype
from moeoffload.transport import (
    ChannelSizes,
    ServerChannel,
    ServerSlot,
    SharedServerEnd,
    StreamListener,
    open_channel,
)
from moeoffload.transport.base import Work
from moeoffload.wire import HEADER_BYTES, FrameLayout

HIDDEN: Final = 2048
TOP_K: Final = 8
EPOCH: Final = 1
TIMEOUT_S: Final = 30.0
LAYOUT: Final = FrameLayout(HIDDEN, TOP_K, PayloadDtype.BF16, PayloadDtype.BF16, 8)


def serve_steps(pipe: Connection, *, over_lane: bool = False) -> None:
    """The server's side; says what the host needs to open its own."""
    torch.set_num_threads(1)
    engine = Engine(Pace())
    config = CONFIG_MAPPING["qwen3_moe"](hidden_size=HIDDEN, moe_intermediate_size=32, num_experts=1)
    config._experts_implementation = "eager"
    experts = Qwen3MoeExperts(config).to(torch.bfloat16).eval().requires_grad_(False)
    for parameter in experts.parameters():
        parameter.zero_()
    layer = prepare_layer(experts, engine.kernel_workspace, "tiled")
    share = engine.shares.join("bench")
    workspace = Workspace(LAYOUT, torch.bfloat16, torch.device("cpu"))
    host = ActiveHost(EPOCH, LAYOUT, [layer], torch.bfloat16, workspace, share)
    engine.start()

    def deliver(channel: ServerChannel, slot: ServerSlot) -> Work | None:
        if slot.owner is None:
            slot.owner = SlotContext(host, slot)
        return engine.submit(channel, slot)

    sizes = ChannelSizes(2, LAYOUT.request_bytes, LAYOUT.reply_bytes)
    with contextlib.ExitStack() as stack:
        stack.callback(engine.stop, TIMEOUT_S)
        server: ServerChannel
        if over_lane:
            listener = StreamListener(max_request_bytes=sizes.request_bytes, lane_port=0)
            stack.callback(listener.close)
            server = listener.open_channel(sizes, deliver)
        else:
            server = SharedServerEnd(sizes, deliver)
        stack.callback(server.close)
        pipe.send(server.offer)
        while over_lane and not server.lane and not pipe.poll(0.01):
            pass  # the host opens it
        server.express = Turnaround.for_channel(engine, host, server)
        assert server.express is not None
        with contextlib.suppress(EOFError):
            pipe.recv()


@contextlib.contextmanager
def call_steps(offer: Any) -> Iterator[Callable[[int], None]]:
    """The host's side: one decode step, whatever the number of bytes."""
    host = open_channel(offer, host="127.0.0.1", timeout_s=TIMEOUT_S)
    exchanges = {}
    for slot in host.slots:
        body = torch.frombuffer(slot.request, dtype=torch.uint8, offset=HEADER_BYTES).data_ptr()
        packer = RowPacker(body, torch.bfloat16, torch.bfloat16, hidden=HIDDEN, top_k=TOP_K)
        exchanges[slot.index] = Exchange(host, slot, packer, LAYOUT, EPOCH)
    hidden = torch.randn(1, HIDDEN).to(torch.bfloat16)
    ids = torch.arange(TOP_K)[None]
    weights = torch.ones(1, TOP_K)
    nowhere = torch.full((128,), -1, dtype=torch.int16)

    def call(n_bytes: int) -> None:
        del n_bytes
        slot = host.acquire(TIMEOUT_S)
        exchange = exchanges[slot.index]
        request_id = host.next_id(slot)
        exchange.send(0, hidden, ids, weights, nowhere, holds_all=True, timeout_s=TIMEOUT_S)
        if not exchange.receive(request_id, 0, 1, TIMEOUT_S):
            host.wait(slot, TIMEOUT_S)
        host.release(slot)

    yield call
    host.close()
