"""Describes file formats of quantised weights: which tensors make up a weight, and how they become packed rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moeoffload.formats.packed_format import PackedFormat, Scales

Parts = Mapping[str, torch.Tensor]
"""The stored tensors of one weight by role; ``weight`` holds the codes. On the meta device if only shapes matter."""

FLOAT_SCALES = {torch.float32: Scales.F32, torch.bfloat16: Scales.BF16, torch.float16: Scales.F16}
E8M0_SCALES = {torch.uint8: Scales.E8M0, torch.float8_e8m0fnu: Scales.E8M0}
"""Dtypes of scales in files."""

SHARED = "shared"
"""Key of `Packing.sections` for scales that rows share, (blocks of rows, groups) float32; other sections are bytes."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How one stored weight becomes rows of `PackedWeights`.

    Attributes:
        packed: the format of the rows.
        shape: shape of the weight in an unquantised checkpoint; experts first if it has three dimensions.
        sections: maps the parts of one matrix (without a dimension of experts) to its sections: (n_out, bytes) uint8 by
            the names of `PackedFormat.sections`, and `SHARED`. They are views of the parts where the order is the same.
        is_transposed: whether ``shape`` ends with (in, out) instead of (out, in).
        is_verbatim: whether the codes are the bytes of the part ``weight``, which can then be read straight into place.
    """

    packed: PackedFormat
    shape: tuple[int, ...]
    sections: Callable[[Parts], dict[str, torch.Tensor]]
    is_transposed: bool = False
    is_verbatim: bool = False

    @property
    def rows_first(self) -> tuple[int, int]:
        """The shape of a matrix as (out, in)."""
        *_, n_out, n_in = self.shape
        return (n_in, n_out) if self.is_transposed else (n_out, n_in)


@dataclass(frozen=True, slots=True)
class FileFormat:
    """How files store the weights of one format.

    Attributes:
        main: suffix of the name of the tensor with the codes.
        dtypes: dtypes that it may have; a tensor of another dtype is not of this format.
        parts: for each role the suffixes that the other tensors have in place of ``main``; the first one found is used.
        pack: maps parts on the meta device and the settings of quantization_config to how they are packed. Raises
            ValueError, in one line, when their shapes or dtypes do not fit.
        plain: suffix of the weight's name in an unquantised checkpoint, in place of ``main``.
        optional: roles that may be missing.
    """

    main: str
    dtypes: tuple[torch.dtype, ...]
    parts: Mapping[str, tuple[str, ...]]
    pack: Callable[[Parts, Mapping[str, Any]], Packing]
    plain: str = ".weight"
    optional: frozenset[str] = frozenset()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Converts (rows, n) of any dtype to (rows, bytes) uint8: a view if contiguous, or if elements have one byte."""
    if tensor.dtype.itemsize == 1 or (tensor.is_contiguous() and tensor.stride(-1) == 1):
        return tensor.view(torch.uint8)
    # Flattened first: a transposed tensor of one column counts as contiguous but cannot be viewed as bytes.
    return tensor.flatten().view(torch.uint8).view(*tensor.shape[:-1], -1)


def codes_and_scales(parts: Parts) -> dict[str, torch.Tensor]:
    """Returns the sections of a matrix whose codes and scales, one or several for each row, are stored in our order."""
    codes, scales = parts["weight"].flatten(1), parts["scale"]
    return {"codes": as_bytes(codes), "scales": as_bytes(scales.reshape(len(codes), -1))}


def check_shape(role: str, tensor: torch.Tensor, *wanted: int) -> None:
    """Raises ValueError unless the last dimensions of a part are ``wanted``."""
    if tuple(tensor.shape[-len(wanted) :]) != wanted:
        raise ValueError(f"its {role} has shape {tuple(tensor.shape)}, needed is {wanted}")
