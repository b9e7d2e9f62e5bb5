"""Computes routed experts on a CUDA device with Triton programs. Triton is optional."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from moeoffload.formats.packed import PackedWeights
from moeoffload.kernels.activation import Activation, recognise
from moeoffload.kernels.grouped import sort_without_waiting
from moeoffload.kernels.packing import (
    Weights,
    dtype_of,
    first_tensor,
    rows_first,
    up_weight,
    why_not_packed,
    why_not_weights,
)

if TYPE_CHECKING:
    from moeoffload.kernels.triton_ops import Matrix
    from moeoffload.kernels.triton_packed import RowFormat

logger = logging.getLogger(__name__)

MAX_ROWS: Final = 16
"""Calls of up to this many rows do not sort their routes."""
ANY_ROWS: Final = 1 << 30

# Rows of a tile in larger calls. Up to 32 rows all GPUs use the same instruction as for 16, so that a row's bits do not
# depend on the number of rows.
_TILE_ROWS: Final = 32
# Weight columns of a tile: the widest tile that still gives each multiprocessor two tiles, so that one loads while the
# other computes. Transposed weights are contiguous along columns, and a cache line has 128 bytes.
_TILE_COLUMNS: Final = (64, 32, 16)
_TRANSPOSED_TILE_COLUMNS: Final = (64,)
_TILES_PER_PROCESSOR: Final = 2
# Bytes of an unpacked weight column that a step reads: two cache lines. _STAGES such steps are in flight.
_STEP_BYTES: Final = 256
_STAGES: Final = 4
_WARPS: Final = 4
_SUM_COLUMNS: Final = 256
# Compute capabilities on which torch's grouped bfloat16 products neither synchronise nor launch one product per expert.
_NATIVE_GROUPED: Final = ((9, 0), (10, 0))


def few_rows_kernel(experts: nn.Module) -> TritonExperts | None:
    """Returns the kernel for calls of up to `TritonExperts.most_rows` rows of these experts.

    None if it does not support them; on a GPU the reason is logged once.
    """
    reason = why_not_triton(experts)
    if reason is None:
        return TritonExperts(experts)
    if not reason.startswith("device"):
        _warn_once(reason)
    return None


def why_not_triton(experts: nn.Module) -> str | None:
    """Returns why `TritonExperts` cannot compute these experts; None if it can: then ``auto`` uses it."""
    module: Any = experts
    device = first_tensor(module.down_proj).device
    if device.type != "cuda":
        return f"device {device.type}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "a GPU older than compute capability 8.0"
    return why_no_program_runs(device) or why_not_computed(experts)


@functools.cache
def why_no_program_runs(device: torch.device) -> str | None:
    """Returns why Triton cannot run a program on a device, found by trying once; None if it can.

    An installed Triton still needs a C compiler and Python's headers.
    """
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    try:
        from moeoffload.kernels import triton_ops

        slots, numbers = torch.zeros(1, 1, dtype=torch.int64, device=device), torch.zeros(1, 16, device=device)
        with _current(device):
            triton_ops.sum_program[(1, 1)](
                numbers, slots, numbers, numbers, 1, 1, 16, top_k_padded=2, n_columns=16, enable_fp_fusion=False
            )
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # Triton has no common class: compilers, files, imports and drivers raise their own
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        return f"triton runs no program here (it needs gcc and Python's headers): {reason}"
    return None


def why_not_computed(experts: nn.Module) -> str | None:
    """Returns why the programs cannot compute such experts on any device; None if they can."""
    module: Any = experts
    if module.has_post_expert_norm:
        return "a norm after each expert"
    up, down, activation = up_weight(module), module.down_proj, recognise(module)
    if isinstance(up, tuple) and isinstance(down, tuple):
        reason = _why_not_packed(up, down, activation)
    else:
        reason = why_not_weights(up, down)
    return reason or (None if activation else "an activation of its own")


def _why_not_packed(
    up: tuple[PackedWeights, ...], down: tuple[PackedWeights, ...], activation: Activation | None
) -> str | None:
    from moeoffload.kernels.triton_packed import why_not_levels

    in_halves = activation is not None and activation.is_gated and not activation.is_interleaved
    if len(down) > 1 or (len(up) > 1 and not (in_halves and up[0].shape == up[1].shape)):
        return "a projection in two formats"
    return why_not_packed(up) or why_not_packed(down) or why_not_levels((*up, *down))


@functools.cache
def _warn_once(reason: str) -> None:
    logger.warning("experts on the GPU are computed without Triton programs, more slowly: %s", reason)


def _current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Makes ``device`` current: Triton launches on the current device, wherever the arguments are."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


class TritonExperts:
    """Computes one layer's experts, plain or packed, with the programs of `moeoffload.kernels.triton_ops`.

    Checked against a float32 reference and `grouped_experts` in Triton's interpreter, and compiled for sm_80 to sm_120;
    not run on a GPU.

    Attributes:
        most_rows: rows of the largest call for which this kernel is used; other kernels are faster above.
    """

    def __init__(self, experts: nn.Module) -> None:
        """Reads the layout.

        Args:
            experts: the model's own experts class, for which `why_not_triton` returns None (in the interpreter also on
                a CPU). Parameters may be changed in place but not replaced.
        """
        from moeoffload.kernels import triton_ops

        self._ops = triton_ops
        module: Any = experts
        activation = recognise(experts)
        if activation is None:
            raise ValueError("these experts have an activation of their own")
        self._activation: Activation = activation
        self.dtype, self.device = dtype_of(experts), first_tensor(module.down_proj).device
        is_packed = isinstance(module.down_proj, tuple)
        self._up, self._down = _matrices(up_weight(module), module), _matrices(module.down_proj, module)
        self._up_bias = _bias(module, "gate_up_proj_bias" if module.has_gate else "up_proj_bias")
        self._down_bias = _bias(module, "down_proj_bias")
        down = module.down_proj[0] if is_packed else rows_first(module.down_proj, module)
        shape: torch.Size = down.shape
        self.n_experts, self.hidden, self.inter = shape
        self._up_columns = self.inter * (2 if module.has_gate else 1)
        is_transposed = module.is_transposed and not is_packed
        self._tile_columns = _TRANSPOSED_TILE_COLUMNS if is_transposed else _TILE_COLUMNS
        self._depth = _STEP_BYTES // self.dtype.itemsize // (2 if is_transposed else 1)
        self._n_processors, self.most_rows = 1, ANY_ROWS
        if self.device.type == "cuda":
            properties = torch.cuda.get_device_properties(self.device)
            self._n_processors = properties.multi_processor_count
            if (
                (properties.major, properties.minor) in _NATIVE_GROUPED
                and self.dtype == torch.bfloat16
                and not is_packed
            ):
                self.most_rows = MAX_ROWS

    def __call__(self, rows: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
        """Launches one call on the current stream of the device; the CPU does not wait.

        Args:
            rows: (n, hidden) in the compute dtype.
            slots: (n, top_k) int64; a slot outside 0 to n_experts - 1 adds nothing.
            weights: (n, top_k) float32, or the compute dtype: then each weighted output is rounded to it.
            out: (n, hidden) float32, contiguous; overwritten.
        """
        with _current(self.device):
            self._launch(rows.contiguous(), slots.contiguous(), weights.contiguous(), out)

    def _launch(self, rows: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
        (n_rows, top_k), n_routes = slots.shape, slots.numel()
        ops = self._ops
        # From torch's allocator for this stream, which does not reuse the memory of a call that is still running.
        activated = torch.empty(n_routes, self.inter, dtype=self.dtype, device=self.device)
        down = torch.empty(n_routes, self.hidden, dtype=self.dtype, device=self.device)
        by_expert, n_tiles, tile_rows = None, n_routes, MAX_ROWS
        if n_rows > MAX_ROWS:
            by_expert, tile_rows = sort_without_waiting(slots.view(-1), self.n_experts), _TILE_ROWS
            # Upper bound, reached if every expert that is hit has one row more than its full tiles hold.
            n_tiles = (n_routes + (tile_rows - 1) * min(n_routes, self.n_experts)) // tile_rows
        top_k_padded = _power_of_two(top_k)
        projections = (
            (rows, self._up, self._up_bias, activated, self._up_columns, self._activation),
            (activated, self._down, self._down_bias, down, self.hidden, None),
        )
        for operands, matrices, bias, result, columns, activation in projections:
            (first, form), (second, second_form) = (*matrices, (None, None))[:2]
            n_columns = self._columns(n_routes, columns)
            ops.projection_program[(n_tiles, -(-columns // n_columns))](
                operands,
                slots,
                by_expert,
                first,
                second,
                bias,
                result,
                n_rows,
                top_k,
                self.n_experts,
                operands.shape[1],
                result.shape[1],
                activation.limit if activation else 0.0,
                activation.alpha if activation else 0.0,
                form=form,
                second_form=second_form,
                tile_rows=tile_rows,
                top_k_padded=top_k_padded,
                n_experts_padded=_power_of_two(self.n_experts),
                n_columns=n_columns,
                depth=self._depth,
                function=activation.function if activation else None,
                is_gated=activation is not None and activation.is_gated,
                is_interleaved=activation is not None and activation.is_interleaved,
                num_warps=_WARPS,
                num_stages=_STAGES,
            )
        ops.sum_program[(n_rows, -(-self.hidden // _SUM_COLUMNS))](
            down,
            slots,
            weights,
            out,
            top_k,
            self.n_experts,
            self.hidden,
            top_k_padded=top_k_padded,
            n_columns=_SUM_COLUMNS,
            enable_fp_fusion=False,  # a product is rounded before it is added, as in torch
        )

    def warm_up(self, top_k: int) -> None:
        """Compiles, or loads from Triton's disk cache, every program that calls may need."""
        for n_rows in self._different(top_k):
            rows = torch.zeros(n_rows, self.hidden, dtype=self.dtype, device=self.device)
            slots = torch.full((n_rows, top_k), -1, device=self.device)
            out = torch.empty(n_rows, self.hidden, device=self.device)
            for dtype in {torch.float32, self.dtype}:
                self(rows, slots, torch.zeros(n_rows, top_k, dtype=dtype, device=self.device), out)

    def _different(self, top_k: int) -> Iterator[int]:
        """Yields each number of rows whose call needs programs that no call of fewer rows needs."""
        seen = set()
        for n_rows in range(1, min(self.most_rows, MAX_ROWS + self.n_experts) + 1):
            sizes = (self._columns(n_rows * top_k, n) for n in (self._up_columns, self.hidden))
            if (program := (n_rows > MAX_ROWS, *sizes)) not in seen:
                seen.add(program)
                yield n_rows

    def _columns(self, n_routes: int, columns: int) -> int:
        """Returns the weight columns of a tile, assuming one expert per route: the CPU does not know how many are
        hit."""
        n_groups = min(n_routes, self.n_experts)
        for n_columns in self._tile_columns:
            if n_groups * -(-columns // n_columns) >= _TILES_PER_PROCESSOR * self._n_processors:
                return n_columns
        return self._tile_columns[-1]


def _matrices(weights: Weights, module: Any) -> list[tuple[Matrix, RowFormat | None]]:
    from moeoffload.kernels.triton_ops import Matrix
    from moeoffload.kernels.triton_packed import row_format

    if not isinstance(weights, tuple):
        data = rows_first(weights, module)
        return [(Matrix(data, data.stride(0), data.stride(1), data.stride(2)), None)]
    matrices: list[tuple[Matrix, RowFormat | None]] = []
    for part in weights:
        data, shared = part.data, part.scales
        matrix = Matrix(data, data.stride(0), data.stride(1), 1, shared, 0 if shared is None else shared.stride(0))
        matrices.append((matrix, row_format(part)))
    return matrices


def _power_of_two(n: int) -> int:
    """Returns the smallest power of two that is at least n and at least 2."""
    return max(2, 1 << (n - 1).bit_length())


def _bias(module: Any, name: str) -> torch.Tensor | None:
    return getattr(module, name).detach().contiguous() if module.has_bias else None
