"""The listening control plane: gRPC with its own TLS, the health service and reflection, on one event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from moeoffload.control.bridge import CallContext
from moeoffload.control.credentials import ServerCredentials
from moeoffload.control.gate import FIRST_S, Gate
from moeoffload.control.protocol import SERVER_OPTIONS
from moeoffload.control.service import STEP_S, ExpertBackend, ExpertServicer
from moeoffload.control.user_token import UserToken, numeric_loopback
from moeoffload.control.v1 import expert_service_pb2 as pb
from moeoffload.control.v1 import expert_service_pb2_grpc as pb_grpc
from moeoffload.errors import ServerError
from moeoffload.refusals import Refusals

SERVICE_NAME: Final = pb.DESCRIPTOR.services_by_name["ExpertService"].full_name
_START_S: Final = 30.0
_READY_THREADS: Final = 3
_STOP_S: Final = 2.0
MOST_CALLS: Final = 64
"""Calls at a time, each of which holds a thread; further ones wait. Those that say nothing end after some seconds."""


class ControlServer:
    """Listens and serves from `start` to `stop`. ``port`` is the real one, also when 0 was asked for."""

    def __init__(self, gate: Gate, servicer: ExpertServicer) -> None:
        self.port = 0
        self._gate = gate
        self._servicer = servicer
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="control", daemon=True)
        self._user_token: UserToken | None = None
        gate.loop = self._loop

    @classmethod
    def start(
        cls,
        host: str,
        port: int,
        backend: ExpertBackend,
        credentials: ServerCredentials,
        refusals: Refusals,
        *,
        first_s: float = FIRST_S,
        step_s: float = STEP_S,
    ) -> ControlServer:
        """Listens on ``host``:``port`` and serves ``backend``, the standard health service and reflection.

        Calls that ``credentials`` do not allow are refused and added to ``refusals``; health checks are open to all. A
        call has to say what it wants within ``first_s`` seconds, a host goes on attaching within ``step_s``.

        Raises:
            ServerError: the address cannot be bound.
            SystemLimitError: there is no place for the token of a server that is for its own user.
        """
        control = cls(Gate(credentials, refusals, first_s), ExpertServicer(backend, first_s, step_s))
        control._thread.start()
        try:
            control._do(control._open(host, port, credentials), _START_S)
        except BaseException:
            control._end()
            raise
        return control

    def set_serving(self, serving: bool) -> None:
        """Tells the health service, for the whole server and for the expert service. From any thread; does not wait."""
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._set_serving(serving), self._loop)

    def stop(self, grace_s: float) -> None:
        """Stops listening; calls still running after ``grace_s`` seconds are cancelled. Idempotent."""
        if self._loop.is_closed():
            return
        if self._user_token is not None:
            self._user_token.remove()
        try:
            self._do(self._close(grace_s), grace_s + _STOP_S)
        except TimeoutError:
            logging.getLogger(__name__).warning("the control plane did not stop within %g s", grace_s + _STOP_S)
        self._end()

    async def _open(self, host: str, port: int, credentials: ServerCredentials) -> None:
        self._health = _Health()
        # They write a traceback for every text in the head of a call that is not UTF-8, and for bytes that are no
        # message of reflection, and go on.
        for name in ("grpc._cython.cygrpc", "grpc._common"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        calls = ThreadPoolExecutor(MOST_CALLS, thread_name_prefix="call")
        # Made now, some threads can still refuse calls when the system gives no more.
        made = threading.Barrier(_READY_THREADS)
        for _ in range(_READY_THREADS):
            calls.submit(made.wait, _START_S)
        self._server = grpc.server(
            calls,
            interceptors=[self._gate],
            options=SERVER_OPTIONS,
        )
        pb_grpc.add_ExpertServiceServicer_to_server(self._servicer, self._server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        self.port = self._bind(host, port, credentials.tls)
        if credentials.same_user and credentials.token is not None:
            self._user_token = UserToken.write(host, self.port, credentials.token)
            self._gate.whose_token = (
                f"the one in {self._user_token.path}, which hosts of its own user find by themselves; for others start "
                "it with --token-file or --client-ca"
            )
        await self._set_serving(True)
        self._server.start()

    def _bind(self, host: str, port: int, tls: grpc.ServerCredentials | None) -> int:
        """The port that the server got.

        Raises:
            ServerError: it is taken, or the address is not of this machine.
        """
        numeric = numeric_loopback(host)
        address = f"[{numeric}]:{port}" if ":" in numeric else f"{numeric}:{port}"
        try:
            if tls is not None:
                return self._server.add_secure_port(address, tls)
            return self._server.add_insecure_port(address)
        except RuntimeError:
            raise ServerError(f"cannot listen on {host}:{port}; is another server running there?") from None

    async def _set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        self._health.statuses = {"": status, SERVICE_NAME: status}

    async def _close(self, grace_s: float) -> None:
        await self._set_serving(False)
        try:
            stopped = self._server.stop(grace_s)
        except RuntimeError:  # its wait takes a thread, and the system gives none
            stopped = self._server.stop(None)
        until = self._loop.time() + grace_s + _STOP_S / 2
        while not stopped.is_set() and self._loop.time() < until:
            await asyncio.sleep(0.02)
        rest = asyncio.all_tasks() - {asyncio.current_task()} - self._servicer.closing
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        await self._servicer.close()

    def _do(self, work: Coroutine[Any, Any, None], timeout_s: float) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_S)
        if not self._thread.is_alive():
            self._loop.close()


class _Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Without Watch, with which a peer that shows no token would keep its connection for ever. Check is the way."""

    def __init__(self) -> None:
        self.statuses: dict[str, Any] = {}

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: CallContext
    ) -> health_pb2.HealthCheckResponse:
        """See the proto file of gRPC's health service."""
        status = self.statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: object, context: CallContext) -> AsyncIterator[object]:
        """Is not there."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Watch is not offered; use Check")
        yield
