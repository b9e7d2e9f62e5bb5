"""The picture that ``moeoffload top`` shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final

from rich import box
from rich.cells import cell_len
from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from moeoffload.errors import ServerError
from moeoffload.serve.figures import LAYER_PARTS, PARTS
from moeoffload.text import one_line

_MIB: Final = 1 << 20
_GIB: Final = 1 << 30
_STATE_COLORS: Final = {"up": "green", "replaced": "yellow"}
_SERVER_COLUMNS: Final = ("busy", "wait a call", "calls/s", "rows/s", "MiB/s", "memory GiB", "warm GiB")
"""The most important first."""
_LEAST_SERVER_COLUMNS: Final = 2
_UNLIMITED: Final = 10_000  # columns
_MOST_LAYERS: Final = 16  # lines shown; if there are more layers, neighbours share a line

Json = dict[str, Any]


def picture(snapshot: Json, url: str, trouble: str = "") -> RenderableType:
    """The picture of ``snapshot``; ``trouble`` is why no newer one could be fetched.
    Raises ServerError: the host has other figures than this program knows."""
    try:
        shown = snapshot["now"]
        parts: list[RenderableType] = [_title(snapshot, url)]
        if trouble:
            parts.append(Text(f"{trouble}; the figures are the last ones", style="bold red"))
        parts += [Columns(_facts(snapshot), padding=(0, 1)), _servers(snapshot), _times(shown)]
        if not shown["layers"]:
            parts.append(Text("no layer was timed: no step has run since the first look", style="dim"))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        told = f"{type(error).__name__}: {error}"
        raise ServerError(f"{url}: the host is of another version, its figures cannot be shown ({told})") from None
    return Group(*parts)


def seconds(value: float | None) -> str:
    """A time with its unit, to three digits."""
    if value is None or value >= 1:
        return "-" if value is None else f"{number(value)} s"
    return f"{number(1000 * value)} ms" if value >= 0.001 or value == 0 else f"{number(1e6 * value)} us"


def number(value: float | None) -> str:
    """Three digits, or all digits before the decimal point."""
    if value is None:
        return "-"
    if value >= 100 or value == 0:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %" if 0 < value < 0.1 else f"{100 * value:.0f} %"


def _memory(bytes_of: Json) -> str:
    """What a process holds of its device, and what that has."""
    return f"{number(bytes_of['reserved_bytes'] / _GIB)} of {number(bytes_of['total_bytes'] / _GIB)}"


def _title(snapshot: Json, url: str) -> Text:
    model, requests = snapshot["model"], snapshot["requests"]
    state = "live" if requests["running"] or requests["waiting"] else "idle: nothing runs"
    names = " · ".join(one_line(model[name]) for name in ("name", "type", "dtype"))
    return Text.assemble(("moeoffload", "bold"), f"  {names} · {url} · up {snapshot['uptime_s']:,.0f} s · {state}")


def _facts(snapshot: Json) -> list[Panel]:
    shown, cache = snapshot["now"], snapshot["cache"]
    panels = {
        "requests": {"tokens/s": number(shown["tokens_per_s"])}
        | {name: f"{count:,}" for name, count in snapshot["requests"].items()},
        "latency, last minute": {
            "to the first token p50": seconds(shown["first_token_s"][0]),
            "to the first token p95": seconds(shown["first_token_s"][1]),
            "between tokens p50": seconds(shown["between_tokens_s"][0]),
            "between tokens p95": seconds(shown["between_tokens_s"][1]),
            "prompt tokens/s": number(shown["prompt_tokens_per_s"]),
            "steps/s": number(shown["steps_per_s"]),
            "rows of a step": number(shown["rows_per_step"]),
        },
        "cache, batches": {
            "cache in use or kept": _percent(shown["cache_use"]),
            "tokens in use": f"{cache['used_tokens']:,}",
            "tokens kept": f"{cache['kept_tokens']:,}",
            "tokens it holds": f"{cache['total_tokens']:,}",
            "prompt tokens reused": _percent(shown["reuse"]),
            "requests in a batch": number(shown["members_per_batch"]),
            "memory of the host, GiB": _memory(snapshot["memory"]),
            "servers lost so far": f"{snapshot['recovery']['lost']:,}",
        },
    }
    found = []
    for title, facts in panels.items():
        table = Table("", "", box=None, show_header=False, pad_edge=False)
        for name, value in facts.items():
            table.add_row(Text(name, style="dim"), Text(value, style="bold"))
        found.append(Panel(table, title=title, title_align="left", border_style="dim"))
    return found


@dataclass(frozen=True)
class _FirstThatFits:
    """The first of ``tables`` whose words all fit into the available width, or the last."""

    tables: Sequence[Table]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for column in (column for table in self.tables for column in table.columns if column.overflow != "fold"):
            texts = (str(column.header), *map(str, column.cells))
            words = texts if column.no_wrap else (word for text in texts for word in text.split())
            column.min_width = max(map(cell_len, words))
        unlimited = options.update(width=_UNLIMITED)
        widths = (Measurement.get(console, unlimited, table).minimum for table in self.tables)
        fitting = (table for table, width in zip(self.tables, widths, strict=True) if width <= options.max_width)
        yield next(fitting, self.tables[-1])


def _table(title: str, *names: str, gap: int = 2) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, gap - 1))
    for number, name in enumerate(names):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    return table


def _servers(snapshot: Json) -> _FirstThatFits:
    """The table of servers; on a narrow terminal it has fewer columns, but full names."""
    shown = [_SERVER_COLUMNS[:n] for n in range(len(_SERVER_COLUMNS), _LEAST_SERVER_COLUMNS - 1, -1)]
    tables = [_table("expert servers", "server", "state", *columns) for columns in shown]
    last = _table("expert servers", "server", "state", *shown[-1])
    last.columns[0].no_wrap, last.columns[0].overflow = False, "fold"
    for table in (*tables, last):
        table.columns[1].no_wrap = False
        for server, load in zip(snapshot["servers"], snapshot["now"]["servers"], strict=True):
            state, told = server["state"], server.get("batches")
            by = f" by {server['computed_by']}" if state == "replaced" else ""
            figures = (
                _percent(load["busy"]),
                seconds(load["wait_s"]),
                *(number(load[name]) for name in ("calls_per_s", "rows_per_s")),
                number(load["bytes_per_s"] / _MIB),
                _memory(told) if told else "-",
                number(told["warm_bytes"] / _GIB if told else None),
            )
            table.add_row(
                Text(one_line(server["address"])),
                Text(one_line(state + by), style=_STATE_COLORS.get(state, "red")),
                *figures[: len(table.columns) - 2],
            )
    return _FirstThatFits([*tables, last])


def _times(shown: Json) -> _FirstThatFits:
    """Where the time of a step goes, and that of one call of each MoE layer."""
    layers = shown["layers"]
    lines = {"a step": shown["step_parts"]}
    size = max(1, -(-len(layers) // _MOST_LAYERS))
    for first in range(0, len(layers), size):
        group = layers[first : first + size]
        name = f"layer {first}" if len(group) == 1 else f"layers {first}-{first + len(group) - 1}"
        lines[name] = {part: fmean(layer[part] for layer in group) for part in LAYER_PARTS}
    used = [part for part in PARTS if any(parts.get(part) for parts in lines.values())]
    tables = []
    for columns, gap in ((PARTS, 2), (PARTS, 1), (used, 1), (used, 1)):
        table = _table("where the time goes", "", *columns, "in all", gap=gap)
        for name, parts in lines.items():
            table.add_row(name, *(seconds(parts.get(part)) for part in columns), seconds(sum(parts.values())))
        tables.append(table)
    for column in tables[-1].columns:  # values wrap to a second line
        column.no_wrap, column.overflow = False, "fold"
    return _FirstThatFits(tables)
