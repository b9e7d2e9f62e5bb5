"""Turns a settings model into command line options, and errors into one line and an exit code."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from moeoffload import __version__
from moeoffload.cli.signals import EXIT_INTERRUPTED
from moeoffload.config import SettingInfo, SettingsBase
from moeoffload.config.base import ENV_PREFIX
from moeoffload.errors import MoeOffloadError, SettingError, SystemLimitError

EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE

ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="Folder of a transformers checkpoint, an id of the Hugging Face hub, or a GGUF file."
    ),
]
Revision = Annotated[str | None, typer.Option("--revision", metavar="NAME", help="Branch, tag or commit of a hub id.")]
Chat = Annotated[bool, typer.Option("--chat/--no-chat", help="Put prompts into the model's chat template, if any.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Log what happens, on stderr, and show the report as tables.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no figures on stderr.")]
_WIDEST_METAVAR = 13  # a wider one would cut the names of options at 80 columns; the help says what it would say

_log = logging.getLogger(__name__)

# gRPC's C library would write its own lines to stderr for errors that we report anyway.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")


class Command(TyperCommand):
    """A command in whose help flags have no placeholder."""

    def get_params(self, ctx: Any) -> list[Any]:
        """See typer."""
        return _without_placeholders(super().get_params(ctx))


class CommandGroup(TyperGroup):
    """As `Command`, for a program with several commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        """See typer."""
        return _without_placeholders(super().get_params(ctx))


def _without_placeholders(parameters: list[Any]) -> list[Any]:
    """Has typer write nothing where it would write <bool>."""
    for each in parameters:
        if getattr(each, "is_bool_flag", False):
            each.metavar = ""
    return parameters


def with_settings(model: type[SettingsBase]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one option for each setting of ``model``, and pass it the checked object.

    The command's parameter ``settings`` receives the object; its other parameters stay its own options and arguments.
    Options reach the model as typed text, so that the model alone decides what is allowed. Errors end the command as
    in `exit_on_error`.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters
        names = [info.name for info in model.infos()]

        @functools.wraps(command)
        @exit_on_error()
        def with_options(**values: Any) -> None:
            del values["help_all"]
            typed = {name: values.pop(name, None) for name in names}
            command(settings=model.load(typed), **values)

        parameters = [parameter for name, parameter in own.items() if name != "settings"]
        parameters += [_option(info) for info in model.infos()] + [_help_all(names)]
        # typer reads both: the signature for order and defaults, the annotations for types.
        with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return with_options

    return decorate


def version_option(program: str) -> Any:
    """The default of a ``--version`` parameter, which prints one line and ends the command."""

    def show(wanted: bool) -> None:
        if wanted:
            typer.echo(f"{program} {__version__}")
            raise typer.Exit

    return typer.Option(False, "--version", help="Print the version and exit.", callback=show, is_eager=True)


@contextlib.contextmanager
def exit_on_error() -> Iterator[None]:
    """End a command cleanly: one line for an expected error, one word on Ctrl-C, nothing on a closed pipe.

    Works as ``with exit_on_error():`` and as the decorator ``@exit_on_error()``.
    """
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()  # so that a closed pipe raises here and not while the interpreter shuts down
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except BrokenPipeError:
        _discard_stdout()
        raise typer.Exit(EXIT_BROKEN_PIPE) from None
    except (MoeOffloadError, OSError, MemoryError, RuntimeError) as raised:
        error = raised if isinstance(raised, MoeOffloadError) else SystemLimitError.from_exception(raised)
        if error is None:
            raise
        _log.debug("where the error came from", exc_info=True)
        print_error(error)
        raise typer.Exit(error.exit_code) from None


def _option(info: SettingInfo) -> inspect.Parameter:
    is_wide = len(info.metavar) > _WIDEST_METAVAR
    hint = f"one of {info.metavar.replace('|', ', ')}" if is_wide else info.hint
    option = typer.Option(
        f"{info.flag}/--no-{info.flag.removeprefix('--')}" if info.is_boolean else info.flag,
        help=info.description + (f" {hint[0].upper()}{hint[1:]}." if hint else ""),
        show_default=info.default if info.default != "none" else False,
        metavar=None if info.is_boolean else "WORD" if is_wide else info.metavar,
        rich_help_panel=info.panel,
        hidden=not info.is_common,
    )
    annotation: Any = Annotated[bool | None, option] if info.is_boolean else Annotated[str | None, option]
    return inspect.Parameter(info.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _help_all(names: list[str]) -> inspect.Parameter:
    """The option that shows help with all settings ``names``; ``--help`` shows only the common ones."""

    def show(context: typer.Context, wanted: bool) -> None:
        if wanted:
            for option in context.command.params:
                option.hidden = option.hidden and option.name not in names  # type: ignore[attr-defined]
            context.get_help()  # prints the help
            raise typer.Exit

    words = f"Show all settings. Each can be given in the environment, too: {ENV_PREFIX} and its name in capitals."
    option = typer.Option("--help-all", help=words, callback=show, is_eager=True, show_default=False)
    return inspect.Parameter(
        "help_all", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, option]
    )


def print_error(error: MoeOffloadError) -> None:
    """Writes an error to stderr, in red on a terminal unless NO_COLOR is set."""
    message = f"error: {error}"
    if isinstance(error, SettingError):  # each line is a separate complaint; other errors may contain a table
        message = message.replace("\n", "\nerror: ")
    typer.secho(message, fg=None if os.environ.get("NO_COLOR") else typer.colors.RED, err=True)


def _discard_stdout() -> None:
    """Discards buffered output; at exit the interpreter would complain when it flushes into a closed pipe."""
    with contextlib.suppress(OSError, ValueError):  # stdout may not be a real file
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)
