"""Sends the rows of one layer to the servers that hold their experts, and adds up what comes back."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Final

import torch

from moeoffload.host.counters import CallCounters
from moeoffload.host.granularity import Granularity
from moeoffload.host.link import ExpertLink, Flight
from moeoffload.host.recorder import Recorder
from moeoffload.host.remote_experts import ExpertsCall

DECODE_ROWS: Final = 8


@dataclass(slots=True)
class _Progress:
    """How far the rows of the running call are with one server."""

    link: ExpertLink
    flights: deque[Flight]
    next_row: int = 0


class Dispatcher:
    """Computes the routed experts of every layer on the servers behind ``links``.

    Not reentrant: one layer of one forward pass runs at a time.
    """

    def __init__(self, links: Sequence[ExpertLink], granularity: Granularity, recorder: Recorder) -> None:
        self._granularity = granularity
        self._recorder = recorder
        self._progress = [_Progress(link, deque()) for link in links]
        self._sums: dict[int, torch.Tensor] = {}
        self.n_created = 0
        """Accumulators made so far that are kept for later calls."""

    def for_layer(self, layer: int) -> ExpertsCall:
        """The experts call of one MoE layer, to be tied to its module."""
        return functools.partial(self, layer)

    def __call__(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Weighted sum of the routed experts of one layer.

        Requests to all servers leave before the first wait, as many as there are slots; the sums are added in a fixed
        order (chunk by chunk, server by server), so that results do not depend on who answers first.

        Args:
            layer: running number of the MoE layer.
            hidden: (n, hidden).
            ids: (n, top_k) int64 expert numbers.
            weights: (n, top_k).

        Returns:
            (n, hidden) in the dtype and on the device of ``hidden``.

        Raises:
            ServerError: a server refused, failed, or did not answer in time.
            PayloadError: a value does not fit the payload dtype.
        """
        record = self._recorder
        counters = record.calls
        clock = perf_counter
        n_rows = hidden.shape[0]
        # One server with every expert: its sums are the result, no accumulator is needed.
        alone = len(self._progress) == 1 and self._progress[0].link.holds_all[layer]
        result = torch.empty_like(hidden)
        total = None if alone else self._accumulator(hidden)
        pack_s = wait_s = combine_s = 0.0
        for progress in self._progress:
            progress.next_row = n_rows if progress.link.holds_none[layer] else 0
        try:
            busy = True
            while busy:
                busy = False
                started = clock()
                for number, progress in enumerate(self._progress):
                    self._fill(progress, layer, hidden, ids, weights, counters[number])
                pack_s += clock() - started
                for number, progress in enumerate(self._progress):
                    if not progress.flights:
                        continue
                    busy = True
                    flight = progress.flights[0]
                    started = clock()
                    part = progress.link.receive(flight, counters[number])
                    received = clock()
                    wait_s += received - started
                    if total is None:
                        result[flight.start : flight.start + flight.n_rows].copy_(part)
                    else:
                        _add(total, part, flight)
                    progress.flights.popleft()
                    progress.link.release(flight)
                    combine_s += clock() - received
        finally:
            for progress in self._progress:
                while progress.flights:
                    progress.link.release(progress.flights.popleft())
        if total is not None:
            result.copy_(total)
        record.add_times(layer, pack_s, wait_s, combine_s)
        return result

    def _fill(
        self,
        progress: _Progress,
        layer: int,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        to: CallCounters,
    ) -> None:
        """Sends chunks until the server's slots are taken or no rows are left."""
        link, n_rows = progress.link, hidden.shape[0]
        step = self._granularity.slice_rows(link.layout.capacity)
        while progress.next_row < n_rows and len(progress.flights) < link.n_slots:
            start = progress.next_row
            progress.next_row = end = min(start + step, n_rows)
            flight = link.send(layer, start, hidden[start:end], ids[start:end], weights[start:end], to)
            if flight is not None:
                progress.flights.append(flight)

    def _accumulator(self, hidden: torch.Tensor) -> torch.Tensor:
        """A zeroed float32 tensor shaped like ``hidden``; kept for decode-shaped calls."""
        n_rows = hidden.shape[0]
        if n_rows > DECODE_ROWS:
            return torch.zeros_like(hidden, dtype=torch.float32)
        kept = self._sums.get(n_rows)
        if kept is None:
            kept = self._sums[n_rows] = torch.zeros_like(hidden, dtype=torch.float32)
            self.n_created += 1
            return kept
        return kept.zero_()


def _add(total: torch.Tensor, part: torch.Tensor, flight: Flight) -> None:
    """Adds one server's sums for one chunk in float32."""
    part = part.to(total.device)
    if flight.index is None:
        total[flight.start : flight.start + flight.n_rows] += part
    else:
        total.index_add_(0, flight.index + flight.start, part.float())
