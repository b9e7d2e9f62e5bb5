"""Plain quantisers for the types that the gguf package can only unpack: correct blocks, not the best ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import quantize

_LEVELS: Final = np.array((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), dtype=np.float32)


def to_blocks(weights: np.ndarray, kind: str) -> np.ndarray:
    """(..., n) float32 -> (..., bytes) uint8, rows of blocks of ggml's type ``kind``; n is a multiple of the block."""
    if kind not in _QUANTISERS:
        return quantize(np.ascontiguousarray(weights), GGMLQuantizationType[kind]).view(np.uint8)
    n_weights, _ = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = _QUANTISERS[kind](weights.astype(np.float32).reshape(-1, n_weights))
    return blocks.reshape(*weights.shape[:-1], -1)


def _half(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Factors as they are stored: their bytes, and the float32 that those stand for."""
    halves = values.astype(np.float16)
    return halves.reshape(-1, 1).view(np.uint8), halves.astype(np.float32)


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    return np.divide(above, below, out=np.zeros(np.broadcast(above, below).shape, np.float32), where=below != 0)


def _pairs(codes: np.ndarray, width: int) -> np.ndarray:
    """Of each 2 * width codes, the first half in the low halves of bytes."""
    halves = codes.astype(np.uint8).reshape(len(codes), -1, 2, width)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(len(codes), -1)


def _min_max(blocks: np.ndarray, most: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Q4_K and Q5_K: factors and 6-bit scales as bytes, and codes from 0 to ``most``."""
    groups = blocks.reshape(-1, 8, 32)
    low = np.minimum(groups.min(-1), 0)
    wanted = (groups.max(-1) - low) / most
    d_bytes, d = _half(wanted.max(-1) / 63)
    m_bytes, m = _half((-low).max(-1) / 63)
    scales = np.rint(_ratio(wanted, d[:, None])).clip(0, 63).astype(np.uint8)
    mins = np.rint(_ratio(-low, m[:, None])).clip(0, 63).astype(np.uint8)
    step, offset = d[:, None] * scales, m[:, None] * mins
    codes = np.rint(_ratio(groups + offset[..., None], step[..., None])).clip(0, most).astype(np.uint8)
    first, last, low_mins, high_mins = scales[:, :4], scales[:, 4:], mins[:, :4], mins[:, 4:]
    packed = np.concatenate(
        [first | (last >> 4) << 6, low_mins | (high_mins >> 4) << 6, (last & 15) | (high_mins & 15) << 4], axis=1
    )
    return [d_bytes, m_bytes, packed], codes.reshape(-1, 256)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    head, codes = _min_max(blocks, 15)
    return np.concatenate([*head, _pairs(codes, 32)], axis=1)


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    head, codes = _min_max(blocks, 31)
    high = np.zeros((len(codes), 32), np.uint8)
    for group in range(8):
        high |= (codes[:, 32 * group : 32 * group + 32] >> 4) << group
    return np.concatenate([*head, high, _pairs(codes & 15, 32)], axis=1)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    groups = blocks.reshape(-1, 16, 16)
    wanted = np.abs(groups).max(-1) / 31
    d_bytes, d = _half(wanted.max(-1) / 127)
    scales = np.rint(_ratio(wanted, d[:, None])).clip(-128, 127)
    step = d[:, None] * scales
    codes = (np.rint(_ratio(groups, step[..., None])).clip(-32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    high = (codes >> 4).astype(np.uint8)
    high = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    low = _pairs(codes.reshape(-1, 256) & 15, 64)
    return np.concatenate([low, high.reshape(-1, 64), scales.astype(np.int8).view(np.uint8), d_bytes], axis=1)


def _iq4_nl(blocks: np.ndarray) -> np.ndarray:
    d_bytes, d = _half(np.abs(blocks).max(-1) / 127)
    return np.concatenate([d_bytes, _pairs(_nearest(_ratio(blocks, d[:, None])), 16)], axis=1)


def _iq4_xs(blocks: np.ndarray) -> np.ndarray:
    groups = blocks.reshape(-1, 8, 32)
    wanted = np.abs(groups).max(-1) / 127
    d_bytes, d = _half(wanted.max(-1) / 31)
    scales = np.rint(_ratio(wanted, d[:, None])).clip(-32, 31)
    codes = _nearest(_ratio(groups, (d[:, None] * scales)[..., None])).reshape(-1, 256)
    stored = (scales + 32).astype(np.uint16)
    low = (stored[:, 0::2] & 15 | (stored[:, 1::2] & 15) << 4).astype(np.uint8)
    high = np.zeros(len(stored), np.uint16)
    for group in range(8):
        high |= (stored[:, group] >> 4) << np.uint16(2 * group)
    return np.concatenate([d_bytes, high.reshape(-1, 1).view(np.uint8), low, _pairs(codes, 16)], axis=1)


def _nearest(values: np.ndarray) -> np.ndarray:
    """The number of the nearest level."""
    return np.searchsorted((_LEVELS[1:] + _LEVELS[:-1]) / 2, values).astype(np.uint8)


_QUANTISERS: Final[dict[str, Callable[[np.ndarray], np.ndarray]]] = {
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
