"""Describes a layer's matrices, plain or packed in parts, to the C kernels.

The layout of an experts module is read from its flags and parameters, never from its name.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import torch
from torch import nn

from moeoffload.formats import Codes, PackedFormat, PackedWeights
from moeoffload.formats.packed_format import PLAIN_CODES
from moeoffload.formats.tiles import integer_levels, multiplies_tiles
from moeoffload.kernels import calls
from moeoffload.kernels.calls import COMPUTE_DTYPES, Matrix

Weights = torch.Tensor | tuple[PackedWeights, ...]
"""Weights of all experts: a parameter, or one or two packed parts, whose rows follow each other."""

# One more than the kind of tiles.h for these codes (0: no tiles), and the code of the value 0.
_KINDS: Final = {Codes.INT8: 1, Codes.LEVELS4: 3, Codes.UINT5: 4, Codes.INT6: 5, Codes.FP8: 6}
_UINT4: Final = 2
_ZEROS: Final = {Codes.INT8: 128, Codes.UINT5: 0, Codes.INT6: 32}
_NO_ZERO: Final = 32
_MOST_PARTS: Final = 2


def first_tensor(weights: Weights) -> torch.Tensor:
    """Returns the tensor in which the weights begin; its device is that of the weights."""
    return weights[0].data if isinstance(weights, tuple) else weights


def packed_parts(experts: nn.Module) -> list[PackedWeights]:
    """Returns the packed matrices of an experts module, sorted by attribute name."""
    values = (vars(experts)[name] for name in sorted(vars(experts)))
    return [part for parts in values if isinstance(parts, tuple) for part in parts if isinstance(part, PackedWeights)]


def dtype_of(experts: nn.Module) -> torch.dtype:
    """Returns the compute dtype of an experts module."""
    module: Any = experts
    dtype: torch.dtype = module.compute_dtype if isinstance(module.down_proj, tuple) else module.down_proj.dtype
    return dtype


def hidden_of(experts: nn.Module) -> int:
    """Returns the number of elements of an expert's input and output row."""
    module: Any = experts
    down: Weights = module.down_proj
    if isinstance(down, tuple):
        return sum(part.shape[1] for part in down)
    return down.shape[-1 if module.is_transposed else -2]


def why_not(experts: nn.Module) -> str | None:
    """Returns why the C kernels cannot compute the module's projections; None if they can."""
    module: Any = experts
    up, down = up_weight(module), module.down_proj
    device = first_tensor(up).device.type
    reason = None if calls.library() is not None else "CPU kernels are not built"
    if device != "cpu":
        reason = f"device {device}"
    elif isinstance(up, tuple):
        reason = why_not_dtype(dtype_of(module)) or why_not_packed(up) or why_not_packed(down) or reason
    else:
        reason = why_not_weights(up, down) or reason
    return f"{reason}; weights are unpacked in every call" if reason and isinstance(up, tuple) else reason


def why_not_weights(up: Weights, down: Weights) -> str | None:
    """Returns why no C or Triton kernel computes plain weights of such dtypes and shapes; None if one may."""
    if isinstance(up, tuple) or isinstance(down, tuple):
        return "packed weights"
    if down.dtype != up.dtype:
        return f"dtypes {up.dtype} and {down.dtype}"
    if reason := why_not_dtype(up.dtype):
        return reason
    return f"weights of {up.dim()} dimensions" if up.dim() != 3 or down.dim() != 3 else None


def up_weight(module: Any) -> Weights:
    """Returns the weight of the first projection."""
    weight: Weights = module.gate_up_proj if module.has_gate else module.up_proj
    return weight


def rows_first(weight: torch.Tensor, module: Any) -> torch.Tensor:
    """Returns a weight of the module as (experts, out, in), detached from its gradient."""
    return weight.detach().transpose(-2, -1) if module.is_transposed else weight.detach()


def rows_in_place(module: Any, name: str) -> Weights:
    """Returns a weight of the module as (experts, out, in), contiguous; if stored (in, out) it is transposed in place.

    The parameter keeps its shape and values and changes only its strides, so other users of the module are not
    affected. Transposing needs extra memory for one matrix of one expert.
    """
    parameter = getattr(module, name)
    if isinstance(parameter, tuple):
        return parameter
    weight = rows_first(parameter, module)
    if weight.is_contiguous():
        return weight
    if not parameter.is_contiguous():
        weight = weight.contiguous()
    else:
        stored = parameter.detach()
        weight = stored.view(weight.shape)
        for expert in range(weight.shape[0]):
            weight[expert].copy_(stored[expert].t().contiguous())
    parameter.data = weight.transpose(-2, -1) if module.is_transposed else weight
    return weight


def why_not_packed(parts: tuple[PackedWeights, ...]) -> str | None:
    """Returns why the C kernels do not support weights packed like this; None if they do."""
    if len(parts) > _MOST_PARTS:
        return f"{len(parts)} parts"
    return next((reason for part in parts if (reason := _why_not_format(part.format))), None)


def _why_not_format(form: PackedFormat) -> str | None:
    return f"{form.name}: groups of {form.group} weights" if form.group & (form.group - 1) else None


class KernelMatrix:
    """One matrix of every expert, and the C structures that describe it to the kernels.

    Attributes:
        shape: (n_experts, n_out, n_in).
        nbytes: bytes of all experts.
        addresses: the address of plain weights and that of the `Matrix` structures of packed ones; one of them is 0.
    """

    def __init__(self, weights: Weights, dtype: torch.dtype) -> None:
        """Args: weights: (n_experts, n_out, n_in) contiguous, or packed as `why_not_packed` allows.
        Raises ValueError: the parts are not parts of one matrix, or are in tiles that do not support ``dtype``."""
        self._kept = weights
        if not isinstance(weights, tuple):
            self.shape, self.nbytes = weights.shape, weights.nbytes
            self.addresses = weights.data_ptr(), 0
            return
        first = weights[0]
        n_experts, _, n_in = first.shape
        self.shape = torch.Size((n_experts, sum(part.shape[1] for part in weights), n_in))
        self.nbytes = sum(part.nbytes for part in weights)
        if any(part.shape[0] != n_experts or part.n_in != n_in for part in weights):
            raise ValueError(f"packed weights {[tuple(part.shape) for part in weights]} are not parts of one matrix")
        if (
            len(weights) == 1
            and PLAIN_CODES.get(first.format.codes) is dtype
            and not first.data.data_ptr() % dtype.itemsize
        ):
            self.addresses = first.data.data_ptr(), 0
            return
        if multiplies_tiles(((part.format, *part.shape[1:]) for part in weights), dtype):
            for part in weights:
                part.lay_tiles()
        elif any(part.in_tiles for part in weights):
            raise ValueError(f"packed weights are in tiles, which are not multiplied in {dtype}")
        self._parts = (Matrix * len(weights))(*map(describe, weights))
        self.addresses = 0, ctypes.addressof(self._parts)


def section_starts(part: PackedWeights) -> tuple[int, int, int, int, int]:
    """Returns the bytes at which the sections of a row begin that follow its codes; 0 for those that it lacks."""
    places = part.format.sections(part.n_in)
    names = ("high", "factors", "min_factors", "scales", "offsets")
    high, factors, min_factors, scales, offsets = (places[name].start if name in places else 0 for name in names)
    return high, factors, min_factors, scales, offsets


def describe(part: PackedWeights) -> Matrix:
    """Returns the structure that tells the C library of a part, which must be kept as long as that."""
    form = part.format
    table, zero, unit = integer_levels(form.levels) or ((), _ZEROS.get(form.codes, 0), 1.0)
    kind = _KINDS[form.codes] if part.in_tiles else 0
    if kind and table == tuple(range(16)):
        kind = _UINT4
    return Matrix(
        part.data.data_ptr(),
        0 if part.scales is None else part.scales.data_ptr(),
        *(part.shape[1], part.n_in, part.data.shape[2], form.codes, form.scales, form.offsets),
        form.group.bit_length() - 1 if form.group else 62,
        *(form.n_groups(part.n_in), form.shared_rows),
        *section_starts(part),
        (ctypes.c_float * 16)(*(form.levels or ())),
        *(kind, zero.bit_length() - 1 if zero else _NO_ZERO, unit),
        (ctypes.c_uint8 * 16)(*table),
    )


def why_not_dtype(dtype: torch.dtype) -> str | None:
    """Returns why no C or Triton kernel computes in ``dtype``; None if one does."""
    return None if dtype in COMPUTE_DTYPES else f"dtype {dtype}"
