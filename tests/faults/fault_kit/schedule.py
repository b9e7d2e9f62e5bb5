"""Draws faults from a seed: the same seed gives the same faults at the same places of the same generations."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Final

from fault_kit.kinds import KINDS, Kind

LAST_SHARE: Final = 0.7
"""Faults strike in this part of a generation, so that there is something left to recover for."""


@dataclass(frozen=True)
class Setup:
    """How a host uses its two servers: what carries the rows, and what helps when one is lost."""

    transport: str
    rescue: str
    """replica (every expert on both servers) or fallback (the host reads the lost ones itself)."""

    def __str__(self) -> str:
        return f"{self.transport}, {self.rescue}"


SETUPS: Final = tuple(
    Setup(transport, rescue) for transport in ("shared", "stream") for rescue in ("replica", "fallback")
)


@dataclass(frozen=True)
class Fault:
    """One fault: what, to which of two servers, before which layer call of a generation, for how long."""

    number: int
    setup: Setup
    kind: Kind
    victim: int
    at: float
    """Share of the generation's layer calls."""
    lasts_s: float
    before_frames: bool
    """Whether the generation waits until the fault is there, or the fault comes while frames may be on their way."""


def draw_faults(n: int, seed: int) -> list[Fault]:
    """``n`` faults, all kinds equally often as far as ``n`` allows, each in all its setups in turn; setup by setup."""
    dice = random.Random(seed)
    turns = {}
    for kind in KINDS:
        fitting = [setup for setup in SETUPS if setup.transport in kind.transports]
        turns[kind.name] = itertools.cycle(dice.sample(fitting, len(fitting)))
    kinds = [kind for _ in range(0, n, len(KINDS)) for kind in dice.sample(KINDS, len(KINDS))]
    faults = [
        Fault(
            number,
            next(turns[kind.name]),
            kind,
            victim=dice.randrange(2),
            at=dice.uniform(0.05, LAST_SHARE),
            lasts_s=dice.uniform(*kind.lasts_s),
            before_frames=dice.random() < 0.5,
        )
        for number, kind in enumerate(kinds[:n])
    ]
    return sorted(faults, key=lambda fault: (SETUPS.index(fault.setup), fault.number))
