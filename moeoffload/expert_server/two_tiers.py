"""Keeps a layer's experts in two memories: hot ones on the server's device, the others in RAM, computed by the CPU.

Each expert is in exactly one of the two, so both memories are used in full. After a small call (a decode step) experts
are exchanged as `HotExperts` decides, for at most a fraction of the time of the calls. For a long call the experts in
RAM are copied to the device, some at a time, if that takes less time than computing them on the CPU. The sums of all
parts are added in float32: the last bits of a row depend on where its experts are.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from moeoffload.control.v1 import expert_service_pb2 as pb
from moeoffload.expert_server.fair_share import SMALL_ROWS
from moeoffload.expert_server.several_devices import LayerParts, LayerSource, SeveralDevices
from moeoffload.formats import PackedWeights
from moeoffload.kernels import KernelInput, KernelWorkspace, LayerKernels
from moeoffload.kernels.packing import packed_parts
from moeoffload.placement import round_to_sum

MOVING_PART: Final = 0.1
"""No move starts once moves have taken more than this fraction of the time of calls."""
STAGE_BYTES: Final = 256 << 20
"""Largest size of a `Stage`, unless one expert is larger."""
FOR_BATCHES: Final = 0.1
"""Fraction of the free fast memory that is kept for batches when experts are loaded."""
DECAY: Final = 0.99
"""Factor by which a score falls with each step: to half after 69 steps."""
MOST_MOVES: Final = 2
"""Experts that enter the fast tier in one step, at most."""
LEAD: Final = 1.5
"""How far an expert's score must exceed that of the expert it replaces: a smaller lead may be chance, and each move
costs two copies."""
LEAST_SETS: Final = 3
"""No expert moves if the fast tier holds fewer than this many times ``top_k`` experts: they would evict each other."""
_CPU: Final = torch.device("cpu")
Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]
Weights = torch.Tensor | PackedWeights
"""Weights of several experts, or of one."""


class HotExperts:
    """Tracks the use of one layer's experts and decides which move. Pure: it moves nothing itself.

    A score is multiplied by `DECAY` at each step and rises by one with each use: a frequency over about a hundred
    steps. Unlike with LRU, experts that are used in rotation do not evict each other.
    """

    def __init__(self, n_experts: int, n_fast: int, top_k: int) -> None:
        """Places the first ``n_fast`` experts in the fast tier."""
        self.is_fast = np.arange(n_experts) < n_fast
        self._scores = np.zeros(n_experts, np.float32)
        self._moves = n_fast >= LEAST_SETS * top_k

    def step(self, used: Numbers) -> list[tuple[int, int]]:
        """Counts a step that used the experts ``used``, (n) int64 without duplicates; returns at most `MOST_MOVES`
        pairs of an expert to bring into the fast tier and the one it replaces."""
        scores = self._scores
        scores *= DECAY
        scores[used] += 1
        missing = used[~self.is_fast[used]]
        if not self._moves or not len(missing):
            return []
        held = np.flatnonzero(self.is_fast)
        coldest = held[np.argsort(scores[held], kind="stable")[:MOST_MOVES]]
        hottest = missing[np.argsort(-scores[missing], kind="stable")[:MOST_MOVES]]
        pairs = zip(hottest.tolist(), coldest.tolist(), strict=False)
        return [(come, go) for come, go in pairs if scores[come] > scores[go] + LEAD]

    def move(self, come: int, go: int) -> None:
        """Records that ``come`` has replaced ``go`` in the fast tier."""
        self.is_fast[come], self.is_fast[go] = True, False


class Tiers(SeveralDevices):
    """Places experts of all hosts on a device and in RAM, of each layer the same share, and counts their use.

    Batches and the stage are on the device.

    Attributes:
        fast_routes: pairs of a row and an expert on the device that were computed; ``slow_routes``: of one in RAM.
        moves: experts that came to the device, each in the place of another one.
    """

    def __init__(self, device: torch.device, fast_budget: int, ram_budget: int) -> None:
        super().__init__((device, _CPU), (fast_budget, ram_budget))
        self.n_for_batches = 1
        self.fast_routes = self.slow_routes = self.moves = 0
        self._stage_bytes = int(fast_budget * FOR_BATCHES / 2)
        """Most bytes of a stage, unless it is for one expert; as many are left for batches."""
        self._stages: weakref.WeakValueDictionary[object, Stage] = weakref.WeakValueDictionary()

    @property
    def offered_bytes(self) -> int:
        """See `SeveralDevices.offered_bytes`."""
        return sum(self.budgets) - self._stage_bytes

    def share(self, n_bytes: int) -> float:
        """Returns the fraction of ``n_bytes`` of experts that goes to the device: what fits there, less `FOR_BATCHES`,
        or more if RAM has no room for the others."""
        fast, ram = self.free
        return max(0.0, min(1.0, max(fast * (1 - FOR_BATCHES), n_bytes - ram) / max(1, n_bytes)))

    def stats(self) -> pb.TierStats:
        """Returns the counts that hosts are sent."""
        counts = {"fast_routes": self.fast_routes, "slow_routes": self.slow_routes, "moves": self.moves}
        return pb.TierStats(fast_bytes=self._used[0] - self.batch_bytes, **counts)

    def stage(self, source: LayerSource) -> Stage:
        """Returns a buffer on the device for some experts, shared by all layers of the same shape and format."""
        about = source.checkpoint.layers[source.layer]
        key = source.checkpoint.digest, about.n_weights, about.expert_bytes, about.intermediate, about.format
        with self._lock:
            stage = self._stages.get(key)
            if stage is None:
                room = min(STAGE_BYTES, self._stage_bytes) // about.expert_bytes
                n_experts = max(1, min(about.n_experts, room))
                stage = self._stages[key] = Stage(source, n_experts, self.devices[0])
                self._count([n_experts * about.expert_bytes])
                weakref.finalize(stage, self._count, [-n_experts * about.expert_bytes])
        return stage

    def _split(self, n_experts: int, expert_bytes: int, fast_part: float) -> list[int] | None:
        fast, ram = (each // expert_bytes for each in self.free)
        # Room for batches stays, also if another host's experts have taken more than there was when loading began.
        n_fast = max(0, min(max(1, int(n_experts * fast_part)), fast - self._stage_bytes // expert_bytes))
        return round_to_sum([n_fast, n_experts - n_fast], n_experts, [fast, ram])

    def _read(self, source: LayerSource, counts: list[int]) -> LayerKernels:
        if all(counts):
            return TwoTierLayer(source, counts[0], self)
        kernels = super()._read(source, counts)
        kernels.is_batch_invariant &= self.devices[0] == _CPU  # only buffers of a CPU take batches of several requests
        return kernels


class Stage:
    """A buffer on the device for experts of one call: they are copied from RAM, computed, then overwritten."""

    def __init__(self, source: LayerSource, n_experts: int, device: torch.device) -> None:
        self.n_experts = n_experts
        with torch.inference_mode(False), torch.no_grad():
            in_tiles = source.kernel != "grouped"
            self._module = source.checkpoint.empty_experts(source.layer, n_experts, device, in_tiles=in_tiles)
            self.kernels = LayerKernels(self._module, KernelWorkspace(), source.kernel)
        self._device = device
        self._copy_s = 0.0

    def copy_s(self, module: nn.Module) -> float:
        """Returns the seconds to copy one expert, measured once with an expert of ``module``."""
        for _ in range(0 if self._copy_s else 2):  # the first one warms up
            started = perf_counter()
            self.fill(module, [0])
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
            self._copy_s = perf_counter() - started
        return self._copy_s

    def fill(self, module: nn.Module, slots: Sequence[int]) -> None:
        """Copies the experts at ``slots`` of ``module``, at most `n_experts`, to slots 0, 1, ... of this stage."""
        for room, values in zip(_contents(self._module), _contents(module), strict=True):
            for at, slot in enumerate(slots):
                _put(room, at, _take(values, slot))
        # Other layers use this stage, too.
        for own, of_layer in zip(_shared(self._module), _shared(module), strict=True):
            own.copy_(of_layer)


class TwoTierLayer(LayerParts):
    """A layer in two parts, on the device and in RAM, between which experts are exchanged."""

    def __init__(self, source: LayerSource, n_fast: int, tiers: Tiers) -> None:
        """Reads the first ``n_fast`` experts (at least one, not all) to the device of ``tiers``, the others to RAM.
        Raises ModelError: see `Checkpoint.build_experts`."""
        device, n_experts = tiers.devices[0], len(source.experts)
        super().__init__(source, ((device, n_fast), (_CPU, n_experts - n_fast)))
        self._fast, self._slow = self._parts
        self._device = device
        self._tiers = tiers
        self._hot = HotExperts(n_experts, n_fast, source.checkpoint.top_k)
        self._places = self._places.to(_CPU)  # the CPU decides which experts move
        self._stage = tiers.stage(source)
        self._slow_s = 0.0
        """Seconds per route (a row's use of an expert) on the CPU, in the last long call."""
        self._open_calls = 0
        self._called_s = self._moved_s = 0.0

    def kernel_for(self, n_rows: int) -> str:
        """Returns the names of the kernels that serve a call of ``n_rows`` rows."""
        return f"two tiers of {self._kernels_for(n_rows)}"

    def in_slices(self, call: KernelInput, workspace: KernelWorkspace | None = None) -> Iterator[None]:
        """See `LayerKernels.in_slices`."""
        experts = call.slots.to(_CPU)
        self._check_slots(experts)
        places, took = self._places[:, experts], [0.0]
        self._open_calls += 1
        try:
            yield from _timed(self._slices(call, places, workspace), took)
        finally:
            self._open_calls -= 1
        self._called_s += took[0]
        # Not while another call of this layer is between two slices: it has looked up its experts' places already.
        if len(call.rows) <= SMALL_ROWS and not self._open_calls:
            self._follow(experts)

    def _slices(self, call: KernelInput, places: torch.Tensor, workspace: KernelWorkspace | None) -> Iterator[None]:
        """Computes a call in slices; ``places`` (2, n, top_k) int64 on the CPU: slots in either part, or -1."""
        rows, _, weights, out = call
        in_ram, took = places[1], [0.0]
        needed = in_ram[in_ram >= 0].unique().tolist()
        n_fast, n_slow = (places >= 0).sum(dim=(1, 2)).tolist()
        self._tiers.fast_routes += n_fast
        self._tiers.slow_routes += n_slow
        is_staged = len(rows) > SMALL_ROWS and (
            self._stage.copy_s(self._modules[1]) * len(needed) < self._slow_s * n_slow
        )
        # Copied before the device's part is queued: later copies, and with them the CPU, would wait for that part.
        copies = (rows.to(_CPU), weights.to(_CPU)) if needed and not is_staged else (rows, weights)
        yield from self._fast.in_slices(call._replace(slots=places[0].to(self._device)), workspace)
        if is_staged:
            yield from self._staged(needed, call, in_ram)
        elif needed:
            sums = torch.empty(out.shape, dtype=out.dtype)
            in_slices = self._slow.in_slices(KernelInput(copies[0], in_ram, copies[1], sums), workspace)
            yield from _timed(in_slices, took)
            out += sums.to(self._device)
            if len(rows) > SMALL_ROWS:
                self._slow_s = took[0] / n_slow

    def _staged(self, needed: list[int], call: KernelInput, in_ram: torch.Tensor) -> Iterator[None]:
        """Copies experts in RAM to the stage, computes them on the device and adds their sums to ``call.out``."""
        part = torch.empty_like(call.out)
        for first in range(0, len(needed), self._stage.n_experts):
            some = needed[first : first + self._stage.n_experts]
            self._stage.fill(self._modules[1], some)
            places = torch.full((self._slow.n_experts + 1,), -1, dtype=torch.int64)
            places[some] = torch.arange(len(some))
            self._stage.kernels(call._replace(slots=places[in_ram].to(self._device), out=part))
            call.out.add_(part)
            if first + len(some) < len(needed):
                yield

    def _follow(self, experts: torch.Tensor) -> None:
        """Moves experts within the time limit for moves; ``experts`` (n, top_k) int64: those that a call has used."""
        used = experts.unique().numpy()
        for come, go in self._hot.step(used[used >= 0]):
            if self._moved_s > MOVING_PART * self._called_s:
                return
            started = perf_counter()
            fast, slow = int(self._places[0, go]), int(self._places[1, come])
            for one, other in zip(_contents(self._modules[0]), _contents(self._modules[1]), strict=True):
                kept = _take(one, fast, copy=True)
                _put(one, fast, _take(other, slow))
                _put(other, slow, kept)
            self._places[:, come] = torch.tensor([fast, -1])
            self._places[:, go] = torch.tensor([-1, slow])
            self._hot.move(come, go)
            self._tiers.moves += 1
            self._moved_s += perf_counter() - started


def _timed(slices: Iterator[None], took: list[float]) -> Iterator[None]:
    """Yields for each slice; adds the seconds of the slices, without the time between them, to ``took[0]``."""
    started = perf_counter()
    for _ in slices:
        took[0] += perf_counter() - started
        yield
        started = perf_counter()
    took[0] += perf_counter() - started


def _contents(module: nn.Module) -> list[Weights]:
    """Returns what a module holds per expert: parameters and packed matrices, always in the same order."""
    plain = (each.data for each in module.parameters() if _is_per_expert(module, each))
    return [*plain, *packed_parts(module)]


def _shared(module: nn.Module) -> list[torch.Tensor]:
    """Returns the parameters that all experts of a module share: a norm after them."""
    return [each.data for each in module.parameters() if not _is_per_expert(module, each)]


def _is_per_expert(module: Any, parameter: torch.Tensor) -> bool:
    # A norm may have as many elements as there are experts.
    return parameter.ndim > 1 and parameter.shape[0] == module.num_experts


def _take(values: Weights, slot: int, *, copy: bool = False) -> Weights:
    """Returns the weights of one expert; with ``copy`` in new CPU memory."""
    if isinstance(values, PackedWeights):
        return values.take(slot) if copy else values.one(slot)
    return values[slot].to(_CPU, copy=True) if copy else values[slot]


def _put(room: Weights, slot: int, one: Weights) -> None:
    """Writes the weights of one expert to ``room`` at ``slot``."""
    if isinstance(room, PackedWeights) and isinstance(one, PackedWeights):
        room.put(slot, one)
    elif isinstance(room, torch.Tensor) and isinstance(one, torch.Tensor):
        room[slot].copy_(one)
