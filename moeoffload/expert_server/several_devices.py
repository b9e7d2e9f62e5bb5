"""Several memories of one server: which experts each device gets, the bytes taken of each, and layers split over them.

A call of a split layer goes to the first device, which copies it to the others; all compute at the same time, and the
first adds their sums to its own in float32, in the order of the devices: the last bits of a row depend only on which
device holds its experts.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from moeoffload.config import Kernel
from moeoffload.errors import CapacityError
from moeoffload.kernels import KernelInput, KernelWorkspace, LayerKernels
from moeoffload.placement import GIB, round_to_sum

if TYPE_CHECKING:
    from moeoffload.checkpoint import Checkpoint
    from moeoffload.checkpoint.copy_buffers import CopyBuffers

KEPT: Final = 0.02
"""Fraction of the memory not offered: parts of a layer are whole experts."""


@dataclass(frozen=True)
class LayerSource:
    """Experts of one layer of a checkpoint, and how they are to be read and computed."""

    checkpoint: Checkpoint
    layer: int
    experts: Sequence[int]
    workspace: KernelWorkspace
    kernel: Kernel
    buffers: CopyBuffers | None = None

    def build(self, device: torch.device, some: slice = slice(None)) -> tuple[nn.Module, LayerKernels]:
        """Reads ``some`` of the experts to a device; returns the module that holds them, and its kernels.
        Raises ModelError: see `Checkpoint.build_experts`."""
        how: Any = {"in_tiles": self.kernel != "grouped", "buffers": self.buffers}
        module = self.checkpoint.build_experts(self.layer, self.experts[some], device, **how)
        return module, LayerKernels(module, self.workspace, self.kernel)


class LayerParts(LayerKernels):
    """As `LayerKernels`, for experts on several devices; a slot is an index into the source's experts, wherever one is.

    Rows, slots and sums of a call are on one device. If that is a GPU, nothing here waits for any device, and slots
    must be in -1 to n_experts - 1.
    """

    def __init__(self, source: LayerSource, parts: Sequence[tuple[torch.device, int]]) -> None:
        """Reads the experts, in order, to the devices of ``parts``: pairs of a device and its number of experts, at
        least one. Raises ModelError: see `Checkpoint.build_experts`."""
        ends = list(itertools.accumulate(n for _, n in parts))
        built = [source.build(device, slice(end - n, end)) for (device, n), end in zip(parts, ends, strict=True)]
        self._modules, self._parts = zip(*built, strict=True)
        self._devices = tuple(device for device, _ in parts)
        first, self.n_experts = self._parts[0], len(source.experts)
        self.dtype, self.hidden = first.dtype, first.hidden
        self.falls_back = next((each.falls_back for each in self._parts if each.falls_back), None)
        self.weight_error = _joined_error(self._parts)
        self.is_batch_invariant = all(each.is_batch_invariant for each in self._parts)
        # For each part the slot of every expert in it, or -1. The last entry is for slot -1 (no expert).
        places = torch.full((len(parts), self.n_experts + 1), -1, dtype=torch.int64)
        for place, (_, n), end in zip(places, parts, ends, strict=True):
            place[end - n : end] = torch.arange(n)
        self._places = places.to(self._devices[0])

    def kernel_for(self, n_rows: int) -> str:
        """Returns the names of the kernels that serve a call of ``n_rows`` rows."""
        names = self._kernels_for(n_rows)
        return f"{names} on {len(self._parts)} devices" if len(self._parts) > 1 else names

    def _kernels_for(self, n_rows: int) -> str:
        return " and ".join(dict.fromkeys(part.kernel_for(n_rows) for part in self._parts))

    def compile(self, top_k: int) -> None:
        """See `LayerKernels.compile`."""
        for part in self._parts:
            part.compile(top_k)

    def reserve(self, max_rows: int, top_k: int) -> None:
        """See `LayerKernels.reserve`."""
        for part in self._parts:
            part.reserve(max_rows, top_k)

    def __call__(self, call: KernelInput, workspace: KernelWorkspace | None = None) -> None:
        """See `LayerKernels.__call__`."""
        for _ in self.in_slices(call, workspace):
            pass

    def in_slices(self, call: KernelInput, workspace: KernelWorkspace | None = None) -> Iterator[None]:
        """See `LayerKernels.in_slices`."""
        rows, slots, weights, out = call
        self._check_slots(slots)
        places = self._places[:, slots.to(self._places.device)]
        sums = [torch.empty(out.shape, dtype=out.dtype, device=device) for device in self._devices[1:]]
        sums.insert(0, out if self._devices[0] == out.device else torch.empty_like(out, device=self._devices[0]))
        # First all copies (a copy waits for work queued before it), then the other devices' parts, then the first's.
        calls = [
            KernelInput(rows.to(device), at.to(device), weights.to(device), of_part)
            for device, at, of_part in zip(self._devices, places, sums, strict=True)
        ]
        for part, its_call in reversed(list(zip(self._parts, calls, strict=True))):
            yield from part.in_slices(its_call, workspace)
        if sums[0] is not out:
            sums.insert(0, out.zero_())
        for of_part in sums[1:]:
            out += of_part.to(out.device)


def _joined_error(parts: Sequence[LayerKernels]) -> float | None:
    """Returns the `LayerKernels.weight_error` of all parts together; assumes that all weights are equally large."""
    known = [(part.n_experts, part.weight_error) for part in parts if part.weight_error is not None]
    if len(known) < len(parts):
        return None
    return float((sum(n * error**2 for n, error in known) / sum(n for n, _ in known)) ** 0.5)


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
        n_experts, expert_bytes = len(source.experts), source.checkpoint.layers[source.layer].expert_bytes
        counts = self._take(n_experts, expert_bytes, fast_part)
        if counts is None:
            make_room()
            counts = self._take(n_experts, expert_bytes, fast_part)
        if counts is None:
            size = f"{expert_bytes / GIB:.4g} GiB"
            raise CapacityError(f"layer {source.layer}: {n_experts} experts of {size} do not fit; taken are {self}")
        freed = [-count * expert_bytes for count in counts]
        try:
            kernels = self._read(source, counts)
        except BaseException:
            self._count(freed)
            raise
        weakref.finalize(kernels, self._count, freed)
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
