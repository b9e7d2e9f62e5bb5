"""The picture that ``moeoffload top`` shows."""

from __future__ import annotations

from typing import Any, Final

from rich import box
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from moeoffload.serve.figures import LAYER_PARTS, PARTS
from moeoffload.text import one_line

_MIB: Final = 1 << 20
_COLORS: Final = {
    "dense": "blue", "pack": "red", "wire": "cyan", "queue": "yellow", "compute": "magenta", "local": "green",
    "combine": "bright_magenta", "other": "bright_black",
}  # fmt: skip
_LETTERS: Final = {
    "dense": "d", "pack": "p", "wire": "w", "queue": "q", "compute": "C", "local": "L", "combine": "c", "other": "o",
}  # fmt: skip
"""What a bar is made of, so that it can be read without colours."""
_STATE_COLORS: Final = {"up": "green", "replaced": "yellow", "lost": "red"}
_BAR_WIDTH: Final = 48
_MOST_LAYERS: Final = 16
"""Shown at once; of more layers neighbours share a line."""


Json = dict[str, Any]


def picture(snapshot: Json, url: str, trouble: str = "") -> RenderableType:
    """What a host says in ``snapshot``; ``trouble`` is why a newer one could not be had."""
    shown = snapshot["now"]
    parts: list[RenderableType] = [_title(snapshot, url)]
    if trouble:
        parts.append(Text(f"{trouble}; the figures are the last ones", style="bold red"))
    parts += [
        Columns([_requests(snapshot), _latency(shown), _cache(snapshot)], padding=(0, 1)),
        _servers(snapshot),
        _step(shown),
        _layers(shown),
    ]
    return Group(*parts)


def seconds(value: float | None) -> str:
    """A time with its unit, three digits."""
    if value is None:
        return "-"
    if value >= 1:
        return f"{number(value)} s"
    return f"{number(1000 * value)} ms" if value >= 0.001 or value == 0 else f"{number(1e6 * value)} us"


def number(value: float | None) -> str:
    """Three digits, or all before the point."""
    if value is None:
        return "-"
    if value >= 100 or value == 0:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %" if 0 < value < 0.1 else f"{100 * value:.0f} %"


def _title(snapshot: Json, url: str) -> Text:
    model, requests = snapshot["model"], snapshot["requests"]
    state = "live" if requests["running"] or requests["waiting"] else "idle: nothing runs"
    names = " · ".join(one_line(model[name]) for name in ("name", "type", "dtype"))
    about = f"  {names} · {url} · up {snapshot['uptime_s']:,.0f} s · "
    return Text.assemble(("moeoffload", "bold"), about, (state, "bold green" if state == "live" else "bold"))


def _facts(title: str, facts: dict[str, str]) -> Panel:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(justify="right", style="bold")
    for name, value in facts.items():
        table.add_row(name, Text(value))
    return Panel(table, title=title, title_align="left", box=box.ROUNDED, border_style="dim")


def _requests(snapshot: Json) -> Panel:
    counts = {name: f"{count:,}" for name, count in snapshot["requests"].items()}
    return _facts("requests", {"tokens/s": number(snapshot["now"]["tokens_per_s"])} | counts)


def _latency(shown: Json) -> Panel:
    facts = {
        "to the first token p50": seconds(shown["first_token_s"][0]),
        "to the first token p95": seconds(shown["first_token_s"][1]),
        "between tokens p50": seconds(shown["between_tokens_s"][0]),
        "between tokens p95": seconds(shown["between_tokens_s"][1]),
        "prompt tokens/s": number(shown["prompt_tokens_per_s"]),
        "steps/s": number(shown["steps_per_s"]),
        "rows of a step": number(shown["rows_per_step"]),
    }
    return _facts("latency, last minute", facts)


def _cache(snapshot: Json) -> Panel:
    cache, shown = snapshot["cache"], snapshot["now"]
    facts = {
        "cache in use or kept": _percent(shown["cache_use"]),
        "tokens in use": f"{cache['used_tokens']:,}",
        "tokens kept": f"{cache['kept_tokens']:,}",
        "tokens it holds": f"{cache['total_tokens']:,}",
        "prompt tokens reused": _percent(shown["reuse"]),
        "requests in a batch": number(shown["members_per_batch"]),
        "servers lost so far": f"{snapshot['recovery']['lost']:,}",
    }
    return _facts("cache, batches", facts)


def _servers(snapshot: Json) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="expert servers", title_justify="left")
    for name in ("server", "state"):
        table.add_column(name)
    for name in ("busy", "calls/s", "rows/s", "MiB/s", "wait a call"):
        table.add_column(name, justify="right")
    for server, load in zip(snapshot["servers"], snapshot["now"]["servers"], strict=True):
        state = server["state"]
        by = f" by {server['computed_by']}" if state == "replaced" else ""
        table.add_row(
            Text(one_line(server["address"])),
            Text(one_line(state + by), style=_STATE_COLORS.get(state, "red")),
            _percent(load["busy"]),
            number(load["calls_per_s"]),
            number(load["rows_per_s"]),
            number(load["bytes_per_s"] / _MIB),
            seconds(load["wait_s"]),
        )
    return table


def _step(shown: Json) -> Group:
    total = sum(shown["step_parts"].values())
    line = Text(f"a step takes {seconds(shown['step_s'])}  ", style="bold")
    line.append_text(_bar(shown["step_parts"], total, _BAR_WIDTH))
    legend = Text()
    for part in PARTS:
        legend.append(_LETTERS[part], style=f"bold {_COLORS[part]}")
        legend.append(f" {part} {seconds(shown['step_parts'][part])}   ")
    return Group(line, legend)


def _layers(shown: Json) -> RenderableType:
    if not shown["layers"]:
        return Text("no layer was timed: no step has run while somebody looked", style="dim")
    n = len(shown["layers"])
    size = -(-n // _MOST_LAYERS)
    groups = [(first, min(n, first + size)) for first in range(0, n, size)]
    means = [
        {part: sum(layer[part] for layer in shown["layers"][first:end]) / (end - first) for part in LAYER_PARTS}
        for first, end in groups
    ]
    longest = max(sum(mean.values()) for mean in means)
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", style="dim")
    table.add_column()
    table.add_column(justify="right")
    for (first, end), mean in zip(groups, means, strict=True):
        name = f"layer {first}" if end == first + 1 else f"layers {first}-{end - 1}"
        table.add_row(name, _bar(mean, longest, _BAR_WIDTH), seconds(sum(mean.values())))
    return table


def _bar(parts: dict[str, float], longest: float, width: int) -> Text:
    """Letters in proportion; rounded at the edges of the parts, so that the whole is as long as it should be."""
    bar = Text()
    done = 0.0
    for part, value in parts.items():
        before, done = done, done + value
        n = round(width * done / longest) - round(width * before / longest) if longest else 0
        bar.append(_LETTERS[part] * n, style=f"black on {_COLORS[part]}")
    return bar
