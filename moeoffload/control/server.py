"""The listening control plane: gRPC with its own TLS, the health service and reflection.

gRPC's asyncio server would need fewer threads, but it stops accepting calls for good at the first path that is not
UTF-8 (grpcio 1.85).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from moeoffload.config import bracketed
from moeoffload.control.credentials import ServerCredentials
from moeoffload.control.gate import FIRST_S, Gate
from moeoffload.control.protocol import SERVER_OPTIONS
from moeoffload.control.user_token import UserToken, numeric_loopback
from moeoffload.control.v1 import expert_service_pb2 as pb
from moeoffload.control.v1 import expert_service_pb2_grpc as pb_grpc
from moeoffload.errors import SettingError
from moeoffload.last_resort import check_room_for_thread, start
from moeoffload.logs import Refusals

SERVICE_NAME: Final = pb.DESCRIPTOR.services_by_name["ExpertService"].full_name
MOST_CALLS: Final = 64
"""Most calls at a time; further ones wait. Calls that send no request end after some seconds."""
_STOP_S: Final = 2.0


class CallThreads(Executor):
    """The threads in which gRPC runs calls: one per call, which ends with it, and one that waits for the next call.

    So calls can be refused even when the system allows no more threads. A ThreadPoolExecutor would never shrink below
    the most threads that it ever needed at once.
    """

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._n_threads = self._n_idle = 0
        self._ended = False
        self._add_thread()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Runs ``fn`` in a thread of its own, or after another call if no thread is available."""
        done: Future[Any] = Future()

        def call() -> None:
            try:
                done.set_result(fn(*args, **kwargs))
            except BaseException as error:
                done.set_exception(error)

        with self._changed:
            self._calls.append(call)
            if self._n_idle <= len(self._calls):
                self._add_thread()
            self._changed.notify()
        return done

    def end(self, timeout_s: float) -> bool:
        """Lets the threads end; returns whether all running calls have ended within ``timeout_s`` seconds."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._n_threads == 0, timeout_s)

    def _add_thread(self) -> None:
        if self._n_threads >= MOST_CALLS or self._ended:
            return
        try:
            start(threading.Thread(target=self._run, name="call", daemon=True))
        except RuntimeError:
            return  # the system allows no more: existing threads serve, or refuse, the waiting calls
        self._n_threads += 1
        self._n_idle += 1

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self._ended)
                self._n_idle -= 1
                call = self._calls.popleft() if self._calls else None
            if call is not None:
                call()
                del call
            with self._changed:
                if self._ended or self._n_idle > len(self._calls):
                    self._n_threads -= 1
                    self._changed.notify_all()
                    return
                self._n_idle += 1


class ControlServer:
    """Listens and serves until `stop`. ``port`` is the actual port, even if port 0 was given."""

    def __init__(
        self,
        host: str,
        port: int,
        servicer: pb_grpc.ExpertServiceServicer,
        credentials: ServerCredentials,
        refusals: Refusals,
        *,
        first_s: float = FIRST_S,
    ) -> None:
        """Listens on ``host``:``port`` and serves the expert service, the standard health service and reflection.

        Calls that ``credentials`` do not allow are refused and added to ``refusals``; health checks are open to all. A
        call must send its request within ``first_s`` seconds.
        Raises SettingError: the address cannot be bound; SystemLimitError: there is no folder for the token of a server
        that serves its own user only.
        """
        # gRPC logs a traceback for every call header that is not UTF-8, although it goes on.
        logging.getLogger("grpc._cython.cygrpc").setLevel(logging.CRITICAL)
        gate = Gate(credentials, refusals, first_s)
        self._user_token: UserToken | None = None
        self._calls = CallThreads()
        self._health = _Health(experimental_non_blocking=False)
        self._server = grpc.server(self._calls, interceptors=[gate], options=SERVER_OPTIONS)  # type: ignore[arg-type]
        pb_grpc.add_ExpertServiceServicer_to_server(servicer, self._server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        address = f"{bracketed(numeric_loopback(host))}:{port}"
        try:
            if credentials.tls is not None:
                self.port = self._server.add_secure_port(address, credentials.tls)
            else:
                self.port = self._server.add_insecure_port(address)
        except RuntimeError:
            raise SettingError(f"--listen: cannot listen at {host}:{port}; is another server running there?") from None
        if credentials.same_user and credentials.token is not None:
            token = self._user_token = UserToken.write(host, self.port, credentials.token)
            gate.whose_token = (
                f"the one in {token.path}, which hosts of its own user find by themselves; for others start it with "
                "--token-file or --client-ca"
            )
        self.set_serving(True)
        self._server.start()

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
        try:  # a graceful stop needs a thread
            check_room_for_thread()
            ended = self._server.stop(grace_s)
        except RuntimeError:
            ended = self._server.stop(None)
        if not ended.wait(grace_s + _STOP_S) or not self._calls.end(_STOP_S):
            logging.getLogger(__name__).warning("the control plane did not stop within %g s", grace_s + _STOP_S)


class _Health(health.HealthServicer):  # type: ignore[misc]
    """The health service with Check only: with Watch a peer without a token could hold its connection forever."""

    def Watch(self, request: object, context: Any, send_response_callback: object = None) -> Iterator[object]:
        """Refuses the call."""
        context.set_code(grpc.StatusCode.UNIMPLEMENTED)
        context.set_details("Watch is not offered; use Check")
        return iter(())
