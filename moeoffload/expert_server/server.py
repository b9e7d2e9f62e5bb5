"""The expert server as a whole, from start to stop."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import nullcontext
from typing import Final

import torch

from moeoffload.config import ExpertServerSettings, bracketed
from moeoffload.control.credentials import ServerCredentials
from moeoffload.control.server import ControlServer
from moeoffload.control.user_token import numeric_loopback
from moeoffload.devices import free_now, memory_budget, resolve_devices
from moeoffload.errors import SettingError
from moeoffload.expert_server.agreement import Models
from moeoffload.expert_server.engine import Engine
from moeoffload.expert_server.server_parts import LoadWatch, ServerParts
from moeoffload.expert_server.service import ExpertService
from moeoffload.expert_server.several_devices import SeveralDevices
from moeoffload.expert_server.store import ExpertStore
from moeoffload.expert_server.two_tiers import Tiers
from moeoffload.transport import SharedServerEnd, StreamListener, sweep_stale_segments

STOP_GRACE_S: Final = 2.0
_CPU: Final = torch.device("cpu")


class ExpertServer:
    """A server in this process, until `stop`."""

    def __init__(
        self,
        settings: ExpertServerSettings,
        on_drained: Callable[[], object] = lambda: None,
        watch_load: LoadWatch | None = None,
    ) -> None:
        """Opens everything and serves; ``on_drained`` is called when the server is draining and its last host has left.
        Raises SettingError: the device does not exist, or has less memory than asked for; the address is taken; or the
        server would be open to others than its user says."""
        credentials = ServerCredentials.of(settings)
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
        models = Models(settings.model, settings.model_root, credentials.any_model)
        engine = Engine(coalesce=settings.coalesce)
        self.parts = parts = ServerParts(
            settings, devices[0], store, engine, models, memories, watch_load or _unwatched
        )
        self.service = ExpertService(parts, on_drained)
        engine.on_failure = fail = self.service.fail
        if settings.transport in ("auto", "shared"):
            sweep_stale_segments()
            parts.factories["shared"] = lambda sizes, deliver, key: SharedServerEnd(sizes, deliver, on_failure=fail)
        if settings.transport in ("auto", "stream"):
            parts.listener = StreamListener(
                _numeric(settings.listen.host),
                settings.stream_port,
                encrypted=credentials.encrypt_rows,
                on_refused=parts.refusals.add,
                on_failure=fail,
            )
            parts.factories["stream"] = parts.listener.open_channel
        engine.start()
        try:
            address = settings.listen.host, settings.listen.port
            self.service.control = ControlServer(*address, self.service, credentials, parts.refusals)
            if self.service.failure:
                fail(self.service.failure)
        except BaseException:
            self.stop()
            raise

    @property
    def address(self) -> str:
        """HOST:PORT where hosts reach this server; the port is the real one."""
        assert self.service.control is not None
        return f"{bracketed(self.parts.settings.listen.host)}:{self.service.control.port}"

    def stop(self) -> None:
        """Ends every lease, finishes what is queued, frees everything. Idempotent."""
        parts, leases = self.parts, self.service.refuse_hosts()
        for lease in leases:
            lease.end("the server is stopping")
        if self.service.control is not None:
            self.service.control.stop(STOP_GRACE_S)
        for lease in leases:
            lease.close("the server is stopping")
        parts.engine.stop(STOP_GRACE_S)
        if parts.listener is not None:
            parts.listener.close()
        parts.store.close()


def _unwatched(host: str) -> nullcontext[Callable[[int, int], object]]:
    return nullcontext(lambda loaded, total: None)


def _numeric(host: str) -> str:
    """The address of a host name: ZeroMQ binds to addresses only. Raises SettingError: the name is not known."""
    try:
        host = numeric_loopback(host)
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except socket.gaierror as error:
        raise SettingError(f"--listen: cannot listen at {host}: {error.strerror}") from None
