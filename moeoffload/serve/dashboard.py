"""The page of /dashboard: one text without outside resources, put together from the files in page/."""

from __future__ import annotations

import base64
import functools
import hashlib
from importlib import resources
from typing import Final

_FOLDER: Final = "page"
_SCRIPTS: Final = ("draw.js", "view.js")


@functools.cache
def dashboard_page() -> str:
    """HTML that asks ``stats``, relative to its own address, every second and shows the figures.

    Its content security policy lets nothing run, and nothing be asked, but that.
    """
    script = "(() => {\n" + "\n".join(_read(name) for name in _SCRIPTS) + "})();"
    style = _read("dashboard.css")
    page = _read("dashboard.html")
    # The texts go in last: nothing of them is taken for a mark.
    for mark, text in (
        ("{{script-hash}}", _hash(script)),
        ("{{style-hash}}", _hash(style)),
        ("{{style}}", style),
        ("{{script}}", script),
    ):
        page = page.replace(mark, text)
    return page


def _read(name: str) -> str:
    return resources.files(__package__).joinpath(_FOLDER, name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"
