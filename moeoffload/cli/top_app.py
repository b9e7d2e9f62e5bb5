"""``moeoffload top``: live statistics of a serving host in a terminal."""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import SplitResult, urlsplit

import typer
from rich.console import Console, RenderableType
from rich.live import Live

from moeoffload.cli.options import exit_on_error
from moeoffload.cli.signals import signals_unwind
from moeoffload.cli.top_view import picture
from moeoffload.config import warn_of_misspelt_names
from moeoffload.errors import ServerError, SettingError
from moeoffload.last_resort import answer_within

ANSWER_S: Final = 5.0
LEAST_INTERVAL_S: Final = 0.1
MOST_INTERVAL_S: Final = 60.0
MOST_BYTES: Final = 16 << 20  # of a reply: thousands of layers and servers fit


@exit_on_error()
def top(
    url: Annotated[str, typer.Option("--url", metavar="URL", help="Address of the host.")] = "http://127.0.0.1:8000",
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", metavar="FILE", help="File that holds the host's API key.")
    ] = None,
    tls_ca: Annotated[
        Path | None, typer.Option("--tls-ca", metavar="FILE", help="Certificates that vouch for an https host, PEM.")
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print one picture, of one interval, and exit.", show_default=False)
    ] = False,
    interval_s: Annotated[float, typer.Option("--interval-s", metavar="SECONDS", help="Between two looks.")] = 1.0,
) -> None:
    """Show live what a serving host does: requests, tokens per second, servers, where the time of a step goes."""
    warn_of_misspelt_names()
    if not LEAST_INTERVAL_S <= interval_s <= MOST_INTERVAL_S:
        raise SettingError(f"--interval-s: {interval_s:g} is not allowed; {LEAST_INTERVAL_S:g} to {MOST_INTERVAL_S:g}")
    headers = {}
    if api_key_file is not None:
        from moeoffload.control.credentials import read_token  # gRPC is not imported for --help

        headers["Authorization"] = f"Bearer {read_token(api_key_file, '--api-key-file')}"
    address = _address(url)
    ask = functools.partial(_ask, address, headers, _tls(tls_ca) if address.scheme == "https" else None)
    snapshot = ask()
    console = Console()
    if once:
        time.sleep(interval_s)
        console.print(picture(ask(), url))
        return
    # If stdout is not a terminal, the pictures are printed one after another.
    with contextlib.ExitStack() as stack:
        stack.enter_context(signals_unwind())
        show: Callable[[RenderableType], None] = console.print
        if console.is_terminal:
            live = stack.enter_context(Live(console=console, screen=True, auto_refresh=False))
            show = functools.partial(live.update, refresh=True)
        show(picture(snapshot, url))
        while True:
            time.sleep(interval_s)
            trouble = ""
            try:
                snapshot = ask()
            except ServerError as error:
                trouble = str(error)  # the host may be back at the next request
            show(picture(snapshot, url, trouble))


def _address(url: str) -> SplitResult:
    with contextlib.suppress(ValueError):  # the port is not a number, or a bracket is not closed
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return parts
    raise SettingError(f"--url: {url!r} is not allowed; like http://127.0.0.1:8000")


def _tls(ca: Path | None) -> ssl.SSLContext:
    """The context that checks the host's certificate: by ``ca``, or by this machine's authorities.
    Raises SettingError: ``ca`` holds no certificates."""
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:  # an ssl.SSLError is one
        raise SettingError(f"--tls-ca: {ca} holds no certificates that can be read ({error.strerror})") from None


def _ask(url: SplitResult, headers: dict[str, str], tls: ssl.SSLContext | None) -> dict[str, Any]:
    """The current snapshot. Raises ServerError: no host answers, the key is wrong, or the reply is no snapshot."""
    name = url.geturl().rstrip("/")
    # http.client uses no proxies and follows no redirects: the key is sent only to the given address.
    kind = http.client.HTTPConnection if tls is None else functools.partial(http.client.HTTPSConnection, context=tls)
    client = kind(url.hostname or "", url.port, timeout=ANSWER_S)

    def get() -> tuple[int, bytes]:
        with contextlib.closing(client) as connection:
            connection.request("GET", f"{url.path.rstrip('/')}/stats", headers=headers)
            reply = connection.getresponse()
            return reply.status, reply.read(MOST_BYTES + 1)

    try:
        status, body = answer_within(2 * ANSWER_S, "figures", get)
    except socket.gaierror as error:
        raise ServerError(f"{name}: no machine of that name is known ({error.strerror})") from None
    except ssl.SSLCertVerificationError as error:
        raise ServerError(
            f"{name}: its certificate is not one that --tls-ca vouches for ({error.verify_message})"
        ) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        why = getattr(error, "strerror", None) or str(error) or "timed out"
        raise ServerError(f"{name}: no host answers ({why})") from None
    if status in (401, 403):
        raise ServerError(f"{name}: it wants another API key; give --api-key-file")
    if status != 200:
        raise ServerError(f"{name}: no figures there, it answers {status} to /stats")
    snapshot: Any = None
    if len(body) <= MOST_BYTES:
        with contextlib.suppress(ValueError, RecursionError):
            snapshot = json.loads(body)
    if not isinstance(snapshot, dict) or not {"uptime_s", "requests", "servers", "now"} <= snapshot.keys():
        raise ServerError(f"{name}: /stats there is not of a moeoffload host")
    return snapshot
