"""The tiled kernel of one layer: runs the C kernels with the layer's weights, in one call or in slices."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from time import perf_counter
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from moeoffload import native
from moeoffload.kernels import calls
from moeoffload.kernels.activation import Activation, recognise
from moeoffload.kernels.calls import DTYPE_CODES, Layer, SlotError, Step
from moeoffload.kernels.packing import KernelMatrix, dtype_of, rows_in_place
from moeoffload.kernels.threads import parallel_address, threads_for
from moeoffload.kernels.workspace import KernelWorkspace, LayerShape

SLICE_S: Final = 2.5e-3
"""Target duration of a slice of a projection, and so the longest wait of a small request for the current slice."""
PIECE_ROUTES: Final = 64
"""An expert's routes are divided among slices in multiples of this, because each slice reads the weights again."""
ROUTES_A_READ: Final = {True: 32, False: 6}
"""Routes computed in about the time of reading their expert's weights, with and without a matrix unit."""
SLICE_ROWS: Final = 256
"""Rows of a slice of the weighted sum, which takes a millisecond or two."""
_NEWEST: Final = 0.25
"""Weight of the newest slice in the moving average of seconds per byte."""
_GATED_SILU: Final = Activation("silu", is_gated=True)
"""The activation that the C kernels compute."""
_TOGETHER: Final = 3 << 15
"""Elements of the trial of batch invariance: enough for torch to use several threads."""
_PARTS: Final = (1, 2, 5, 16)
_UP_AND_ACTIVATE: Final = Step.UP | Step.ACTIVATE


class KernelInput(NamedTuple):
    """The tensors of one call of a layer's experts.

    Attributes:
        rows: (n, hidden) in the compute dtype.
        slots: (n, top_k) int64, the expert of each route; -1 if it is not held here: adds nothing.
        weights: (n, top_k) float32, or the compute dtype: then each expert's weighted output is rounded to it, as in
            transformers.
        out: (n, hidden) float32, contiguous: for each row the weighted sum over its experts, added in the order of its
            slots. Overwritten.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    weights: torch.Tensor
    out: torch.Tensor


class TiledExperts:
    """The C kernels with the weights of one layer. Holds no buffers: these belong to the workspace."""

    def __init__(self, experts: nn.Module) -> None:
        """Reads the layout of a module for which `why_not` returns None; transposes weights, see `rows_in_place`."""
        self._experts: Any = experts
        self._dtype = dtype = dtype_of(experts)
        library, features = calls.library(), native.cpu_features()
        code = DTYPE_CODES[dtype]
        names = ("gate_up_proj" if self._experts.has_gate else "up_proj", "down_proj")
        up, down = self._matrices = [KernelMatrix(rows_in_place(self._experts, name), dtype) for name in names]
        biases = (getattr(self._experts, f"{name}_bias") for name in names if self._experts.has_bias)
        self._biases = [bias.detach().contiguous() for bias in biases]
        n_experts, hidden, inter = down.shape
        up_columns = up.shape[1]
        self._layer = Layer(n_experts, hidden, inter, up_columns, code, features)
        self._layer.up, self._layer.up_parts = up.addresses
        self._layer.down, self._layer.down_parts = down.addresses
        self._layer.up_bias, self._layer.down_bias = [bias.data_ptr() for bias in self._biases] or (0, 0)
        self._layer_address = ctypes.addressof(self._layer)
        self._run = library.moe_experts
        is_packed = self._layer.up_parts or self._layer.down_parts
        self.shape = LayerShape(
            n_experts,
            hidden,
            inter,
            up_columns,
            dtype.itemsize,
            library.moe_operand_bytes(hidden),
            library.moe_operand_bytes(inter),
            bool(library.moe_uses_matrix_unit(self._layer_address)),
            library.moe_scratch_bytes(code, max(hidden, inter)) if is_packed else 0,
        )
        self._expert_bytes = (up.nbytes + down.nbytes) // n_experts
        self.is_fused = not self._experts.has_post_expert_norm and recognise(experts) == _GATED_SILU
        self.is_batch_invariant = self.is_fused or _is_independent_of_batch(
            self._experts, up_columns=up_columns, hidden=hidden, dtype=dtype
        )

    def run(self, inputs: KernelInput, workspace: KernelWorkspace) -> None:
        """See `LayerKernels`; the caller has checked everything but the slots, and made inputs `contiguous`."""
        self._fill(inputs, workspace)
        if self.is_fused:
            self._compute(workspace, Step.ALL)
            return
        self._compute(workspace, Step.PLAN | Step.UP)
        self._activate(workspace)
        self._compute(workspace, Step.DOWN)
        self._sum(workspace)

    def in_slices(self, inputs: KernelInput, workspace: KernelWorkspace) -> Iterator[None]:
        """See `LayerKernels.in_slices`; the caller has done what `run` needs."""
        self._fill(inputs, workspace)
        call = workspace.call
        self._compute(workspace, Step.PLAN)
        yield from self._project(workspace, _UP_AND_ACTIVATE if self.is_fused else Step.UP)
        if not self.is_fused:
            # Not sliced: torch's bits may depend on which rows are computed together.
            call.begin, call.end = 0, call.n_present
            self._activate(workspace)
            yield
        yield from self._project(workspace, Step.DOWN)
        if self._experts.has_post_expert_norm:
            self._sum(workspace)
            return
        n_rows = call.n_rows
        for call.begin_row in range(0, n_rows, SLICE_ROWS):
            call.end_row = min(call.begin_row + SLICE_ROWS, n_rows)
            self._compute(workspace, Step.SUM)
            yield

    def _project(self, workspace: KernelWorkspace, steps: Step) -> Iterator[None]:
        """Computes a projection in slices, sized by the times of earlier slices to take about SLICE_S each."""
        call, shape = workspace.call, self.shape
        first = (ctypes.c_int32 * (call.n_hit + 1)).from_address(call.first)
        matrix_bytes = shape.hidden * (shape.up_columns if steps & Step.UP else shape.inter) * shape.item_bytes
        group = end = 0
        while end < call.n_present:
            begin, reads, most = end, 0.0, SLICE_S / (matrix_bytes * workspace.byte_s)
            while end < call.n_present and reads < most:
                end, n_reads = self._piece(end, first[group + 1], most - reads)
                reads += n_reads
                if end < first[group + 1]:
                    break
                group += 1
            call.begin, call.end = begin, end
            started = perf_counter()
            self._compute(workspace, steps)
            # Clipped, so that one slice delayed by other work does not make many later slices tiny.
            took_s = min(perf_counter() - started, 2 * SLICE_S)
            workspace.byte_s += _NEWEST * (took_s / (reads * matrix_bytes) - workspace.byte_s)
            yield

    def _piece(self, begin: int, last: int, most: float) -> tuple[int, float]:
        """Returns the end of a piece of an expert's routes and its cost, in times of reading the matrix once; the cost
        is about ``most`` at most, but a piece has at least PIECE_ROUTES routes if there are that many."""
        at_once = ROUTES_A_READ[self.shape.uses_matrix_unit]
        end = min(last, begin + PIECE_ROUTES * max(1, int(most * at_once / PIECE_ROUTES)))
        return end, max(1.0, (end - begin) / at_once)

    def _fill(self, inputs: KernelInput, workspace: KernelWorkspace) -> None:
        """Fills in the call structure with contiguous tensors."""
        rows, slots, weights, out = inputs
        n_rows, top_k = slots.shape
        workspace.reserve(self.shape, n_rows, top_k)
        call = workspace.call
        call.layer = self._layer_address
        call.rows, call.slots, call.weights = rows.data_ptr(), slots.data_ptr(), weights.data_ptr()
        call.out, call.values = out.data_ptr(), workspace.buffers["values"].data_ptr()
        call.n_rows, call.top_k = n_rows, top_k
        call.weights_are_f32 = weights.dtype == torch.float32
        n_threads = threads_for(min(n_rows * top_k, self.shape.n_experts) * self._expert_bytes)
        call.n_threads = min(n_threads, workspace.most_threads(self.shape))
        call.parallel = parallel_address() if call.n_threads > 1 else 0

    def _compute(self, workspace: KernelWorkspace, steps: Step) -> None:
        workspace.call.steps = steps
        if self._run(workspace.address) >= 0:  # the first route whose slot does not exist
            raise SlotError(self.shape.n_experts)

    def _activate(self, workspace: KernelWorkspace) -> None:
        """Applies the module's own activation or gate, in torch."""
        module, call = self._experts, workspace.call
        values = workspace.values((call.n_present, self.shape.up_columns), self._dtype)
        activated = (module._apply_gate(values) if module.has_gate else module.act_fn(values)).contiguous()
        call.values = activated.data_ptr()
        self._compute(workspace, Step.TAKE)
        call.values = workspace.buffers["values"].data_ptr()

    def _sum(self, workspace: KernelWorkspace) -> None:
        """Computes the weighted sum, after the module's norm if it has one."""
        if self._experts.has_post_expert_norm:
            values = workspace.values((workspace.call.n_present, self.shape.hidden), self._dtype)
            values = self._experts.post_expert_norm(values).contiguous()
            workspace.call.values = values.data_ptr()
        self._compute(workspace, Step.SUM)


def contiguous(call: KernelInput) -> KernelInput:
    """Returns contiguous inputs; kernels get only their addresses, so the caller keeps them alive meanwhile."""
    rows, slots, weights, out = call
    return KernelInput(rows.contiguous(), slots.contiguous(), weights.contiguous(), out)


def _is_independent_of_batch(module: Any, *, up_columns: int, hidden: int, dtype: torch.dtype) -> bool:
    """Whether an experts module's activation, gate and norm give rows the same bits alone and in a batch.

    torch computes the last elements of a tensor with other code than the rest, which rounds differently for some
    activations. Tested on random rows, not decided by name.
    """

    def activate(values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = module._apply_gate(values) if module.has_gate else module.act_fn(values)
        return result

    steps = [(activate, up_columns)]
    if module.has_post_expert_norm:
        steps.append((module.post_expert_norm, hidden))
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for step, columns in steps:
            n_rows = max(sum(_PARTS), _TOGETHER // columns)
            values = torch.randn(n_rows, columns, generator=generator, dtype=torch.float32).to(dtype)
            together = step(values)
            at = 0
            for size in _PARTS:
                part = slice(at, at + size)
                if not torch.equal(step(values[part]), together[part]):
                    return False
                at += size
    return True
