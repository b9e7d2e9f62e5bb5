"""What the commands of a host have in common: opening a model, and ending in order."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Final, NoReturn

from moeoffload.config import HostSettings

if TYPE_CHECKING:
    from moeoffload.host.report import Report
    from moeoffload.host.session import OffloadedModel

LOG_FORMAT: Final = "%(levelname)s %(name)s: %(message)s"


def open_with_progress(model: str, settings: HostSettings, revision: str | None) -> OffloadedModel:
    """Opens the model, with a progress bar for each server while it loads; see `open_model` for what it raises."""
    # torch and transformers take seconds to import; --help, --version and setting errors need not wait for them.
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    from moeoffload.host.session import open_model

    console = Console(stderr=True)
    columns = (TextColumn("loading {task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks: dict[str, TaskID] = {}

        def on_progress(address: str, loaded: int, total: int) -> None:
            if address not in tasks:
                tasks[address] = bar.add_task(address, total=total)
            bar.update(tasks[address], completed=loaded)

        return open_model(model, settings=settings, revision=revision, on_progress=on_progress)


def write_report(report: Report, settings: HostSettings) -> None:
    """Writes the report to the file that the settings name, if they do."""
    if settings.report is not None:
        settings.report.write_text(json.dumps(report.to_json(), indent=2) + "\n")


@contextmanager
def sigterm_unwinds() -> Iterator[None]:
    """SIGTERM ends the command through its ``finally`` blocks, so that servers are stopped and leases ended."""

    def on_term(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, on_term)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
