"""A slot of a channel, for requests of few rows: packed and checked by compiled code; in shared memory and over a lane
also sent and awaited by it."""

from __future__ import annotations

import ctypes
from typing import Final

import torch

from moeoffload.kernels import exchange_words as xw
from moeoffload.kernels.exchange_program import exchange_programs
from moeoffload.kernels.pack import RowPacker
from moeoffload.kernels.program import functions_of_a_look
from moeoffload.transport import HostChannel, HostSlot, SharedHostEnd
from moeoffload.transport.base import ChannelPlaces, CompiledSlot
from moeoffload.transport.waiting import CROWDED_S
from moeoffload.wire import FrameHeader, FrameLayout, Kind

_NS: Final = 1e9
_LOW: Final = 0xFFFF_FFFF
_BYTE: Final = torch.uint8


class Exchange:
    """Not thread-safe, as its slot. What it leaves undone is to be done the long way, which says what is wrong.

    Attributes:
        queue_s, compute_s: what the server has written into the last reply, in seconds.
        n_bytes: of the last reply.
    """

    def __init__(
        self, channel: HostChannel, slot: HostSlot, packer: RowPacker, layout: FrameLayout, epoch: int
    ) -> None:
        """``packer`` is the one of the slot."""
        self.queue_s = self.compute_s = 0.0
        self.n_bytes = 0
        self._channel = channel
        self._slot = slot
        self._kept, post, collect, self._accept = exchange_programs()
        self._packer = packer
        self._block = block = (ctypes.c_int64 * xw.BLOCK_WORDS)()
        self._address = ctypes.addressof(block)
        marks = (ctypes.c_int64.from_buffer(block, word * 8) for word in (xw.SENT, xw.TAKEN, xw.LANE))
        self._code = CompiledSlot(post, collect, self._address, *marks)
        self._nobody_calls = ctypes.c_int64()
        if isinstance(channel, SharedHostEnd):
            self._take_places(channel.places)
        else:
            # Slots of other channels hold on to memory of their own.
            buffers = (slot.request, slot.reply)
            block[xw.REQUEST], block[xw.REPLY] = (torch.frombuffer(each, dtype=_BYTE).data_ptr() for each in buffers)
        block[xw.HEAD], block[xw.HEAD_BACK] = (
            FrameHeader(kind, layout.dtype_out, layout.dtype_back).first_word()
            for kind in (Kind.DISPATCH, Kind.COMBINE)
        )
        block[xw.EPOCH], block[xw.TOP_K] = epoch, layout.top_k
        block[xw.ROW_BYTES], block[xw.ROW_BYTES_BACK] = layout.dispatch_row_bytes, layout.combine_row_bytes
        block[xw.PACK], block[xw.PACK_CALL] = packer.compiled  # type: ignore[attr-defined]
        block[xw.CALL] = ctypes.addressof(self._nobody_calls)
        block[xw.CROWDED_NS] = int(CROWDED_S * _NS)
        block[xw.CLOCK : xw.POST + 1] = functions_of_a_look()

    def _take_places(self, places: ChannelPlaces) -> None:
        block, index = self._block, self._slot.index
        place = places.slots[index]
        block[xw.SLOT], block[xw.RING], block[xw.N_SLOTS] = index, places.ring, len(places.slots)
        block[xw.REQUEST_SEMAPHORE] = places.semaphore
        block[xw.REQUEST], block[xw.REPLY] = place.request, place.reply
        block[xw.LINE], block[xw.SEMAPHORE] = place.line, place.semaphore

    def send(
        self,
        layer: int,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        table: torch.Tensor,
        *,
        holds_all: bool,
        timeout_s: float,
    ) -> int:
        """Sends what `RowPacker.pack` would pack, if the packer ``takes`` it; the packer can be asked what that was.

        Args:
            layer: running number of the MoE layer.
            hidden: (n, hidden) of the packer's source dtype.
            ids: (n, top_k) int64 expert numbers.
            weights: (n, top_k) float32 or of the source dtype.
            table: (n_experts,) int16, the slot of each expert, -1 for those that are elsewhere.
            holds_all: no expert is elsewhere.
            timeout_s: how long the reply will be waited for, in seconds; goes into the header.

        Returns:
            the bytes of the frame; 0 if no row has an expert there; less if nothing was done.

        Raises:
            ServerError: the channel is closed, or takes nothing.
        """
        channel, slot = self._channel, self._slot
        n_bytes = channel.send_by(
            slot,
            self._code,
            hidden.data_ptr(),
            ids.data_ptr(),
            weights.data_ptr(),
            ids.shape[0],
            weights.dtype is torch.float32,
            table.data_ptr(),
            table.shape[0],
            holds_all,
            layer,
            channel.next_id(slot),
            int(timeout_s * 1e6),
        )
        if self._block[xw.N_STALE]:
            channel.n_stale += self._block[xw.N_STALE]
            self._block[xw.N_STALE] = 0
        return n_bytes

    def receive(self, request_id: int, layer: int, n_rows: int, timeout_s: float) -> bool:
        """Looks for the sums in compiled code, as long as that pays; whether they are there and ready to be read.

        Args:
            request_id, layer, n_rows: of what was sent.
            timeout_s: longest look, in seconds.

        Raises:
            ServerError: the channel is closed.
        """
        if not self._channel.look_by(self._slot, self._code, request_id, layer, n_rows, timeout_s=timeout_s):
            return False
        self._read_times()
        return True

    def accept(self, request_id: int, layer: int, n_rows: int, n_bytes: int) -> bool:
        """Whether a reply of ``n_bytes`` that was waited for has the sums of what was sent, ready to be read."""
        if not self._accept(self._address, request_id, layer, n_rows, n_bytes):
            return False
        self._read_times()
        return True

    def _read_times(self) -> None:
        block = self._block
        times = block[xw.TIMES]
        self.queue_s, self.compute_s = (times & _LOW) * 1e-6, (times >> 32 & _LOW) * 1e-6
        self.n_bytes = block[xw.N_BYTES]
