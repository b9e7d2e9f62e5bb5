"""Where the hosts and expert servers of a benchmark compute: its options ``--host-device`` and ``--server-device``."""

from __future__ import annotations

from typing import Annotated, Final

import torch
import typer

from moeoffload.devices import resolve_device
from moeoffload.errors import SettingError

CPU: Final = "cpu"


def _found(name: str, *, last: bool) -> str:
    try:
        return str(resolve_device(name, last=last))
    except (SettingError, RuntimeError) as error:  # torch's of a word that names no device
        raise typer.BadParameter(str(error)) from None


HostDevice = Annotated[
    str,
    typer.Option(
        metavar="DEVICE",
        help="Where hosts compute: cpu, cuda or cuda:N.",
        callback=lambda name: _found(name, last=False),
    ),
]
ServerDevice = Annotated[
    str,
    typer.Option(metavar="DEVICE", help="Where expert servers compute.", callback=lambda name: _found(name, last=True)),
]


def settle(device: torch.device | str) -> None:
    """Waits for what ``device`` was told to compute; a CPU has computed it when the call returns."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
