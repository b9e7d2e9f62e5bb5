"""One attached host on the server: its experts, channels and share of the memory. Closing a lease frees all of them."""

from __future__ import annotations

import functools
import logging
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import TYPE_CHECKING, Final

import grpc

from moeoffload.config.shared import USUAL_ROWS
from moeoffload.control.v1 import expert_service_pb2 as pb
from moeoffload.devices import lean_heap
from moeoffload.errors import BusyError, CapacityError, ServerError
from moeoffload.expert_server.agreement import check_activate, check_table, check_transport, compare
from moeoffload.expert_server.arena import DeviceArena, HostArena
from moeoffload.expert_server.calibrate import SIZES, best_rows, time_layer
from moeoffload.expert_server.requests import ActiveHost, Request
from moeoffload.expert_server.server_parts import ServerParts
from moeoffload.expert_server.several_devices import LayerSource
from moeoffload.expert_server.store import LayerKey
from moeoffload.kernels import KernelWorkspace, LayerKernels
from moeoffload.placement import GIB, ExpertTable, batch_row_bytes, frames_row_bytes
from moeoffload.transport.base import ChannelSizes, ServerChannel
from moeoffload.wire import FrameLayout

if TYPE_CHECKING:
    from moeoffload.checkpoint import Checkpoint
    from moeoffload.checkpoint.copy_buffers import CopyBuffers

logger = logging.getLogger(__name__)

CALIBRATION_ROWS: Final = 64
CALIBRATION_BYTES: Final = 1 << 30
CALIBRATION_TIMEOUT_S: Final = 60.0


class HostLease:
    """One host on the server. Closing the lease frees everything that belongs to it."""

    def __init__(
        self,
        server: ServerParts,
        host: str,
        peer: str,
        limited_as: str,
        epoch: int,
        say: Callable[[pb.AttachReply], None],
    ) -> None:
        """``host`` is the name that the host at ``peer`` gives itself, ``limited_as`` the identity against whose limit
        of leases this one counts; ``say`` sends the host a message."""
        self.lease_id = secrets.token_hex(16)
        self.host = host
        self.limited_as = limited_as
        self.epoch = epoch
        self.say = say
        self.call: grpc.ServicerContext | None = None
        """The call that runs besides the stream of the lease: one at a time."""
        self.called_until = float("-inf")
        """When the last such call ended, monotonic seconds."""
        self._server = server
        self._settings = server.settings
        self._device = server.device
        self._store = server.store
        self._engine = server.engine
        self._name = f"{peer} {host}"
        self._share = server.engine.shares.join(self._name)
        self._lock = threading.Lock()
        self._closed = False
        self._loaded: tuple[Checkpoint, ExpertTable] | None = None
        self._fast_part = 1.0
        """Fraction of each layer's experts that is loaded to the device."""
        self._experts: dict[LayerKey, LayerKernels] = {}
        self._reserved = 0
        self._active: ActiveHost | None = None
        self._channels: dict[str, ServerChannel] = {}

    def end(self, reason: str) -> None:
        """Asks the host's stream to end; ``reason`` is sent to the host."""
        self.say(pb.AttachReply(closing=pb.Closing(reason=reason)))

    def calibrate(self, request: pb.CalibrateRequest) -> pb.CalibrateReply:
        """Loads a few experts temporarily and times them.
        Raises ModelError: the model cannot be read here; ServerError: its digest differs from the host's;
        CapacityError: there is no room for one expert."""
        checkpoint = self._open_checkpoint(request.model)
        layer = checkpoint.layers[0]
        room = min(CALIBRATION_BYTES, self._store.free_bytes) // layer.expert_bytes
        if self._server.tiers is not None:
            experts_bytes = sum(each.n_experts * each.expert_bytes for each in checkpoint.layers)
            self._fast_part = self._server.tiers.share(min(experts_bytes, self._store.free_bytes))
        n_experts = max(1, min(layer.n_experts, checkpoint.top_k, room))
        key = LayerKey.of(checkpoint, layer.index, tuple(range(n_experts)))
        kernels = self._acquire(checkpoint, key)
        try:
            timings = self._time(kernels, checkpoint.top_k, CALIBRATION_ROWS, n_experts, KernelWorkspace())
        finally:
            self._store.release(key)
        # The shortest times ever measured: placement is computed from them and should be the same for the next host.
        shortest = self._store.shortest_s.setdefault((checkpoint.digest, checkpoint.dtype), {})
        for rows, seconds in timings:
            shortest[rows] = min(seconds, shortest.get(rows, seconds))
        return pb.CalibrateReply(timings=[pb.Timing(rows=rows, seconds=shortest[rows]) for rows, _ in timings])

    def _open_checkpoint(self, model: pb.ModelReference) -> Checkpoint:
        """Returns this server's copy of the host's model."""
        refuse = functools.partial(self._server.refusals.add, self._name)
        return self._server.models.open(model, refuse)

    def load(self, request: pb.LoadExpertsRequest) -> Iterator[pb.LoadProgress]:
        """Makes the requested experts resident, one layer at a time; if that fails, none of them stay with this lease.
        Raises ModelError: the model cannot be read here; ServerError: its digest differs from the host's, or the table
        does not match the model; CapacityError: the experts do not fit into the memory budget."""
        if self._loaded is not None:
            raise ServerError("this lease has loaded its experts already")
        try:
            with self._server.watch_load(self.host) as tell:
                yield from self._load(request, tell)
        except BaseException:
            if self._loaded is None:  # else the host went away at the last message
                self._give_back_experts()
            raise

    def _load(self, request: pb.LoadExpertsRequest, tell: Callable[[int, int], object]) -> Iterator[pb.LoadProgress]:
        checkpoint = self._open_checkpoint(request.model)
        table = check_table(request, checkpoint)
        begun, loaded = monotonic(), 0
        sizes = [layer.expert_bytes for layer in checkpoint.layers]
        total = sum(len(experts) * size for experts, size in zip(table.layers, sizes, strict=True))
        logger.info("%s: loading %d experts, %.4g GiB, of %s", self.host, table.n_experts, total / GIB, checkpoint.path)
        tell(0, total)
        yield pb.LoadProgress(loaded_bytes=0, total_bytes=total)
        read = self._store.read_bytes
        keys = [LayerKey.of(checkpoint, i, experts) for i, experts in enumerate(table.layers) if experts]
        missing = [key for key in keys if key not in self._store]
        # Warm layers first, so that loading the others does not evict them.
        keys.sort(key=missing.__contains__)
        if (tiers := self._server.tiers) is not None and missing:
            self._store.forget_warm(keys)
            n_bytes = sum(len(key.experts) * sizes[key.layer] for key in missing)
            self._fast_part = tiers.share(n_bytes)
            logger.info("%s: %.0f %% of the experts to load begin on the device", self.host, 100 * self._fast_part)
        from moeoffload.checkpoint.copy_buffers import CopyBuffers  # imported with the first model, as is checkpoint/

        with CopyBuffers() as buffers, ThreadPoolExecutor(1, "compile-kernels") as ahead:
            for key in keys:
                kernels = self._load_layer(checkpoint, key, buffers)
                if self._device.type != "cpu":
                    # While the next layers load, and other hosts compute; errors are left to `reserve`.
                    ahead.submit(kernels.compile, checkpoint.top_k)
                loaded += len(key.experts) * sizes[key.layer]
                tell(loaded, total)
                yield pb.LoadProgress(loaded_bytes=loaded, total_bytes=total)
        # Hosts expect them in the order of the layers.
        for _, kernels in sorted(self._experts.items(), key=lambda item: item[0].layer):
            yield pb.LoadProgress(loaded_bytes=loaded, total_bytes=total, weight_error=kernels.weight_error)
        read = self._store.read_bytes - read
        logger.info("%s: loaded in %.1f s, %.4g GiB of it from files", self.host, monotonic() - begun, read / GIB)
        if self._server.memories is not None:
            logger.info("%s: taken are %s", self.host, self._server.memories)
        self._loaded = checkpoint, table
        yield pb.LoadProgress(loaded_bytes=loaded, total_bytes=total, table_digest=table.digest)

    def _acquire(self, checkpoint: Checkpoint, key: LayerKey, buffers: CopyBuffers | None = None) -> LayerKernels:
        def build() -> LayerKernels:
            workspace, kernel = self._engine.kernel_workspace, self._settings.kernel
            source = LayerSource(checkpoint, key.layer, key.experts, workspace, kernel, buffers)
            with lean_heap():
                if (memories := self._server.memories) is None:
                    return source.build(self._device)[1]
                return memories.build(source, self._store.forget_warm, self._fast_part)

        try:
            return self._store.acquire(key, len(key.experts) * checkpoint.layers[key.layer].expert_bytes, build)
        except CapacityError as error:
            raise self._no_room(str(error)) from None

    def _load_layer(self, checkpoint: Checkpoint, key: LayerKey, buffers: CopyBuffers) -> LayerKernels:
        kernels = self._acquire(checkpoint, key, buffers)
        with self._lock:
            if not self._closed:
                self._experts[key] = kernels
                return kernels
        self._store.release(key)
        raise ServerError("the lease ended while its experts were loading")

    def activate(self, request: pb.Activate) -> pb.Offer:
        """Checks the host's request against what is loaded, decides the batch capacity and opens channels.
        Raises ServerError: something differs; the message names the field; CapacityError: not even one row fits into
        the memory that is left."""
        if self._loaded is None:
            raise ServerError("activate came before the experts were loaded")
        if self._active is not None:
            raise ServerError("this lease is active already")
        checkpoint, table = self._loaded
        payloads = check_activate(request, checkpoint, table)
        transports = check_transport(request.transport, list(self._server.factories))
        n_slots = min(request.n_slots, self._settings.slots)
        capacity = self._capacity(request, checkpoint, n_slots)
        if self._server.tries_larger_calls and capacity > USUAL_ROWS and self._experts:
            capacity = self._best_capacity(checkpoint, capacity)
        layout = FrameLayout(checkpoint.hidden_size, checkpoint.top_k, *payloads, capacity)
        self._activate(layout, checkpoint)
        sizes = ChannelSizes(n_slots, layout.request_bytes, layout.reply_bytes, self._settings.shared_bytes)
        timings: list[tuple[int, float]] = []
        for key, kernels in list(self._experts.items())[:1]:
            known = self._store.timings.setdefault(kernels, {})
            if capacity not in known:  # timing also warms everything up
                known[capacity] = self._time(kernels, layout.top_k, capacity, checkpoint.layers[key.layer].n_experts)
            timings = known[capacity]
        kernel = ", ".join(sorted({each.kernel_for(n) for each in self._experts.values() for n in (1, capacity)}))
        if request.kernel:
            compare("kernel", request.kernel, kernel)
        return pb.Offer(
            batch_capacity=capacity,
            kernel=kernel,
            timings=[pb.Timing(rows=rows, seconds=seconds) for rows, seconds in timings],
            channels=self._open_all(transports, sizes, request.stream_key),
        )

    def _capacity(self, request: pb.Activate, checkpoint: Checkpoint, n_slots: int) -> int:
        widest = max(layer.intermediate for layer in checkpoint.layers)
        row_bytes = batch_row_bytes(
            checkpoint.hidden_size, checkpoint.top_k, widest, checkpoint.dtype.itemsize, n_slots
        )
        frames_bytes = frames_row_bytes(checkpoint.hidden_size, checkpoint.top_k, n_slots)
        most = min(request.batch_capacity, self._server.most_rows_of(frames_bytes))
        capacity, room = self._server.take_rows(most, row_bytes)
        if not capacity:
            raise self._no_room(
                f"{room} bytes are left for batches, one row in {n_slots} slots needs {row_bytes}; "
                "give the server more memory, or use fewer slots"
            )
        self._reserved = capacity * row_bytes
        if capacity < (usual := min(request.batch_capacity, USUAL_ROWS)):
            why = f"{room} bytes are left for batches" if capacity < most else "this server's batch-capacity"
            logger.warning("%s: batch capacity is %d rows instead of %d: %s", self.host, capacity, usual, why)
        return capacity

    def _best_capacity(self, checkpoint: Checkpoint, most: int) -> int:
        """Returns the measured best batch capacity, at most ``most``; releases the memory reserved beyond it."""
        key, kernels = next(iter(self._experts.items()))
        how = checkpoint.top_k, most, checkpoint.layers[key.layer].n_experts
        known = self._store.best_rows.setdefault(kernels, {})
        if most not in known:
            known[most] = best_rows(lambda n: self._time(kernels, *how, sizes=(n,))[0][1], USUAL_ROWS, most)
        with self._lock:
            if not self._closed:
                spare = self._reserved // most * (most - known[most])
                self._reserved -= spare
                self._server.reserve(-spare)
        return known[most]

    def _no_room(self, text: str) -> CapacityError:
        """Returns a `BusyError` if there are other leases, whose memory may become free, else a `CapacityError`."""
        if self._engine.shares.n_leases > 1:
            return BusyError(f"{text} (busy: other leases use this server)")
        return CapacityError(text)

    def _activate(self, layout: FrameLayout, checkpoint: Checkpoint) -> None:
        dtype, device = checkpoint.dtype, self._device
        arena = HostArena(layout, dtype) if device.type == "cpu" else DeviceArena(layout, dtype, device)
        held = {key.layer: kernels for key, kernels in self._experts.items()}
        layers = [held.get(layer.index) for layer in checkpoint.layers]
        self._active = ActiveHost(self.epoch, layout, layers, dtype, arena, self._share)

        def reserve() -> None:
            for kernels in self._experts.values():
                kernels.reserve(layout.capacity, layout.top_k)

        # On the compute thread, while no call runs: a workspace that grows frees memory that another call may be using.
        self._engine.run(reserve, self._share, CALIBRATION_TIMEOUT_S)

    def _time(
        self,
        kernels: LayerKernels,
        top_k: int,
        capacity: int,
        n_experts: int,
        workspace: KernelWorkspace | None = None,
        sizes: Sequence[int] = SIZES,
    ) -> list[tuple[int, float]]:
        """Times calls of several sizes when it is this host's turn; returns (rows, seconds)."""
        pause = self._engine.pause if len(self._engine.shares.all) > 1 else None
        here = functools.partial(time_layer, device=self._device, pause=pause, sizes=sizes)
        work = functools.partial(here, kernels, top_k, capacity, n_experts=n_experts, workspace=workspace)
        return self._engine.run(work, self._share, CALIBRATION_TIMEOUT_S)

    def _open_all(self, names: list[str], sizes: ChannelSizes, key: str) -> list[pb.ChannelOffer]:
        """Opens the server's ends of the channels, without those that are not possible here, such as shared memory in a
        container that has little. Raises ServerError: none is."""
        offers = []
        for name in names:
            try:
                offers.append(self._open(name, sizes, key))
            except ServerError as error:
                if not offers and name == names[-1]:
                    raise
                logger.warning("%s: transport %s is not offered: %s", self.host, name, error)
        return offers

    def _open(self, name: str, sizes: ChannelSizes, key: str) -> pb.ChannelOffer:
        assert self._active is not None, "channels are opened after the lease became active"
        channel = self._server.factories[name](sizes, self._engine.submit, key)
        for slot in channel.slots:  # before a host knows of the channel
            slot.owner = Request(self._active, channel, slot)
        with self._lock:
            closed = self._closed
            if not closed:
                self._channels[name] = channel
        if closed:
            _close(channel)
            raise ServerError("the lease ended while its channels were opened")
        agreed = {field: getattr(sizes, field) for field in ("n_slots", "request_bytes", "reply_bytes")}
        return pb.ChannelOffer(transport=name, parameters=channel.offer.parameters, **agreed)

    def accept(self, request: pb.Accept) -> pb.Ready:
        """Keeps the channel that the host has opened and closes the others.
        Raises ServerError: there is no such channel, or the host's nonce does not prove that it sees the segment."""
        channel = self._channels.get(request.transport)
        if channel is None:
            raise ServerError(f"transport {request.transport!r} was not offered")
        if not secrets.compare_digest(request.nonce, channel.nonce):
            raise ServerError(f"transport {request.transport}: the host does not see this server's memory")
        if self._active is not None:
            self._active.arena.lock_frames(channel.slots)
        for name, other in list(self._channels.items()):
            if name != request.transport:
                _close(other)
                del self._channels[name]
        logger.info("%s: attached over %s (%s)", self.host, request.transport, request.reason)
        return pb.Ready(epoch=self.epoch)

    @property
    def pool_creations(self) -> dict[str, int]:
        """Number of objects that the pools of this lease have made: slots, views and workspaces."""
        requests = [slot.owner for channel in list(self._channels.values()) for slot in channel.slots]
        return {
            "slots": len(requests),
            "views": sum(request.views.n_created for request in requests if request is not None),
            "workspaces": self._active.arena.n_created if self._active is not None else 0,
        }

    def close(self, reason: str) -> None:
        """Frees the channels, the memory and the experts. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            channels, self._channels = self._channels, {}
        if (active := self._active) is not None:
            active.closed = True
            for channel in channels.values():
                _close(channel)
            active.arena.close(lambda work: self._engine.run(work, self._share, CALIBRATION_TIMEOUT_S))
        self._engine.leave(self._share)
        if active is not None:  # after its last request; frees them now, not when Python's cycle collector runs
            active.layers = ()
        self._server.reserve(-self._reserved)
        self._give_back_experts()
        if (tiers := self._server.tiers) is not None:
            hits = tiers.fast_routes, tiers.fast_routes + tiers.slow_routes
            logger.info("on the device so far: %d of %d routes, after %d moves", *hits, tiers.moves)
        logger.info("%s: lease ended (%s)", self.host, reason)

    def _give_back_experts(self) -> None:
        with self._lock:
            experts, self._experts = self._experts, {}
        for key in experts:
            self._store.release(key)


def _close(channel: ServerChannel) -> None:
    """Closes a channel. Its slots and their requests form a reference cycle: breaking it frees their memory now."""
    channel.close()
    for slot in channel.slots:
        request, slot.owner = slot.owner, None
        if request is not None:
            request.views.drop()
