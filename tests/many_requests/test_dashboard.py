"""The dashboard in a real browser: it shows the figures of the snapshots, and says when there are none."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from serving_snapshots import SnapshotServer, scripted, serving, with_figures

from moeoffload.serve.dashboard import dashboard_page
from moeoffload.serve.figures import LAYER_PARTS, PARTS

BROWSER = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), "")
needs_browser = pytest.mark.skipif(not BROWSER, reason="no chromium here: apt-get install chromium")
UNITS = {"%": 0.01, "ms": 1e-3, "µs": 1e-6, "s": 1.0, "MiB": 1 << 20, "GiB": 1 << 30}
DIGITS = 0.006
"""Figures are shown with three digits or as whole numbers."""


class Page:
    """What the browser shows after ``seconds`` of its own time, which goes as fast as the server answers."""

    def __init__(self, url: str, seconds: int, folder: Path) -> None:
        command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += [f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", "--window-size=1280,1200"]
        command += [f"--virtual-time-budget={1000 * seconds}", "--dump-dom", url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        self.complaints = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
        self.source = re.sub(r"<(script|style)>.*?</\1>", "", done.stdout, flags=re.S)

    def text(self, name: str) -> str:
        """All text within the element of this id."""
        start = re.search(rf'<(\w+)[^>]*\bid="{name}"[^>]*>', self.source)
        assert start, f"no element {name}"
        rest, depth = self.source[start.end() :], 1
        for tag in re.finditer(rf"<(/?){start.group(1)}\b[^>]*>", rest):
            depth += -1 if tag.group(1) else 1
            if depth == 0:
                return html.unescape(re.sub(r"<[^>]*>", "\n", rest[: tag.start()])).strip()
        raise AssertionError(f"element {name} has no end")

    def hides(self, name: str) -> bool:
        return re.search(rf'<[^>]*\bid="{name}"[^>]*\bhidden=""', self.source) is not None

    def figure(self, name: str) -> float | None:
        return figure(self.text(name))

    def row(self, table: str, head: str) -> list[str]:
        """The cells of the row of ``table`` that has ``head`` in its first."""
        rows = self.text(table).split(f"\n{head}\n")
        assert len(rows) == 2, self.text(table)
        return [cell for cell in rows[1].split("\n") if cell.strip()]


def figure(text: str) -> float | None:
    """The number that a text begins with, in seconds, bytes or as it is."""
    found = re.match(r"([\d,.]+) ?(%|ms|µs|s|MiB|GiB)?", text)
    return float(found.group(1).replace(",", "")) * UNITS.get(found.group(2), 1.0) if found else None


@needs_browser
def test_the_figures_are_those_of_the_snapshots(tmp_path: Path) -> None:
    snapshots = scripted(64, n_layers=5, model="<img src=x onerror=alert(1)>")
    for server in snapshots[0]["servers"] + snapshots[4]["servers"][:1]:
        del server["batches"]  # the first looks come before servers are asked
    snapshots = with_figures(snapshots)
    last, shown = snapshots[-1], snapshots[-1]["now"]
    with serving(SnapshotServer(snapshots)) as host:
        page = Page(f"{host.url}/dashboard", 70, tmp_path)
    assert page.complaints == []
    assert host.asked >= len(snapshots)
    wanted: dict[str, float | None] = {
        "tokens-per-s": shown["tokens_per_s"],
        "prompt-per-s": shown["prompt_tokens_per_s"],
        "steps-per-s": shown["steps_per_s"],
        "ttft-p50": shown["first_token_s"][0],
        "ttft-p95": shown["first_token_s"][1],
        "itl-p50": shown["between_tokens_s"][0],
        "itl-p95": shown["between_tokens_s"][1],
        "cache-use": shown["cache_use"],
        "reuse": shown["reuse"],
        "step": shown["step_s"],
        "rows-per-step": shown["rows_per_step"],
    }
    wanted["members-per-batch"] = shown["members_per_batch"]
    wanted |= {f"part-{part}": shown["step_parts"][part] for part in PARTS}
    for name, value in wanted.items():
        assert page.figure(name) == pytest.approx(value, rel=DIGITS, abs=0.006), name
    for name, count in last["requests"].items():
        assert page.text(name) == str(count)
    for server, load in zip(last["servers"], shown["servers"], strict=True):
        state, busy, calls, rows, mib, wait, *_ = page.row("servers", server["address"])
        assert state.split()[1] == server["state"]
        for cell, name in {busy: "busy", calls: "calls_per_s", rows: "rows_per_s", wait: "wait_s"}.items():
            assert figure(cell) == pytest.approx(load[name], rel=DIGITS, abs=0.006)
        assert figure(mib) == pytest.approx(load["bytes_per_s"] / (1 << 20), rel=DIGITS)
    for number, layer in enumerate(shown["layers"]):
        cells = page.row("layer-table", str(number))[: len(LAYER_PARTS)]
        for cell, part in zip(cells, LAYER_PARTS, strict=True):
            assert figure(cell) == pytest.approx(layer[part], rel=DIGITS)
    assert "<img" not in page.source  # what a server says is text
    assert "<img src=x" in page.text("model")
    assert "replaced by this host" in page.text("servers")
    assert "live, 1 of 2 servers away" in page.text("status")


@needs_browser
def test_it_says_when_nothing_runs(tmp_path: Path) -> None:
    snapshot = scripted(1, n_layers=2)[0]
    snapshot["requests"] |= {"running": 0, "waiting": 0}
    snapshot["servers"] = []
    [snapshot] = with_figures([snapshot])
    with serving(SnapshotServer([snapshot])) as host:
        page = Page(f"{host.url}/dashboard", 3, tmp_path)
    assert page.complaints == []
    assert "nothing runs" in page.text("status")
    assert not page.hides("no-servers")
    assert "No layer was timed" in page.text("no-layers")


@needs_browser
def test_without_a_key_it_asks_for_one_and_takes_that_of_the_address(tmp_path: Path) -> None:
    with serving(SnapshotServer(with_figures(scripted(3, n_layers=2)), key="a key&more")) as host:
        refused = Page(f"{host.url}/dashboard", 3, tmp_path / "without")
        assert host.asked == 0
        allowed = Page(f"{host.url}/dashboard?key=a%20key%26more", 3, tmp_path / "with")
    assert not refused.hides("key-form")
    assert refused.hides("main")
    assert allowed.hides("key-form")
    assert "live" in allowed.text("status")


@needs_browser
def test_it_says_that_the_server_cannot_be_reached(tmp_path: Path) -> None:
    class Ending(SnapshotServer):
        def answer(self, path: str, authorization: str) -> tuple[int, str, bytes]:
            code, kind, body = super().answer(path, authorization)
            return (code, kind, body) if self.asked < 3 else (503, "text/plain", b"")

    with serving(Ending(with_figures(scripted(4, n_layers=2)))) as host:
        page = Page(f"{host.url}/dashboard", 8, tmp_path)
    assert "not reachable" in page.text("status")
    assert "cannot be reached" in page.text("notice")
    assert "503" in page.text("notice")
    assert not page.hides("main")  # the last figures stay


def test_the_page_asks_for_nothing_outside() -> None:
    page = dashboard_page()
    assert "{{" not in page
    assert set(re.findall(r"https?://[^\s\"']+", page)) == {"http://www.w3.org/2000/svg"}  # the name of SVG
    assert not re.findall(r"<(?:link|script|img|iframe)[^>]+(?:src|href)=\"(?!data:,)", page)
    assert "default-src 'none'" in page
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", page)
