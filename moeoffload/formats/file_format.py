"""What a file format of quantised weights has to say: which tensors make a weight, and how they become packed rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moeoffload.formats.packed import PackedFormat

Parts = Mapping[str, torch.Tensor]
"""The stored tensors of one weight by role; ``weight`` holds the codes. On the meta device where only shapes matter."""

SHARED = "shared"
"""In `Packing.sections`: scales that several rows share, (blocks of rows, groups) float32; the others are bytes."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How one stored weight becomes rows of `PackedWeights`.

    Attributes:
        packed: the format of the rows.
        shape: of the weight as a plain checkpoint would have it; experts first if there are three dimensions.
        sections: the parts of one matrix (no dimension of experts) -> its sections: (n_out, bytes) uint8 by the names
            of `PackedFormat.sections`, and `SHARED`. Views of the given tensors where the order is the same.
        is_transposed: ``shape`` ends with (in, out) rather than (out, in).
        is_verbatim: the codes are the bytes of the part ``weight``, which may so be read to where they are to be.
    """

    packed: PackedFormat
    shape: tuple[int, ...]
    sections: Callable[[Parts], dict[str, torch.Tensor]]
    is_transposed: bool = False
    is_verbatim: bool = False

    @property
    def rows_first(self) -> tuple[int, int]:
        """(out, in) of a matrix."""
        *_, n_out, n_in = self.shape
        return (n_in, n_out) if self.is_transposed else (n_out, n_in)


@dataclass(frozen=True, slots=True)
class FileFormat:
    """How files store the weights of one format.

    Attributes:
        main: how the name of the tensor with the codes ends.
        dtypes: that it may have; a tensor of another dtype is not of this format.
        parts: role -> how names of the other tensors end, instead of ``main``; the first that is there is taken.
        pack: parts on the meta device, and the settings of quantization_config -> how they are packed. Raises
            ValueError, in one line, when their shapes or dtypes do not fit.
        plain: how the name of the weight ends in a plain checkpoint, instead of ``main``.
        optional: roles that may be missing.
    """

    main: str
    dtypes: tuple[torch.dtype, ...]
    parts: Mapping[str, tuple[str, ...]]
    pack: Callable[[Parts, Mapping[str, Any]], Packing]
    plain: str = ".weight"
    optional: frozenset[str] = frozenset()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """(rows, n) of any dtype -> (rows, bytes) uint8 in its own memory if the rows are contiguous."""
    if tensor.dtype.itemsize == 1 or (tensor.is_contiguous() and tensor.stride(-1) == 1):
        return tensor.view(torch.uint8)
    # Flat first: a transposed tensor of one column counts as contiguous, and cannot be viewed as bytes.
    return tensor.flatten().view(torch.uint8).view(*tensor.shape[:-1], -1)


def check_shape(role: str, tensor: torch.Tensor, *wanted: int) -> None:
    """Raises ValueError unless the last dimensions of a part are ``wanted``."""
    if tuple(tensor.shape[-len(wanted) :]) != wanted:
        raise ValueError(f"its {role} has shape {tuple(tensor.shape)}, needed is {wanted}")
