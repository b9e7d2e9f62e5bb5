"""Turns results into charts and tables: ``python bench/plot.py``, or ``--markdown`` for the tables alone.

Every JSON file of bench/results/ that a benchmark wrote becomes docs/images/NAME.png, if there is a chart for its
benchmark, and the tables between the markers ``<!-- measured: NAME -->`` and ``<!-- end: NAME -->`` of
docs/performance.md, where NAME is the file's name without ending.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from tables import insert, markdown, marked

ROOT = Path(__file__).parents[1]


def main(
    markdown_only: Annotated[
        bool, typer.Option("--markdown", help="Write the tables into the page, no charts.")
    ] = False,
    results: Path = ROOT / "bench" / "results",
    page: Path = ROOT / "docs" / "performance.md",
    images: Path = ROOT / "docs" / "images",
) -> None:
    """Write charts and tables of all results."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("*.json"))}
    text = page.read_text()
    for name in marked(text):
        if name in found:
            text = insert(text, name, markdown(found[name]))
    page.write_text(text)
    for name in sorted(found.keys() ^ set(marked(text))):
        typer.echo(f"{name}: {'has no place in the page' if name in found else 'has no result yet'}", err=True)
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
