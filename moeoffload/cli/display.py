"""What the user sees on stderr: progress on temporary lines, and a permanent line after each answer."""

from __future__ import annotations

import itertools
import logging
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TextIO

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from moeoffload.config import HostSettings
from moeoffload.logs import DATED_FORMAT, log_to
from moeoffload.text import one_line

if TYPE_CHECKING:
    from moeoffload.host.attach import OnProgress
    from moeoffload.host.generate import Answer, Watch
    from moeoffload.host.session import OffloadedModel

_LOG_FORMAT: Final = "%(levelname)s %(name)s: %(message)s"
_MIB: Final = 1 << 20
_WIDTH: Final = 100  # characters of the newest log line that are shown
_NAMED_SERVERS: Final = 3  # in the line after an answer; if there are more, only their number is shown
_ECHO: Final = 2
"""Columns of the ^C that a terminal writes after a temporary line, which could not be erased if this wrapped it."""


class _TemporaryLines(Progress):
    """Lines of progress with room for the echo of Ctrl-C."""

    def get_renderables(self) -> Iterable[RenderableType]:
        """See `Progress`."""
        yield from map(_Narrower, super().get_renderables())


@dataclass(frozen=True)
class _Narrower:
    content: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from console.render(self.content, options.update_width(max(1, options.max_width - _ECHO)))


class Display:
    """Writes to stderr, logs too; temporary lines only on terminals. With ``quiet`` only warnings and errors are
    written."""

    def __init__(
        self, settings: HostSettings, *, verbose: bool = False, quiet: bool = False, dated: bool = False
    ) -> None:
        """Log lines have a time if they are ``dated``."""
        self.console = Console(stderr=True)
        self.is_verbose = verbose and not quiet
        self.is_quiet = quiet
        self._hidden = quiet or not self.console.is_terminal
        level = "INFO" if self.is_verbose else settings.log_level.upper()
        log_to(log_handler(self.console), level, DATED_FORMAT if dated else _LOG_FORMAT)

    def say(self, text: str) -> None:
        """Writes a permanent line."""
        if not self.is_quiet:
            self.console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def working(self, text: str) -> Iterator[OnProgress]:
        """Shows ``text``, then the newest log line; yields a function that updates each loading server's bar."""
        with self._lines() as lines:
            first, servers = lines.add_task(text, total=None, count=""), dict[str, TaskID]()

            def on_progress(address: str, loaded: int, total: int) -> None:
                if address not in servers:
                    servers[address] = lines.add_task(f"loading {address}", total=total, count="")
                lines.update(servers[address], completed=loaded, total=total, count=bytes_of(loaded, total))

            with _newest_log_line(lambda newest: lines.update(first, description=newest), hidden=self._hidden):
                yield on_progress

    @contextmanager
    def answering(self, should_stop: Callable[[], bool] = lambda: False) -> Iterator[Watch]:
        """Yields a watch that shows how many tokens of a prompt are computed, and then how many the answer has unless
        its text may be seen itself."""
        from moeoffload.host.generate import Watch

        is_seen = self._hidden or (sys.stdout is not None and _may_be_on_a_terminal(sys.stdout))
        with self._lines() as lines:
            task = lines.add_task("prompt", total=None, count="")

            def on_prompt(done: float, total: int) -> None:
                nonlocal task
                lines.update(task, completed=done, total=total, count=f"{done:,.0f} of {total:,} tokens")
                if done < total:
                    return
                if is_seen:
                    lines.stop()  # the answer's text follows
                else:
                    lines.remove_task(task)
                    task = lines.add_task("answer", total=None, count="")

            yield Watch(
                on_prompt, should_stop, lambda n: None if is_seen else lines.update(task, count=f"{n:,} tokens")
            )

    @contextmanager
    def counting(self, what: str, total: int) -> Iterator[Callable[[], None]]:
        """Shows how many of ``total`` are done; yields a function to call after each."""
        with self._lines() as lines:
            task, done = lines.add_task(what, total=total, count=f"0 of {total}"), itertools.count(1)

            def advance() -> None:
                number = next(done)
                lines.update(task, completed=number, count=f"{number} of {total}")

            yield advance

    @contextmanager
    def stopping(self) -> Iterator[Callable[[int, float], None]]:
        """Yields a function that shows how many requests still run, and how many seconds they have left; from its first
        call on the line stays. Later calls may come from any thread."""
        lines = self._lines(with_bars=False)

        def show(n_requests: int, left_s: float) -> None:
            text = f"{n_requests} request{'s' * (n_requests != 1)} still running, {left_s:.0f} s left"
            text += "; Ctrl-C again ends at once"
            if not lines.tasks:
                lines.add_task(text)
                lines.start()
            lines.update(lines.tasks[0].id, description=text)

        try:
            yield show
        finally:
            lines.stop()

    def answered(self, answer: Answer, offloaded: OffloadedModel) -> None:
        """Writes the line after an answer."""
        servers = [f"{link.info.address} ({link.info.transport})" for link in offloaded.links]
        named = ", ".join(servers) if len(servers) <= _NAMED_SERVERS else f"{len(servers)} expert servers"
        n_tokens, most = answer.tokens.numel(), offloaded.settings.max_new_tokens
        limit = "all that --max-new-tokens allows" if n_tokens == most else "the context is full"
        why = {"LIMIT": f" ({limit})", "STOPPED": " (stopped)"}.get(answer.ending.name, "")
        rate = [f"{answer.tokens_per_s:.3g} tokens/s"] if n_tokens > 1 else []  # the first one's time is the prompt's
        parts = [
            f"{n_tokens} token{'s' * (n_tokens != 1)}{why}",
            *rate,
            f"first after {answer.first_token_s:.2f} s",
            named or "all experts on this host",
        ]
        self.say(" · ".join(parts))

    def _lines(self, *, with_bars: bool = True) -> Progress:
        return temporary_lines(self.console, hidden=self._hidden, with_bars=with_bars)


def temporary_lines(console: Console, *, hidden: bool, with_bars: bool = True) -> Progress:
    """Returns lines that show progress until they are stopped; a task's field ``count`` is shown beside its bar."""
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False)
    more = (BarColumn(), TextColumn("{task.fields[count]}"), TimeElapsedColumn()) if with_bars else ()
    return _TemporaryLines(*columns, *more, console=console, transient=True, disable=hidden)


def bytes_of(loaded: int, total: int) -> str:
    """What a loading bar counts."""
    return f"{loaded / _MIB:,.0f} of {total / _MIB:,.0f} MiB"


def log_handler(console: Console) -> logging.Handler:
    """Returns a handler that writes each record as one unwrapped line, above the temporary lines."""
    handler = logging.Handler()

    def emit(record: logging.LogRecord) -> None:
        try:
            text = Text(handler.format(record))
            console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)
        except Exception:  # as in the handlers of `logging`
            handler.handleError(record)

    handler.emit = emit  # type: ignore[method-assign]
    return handler


def _may_be_on_a_terminal(stdout: TextIO) -> bool:
    """Whether temporary lines might get between the text on ``stdout``: a pipe may end at the terminal, too."""
    return stdout.isatty() or stat.S_ISFIFO(os.fstat(stdout.fileno()).st_mode)


@contextmanager
def _newest_log_line(show: Callable[[str], None], *, hidden: bool) -> Iterator[None]:
    """While open, calls ``show`` with each line that moeoffload logs at INFO or above, for any log level."""
    log, handler = logging.getLogger("moeoffload"), logging.Handler()
    handler.emit = lambda record: show(one_line(record.getMessage(), _WIDTH))  # type: ignore[method-assign]
    level = log.level
    if not hidden:
        log.addHandler(handler)
        log.setLevel(min(logging.INFO, log.getEffectiveLevel()))
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
