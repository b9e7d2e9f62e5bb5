"""The parts of a server that its leases share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from moeoffload.config import ExpertServerSettings
from moeoffload.expert_server.engine import Engine
from moeoffload.expert_server.open_models import OpenModels
from moeoffload.expert_server.several_devices import SeveralDevices
from moeoffload.expert_server.store import ExpertStore
from moeoffload.expert_server.two_tiers import Tiers
from moeoffload.transport import shared_room
from moeoffload.transport.base import ChannelSizes, Deliver, ServerChannel

ChannelFactory = Callable[[ChannelSizes, Deliver, str], ServerChannel]
"""Opens the server's end of a transport, given sizes, the receiver of requests and the host's public CURVE key."""


@dataclass
class ServerParts:
    """The parts of a server that its leases share."""

    settings: ExpertServerSettings
    device: torch.device
    store: ExpertStore
    engine: Engine
    factories: dict[str, ChannelFactory]
    models: OpenModels = field(default_factory=OpenModels, kw_only=True)
    tiers: Tiers | None = field(default=None, kw_only=True)
    """Set if experts may be in RAM, too."""
    several: SeveralDevices | None = field(default=None, kw_only=True)
    """Set if there are several devices; ``device`` is the first of them."""

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All devices that compute."""
        return (self.device,) if self.several is None else self.several.devices

    @property
    def tries_larger_calls(self) -> bool:
        """Whether the best batch capacity is found by measurement."""
        return self.settings.batch_capacity is None and self.device.type == "cuda"

    @property
    def most_rows(self) -> int:
        """The largest batch capacity that a host may get."""
        return self.settings.most_rows if self.tries_larger_calls else self.settings.usual_rows

    def most_rows_of(self, frames_bytes: int) -> int:
        """As `most_rows`, for a host whose frames take ``frames_bytes`` per row and at most half of the shared memory.

        Containers often have little shared memory; the usual batch capacity is tried however little there is.
        """
        if not self.tries_larger_calls or "shared" not in self.factories:
            return self.most_rows
        return max(self.settings.usual_rows, min(self.most_rows, shared_room() // 2 // frames_bytes))

    def batch_room(self, wanted: int) -> int:
        """Returns the bytes left for batches; evicts warm experts if a device of several has less than ``wanted``."""
        room = self.store.free_bytes
        if self.tiers is not None:
            room = min(room, self.tiers.free)
        if self.several is not None:  # a batch needs room on every device
            if min(self.several.free) < wanted:
                self.store.forget_warm(())
            room = min(room, *self.several.free)
        return max(0, room)

    def reserve(self, n_bytes: int) -> bool:
        """Takes ``n_bytes`` for batches (negative: gives them back); returns False, and takes none, if not so many are
        free."""
        if not self.store.reserve(n_bytes):
            return False
        if self.several is not None:
            self.several.take([n_bytes] * len(self.several.devices))
        return True
