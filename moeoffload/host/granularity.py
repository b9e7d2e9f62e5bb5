"""How many rows of a layer go into one dispatch: the mode, and the caps of both sides."""

from __future__ import annotations

from dataclasses import dataclass

from moeoffload.settings import Mode


@dataclass(frozen=True, slots=True)
class Granularity:
    """Slice sizes of one host. ``hot_slice`` is the slice of stream mode; rows are counted per layer and server."""

    mode: Mode
    hot_slice: int

    def slice_rows(self, capacity: int) -> int:
        """Most rows in one dispatch to a server whose effective batch capacity is ``capacity`` rows."""
        return min(self.hot_slice, capacity) if self.mode is Mode.STREAM else capacity
