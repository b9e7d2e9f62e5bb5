"""Draws faults from a seed: the same seed gives the same faults at the same places of the same generations."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from fault_kit.kinds import KINDS, Kind

LAST_TENTHS: Final = 7
"""Faults strike in the first seven tenths of a generation, so that there is something left to recover for."""


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


def draw_faults(n: int, seed: int, setups: Sequence[Setup] = SETUPS, kinds: Sequence[Kind] = KINDS) -> list[Fault]:
    """``n`` faults, all kinds in all setups equally often as far as ``n`` allows, in the order of ``setups``."""
    dice = random.Random(seed)
    deck: list[tuple[Setup, Kind]] = []
    faults = []
    for number in range(n):
        if not deck:
            # Kinds first: a small n has as many different ones as it can.
            for kind in dice.sample(list(kinds), len(kinds)):
                fitting = [setup for setup in setups if setup.transport in kind.transports]
                deck += [(setup, kind) for setup in fitting]
            deck = _interleaved(deck, dice)
        setup, kind = deck.pop()
        faults.append(
            Fault(
                number,
                setup,
                kind,
                victim=dice.randrange(2),
                at=dice.uniform(0.05, LAST_TENTHS / 10),
                lasts_s=dice.uniform(*kind.lasts_s),
                before_frames=dice.random() < 0.5,
            )
        )
    return sorted(faults, key=lambda fault: (list(setups).index(fault.setup), fault.number))


def _interleaved(deck: list[tuple[Setup, Kind]], dice: random.Random) -> list[tuple[Setup, Kind]]:
    """Rounds in which every kind comes once, each time in another setup; the first round last, where ``pop`` takes."""
    by_kind: dict[str, list[tuple[Setup, Kind]]] = {}
    for entry in deck:
        by_kind.setdefault(entry[1].name, []).append(entry)
    for entries in by_kind.values():
        dice.shuffle(entries)
    rounds: list[tuple[Setup, Kind]] = []
    while any(by_kind.values()):
        rounds += [entries.pop() for entries in by_kind.values() if entries]
    return rounds[::-1]
