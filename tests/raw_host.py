"""A host of the control plane that keeps to no rules."""

from __future__ import annotations

import contextlib
import queue
from typing import Any

from command_lines import STEP_TIMEOUT_S

from moeoffload.control.client import ControlClient
from moeoffload.control.protocol import PROTOCOL_VERSION
from moeoffload.control.v1 import expert_service_pb2 as pb


class RawHost:
    """A host that says what it likes: one Attach stream and plain calls beside it."""

    def __init__(self, address: str) -> None:
        self._client = ControlClient(address)
        self._client.connect(STEP_TIMEOUT_S)
        self._outgoing: queue.SimpleQueue[pb.AttachRequest | None] = queue.SimpleQueue()
        self._stream = self.call("Attach", iter(self._outgoing.get, None))

    def call(self, method: str, request: Any) -> Any:
        def begin(stub: Any, metadata: Any) -> Any:
            return getattr(stub, method)(request, timeout=STEP_TIMEOUT_S, metadata=metadata)

        return self._client._begin(begin)

    def send(self, **step: object) -> pb.AttachReply:
        self._outgoing.put(pb.AttachRequest(**step))  # type: ignore[arg-type]
        reply: pb.AttachReply = next(self._stream)
        return reply

    def hello(self, name: str = "test") -> str:
        return self.send(hello=pb.Hello(protocol_version=PROTOCOL_VERSION, host=name)).welcome.lease_id

    def load(self, request: pb.LoadExpertsRequest) -> list[pb.LoadProgress]:
        return list(self.call("LoadExperts", request))

    def describe(self) -> pb.DescribeReply:
        return self._client.describe(STEP_TIMEOUT_S)

    def stats(self) -> pb.StatsReply:
        return self._client.stats(STEP_TIMEOUT_S)

    def close(self) -> None:
        self._outgoing.put(None)
        self._client.close()


def raw_host(address: str) -> contextlib.closing[RawHost]:
    return contextlib.closing(RawHost(address))
