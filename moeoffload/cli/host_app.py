"""``moeoffload``: runs models whose routed experts live on expert servers."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from moeoffload.cli.chat_app import chat
from moeoffload.cli.display import Display
from moeoffload.cli.keys_app import app as keys_app
from moeoffload.cli.opening import open_with_progress, report_run
from moeoffload.cli.options import (
    Chat,
    Command,
    CommandGroup,
    ModelName,
    Quiet,
    Revision,
    Verbose,
    version_option,
    with_settings,
)
from moeoffload.cli.serve_app import serve
from moeoffload.cli.signals import leave_at_once_on_ctrl_c
from moeoffload.cli.top_app import top
from moeoffload.config import HostSettings
from moeoffload.errors import PromptError, SettingError
from moeoffload.text import is_unicode, one_line

app = typer.Typer(cls=CommandGroup, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def moeoffload(version: bool = version_option("moeoffload")) -> None:
    """Run Mixture-of-Experts models with their routed experts on other devices and machines."""


@app.command(cls=Command)
@with_settings(HostSettings)
def run(
    settings: HostSettings,
    model: ModelName,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt", metavar="TEXT", help="Text to complete; - reads it from stdin. May be given several times."
        ),
    ] = None,
    prompt_file: Annotated[
        str | None, typer.Option("--prompt-file", metavar="FILE", help="File that holds the prompt; - is stdin.")
    ] = None,
    template: Chat = True,
    revision: Revision = None,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    """Answer prompts, streaming the text on stdout; everything else goes to stderr."""
    prompts = _read_prompts(prompt or [], prompt_file)
    display = Display(settings, verbose=verbose, quiet=quiet)
    with open_with_progress(model, settings, revision, display) as offloaded:
        from moeoffload.host.generate import generate, prepare_prompt

        try:
            prepared = [prepare_prompt(offloaded, text, chat=template) for text in prompts]
            if verbose:
                offloaded.recorder.listen()
            for text, ready in zip(prompts, prepared, strict=True):
                if len(prompts) > 1:
                    display.say(f"> {one_line(text.strip(), 100)}")
                stdout = sys.stdout
                with display.answering() as watch:
                    answer = generate(offloaded, ready, stdout, watch=watch)
                display.answered(answer, offloaded)
        finally:
            report_run(offloaded, display)


@app.command("profile", cls=Command)
@with_settings(HostSettings)
def profile_routing(
    settings: HostSettings,
    model: ModelName,
    prompts: Annotated[str, typer.Option("--prompts", metavar="FILE", help="File with one prompt on each line.")],
    output: Annotated[Path, typer.Option("--output", metavar="FILE", help="Where the statistics go.")] = Path(
        "routing-stats.json"
    ),
    template: Chat = True,
    revision: Revision = None,
) -> None:
    """Count which routed experts prompts use; `--routing-stats` then keeps the most used ones on the host."""
    lines = [line for line in _read_prompts([], prompts, "--prompts")[0].splitlines() if line.strip()]
    if output.is_dir() or not os.access(output if output.exists() else output.parent, os.W_OK):
        raise SettingError(f"--output: {output} cannot be written")
    display = Display(settings)
    with open_with_progress(model, settings, revision, display) as offloaded:
        from moeoffload.host.generate import generate, prepare_prompt
        from moeoffload.host.routing import RoutingCounter

        counter = RoutingCounter(offloaded.checkpoint)
        offloaded.dispatcher.on_routes = counter.count
        with display.counting("prompts", len(lines)) as advance:
            for text in lines:
                generate(offloaded, prepare_prompt(offloaded, text, chat=template), io.StringIO())
                advance()
        try:
            counter.write(output)
        except OSError as error:
            raise SettingError(f"--output: {output} cannot be written ({error.strerror})") from None
        report_run(offloaded, display)
    typer.echo(f"{counter.n_tokens} tokens of {len(lines)} prompts counted into {output}", err=True)


for _command in (chat, serve, top):
    app.command(cls=Command)(_command)
app.add_typer(keys_app, name="keys")


def _read_prompts(prompts: list[str], prompt_file: str | None, option: str = "--prompt-file") -> list[str]:
    """The prompts of a command line; ``-`` stands for stdin, ``option`` is the name of the file's option in errors.
    Raises SettingError: none was given, or the file or stdin cannot be read; PromptError: one is empty or not UTF-8."""
    texts = [_read_stdin() if text == "-" else text for text in prompts]
    if prompt_file == "-":
        texts.append(_read_stdin())
    elif prompt_file is not None:
        try:
            texts.append(Path(prompt_file).read_text(encoding="utf-8").rstrip("\n"))
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise SettingError(f"{option}: {prompt_file!r} cannot be read ({why})") from None
    if not texts:
        raise SettingError("no prompt: give --prompt TEXT, --prompt-file FILE, or --prompt - to read stdin")
    for text in texts:
        if not text.strip():
            raise PromptError("the prompt is empty")
        if not is_unicode(text):
            raise PromptError("the prompt is not valid UTF-8")
    return texts


def _read_stdin() -> str:
    if sys.stdin is None:
        raise SettingError("the prompt is to come from stdin, which is closed")
    try:
        return sys.stdin.read().rstrip("\n")  # the newline at the end of a file is not part of the prompt
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"the prompt cannot be read from stdin ({error})") from None


def main() -> None:
    """Runs the command line."""
    leave_at_once_on_ctrl_c()
    app()


if __name__ == "__main__":
    main()
