"""Resident expert weights: shared by hosts that use the same model, counted against one memory budget."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from moeoffload.errors import CapacityError
from moeoffload.kernels import LayerKernels

GIB = 1 << 30


@dataclass(frozen=True)
class LayerKey:
    """What makes two hosts' experts the same: model digest, compute dtype, MoE layer and experts in slot order."""

    model_digest: str
    compute_dtype: str
    layer: int
    experts: tuple[int, ...]


@dataclass(slots=True)
class _Resident:
    module: LayerKernels
    n_bytes: int
    n_users: int


class ExpertStore:
    """Keeps experts while at least one lease uses them. Thread-safe; ``budget_bytes`` is never exceeded."""

    def __init__(self, budget_bytes: int, free_now: Callable[[], int] = lambda: 1 << 62) -> None:
        """``free_now`` says how many bytes the device really has left, whatever the budget."""
        self.budget_bytes = budget_bytes
        self.shortest_s: dict[tuple[str, torch.dtype], dict[int, float]] = {}
        """By model digest and compute dtype: the shortest times that `Calibrate` has measured so far, by rows."""
        self._free_now = free_now
        self._residents: dict[LayerKey, _Resident] = {}
        self._reserved_bytes = 0
        self._lock = threading.Lock()
        # Two hosts that load the same model must not both read it; the second waits and then shares.
        self._loading = threading.Lock()

    @property
    def resident_bytes(self) -> int:
        """Bytes of all resident experts."""
        with self._lock:
            return sum(resident.n_bytes for resident in self._residents.values())

    @property
    def free_bytes(self) -> int:
        """Bytes of the budget that neither experts nor batches have taken, as far as they are really there."""
        return min(self.budget_bytes - self.resident_bytes - self._reserved_bytes, self._free_now())

    def offered_bytes(self, model_digest: str, compute_dtype: str) -> int:
        """Bytes that a host with this model may fill: what is free, and what of its model is resident already."""
        with self._lock:
            shared = sum(
                resident.n_bytes
                for key, resident in self._residents.items()
                if (key.model_digest, key.compute_dtype) == (model_digest, compute_dtype)
            )
        return self.free_bytes + shared

    def acquire(self, key: LayerKey, n_bytes: int, build: Callable[[], LayerKernels]) -> LayerKernels:
        """The experts of ``key``, built by ``build`` if no other lease has them. Each call needs a `release`.
        Raises CapacityError: they do not fit into the budget."""
        with self._loading:
            with self._lock:
                resident = self._residents.get(key)
                if resident is not None:
                    resident.n_users += 1
                    return resident.module
            if n_bytes > self.free_bytes:
                raise CapacityError(
                    f"layer {key.layer}: {len(key.experts)} experts need {n_bytes / GIB:.4g} GiB, this server has "
                    f"{max(0, self.free_bytes) / GIB:.4g} of {self.budget_bytes / GIB:.4g} GiB left"
                )
            module = build()
            with self._lock:
                self._residents[key] = _Resident(module, n_bytes, 1)
            return module

    def release(self, key: LayerKey) -> None:
        """Gives back what `acquire` gave; the last user frees the memory."""
        with self._lock:
            resident = self._residents[key]
            resident.n_users -= 1
            if resident.n_users == 0:
                del self._residents[key]

    def reserve(self, n_bytes: int) -> None:
        """Takes ``n_bytes`` of the budget for batches (negative: gives them back)."""
        with self._lock:
            self._reserved_bytes += n_bytes

    @contextlib.contextmanager
    def borrow(self, n_bytes: int) -> Iterator[None]:
        """Takes ``n_bytes`` of the budget for as long as it is open."""
        self.reserve(n_bytes)
        try:
            yield
        finally:
            self.reserve(-n_bytes)
