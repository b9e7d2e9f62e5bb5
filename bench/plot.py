"""Turns results into pages: ``python bench/plot.py``, or ``--markdown`` without charts.

Every JSON file of bench/results that a benchmark wrote becomes bench/results/NAME.md with its tables and, if there is a
chart for its benchmark, docs/images/NAME.png. Between the markers ``<!-- figure: NAME -->`` and ``<!-- end -->`` of the
documentation stands the result's one line, see `headlines`. So no figure of a page is typed.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer
from headlines import headline
from tables import markdown

ROOT = Path(__file__).parents[1]
MARKED = re.compile(r"<!-- figure: (\S+) -->.*?<!-- end -->", re.DOTALL)


def main(
    markdown_only: Annotated[bool, typer.Option("--markdown", help="Write the pages, no charts.")] = False,
    results: Path = ROOT / "bench" / "results",
    docs: Path = ROOT / "docs",
    images: Path = ROOT / "docs" / "images",
) -> None:
    """Write the pages of all results, and their lines into the documentation."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("*.json"))}
    for name, result in found.items():
        (results / f"{name}.md").write_text(f"# {name}\n\n{markdown(result)}\n")

    def quoted(marker: re.Match[str]) -> str:
        name = marker[1]
        if name not in found:
            typer.echo(f"{name}: has no result yet", err=True)
            return marker[0]
        return f"<!-- figure: {name} -->{headline(found[name])}<!-- end -->"

    for page in sorted(docs.glob("*.md")):
        text = page.read_text()
        page.write_text(MARKED.sub(quoted, text))
    if markdown_only:
        return
    try:
        from charts import CHARTS
    except ImportError as error:
        raise SystemExit(f"charts need matplotlib (pip install matplotlib): {error}") from None
    images.mkdir(parents=True, exist_ok=True)
    for name, result in found.items():
        if result["benchmark"] in CHARTS:
            CHARTS[result["benchmark"]](result).savefig(images / f"{name}.png")
            typer.echo(f"{images / name}.png")


if __name__ == "__main__":
    typer.run(main)
