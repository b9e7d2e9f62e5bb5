"""Mutated calls of a real server's control plane."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import grpc
from fuzz_frames import Counts
from fuzz_peer import STEP_S, Model, Server, mutated

from moeoffload.control.client import ControlClient, Lease
from moeoffload.control.credentials import HostCredentials
from moeoffload.control.protocol import PROTOCOL_VERSION
from moeoffload.control.v1 import expert_service_pb2 as pb
from moeoffload.errors import ServerError

N_THREADS: Final = 4
"""With a lease each: fewer than the server takes, so that most calls get past that."""
CALL_S: Final = 60.0
SERVICE: Final = "/moeoffload.v1.ExpertService/"
REFLECTION: Final = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
# Drain is left out: whatever its bytes are it ends the server. The targets call it in their own process.
SHARES: Final = {
    "Describe": 50,
    "Stats": 12,
    "Attach": 25,
    "Calibrate": 4,
    "LoadExperts": 4,
    "health": 3,
    "reflection": 2,
}
NOT_FORESEEN: Final = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE)


class _Calls:
    """One thread's calls."""

    def __init__(self, channel: grpc.Channel, client: ControlClient, model: Model, seed: int) -> None:
        self._channel = channel
        self._client = client
        self._rng = random.Random(seed)
        self._lease: Lease | None = None
        self._metadata = HostCredentials().metadata(client.address)
        self.counts = Counts()
        self._steps = [
            pb.AttachRequest(hello=pb.Hello(protocol_version=PROTOCOL_VERSION, host="fuzz:1", host_version="1")),
            pb.AttachRequest(activate=model.activate("auto")),
            pb.AttachRequest(accept=pb.Accept(transport="shared", nonce=bytes(16), reason="both on this machine")),
        ]
        self._model = model

    def one(self) -> None:
        """One call, and what came of it."""
        rng = self._rng
        method = rng.choices(list(SHARES), list(SHARES.values()))[0]
        self.counts.inputs += 1
        try:
            if method == "Attach":
                steps = [mutated(step.SerializeToString(), rng) if rng.random() < 0.6 else step.SerializeToString()
                         for step in self._steps[: rng.randint(1, 3)]]  # fmt: skip
                if rng.random() < 0.1:
                    rng.shuffle(steps)
                self._stream(SERVICE + method, steps)
            elif method == "reflection":
                self._stream(REFLECTION, [mutated(b"\x3a\x01*", rng) for _ in range(rng.randint(0, 3))])
            else:
                data = mutated(self._good(method), rng) if rng.random() < 0.95 else b""
                name = "/grpc.health.v1.Health/Check" if method == "health" else SERVICE + method
                list(self._channel.unary_stream(name, None, None)(data, timeout=CALL_S, metadata=self._metadata))
            self.counts.good += 1
        except grpc.RpcError as error:
            code = error.code() if isinstance(error, grpc.Call) else None
            self.counts.refused += 1
            self.counts.crashes += code in NOT_FORESEEN
            self.counts.hangs += code is grpc.StatusCode.DEADLINE_EXCEEDED

    def _stream(self, method: str, requests: list[bytes]) -> None:
        list(self._channel.stream_stream(method, None, None)(iter(requests), timeout=CALL_S, metadata=self._metadata))

    def _good(self, method: str) -> bytes:
        """A request that the server answers."""
        model = self._model
        if method == "Describe":
            digest = model.checkpoint.digest
            request: Any = pb.DescribeRequest(model_digest=digest, compute_dtype=model.dtype.label)
        elif method == "health":
            return b"\x0a\x00"
        elif method == "Stats":
            request = pb.StatsRequest()
        elif method == "Calibrate":
            request = pb.CalibrateRequest(lease_id=self._lease_id(), model=model.reference())
        else:
            layers = [pb.LayerExperts(layer=i, experts=experts) for i, experts in enumerate(model.table.layers)]
            request = pb.LoadExpertsRequest(lease_id=self._lease_id(), model=model.reference(), layers=layers)
        return bytes(request.SerializeToString())

    def _lease_id(self) -> str:
        """Of a lease that is open now and then: a host that does not go on attaching loses it."""
        if self._lease is None or self._lease.end_reason is not None or self._rng.random() < 0.02:
            self.close()
            try:
                self._lease = self._client.attach(STEP_S)
            except ServerError:
                return "0" * 32
        return self._lease.lease_id

    def close(self) -> None:
        """Ends the lease."""
        if self._lease is not None:
            self._lease.close()
            self._lease = None


def fuzz_calls(server: Server, model: Model, seconds: float, least: int, seed: int) -> Counts:
    """Calls from several threads for ``seconds`` or until there are ``least``, whatever takes longer."""
    until, total = time.monotonic() + seconds, Counts()
    lock = threading.Lock()
    client = ControlClient(server.address)

    def work(number: int) -> None:
        with HostCredentials().channel(server.address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            calls = _Calls(channel, client, model, seed * 1000 + number)
            try:
                while (calls.counts.inputs < least // N_THREADS or time.monotonic() < until) and server.alive():
                    calls.one()
                    if calls.counts.hangs:
                        break
            finally:
                calls.close()
                with lock:
                    for name, value in vars(calls.counts).items():
                        setattr(total, name, getattr(total, name) + value)

    with ThreadPoolExecutor(N_THREADS) as pool:
        list(pool.map(work, range(N_THREADS)))
    client.close()
    return total
