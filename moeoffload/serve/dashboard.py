"""The page of /dashboard: one HTML text without external resources, assembled from the files in page/."""

from __future__ import annotations

import base64
import functools
import hashlib
from importlib import resources


@functools.cache
def dashboard_page() -> str:
    """HTML that polls ``stats``, relative to its own address, every second and shows the figures.

    Its content security policy allows only this script and only these requests.
    """
    script = "(() => {\n" + "\n".join(_read(name) for name in ("draw.js", "view.js")) + "})();"
    style = _read("dashboard.css")
    page = _read("dashboard.html")
    # Style and script are inserted last, so that no mark is replaced inside them.
    for mark, text in (
        ("{{script-hash}}", _hash(script)),
        ("{{style-hash}}", _hash(style)),
        ("{{style}}", style),
        ("{{script}}", script),
    ):
        page = page.replace(mark, text)
    return page


def _read(name: str) -> str:
    return resources.files(__package__).joinpath("page", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"
