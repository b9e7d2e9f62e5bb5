"""How weights of few bits are stored: in memory (`packed`), and in the files of each vendor (one module each)."""

from moeoffload.formats.packed import Codes, Offsets, PackedFormat, PackedWeights, Scales

__all__ = ["Codes", "Offsets", "PackedFormat", "PackedWeights", "Scales"]
