"""Several memories of one server: accounts for the bytes taken of each and decides which experts each gets."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Final

import torch

from moeoffload.errors import CapacityError
from moeoffload.expert_server.layer_parts import LayerParts, LayerSource
from moeoffload.kernels import LayerKernels
from moeoffload.placement import GIB, round_to_sum

KEPT: Final = 0.02
"""Fraction of the memory not offered: parts of a layer are whole experts."""


class SeveralDevices:
    """Places experts of all hosts on devices, each layer in proportion to the devices' free memory. Thread-safe.

    Attributes:
        devices: the first one takes calls and adds up the sums.
        budgets: bytes of each device that experts and batches may take.
        n_for_batches: the first so many devices need room for each batch.
        batch_bytes: bytes of each of these that batches have taken.
    """

    def __init__(self, devices: Sequence[torch.device], budgets: Sequence[int]) -> None:
        self.devices = tuple(devices)
        self.budgets = tuple(budgets)
        self.n_for_batches = len(self.devices)
        self.batch_bytes = 0
        self._used = [0] * len(self.devices)
        self._lock = threading.RLock()
        """Reentrant: an object that is freed while the lock is held gives its bytes back under the lock."""

    @property
    def offered_bytes(self) -> int:
        """Bytes of all devices together that hosts may fill."""
        return int(sum(self.budgets) * (1 - KEPT))

    @property
    def free(self) -> list[int]:
        """Free bytes of each device's budget."""
        return [max(0, budget - used) for budget, used in zip(self.budgets, self._used, strict=True)]

    @property
    def batch_room(self) -> int:
        """Bytes that batches may take on each device that needs room for them."""
        return min(self.free[: self.n_for_batches])

    def __str__(self) -> str:
        held = zip(self.devices, self._used, self.budgets, strict=True)
        return ", ".join(f"{device}: {used / GIB:.4g} of {budget / GIB:.4g} GiB" for device, used, budget in held)

    def build(self, source: LayerSource, make_room: Callable[[], object], fast_part: float = 1.0) -> LayerKernels:
        """Reads experts of a layer, each to one device; ``make_room`` frees experts that no host uses. ``fast_part`` is
        for `Tiers`. Raises ModelError: they cannot be read; CapacityError: no device has room for one of them."""
        n_experts, expert_bytes = len(source.experts), source.expert_bytes
        counts = self._take(n_experts, expert_bytes, fast_part)
        if counts is None:
            make_room()
            counts = self._take(n_experts, expert_bytes, fast_part)
        if counts is None:
            size = f"{expert_bytes / GIB:.4g} GiB"
            raise CapacityError(f"layer {source.layer}: {n_experts} experts of {size} do not fit; taken are {self}")
        taken = [count * expert_bytes for count in counts]
        try:
            kernels = self._read(source, counts)
        except BaseException:
            self._give_back(taken)
            raise
        weakref.finalize(kernels, self._give_back, taken)
        return kernels

    def reserve(self, n_bytes: int) -> bool:
        """Takes ``n_bytes`` of each device for batches (negative: gives them back); returns False, and takes none, if
        not so many are free."""
        with self._lock:
            if 0 < n_bytes > self.batch_room:
                return False
            self.batch_bytes += n_bytes
            self._count([n_bytes] * self.n_for_batches)
            return True

    def _take(self, n_experts: int, expert_bytes: int, fast_part: float) -> list[int] | None:
        """Takes memory for experts of a layer; returns how many each device gets, or None if they do not fit."""
        with self._lock:
            counts = self._split(n_experts, expert_bytes, fast_part)
            if counts is not None:
                self._count([count * expert_bytes for count in counts])
        return counts

    def _split(self, n_experts: int, expert_bytes: int, fast_part: float) -> list[int] | None:
        """Returns how many experts each device gets, or None if they do not fit.

        Rounding evens out over layers: a device that got too few experts in one has more free memory in the next.
        """
        free = self.free
        wanted = [n_experts * each / max(1, sum(free)) for each in free]
        return round_to_sum(wanted, n_experts, [each // expert_bytes for each in free])

    def _read(self, source: LayerSource, counts: list[int]) -> LayerKernels:
        if counts[0] == len(source.experts):
            return source.build(self.devices[0])[1]
        parts = [(device, count) for device, count in zip(self.devices, counts, strict=True) if count]
        return LayerParts(source, parts)

    def _count(self, n_bytes: Sequence[int]) -> None:
        with self._lock:
            for number, more in enumerate(n_bytes):
                self._used[number] += more

    def _give_back(self, n_bytes: Sequence[int]) -> None:
        self._count([-each for each in n_bytes])
