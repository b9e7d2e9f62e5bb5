"""``moeoffload-expert``: serves routed experts from this machine's memory."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from types import FrameType
from typing import Annotated

import typer

from moeoffload.cli.imports import quick_imports
from moeoffload.cli.options import Command, version_option, with_settings
from moeoffload.cli.signals import leave_at_once_on_ctrl_c
from moeoffload.config import ExpertServerSettings
from moeoffload.logs import DATED_FORMAT, log_to
from moeoffload.model_name import check_hub_id, named_path

app = typer.Typer(pretty_exceptions_enable=False)


@app.command(cls=Command)
@with_settings(ExpertServerSettings)
def serve(
    settings: ExpertServerSettings,
    exit_with_stdin: Annotated[bool, typer.Option("--exit-with-stdin", hidden=True)] = False,
    version: bool = version_option("moeoffload-expert"),
) -> None:
    """Keep routed experts in this machine's memory and compute them for hosts.

    Prints one line with its address on stdout when it is ready; logs go to stderr. SIGTERM lets hosts finish and move
    on first, for up to --drain-timeout-s; Ctrl-C, or a second SIGTERM, stops it at once.
    """
    bars = None
    if sys.stderr is not None and sys.stderr.isatty():
        from moeoffload.cli.load_bars import LoadBars  # rich is not imported for a log

        bars = LoadBars()
    log_to(
        logging.StreamHandler() if bars is None else bars.log_handler(),
        settings.log_level.upper(),
        DATED_FORMAT,
    )
    log = logging.getLogger("moeoffload.expert_server")
    watched = [sys.stdin.fileno()] if exit_with_stdin else []
    for file in watched:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # also where the host ignores it
        _interrupt_at_the_end_of(file)
    if settings.model is not None and named_path(settings.model) is None:
        log.info("looking for %s, in the local cache and on the hub", settings.model)
        check_hub_id(settings.model, None)  # now rather than when the first host attaches
    log.info("importing torch")
    with quick_imports():  # nothing to clean up yet: a signal ends the process at once
        # torch takes seconds to import; --help, --version and setting errors need not wait for it.
        from moeoffload.expert_server.server import ExpertServer

    # The C-level signal handler writes the signal's number into the pipe, in whichever thread the signal arrives. A
    # Python handler alone would run only in this thread, once it stops waiting; a signal that another thread
    # takes would not wake it.
    stopped, stop = os.pipe()
    os.set_blocking(stop, False)
    signal.set_wakeup_fd(stop)
    _handle_signals(_in_the_pipe)

    watch_load = None if bars is None else bars.show
    server = ExpertServer(settings, on_drained=lambda: os.write(stop, b"d"), watch_load=watch_load)
    devices = ", ".join(map(str, server.parts.devices))
    log.info(
        "device %s, %.4g GiB for experts, transports %s",
        devices,
        server.parts.store.budget_bytes / (1 << 30),
        ", ".join(server.parts.factories),
    )
    try:
        print(f"moeoffload-expert ready on {server.address} ({devices})", flush=True)
        # The import takes seconds, which the first host should not wait for; if it fails, that host gets the error.
        with (
            contextlib.suppress(MemoryError, OSError, ImportError, KeyboardInterrupt),
            _signals_raise(),
            quick_imports(),
        ):
            import_module("moeoffload.checkpoint")
        if _wait(stopped, watched) == signal.SIGTERM:
            log.info("draining: %d leases", server.service.drain())
            # Ends at another signal, when the last host has left, or at the timeout.
            _wait(stopped, watched, settings.drain_timeout_s)
    finally:
        server.stop()
        if bars is not None:
            bars.close()  # a layer that is still being read does not keep the process
    log.info("stopped")


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """While open, a signal, whose number is in the pipe, too, raises KeyboardInterrupt in the main thread."""
    _handle_signals(signal.default_int_handler)
    try:
        yield
    finally:
        _handle_signals(_in_the_pipe)


def _handle_signals(handler: Callable[[int, FrameType | None], object]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)


def _in_the_pipe(number: int, frame: FrameType | None) -> None:
    """Does nothing: the signal is read from the pipe."""


def _interrupt_at_the_end_of(pipe: int) -> None:
    """Has the system send Ctrl-C once ``pipe`` is closed: while this process imports, it cannot `_wait`. Only Linux
    can send another signal than SIGIO."""
    if sys.platform == "linux":
        fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGINT)
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([pipe], [], [], 0)[0]:
        os.kill(os.getpid(), signal.SIGINT)  # closed before


def _wait(stopped: int, watched: list[int], timeout_s: float | None = None) -> int:
    """Returns the number of the signal that arrived, or ``d`` as a number if the server has drained; else 0: after
    ``timeout_s`` seconds, or when a file of ``watched`` is closed, that is, when the process that started the server
    has ended. Nothing is written to these files."""
    ready = select.select([stopped, *watched], [], [], timeout_s)[0]
    return os.read(stopped, 1)[0] if stopped in ready else 0


def main() -> None:
    """Entry point of ``moeoffload-expert``."""
    leave_at_once_on_ctrl_c()
    app()


if __name__ == "__main__":
    main()
