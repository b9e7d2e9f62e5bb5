"""The rows of a chunk sent to a second holder of the same experts: because a reply is late, or to check it."""

from __future__ import annotations

import random
from typing import Final

import torch

from moeoffload.errors import DeadlineError, DisagreementError, ServerError
from moeoffload.host.counters import CallCounters
from moeoffload.host.flight import Chunk, Flight, ShardLink
from moeoffload.host.server_events import ServerEvents
from moeoffload.host.shard import Shard

POLL_S: Final = 0.001  # how long each of two servers is waited for in turn
ROUNDINGS: Final = 8.0
"""Sums of one row may differ by this many roundings of its largest value: kernels add in different orders."""


def chunk_of(flight: Flight, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Chunk:
    """The part of a whole call that ``flight`` was given."""
    rows = slice(flight.start, flight.start + flight.chunk_rows)
    return hidden[rows], ids[rows], weights[rows]


def receive_all(flight: Flight, to: CallCounters) -> torch.Tensor:
    """The sums that answer ``flight``, however long they take.
    Raises ServerError: they do not come by the flight's deadline."""
    part = flight.link.receive(flight, to)
    if part is None:
        raise DeadlineError(f"{flight.link.name}: no reply in time")
    return part


def _send_again(link: ShardLink | None, flight: Flight, chunk: Chunk, to: CallCounters) -> Flight | None:
    """Sends what ``flight`` was given to ``link`` as well; None if that is not possible at the moment."""
    if link is None or flight.chunk_rows > link.layout.capacity:
        return None
    try:
        copy = link.take(wait=False)
        if copy is not None and link.send(copy, flight.layer, flight.start, chunk, to):
            return copy
    except ServerError:
        pass  # it is lost, too; the next call that needs it finds that out
    return None


class Hedging:
    """A request whose reply takes longer than ``after_s`` goes to a replica as well, and the first reply counts."""

    def __init__(self, after_s: float, events: ServerEvents) -> None:
        self._after_s = after_s
        self._events = events

    def receive(self, shard: Shard, flight: Flight, chunk: Chunk, to: CallCounters) -> tuple[Flight, torch.Tensor]:
        """The sums that answer ``flight``, and the flight they came with: the other one is released.
        Raises ServerError: the link of ``flight`` failed, and no replica answered instead."""
        part = flight.link.receive(flight, to, self._after_s)
        if part is not None:
            return flight, part
        copy = _send_again(shard.standby(flight.link), flight, chunk, to)
        if copy is None:
            return flight, receive_all(flight, to)
        self._events.count("hedged")
        return self._first_of(flight, copy, to)

    def _first_of(self, late: Flight, copy: Flight, to: CallCounters) -> tuple[Flight, torch.Tensor]:
        loser = copy
        try:
            while True:
                part = late.link.receive(late, to, POLL_S)
                if part is not None:
                    return late, part
                try:
                    part = copy.link.receive(copy, to, POLL_S)
                except ServerError:
                    return late, receive_all(late, to)
                if part is not None:
                    self._events.count("hedge_wins")
                    loser = late
                    return copy, part
        finally:
            loser.link.release(loser)


class Verification:
    """Computes a ``share`` (0 to 1) of the replies a second time and compares.

    ``eps`` is that of the coarsest of the payloads and the model.
    """

    def __init__(self, share: float, eps: float, events: ServerEvents) -> None:
        self._share = share
        self._tolerance = ROUNDINGS * eps
        self._events = events
        self._random = random.Random()
        self._unused = CallCounters()

    def check(self, shard: Shard, flight: Flight, part: torch.Tensor, chunk: Chunk) -> None:
        """Compares ``part`` (n_rows, hidden), which answered ``flight``, with the sums of another holder.
        Raises DisagreementError: they differ by more than rounding explains."""
        if self._random.random() >= self._share:
            return
        checker = shard.checker(flight.link)
        again = _send_again(checker, flight, chunk, self._unused)
        if checker is None or again is None:
            return
        try:
            expected = receive_all(again, self._unused).to(torch.float32, copy=True)
        except ServerError:
            return  # the checker is lost; its next call finds that out
        finally:
            again.link.release(again)
        self._events.count("verified")
        got = part.to(expected.device, torch.float32)  # the host that checks may compute on a GPU
        scale = expected.abs().amax(dim=1, keepdim=True)
        differs = ((got - expected).abs() > self._tolerance * scale).any(dim=1)
        if bool(differs.any()):
            row = int(differs.nonzero()[0])
            worst = float((got[row] - expected[row]).abs().max())
            raise DisagreementError(
                f"{flight.link.name} and {checker.name} disagree: layer {flight.layer}, row {row} of {part.shape[0]}, "
                f"by {worst:.3g} where values reach {float(scale[row]):.3g}"
            )
