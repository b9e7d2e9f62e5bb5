"""Sends the rows of one layer to the servers that hold their experts, and adds up what comes back."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Final

import torch

from moeoffload.errors import ModelError, PayloadError, ServerError
from moeoffload.host.flight import Chunk, Flight, ShardLink
from moeoffload.host.local_experts import LocalExperts
from moeoffload.host.recorder import CallCounters, LayerTimes, PhaseCounters, Recorder
from moeoffload.host.second_opinion import Verification
from moeoffload.host.shard import Shard
from moeoffload.host.shared_experts import Meanwhile

DECODE_ROWS: Final = 8
"""Accumulators of calls of up to so many rows are kept."""


@dataclass(slots=True, eq=False)
class _Progress:
    """How far the rows of the running call are with one shard."""

    shard: Shard
    flights: deque[Flight] = field(default_factory=deque)
    next_row: int = 0
    link: ShardLink = field(init=False)
    """Only while a call runs: an idle thread would keep the memory of a link that is closed meanwhile."""

    def begin(self, layer: int, n_rows: int) -> None:
        self.release_flights()  # there are some if Ctrl-C interrupted the `end` of the call before
        self.link = self.shard.current
        self.next_row = n_rows if self.link.holds_none[layer] else 0

    @property
    def due(self) -> int:
        """The first row whose sum is not taken."""
        return self.flights[0].start if self.flights else self.next_row

    def end(self) -> None:
        self.release_flights()
        del self.link

    def release_flights(self) -> None:
        while self.flights:
            flight = self.flights.popleft()
            flight.link.release(flight)

    def rewind(self) -> None:
        """Frees all slots; the rows of outstanding replies are to be sent again."""
        self.next_row = self.due
        self.release_flights()

    def move_on(self, error: ServerError) -> None:
        """Leaves the link that failed; its outstanding rows are to be sent again, to the next holder.
        Raises ServerError: there is none."""
        self.rewind()
        self.link = self.shard.replace(self.link, error)


class _CallState(threading.local):
    """What one thread needs for its calls; made once per thread."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.progress = [_Progress(shard) for shard in shards]
        self.sums: dict[int, torch.Tensor] = {}


class Dispatcher:
    """Computes the routed experts of every layer, on the servers of ``shards`` and on the host itself.

    Several threads may call it at the same time (a pipelined prefill does).

    Attributes:
        on_routes: called with the layer and its ids (n, top_k) int64 when its experts are asked for.
        away: entered where a call waits for servers, left when the host is free for it again; see `Turns`.
        meanwhile: by layer, what else the host does with the rows while servers compute; for shared experts.
        n_created: accumulators made so far that are kept for later calls.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        most_rows: int,
        recorder: Recorder,
        n_experts: Sequence[int],
        top_k: int,
        local: LocalExperts | None = None,
        verification: Verification | None = None,
    ) -> None:
        """A dispatch has at most ``most_rows`` rows, even to a server whose batch capacity is larger. ``n_experts``
        counts the routed experts of each MoE layer; frames have room for ``top_k`` of them per row."""
        self._most_rows = most_rows
        self._recorder = recorder
        self._n_experts = n_experts
        self._top_k = top_k
        self._local = local
        self._verification = verification
        self._state = _CallState(shards)
        self._alone = len(shards) == 1 and local is None
        """One server has every expert: its sums are the result, no accumulator is needed."""
        self.on_routes: Callable[[int, torch.Tensor], None] | None = None
        self.away: AbstractContextManager[None] = nullcontext()
        self.meanwhile: Sequence[Meanwhile | None] = (None,) * len(n_experts)
        self.n_created = 0

    def __call__(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Weighted sum of the routed experts of one layer.

        Requests to all servers leave before the first wait, as many as there are slots; experts on the host are
        computed meanwhile. Sums are added in a fixed order (host, then chunk by chunk, server by server), so that
        results do not depend on who answers first.

        Args:
            layer: running number of the MoE layer.
            hidden: (n, hidden).
            ids: (n, k) int64 expert numbers; k is at most the model's top_k.
            weights: (n, k).

        Returns:
            (n, hidden) in the dtype and on the device of ``hidden``.

        Raises ServerError: a server refused, failed, or did not answer in time; PayloadError: a value does not fit the
        payload dtype; ModelError: the router chose more than top_k experts.
        """
        if torch.is_grad_enabled():
            # Experts elsewhere have no gradient; a graph over kept buffers would never be freed.
            with torch.no_grad():
                return self(layer, hidden, ids, weights)
        if ids.shape[1] != self._top_k:
            ids, weights = pad_choices(ids, weights, self._top_k, self._n_experts[layer])
        if self.on_routes is not None:
            self.on_routes(layer, ids)
        state, rows, clock = self._state, (hidden, ids, weights), self._recorder.clock
        started = perf_counter()
        clock.dense_told()
        record = self._recorder.counters
        times = record.layers[layer]
        times.calls += 1
        times.dense_s += started - record.mark
        sums = torch.empty_like(hidden) if self._alone else self._accumulator(state, hidden)
        for progress in state.progress:
            progress.begin(layer, hidden.shape[0])
        try:
            self._send(state, layer, rows, record.servers)
            late_s = clock.dense_late_s()
            sent = perf_counter()
            times.dense_s += late_s
            times.pack_s += sent - started - late_s
            meanwhile = self.meanwhile[layer]
            if meanwhile is not None:
                meanwhile(hidden)
                clock.wait()
                dense = perf_counter()
                times.dense_s += dense - sent
                sent = dense
            if self._local is not None:
                record.local_rows += self._local.compute(layer, hidden, ids, weights, sums)
                clock.wait()
                times.local_s += perf_counter() - sent
            with self.away:
                self._receive_all(state, layer, rows, record, sums)
        finally:
            # Before anything that can raise: flights that stay would add their sums to the next call of this thread.
            for progress in state.progress:
                progress.end()
        started = perf_counter()
        result = sums if self._alone else sums.to(hidden.dtype, copy=True)
        record.mark = perf_counter()
        times.combine_s += record.mark - started
        return result

    def _receive_all(
        self, state: _CallState, layer: int, rows: Chunk, record: PhaseCounters, sums: torch.Tensor
    ) -> None:
        """Takes replies into ``sums``, one of each shard for the rows from ``due`` on, then sends what slots have room
        for, until no rows are left."""
        times, to, n_rows = record.layers[layer], record.servers, rows[0].shape[0]
        due = 0
        while due < n_rows:
            next_due, unsent = n_rows, False
            for number, progress in enumerate(state.progress):
                if progress.due == due and not self._receive(state, number, rows, times, to[number], sums):
                    next_due, unsent = due, True
                    break
                if progress.next_row < n_rows:
                    unsent = True
                if (later := progress.due) < next_due:
                    next_due = later
            if unsent:
                started = perf_counter()
                self._send(state, layer, rows, to)
                times.pack_s += perf_counter() - started
            due = next_due

    def _send(self, state: _CallState, layer: int, rows: Chunk, to: list[CallCounters]) -> None:
        """Sends chunk by chunk, in the order in which sums are added, until no slot is free or no rows are left.

        Another thread may hold slots. A call that has replies to take must not wait for them, or both would wait. It
        has none when it is the turn of a chunk that is not sent: what is in flight comes before that.
        """
        n_rows = rows[0].shape[0]
        while True:
            start, in_flight = n_rows, False
            for progress in state.progress:
                start = min(start, progress.next_row)
                if progress.flights:
                    in_flight = True
            if start == n_rows:
                return
            for number, progress in enumerate(state.progress):
                if progress.next_row == start:
                    if not self._send_chunk(progress, layer, rows, to[number], wait=not in_flight):
                        return
                    if progress.flights:
                        in_flight = True

    def _send_chunk(self, progress: _Progress, layer: int, rows: Chunk, to: CallCounters, *, wait: bool) -> bool:
        """Sends the next chunk of one shard, or leaves its link if that fails; returns False if no slot is free, for
        which it may ``wait``."""
        n_rows, link, start = rows[0].shape[0], progress.link, progress.next_row
        try:
            flight = link.take(wait=wait) if len(progress.flights) < link.n_slots else None
            if flight is None:
                return False
            end = min(start + self._most_rows, start + link.layout.capacity, n_rows)
            chunk = rows
            if end - start < n_rows:
                hidden, ids, weights = rows
                chunk = hidden[start:end], ids[start:end], weights[start:end]
            if link.send(flight, layer, start, chunk, to):
                progress.flights.append(flight)
            progress.next_row = end  # not before: rows that could not be sent go to the next holder
        except ServerError as error:
            progress.move_on(error)
        return True

    def _receive(
        self, state: _CallState, number: int, rows: Chunk, times: LayerTimes, to: CallCounters, sums: torch.Tensor
    ) -> bool:
        """Takes the first reply of one shard into ``sums``; returns False if rows have to be sent again before."""
        progress, verification = state.progress[number], self._verification
        if not progress.flights:  # not sent again yet: another thread holds its new link's slots
            for other in state.progress:
                other.rewind()
            return False
        flight, started = progress.flights[0], perf_counter()
        try:
            part = flight.link.receive(flight, to)
            if verification is not None:
                verification.check(progress.shard, flight, part, rows)
        except ServerError as error:
            progress.move_on(error)
            times.wait_s += perf_counter() - started
            return False
        except PayloadError as error:
            if verification is not None:
                verification.check(progress.shard, flight, error, rows)
            raise
        received = perf_counter()
        waited = received - started
        # Of a wait, the end is the server's compute, before it its queue; the way back is in the rest.
        compute_s = min(waited, flight.compute_s)
        times.wait_s += waited
        times.wait_compute_s += compute_s
        times.wait_queue_s += min(waited - compute_s, flight.queue_s)
        to.wait_s += waited
        _add(sums, part, flight, overwrite=self._alone)
        progress.flights.popleft()
        flight.link.release(flight)
        times.combine_s += perf_counter() - received
        return True

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


def pad_choices(
    ids: torch.Tensor, weights: torch.Tensor, top_k: int, n_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Widens a router's choices (n, k) to ``top_k`` columns: phimoe's always chooses two, whatever its config says.

    The first number that no expert has, ``n_experts``, fills the new columns, with weight 0.
    Raises ModelError: k is greater than ``top_k``.
    """
    missing = top_k - ids.shape[1]
    if missing < 0:
        raise ModelError(f"the router chose {ids.shape[1]} experts for each row, the config says {top_k}")
    pad = torch.nn.functional.pad
    return pad(ids, (0, missing), value=n_experts), pad(weights, (0, missing))


def _add(sums: torch.Tensor, part: torch.Tensor, flight: Flight, *, overwrite: bool) -> None:
    """Adds one server's sums for one chunk to ``sums`` (n, hidden); ``overwrite`` if these are the first."""
    if flight.index is not None and not overwrite:
        sums.index_add_(0, flight.index + flight.start, part.to(sums.device).float())
        return
    # A decode step has one chunk: it does without a view.
    target = sums if flight.n_rows == sums.shape[0] else sums[flight.start : flight.start + flight.n_rows]
    if overwrite:
        target.copy_(part)
    else:
        target.add_(part.to(sums.device))
