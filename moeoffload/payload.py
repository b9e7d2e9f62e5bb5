"""Payload dtypes: how hidden rows are carried between host and expert servers, and the checks that keep them honest."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Final

import torch

from moeoffload.errors import PayloadError


class PayloadDtype(IntEnum):
    """Number format of rows on the wire; the values are the codes of the frame header."""

    F32 = 1
    F16 = 2
    BF16 = 3

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype with the same bit layout."""
        return _TORCH[self]

    @property
    def itemsize(self) -> int:
        """Bytes per value."""
        return 4 if self is PayloadDtype.F32 else 2

    @property
    def label(self) -> str:
        """The name used in settings and reports: f32, f16 or bf16."""
        return self.name.lower()

    @classmethod
    def from_torch(cls, dtype: torch.dtype) -> PayloadDtype:
        """The payload dtype that carries ``dtype`` without loss.
        Raises PayloadError if no payload dtype holds it (float64, float8)."""
        for code, torch_dtype in _TORCH.items():
            if torch_dtype == dtype:
                return code
        raise PayloadError(f"activations are {dtype}, which no payload dtype carries (allowed: f32, f16, bf16)")

    @classmethod
    def from_label(cls, label: str, activations: torch.dtype) -> PayloadDtype:
        """Resolves a setting (``auto``, ``f32``, ``f16``, ``bf16``); ``auto`` is the dtype of the activations."""
        return cls.from_torch(activations) if label == "auto" else cls[label.upper()]


_TORCH: Final = {PayloadDtype.F32: torch.float32, PayloadDtype.F16: torch.float16, PayloadDtype.BF16: torch.bfloat16}


def first_bad_row(rows: torch.Tensor) -> int | None:
    """Index of the first row of ``rows`` (n, hidden) that holds a NaN or an infinity, or None.

    The sum of a row of finite f32 values is almost always finite, so one reduction decides the common case and only a
    suspicious sum is looked at value by value.
    """
    if rows.shape[0] == 0 or torch.isfinite(rows.sum(dtype=torch.float32)):
        return None
    bad = ~torch.isfinite(rows).all(dim=1)
    return int(bad.nonzero()[0]) if bool(bad.any()) else None


def describe_bad_row(source: torch.Tensor, dtype: PayloadDtype) -> str:
    """Says what is wrong with one row (hidden,) that first_bad_row has found after encoding to ``dtype``."""
    if not bool(torch.isfinite(source).all()):
        return "holds a value that is not finite"
    return f"holds {float(source.float().abs().max()):.6g}, beyond the range of {dtype.label}"


def encode_rows(
    source: torch.Tensor, target: torch.Tensor, dtype: PayloadDtype, *, where: Callable[[int], str]
) -> None:
    """Writes ``source`` (n, hidden), any float dtype and device, into ``target`` (n, hidden) of the payload dtype.

    ``where(row)`` names a row for the error message.
    Raises PayloadError if a value is not finite or overflows the payload dtype; names the layer and the row.
    """
    target.copy_(source)
    row = first_bad_row(target)
    if row is not None:
        raise PayloadError(f"{where(row)}: hidden states {describe_bad_row(source[row], dtype)}")
