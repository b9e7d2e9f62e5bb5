"""``moeoffload top``: what a serving host does now, in a terminal."""

from __future__ import annotations

import contextlib
import functools
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from moeoffload.cli.options import exit_on_error
from moeoffload.errors import ServerError, SettingError

if TYPE_CHECKING:
    from rich.console import RenderableType

ANSWER_S: Final = 5.0
LEAST_INTERVAL_S: Final = 0.1
MOST_INTERVAL_S: Final = 60.0
MOST_BYTES: Final = 16 << 20
"""Of an answer: thousands of layers and servers fit."""


@exit_on_error()
def top(
    url: Annotated[str, typer.Option("--url", help="Address of the host.")] = "http://127.0.0.1:8000",
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", metavar="FILE", help="File that holds the host's API key.")
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print one picture, of one interval, and exit.", show_default=False)
    ] = False,
    interval_s: Annotated[float, typer.Option("--interval-s", help="Seconds between two looks.")] = 1.0,
) -> None:
    """Show live what a serving host does: requests, tokens per second, servers, where the time of a step goes."""
    from rich.console import Console
    from rich.live import Live

    from moeoffload.cli.top_view import picture

    if not LEAST_INTERVAL_S <= interval_s <= MOST_INTERVAL_S:
        raise SettingError(f"--interval-s: {interval_s:g} is not allowed; {LEAST_INTERVAL_S:g} to {MOST_INTERVAL_S:g}")
    from moeoffload.control.credentials import read_token  # gRPC is not imported for --help

    source = _Source(url, read_token(api_key_file, "--api-key-file") if api_key_file is not None else None)
    snapshot = source.ask()
    console = Console()
    if once:
        time.sleep(interval_s)
        console.print(picture(source.ask(), url))
        return
    # What is no terminal gets one picture after the other.
    with contextlib.ExitStack() as stack:
        show: Callable[[RenderableType], None] = console.print
        if console.is_terminal:
            live = stack.enter_context(Live(console=console, screen=True, auto_refresh=False))
            show = functools.partial(live.update, refresh=True)
        show(picture(snapshot, url))
        while True:
            time.sleep(interval_s)
            trouble = ""
            try:
                snapshot = source.ask()
            except ServerError as error:
                trouble = str(error)  # it may be back at the next look
            show(picture(snapshot, url, trouble))


class _Source:
    """Where snapshots come from."""

    def __init__(self, url: str, key: str | None) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SettingError(f"--url: {url!r} is not allowed; like http://127.0.0.1:8000")
        self._url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._request = urllib.request.Request(f"{self._url}/stats", headers=headers)
        # What a proxy for the outside world does with a key is not ours to know.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects())

    def ask(self) -> dict[str, Any]:
        """The snapshot of now.
        Raises ServerError: the host is not there, wants another key, or answers something else."""
        try:
            with self._opener.open(self._request, timeout=ANSWER_S) as reply:
                body = reply.read(MOST_BYTES + 1)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in (401, 403):
                raise ServerError(f"{self._url}: it wants another API key; give --api-key-file") from None
            raise ServerError(f"{self._url}: no figures there, it answers {error.code} to /stats") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            why = getattr(reason, "strerror", None) or reason
            raise ServerError(f"{self._url}: no host answers ({why})") from None
        return self._checked(body)

    def _checked(self, body: bytes) -> dict[str, Any]:
        snapshot: Any = None
        if len(body) <= MOST_BYTES:
            with contextlib.suppress(ValueError, RecursionError):
                snapshot = json.loads(body)
        if not isinstance(snapshot, dict) or not {"uptime_s", "requests", "servers", "now"} <= snapshot.keys():
            raise ServerError(f"{self._url}: /stats there is not of a moeoffload host")
        return snapshot


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """The key goes to the address that was given and to no other."""

    def redirect_request(self, *_: Any) -> None:
        """Never."""
        return
