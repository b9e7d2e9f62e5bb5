"""``moeoffload keys``: certificates for servers on other machines."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from moeoffload.cli.options import Command, CommandGroup, exit_on_error
from moeoffload.config import bracketed

app = typer.Typer(cls=CommandGroup, no_args_is_help=True, help="Make the certificates that two machines need.")


@app.command("new", cls=Command)
@exit_on_error()
def new(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the files go; nothing in it is replaced.")],
    name: Annotated[
        list[str] | None,
        typer.Option(
            "--name",
            metavar="ADDRESS",
            help="Host name or address of the server, as hosts write it; may be given again.",
        ),
    ] = None,
) -> None:
    """Make a private CA, a server and a host certificate, and print the commands that use them."""
    from moeoffload.cli.key_files import VALID, make_keys

    subjects = make_keys(folder, name or [])
    where = shlex.quote(str(folder))
    listen = f"{bracketed(name[0] if name else subjects[3])}:50051"
    typer.echo(
        f"# {folder}: certificates for {VALID.days} days; the server's is for {', '.join(subjects)}\n"
        f"# on the server's machine, with ca.pem, server.pem and server.key:\n"
        f"moeoffload-expert --listen {listen} --tls-cert {where}/server.pem --tls-key {where}/server.key "
        f"--client-ca {where}/ca.pem --model MODEL\n"
        f"# on the host's machine, with ca.pem, host.pem and host.key (copy them over a channel you trust):\n"
        f"moeoffload run MODEL --experts {listen} --tls-ca {where}/ca.pem --tls-cert {where}/host.pem "
        f"--tls-key {where}/host.key --prompt TEXT"
    )
