"""``moeoffload chat``: a conversation in a terminal, or with the lines of stdin as its turns."""

from __future__ import annotations

import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Final

import typer

from moeoffload.cli.display import Display
from moeoffload.cli.opening import open_with_progress, report_run
from moeoffload.cli.options import ModelName, Quiet, Revision, Verbose, print_error, with_settings
from moeoffload.cli.turns import QUOTES, read_turns
from moeoffload.config import HostSettings
from moeoffload.errors import PromptError, SettingError

if TYPE_CHECKING:
    from moeoffload.host.generate import Conversation
    from moeoffload.host.session import OffloadedModel

_COMMAND: Final = re.compile(r"/([a-z]+)(?:\s+(.*))?\s*", re.DOTALL)
_HELP: Final = f"""\
/clear         forget what was said
/system TEXT   what the model is told first; without TEXT nothing
/exit          leave; so does Ctrl-D
{QUOTES}            begins and ends a turn of several lines
Ctrl-C         ends an answer; twice at the prompt leaves"""


@with_settings(HostSettings)
def chat(
    settings: HostSettings,
    model: ModelName,
    system: Annotated[str, typer.Option("--system", metavar="TEXT", help="What the model is told first.")] = "",
    revision: Revision = None,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Talk with a model: answers are streamed on stdout, and only what is new in a turn is computed.

    /help tells what else can be typed. If stdin is no terminal, each of its lines is a turn.
    """
    if sys.stdin is None:
        raise SettingError("what is said is to come from stdin, which is closed")
    display, interactive = Display(settings, verbose=verbose, quiet=quiet), sys.stdin.isatty()
    with open_with_progress(model, settings, revision, display) as offloaded:
        from moeoffload.host.generate import Conversation

        conversation = Conversation(offloaded, system)
        if verbose:
            offloaded.recorder.listen()
        if not offloaded.tokenizer.chat_template:
            display.say(f"{model} has no chat template: it gets plain text, in which each answer ends a line")
        if interactive:
            display.say("/help for help, Ctrl-D to leave")
        try:
            for turn in read_turns(interactive=interactive):
                command = _COMMAND.fullmatch(turn)
                if command is None:
                    _answer(turn, conversation, offloaded, display, interactive)
                elif command[1] == "exit":
                    break
                else:
                    typer.echo(_obey(command[1], command[2] or "", conversation), err=True)
        finally:
            report_run(offloaded, display)


def _obey(command: str, text: str, conversation: Conversation) -> str:
    """Runs a command that the user typed with a slash; returns the text to show."""
    if command == "clear":
        conversation.clear()
        return "forgotten"
    if command == "system":
        conversation.system = text.strip()
        return "the model is told this first" if conversation.system else "the model is told nothing first"
    return _HELP if command == "help" else f"there is no /{command}; /help tells what there is"


def _answer(
    text: str, conversation: Conversation, offloaded: OffloadedModel, display: Display, interactive: bool
) -> None:
    from moeoffload.host.generate import StoppedError

    stdout = sys.stdout  # a progress bar replaces sys.stdout
    try:
        with _stopped_by_ctrl_c(interactive) as should_stop, display.answering(should_stop) as watch:
            answer = conversation.ask(text, stdout, watch)
    except StoppedError:
        display.say("stopped before the answer began")
    except PromptError as error:
        if not interactive:
            raise
        print_error(error)
    else:
        display.answered(answer, offloaded)


@contextmanager
def _stopped_by_ctrl_c(interactive: bool) -> Iterator[Callable[[], bool]]:
    """Yields a function that returns whether Ctrl-C was pressed; a second Ctrl-C raises KeyboardInterrupt as usual."""
    stopped = threading.Event()
    if not interactive:
        yield stopped.is_set
        return

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt
        stopped.set()

    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield stopped.is_set
    finally:
        signal.signal(signal.SIGINT, previous)
