"""Verification: a share of the replies is computed a second time, by a replica or the host, and compared."""

from __future__ import annotations

import random
from typing import Final

import torch

from moeoffload.errors import DisagreementError, ServerError
from moeoffload.host.counters import CallCounters
from moeoffload.host.flight import Flight
from moeoffload.host.resend import Chunk, receive_all, send_again
from moeoffload.host.server_events import ServerEvents
from moeoffload.host.shard import Shard

ROUNDINGS: Final = 8.0
"""Sums of one row may differ by this many roundings of its largest value: kernels add in different orders."""


class Verification:
    """Checks a ``share`` (0 to 1) of the replies. ``dtype`` is the coarsest of the payload and the model."""

    def __init__(self, share: float, dtype: torch.dtype, events: ServerEvents) -> None:
        self._share = share
        self._tolerance = ROUNDINGS * torch.finfo(dtype).eps
        self._events = events
        self._random = random.Random()
        self._unused = CallCounters()

    def check(self, shard: Shard, flight: Flight, part: torch.Tensor, chunk: Chunk) -> None:
        """Compares ``part`` (n_rows, hidden), which answered ``flight``, with the sums of another holder.

        Raises:
            DisagreementError: they differ by more than rounding explains.
        """
        if self._random.random() >= self._share:
            return
        checker = shard.checker(flight.link)
        again = send_again(checker, flight, chunk, self._unused)
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
