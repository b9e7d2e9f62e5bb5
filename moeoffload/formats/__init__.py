"""Formats of low-bit weights: in memory (`packed`), and in files (one module for each vendor's format)."""

from moeoffload.formats.packed import PackedWeights
from moeoffload.formats.packed_format import PLAIN, Codes, Offsets, PackedFormat, Scales

__all__ = ["PLAIN", "Codes", "Offsets", "PackedFormat", "PackedWeights", "Scales"]
