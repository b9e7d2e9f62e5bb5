"""Opening a model and writing its report, shared by the commands of a host."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from moeoffload.cli.display import Display
from moeoffload.cli.imports import import_transformers, quick_imports
from moeoffload.cli.signals import signals_unwind
from moeoffload.config import HostSettings
from moeoffload.host.spawn import devices_before_torch, spawned_servers
from moeoffload.model_name import check_hub_id, check_revision, named_path

if TYPE_CHECKING:
    from moeoffload.host.report import Report
    from moeoffload.host.session import OffloadedModel


@contextmanager
def open_with_progress(
    model: str, settings: HostSettings, revision: str | None, display: Display
) -> Iterator[OffloadedModel]:
    """Opens the model with progress on stderr, and closes it; see `open_model` for what it raises.

    Once there is something to close, Ctrl-C and SIGTERM unwind instead of ending the process.
    """
    check_revision(revision)
    with ExitStack() as stack:
        if named_path(model) is None:
            with display.working(f"looking for {model}, in the local cache and on the hub"):
                check_hub_id(model, revision)
        from moeoffload.control.credentials import HostCredentials  # imports gRPC, which --help need not wait for

        HostCredentials.of(settings)  # refuses files that it cannot use before a server is started
        devices = devices_before_torch(settings)
        spawned = stack.enter_context(spawned_servers(settings, devices)) if devices else None
        with display.working("importing torch and transformers") as on_progress:
            with quick_imports():
                # They take seconds to import; --help, --version and setting errors need not wait for them.
                import_transformers()
                from moeoffload.host.session import OffloadedModel

            stack.enter_context(signals_unwind())
            offloaded = OffloadedModel(model, settings, revision, on_progress, spawned, needs_tokenizer=True)
        try:
            yield offloaded
        finally:
            with display.working("leaving the expert servers"):
                offloaded.close()


def report_run(offloaded: OffloadedModel, display: Display) -> None:
    """Shows the report as tables if the display is verbose or the settings name a report file, unless it is quiet, and
    writes that file."""
    report = offloaded.report()
    if report.prompt_tokens and not display.is_quiet and (display.is_verbose or offloaded.settings.report is not None):
        display.console.print(report.table())
    write_report(report, offloaded.settings)


def write_report(report: Report, settings: HostSettings) -> None:
    """Writes the report to the file that the settings name, if any."""
    if settings.report is not None:
        settings.report.write_text(json.dumps(report.to_json(), indent=2) + "\n")
