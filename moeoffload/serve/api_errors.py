"""Errors in the form of OpenAI's API: a status, and JSON with message, type, parameter and code; and Anthropic's."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import Any, Final

from fastapi.exceptions import RequestValidationError
from starlette.responses import JSONResponse

from moeoffload.errors import BusyError, MoeOffloadError, PromptError, ServerError
from moeoffload.text import one_line

log = logging.getLogger(__name__)

MESSAGES_PATH: Final = "/v1/messages"
_TYPES: Final = {429: "requests", 500: "server_error", 503: "server_error"}
_ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
_OTHER_TYPE: Final = "invalid_request_error"
_LONGEST_MESSAGE: Final = 1000


@dataclass(eq=False)
class ApiError(Exception):
    """The error that a client receives instead of an answer."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.message = one_line(self.message, _LONGEST_MESSAGE)
        super().__init__(self.message)

    def body(self) -> dict[str, Any]:
        """The error as JSON, for a response or a stream."""
        kind = _TYPES.get(self.status, _OTHER_TYPE)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic_body(self) -> dict[str, Any]:
        """The error as JSON of Anthropic's API, with param and code of OpenAI's."""
        error = self.body()["error"] | {"type": _ANTHROPIC_TYPES.get(self.status, _OTHER_TYPE)}
        return {"type": "error", "error": error}

    def response(self, path: str) -> JSONResponse:
        """The error as a response to a request for ``path``."""
        body = self.anthropic_body() if path.startswith(MESSAGES_PATH) else self.body()
        return JSONResponse(body, self.status, self.headers)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request is not valid."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, reason: str = "") -> ApiError:
    """400: a parameter that would change the answer and that this server does not support."""
    return bad_request(f"Unsupported parameter: '{param}'{reason and f' ({reason})'}.", param, "unsupported_parameter")


def busy(message: str, after_s: float) -> ApiError:
    """429: the server is full."""
    return ApiError(429, message, code="rate_limit_exceeded", headers=_retry_after(after_s))


def unavailable(message: str, after_s: float) -> ApiError:
    """503: the server does not accept requests, or has ended this one."""
    return ApiError(503, message, code="server_unavailable", headers=_retry_after(after_s))


def of_exception(error: Exception) -> ApiError:
    """The error for clients; an unexpected ``error`` is logged and not quoted."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return _of_validation(error)
    if isinstance(error, RecursionError):  # what it holds goes to a chat template, a grammar, and back to its client
        return bad_request("The request is nested too deeply.")
    if isinstance(error, BusyError):
        return busy(str(error), error.retry_after_s)
    if isinstance(error, PromptError):
        return bad_request(str(error), code="context_length_exceeded" if "context" in str(error) else None)
    if isinstance(error, ServerError):
        return unavailable(str(error), 5.0)
    if isinstance(error, MoeOffloadError):
        return ApiError(500, str(error), code="engine_error")
    log.error("a request failed", exc_info=error)
    return ApiError(500, "The server had an error while processing the request.", code="internal_error")


def _of_validation(error: RequestValidationError) -> ApiError:
    """The error for a body that is not JSON or has a parameter of a wrong type or value."""
    details: list[Any] = list(error.errors())
    first: dict[str, Any] = dict(details[0]) if details else {"type": "", "loc": (), "msg": "invalid request"}
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return bad_request(f"The body of the request is no valid JSON ({reason}).", code="invalid_json")
    # A union reports one error per member: the parameter and its indices are followed by names of types.
    path = [part for part in first["loc"][1:] if isinstance(part, int) or part.isidentifier()]
    if not path:
        return bad_request("The body of the request must be a JSON object, sent as application/json.")
    param = str(path[0]) + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path[1:])
    if first["type"] == "missing":
        return bad_request(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    reason = str(first.get("ctx", {}).get("error", first["msg"]))
    code = "invalid_type" if first["type"].endswith("_type") else "invalid_value"
    return bad_request(f"Invalid '{param}': {reason}.", param, code)


def _retry_after(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, math.ceil(seconds)))}
