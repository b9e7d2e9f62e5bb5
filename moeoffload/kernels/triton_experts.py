"""Routed experts for few rows on a CUDA device, computed by Triton programs. Triton is optional."""

from __future__ import annotations

import importlib.util
from typing import Any, Final

import torch
from torch import nn

from moeoffload.kernels.activation import Activation, recognise
from moeoffload.kernels.layout import rows_first, up_weight, why_not_weights
from moeoffload.kernels.packing import first_tensor

MAX_ROWS: Final = 16
"""Rows of the largest call; above, `moeoffload.kernels.grouped` reads each weight once, too, and multiplies faster."""

# Weight columns of one tile: the widest that still gives each multiprocessor two tiles, so that one's loads are under
# way while the other computes. Transposed weights lie along their columns, where a line of the cache has 128 bytes.
_TILE_COLUMNS: Final = (64, 32, 16)
_TRANSPOSED_TILE_COLUMNS: Final = (64,)
_TILES_PER_PROCESSOR: Final = 2
# Bytes of one weight column that a step reads: two lines of the cache, four such steps under way.
_STEP_BYTES: Final = 256
_STAGES: Final = 4
_WARPS: Final = 4
_SUM_COLUMNS: Final = 256


def few_rows_kernel(experts: nn.Module) -> TritonExperts | None:
    """What computes calls of up to MAX_ROWS rows of these experts faster than other kernels do; None: nothing."""
    return TritonExperts(experts) if why_not_triton(experts) is None else None


def why_not_triton(experts: nn.Module) -> str | None:
    """Why these experts cannot be computed by `TritonExperts`; None if they can. Wherever they can, ``auto`` does."""
    module: Any = experts
    up, down = up_weight(module), module.down_proj
    device = first_tensor(down).device
    if device.type != "cuda":
        return f"device {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "a GPU older than compute capability 8.0"
    if module.has_post_expert_norm:
        return "a norm after each expert"
    return why_not_weights(up, down) or (None if recognise(module) else "an activation of its own")


class TritonExperts:
    """The weights of one layer as the programs of `moeoffload.kernels.triton_ops` read them.

    Checked against a float32 reference and `GroupedKernel` in Triton's interpreter, and compiled for sm_80 and sm_90;
    not run on a GPU.
    """

    name = "triton"

    def __init__(self, experts: nn.Module) -> None:
        """Reads the layout.

        Args:
            experts: the model's own experts class, for which `why_not_triton` says None (the interpreter takes it on a
                CPU, too). Parameters may be changed in place but not replaced.
        """
        from moeoffload.kernels import triton_ops

        self._ops = triton_ops
        module: Any = experts
        activation = recognise(experts)
        if activation is None:
            raise ValueError("these experts have an activation of their own")
        self._activation: Activation = activation
        up_name = "gate_up_proj" if module.has_gate else "up_proj"
        self._up = rows_first(getattr(module, up_name), module)
        self._down = rows_first(module.down_proj, module)
        self._up_bias = _bias(module, f"{up_name}_bias")
        self._down_bias = _bias(module, "down_proj_bias")
        self.n_experts, self._up_columns, self.hidden = self._up.shape
        self.inter = self._down.shape[2]
        self.dtype, self.device = self._down.dtype, self._down.device
        self._tile_columns = _TRANSPOSED_TILE_COLUMNS if module.is_transposed else _TILE_COLUMNS
        self._depth = _STEP_BYTES // self.dtype.itemsize // (2 if module.is_transposed else 1)
        self._n_processors = (
            torch.cuda.get_device_properties(self.device).multi_processor_count if self.device.type == "cuda" else 1
        )

    def __call__(self, rows: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
        """Launches one call on the current stream of the device; the host waits for nothing.

        Args:
            rows: (n, hidden) in the compute dtype, at most MAX_ROWS rows.
            slots: (n, top_k) int64; a slot that is not one of 0 to n_experts - 1 adds nothing.
            weights: (n, top_k) float32, or the compute dtype: then each weighted output is rounded to it.
            out: (n, hidden) float32, contiguous; overwritten.
        """
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):  # Triton launches on the current device, whatever it is given
                self._launch(rows.contiguous(), slots.contiguous(), weights.contiguous(), out)
        else:
            self._launch(rows.contiguous(), slots.contiguous(), weights.contiguous(), out)

    def _launch(self, rows: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
        (n_rows, top_k), n_routes = slots.shape, slots.numel()
        activation, ops = self._activation, self._ops
        # From torch's pool of this stream: a call that is still running keeps what it works in.
        activated = torch.empty(n_routes, self.inter, dtype=self.dtype, device=self.device)
        down = torch.empty(n_routes, self.hidden, dtype=self.dtype, device=self.device)
        top_k_padded = max(2, 1 << (top_k - 1).bit_length())
        counts = (n_rows, top_k, self.n_experts, self.hidden, self.inter)
        options: dict[str, Any] = {"depth": self._depth, "num_warps": _WARPS, "num_stages": _STAGES}
        n_columns = self._columns(n_routes, self._up_columns)
        ops.up_program[(n_routes, -(-self._up_columns // n_columns))](
            rows,
            slots,
            self._up,
            self._up_bias if self._up_bias is not None else self._up,
            activated,
            *counts,
            *self._up.stride(),
            activation.limit,
            activation.alpha,
            top_k_padded=top_k_padded,
            n_columns=n_columns,
            function=activation.function,
            is_gated=activation.is_gated,
            is_interleaved=activation.is_interleaved,
            has_bias=self._up_bias is not None,
            **options,
        )
        n_columns = self._columns(n_routes, self.hidden)
        ops.down_program[(n_routes, -(-self.hidden // n_columns))](
            activated,
            slots,
            self._down,
            self._down_bias if self._down_bias is not None else self._down,
            down,
            *counts,
            *self._down.stride(),
            top_k_padded=top_k_padded,
            n_columns=n_columns,
            has_bias=self._down_bias is not None,
            **options,
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
            enable_fp_fusion=False,  # a product is rounded before it is added, as torch does
        )

    def warm_up(self, top_k: int) -> None:
        """Compiles, or loads from Triton's cache on disk, every program that a call of up to MAX_ROWS rows may need."""
        for n_rows in range(1, MAX_ROWS + 1):
            rows = torch.zeros(n_rows, self.hidden, dtype=self.dtype, device=self.device)
            slots = torch.full((n_rows, top_k), -1, device=self.device)
            out = torch.empty(n_rows, self.hidden, device=self.device)
            for dtype in {torch.float32, self.dtype}:
                self(rows, slots, torch.zeros(n_rows, top_k, dtype=dtype, device=self.device), out)

    def _columns(self, n_routes: int, columns: int) -> int:
        """Weight columns of a tile; how many experts the routes name is not known here, at most one each."""
        n_groups = min(n_routes, self.n_experts)
        for n_columns in self._tile_columns:
            if n_groups * -(-columns // n_columns) >= _TILES_PER_PROCESSOR * self._n_processors:
                return n_columns
        return self._tile_columns[-1]


def _bias(module: Any, name: str) -> torch.Tensor | None:
    return getattr(module, name).detach().contiguous() if module.has_bias else None
