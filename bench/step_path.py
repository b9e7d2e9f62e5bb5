"""The way of a decode step without the experts, for `round_trips`: both sides' Python, and what moves the frames.

A row of 4 KiB is checked, packed and sent, found on the other side, checked, summed over no expert at all, encoded and
sent back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, Final

import torch
from transformers import CONFIG_MAPPING
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from moeoffload.expert_server.arena import HostArena
from moeoffload.expert_server.engine import Engine
from moeoffload.expert_server.requests import ActiveHost, Request
from moeoffload.host.link import Deadlines, ExpertLink, LinkInfo
from moeoffload.host.recorder import CallCounters
from moeoffload.kernels import LayerKernels
from moeoffload.payload import PayloadDtype
from moeoffload.placement import ExpertTable
from moeoffload.transport import (
    ChannelSizes,
    ServerChannel,
    ServerSlot,
    SharedServerEnd,
    StreamListener,
    open_channel,
)
from moeoffload.transport.base import Work
from moeoffload.wire import FrameLayout

HIDDEN: Final = 2048
TOP_K: Final = 8
N_EXPERTS: Final = 128
EPOCH: Final = 1
TIMEOUT_S: Final = 30.0
LAYOUT: Final = FrameLayout(HIDDEN, TOP_K, PayloadDtype.BF16, PayloadDtype.BF16, 8)


class _Control:
    """What a link needs of its client and its lease."""

    def listen(self, on_end: object) -> None:
        """It never ends."""

    def close(self, *_: object) -> None:
        """Nothing is open."""


def serve_steps(pipe: Connection, *, over_stream: bool = False) -> None:
    """The server's side; says what the host needs to open its own."""
    torch.set_num_threads(1)
    engine = Engine()
    config = CONFIG_MAPPING["qwen3_moe"](hidden_size=HIDDEN, moe_intermediate_size=32, num_experts=1)
    config._experts_implementation = "eager"
    experts = Qwen3MoeExperts(config).to(torch.bfloat16).eval().requires_grad_(False)
    layer = LayerKernels(experts, engine.kernel_workspace, "tiled")
    arena = HostArena(LAYOUT, torch.bfloat16)
    host = ActiveHost(EPOCH, LAYOUT, [layer], torch.bfloat16, arena, engine.shares.join("bench"))
    engine.start()

    def deliver(channel: ServerChannel, slot: ServerSlot) -> Work | None:
        if slot.owner is None:
            slot.owner = Request(host, channel, slot)
        return engine.submit(channel, slot)

    sizes = ChannelSizes(2, LAYOUT.request_bytes, LAYOUT.reply_bytes)
    with contextlib.ExitStack() as stack:
        stack.callback(engine.stop, TIMEOUT_S)
        if over_stream:
            listener = StreamListener()
            stack.callback(listener.close)
            server: ServerChannel = listener.open_channel(sizes, deliver)
        else:
            server = SharedServerEnd(sizes, deliver)
        stack.callback(server.close)
        pipe.send(server.offer)
        with contextlib.suppress(EOFError):
            pipe.recv()


@contextlib.contextmanager
def call_steps(offer: Any) -> Iterator[Callable[[int], None]]:
    """The host's side: one decode step, whatever the number of bytes. Every expert is held, as -1: none is computed."""
    torch.set_num_threads(1)
    control: Any = _Control()
    channel = open_channel(offer, host="127.0.0.1", timeout_s=TIMEOUT_S)
    link = ExpertLink(
        LinkInfo("bench:1", "cpu", "", channel.name, "", "", N_EXPERTS, 0), control, control, channel, LAYOUT, EPOCH,
        ExpertTable((tuple(range(N_EXPERTS)),)), [N_EXPERTS], torch.device("cpu"),
        Deadlines(TIMEOUT_S, TIMEOUT_S, len(channel.slots), []),
    )  # fmt: skip
    link._slot_of = [torch.full((N_EXPERTS,), -1, dtype=torch.int16)]
    hidden, ids = torch.randn(1, HIDDEN).to(torch.bfloat16), torch.arange(TOP_K)[None]
    weights, counters = torch.ones(1, TOP_K), CallCounters()

    def call(n_bytes: int) -> None:
        del n_bytes
        flight = link.take(wait=True)
        assert flight is not None
        link.send(flight, 0, 0, (hidden, ids, weights), counters)
        link.receive(flight, counters)
        link.release(flight)

    with torch.inference_mode():
        yield call
    link.close()
