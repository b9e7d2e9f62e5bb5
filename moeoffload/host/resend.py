"""Sending the rows of a chunk once more, to another holder of the same experts; for hedging and verification."""

from __future__ import annotations

import torch

from moeoffload.errors import DeadlineError, ServerError
from moeoffload.host.counters import CallCounters
from moeoffload.host.flight import Flight, ShardLink

Chunk = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""hidden (n, hidden), ids (n, top_k) and weights (n, top_k) of the rows of one flight."""


def chunk_of(flight: Flight, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Chunk:
    """The part of a whole call that ``flight`` was given."""
    rows = slice(flight.start, flight.start + flight.chunk_rows)
    return hidden[rows], ids[rows], weights[rows]


def send_again(link: ShardLink | None, flight: Flight, chunk: Chunk, to: CallCounters) -> Flight | None:
    """Sends what ``flight`` was given to ``link`` as well; None if that is not possible at the moment."""
    if link is None or flight.chunk_rows > link.layout.capacity:
        return None
    try:
        copy = link.take(wait=False)
        if copy is not None and link.send(copy, flight.layer, flight.start, *chunk, to):
            return copy
    except ServerError:
        pass  # it is lost, too; the next call that needs it finds that out
    return None


def receive_all(flight: Flight, to: CallCounters) -> torch.Tensor:
    """The sums that answer ``flight``, however long they take.

    Raises:
        ServerError: they do not come by the flight's deadline.
    """
    part = flight.link.receive(flight, to)
    if part is None:
        raise DeadlineError(f"{flight.link.name}: no reply in time")
    return part
