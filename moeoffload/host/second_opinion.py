"""Checks a reply: a second holder of the same experts computes the rows of the chunk again."""

from __future__ import annotations

import random
from typing import Final

import torch

from moeoffload.errors import DisagreementError, PayloadError, ServerError
from moeoffload.host.flight import Chunk, Flight, ShardLink
from moeoffload.host.recorder import CallCounters
from moeoffload.host.shard import ServerEvents, Shard

ROUNDINGS: Final = 8.0
"""Two sums of a row may differ by this many roundings of its largest value: kernels add in different orders."""


class Verification:
    """Has a ``share`` (0 to 1) of the replies computed a second time and compares them.

    ``eps`` is the largest machine epsilon among the payload dtypes and the model's dtype.
    """

    def __init__(self, share: float, eps: float, events: ServerEvents) -> None:
        self._share = share
        self._tolerance = ROUNDINGS * eps
        self._events = events
        self._random = random.Random()
        self._unused = CallCounters()

    def check(self, shard: Shard, flight: Flight, part: torch.Tensor | PayloadError, rows: Chunk) -> None:
        """Compares ``part`` (n_rows, hidden), the reply to ``flight`` of a call with ``rows``, with another holder's:
        always if it says that a value does not fit the payload dtype.
        Raises DisagreementError: they differ by more than rounding explains."""
        if isinstance(part, torch.Tensor) and self._random.random() >= self._share:
            return
        checker = shard.best(but=flight.link)
        if checker is None or flight.chunk_rows > checker.layout.capacity:
            return
        try:
            expected = self._compute(checker, flight, rows)
        except ServerError:
            return  # the checker is lost; its next call finds that out
        if expected is None:
            return
        self._events.count("verified")
        disagree = f"{flight.link.name} and {checker.name} disagree: "
        if isinstance(part, PayloadError) or isinstance(expected, PayloadError):
            if type(part) is type(expected):
                return
            raise DisagreementError(f"{disagree}{part if isinstance(part, PayloadError) else expected}") from None
        got = part.to(expected.device, torch.float32)  # the host that checks may compute on a GPU
        scale = expected.abs().amax(dim=1, keepdim=True)
        agrees = (got - expected).abs() <= self._tolerance * scale  # which nothing that is not a number does
        differs = ~agrees.all(dim=1)
        if bool(differs.any()):
            row = int(differs.nonzero()[0])
            worst = float((got[row] - expected[row]).abs().max())
            raise DisagreementError(
                f"{disagree}layer {flight.layer}, row {row} of {part.shape[0]}, "
                f"by {worst:.3g} where values reach {float(scale[row]):.3g}"
            )

    def _compute(self, checker: ShardLink, flight: Flight, rows: Chunk) -> torch.Tensor | PayloadError | None:
        """Returns the sums that ``checker`` computes for the rows of ``flight``, in float32, or that they do not fit
        the payload dtype; None if it has no free slot."""
        hidden, ids, weights = rows
        part = slice(flight.start, flight.start + flight.chunk_rows)
        again = checker.take(wait=False)
        if again is None or not checker.send(
            again, flight.layer, flight.start, (hidden[part], ids[part], weights[part]), self._unused
        ):
            return None
        try:
            return checker.receive(again, self._unused).to(torch.float32, copy=True)
        except PayloadError as error:
            return error
        finally:
            checker.release(again)
