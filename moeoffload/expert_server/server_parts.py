"""The parts of a server that its leases share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Final

import torch

from moeoffload.config import ExpertServerSettings
from moeoffload.expert_server.agreement import Models
from moeoffload.expert_server.engine import Engine
from moeoffload.expert_server.several_devices import SeveralDevices
from moeoffload.expert_server.store import ExpertStore
from moeoffload.expert_server.two_tiers import Tiers
from moeoffload.logs import Refusals
from moeoffload.transport import StreamListener, shared_room
from moeoffload.transport.base import ChannelSizes, Deliver, ServerChannel

LEAST_ROWS: Final = 32
ROWS_FOR_OTHERS: Final = 128
"""Room for this many rows is left to other hosts, unless fewer than `LEAST_ROWS` would remain for this one."""
ChannelFactory = Callable[[ChannelSizes, Deliver, str], ServerChannel]
"""Opens the server's end of a transport, given sizes, the receiver of requests and the host's public CURVE key."""
LoadWatch = Callable[[str], AbstractContextManager[Callable[[int, int], object]]]
"""Is open while experts are loaded for a host, given its name; yields what is told the bytes so far and all of them."""


@dataclass
class ServerParts:
    """The parts of a server that its leases share."""

    settings: ExpertServerSettings
    device: torch.device
    store: ExpertStore
    engine: Engine
    models: Models
    memories: SeveralDevices | None
    """Set if experts are in several memories; ``device`` is the first of them."""
    watch_load: LoadWatch
    factories: dict[str, ChannelFactory] = field(default_factory=dict)
    listener: StreamListener | None = None
    """Set if the stream transport is offered."""
    refusals: Refusals = field(default_factory=Refusals)

    @property
    def tiers(self) -> Tiers | None:
        """Set if experts may be in RAM, too."""
        return self.memories if isinstance(self.memories, Tiers) else None

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All devices that compute whole batches."""
        return (self.device,) if self.memories is None else self.memories.devices[: self.memories.n_for_batches]

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

    def take_rows(self, most: int, row_bytes: int) -> tuple[int, int]:
        """Takes room for a batch of at most ``most`` rows; returns for how many (0: not even for one), and the bytes
        that were left for batches before."""
        while True:  # again if another host has taken some of the room meanwhile
            room = self._batch_room((most + ROWS_FOR_OTHERS) * row_bytes)
            rows = room // row_bytes
            rows = min(most, max(rows - ROWS_FOR_OTHERS, min(rows, LEAST_ROWS)))
            if rows < 1 or self.reserve(rows * row_bytes):
                return rows, room

    def _batch_room(self, wanted: int) -> int:
        """Returns the bytes left for batches; evicts warm experts if one of several memories has less than
        ``wanted``."""
        if self.memories is not None and self.memories.batch_room < wanted:
            self.store.forget_warm()
        room = self.store.free_bytes // len(self.devices)  # a batch needs room on every device
        return max(0, room if self.memories is None else min(room, self.memories.batch_room))

    def reserve(self, n_bytes: int) -> bool:
        """Takes ``n_bytes`` for batches (negative: gives them back); returns False, and takes none, if not so many are
        free."""
        of_all = n_bytes * len(self.devices)
        if not self.store.reserve(of_all):
            return False
        if self.memories is not None and not self.memories.reserve(n_bytes):
            self.store.reserve(-of_all)
            return False
        return True
