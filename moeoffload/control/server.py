"""The listening control plane: gRPC with its own TLS, the health service and reflection.

gRPC's asyncio server would need fewer threads, but it stops accepting calls for good at the first path that is not
UTF-8 (grpcio 1.85).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from moeoffload.config import bracketed
from moeoffload.control.call_threads import CallThreads
from moeoffload.control.credentials import ServerCredentials
from moeoffload.control.gate import FIRST_S, Gate
from moeoffload.control.protocol import SERVER_OPTIONS
from moeoffload.control.user_token import UserToken, numeric_loopback
from moeoffload.control.v1 import expert_service_pb2 as pb
from moeoffload.control.v1 import expert_service_pb2_grpc as pb_grpc
from moeoffload.errors import SettingError
from moeoffload.refusals import Refusals

SERVICE_NAME: Final = pb.DESCRIPTOR.services_by_name["ExpertService"].full_name
_STOP_S: Final = 2.0


class ControlServer:
    """Listens and serves from `start` to `stop`. ``port`` is the actual port, even if port 0 was given."""

    def __init__(self, gate: Gate, servicer: pb_grpc.ExpertServiceServicer) -> None:
        # gRPC logs a traceback for every call header that is not UTF-8, although it goes on.
        logging.getLogger("grpc._cython.cygrpc").setLevel(logging.CRITICAL)
        self.port = 0
        self._user_token: UserToken | None = None
        self._calls = CallThreads()
        self._health = _Health(experimental_non_blocking=False)
        self._server = grpc.server(self._calls, interceptors=[gate], options=SERVER_OPTIONS)  # type: ignore[arg-type]
        pb_grpc.add_ExpertServiceServicer_to_server(servicer, self._server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)

    @classmethod
    def start(
        cls,
        host: str,
        port: int,
        servicer: pb_grpc.ExpertServiceServicer,
        credentials: ServerCredentials,
        refusals: Refusals,
        *,
        first_s: float = FIRST_S,
    ) -> ControlServer:
        """Listens on ``host``:``port`` and serves the expert service, the standard health service and reflection.

        Calls that ``credentials`` do not allow are refused and added to ``refusals``; health checks are open to all. A
        call must send its request within ``first_s`` seconds.
        Raises SettingError: the address cannot be bound; SystemLimitError: there is no folder for the token of a server
        that serves its own user only.
        """
        gate = Gate(credentials, refusals, first_s)
        control = cls(gate, servicer)
        control.port = control._bind(host, port, credentials.tls)
        if credentials.same_user and credentials.token is not None:
            token = control._user_token = UserToken.write(host, control.port, credentials.token)
            gate.whose_token = (
                f"the one in {token.path}, which hosts of its own user find by themselves; for others start it with "
                "--token-file or --client-ca"
            )
        control.set_serving(True)
        control._server.start()
        return control

    def set_serving(self, serving: bool) -> None:
        """Sets the health status of the whole server and of the expert service. From any thread; does not wait."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in (health.OVERALL_HEALTH, SERVICE_NAME):
            self._health.set(service, status)

    def stop(self, grace_s: float) -> None:
        """Stops listening; calls still running after ``grace_s`` seconds are cancelled. Idempotent."""
        if self._user_token is not None:
            self._user_token.remove()
        self.set_serving(False)
        try:
            ended = self._server.stop(grace_s)
        except RuntimeError:  # a graceful stop needs a thread, and the system allows none
            ended = self._server.stop(None)
        if not ended.wait(grace_s + _STOP_S) or not self._calls.end(_STOP_S):
            logging.getLogger(__name__).warning("the control plane did not stop within %g s", grace_s + _STOP_S)

    def _bind(self, host: str, port: int, tls: grpc.ServerCredentials | None) -> int:
        """Binds the address; returns the port. Raises SettingError: it is taken, or not an address of this machine."""
        address = f"{bracketed(numeric_loopback(host))}:{port}"
        try:
            if tls is not None:
                return self._server.add_secure_port(address, tls)
            return self._server.add_insecure_port(address)
        except RuntimeError:
            raise SettingError(f"--listen: cannot listen at {host}:{port}; is another server running there?") from None


class _Health(health.HealthServicer):  # type: ignore[misc]
    """The health service with Check only: with Watch a peer without a token could hold its connection forever."""

    def Watch(self, request: object, context: Any, send_response_callback: object = None) -> Iterator[object]:
        """Refuses the call."""
        context.set_code(grpc.StatusCode.UNIMPLEMENTED)
        context.set_details("Watch is not offered; use Check")
        return iter(())
