"""Decode steps of a host that has the server to itself, answered by one compiled loop from look to reply.

Everything else is left to Python as it came: larger requests, several that wait, what is wrong with one, kernels with
steps in torch. The loop holds the right to compute, and returns when the compute thread or another lease wants it.
"""

from __future__ import annotations

import ctypes
from typing import Final

from moeoffload.expert_server.compiled_steps import CompiledSteps, word_table
from moeoffload.expert_server.engine import Engine
from moeoffload.expert_server.requests import ActiveHost
from moeoffload.kernels import turnaround_words as tw
from moeoffload.kernels.turnaround_program import lane_turnaround_program, turnaround_program
from moeoffload.kernels.watch import Seen
from moeoffload.transport.base import Express, ServerChannel
from moeoffload.transport.waiting import CROWDED_S, AdaptiveSpin
from moeoffload.wire import HEADER_BYTES

MOST_IN_A_ROW: Final = 16
"""Requests after which Python looks what else there is: the times are shared out and learned from then."""
_NS: Final = 1e9


class Turnaround(Express):
    """Made by `for_channel`. It keeps what the loop knows by its address, but not the channel's memory."""

    def __init__(self, engine: Engine, host: ActiveHost, steps: CompiledSteps, channel: ServerChannel) -> None:
        """``steps`` are its own."""
        self.n_read = self.n_unsent = 0
        self.looked_since = 0.0
        self._engine = engine
        self._host = host
        self._steps = steps
        self._block = block = steps.block
        self._called_back = ctypes.c_int64(1)
        block[tw.CALL] = engine.call_address
        block[tw.CROWDED_NS], block[tw.MOST] = int(CROWDED_S * _NS), MOST_IN_A_ROW
        places = channel.places
        if places is not None:
            self._program, self._run = turnaround_program()
            slots = [word for each in places.slots for word in (each.request, each.reply, each.line, each.semaphore)]
            self._slots = word_table(slots)
            block[tw.SLOTS] = ctypes.addressof(self._slots)
            block[tw.RING], block[tw.N_SLOTS] = places.ring, len(places.slots)
            block[tw.REQUEST_SEMAPHORE] = places.semaphore
        else:
            self._program, self._run = lane_turnaround_program()
            block[tw.LANE] = channel.lane
            n_bytes = HEADER_BYTES + tw.MOST_ROWS * host.layout.combine_row_bytes
            self._out = memoryview(bytearray(n_bytes))
            block[tw.OUT] = ctypes.addressof(ctypes.c_char.from_buffer(self._out))

    @classmethod
    def for_channel(cls, engine: Engine, host: ActiveHost, channel: ServerChannel) -> Turnaround | None:
        """One for a channel, or None where it has nothing to offer. To be called while nobody computes."""
        if (channel.places is None and not channel.lane) or not engine.may_turn_around:
            return None
        steps = host.make_steps()
        return None if steps is None else cls(engine, host, steps, channel)

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
            seen = self._run(self._steps.address) if layers else Seen.CALLED
        finally:
            n_served = block[tw.SERVED] - served
            engine.end(self._host.share, n_served, (block[tw.COMPUTE_NS] - compute_ns) / _NS)
        self.n_read = block[tw.N_READ]
        self.n_unsent += block[tw.UNSENT] - unsent
        if block[tw.LEFT]:
            self.unsent = self._out[: block[tw.LEFT]]
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
