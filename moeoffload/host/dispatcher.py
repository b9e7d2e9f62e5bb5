"""Sends the rows of one layer to the servers that hold their experts, and adds up what comes back."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Final

import torch

from moeoffload.config import Mode
from moeoffload.errors import ModelError, ServerError
from moeoffload.host.counters import CallCounters
from moeoffload.host.flight import Flight, ShardLink
from moeoffload.host.granularity import Granularity
from moeoffload.host.local_experts import LocalExperts
from moeoffload.host.recorder import Recorder
from moeoffload.host.remote_experts import ExpertsCall
from moeoffload.host.second_opinion import SecondOpinion
from moeoffload.host.shard import Shard
from moeoffload.host.turns import Turns

DECODE_ROWS: Final = 8


@dataclass(slots=True, eq=False)
class _Progress:
    """How far the rows of the running call are with one shard."""

    shard: Shard
    flights: deque[Flight]
    next_row: int = 0
    link: ShardLink = field(init=False)
    """Only while a call runs: a thread that rests would keep the memory of a link that is closed meanwhile."""

    def give_back(self) -> None:
        """Releases what is in flight."""
        while self.flights:
            flight = self.flights.popleft()
            flight.link.release(flight)

    def move_on(self, error: ServerError) -> None:
        """Leaves the link that failed; what it owes is to be sent again, to the next who can compute it.

        Raises:
            ServerError: there is nobody.
        """
        if self.flights:
            self.next_row = self.flights[0].start
        self.give_back()
        self.link = self.shard.replace(self.link, error)


class _CallState(threading.local):
    """What one thread needs for its calls; made once per thread."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.progress = [_Progress(shard, deque()) for shard in shards]
        self.sums: dict[int, torch.Tensor] = {}


class Dispatcher:
    """Computes the routed experts of every layer by whoever has them: servers of ``shards``, the host itself.

    Several threads may call it at the same time (a pipelined prefill does).
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        granularity: Granularity,
        recorder: Recorder,
        n_experts: Sequence[int],
        top_k: int,
        local: LocalExperts | None = None,
        second: SecondOpinion | None = None,
    ) -> None:
        """``n_experts`` counts the routed experts of each MoE layer; frames have room for ``top_k`` of them per row."""
        self._n_experts = n_experts
        self._top_k = top_k
        self._granularity = granularity
        self._recorder = recorder
        self._local = local
        self._second = second
        self._state = _CallState(shards)
        self._holds_all = shards[0].current.holds_all if len(shards) == 1 and local is None else None
        self.on_layer: Callable[[int], None] | None = None
        """Called with the layer when its experts are asked for, that is, when its attention is done."""
        self.turns: Turns | None = None
        """Given up while servers are waited for, if two groups of requests share the host."""
        self.on_routes: Callable[[int, torch.Tensor], None] | None = None
        """Called with the layer and its ids (n, top_k) int64; for routing statistics."""
        self.n_created = 0
        """Accumulators made so far that are kept for later calls."""

    def for_layer(self, layer: int) -> ExpertsCall:
        """The experts call of one MoE layer, to be tied to its module."""
        return functools.partial(self, layer)

    def __call__(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Weighted sum of the routed experts of one layer.

        Requests to all servers leave before the first wait, as many as there are slots; experts on the host are
        computed meanwhile. Sums are added in a fixed order (host, then chunk by chunk, server by server), so that
        results do not depend on who answers first.

        Args:
            layer: running number of the MoE layer.
            hidden: (n, hidden).
            ids: (n, top_k) int64 expert numbers.
            weights: (n, top_k).

        Returns:
            (n, hidden) in the dtype and on the device of ``hidden``.

        Raises:
            ServerError: a server refused, failed, or did not answer in time.
            PayloadError: a value does not fit the payload dtype.
        """
        if torch.is_grad_enabled():
            # Experts elsewhere have no gradient; a graph over kept buffers would never be freed.
            with torch.no_grad():
                return self(layer, hidden, ids, weights)
        if ids.shape[1] != self._top_k:
            ids, weights = pad_choices(ids, weights, self._top_k, self._n_experts[layer])
        if self.on_layer is not None:
            self.on_layer(layer)
        if self.on_routes is not None:
            self.on_routes(layer, ids)
        clock = perf_counter
        started = clock()
        record = self._recorder.counters
        dense_s = started - record.mark
        record.dense_s += dense_s
        record.mark = started
        state = self._state
        n_rows = hidden.shape[0]
        # One server with every expert: its sums are the result, no accumulator is needed.
        alone = self._holds_all is not None and self._holds_all[layer]
        result: torch.Tensor | None = None
        total = None if alone else self._accumulator(state, hidden)
        for progress in state.progress:
            progress.link = progress.shard.current
            progress.next_row = n_rows if progress.link.holds_none[layer] else 0
        pack_s = local_s = wait_s = wait_queue_s = wait_compute_s = combine_s = 0.0
        turns, away = self.turns, False
        try:
            self._send(state, layer, hidden, ids, weights, record.servers)
            sent = clock()
            pack_s += sent - started
            if self._local is not None and total is not None:
                record.local_rows += self._local.compute(layer, hidden, ids, weights, total)
                local_s = clock() - sent
            if turns is not None:
                turns.give()
                away = True
            busy = True
            while busy:
                busy = False
                for number, progress in enumerate(state.progress):
                    if not progress.flights:
                        continue
                    busy = True
                    started = clock()
                    part = self._receive(state, number, layer, hidden, ids, weights, record.servers)
                    received = clock()
                    if part is None:  # recovering showed that no row of the rest needs this shard
                        continue
                    flight = progress.flights[0]
                    waited = received - started
                    wait_s += waited
                    record.servers[number].wait_s += waited
                    # Of a wait, the end is the server's compute, before it its queue; the way back is in the rest.
                    compute_s = min(waited, flight.compute_s)
                    wait_compute_s += compute_s
                    queue_s = min(waited - compute_s, flight.queue_s)
                    wait_queue_s += queue_s
                    flight.link.learner.observe(flight.chunk_rows, flight.compute_s, waited - compute_s - queue_s)
                    if total is not None:
                        _add(total, part, flight)
                    elif flight.n_rows == n_rows:
                        result = part.to(hidden.device, hidden.dtype, copy=True)
                    else:
                        result = torch.empty_like(hidden) if result is None else result
                        result[flight.start : flight.start + flight.n_rows].copy_(part)
                    progress.flights.popleft()
                    flight.link.release(flight)
                    combine_s += clock() - received
                for progress in state.progress:
                    if progress.next_row < n_rows:
                        started = clock()
                        self._send(state, layer, hidden, ids, weights, record.servers)
                        pack_s += clock() - started
                        break
        finally:
            # Before anything that can raise: flights that stay would add their sums to the next call of this thread.
            for progress in state.progress:
                if progress.flights:
                    progress.give_back()
                del progress.link
            if away and turns is not None:
                record.turn_s += turns.take()
        started = clock()
        if total is not None:
            result = total.to(hidden.dtype, copy=True)
        elif result is None:
            result = torch.empty_like(hidden)  # a call without rows
        record.mark = clock()
        combine_s += record.mark - started
        record.pack_s += pack_s
        record.local_s += local_s
        record.wait_s += wait_s
        record.wait_queue_s += wait_queue_s
        record.wait_compute_s += wait_compute_s
        record.combine_s += combine_s
        if self._recorder.times_layers:
            times = record.layers[layer]
            times.add(dense_s, pack_s, local_s, wait_s, wait_queue_s, wait_compute_s, combine_s)
        return result

    def _send(
        self,
        state: _CallState,
        layer: int,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        to: list[CallCounters],
    ) -> None:
        """Sends chunks of every shard until its slots are taken or no rows are left."""
        n_rows = hidden.shape[0]
        # Another thread may hold slots: a call that has replies to take must not wait for them, or both would wait.
        in_flight = False
        for progress in state.progress:
            if progress.flights:
                in_flight = True
        for number, progress in enumerate(state.progress):
            while progress.next_row < n_rows:
                try:
                    in_flight = self._send_shard(progress, layer, hidden, ids, weights, to[number], in_flight)
                    break
                except ServerError as error:
                    progress.move_on(error)

    def _send_shard(
        self,
        progress: _Progress,
        layer: int,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        to: CallCounters,
        in_flight: bool,
    ) -> bool:
        """Sends chunks of one shard; whether anything is in flight then, of this shard or as ``in_flight`` says."""
        n_rows, link = hidden.shape[0], progress.link
        looks = self._granularity.mode is Mode.AUTO and n_rows > DECODE_ROWS
        step = self._granularity.slice_rows(n_rows, link.layout.capacity, link.learner)
        while progress.next_row < n_rows and len(progress.flights) < link.n_slots:
            flight = link.take(wait=not in_flight)
            if flight is None:
                break
            start = progress.next_row
            end = min(start + (link.learner.look(step) if looks else step), n_rows)
            if end - start == n_rows:
                sent = link.send(flight, layer, start, hidden, ids, weights, to)
            else:
                sent = link.send(flight, layer, start, hidden[start:end], ids[start:end], weights[start:end], to)
            progress.next_row = end
            if sent:
                progress.flights.append(flight)
                in_flight = True
        return in_flight

    def _receive(
        self,
        state: _CallState,
        number: int,
        layer: int,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        to: list[CallCounters],
    ) -> torch.Tensor | None:
        """The sums of the first flight of one shard; its rows are sent again as often as somebody fails with them.

        What was lost is had here and now, before other shards' sums are taken, so that the order of sums stays.
        """
        progress, second = state.progress[number], self._second
        while progress.flights:
            flight = progress.flights[0]
            try:
                if second is None:
                    return flight.link.receive(flight, to[number])
                flight, part = second.receive(progress.shard, flight, hidden, ids, weights, to[number])
                progress.flights[0] = flight
                return part
            except ServerError as error:
                progress.move_on(error)
                self._send(state, layer, hidden, ids, weights, to)
        return None

    def _accumulator(self, state: _CallState, hidden: torch.Tensor) -> torch.Tensor:
        """A zeroed float32 tensor shaped like ``hidden``; kept for decode-shaped calls."""
        n_rows = hidden.shape[0]
        if n_rows > DECODE_ROWS:
            return torch.zeros_like(hidden, dtype=torch.float32)
        kept = state.sums.get(n_rows)
        if kept is None:
            # A tensor of inference mode could not be changed by later calls outside of it.
            with torch.inference_mode(False):
                kept = state.sums[n_rows] = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
            self.n_created += 1
            return kept
        return kept.zero_()


def _add(total: torch.Tensor, part: torch.Tensor, flight: Flight) -> None:
    """Adds one server's sums for one chunk in float32."""
    part = part.to(total.device)
    if flight.index is None:
        total[flight.start : flight.start + flight.n_rows] += part
    else:
        total.index_add_(0, flight.index + flight.start, part.float())


def pad_choices(
    ids: torch.Tensor, weights: torch.Tensor, top_k: int, n_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Widens a router's choices to ``top_k`` columns: phimoe's router always chooses two, whatever its config says.

    Args:
        ids: (n, k) int64 expert numbers.
        weights: (n, k).
        top_k: columns of a frame.
        n_experts: experts of the layer; the first number that no expert has fills the new columns, with weight 0.

    Raises:
        ModelError: k is greater than ``top_k``.
    """
    missing = top_k - ids.shape[1]
    if missing < 0:
        raise ModelError(f"the router chose {ids.shape[1]} experts for each row, the config says {top_k}")
    pad = torch.nn.functional.pad
    return pad(ids, (0, missing), value=n_experts), pad(weights, (0, missing))
