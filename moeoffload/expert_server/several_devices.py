"""Several devices of one server: accounts for the memory taken on each and decides which experts each gets."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import torch

from moeoffload.errors import CapacityError
from moeoffload.expert_server.layer_parts import LayerParts
from moeoffload.kernels import KernelChoice, KernelWorkspace, LayerKernels
from moeoffload.placement import GIB, round_to_sum

if TYPE_CHECKING:
    from moeoffload.checkpoint import Checkpoint
    from moeoffload.checkpoint.copy_buffers import CopyBuffers

KEPT: Final = 0.02
"""Fraction of the memory not offered: a batch takes room on every device, and parts of a layer are whole experts."""


class SeveralDevices:
    """Places experts of all hosts on devices, each layer in proportion to the devices' free memory. Thread-safe.

    Attributes:
        devices: the first one takes calls and adds up the sums.
        budgets: bytes of each device that experts and batches may take.
    """

    def __init__(self, devices: Sequence[torch.device], budgets: Sequence[int]) -> None:
        self.devices = tuple(devices)
        self.budgets = tuple(budgets)
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

    def __str__(self) -> str:
        held = zip(self.devices, self._used, self.budgets, strict=True)
        return ", ".join(f"{device}: {used / GIB:.4g} of {budget / GIB:.4g} GiB" for device, used, budget in held)

    def build(
        self,
        checkpoint: Checkpoint,
        layer: int,
        experts: Sequence[int],
        workspace: KernelWorkspace,
        kernel: KernelChoice,
        make_room: Callable[[], object],
        buffers: CopyBuffers | None = None,
    ) -> LayerKernels:
        """Reads experts of a layer, each to one device; ``make_room`` frees experts that no host uses.
        Raises ModelError: they cannot be read; CapacityError: no device has room for one of them."""
        expert_bytes = checkpoint.layers[layer].expert_bytes
        counts = self._take(len(experts), expert_bytes)
        if counts is None:
            make_room()
            counts = self._take(len(experts), expert_bytes)
        if counts is None:
            size = f"{expert_bytes / GIB:.4g} GiB"
            raise CapacityError(f"layer {layer}: {len(experts)} experts of {size} do not fit; taken are {self}")
        taken = [count * expert_bytes for count in counts]
        try:
            parts = [(device, count) for device, count in zip(self.devices, counts, strict=True) if count]
            kernels = LayerParts(checkpoint, layer, experts, parts, workspace, kernel, buffers)
        except BaseException:
            self.give_back(taken)
            raise
        weakref.finalize(kernels, self.give_back, taken)
        return kernels

    def _take(self, n_experts: int, expert_bytes: int) -> list[int] | None:
        """Takes memory for experts of a layer; returns how many each device gets, or None if they do not fit.

        Rounding evens out over layers: a device that got too few experts in one has more free memory in the next.
        """
        with self._lock:
            free = self.free
            wanted = [n_experts * each / max(1, sum(free)) for each in free]
            counts = round_to_sum(wanted, n_experts, [each // expert_bytes for each in free])
            if counts is not None:
                self.take([count * expert_bytes for count in counts])
        return counts

    def take(self, n_bytes: Sequence[int]) -> None:
        """Counts bytes of each device, which must be free, as taken."""
        with self._lock:
            for number, more in enumerate(n_bytes):
                self._used[number] += more

    def give_back(self, n_bytes: Sequence[int]) -> None:
        """Counts bytes of each device as free again."""
        self.take([-each for each in n_bytes])
