"""Resident expert weights: shared by hosts that use the same model, counted against one memory budget.

Experts whose last host has left are **warm**: they stay until their memory is needed, and count as free until then.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moeoffload.errors import CapacityError
from moeoffload.kernels import LayerKernels
from moeoffload.placement import GIB

if TYPE_CHECKING:
    from moeoffload.checkpoint import Checkpoint


@dataclass(frozen=True)
class LayerKey:
    """Identifies experts that hosts can share: model digest, compute dtype, MoE layer and experts in slot order; and
    the state of the files they were read from (`Checkpoint.stamp`), since the digest only samples these."""

    model_digest: str
    compute_dtype: str
    layer: int
    experts: tuple[int, ...]
    stamp: str = ""

    @classmethod
    def of(cls, checkpoint: Checkpoint, layer: int, experts: tuple[int, ...]) -> LayerKey:
        """Returns the key of experts that are read from a checkpoint."""
        return cls(checkpoint.digest, checkpoint.dtype_label, layer, experts, checkpoint.stamp)


@dataclass(slots=True)
class _Resident:
    module: LayerKernels
    n_bytes: int
    n_users: int = 1


class ExpertStore:
    """Keeps experts while leases use them, and warm after that. Thread-safe; ``budget_bytes`` is never exceeded."""

    def __init__(
        self, budget_bytes: int, free_now: Callable[[], int] = lambda: 1 << 62, *, keep_warm: bool = True
    ) -> None:
        """``free_now`` returns how many bytes the device really has left, whatever the budget."""
        self.budget_bytes = budget_bytes
        self.shortest_s: dict[tuple[str, torch.dtype], dict[int, float]] = {}
        """Shortest seconds that `Calibrate` has measured so far, by model digest and compute dtype, then by rows."""
        self.read_bytes = 0
        """Bytes of all experts read from files so far."""
        self.timings: weakref.WeakKeyDictionary[LayerKernels, dict[int, list[tuple[int, float]]]] = (
            weakref.WeakKeyDictionary()
        )
        """Measured (rows, seconds) of a layer, by batch capacity: warm experts are not timed again."""
        self.best_rows: weakref.WeakKeyDictionary[LayerKernels, dict[int, int]] = weakref.WeakKeyDictionary()
        """Best batch capacity of a layer, by the largest that was possible; see `calibrate.best_rows`."""
        self._free_now = free_now
        self._keep_warm = keep_warm
        self._residents: dict[LayerKey, _Resident] = {}
        """Warm experts are in the order in which their last host left."""
        self._reserved_bytes = 0
        self._lock = threading.RLock()
        # Held while experts are built: if two hosts load the same model, the second waits and then shares.
        self._loading = threading.Lock()

    @property
    def resident_bytes(self) -> int:
        """Bytes of all experts that leases use."""
        with self._lock:
            return sum(each.n_bytes for each in self._residents.values() if each.n_users)

    @property
    def warm_bytes(self) -> int:
        """Bytes of all experts that no lease uses."""
        with self._lock:
            return sum(each.n_bytes for each in self._residents.values() if not each.n_users)

    @property
    def free_bytes(self) -> int:
        """Bytes of the budget taken neither by leases' experts nor by batches, at most what the device really has."""
        with self._lock:  # all at once: bytes of experts that are being built are first reserved, then resident
            left = self.budget_bytes - self.resident_bytes - self._reserved_bytes
            return min(left, self._free_now() + self.warm_bytes)

    def offered_bytes(self, model_digest: str, compute_dtype: str) -> int:
        """Returns the bytes that a host with this model may fill: the free ones, and those of its model in use."""
        mine = (model_digest, compute_dtype)
        with self._lock:  # all at once, as in `free_bytes`
            users = ((key, each.n_bytes) for key, each in self._residents.items() if each.n_users)
            return self.free_bytes + sum(n for key, n in users if (key.model_digest, key.compute_dtype) == mine)

    def __contains__(self, key: LayerKey) -> bool:
        return key in self._residents

    def acquire(self, key: LayerKey, n_bytes: int, build: Callable[[], LayerKernels]) -> LayerKernels:
        """Returns the experts of ``key``, built by ``build`` unless they are resident. Each call needs a `release`.
        Raises CapacityError: they do not fit into the budget."""
        # First without waiting: a host with resident experts need not wait while another one's are built.
        if (found := self._use(key)) is not None:
            return found
        with self._loading:
            if (found := self._use(key)) is not None:
                return found
            if not self.reserve(n_bytes):
                raise CapacityError(
                    f"layer {key.layer}: {len(key.experts)} experts need {n_bytes / GIB:.4g} GiB, this server has "
                    f"{max(0, self.free_bytes) / GIB:.4g} of {self.budget_bytes / GIB:.4g} GiB left"
                )
            module = None
            try:
                module = build()
            finally:
                with self._lock:
                    self._reserved_bytes -= n_bytes
                    if module is not None:
                        self._residents[key] = _Resident(module, n_bytes)
                        self.read_bytes += n_bytes
            return module

    def _use(self, key: LayerKey) -> LayerKernels | None:
        with self._lock:
            resident = self._residents.get(key)
            if resident is None:
                return None
            resident.n_users += 1
            return resident.module

    def release(self, key: LayerKey) -> None:
        """Ends one use of experts from `acquire`; after the last use they are warm, or freed if none are kept."""
        with self._lock:
            resident = self._residents[key]
            resident.n_users -= 1
            if resident.n_users == 0:
                del self._residents[key]
                if self._keep_warm:
                    self._residents[key] = resident

    def reserve(self, n_bytes: int) -> bool:
        """Takes ``n_bytes`` of the budget (negative: gives them back); returns False, and takes none, if not so many
        are free.

        Warm experts are evicted to make room, those left first go first.
        """
        with self._lock:
            if 0 < n_bytes > self.free_bytes:
                return False
            self._reserved_bytes += n_bytes
            if n_bytes > 0:
                for key in self._warm():
                    held = self.resident_bytes + self.warm_bytes
                    if held + self._reserved_bytes <= self.budget_bytes and self._free_now() >= n_bytes:
                        break
                    del self._residents[key]
            return True

    def _warm(self) -> list[LayerKey]:
        return [key for key, resident in self._residents.items() if not resident.n_users]

    def forget_warm(self, kept: Collection[LayerKey] = ()) -> None:
        """Evicts all warm experts except ``kept``."""
        with self._lock:
            for key in self._warm():
                if key not in kept:
                    del self._residents[key]

    def close(self) -> None:
        """Evicts all warm experts, and keeps none from now on."""
        with self._lock:
            self._keep_warm = False
            self.forget_warm()
