"""The tiled kernel of one layer: the compiled program with the layer's weights, in one go, prepared, or in steps."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from moeoffload.kernels import words
from moeoffload.kernels.company import bears_company
from moeoffload.kernels.layout import ExpertsLayout
from moeoffload.kernels.matrix_phases import uses_matrix_unit
from moeoffload.kernels.phases import N_HIT, N_PRESENT, SUM_COLUMNS
from moeoffload.kernels.program import ALL_GROUPS, ITEM_GROUPS, c_function, experts_program, row_dtype, threads_for
from moeoffload.kernels.tile import WEIGHT_ROWS
from moeoffload.kernels.workspace import Arena, KernelWorkspace, PreparedCall, layer_shape

_COUNTER_OF: Final = {
    words.UP_PHASE: 0,
    words.ACTIVATE_PHASE: 1,
    words.DOWN_PHASE: 2,
    words.SUM_PHASE: 3,
    words.PACK_UP_PHASE: words.PACK_UP,
    words.PACK_DOWN_PHASE: words.PACK_DOWN,
}
"""Number of a phase's line of counters."""


def _items(n_out: int) -> int:
    """Items that a projection with so many weight rows has for each expert, when it is computed in steps."""
    return -(-(n_out // WEIGHT_ROWS) // ITEM_GROUPS)


class CompiledLayer(NamedTuple):
    """Addresses: of the program, of what runs it in several threads (0: nothing does), of the layer's block."""

    program: int
    team: int
    block: int


class TiledExperts:
    """The compiled program with the weights of one layer. Holds no buffers: those are the workspace's."""

    def __init__(self, experts: nn.Module, layout: ExpertsLayout) -> None:
        self._experts: Any = experts
        self._layout = layout
        self._dtype = layout.up.dtype
        self._row_dtype = row_dtype(self._dtype)
        self._program = experts_program(self._dtype)
        n_experts, up_columns, hidden = layout.up.shape
        inter = layout.down.shape[2]
        sizes = (hidden, inter, up_columns, self._dtype.itemsize, self._row_dtype.itemsize)
        self.shape = layer_shape(n_experts, *sizes, self._row_dtype != self._dtype, uses_matrix_unit(*sizes))
        self._block = (ctypes.c_int64 * words.LAYER_WORDS)(
            n_experts,
            hidden,
            inter,
            up_columns,
            layout.up.data_ptr(),
            layout.up_bias.data_ptr() if layout.up_bias is not None else 0,
            layout.down.data_ptr(),
            layout.down_bias.data_ptr() if layout.down_bias is not None else 0,
        )
        self._block_address = ctypes.addressof(self._block)
        self._expert_bytes = (up_columns + inter) * hidden * self._dtype.itemsize
        self.is_fused = layout.fuses_activation and not self._experts.has_post_expert_norm
        self.is_batch_invariant = self.is_fused or bears_company(
            self._experts, up_columns=up_columns, hidden=hidden, dtype=self._dtype
        )

    def run(
        self,
        rows: torch.Tensor,
        slots: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
        workspace: KernelWorkspace,
    ) -> None:
        """See `LayerKernels`; everything has been checked but the slots."""
        # What the call block points to stays alive as long as this.
        rows, slots, weights = rows.contiguous(), slots.contiguous(), weights.contiguous()
        arena, n_threads = self._prepare(rows, slots, weights, out, workspace)
        if self.is_fused:
            self._run_fused(arena, n_threads)
        else:
            self._run_with_torch(arena, n_threads)

    def prepare(
        self,
        rows: torch.Tensor,
        slots: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
        workspace: KernelWorkspace,
    ) -> PreparedCall:
        """See `LayerKernels`; only if ``is_fused``."""
        arena, n_threads = self._prepare(rows, slots, weights, out, workspace)
        return PreparedCall(self.shape, arena.copy(), n_threads, (rows, slots, weights, out))

    def run_prepared(self, prepared: PreparedCall) -> None:
        """See `LayerKernels.run`."""
        arena = prepared.arena
        call = arena.call
        call[words.LAYER] = self._block_address
        if prepared.n_threads > 1:
            self._run_fused(arena, prepared.n_threads)
            return
        call[words.PHASES] = words.PLAN_PHASE | words.COMPUTE_PHASES
        call[words.ITEM_GROUPS] = ALL_GROUPS
        self._program.run(arena.address)
        if call[words.BAD_ROUTE] >= 0:
            raise self._bad_route(arena)

    @property
    def compiled(self) -> CompiledLayer:
        """See `LayerKernels.compiled`; good as long as this lives."""
        return CompiledLayer(self._program.address, self._program.team_address, self._block_address)

    def _run_fused(self, arena: Arena, n_threads: int) -> None:
        if n_threads == 1:
            self._phases(arena, words.PLAN_PHASE | words.COMPUTE_PHASES, 1)
        else:
            self._phases(arena, words.PLAN_PHASE, 1)
            self._phases(arena, words.COMPUTE_PHASES, n_threads)

    def _prepare(
        self,
        rows: torch.Tensor,
        slots: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
        workspace: KernelWorkspace,
    ) -> tuple[Arena, int]:
        """Fills the call block in with contiguous tensors; returns its arena and the number of threads for it."""
        n_rows, top_k = slots.shape
        arena = workspace.arena(self.shape, n_rows, top_k)
        call, buffers = arena.call, arena.buffers
        call[words.LAYER] = self._block_address
        call[words.ROWS] = rows.data_ptr()
        call[words.SLOTS] = slots.data_ptr()
        call[words.WEIGHTS] = weights.data_ptr()
        call[words.OUT] = out.data_ptr()
        call[words.N_ROWS] = n_rows
        call[words.TOP_K] = top_k
        call[words.WEIGHTS_ARE_F32] = weights.dtype == torch.float32
        call[words.PLAN] = buffers[words.PLAN].data_ptr()
        call[words.UP] = call[words.DOWN] = buffers[words.UP].data_ptr()
        call[words.ACTIVATED] = buffers[words.ACTIVATED].data_ptr()
        call[words.OPERANDS] = buffers[words.OPERANDS].data_ptr() if self.shape.converts_rows else call[words.ROWS]
        call[words.PACKED] = buffers[words.PACKED].data_ptr() if self.shape.uses_matrix_unit else 0
        call[words.LIMIT] = words.NO_LIMIT
        return arena, threads_for(min(n_rows * top_k, self.shape.n_experts) * self._expert_bytes)

    def in_steps(
        self,
        rows: torch.Tensor,
        slots: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
        workspace: KernelWorkspace,
        step_s: Callable[[], float],
    ) -> Iterator[None]:
        """See `LayerKernels.in_steps`; everything has been checked but the slots."""
        rows, slots, weights = rows.contiguous(), slots.contiguous(), weights.contiguous()
        arena, n_threads = self._prepare(rows, slots, weights, out, workspace)
        module, shape, call = self._experts, self.shape, arena.call
        self._phases(arena, words.PLAN_PHASE, 1)
        plan = (ctypes.c_int32 * 2).from_address(call[words.PLAN])
        n_present, n_hit = plan[N_PRESENT], plan[N_HIT]
        n_sums = rows.shape[0] * -(-shape.hidden // SUM_COLUMNS)
        n_packed = n_hit if shape.uses_matrix_unit else 0
        yield from self._steps(arena, words.PACK_UP_PHASE, n_packed, n_threads, step_s)
        yield from self._steps(arena, words.UP_PHASE, n_hit * _items(shape.up_columns), n_threads, step_s)
        if self.is_fused:
            yield from self._steps(arena, words.ACTIVATE_PHASE, n_present, n_threads, step_s)
        elif n_present:
            values = arena.matrix(words.UP, (n_present, shape.up_columns), self._dtype)
            values = module._apply_gate(values) if module.has_gate else module.act_fn(values)
            activated = values.to(self._row_dtype).contiguous()
            call[words.ACTIVATED] = activated.data_ptr()
            yield
        yield from self._steps(arena, words.PACK_DOWN_PHASE, n_packed, n_threads, step_s)
        yield from self._steps(arena, words.DOWN_PHASE, n_hit * _items(shape.hidden), n_threads, step_s)
        if module.has_post_expert_norm and n_present:
            values = arena.matrix(words.UP, (n_present, shape.hidden), self._dtype)
            values = module.post_expert_norm(values).contiguous()
            call[words.DOWN] = values.data_ptr()
            yield
        yield from self._steps(arena, words.SUM_PHASE, n_sums, n_threads, step_s)

    def _steps(
        self, arena: Arena, phase: int, n_items: int, n_threads: int, step_s: Callable[[], float]
    ) -> Iterator[None]:
        """One phase, whose items take about the same time, a few items at a time."""
        call = arena.call
        claimed = words.COUNTERS + _COUNTER_OF[phase] * words.COUNTER_WORDS
        done, size = 0, n_threads
        while done < n_items:
            call[claimed] = done  # threads have claimed beyond the limit
            call[words.LIMIT] = end = min(done + size, n_items)
            started = perf_counter()
            self._phases(arena, phase, n_threads, ITEM_GROUPS)
            took_s = perf_counter() - started
            size = max(n_threads, min(int((end - done) * step_s() / (took_s + 1e-9)), 4 * (end - done)))
            done = end
            yield

    def _phases(self, arena: Arena, phases: int, n_threads: int, item_groups: int = ALL_GROUPS) -> None:
        call = arena.call
        call[words.PHASES] = phases
        if n_threads == 1:
            call[words.ITEM_GROUPS] = item_groups
            self._program.run(arena.address)
        else:
            call[words.YIELD] = c_function("sched_yield")
            call[words.ITEM_GROUPS] = ITEM_GROUPS
            self._program.run_threaded(arena.address, n_threads)
        if call[words.BAD_ROUTE] >= 0:
            raise self._bad_route(arena)

    def _bad_route(self, arena: Arena) -> IndexError:
        return IndexError(f"route {arena.call[words.BAD_ROUTE]}: its slot is not in -1..{self.shape.n_experts - 1}")

    def _run_with_torch(self, arena: Arena, n_threads: int) -> None:
        """The module's own activation, gate or norm between the products, in torch."""
        module, shape, call = self._experts, self.shape, arena.call
        self._phases(arena, words.PLAN_PHASE, 1)
        n_present = ctypes.c_int32.from_address(call[words.PLAN]).value
        if n_present == 0:
            self._phases(arena, words.SUM_PHASE, 1)
            return
        self._phases(arena, words.PROJECT_UP, n_threads)
        values = arena.matrix(words.UP, (n_present, shape.up_columns), self._dtype)
        values = module._apply_gate(values) if module.has_gate else module.act_fn(values)
        activated = values.to(self._row_dtype).contiguous()
        call[words.ACTIVATED] = activated.data_ptr()
        if not module.has_post_expert_norm:
            self._phases(arena, words.PROJECT_DOWN | words.SUM_PHASE, n_threads)
            return
        self._phases(arena, words.PROJECT_DOWN, n_threads)
        values = module.post_expert_norm(arena.matrix(words.UP, (n_present, shape.hidden), self._dtype)).contiguous()
        call[words.DOWN] = values.data_ptr()
        self._phases(arena, words.SUM_PHASE, 1)
