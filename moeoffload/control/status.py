"""Converts errors into gRPC statuses on the server, and statuses into errors with one readable line on the host."""

from __future__ import annotations

import logging
from typing import Final, NoReturn

import grpc

from moeoffload.errors import (
    BusyError,
    CapacityError,
    DeadlineError,
    MoeOffloadError,
    ProtocolError,
    ServerError,
    SystemLimitError,
)
from moeoffload.text import one_line

RETRY_AFTER: Final = "retry-after-ms"
"""Trailing metadata of a temporary refusal."""
MOST_RETRY_AFTER_S: Final = 60.0

logger = logging.getLogger(__name__)


def refusal_of(error: Exception) -> MoeOffloadError:
    """Returns the error that a host gets for ``error``: itself if raised on purpose, a system limit, or a bug."""
    if isinstance(error, MoeOffloadError):
        return error
    if (limit := SystemLimitError.from_exception(error)) is not None:
        logger.error("a call failed: %s", limit)
        return limit
    logger.error("a call failed", exc_info=error)
    return ServerError(f"the server failed ({type(error).__name__}); its log says more")


def abort(context: grpc.ServicerContext, error: Exception) -> NoReturn:
    """Ends a call with the status of ``error`` and one line of text, and with a retry delay if retrying can help."""
    refusal = refusal_of(error)
    code = grpc.StatusCode.FAILED_PRECONDITION
    if isinstance(refusal, CapacityError):
        code = grpc.StatusCode.RESOURCE_EXHAUSTED
    elif isinstance(refusal, ProtocolError):
        code = grpc.StatusCode.INVALID_ARGUMENT
    if isinstance(refusal, BusyError):
        context.set_trailing_metadata(((RETRY_AFTER, str(int(refusal.retry_after_s * 1000))),))
    context.abort(code, one_line(str(refusal)))


def error_of(error: grpc.RpcError, address: str, step: str) -> ServerError:
    """Returns the host's exception for a call ``step`` to the server at ``address`` that ended with ``error``."""
    assert isinstance(error, grpc.Call), "errors of calls are the calls themselves"
    code = error.code()
    details = one_line(error.details() or code.name)
    where = f"expert server {address}"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineError(f"{where}: no answer to {step} in time")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return ServerError(f"{where}: something answers there, but it is not a moeoffload expert server")
    if code is grpc.StatusCode.UNAVAILABLE:
        during = "" if step == "Attach" else f" during {step}"  # which lasts as long as the lease
        return ServerError(f"{where}: connection lost{during}; is moeoffload-expert still running there?")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        retry_after_s = _retry_after_s(error)
        text = f"{where}: {details}"
        return CapacityError(text) if retry_after_s is None else BusyError(text, retry_after_s)
    return ServerError(f"{where}: {details}")


def _retry_after_s(call: grpc.Call) -> float | None:
    """Returns after how many seconds the server suggests to retry; None if it does not say."""
    for name, value in call.trailing_metadata() or ():
        if name == RETRY_AFTER and isinstance(value, str) and value.isascii() and value.isdigit():
            return min(int(value[:9]) / 1000, MOST_RETRY_AFTER_S)
    return None
