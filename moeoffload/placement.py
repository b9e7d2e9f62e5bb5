"""Assigns routed experts to servers: one owner for each (layer, expert), within every server's memory."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch

from moeoffload.errors import PlacementError

GIB: Final = 1 << 30


@dataclass(frozen=True)
class ExpertTable:
    """The experts of one server: for each MoE layer, the expert numbers in slot order (slot = position)."""

    layers: tuple[tuple[int, ...], ...]

    @property
    def n_experts(self) -> int:
        """Experts over all layers."""
        return sum(len(experts) for experts in self.layers)

    def n_bytes(self, expert_bytes: Sequence[int]) -> int:
        """Returns the bytes of all experts; ``expert_bytes`` are those of one expert of each layer."""
        return sum(len(held) * size for held, size in zip(self.layers, expert_bytes, strict=True))

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 of the table: equal digests mean that both sides use the same slot numbers."""
        text = ";".join(",".join(map(str, experts)) for experts in self.layers)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class MemoryOffer:
    """The memory that one server offers: ``n_bytes`` for experts, after room for its batches was subtracted."""

    name: str
    n_bytes: int


def slot_table(held: Sequence[int], n_experts: int) -> torch.Tensor:
    """Returns (n_experts,) int16: the slot of each expert on a server that holds ``held``, -1 for the others."""
    table = torch.full((n_experts,), -1, dtype=torch.int16)
    table[list(held)] = torch.arange(len(held), dtype=torch.int16)
    return table


def batch_row_bytes(hidden: int, top_k: int, intermediate: int, itemsize: int, n_slots: int) -> int:
    """Returns the bytes that a server needs for each row of its batch capacity.

    Counts the request and reply areas of ``n_slots`` slots and one workspace: gathered rows, gate/up and activation
    values of ``intermediate`` elements and expert outputs for ``top_k`` experts, with elements of ``itemsize`` bytes.
    """
    workspace = top_k * (2 * hidden + 3 * intermediate) * itemsize + 2 * hidden * 4 + top_k * 12
    return frames_row_bytes(hidden, top_k, n_slots) + workspace


def frames_row_bytes(hidden: int, top_k: int, n_slots: int) -> int:
    """Returns the part of `batch_row_bytes` for request and reply areas, enough for any payload dtypes."""
    return n_slots * (2 * hidden * 4 + top_k * 6)


def fair_shares(need: float, limits: Sequence[float], speeds: Sequence[float]) -> list[float]:
    """Splits ``need`` in proportion to ``speeds``, except that no share exceeds its limit (water-filling).

    If the limits add up to less than ``need``, the shares equal the limits.
    """
    shares = [0.0] * len(limits)
    rest, open_ones = need, list(range(len(limits)))
    while open_ones and rest > 0:
        unit = rest / sum(speeds[i] for i in open_ones)
        full = [i for i in open_ones if limits[i] <= unit * speeds[i]]
        if not full:
            for i in open_ones:
                shares[i] = unit * speeds[i]
            return shares
        for i in full:
            rest -= limits[i]
            shares[i] = limits[i]
            open_ones.remove(i)
    return shares


def place_experts(
    experts: Sequence[Sequence[int]],
    expert_bytes: Sequence[int],
    offers: Sequence[MemoryOffer],
    speeds: Sequence[float] | None = None,
    usage: Sequence[Sequence[int]] | None = None,
) -> list[ExpertTable]:
    """Gives every expert of every layer to exactly one server.

    Each layer is split the same way, so that the rows of every layer spread evenly: in proportion to the speeds of the
    servers (equal parts if they are not known), less where memory does not allow it. Without ``usage`` a server holds a
    contiguous range of a layer's experts; with it, experts are assigned so that all servers are expected to finish
    their rows at the same time.

    ``experts`` lists the experts of each MoE layer to place, ``expert_bytes`` the bytes of one expert of each layer;
    ``offers`` and ``speeds`` (in any unit) are by server; ``usage`` is how often each expert of each layer was chosen.
    Raises PlacementError: the experts do not fit; the message holds a table of needed, offered and missing memory.
    """
    need = sum(len(each) * size for each, size in zip(experts, expert_bytes, strict=True))
    limits = [max(0, offer.n_bytes) for offer in offers]
    if need > sum(limits):
        raise PlacementError(_does_not_fit(need, offers))
    shares = fair_shares(need, limits, speeds or [1.0] * len(offers))
    free = list(limits)
    assigned = [0.0] * len(offers)
    tables: list[list[tuple[int, ...]]] = [[] for _ in offers]
    done = 0
    for layer, (held, size) in enumerate(zip(experts, expert_bytes, strict=True)):
        done += len(held) * size
        # Error feedback: what rounding took from a server in one layer is given back in the next.
        wanted = [share * done / need - got if need else 0.0 for share, got in zip(shares, assigned, strict=True)]
        counts = round_to_sum([w / size for w in wanted], len(held), [room // size for room in free])
        if counts is None:
            raise PlacementError(_does_not_fit(need, offers))
        if usage is None or not held:
            ends = itertools.accumulate(counts)
            parts = [tuple(held[end - count : end]) for end, count in zip(ends, counts, strict=True)]
        else:
            # A server of rarely used experts may hold more of them, up to its memory divided evenly over the layers.
            room = [
                max(count, min(each // size, int(limit * len(held) * size / need / size)))
                for count, each, limit in zip(counts, free, limits, strict=True)
            ]
            parts = _by_usage(held, usage[layer], speeds or [1.0] * len(offers), room)
            counts = [len(part) for part in parts]
        for i, count in enumerate(counts):
            tables[i].append(parts[i])
            assigned[i] += count * size
            free[i] -= count * size
    return [ExpertTable(tuple(layers)) for layers in tables]


def place_replicas(
    tables: Sequence[ExpertTable], expert_bytes: Sequence[int], offers: Sequence[MemoryOffer], n_copies: int
) -> list[list[int]]:
    """Returns for each table the servers that hold it: its own first, then those of its replicas, ``n_copies`` in all.

    ``tables`` and ``offers`` are by server. A table's replicas go to the servers that follow its own, as far as they
    have room, so that servers back up different tables.
    Raises PlacementError: there are too few servers, or they have too little memory.
    """
    n = len(offers)
    if n_copies > max(1, n):
        raise PlacementError(f"replicas is {n_copies}, but there are {n} expert servers (a server holds one copy)")
    sizes = [table.n_bytes(expert_bytes) for table in tables]
    free = [offer.n_bytes - size for offer, size in zip(offers, sizes, strict=True)]
    holders = [[server] for server in range(n)]
    for server in sorted(range(n), key=lambda server: -sizes[server]):
        for k in range(1, n):
            other = (server + k) % n
            if len(holders[server]) < n_copies and sizes[server] <= free[other]:
                holders[server].append(other)
                free[other] -= sizes[server]
        if sizes[server] and len(holders[server]) < n_copies:
            raise PlacementError(_does_not_fit(n_copies * sum(sizes), offers, f"{n_copies} copies of "))
    return holders


def _by_usage(
    held: Sequence[int], usage: Sequence[int], speeds: Sequence[float], room: Sequence[int]
) -> list[tuple[int, ...]]:
    """Assigns each expert, the most used first, to the server that would finish it soonest (the LPT rule).

    ``room`` is how many experts each server has memory for, in total at least as many as there are.
    """
    loads = [0.0] * len(room)
    parts: list[list[int]] = [[] for _ in room]
    for expert in sorted(held, key=lambda expert: (-usage[expert], expert)):
        load = usage[expert] + 1  # experts that were never chosen count, too
        open_ones = [i for i in range(len(room)) if len(parts[i]) < room[i]]
        best = min(open_ones, key=lambda i: ((loads[i] + load) / speeds[i], i))
        loads[best] += load
        parts[best].append(expert)
    return [tuple(sorted(part)) for part in parts]


def choose_local(
    n_experts: Sequence[int], expert_bytes: Sequence[int], n_bytes: int, usage: Sequence[Sequence[int]] | None = None
) -> ExpertTable:
    """Returns the experts that stay on the host: as many as fit in ``n_bytes``.

    With ``usage`` (how often each expert of each layer was chosen) these are the most used ones of all layers; else
    about the same number of every layer.
    """
    ranked = (
        (-usage[layer][expert] if usage is not None else expert, layer, expert)
        for layer, n in enumerate(n_experts)
        for expert in range(n)
    )
    chosen: list[list[int]] = [[] for _ in n_experts]
    for _, layer, expert in sorted(ranked):
        if expert_bytes[layer] <= n_bytes:
            n_bytes -= expert_bytes[layer]
            chosen[layer].append(expert)
    return ExpertTable(tuple(tuple(sorted(experts)) for experts in chosen))


def round_to_sum(wanted: Sequence[float], total: int, limits: Sequence[int]) -> list[int] | None:
    """Returns whole numbers near ``wanted`` that add up to ``total`` and respect ``limits``; None if impossible."""
    counts = [max(0, min(int(w), limit)) for w, limit in zip(wanted, limits, strict=True)]
    while sum(counts) > total:
        counts[counts.index(max(counts))] -= 1
    while sum(counts) < total:
        open_ones = [i for i, count in enumerate(counts) if count < limits[i]]
        if not open_ones:
            return None
        counts[max(open_ones, key=lambda i: (wanted[i] - counts[i], -i))] += 1
    return counts


def _does_not_fit(need: int, offers: Sequence[MemoryOffer], what: str = "") -> str:
    offered = sum(max(0, offer.n_bytes) for offer in offers)
    width = max([len("missing"), *(len(offer.name) for offer in offers)])
    rows = [("needed", need), *((offer.name, offer.n_bytes) for offer in offers)]
    rows += [("offered", offered), ("missing", max(need - offered, 1))]
    table = "\n".join(f"  {name:<{width}}  {size / GIB:12.6f} GiB" for name, size in rows)
    return f"{what}the routed experts do not fit on the expert servers\n{table}"
