"""``moeoffload serve``: answers many clients at a time over OpenAI's API."""

from __future__ import annotations

import contextlib
from typing import Annotated

import typer

from moeoffload.cli.display import Display
from moeoffload.cli.opening import open_with_progress, write_report
from moeoffload.cli.options import ModelName, Revision, with_settings
from moeoffload.config import ServeSettings, bracketed
from moeoffload.model_name import short_name

EXIT_GAVE_UP = 1  # some requests did not finish before the stop


@with_settings(ServeSettings)
def serve(
    settings: ServeSettings,
    model: ModelName,
    revision: Revision = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Log what happens and every HTTP request, on stderr.")
    ] = False,
) -> None:
    """Answer clients of OpenAI's API: chats and completions, many at a time.

    Prints one line with its address on stdout when it is ready. SIGTERM or Ctrl-C lets running requests finish first,
    for up to --drain-seconds; a second one stops it at once.
    """
    display = Display(settings, verbose=verbose, dated=True)
    # torch and transformers take seconds to import; --help, --version and setting errors need not wait for them.
    from moeoffload.serve.access import bind_socket, check_access

    check_access(settings)
    with (
        contextlib.closing(bind_socket(settings)) as listener,
        open_with_progress(model, settings, revision, display) as offloaded,
    ):
        from moeoffload.serve.api import create_app
        from moeoffload.serve.engine import ServingEngine
        from moeoffload.serve.server import HttpServer
        from moeoffload.serve.snapshot import Snapshots

        name = settings.served_model_name or short_name(model)
        scheme = "https" if settings.http_tls_cert is not None else "http"
        url = f"{scheme}://{bracketed(settings.bind)}:{listener.getsockname()[1]}/v1"
        with (
            display.stopping() as show_stopping,  # as long as the engine takes to end, too
            ServingEngine(offloaded, settings) as engine,
            contextlib.closing(Snapshots(offloaded, engine.stats)) as snapshots,
        ):
            app, answering = create_app(engine, offloaded.tokenizer, name, settings, snapshots.take)
            server = HttpServer(
                app,
                answering,
                engine,
                settings,
                on_ready=lambda: print(f"serving {name} at {url}", flush=True),
                on_stopping=lambda left_s: show_stopping(engine.n_requests, left_s),
            )
            with contextlib.closing(answering):
                server.run(sockets=[listener])
            write_report(offloaded.report(), settings)
    if not server.finished_all:
        raise typer.Exit(EXIT_GAVE_UP)
