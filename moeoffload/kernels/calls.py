"""Declares the C library's functions and the structures that they take, with the names used in ``cpu/*.c``.

Pointers are addresses of contiguous memory; 0 means none. A "position" is the index of a route after sorting by expert.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from enum import IntFlag
from typing import Any, Final

import torch

from moeoffload.native import cpu_features, native_library

logger = logging.getLogger(__name__)

DTYPE_CODES: Final = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
COMPUTE_DTYPES: Final = frozenset(DTYPE_CODES)
HALF_DTYPES: Final = COMPUTE_DTYPES - {torch.float32}

_Word = ctypes.c_int64
_Pointer = ctypes.c_void_p


class SlotError(IndexError):
    """A slot is not in -1 to n_experts - 1."""

    def __init__(self, n_experts: int) -> None:
        super().__init__(f"slots must be -1 to {n_experts - 1}")


class Step(IntFlag):
    """Steps of an `ExpertsCall`. TAKE replaces ACTIVATE if torch has computed the activations."""

    PLAN = 1
    UP = 2
    ACTIVATE = 4
    TAKE = 8
    DOWN = 16
    SUM = 32
    ALL = PLAN | UP | ACTIVATE | DOWN | SUM


class Matrix(ctypes.Structure):
    """One packed matrix of every expert; see `moeoffload.kernels.packing`."""

    _fields_ = (
        *((name, _Pointer) for name in ("data", "shared")),
        *((name, _Word) for name in ("n_out", "n_in", "row_bytes", "codes", "scales", "offsets", "shift")),
        *((name, _Word) for name in ("n_groups", "shared_rows")),
        *((name, _Word) for name in ("high", "factors", "min_factors", "scales_at", "offsets_at")),
        ("levels", ctypes.c_float * 16),
        *((name, _Word) for name in ("kind", "zero_shift")),
        ("unit", ctypes.c_float),
        ("table", ctypes.c_uint8 * 16),
    )


class Layer(ctypes.Structure):
    """Sizes and weights of a layer's experts."""

    _fields_ = (
        *((name, _Word) for name in ("n_experts", "hidden", "inter", "up_columns", "dtype", "features")),
        *((name, _Pointer) for name in ("up", "up_bias", "down", "down_bias", "up_parts", "down_parts")),
    )


_N_COUNTER_WORDS: Final = 6 * 8


class ExpertsCall(ctypes.Structure):
    """One call of a layer: inputs, the steps and the range to compute, buffers, and the results of the plan."""

    _fields_ = (
        *((name, _Pointer) for name in ("layer", "rows", "slots", "weights", "out")),
        *((name, _Word) for name in ("n_rows", "top_k", "weights_are_f32", "steps")),
        *((name, _Word) for name in ("begin", "end", "begin_row", "end_row", "n_threads")),
        ("parallel", _Pointer),
        *((name, _Pointer) for name in ("hit", "first", "row_of", "position_of")),
        *((name, _Pointer) for name in ("values", "activated", "operands", "packed", "scratch")),
        *((name, _Word) for name in ("n_hit", "n_present", "n_started")),
        ("counters", _Word * _N_COUNTER_WORDS),
    )


class LinearCall(ctypes.Structure):
    """One call of a linear layer."""

    _fields_ = (
        *((name, _Word) for name in ("dtype", "features")),
        *((name, _Pointer) for name in ("weight", "parts", "bias", "rows", "out")),
        *((name, _Word) for name in ("n_in", "n_out", "n_rows", "n_threads")),
        *((name, _Pointer) for name in ("parallel", "operands", "scratch")),
        *((name, _Word) for name in ("claimed", "n_started")),
    )


class Projection(ctypes.Structure):
    """A linear layer of attention, and the norm of its results if there is one."""

    _fields_ = (
        *((name, _Pointer) for name in ("weight", "parts", "bias", "norm")),
        *((name, _Word) for name in ("n_in", "n_out", "norm_dim", "norm_kind")),
        ("epsilon", ctypes.c_double),
    )


class FusedLayer(ctypes.Structure):
    """What is the same for all calls of an attention layer: projections to queries, keys, values and output."""

    _fields_ = (*((name, _Word) for name in ("dtype", "features", "dim")), ("linears", Projection * 4))


class FusedCall(ctypes.Structure):
    """One call of an attention layer."""

    _fields_ = (
        *((name, _Pointer) for name in ("layer", "rows", "cos", "sin", "query", "key", "value", "out")),
        *((name, _Word) for name in ("n_rows", "rotary")),
        *((name, _Pointer) for name in ("keys", "values", "attended")),
        *((name, _Word) for name in ("n_kept", "room")),
        ("scale", ctypes.c_double),
        *((name, _Word) for name in ("n_threads", "attention_threads")),
        *((name, _Pointer) for name in ("parallel", "operands", "scratch")),
    )


_CPU_FIELDS: Final = (("features", _Word), ("parallel", _Pointer), ("n_threads", _Word))


def _tensor(name: str) -> tuple[tuple[str, Any], tuple[str, Any]]:
    return (name, _Pointer), (f"{name}_strides", _Word * 3)


class AttentionCall(ctypes.Structure):
    """One call of attention; strides are in elements."""

    _fields_ = (
        *_CPU_FIELDS,
        *(
            (name, _Word)
            for name in ("dtype", "batch", "key_heads", "group", "n_queries", "n_keys", "dim", "value_dim")
        ),
        *(*_tensor("query"), *_tensor("key"), *_tensor("value"), *_tensor("mask")),
        ("mask_kind", _Word),
        ("out", _Pointer),
        *((name, _Word) for name in ("is_causal", "is_many")),
        ("pages", _Pointer),
        ("page_keys", _Word),
        ("scale", ctypes.c_double),
    )


class NormCall(ctypes.Structure):
    """One call of a norm; a thread claims ``item_rows`` at a time."""

    _fields_ = (
        *_CPU_FIELDS,
        *((name, _Word) for name in ("item_rows", "dtype", "kind", "n_rows", "dim")),
        *((name, _Pointer) for name in ("rows", "weight", "out")),
        ("epsilon", ctypes.c_double),
    )


_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    # name: (result, *arguments)
    "moe_choose_ahead": (_Word, _Word),
    "moe_uses_matrix_unit": (_Word, _Pointer),
    "moe_scratch_bytes": (_Word, _Word, _Word),
    "moe_operand_bytes": (_Word, _Word),
    "moe_experts": (_Word, _Pointer),
    "moe_linear": (None, _Pointer),
    "moe_fused_attention": (ctypes.c_int, _Pointer),
    "moe_packed_rows": (_Word, _Pointer, _Word, _Word, _Pointer, _Word, _Pointer),
    "moe_attention": (ctypes.c_int, _Pointer),
    "moe_norm": (None, _Pointer),
}


@functools.cache
def library() -> Any:
    """Returns the loaded library with its functions declared; None, with one warning, if it was not built.

    Calls of its functions release the interpreter lock.
    """
    found = native_library()
    if found is None:
        logger.warning(
            "the CPU kernels were not built when moeoffload was installed: everything is computed by torch, more "
            "slowly; install a C compiler (gcc or clang) and moeoffload again"
        )
        return None
    for name, (result, *arguments) in _SIGNATURES.items():
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    ahead = found.moe_choose_ahead(int(cpu_features()))
    logger.debug("streams of weights are prefetched %d bytes ahead", ahead)
    return found
