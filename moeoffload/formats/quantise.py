"""Quantises float weights, for ``--expert-format`` and ``--dense-format``. Deterministic."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Final

import torch

from moeoffload.errors import ModelError
from moeoffload.formats import mxfp4
from moeoffload.formats.int4 import SIGNED
from moeoffload.formats.packed import Codes, PackedFormat, PackedWeights, Scales
from moeoffload.native import native_library

GROUP: Final = 32
BLOCK: Final = 128
_KINDS: Final = ("int8", "int4", "mxfp4", "fp8")
"""In the order of the constants in ``quantise.c``."""
_LARGEST_FP8: Final = 448.0
_LEAST_SCALE: Final = 2.0**-24
"""The smallest positive float16; a group whose scale is below it becomes zeros."""
_E8M0_BIAS: Final = 127
_LARGEST_E2M1_EXPONENT: Final = 2

FORMATS: Final = {
    "int8": PackedFormat("int8", Codes.INT8, Scales.F16, group=GROUP),
    "int4": PackedFormat("int4", Codes.LEVELS4, Scales.F16, group=GROUP, levels=SIGNED),
    "fp8": PackedFormat("fp8", Codes.FP8, Scales.F32, group=BLOCK, shared_rows=BLOCK),
    "mxfp4": mxfp4.FORMAT,
}
"""The formats by the names that users give."""


class _Quantised(ctypes.Structure):
    """What is quantised, as in ``quantise.c``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "codes", "scales", "inverses")),
        *((name, ctypes.c_int64) for name in ("item", "n_rows", "n_in", "group", "row_bytes", "codes_bytes", "kind")),
    )


def quantise(weights: torch.Tensor, form: PackedFormat) -> tuple[PackedWeights, float, float]:
    """Quantises (n_experts, n_out, n_in) floats of any dtype on the CPU to one of `FORMATS`, scaled by each group's
    largest value.

    int8 and int4 are symmetric with a float16 scale for each 32 weights (as GGUF's Q8_0 and Q4_0), fp8 is e4m3 with a
    scale for each 128 x 128 weights, mxfp4 is OCP's. Does not check whether values are finite.

    Returns the packed weights, the sum of their squared errors, and that of the squares of ``weights``.
    Raises ModelError: the C library was not built.
    """
    library = _library()
    n_experts, n_out, n_in = weights.shape
    packed = PackedWeights.empty(form, n_experts, n_out, n_in, weights.device)
    sums = (ctypes.c_double * 2)()
    for expert in range(n_experts):
        # Some families store matrices transposed: their rows are strided.
        rows = weights[expert].contiguous()
        rows = rows if rows.dtype is torch.bfloat16 else rows.float()
        codes = packed.section("codes")[expert]
        job = _Quantised(rows.data_ptr(), codes.data_ptr(), None, None, rows.itemsize, n_out, n_in)
        job.group, job.row_bytes, job.codes_bytes = form.group, n_in * rows.itemsize, codes.stride(0)
        job.kind = _KINDS.index(form.name)
        largest = torch.empty(n_out, form.n_groups(n_in))
        library.moe_largest_of_groups(ctypes.byref(job), largest.data_ptr())
        scales = _fill_scales(packed, expert, largest)
        inverses = torch.where(scales != 0, 1 / scales, 0)
        job.scales, job.inverses = scales.data_ptr(), inverses.data_ptr()
        library.moe_quantise(ctypes.byref(job), sums)
    return packed, *sums


def _fill_scales(packed: PackedWeights, expert: int, largest: torch.Tensor) -> torch.Tensor:
    """Writes the scales of an expert, whose groups have ``largest`` (n_out, n_groups) float32 as their largest weights;
    returns them for each row and group, of the same shape and dtype."""
    form, n_out = packed.format, len(largest)
    if packed.scales is not None:
        padded = torch.nn.functional.pad(largest.abs(), (0, 0, 0, -n_out % BLOCK))
        blocks = padded.unflatten(0, (-1, BLOCK)).amax(1) / _LARGEST_FP8
        packed.scales[expert] = torch.where(blocks > 0, blocks, 1)
        return packed.scales[expert].repeat_interleave(BLOCK, 0)[:n_out].contiguous()
    if form.scales is Scales.E8M0:
        exponents = torch.frexp(largest).exponent - 1 - _LARGEST_E2M1_EXPONENT
        stored = torch.where(largest != 0, exponents + _E8M0_BIAS, 0).clamp(0, 254).to(torch.uint8)
        scales = torch.exp2(stored.float() - _E8M0_BIAS)
    else:
        # 4 bits: the value of largest magnitude becomes -8, whatever its sign: of the 16 levels one more is negative.
        exact = largest.abs() / 127 if form.codes is Codes.INT8 else largest / -8
        stored = torch.where(exact.abs() < _LEAST_SCALE, 0, exact).half()
        scales = stored.float()
    packed.section("scales")[expert] = stored.view(torch.uint8)
    return scales


@functools.cache
def _library() -> Any:
    library = native_library()
    if library is None:
        raise ModelError(
            "weights cannot be quantised: the C library was not built; install a C compiler, then moeoffload again"
        )
    for function in (library.moe_largest_of_groups, library.moe_quantise):
        function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p], None
    return library
