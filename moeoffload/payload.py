"""Payload dtypes: how hidden rows are encoded between host and expert servers, and the checks of their values."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import IntEnum
from typing import Final, NamedTuple

import torch

from moeoffload.errors import PayloadError


class PayloadDtype(IntEnum):
    """Number format of rows on the wire; the values are the codes of the frame header."""

    F32 = 1
    F16 = 2
    BF16 = 3
    F8 = 4
    """e4m3 values of a row, followed by a float32 scale for each group of `F8_GROUP` values."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype with the same bit layout; uint8 for F8, whose rows are values and scales."""
        return _TORCH[self]

    @property
    def eps(self) -> float:
        """Machine epsilon: the distance from 1 to the next larger value."""
        return float(torch.finfo(torch.float8_e4m3fn if self is PayloadDtype.F8 else self.torch_dtype).eps)

    def columns(self, hidden: int) -> int:
        """Returns the number of elements of ``torch_dtype`` in a row of ``hidden`` values."""
        return hidden if self is not PayloadDtype.F8 else _scales_at(hidden) + 4 * -(-hidden // F8_GROUP)

    def row_bytes(self, hidden: int) -> int:
        """Returns the bytes of a row of ``hidden`` values."""
        return self.columns(hidden) * self.torch_dtype.itemsize

    @property
    def label(self) -> str:
        """The name used in settings and reports: f32, f16, bf16 or f8."""
        return self.name.lower()

    @classmethod
    def from_torch(cls, dtype: torch.dtype) -> PayloadDtype:
        """Returns the payload dtype that carries ``dtype`` without loss.
        Raises PayloadError: no payload dtype does (float64, float8)."""
        for code, torch_dtype in _TORCH.items():
            if torch_dtype == dtype:
                return code
        raise PayloadError(f"activations are {dtype}, which no payload dtype carries (allowed: f32, f16, bf16)")

    @classmethod
    def from_label(cls, label: str, activations: torch.dtype) -> PayloadDtype:
        """Resolves a setting (``auto`` or a label); ``auto`` is the dtype of the activations."""
        return cls.from_torch(activations) if label == "auto" else cls[label.upper()]


class Payloads(NamedTuple):
    """The payload dtypes of rows sent to servers and of sums sent back."""

    out: PayloadDtype
    back: PayloadDtype

    @property
    def label(self) -> str:
        """One name if both are the same, else both names."""
        same = self.out is self.back
        return self.out.label if same else f"{self.out.label} out, {self.back.label} back"


_TORCH: Final = {
    PayloadDtype.F32: torch.float32,
    PayloadDtype.F16: torch.float16,
    PayloadDtype.BF16: torch.bfloat16,
    PayloadDtype.F8: torch.uint8,
}
F8_GROUP: Final = 128
_LARGEST_F8: Final = 448.0


def _scales_at(hidden: int) -> int:
    """Returns the offset of the scales in an F8 row, in bytes."""
    return -(-hidden // 4) * 4


def store_rows(rows: torch.Tensor, stored: torch.Tensor) -> int | None:
    """Writes ``rows`` (n, hidden) of any float dtype into ``stored`` (n, columns), encoded by the dtype of ``stored``.
    Returns the first row that is not finite there, or None."""
    if stored.dtype is not torch.uint8:
        stored.copy_(rows)
        return first_bad_row(stored)
    hidden, at = rows.shape[1], _scales_at(rows.shape[1])
    n_groups = (stored.shape[1] - at) // 4
    grouped = torch.nn.functional.pad(rows.float(), (0, n_groups * F8_GROUP - hidden)).unflatten(
        1, (n_groups, F8_GROUP)
    )
    scales = grouped.abs().amax(dim=2) / _LARGEST_F8
    values = grouped / torch.where(scales > 0, scales, 1).unsqueeze(2)
    stored[:, :hidden] = values.flatten(1)[:, :hidden].to(torch.float8_e4m3fn).view(torch.uint8)
    stored[:, hidden:at] = 0
    stored[:, at:] = scales.contiguous().view(torch.uint8)
    return first_bad_row(scales)


def load_rows(stored: torch.Tensor, rows: torch.Tensor) -> None:
    """Decodes what `store_rows` has written to ``stored`` into ``rows`` (n, hidden) of any float dtype."""
    if stored.dtype is not torch.uint8:
        rows.copy_(stored)
        return
    hidden, at = rows.shape[1], _scales_at(rows.shape[1])
    values = stored[:, :hidden].contiguous().view(torch.float8_e4m3fn).float()
    scales = stored[:, at:].contiguous().view(torch.float32)
    rows.copy_(values * scales.repeat_interleave(F8_GROUP, dim=1)[:, :hidden])


def first_bad_row(rows: torch.Tensor) -> int | None:
    """Returns the index of the first row of ``rows`` (n, hidden) that holds a NaN or an infinity, or None.

    The sum of finite values is almost always finite, so one reduction decides the common case; values are checked one
    by one only if the sum is not finite.
    """
    if rows.shape[0] == 0 or math.isfinite(rows.sum(dtype=torch.float32).item()):
        return None
    bad = ~torch.isfinite(rows).all(dim=1)
    return int(bad.nonzero()[0]) if bool(bad.any()) else None


def describe_bad_row(source: torch.Tensor, dtype: PayloadDtype) -> str:
    """Describes what is wrong with a row (hidden,) that was not finite after encoding to ``dtype``."""
    if not bool(torch.isfinite(source).all()):
        return "holds a value that is not finite"
    return f"holds {float(source.float().abs().max()):.6g}, beyond the range of {dtype.label}"


def encode_rows(
    source: torch.Tensor, target: torch.Tensor, dtype: PayloadDtype, *, where: Callable[[int], str]
) -> None:
    """Writes ``source`` (n, hidden), any float dtype and device, into ``target`` (n, columns) of the payload dtype.

    ``where(row)`` names a row for the error message.
    Raises PayloadError: a value is not finite or overflows the payload dtype; the message names the row.
    """
    row = store_rows(source, target)
    if row is not None:
        raise PayloadError(f"{where(row)}: hidden states {describe_bad_row(source[row], dtype)}")
