"""Decode steps of one host from frame to frame in compiled code: header, sums, header.

Beside the experts' weights, which pass through its caches, a server finds little of itself in there when the next
request comes: each function of Python or torch on the way costs microseconds then. So what can be known of a host's
requests is looked up once, and one compiled piece does the rest. What is wrong with a request it leaves to Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final

import torch

from moeoffload.expert_server.arena import HostArena
from moeoffload.expert_server.workspace import Workspace
from moeoffload.kernels import LayerKernels
from moeoffload.kernels import turnaround_words as tw
from moeoffload.kernels.pack import convert_program, encode_program, unpack_program
from moeoffload.kernels.program import functions_of_a_look
from moeoffload.kernels.turnaround_program import answer_program, lane_turnaround_program, turnaround_program
from moeoffload.kernels.workspace import PreparedCall
from moeoffload.wire import FrameHeader, FrameLayout, Kind

_NS: Final = 1e9


class CompiledSteps:
    """Made by `for_host`. Whoever uses it has the right to compute, and keeps the layers and the frames alive.

    Attributes:
        block: words of `turnaround_words`, all of them filled in but those of a ring.
        address: of the block.
    """

    def __init__(
        self,
        layers: Sequence[LayerKernels | None],
        lead: LayerKernels,
        layout: FrameLayout,
        epoch: int,
        compute: torch.dtype,
        arena: HostArena,
    ) -> None:
        rounded, exact = (_prepare(arena, lead, layout.capacity, dtype) for dtype in (compute, torch.float32))
        calls = [0 if call is None else call.arena.address for call in (*rounded, *exact)]
        threads = [0 if call is None else call.n_threads for call in rounded]
        self.block = block = (ctypes.c_int64 * tw.BLOCK_WORDS)()
        self.address = ctypes.addressof(block)
        self._program, self._answer = answer_program()
        out, back = layout.dtype_out.torch_dtype, layout.dtype_back.torch_dtype
        converts = convert_program(out, compute) if out != compute else None
        unpacks = [unpack_program(dtype) for dtype in (compute, torch.float32)]
        encodes, _ = encode_program(back)
        tables = [word_table(values) for values in ([_block_of(layer, lead) for layer in layers], calls, threads)]
        block[tw.LAYERS], block[tw.CALLS], block[tw.THREADS] = map(ctypes.addressof, tables)
        self._kept: tuple[Any, ...] = (rounded, exact, arena, converts, unpacks, encodes, tables)
        block[tw.HEAD], block[tw.HEAD_BACK] = (
            FrameHeader(kind, layout.dtype_out, layout.dtype_back).first_word()
            for kind in (Kind.DISPATCH, Kind.COMBINE)
        )
        block[tw.EPOCH], block[tw.TOP_K], block[tw.HIDDEN] = epoch, layout.top_k, layout.hidden
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
    def for_host(
        cls,
        layers: Sequence[LayerKernels | None],
        layout: FrameLayout,
        epoch: int,
        compute: torch.dtype,
        workspace: Workspace,
    ) -> CompiledSteps | None:
        """Those of a host, or None where its experts are computed in another way. While nobody computes."""
        lead = next((layer for layer in layers if layer is not None and layer.shape is not None), None)
        arena = workspace.arena(1)
        if lead is None or not isinstance(arena, HostArena):
            return None
        return cls(layers, lead, layout, epoch, compute, arena)

    def answer(self, request: int, n_bytes: int, reply: int, queue_s: float) -> int:
        """Answers the frame at an address by one at another; returns its bytes, or 0 if nothing was done.

        Args:
            request: address of the frame, of ``n_bytes`` bytes.
            reply: address of as many bytes as any reply of this host may have.
            queue_s: how long the request has waited, in seconds.
        """
        return self._answer(self.address, request, n_bytes, reply, int(queue_s * _NS))


def compile_ahead(compute: torch.dtype) -> None:
    """Compiles what answers a host's steps, or loads it from disk, so that nothing with a short deadline does.

    For payloads of other dtypes than ``compute`` there are small programs besides; each compiles in a moment.
    """
    answer_program()
    turnaround_program()
    lane_turnaround_program()
    for dtype in (compute, torch.float32):
        unpack_program(dtype)
    encode_program(compute)


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


def word_table(values: Sequence[int]) -> Any:
    """The values as int64 words."""
    return (ctypes.c_int64 * len(values))(*values)
