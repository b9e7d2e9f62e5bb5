"""What slice size is fastest for one server: learned from what its calls took, told at attach and seen since."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, Final

_NEWEST: Final = 0.2
"""Weight of the newest observation of a size."""
_CALL_S: Final = 100e-6
"""What a call costs beside the server's compute, in seconds, before it was seen: packing, the way there and back."""
_SAME: Final = 0.02
"""Sizes whose predicted times differ by less are equal; the larger one makes fewer calls."""
LOOK_EVERY: Final = 64
"""One in so many dispatches has a neighbouring size, so that a change of the server is noticed."""
_NEAR: Final = 1.25
"""Calls of row counts within this ratio of a known size count as that size."""


class SliceLearner:
    """Predicts how long the rows of a layer take in slices of any size, and chooses the best size."""

    def __init__(self, timings: Sequence[tuple[int, float]], capacity: int, smallest: int) -> None:
        """Starts from ``timings`` (rows, seconds of one call); slices have ``smallest`` to ``capacity`` rows."""
        self._rows = [rows for rows, _ in sorted(timings)] or [1]
        self._seconds = [seconds for _, seconds in sorted(timings)] or [0.0]
        self._capacity = capacity
        self._call_s = _CALL_S
        sizes = {min(smallest, capacity), capacity}
        size = 1
        while size < capacity:
            if size >= smallest:
                sizes.add(size)
            size *= 2
        self._sizes = sorted(sizes)
        self._chosen: dict[int, int] = {}
        self._near: dict[int, int] = {}
        """Which known size each row count seen so far counts as, -1 if none: the same few come all the time."""
        self._n_seen = 0

    def seconds(self, rows: int) -> float:
        """Predicted seconds of one call of ``rows`` rows on the server."""
        at = bisect_left(self._rows, rows)
        if at < len(self._rows) and self._rows[at] == rows:
            return self._seconds[at]
        if at == 0:
            return self._seconds[0]
        if at == len(self._rows):
            return self._seconds[-1] * rows / self._rows[-1]
        low, high = self._rows[at - 1], self._rows[at]
        part = (rows - low) / (high - low)
        return self._seconds[at - 1] * (1 - part) + self._seconds[at] * part

    def total_seconds(self, n_rows: int, size: int) -> float:
        """Predicted seconds of ``n_rows`` rows in slices of ``size`` rows."""
        full, rest = divmod(n_rows, size)
        total = full * (self.seconds(min(size, n_rows)) + self._call_s)
        return total + (self.seconds(rest) + self._call_s if rest else 0.0)

    def slice_rows(self, n_rows: int) -> int:
        """The slice size for a layer's call of ``n_rows`` rows."""
        if n_rows <= self._sizes[0]:
            return self._capacity
        chosen = self._chosen.get(n_rows)
        if chosen is None:
            if len(self._chosen) > LOOK_EVERY:
                self._chosen.clear()
            chosen = self._chosen[n_rows] = self._best(n_rows)
        return chosen

    def _best(self, n_rows: int) -> int:
        times = {size: self.total_seconds(n_rows, size) for size in self._sizes}
        limit = min(times.values()) * (1 + _SAME)
        return max(size for size, seconds in times.items() if seconds <= limit)

    def look(self, size: int) -> int:
        """The size of the next dispatch: mostly ``size`` itself, now and then a neighbour of it."""
        if self._n_seen % LOOK_EVERY != LOOK_EVERY - 1:
            return size
        at = bisect_left(self._sizes, size)
        neighbours = self._sizes[max(0, at - 1) : at] + self._sizes[at + 1 : at + 2]
        return neighbours[self._n_seen // LOOK_EVERY % len(neighbours)] if neighbours else size

    def observe(self, rows: int, compute_s: float, beside_s: float) -> None:
        """Takes in one call of ``rows`` rows: the server's compute, and the seconds it cost beside that."""
        self._n_seen += 1
        if rows <= 64:
            self._call_s += _NEWEST * (min(max(beside_s, 0.0), 10 * _CALL_S) - self._call_s)
        near = self._near.get(rows)
        if near is None:
            near = self._find_near(rows)
        if near < 0:
            return
        before = self._seconds[near]
        now = self._seconds[near] = before + _NEWEST * (compute_s * self._rows[near] / rows - before)
        if self._chosen and abs(now - before) > _SAME * before:
            self._chosen.clear()

    def _find_near(self, rows: int) -> int:
        at = bisect_left(self._rows, rows)
        near = min(
            (i for i in (at - 1, at) if 0 <= i < len(self._rows)),
            key=lambda i: max(self._rows[i], rows) / min(self._rows[i], rows),
        )
        known = self._rows[near]
        if len(self._near) > LOOK_EVERY:
            self._near.clear()
        near = near if max(known, rows) / min(known, rows) <= _NEAR else -1
        self._near[rows] = near
        return near

    def describe(self) -> dict[str, Any]:
        """For the report: what was chosen for a large call, and the times per row it was chosen from."""
        size = self._best(4 * self._capacity)
        per_row = {rows: 1e6 * seconds / rows for rows, seconds in zip(self._rows, self._seconds, strict=True)}
        predicted = {str(each): self.total_seconds(4 * self._capacity, each) for each in self._sizes}
        return {
            "slice_rows": size,
            "us_per_row": {str(rows): round(us, 3) for rows, us in per_row.items()},
            "call_us": round(1e6 * self._call_s, 1),
            "predicted_s": {name: round(seconds, 6) for name, seconds in predicted.items()},
            "because": f"least predicted time for {4 * self._capacity} rows",
        }
