"""The dispatcher's interface to a link that computes a shard's experts: to an expert server, or to the host itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from moeoffload.host.recorder import CallCounters
from moeoffload.placement import ExpertTable, slot_table
from moeoffload.wire import FrameLayout

Chunk = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""hidden (n, hidden), ids (n, top_k) int64 and weights (n, top_k) of some rows of one layer's call."""


@dataclass(slots=True, eq=False)
class Flight:
    """One chunk of rows in flight. ``index`` holds the rows of the chunk that were sent, None for all."""

    link: ShardLink
    layer: int = 0
    start: int = 0
    chunk_rows: int = 0
    n_rows: int = 0
    index: torch.Tensor | None = None
    queue_s: float = 0.0
    compute_s: float = 0.0
    """Queue and compute time that the server reported with the reply, in seconds."""

    def where(self, row: int) -> str:
        """Names a row that was sent by its number within the call."""
        return f"layer {self.layer}, row {self.start + (row if self.index is None else int(self.index[row]))}"


class ShardLink(ABC):
    """Computes the experts of ``table``. Safe to use from several threads, each with its own flights.

    Attributes:
        layout: the layout of its frames; ``capacity`` is the most rows of a chunk.
        n_slots: how many chunks may be in flight.
        holds_none: by layer, whether the table has no expert.
        n_calls: chunks sent (a server) or computed (the host) so far.
    """

    def __init__(
        self, name: str, table: ExpertTable, n_experts: list[int], layout: FrameLayout, n_slots: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        """``name`` identifies the link in messages; ``n_experts`` counts the experts of each layer; ``device`` is that
        of the rows."""
        self.name = name
        self.table = table
        self.layout = layout
        self.n_slots = n_slots
        self._slot_of = [slot_table(held, n + 1).to(device) for held, n in zip(table.layers, n_experts, strict=True)]
        """By layer; the last entry, -1, stands for no expert: narrow routers' choices are padded with that number."""
        self._holds_all = [len(held) == n for held, n in zip(table.layers, n_experts, strict=True)]
        self.holds_none = [not held for held in table.layers]
        self.n_calls = 0

    def _board(self, flight: Flight, layer: int, start: int, chunk: Chunk) -> Chunk | None:
        """Fills in ``flight``; returns the rows of ``chunk`` that have an expert here, with slots (n, top_k) int16 in
        place of ids, -1 for experts elsewhere; None if there are no such rows."""
        hidden, ids, weights = chunk
        slots = self._slot_of[layer].take(ids)
        index = None
        if not self._holds_all[layer]:
            hit = (slots >= 0).any(dim=1)
            n_hit = int(hit.sum())
            if n_hit == 0:
                return None
            if n_hit < hidden.shape[0]:
                index = hit.nonzero().squeeze(1)
                hidden, slots, weights = hidden[index], slots[index], weights[index]
        flight.layer, flight.start, flight.chunk_rows = layer, start, ids.shape[0]
        flight.n_rows, flight.index = hidden.shape[0], index
        return hidden, slots, weights

    @abstractmethod
    def take(self, *, wait: bool) -> Flight | None:
        """Returns a free flight for `send`; without ``wait``, None if there is none at the moment.
        Raises DeadlineError: none became free in time; ServerError: the link is closed."""

    @abstractmethod
    def send(self, flight: Flight, layer: int, start: int, chunk: Chunk, to: CallCounters) -> bool:
        """Sends the rows of one chunk that need these experts; returns False, and releases the flight, if none does.

        ``flight`` is from `take` and must be released with `release`, except after an error, which releases it.
        ``layer`` is the number of the MoE layer, ``start`` the chunk's first row within the call; ``to`` counts it.
        Raises PayloadError: a value does not fit the payload dtype; ServerError: the link is closed.
        """

    @abstractmethod
    def receive(self, flight: Flight, to: CallCounters) -> torch.Tensor:
        """Waits for the sums that answer ``flight``: (n_rows, hidden) in the payload dtype, valid until `release`.

        Raises DeadlineError: no answer by the deadline of the dispatch; ServerError: the server refused, failed or is
        gone; PayloadError: the result does not fit the payload dtype.
        """

    @abstractmethod
    def release(self, flight: Flight) -> None:
        """Releases a flight; a reply that was not received is dropped when it arrives."""
