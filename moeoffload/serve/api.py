"""The HTTP server's app: OpenAI's routes, and routes for operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response

from moeoffload.config import ServeSettings, is_loopback
from moeoffload.serve.access import read_api_key
from moeoffload.serve.answering import Answering
from moeoffload.serve.api_errors import MESSAGES_PATH, ApiError, bad_request, of_exception
from moeoffload.serve.dashboard import dashboard_page
from moeoffload.serve.engine import ServingEngine
from moeoffload.serve.guard import Guard
from moeoffload.serve.metrics import render_metrics
from moeoffload.text import one_line

_SPARE_PLACES: Final = 32
"""Requests that may be read while the engine is full, so that they get an error instead of a closed connection."""

_PROBED: Final = ["GET", "HEAD"]
"""Load balancers and monitors ask with either."""

Snapshot = Callable[[bool], dict[str, Any]]
"""Returns all statistics as plain data. The argument: whether to add times per layer and current figures."""


def create_app(
    engine: ServingEngine, tokenizer: Any, model_name: str, settings: ServeSettings, snapshot: Snapshot
) -> tuple[Guard, Answering]:
    """Returns the app that answers clients with ``engine``, and the part of it that can end running requests.

    ``model_name`` is the model's name for clients; ``tokenizer`` is copied for the prompt reader's thread.
    Raises SettingError: the API key file holds no key.
    """
    api_key = read_api_key(settings)
    room = settings.max_running + settings.max_waiting
    answering = Answering(engine, tokenizer, model_name, room)
    # No API documentation pages: they would load scripts from other sites.
    app = FastAPI(title="moeoffload", docs_url=None, redoc_url=None, openapi_url=None)
    _add_error_handlers(app)
    _add_openai_routes(app, answering)
    guard = Guard(
        app,
        api_key=api_key,
        loopback_only=api_key is None and is_loopback(settings.bind) and not settings.insecure,
        max_open=room + _SPARE_PLACES,
        on_busy=engine.note_refused,
    )
    _add_operator_routes(app, snapshot, engine, guard)
    return guard, answering


def _add_openai_routes(app: FastAPI, answering: Answering) -> None:
    def card() -> dict[str, Any]:
        return {"id": answering.model_name, "object": "model", "created": answering.created, "owned_by": "moeoffload"}

    for path, answer in (
        ("/v1/chat/completions", answering.chat),
        ("/v1/completions", answering.complete),
        ("/v1/responses", answering.respond),
        (MESSAGES_PATH, answering.message),
        (f"{MESSAGES_PATH}/count_tokens", answering.count_tokens),
    ):
        app.post(path, response_model=None)(answer)

    @app.post("/v1/embeddings", response_model=None)
    async def embed() -> Response:
        raise bad_request("/v1/embeddings is not supported: the model writes texts.", code="unsupported_endpoint")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card()]}

    # Model names may contain slashes.
    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        answering.check_model(name)
        return card()


def _add_operator_routes(app: FastAPI, snapshot: Snapshot, engine: ServingEngine, guard: Guard) -> None:
    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        content, content_type = render_metrics(snapshot(False))
        return Response(content, headers={"Content-Type": content_type})

    @app.get("/stats", response_model=None)
    async def stats() -> Response:
        return JSONResponse(snapshot(True))

    @app.get("/", response_model=None)
    async def root() -> Response:
        return RedirectResponse("/dashboard")

    @app.get("/dashboard", response_model=None)
    async def dashboard() -> Response:
        return HTMLResponse(dashboard_page())

    @app.api_route("/health", methods=_PROBED, response_model=None)
    async def health() -> Response:
        if engine.failure is not None:  # permanent: a supervisor should restart the server
            return JSONResponse({"status": "the engine has failed"}, 503)
        return JSONResponse({"status": "ok"})

    @app.api_route("/ready", methods=_PROBED, response_model=None)
    async def ready() -> Response:
        if guard.stopping:
            return JSONResponse({"status": "stopping"}, 503)
        return JSONResponse({"status": "ready"}) if engine.is_ready else JSONResponse({"status": "not ready"}, 503)


def _add_error_handlers(app: FastAPI) -> None:
    async def tell(request: Request, error: Exception) -> Response:
        path = request.url.path
        if not isinstance(error, HTTPException):
            return of_exception(error).response(path)
        message, code = str(error.detail), None
        if error.status_code in (404, 405):
            message, code = f"Unknown request URL: {request.method} {one_line(path, 200)}.", "unknown_url"
        return ApiError(error.status_code, message, code=code, headers=dict(error.headers or {})).response(path)

    for kind in (ApiError, RequestValidationError, HTTPException, RecursionError, Exception):
        app.add_exception_handler(kind, tell)
