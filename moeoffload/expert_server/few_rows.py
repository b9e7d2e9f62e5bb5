"""A decode step on a server, from frame to frame without a call of torch.

Beside the experts' weights, which pass through its caches, a server finds little of itself in there when the next
request comes: each function of Python or torch on the way costs microseconds then. So what can be known is looked up
once for a slot and a number of rows, and three compiled passes do the rest.
"""

from __future__ import annotations

from typing import Final

import torch

from moeoffload.expert_server.arena import HostArena, KernelInput
from moeoffload.expert_server.workspace import Workspace
from moeoffload.kernels import LayerKernels
from moeoffload.kernels.pack import route_unpacker
from moeoffload.kernels.workspace import PreparedCall
from moeoffload.wire import SlotViews

MOST_ROWS: Final = 8


class FewRows:
    """Requests of one slot with a certain number of rows. Made once.

    Attributes:
        weights_dtype: of the routing weights that they have.
        is_possible: whether rows are computed where they lie in the frame; nothing else can be asked of it if not.
        call: what the kernel reads and writes.
    """

    def __init__(self, workspace: Workspace, views: SlotViews, n_rows: int, weights_dtype: torch.dtype) -> None:
        dispatch, reply = views.dispatch(n_rows), views.combine(n_rows)
        arena = workspace.arena(n_rows)
        self.weights_dtype = weights_dtype
        self._prepared: PreparedCall | None = None
        self._kept = (dispatch, reply)
        """The memory that the passes know by its address."""
        self.is_possible = False
        if isinstance(arena, HostArena) and not arena.copies_rows:
            self.is_possible = True
            buffers = arena.part(0, n_rows, weights_dtype)
            self.call = KernelInput(dispatch.rows, *buffers[1:])
            self._unpack = route_unpacker(dispatch.slots, dispatch.weights, buffers.slots, buffers.weights)
            self._encode = arena.encoder.for_places(buffers.out, reply)

    def compute(self, experts: LayerKernels) -> int | None:
        """Answers the request that lies in the slot, but for the header; returns a row that is not finite, or None.

        Args:
            experts: of a ``shape``.

        Raises:
            IndexError: a slot is not one of theirs.
        """
        prepared = self._prepared
        if prepared is None or prepared.shape is not experts.shape:
            prepared = self._prepared = experts.prepare(*self.call)
            assert prepared is not None
        # Slots are checked by the kernel, so they must not change afterwards, as what a host shares with us could.
        self._unpack()
        experts.run(prepared)
        bad = self._encode()
        return bad if bad >= 0 else None
