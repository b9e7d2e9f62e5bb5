"""Reads a conversation's turns: from a terminal, with line history, or line by line from anything else."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import Final

import typer

from moeoffload.errors import PromptError
from moeoffload.text import is_unicode

QUOTES: Final = '"""'
_LOOK_S: Final = 0.2
"""How often a wait for the keyboard looks for signals."""


def read_turns(*, interactive: bool) -> Iterator[str]:
    """Yields each turn that is not empty, until stdin ends; several lines between `QUOTES` are one turn.

    The end of stdin ends such a turn, too, unless it was Ctrl-D on a terminal. On a terminal Ctrl-C discards the typed
    text, and a second one ends the conversation. Raises PromptError: a turn is not valid UTF-8.
    """
    is_second = False
    if interactive:
        with contextlib.suppress(ImportError):  # not on every system; `input` uses it once it is imported
            import readline

            readline.parse_and_bind("set enable-bracketed-paste on")  # lines pasted together are one turn
    while True:
        try:
            with _signals_are_seen() if interactive else contextlib.nullcontext():
                turn = _read_turn(interactive)
        except EOFError:
            if interactive:
                typer.echo(err=True)
            return
        except KeyboardInterrupt:
            if not interactive:
                raise
            if is_second:
                typer.echo(err=True)
                return
            typer.echo("\nCtrl-C again, Ctrl-D or /exit leaves", err=True)
            is_second = True
            continue
        is_second = False
        if not is_unicode(turn):
            raise PromptError("the prompt is not valid UTF-8")
        if turn.strip():
            yield turn


def _read_turn(interactive: bool) -> str:
    turn = _read_line(">>> " if interactive else "")
    if not turn.lstrip().startswith(QUOTES):
        return turn
    turn = turn.lstrip().removeprefix(QUOTES)
    while not turn.rstrip().endswith(QUOTES):
        try:
            turn += "\n" + _read_line("... " if interactive else "")
        except EOFError:
            if interactive:
                raise
            break  # the next read ends the conversation
    return turn.rstrip().removesuffix(QUOTES).strip("\n")


@contextlib.contextmanager
def _signals_are_seen() -> Iterator[None]:
    """While open, a timer interrupts the wait for a key again and again, so that Python looks for other signals.

    Python's readline would sleep on if Ctrl-C came between its prompt and its wait.
    """
    before = signal.signal(signal.SIGALRM, lambda number, frame: None)
    signal.setitimer(signal.ITIMER_REAL, _LOOK_S, _LOOK_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _read_line(prompt: str) -> str:
    """One line without its newline. Raises EOFError: stdin has ended; PromptError: the line is not valid UTF-8."""
    if prompt and sys.stdout.isatty():
        return input(prompt)
    if prompt:  # `input` would write the prompt to stdout, which is a file
        typer.echo(prompt, nl=False, err=True)
    try:
        line = sys.stdin.readline()
    except UnicodeDecodeError:
        raise PromptError("the prompt is not valid UTF-8") from None
    if not line:
        raise EOFError
    return line.removesuffix("\n")
