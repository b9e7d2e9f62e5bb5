"""Hedging: a request whose reply is late goes to a replica as well, and the first reply counts."""

from __future__ import annotations

from typing import Final

import torch

from moeoffload.errors import ServerError
from moeoffload.host.counters import CallCounters
from moeoffload.host.flight import Flight
from moeoffload.host.resend import Chunk, receive_all, send_again
from moeoffload.host.server_events import ServerEvents
from moeoffload.host.shard import Shard

POLL_S: Final = 0.001
"""How long each of two servers is waited for in turn."""


class Hedging:
    """Receives replies, from a replica where the first server takes longer than ``after_s``."""

    def __init__(self, after_s: float, events: ServerEvents) -> None:
        self._after_s = after_s
        self._events = events

    def receive(self, shard: Shard, flight: Flight, chunk: Chunk, to: CallCounters) -> tuple[Flight, torch.Tensor]:
        """The sums that answer ``flight``, and the flight they came with: the other one is released.

        Raises:
            ServerError: the link of ``flight`` failed, and no replica answered instead.
        """
        part = flight.link.receive(flight, to, self._after_s)
        if part is not None:
            return flight, part
        copy = send_again(shard.standby(flight.link), flight, chunk, to)
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
