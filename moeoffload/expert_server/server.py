"""The expert server as a whole: what it offers, the hosts attached to it, and its life from start to stop."""

from __future__ import annotations

import gc
import itertools
import logging
import socket
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Final

import torch

from moeoffload import __version__
from moeoffload.config import ExpertServerSettings
from moeoffload.control.credentials import ServerCredentials
from moeoffload.control.protocol import PROTOCOL_VERSION
from moeoffload.control.server import ControlServer
from moeoffload.control.user_token import numeric_loopback
from moeoffload.control.v1 import expert_service_pb2 as pb
from moeoffload.devices import device_memory, device_name, free_now, memory_budget, resolve_devices
from moeoffload.errors import BusyError, ServerError, SettingError
from moeoffload.expert_server.engine import Engine
from moeoffload.expert_server.lease import RETRY_AFTER_S, HostLease
from moeoffload.expert_server.model_roots import ModelRoots
from moeoffload.expert_server.server_parts import ChannelFactory, ServerParts
from moeoffload.expert_server.several_devices import SeveralDevices
from moeoffload.expert_server.store import ExpertStore
from moeoffload.expert_server.two_tiers import Tiers
from moeoffload.logs import Refusals
from moeoffload.transport import SharedServerEnd, StreamListener, sweep_stale_segments

logger = logging.getLogger(__name__)

MAX_LEASES: Final = 32
MAX_LEASES_OF_ONE: Final = 16
"""Of one host, or one machine on the network: it cannot take all of them. One host may need several: one per shard."""
STOP_GRACE_S: Final = 2.0
_CPU: Final = torch.device("cpu")


@dataclass
class ExpertServer(ServerParts):
    """Implements `moeoffload.control.service.ExpertBackend`. Made by `start`, ended by `stop`."""

    credentials: ServerCredentials
    refusals: Refusals
    listener: StreamListener | None = None
    _leases: dict[str, HostLease] = field(default_factory=dict)
    _epochs: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _draining: bool = False
    _failure: str = ""
    _control: ControlServer | None = None
    on_drained: Callable[[], object] = lambda: None
    """Called when the server is draining and its last host has left."""

    @classmethod
    def start(cls, settings: ExpertServerSettings, on_drained: Callable[[], object] = lambda: None) -> ExpertServer:
        """Opens everything and serves.
        Raises SettingError: the device does not exist, or has less memory than asked for; the address is taken; or the
        server would be open to others than its user says."""
        credentials = ServerCredentials.of(settings)
        refusals = Refusals()
        devices = resolve_devices(settings.device, last=True)
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        budgets = [memory_budget(device, settings.memory_gib) for device in devices]
        in_use, memories = set(devices), None
        if len(devices) > 1:
            if settings.ram_gib is not None:
                raise SettingError("ram-gib: goes with one GPU; start a server for each of several")
            memories = SeveralDevices(devices, budgets)
        elif settings.ram_gib is not None:
            if devices == (_CPU,) and settings.memory_gib is None:
                raise SettingError("ram-gib: on a CPU it needs memory-gib, which then stands for a device's memory")
            memories = Tiers(devices[0], budgets[0], memory_budget(_CPU, settings.ram_gib))
            in_use.add(_CPU)
        budget = budgets[0] if memories is None else memories.offered_bytes
        keeps = settings.keep_warm == "on"
        store = ExpertStore(budget, lambda: sum(map(free_now, in_use)), keep_warm=keeps)
        engine = Engine(coalesce=settings.coalesce)
        factories: dict[str, ChannelFactory] = {}
        server = cls(
            *(settings, devices[0], store, engine, factories, credentials, refusals),
            memories=memories,
            on_drained=on_drained,
        )
        engine.on_failure = server.fail
        if settings.transport in ("auto", "shared"):
            sweep_stale_segments()
            factories["shared"] = lambda sizes, deliver, key: SharedServerEnd(sizes, deliver, on_failure=server.fail)
        if settings.transport in ("auto", "stream"):
            server.listener = StreamListener(
                _numeric(settings.listen.host),
                settings.stream_port,
                encrypted=credentials.encrypt_rows,
                on_refused=refusals.add,
                on_failure=server.fail,
            )
            factories["stream"] = server.listener.open_channel
        engine.start()
        try:
            server._control = ControlServer.start(
                settings.listen.host, settings.listen.port, server, credentials, refusals
            )
            if server._failure:
                server.fail(server._failure)
        except BaseException:
            server.stop()
            raise
        return server

    @property
    def address(self) -> str:
        """HOST:PORT where hosts reach this server; the port is the real one."""
        assert self._control is not None
        host = self.settings.listen.host
        return f"[{host}]:{self._control.port}" if ":" in host else f"{host}:{self._control.port}"

    def stop(self) -> None:
        """Ends every lease, finishes what is queued, frees everything. Idempotent."""
        with self._lock:
            self._draining = True
            leases = list(self._leases.values())
        for lease in leases:
            lease.end("the server is stopping")
        if self._control is not None:
            self._control.stop(STOP_GRACE_S)
        for lease in leases:
            lease.close("the server is stopping")
        self.engine.stop(STOP_GRACE_S)
        if self.listener is not None:
            self.listener.close()
        self.store.close()

    def describe(self, request: pb.DescribeRequest) -> pb.DescribeReply:
        """See `ExpertBackend`."""
        return pb.DescribeReply(
            protocol_version=PROTOCOL_VERSION,
            server_version=__version__,
            device=", ".join(map(str, self.devices)),
            device_name=" + ".join(map(device_name, self.devices)),
            offered_bytes=max(0, self.store.offered_bytes(request.model_digest, request.compute_dtype)),
            resident_bytes=self.store.resident_bytes,
            batch_capacity=self.most_rows,
            transports=list(self.factories),
            max_slots=self.settings.slots,
            draining=self._draining,
            model=self.settings.model or "",
        )

    def open_lease(self, hello: pb.Hello, peer: str, say: Callable[[pb.AttachReply], None]) -> HostLease:
        """See `ExpertBackend`."""
        roots = ModelRoots(
            self.settings.model_root,
            self.credentials.any_model,
            lambda reason: self.refusals.add(f"{peer} {hello.host}", reason),
        )
        with self._lock:
            if self._failure:
                raise ServerError(f"this server has failed: {self._failure}")
            if self._draining:
                raise ServerError("this server is draining and takes no new hosts")
            # Processes of this machine are told apart by their names: they are the same user's.
            who = f"{peer} {hello.host}" if _is_loopback(peer) else peer
            of_one = sum(lease.limited_as == who for lease in self._leases.values())
            if len(self._leases) >= MAX_LEASES or of_one >= MAX_LEASES_OF_ONE:
                raise BusyError(
                    f"this server has {len(self._leases)} leases, {of_one} of this host; "
                    f"its limits are {MAX_LEASES} and {MAX_LEASES_OF_ONE}",
                    RETRY_AFTER_S,
                )
            lease = HostLease(self, roots, hello.host, peer, next(self._epochs), say, self._forget)
            lease.limited_as = who
            self._leases[lease.lease_id] = lease
        logger.info("%s (moeoffload %s): lease opened", hello.host, hello.host_version)
        return lease

    def _forget(self, lease: HostLease) -> None:
        with self._lock:
            self._leases.pop(lease.lease_id, None)
            drained = self._draining and not self._leases
        if drained:
            self.on_drained()

    def find_lease(self, lease_id: str) -> HostLease:
        """See `ExpertBackend`."""
        with self._lock:
            lease = self._leases.get(lease_id)
        if lease is None:
            raise ServerError("there is no such lease; attach first")
        return lease

    def stats(self) -> pb.StatsReply:
        """See `ExpertBackend`."""
        counters = self.engine.counters
        with self._lock:
            leases = list(self._leases.values())
        created: Counter[str] = Counter()
        for lease in leases:
            created.update(lease.pool_creations)
        return pb.StatsReply(
            requests=counters.requests,
            rows=counters.rows,
            errors=counters.errors,
            queue_seconds=counters.queue_s,
            compute_seconds=counters.compute_s,
            resident_bytes=self.store.resident_bytes,
            warm_bytes=self.store.warm_bytes,
            read_bytes=self.store.read_bytes,
            tiers=self.tiers.stats() if self.tiers is not None else None,
            memory=pb.DeviceMemory(**asdict(device_memory(*self.devices))),
            leases=len(leases),
            pool_creations=created,
            python_traced_bytes=_traced_bytes(),
            dropped=self.listener.n_unknown if self.listener is not None else 0,
            refused=self.refusals.count,
            batches=pb.BatchStats(
                batches=sum(counters.members),
                by_members=counters.members,
                wait_seconds=counters.batch_wait_s,
            ),
        )

    def fail(self, why: str) -> None:
        """One of the threads that every host needs has ended: says so (health, the leases) and takes no new hosts."""
        with self._lock:
            self._failure = self._failure or why
            leases = list(self._leases.values())
        if self._control is not None:
            self._control.set_serving(False)
        for lease in leases:
            lease.end(f"this server has failed: {why}")

    def drain(self) -> int:
        """See `ExpertBackend`."""
        with self._lock:
            self._draining = True
            leases = list(self._leases.values())
        if not leases:
            self.on_drained()
        if self._control is not None:
            self._control.set_serving(False)
        for lease in leases:
            lease.drain()
        return len(leases)


def _traced_bytes() -> int:
    """What Python objects hold, if this process was started to trace that; else 0."""
    if not tracemalloc.is_tracing():
        return 0
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def _is_loopback(peer: str) -> bool:
    return peer.startswith(("ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D", "unix:"))


def _numeric(host: str) -> str:
    """The address of a host name: ZeroMQ binds to addresses only. Raises SettingError: the name is not known."""
    try:
        host = numeric_loopback(host)
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except socket.gaierror as error:
        raise SettingError(f"--listen: cannot listen at {host}: {error.strerror}") from None
