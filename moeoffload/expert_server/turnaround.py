"""Decode steps of a host that has the server to itself, answered by one compiled loop from look to reply.

Everything else is left to Python as it came: larger requests, several that wait, what is wrong with one, kernels with
steps in torch. The loop holds the right to compute, and returns when the compute thread or another lease wants it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final

import torch

from moeoffload.expert_server.arena import HostArena
from moeoffload.expert_server.engine import Engine
from moeoffload.expert_server.requests import ActiveHost
from moeoffload.kernels import LayerKernels
from moeoffload.kernels import turnaround_words as tw
from moeoffload.kernels.pack import convert_program, encode_program, unpack_program
from moeoffload.kernels.program import functions_of_a_look
from moeoffload.kernels.turnaround_program import turnaround_program
from moeoffload.kernels.watch import Seen
from moeoffload.kernels.workspace import PreparedCall
from moeoffload.transport.base import ChannelPlaces, Express
from moeoffload.transport.waiting import CROWDED_S, AdaptiveSpin
from moeoffload.wire import FrameHeader, Kind

MOST_IN_A_ROW: Final = 16
"""Requests after which Python looks what else there is: the times are shared out and learned from then."""
_NS: Final = 1e9


class Turnaround(Express):
    """Made by `for_channel`. It keeps what the loop knows by its address, but not the channel's memory."""

    def __init__(
        self, engine: Engine, host: ActiveHost, lead: LayerKernels, arena: HostArena, places: ChannelPlaces
    ) -> None:
        self.n_read = self.n_unsent = 0
        self.looked_since = 0.0
        self._engine = engine
        self._host = host
        layout, compute = host.layout, host.compute_dtype
        rounded, exact = (_prepare(arena, lead, layout.capacity, dtype) for dtype in (compute, torch.float32))
        calls = [0 if call is None else call.arena.address for call in (*rounded, *exact)]
        threads = [0 if call is None else call.n_threads for call in rounded]
        self._block = block = (ctypes.c_int64 * tw.BLOCK_WORDS)()
        self._address = ctypes.addressof(block)
        self._called_back = ctypes.c_int64(1)
        self._program, self._run = turnaround_program()
        out, back = layout.dtype_out.torch_dtype, layout.dtype_back.torch_dtype
        converts = convert_program(out, compute) if out != compute else None
        unpacks = [unpack_program(dtype)[0] for dtype in (compute, torch.float32)]
        encodes = encode_program(back)[0]
        slots = [word for each in places.slots for word in (each.request, each.reply, each.line, each.semaphore)]
        layers = [_block_of(layer, lead) for layer in host.layers]
        tables = [_table(values) for values in (slots, layers, calls, threads)]
        block[tw.SLOTS], block[tw.LAYERS], block[tw.CALLS], block[tw.THREADS] = map(ctypes.addressof, tables)
        self._kept: tuple[Any, ...] = (rounded, exact, arena, converts, unpacks, encodes, tables)
        block[tw.CALL] = engine.call_address
        block[tw.RING], block[tw.N_SLOTS] = places.ring, len(places.slots)
        block[tw.REQUEST_SEMAPHORE] = places.semaphore
        block[tw.CROWDED_NS], block[tw.MOST] = int(CROWDED_S * _NS), MOST_IN_A_ROW
        block[tw.HEAD], block[tw.HEAD_BACK] = (
            FrameHeader(kind, layout.dtype_out, layout.dtype_back).first_word()
            for kind in (Kind.DISPATCH, Kind.COMBINE)
        )
        block[tw.EPOCH], block[tw.TOP_K], block[tw.HIDDEN] = host.epoch, layout.top_k, layout.hidden
        block[tw.ROW_BYTES], block[tw.ROW_BYTES_BACK] = layout.dispatch_row_bytes, layout.combine_row_bytes
        block[tw.VALUE_BYTES] = layout.hidden * layout.dtype_out.itemsize
        block[tw.N_LAYERS] = len(layers)
        assert lead.shape is not None
        block[tw.ROWS_ARE_OPERANDS] = not lead.shape.converts_rows
        block[tw.KERNEL], block[tw.TEAM], _ = lead.compiled
        block[tw.CONVERT] = 0 if converts is None else converts.address
        block[tw.UNPACK_ROUNDED], block[tw.UNPACK_F32] = (each.address for each in unpacks)
        block[tw.ENCODE] = encodes.address
        block[tw.CLOCK : tw.POST + 1] = functions_of_a_look()

    @classmethod
    def for_channel(cls, engine: Engine, host: ActiveHost, places: ChannelPlaces | None) -> Turnaround | None:
        """One for a channel, or None where it has nothing to offer. To be called while nobody computes."""
        lead = next((layer for layer in host.layers if layer is not None and layer.shape is not None), None)
        arena = host.workspace.arena(1)
        if places is None or lead is None or not isinstance(arena, HostArena) or not engine.may_turn_around:
            return None
        return cls(engine, host, lead, arena, places)

    def serve(self, spin: AdaptiveSpin) -> int | None:
        """See `Express`."""
        budget_s = spin.budget_s
        block, engine = self._block, self._engine
        if budget_s <= 0 or not engine.try_begin(self._host):
            return None
        layers = self._host.layers  # the lease may end: the experts stay until this is over
        unsent = block[tw.UNSENT]
        served, waited_ns, compute_ns = block[tw.SERVED], block[tw.WAITED_NS], block[tw.COMPUTE_NS]
        try:
            block[tw.N_READ], block[tw.LIMIT_NS] = self.n_read, int(budget_s * _NS)
            seen = self._run(self._address) if layers else Seen.CALLED
        finally:
            n_served = block[tw.SERVED] - served
            engine.end(self._host.share, n_served, (block[tw.COMPUTE_NS] - compute_ns) / _NS)
        self.n_read = block[tw.N_READ]
        self.n_unsent += block[tw.UNSENT] - unsent
        self.looked_since = block[tw.LOOKED_SINCE] / _NS
        if n_served:
            spin.learn_from(n_served, (block[tw.WAITED_NS] - waited_ns) / _NS)
        if seen != Seen.CALLED:
            spin.met(seen)
        return seen

    def call_back(self) -> None:
        """See `Express`."""
        self._block[tw.CALL] = ctypes.addressof(self._called_back)
        self._engine.call()  # a look that has begun

    @property
    def totals(self) -> tuple[int, int, float]:
        """Requests and rows that were answered, and the seconds that took."""
        block = self._block
        return block[tw.SERVED], block[tw.SERVED_ROWS], block[tw.COMPUTE_NS] / _NS


def _prepare(
    arena: HostArena, lead: LayerKernels, capacity: int, weights_dtype: torch.dtype
) -> list[PreparedCall | None]:
    """The calls of 0 to MOST_ROWS rows; None where there is none."""
    most = min(tw.MOST_ROWS, capacity)
    return [
        lead.prepare(*arena.part(0, n_rows, weights_dtype)) if 1 <= n_rows <= most else None
        for n_rows in range(tw.MOST_ROWS + 1)
    ]


def _block_of(layer: LayerKernels | None, lead: LayerKernels) -> int:
    return layer.compiled.block if layer is not None and layer.shape is lead.shape else 0


def _table(values: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(values))(*values)
