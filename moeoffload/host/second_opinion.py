"""Asking twice: a copy of a request that is late (hedging), and a check of a share of the replies (verification)."""

from __future__ import annotations

import random
from time import perf_counter
from typing import Final

import torch

from moeoffload.errors import DeadlineError, DisagreementError, ServerError
from moeoffload.host.counters import CallCounters
from moeoffload.host.flight import Flight, ShardLink
from moeoffload.host.recovery_log import RecoveryLog
from moeoffload.host.shard import Shard

RACE_S: Final = 0.001
"""How long each of two servers is waited for in turn."""
ROUNDINGS: Final = 8.0
"""Sums of one row may differ by so many roundings of its largest value: kernels add in different orders."""


class SecondOpinion:
    """Receives replies as the settings ask for. ``dtype`` is the coarsest of the payload and the model."""

    def __init__(self, hedge_s: float, verify_share: float, dtype: torch.dtype, log: RecoveryLog) -> None:
        self._hedge_s = hedge_s
        self._verify_share = verify_share
        self._tolerance = ROUNDINGS * torch.finfo(dtype).eps
        self._log = log
        self._random = random.Random()
        self._unused = CallCounters()

    def receive(
        self,
        shard: Shard,
        flight: Flight,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        to: CallCounters,
    ) -> tuple[Flight, torch.Tensor]:
        """The sums that answer ``flight``, and the flight they came with: the other one is released.

        ``hidden``, ``ids`` and ``weights`` are those of the whole call, see `Dispatcher`.

        Raises:
            ServerError: the link of ``flight`` failed, and no replica answered instead.
            DisagreementError: a reply was computed again, and differs.
        """
        rows = slice(flight.start, flight.start + flight.chunk_rows)
        chunk = hidden[rows], ids[rows], weights[rows]
        part = flight.link.receive(flight, to, self._hedge_s or None)
        if part is None:
            flight, part = self._race(shard, flight, *chunk, to)
        if self._verify_share and self._random.random() < self._verify_share:
            self._verify(shard, flight, part, *chunk)
        return flight, part

    def _race(
        self, shard: Shard, late: Flight, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor,
        to: CallCounters,
    ) -> tuple[Flight, torch.Tensor]:  # fmt: skip
        copy = self._send_again(shard.standby(late.link), late, hidden, ids, weights)
        if copy is None:
            return late, _take(late, to)
        self._log.count("hedged")
        loser = copy
        try:
            while True:
                part = late.link.receive(late, to, RACE_S)
                if part is not None:
                    return late, part
                try:
                    part = copy.link.receive(copy, to, RACE_S)
                except ServerError:
                    return late, _take(late, to)
                if part is not None:
                    self._log.count("hedge_wins")
                    loser = late
                    return copy, part
        finally:
            loser.link.release(loser)

    def _verify(
        self, shard: Shard, flight: Flight, part: torch.Tensor, hidden: torch.Tensor, ids: torch.Tensor,
        weights: torch.Tensor,
    ) -> None:  # fmt: skip
        checker = shard.checker(flight.link)
        again = self._send_again(checker, flight, hidden, ids, weights)
        if checker is None or again is None:
            return
        try:
            expected = _take(again, self._unused).float()
        except ServerError:
            return  # the checker is lost; its next call finds that out
        finally:
            again.link.release(again)
        self._log.count("verified")
        scale = expected.abs().amax(dim=1, keepdim=True)
        differs = ((part.float() - expected).abs() > self._tolerance * scale).any(dim=1)
        if bool(differs.any()):
            row = int(differs.nonzero()[0])
            worst = float((part[row].float() - expected[row]).abs().max())
            raise DisagreementError(
                f"{flight.link.name} and {checker.name} disagree: layer {flight.layer}, row {row} of {part.shape[0]}, "
                f"by {worst:.3g} where values reach {float(scale[row]):.3g}"
            )

    def _send_again(
        self, link: ShardLink | None, flight: Flight, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> Flight | None:
        """The same request to another; None if that is not possible at the moment."""
        if link is None or flight.chunk_rows > link.layout.capacity:
            return None
        try:
            copy = link.take(wait=False)
            if copy is not None and link.send(copy, flight.layer, flight.start, hidden, ids, weights, self._unused):
                return copy
        except ServerError:
            pass  # it is lost, too; whoever needs it finds that out
        return None


def _take(flight: Flight, to: CallCounters) -> torch.Tensor:
    started = perf_counter()
    part = flight.link.receive(flight, to)
    if part is None:
        raise DeadlineError(f"{flight.link.name}: no reply within {perf_counter() - started:.3g} s")
    return part
