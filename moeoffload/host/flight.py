"""What computes a shard's experts, as the dispatcher sees it: an expert server, or the host itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from moeoffload.host.auto_slice import SliceLearner
from moeoffload.host.counters import CallCounters
from moeoffload.placement import ExpertTable
from moeoffload.wire import FrameLayout


@dataclass(slots=True, eq=False)
class Flight:
    """One chunk of rows on its way. ``index`` are the rows sent, None if all of the chunk."""

    link: ShardLink
    layer: int = 0
    start: int = 0
    chunk_rows: int = 0
    n_rows: int = 0
    index: torch.Tensor | None = None
    queue_s: float = 0.0
    compute_s: float = 0.0
    """What the server said of the reply, in seconds."""


class ShardLink(Protocol):
    """Computes the experts of ``table``. Safe to use from several threads, each with its own flights."""

    @property
    def name(self) -> str:
        """Who computes, for messages."""

    @property
    def table(self) -> ExpertTable:
        """The experts."""

    @property
    def learner(self) -> SliceLearner:
        """What is known of its speed."""

    @property
    def layout(self) -> FrameLayout:
        """Of its frames; ``capacity`` is the most rows of a chunk."""

    @property
    def n_slots(self) -> int:
        """How many chunks may be in flight."""

    @property
    def holds_all(self) -> list[bool]:
        """By layer: whether the table has all experts."""

    @property
    def holds_none(self) -> list[bool]:
        """By layer: whether the table has no expert."""

    def take(self, *, wait: bool) -> Flight | None:
        """A free flight for `send`; without ``wait``, None if there is none at the moment.

        Raises:
            DeadlineError: none came free in time.
            ServerError: the link is closed.
        """

    def send(
        self,
        flight: Flight,
        layer: int,
        start: int,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        to: CallCounters,
    ) -> bool:
        """Sends the rows of one chunk that need these experts; False, and the flight is given back, if none does.

        Args:
            flight: from `take`; `release` gives it back. After an error it is given back already.
            layer: running number of the MoE layer.
            start: number of the chunk's first row in the call.
            hidden: (n, hidden) of the chunk, any device.
            ids: (n, top_k) int64 expert numbers.
            weights: (n, top_k).
            to: where the call is counted.

        Raises:
            PayloadError: a value does not fit the payload dtype.
            ServerError: the link is closed.
        """

    def receive(self, flight: Flight, to: CallCounters, within_s: float | None = None) -> torch.Tensor | None:
        """Waits for the sums that answer ``flight``: (n_rows, hidden) in the payload dtype, valid until `release`.

        With ``within_s`` it gives up after so many seconds with None, and may be called again.

        Raises:
            DeadlineError: no answer by the deadline of the dispatch.
            ServerError: the server refused, failed or is gone.
            PayloadError: the result does not fit the payload dtype.
        """

    def release(self, flight: Flight) -> None:
        """Gives a flight back; if its reply was not received it is dropped when it comes."""

    def close(self) -> None:
        """Frees everything. Idempotent."""
