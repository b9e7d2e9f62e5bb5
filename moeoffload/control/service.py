"""The expert service: gRPC calls in, calls on an `ExpertBackend` out. Runs on the control plane's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from moeoffload.control.bridge import CallContext
from moeoffload.control.protocol import PROTOCOL_VERSION
from moeoffload.control.status import refusal_of
from moeoffload.control.v1 import expert_service_pb2 as pb
from moeoffload.control.v1 import expert_service_pb2_grpc as pb_grpc
from moeoffload.control.validate import clean_texts
from moeoffload.errors import DeadlineError, MoeOffloadError, ProtocolError, ServerError
from moeoffload.text import one_line

logger = logging.getLogger(__name__)

STEP_S: Final = 60.0
"""Seconds that a host may take between the steps of an attach, beside its calls that run."""
MAX_UNREAD: Final = 4
"""Steps of an attach that may wait while one is done; a host sends one at a time."""
REASON_LENGTH: Final = 200
_Event: TypeAlias = pb.AttachRequest | pb.AttachReply | Exception | str
_T = TypeVar("_T")


class BackendLease(Protocol):
    """One host on the server. Closing it frees everything that belongs to it."""

    lease_id: str

    def calibrate(self, request: pb.CalibrateRequest) -> pb.CalibrateReply:
        """Times a few experts of a model."""

    def load(self, request: pb.LoadExpertsRequest) -> Iterator[pb.LoadProgress]:
        """Makes experts resident, step by step."""

    def activate(self, request: pb.Activate) -> pb.Offer:
        """Checks what the host wants against what is loaded and opens the server's ends of the channels."""

    def accept(self, request: pb.Accept) -> pb.Ready:
        """Keeps the channel the host has chosen, closes the others."""

    def close(self, reason: str) -> None:
        """Frees everything. Idempotent."""


class ExpertBackend(Protocol):
    """What the service needs of the expert server behind it. Calls that take long run in threads of their own."""

    def describe(self, request: pb.DescribeRequest) -> pb.DescribeReply:
        """What the server is and offers."""

    def open_lease(self, hello: pb.Hello, peer: str, say: Callable[[pb.AttachReply], None]) -> BackendLease:
        """A new lease of a host at the address ``peer``; ``say``, from any thread, sends it a message.

        The lease ends after a ``closing``.
        """

    def find_lease(self, lease_id: str) -> BackendLease:
        """The open lease with this id."""

    def stats(self) -> pb.StatsReply:
        """Counters since start."""

    def drain(self) -> int:
        """No new leases from now on; returns how many there still are."""


class ExpertServicer(pb_grpc.ExpertServiceServicer):
    """Translates between gRPC and the backend; refuses other protocol versions; ties leases to their streams."""

    def __init__(self, backend: ExpertBackend, first_s: float, step_s: float = STEP_S) -> None:
        self._backend = backend
        self._first_s = first_s
        self._step_s = step_s
        self._working: dict[str, asyncio.Task[Any] | None] = {}
        """By lease the call that runs beside its stream: one at a time."""
        self.closing: set[asyncio.Task[None]] = set()
        """Leases that are being closed; not to be cancelled."""

    async def close(self) -> None:
        """Waits until all leases whose streams have ended are closed."""
        while self.closing:
            await asyncio.wait(self.closing)

    async def Describe(self, request: pb.DescribeRequest, context: CallContext) -> pb.DescribeReply:
        """See the proto file."""
        return self._backend.describe(request)

    async def Stats(self, request: pb.StatsRequest, context: CallContext) -> pb.StatsReply:
        """See the proto file."""
        return self._backend.stats()

    async def Drain(self, request: pb.DrainRequest, context: CallContext) -> pb.DrainReply:
        """See the proto file."""
        return pb.DrainReply(leases=self._backend.drain())

    async def Calibrate(self, request: pb.CalibrateRequest, context: CallContext) -> pb.CalibrateReply:
        """See the proto file."""
        async with self._only_call(request.lease_id, "calibration") as lease:
            return await in_thread(lambda: lease.calibrate(request), "calibrate")

    async def LoadExperts(self, request: pb.LoadExpertsRequest, context: CallContext) -> AsyncIterator[pb.LoadProgress]:
        """See the proto file."""
        async with self._only_call(request.lease_id, "loading") as lease:
            steps: asyncio.Queue[pb.LoadProgress | None] = asyncio.Queue()
            loop = asyncio.get_running_loop()
            given_up = threading.Event()

            def load() -> None:
                for step in lease.load(request):
                    loop.call_soon_threadsafe(steps.put_nowait, step)
                    if given_up.is_set():
                        return

            def loaded(task: asyncio.Task[None]) -> None:
                task.exception()  # seen, also when nobody waits for it any more
                steps.put_nowait(None)

            loading = asyncio.create_task(in_thread(load, "load"))
            loading.add_done_callback(loaded)
            try:
                while (step := await steps.get()) is not None:
                    yield step
                await loading
            finally:
                given_up.set()

    @contextlib.asynccontextmanager
    async def _only_call(self, lease_id: str, what: str) -> AsyncIterator[BackendLease]:
        """The lease, while a call works for it that has its stream as its end."""
        lease = self._backend.find_lease(lease_id)
        if lease_id in self._working:
            raise ServerError("this lease has a call that is not finished; one at a time")
        self._working[lease_id] = asyncio.current_task()
        try:
            yield lease
        except MoeOffloadError as error:
            logger.error("%s failed: %s", what, one_line(str(error)))
            raise
        finally:
            del self._working[lease_id]

    async def Attach(
        self, requests: AsyncIterator[pb.AttachRequest], context: CallContext
    ) -> AsyncIterator[pb.AttachReply]:
        """See the proto file."""
        loop = asyncio.get_running_loop()
        # Requests of the host, messages of the server, or why there will be no more requests: one place to wait.
        events: asyncio.Queue[_Event] = asyncio.Queue()
        collecting = asyncio.create_task(_collect(requests, events))
        steps = _Steps()
        lease: BackendLease | None = None
        ready = False
        reason = "the host is gone"

        def say(reply: pb.AttachReply) -> None:
            with contextlib.suppress(RuntimeError):  # the control plane has stopped, and the host knows it
                loop.call_soon_threadsafe(events.put_nowait, reply)

        try:
            while not isinstance(event := await self._next_event(events, lease, ready=ready), str):
                if isinstance(event, Exception):
                    raise event
                if isinstance(event, pb.AttachReply):
                    yield event
                    if event.WhichOneof("step") == "closing":
                        reason = event.closing.reason
                        return
                    continue
                step = event.WhichOneof("step")
                if lease is None:
                    hello = _checked_hello(event)
                    # Without the port, which each connection has of its own.
                    peer = str(context.peer()).rpartition(":")[0]
                    lease = self._backend.open_lease(hello, peer, say)
                    yield pb.AttachReply(welcome=pb.Welcome(lease_id=lease.lease_id))
                elif step == "activate":
                    yield pb.AttachReply(offer=await steps.run(lease.activate, event.activate))
                elif step == "accept":
                    clean_texts(event.accept, REASON_LENGTH)
                    yield pb.AttachReply(ready=await steps.run(lease.accept, event.accept))
                    ready = True
                else:
                    raise ServerError(f"attach step {step} is not expected here")
            reason = event
        except Exception as error:
            refusal = refusal_of(error)
            reason = one_line(str(refusal))
            raise refusal from error
        finally:
            collecting.cancel()
            if lease is not None:
                if (call := self._working.get(lease.lease_id)) is not None:
                    call.cancel()  # it may wait for a peer that does not take its answers
                # In a task of its own: gRPC cancels this one when the host goes, or the server stops.
                await asyncio.shield(self._in_background(steps.close(lease, reason)))

    async def _next_event(self, events: asyncio.Queue[_Event], lease: BackendLease | None, *, ready: bool) -> _Event:
        """What happens next on the stream of an attach.

        Raises:
            DeadlineError: the host does not say what it wants, or has a lease and does not come to use it.
        """
        while True:
            patience_s = None if ready else self._first_s if lease is None else self._step_s
            try:
                async with asyncio.timeout(patience_s):
                    return await events.get()
            except TimeoutError:
                if lease is None or lease.lease_id not in self._working:
                    raise DeadlineError(f"the host took more than {patience_s:g} s for a step of attaching") from None

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self.closing.add(task)
        task.add_done_callback(self.closing.discard)
        return task


class _Steps:
    """The calls of one lease that follow each other, each in a thread, also if nobody waits for them any more."""

    def __init__(self) -> None:
        self._running: asyncio.Task[Any] | None = None

    async def run(self, step: Callable[[Any], _T], request: object) -> _T:
        self._running = asyncio.create_task(in_thread(lambda: step(request), "attach"))
        return await asyncio.shield(self._running)

    async def close(self, lease: BackendLease, reason: str) -> None:
        """Closes ``lease`` when the step that runs is done."""
        if self._running is not None:
            await asyncio.gather(self._running, return_exceptions=True)
        try:
            await in_thread(lambda: lease.close(reason), "lease-close")
        except RuntimeError:  # no thread can be started: other hosts' calls wait, and nothing of this one is kept
            lease.close(reason)


async def in_thread(work: Callable[[], _T], name: str) -> _T:
    """The result of ``work``, which runs in a thread that ends with it: an idle server keeps none.

    Raises:
        RuntimeError: no thread can be started.
    """
    done: Future[_T] = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(done)


def _checked_hello(event: pb.AttachRequest) -> pb.Hello:
    step = event.WhichOneof("step")
    if step != "hello":
        raise ServerError(f"attach begins with {step}, expected hello")
    if event.hello.protocol_version != PROTOCOL_VERSION:
        raise ServerError(
            f"protocol version is {event.hello.protocol_version} (host), this server speaks {PROTOCOL_VERSION}"
        )
    clean_texts(event.hello)
    return event.hello


async def _collect(requests: AsyncIterator[pb.AttachRequest], events: asyncio.Queue[_Event]) -> None:
    """Puts the requests of one stream into ``events``, and at last why there are no more."""
    try:
        async for request in requests:
            if events.qsize() >= MAX_UNREAD:
                events.put_nowait(ProtocolError(f"more than {MAX_UNREAD} steps of an attach at a time"))
                return
            events.put_nowait(request)
    except Exception as error:
        events.put_nowait(error)
    else:
        events.put_nowait("the host ended the lease")
